"""The data that passes between stages. One home, no torch.

A *prompt* is issued once and answered by ``n`` responses. A *response* may span several turns: the policy writes, the
environment inserts an observation, the policy goes on. All of it is one token sequence, ``prompt_ids`` followed by
``response_ids``; text is never tokenised a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from brace_rl.tasks.base import Problem

NOT_A_POLICY_TOKEN = -1
"""Value of ``versions`` at tokens the policy did not sample."""


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else (not on process, order or ``PYTHONHASHSEED``)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class SamplingParams:
    """The distribution tokens are drawn from: logits / temperature, then top-k, then top-p, then renormalised.

    ``temperature = 0`` is greedy decoding (evaluation only; its log-probs are those of the untempered policy).
    ``top_k = 0`` and ``top_p = 1`` keep every token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off, so that the kept set must be recorded."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


@dataclass(frozen=True)
class GenerationRequest:
    """One turn to be generated.

    Attributes:
        session: names the response this turn belongs to. A later turn of the same session carries the whole token
            sequence so far; an engine may reuse what it cached for the prefix.
        token_ids: the whole context: prompt, earlier turns, observations.
        max_new_tokens: at least 1.
        seed: of the session. The draw for the token at absolute position ``i`` of the sequence depends on
            ``(seed, i)`` alone, never on batching, process or history.
        stop: the turn ends right after the token that completes one of these texts.
        stop_token_ids: the turn ends right after one of these tokens (end of sequence among them).
    """

    session: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass
class Generation:
    """One finished turn; all lists have one entry per sampled token, the stopping token included.

    Attributes:
        logprobs: of the sampled token under the distribution it was sampled from.
        versions: weight version that sampled it; several may occur in one turn.
        entropies: of the full distribution at the sampling temperature before any top-k or top-p cut, in nats.
        kept_ids: token ids that survived top-k and top-p, per token; None when nothing was cut.
        finish_reason: "stop" (a stop text or token) or "length".
    """

    session: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] | None = None
    finish_reason: str = "length"


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt to be answered ``samples`` times.

    Attributes:
        index: issue number, 0, 1, 2, ...; unique in a run and the key of the ledger.
        issued_version: newest weights the engine had been sent when the prompt was issued.
        sampling, max_response_tokens: as configured for training, or for an evaluation.
    """

    index: int
    problem: Problem
    samples: int
    issued_version: int
    sampling: SamplingParams
    max_response_tokens: int
    seed: int


@dataclass
class Trajectory:
    """One finished response.

    Every list below ``prompt_ids`` has one entry per response token, tool output included.

    Attributes:
        policy_mask: True where the policy sampled the token.
        behavior_logprobs: log-prob under the distribution the token was sampled from; 0.0 (never read) elsewhere.
        behavior_entropies: entropy of that distribution before top-k/top-p; 0.0 (never read) elsewhere.
        versions: weight version that sampled the token; NOT_A_POLICY_TOKEN elsewhere.
        rewards: reward received on emitting the token; always at a policy token.
        kept_ids: per response token the ids that survived top-k/top-p (empty at non-policy tokens), or None.
        truncated: cut at the length limit; not a termination the environment decided.
        success: what the task counts as solved.
        info: figures the environment reports (turns, tool errors, ...), averaged into the metrics.
        excluded: the environment could not judge it: no token is the policy's, and it counts in no mean.
    """

    request_index: int
    sample_index: int
    problem_id: str
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    behavior_entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] | None = None
    truncated: bool = False
    success: bool = False
    turns: int = 0
    info: Mapping[str, float] = field(default_factory=dict)
    excluded: bool = False

    @property
    def reward(self) -> float:
        """Sum of the rewards."""
        return sum(self.rewards)

    @property
    def policy_versions(self) -> list[int]:
        """Versions of the policy tokens alone."""
        return [v for v, is_policy in zip(self.versions, self.policy_mask, strict=True) if is_policy]


@dataclass
class RolloutGroup:
    """All responses to one prompt, in order of ``sample_index``."""

    request: RolloutRequest
    trajectories: list[Trajectory]

    @property
    def oldest_version(self) -> int:
        """Smallest weight version among all policy tokens of the group."""
        return min(min(t.policy_versions, default=self.request.issued_version) for t in self.trajectories)
