"""Several ranks make the update that one rank makes: whatever is said of a batch is said of all of it.

The ranks are processes that meet over gloo on the loopback interface. Each size of the group is started once and goes
through all cases.
"""

import json
import math
import multiprocessing
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_learner import make_learner, random_batch, tiny_actor, tiny_config
from test_methods_learner import config_of, grouped_batch

from brace_rl.errors import ConfigError, DivergedError
from brace_rl.training.batch import rank_shares, shared_micro_batches
from brace_rl.training.learner import Learner
from brace_rl.training.meeting import Meeting
from brace_rl.training.models import Critic
from brace_rl.training.rank_worker import join
from brace_rl.training.ranks import Ranks
from brace_rl.training.sharding import whole

pytestmark = pytest.mark.slow

LIMIT_S = 900
SIZES = (2, 4)
SMALL = {"micro_batch_tokens": 24, "actor_lr": 1e-3, "critic_lr": 1e-3}


def settings(method="brace", **sections):
    sections["optim"] = SMALL | sections.get("optim", {})
    return config_of(method, **sections)


CASES = {
    "brace": lambda: settings(),
    "minibatches": lambda: settings(optim={"minibatches": 3, "critic_updates": 2}),
    "kept graph": lambda: settings(optim={"keep_graph": True}),
    "recomputed layers": lambda: settings(model={"gradient_checkpointing": True}),
    "critic warm-up": lambda: settings(optim={"critic_warmup_steps": 9, "critic_warmup_until": 0.001}),
    "window of the batch": lambda: settings(algorithm={"window": "auto", "auto_eps": 0.2}),
    "windows of paths": lambda: settings(algorithm={"window": "auto_path", "auto_budget": 0.5}),
    "rate from the effective sample": lambda: settings(optim={"lr_ess_scaling": True}),
    "m2po": lambda: settings("brace+m2po", optim={"minibatches": 2}),
    "gspo": lambda: settings("brace+gspo"),
    "weight average": lambda: settings("ppo_ewma_original", optim={"minibatches": 2}),
    "grpo": lambda: settings("grpo"),
    "vapo": lambda: settings("vapo", optim={"critic_warmup_steps": 1}),
    "bootstrap": lambda: settings(algorithm={"bootstrap_truncated": True}),
}
GLOBAL = {"value/explained_variance", "ratio/ess", "advantage/abs_max", "window_weight/mean", "entropy/mean"}
"""Figures that a mean over ranks would get wrong; losses, gradient norms and weights are compared as well."""

DOUBLE, FEW_ROWS = "float64", "fewer rows than ranks"
SHARDED = ("sharded", "sharded in uneven micro-batches", "sharded recomputed layers", "sharded critic warm-up")


def sharded_settings(case):
    more = {
        "sharded in uneven micro-batches": {"optim": {"micro_batch_tokens": 8, "minibatches": 2}},
        "sharded recomputed layers": {"model": {"gradient_checkpointing": True}},
        "sharded critic warm-up": {"optim": {"critic_warmup_steps": 1}},
    }
    return settings(**more.get(case, {}))


def batches(case):
    if case == FEW_ROWS:
        return [random_batch(count=3, seed=seed) for seed in (1, 2)]
    if case == "grpo":
        return [grouped_batch(), grouped_batch(rewards=(0.0, 1.0, 1.0, 0.0, 1.0, 1.0))]
    made = [random_batch(count=7, seed=seed, kept=case == "gspo") for seed in (1, 2)]
    if case == "bootstrap":
        made = [replace(batch, truncated=torch.arange(7) % 3 == 0) for batch in made]
    if case == DOUBLE:
        fields = ("behavior_logprobs", "behavior_entropies", "rewards")
        made = [replace(batch, **{name: getattr(batch, name).double() for name in fields}) for batch in made]
    return made


def trained(case, ranks):
    """(weights by name, figures of the updates) of a learner on these ranks."""
    if case in SHARDED:
        config = sharded_settings(case)
        if ranks.size > 1:
            sections = config.model_dump()
            sections["model"]["sharding"], sections["optim"]["learner_ranks"] = "fsdp2", ranks.size
            config = type(config).model_validate(sections)
    else:
        config = CASES.get(case, CASES["brace"])()
    single = make_learner(config)
    actor = single.actor.double() if case == DOUBLE else single.actor
    critic = None
    if config.algorithm.value_target != "none":
        critic = single.critic.double() if case == DOUBLE else single.critic
    if config.model.gradient_checkpointing:  # the learner made above has seen to it already
        actor, critic = tiny_actor(), Critic.from_actor(tiny_actor())
        critic.load_state_dict(single.critic.state_dict())
    learner = Learner(actor, critic, config, ranks)
    figures = [learner.update(batch) for batch in batches(case)]
    modules = {"actor": learner.actor} | ({} if critic is None else {"critic": learner.critic})
    weights = {f"{m}.{n}": whole(x).clone() for m, module in modules.items() for n, x in module.state_dict().items()}
    return weights, figures


def all_cases(size):
    if size == 2:
        return [*CASES, DOUBLE, FEW_ROWS, *SHARDED]
    return ["brace", "minibatches", "window of the batch", "rate from the effective sample", "m2po", "grpo", FEW_ROWS]


def listening_addresses():
    """Local addresses, in hexadecimal as the kernel prints them, on which this process listens; Linux tells."""
    own = set()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            own.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:] if own else []
        for fields in map(str.split, lines):
            address, state, inode = fields[1].split(":")[0], fields[3], fields[9]
            if state == "0A" and f"socket:[{inode}]" in own:
                found.append(address)
    return found


