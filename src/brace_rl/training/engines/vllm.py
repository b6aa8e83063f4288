"""vLLM as the engine: its own scheduler, paged cache and kernels behind the contract of every engine.

It runs in this process and is stepped by it, so weights change between two tokens and never beside one: they are copied
from this process's memory, no file or message in between.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from brace_rl.errors import BraceError, ModelError
from brace_rl.training.engines.base import Engine
from brace_rl.training.engines.model import max_positions
from brace_rl.training.engines.stopping import StopRule
from brace_rl.training.types import Generation, GenerationRequest, derive_seed

_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""What vLLM reads from the environment: run in this process, report nothing to its makers, log what matters."""

_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_SEED_BITS = 63


@dataclass
class _Turn:
    """A turn that vLLM works on, perhaps as its second or later request: each weight update makes a new one."""

    request: GenerationRequest
    max_new_tokens: int
    stop: StopRule
    result: Generation


class VLLMEngine(Engine):
    """Generates turns with vLLM.

    On a weight update every turn in flight is taken out of vLLM, the weights are replaced in place, the prefix cache is
    emptied, and the turns go back in with the tokens they have as part of their prompt.

    Two things differ from the embedded engine. A draw depends on the seed and on where in the sequence vLLM began to
    work on the turn, not on the position alone: results repeat for the same calls, but a turn that met a weight update
    goes on with other draws than one that did not. And entropies are NaN, since vLLM reports none; cut samplings
    (top-p, top-k) are refused, since it does not say which tokens were left in.

    Args:
        model_dir: model folder or hub name of architecture and first weights.
        tokenizer: its tokenizer; decodes sampled tokens to look for stop texts.
        dtype: of weights and computation, as ``torch`` spells it.
        slots: most turns decoded together.

    Raises:
        BraceError: vLLM is not installed.
        ModelError: vLLM cannot run the model; the message repeats why.
    """

    def __init__(self, model_dir: str, tokenizer: Any, *, dtype: str, slots: int) -> None:
        require_vllm()
        os.environ |= {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
        from transformers import AutoConfig

        self.version = -1
        self._tokenizer = tokenizer
        config = AutoConfig.from_pretrained(model_dir).get_text_config(decoder=True)
        self._vocabulary = int(config.vocab_size)
        _check_heads(config, model_dir)
        self._groups = _state_groups(model_dir)
        self._llm = _start(model_dir, dtype=dtype, slots=slots)
        positions, longest = max_positions(config), int(self._llm.model_config.max_model_len)
        self.max_context_tokens = longest if positions is None else min(positions, longest)
        self._stop_rules: dict[tuple[tuple[str, ...], tuple[int, ...]], StopRule] = {}
        self._turns: dict[str, _Turn] = {}
        self._sent = 0

    @property
    def unfinished(self) -> int:
        """Turns queued or in flight."""
        return len(self._turns)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns.

        Raises:
            ValueError: an empty context, no new tokens, a token id outside the vocabulary, a context that fills all of
                the model's positions, a session whose previous turn is unfinished, or a sampling that cuts tokens off.
                Nothing is queued then.
        """
        busy = {turn.request.session for turn in self._turns.values()}
        for request in requests:
            self._check(request, busy)
            busy.add(request.session)
        for request in requests:
            key = (request.stop, request.stop_token_ids)
            if key not in self._stop_rules:
                self._stop_rules[key] = StopRule(self._tokenizer, *key)
            room = self._positions - len(request.token_ids)
            limit = min(request.max_new_tokens, room)
            self._send(_Turn(request, limit, self._stop_rules[key], Generation(request.session)))

    def step(self) -> list[Generation]:
        """One step of vLLM's scheduler; return the turns that finished.

        Raises:
            ModelError: the model's outputs are not finite.
        """
        if not self._turns:
            return []
        ended, stopped = [], []
        for output in self._llm.step():
            turn = self._turns.get(output.request_id)
            if turn is None or not self._record(turn, output.outputs[0]):
                continue
            del self._turns[output.request_id]
            ended.append(turn.result)
            if not output.finished:
                stopped.append(output.request_id)
        if stopped:
            self._llm.abort_request(stopped)
        return ended

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy a ``state_dict`` into the model and drop everything cached from the old weights.

        A name may be missing if the model ties it to one that is given.

        Raises:
            ModelError: names or shapes that are not the model's, or tied names with different values, and the weights
                are unchanged then; or vLLM kept something cached.
        """
        complete = self._complete(weights)
        self._llm.abort_request(list(self._turns))
        with torch.inference_mode():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(complete.items())})
        if not self._llm.reset_prefix_cache():
            raise ModelError(f"vLLM kept cached prefixes of version {self.version} when version {version} came")
        self.version = version
        in_flight, self._turns = self._turns, {}
        for turn in in_flight.values():
            self._send(turn)

    def release(self, session: str) -> None:
        """Nothing to do: vLLM evicts what was used longest ago."""

    @property
    def _positions(self) -> int:
        return self.max_context_tokens or 0

    def _check(self, request: GenerationRequest, busy: set[str]) -> None:
        name, length = f"session {request.session!r}", len(request.token_ids)
        if not length or request.max_new_tokens < 1:
            raise ValueError(f"{name}: needs a context and room for a token, got {length} and {request.max_new_tokens}")
        if request.session in busy:
            raise ValueError(f"{name}: its previous turn is not finished")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocabulary:
            raise ValueError(f"{name}: token ids must be between 0 and {self._vocabulary - 1}")
        if length >= self._positions:
            raise ValueError(f"{name}: a context of {length} tokens leaves no room in {self._positions} positions")
        if request.sampling.truncates:
            raise ValueError(f"{name}: vLLM does not say which tokens top-p and top-k left in")

    def _complete(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights under all names of the model: vLLM leaves a tied layer that it is not given undefined.

        Raises:
            ModelError: see :meth:`update_weights`.
        """
        missing = [names[0] for names in self._groups if not any(name in weights for name in names)]
        unknown = sorted(weights.keys() - {name for names in self._groups for name in names})
        if missing or unknown:
            raise ModelError(f"weights do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}")
        complete: dict[str, Tensor] = {}
        for names, shape in self._groups.items():
            given = {name: weights[name].detach() for name in names if name in weights}
            first = next(iter(given.values()))
            for name, tensor in given.items():
                if tuple(tensor.shape) != shape:
                    raise ModelError(
                        f"weights do not fit the model: {name} has shape {tuple(tensor.shape)}, the model's is {shape}"
                    )
                if tensor.data_ptr() != first.data_ptr() and not torch.equal(tensor, first):
                    raise ModelError(f"weights do not fit the model: it ties {' and '.join(names)}, which differ here")
            complete |= dict.fromkeys(names, first)
        return complete

    def _send(self, turn: _Turn) -> None:
        """Give vLLM what is left of a turn."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request, made = turn.request, turn.result.token_ids
        context = [*request.token_ids, *made]
        name = f"{request.session}/{self._sent}"
        self._sent += 1
        params = SamplingParams(
            temperature=request.sampling.temperature,
            max_tokens=turn.max_new_tokens - len(made),
            seed=derive_seed(request.seed, len(context)) & ((1 << _SEED_BITS) - 1),
            logprobs=0,
            # Turns end by our own rule, which sees tokens of the turn alone and all of them.
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._turns[name] = turn
        self._llm.add_request(name, {"type": "token", "prompt_token_ids": context}, params)

    def _record(self, turn: _Turn, completion: Any) -> bool:
        """Append what vLLM sampled to a turn; whether it ended."""
        result = turn.result
        for token, candidates in zip(completion.token_ids, completion.logprobs or (), strict=True):
            logprob = float(candidates[token].logprob)
            if not math.isfinite(logprob):
                raise ModelError(f"the model's outputs under weight version {self.version} are not finite (NaN or inf)")
            result.token_ids.append(int(token))
            result.logprobs.append(logprob)
            result.versions.append(self.version)
            result.entropies.append(math.nan)
            if turn.stop.ends(result.token_ids):
                result.finish_reason = "stop"
                return True
        return len(result.token_ids) >= turn.max_new_tokens


def require_vllm() -> None:
    """Raises BraceError, which says what to install, where vLLM is not."""
    if find_spec("vllm") is None:
        raise BraceError("backend.engine = 'vllm': vLLM is not installed; run: pip install 'brace-rl[vllm]'")


def _check_heads(config: Any, model_dir: str) -> None:
    """On a CPU vLLM finds out at the first token, and with a traceback, that it has no kernel for a model.

    Raises:
        ModelError: heads of a size that vLLM's CPU build has no kernel for.
    """
    if torch.cuda.is_available() or find_spec(_CPU_ATTENTION) is None:
        return
    sizes = import_module(_CPU_ATTENTION).CPUAttentionBackend.get_supported_head_sizes()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in sizes:
        raise ModelError(
            f"{model_dir}: its attention heads have {size} dimensions, and vLLM on a CPU has kernels for "
            f"{', '.join(map(str, sizes))}; use backend.engine = 'embedded', or a model with such heads"
        )


def _start(model_dir: str, *, dtype: str, slots: int) -> Any:
    """vLLM's engine; log-probs are of the distribution sampled from, and one step gives one token."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=model_dir,
        dtype=dtype,
        max_num_seqs=slots,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        # A step whose tokens came back one step later would carry the version of the weights after them.
        async_scheduling=False,
        enable_prefix_caching=True,
        enforce_eager=not torch.cuda.is_available(),
        disable_log_stats=True,
    )
    try:
        return LLMEngine.from_engine_args(arguments)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"{model_dir}: vLLM cannot run the model: {str(error).strip().splitlines()[0]}") from error


def _state_groups(model_dir: str) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Names of a ``transformers`` model's state dict, those that are one tensor together, and its shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    state = model.state_dict(keep_vars=True)
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return {tuple(names): tuple(state[names[0]].shape) for names in groups.values()}