def rank_main(rank, size, folder, meeting):
    """Body of a rank: every case, then a batch that diverges on all ranks; results to files."""
    torch.set_num_threads(1)
    sections = {
        "optim": {"learner_ranks": size},
        "schedule": {"timeout_s": LIMIT_S, "mode": "sync", "max_staleness": 0},
    }
    ranks = join(rank, tiny_config(**sections), Meeting({"path": meeting}), device=torch.device("cpu"))
    tensors, figures = {}, {"listening": listening_addresses()}
    for case in all_cases(size):
        weights, figures[case] = trained(case, ranks)
        tensors |= {f"{case}/{name}": x for name, x in weights.items()}
    try:
        learner = make_learner(settings())
        learner = Learner(learner.actor, learner.critic, learner.config, ranks)
        torch.nn.init.constant_(learner.critic.head.bias, float("nan"))
        learner.update(random_batch())
    except DivergedError as error:
        figures["diverged"] = str(error)
    save_file(tensors, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(figures))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Size of the group -> per rank (weights, figures) of every case."""
    multiprocessing.set_forkserver_preload(["torch", "transformers", "brace_rl.training.rank_worker"])
    context = multiprocessing.get_context("forkserver")
    found = {}
    for size in SIZES:
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        arguments = [(rank, size, folder, str(folder / "meeting")) for rank in range(size)]
        processes = [context.Process(target=rank_main, args=a, daemon=True) for a in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
        for process in processes:
            if process.exitcode is None:
                process.kill()
        assert [process.exitcode for process in processes] == [0] * size
        found[size] = [
            (load_file(folder / f"{rank}.safetensors"), json.loads((folder / f"{rank}.json").read_text()))
            for rank in range(size)
        ]
    return found


@pytest.fixture(scope="module")
def alone():
    """Case -> (weights, figures) of one rank."""
    return {case: trained(case, Ranks()) for case in all_cases(2)}


@pytest.mark.parametrize(("size", "case"), [(size, case) for size in SIZES for case in all_cases(size)])
def test_ranks_make_the_update_of_one(size, case, results, alone):
    weights, figures = alone[case]
    tolerance = 1e-7 if case == DOUBLE else 1e-5  # the model's norms are float32 whatever its dtype
    for tensors, found in results[size]:
        for name, expected in weights.items():
            torch.testing.assert_close(tensors[f"{case}/{name}"], expected, atol=tolerance, rtol=tolerance)
        for mine, theirs in zip(found[case], figures, strict=True):
            assert set(mine) == set(theirs) >= GLOBAL
            for name in set(mine) - {"tokens/evaluate", "tokens/update"}:  # padding is that of each rank's rows
                assert mine[name] == pytest.approx(theirs[name], abs=tolerance, rel=tolerance), name


def test_the_updates_that_are_compared_move_the_weights(alone):
    start, (weights, _) = tiny_actor().state_dict(), alone["brace"]
    assert all(not torch.equal(x, weights[f"actor.{name}"]) for name, x in start.items())


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_hold_the_same_weights_and_figures_to_the_last_bit(size, results):
    first, figures = results[size][0]
    for tensors, found in results[size][1:]:
        assert {**found, "listening": []} == {**figures, "listening": []}
        assert all(torch.equal(tensors[name], x) for name, x in first.items())


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="the kernel does not tell who listens")
@pytest.mark.parametrize("size", SIZES)
def test_ranks_listen_on_loopback_alone(size, results):
    addresses = [address for _, found in results[size] for address in found["listening"]]
    assert len(addresses) >= size
    assert {bytes.fromhex(address)[::-1][:1].hex() for address in addresses} == {"7f"}


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_finite_stops_every_rank_with_the_same_words(size, results):
    messages = {found["diverged"] for _, found in results[size]}
    assert len(messages) == 1
    assert "training has diverged" in messages.pop()


def test_rows_are_shared_out_once_each_and_evenly():
    lengths = [5, 9, 1, 7, 7, 3, 8, 2]
    for ranks in (1, 2, 3, 4):
        shares = rank_shares(lengths, ranks)
        assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
        loads = [sum(lengths[row] for row in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths)
    assert rank_shares(lengths, 1) == [list(range(8))]
    assert rank_shares([4, 2], 3) == [[0], [1], []]


def test_micro_batches_of_a_share_name_rows_of_the_whole():
    lengths = [5, 9, 1, 7, 7, 3, 8, 2]
    groups = shared_micro_batches(lengths, 16, 2)
    assert sorted(row for own in groups for group in own for row in group) == list(range(8))
    assert all(len(group) * max(lengths[row] for row in group) <= 16 for own in groups for group in own)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"sharding": "fsdp2"}}, r"model\.sharding: .*optim\.learner_ranks is 1"),
        (
            {"model": {"sharding": "fsdp2"}, "optim": {"learner_ranks": 2}, "actor": {"rule": "ppo_ewma", "beta": 0.8}},
            r"model\.sharding: ppo_ewma keeps a whole second copy",
        ),
        (
            {"model": {"sharding": "fsdp2"}, "optim": {"learner_ranks": 2, "keep_graph": True}},
            r"optim\.keep_graph: .*fsdp2",
        ),
    ],
)
def test_what_sharded_models_cannot_do_is_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config(**sections)


def test_one_rank_leaves_tensors_alone():
    ranks, x = Ranks(), torch.tensor([1.0, math.nan])
    assert ranks.add_up(x) is x
    assert ranks.as_on_first(x) is x
    assert (ranks.rank, ranks.size) == (0, 1)
