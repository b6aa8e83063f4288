"""Runs that meet trouble: a killed rollout process, answers that come late, interruptions and errors.

Most run the asynchronous schedule with rollouts in this process, which repeats exactly; one kills a real process.
"""

import json
import os
import signal
from collections import Counter

import pytest
from test_run import assert_same_weights, metrics_of, tiny_config, weights_of

from brace_rl.errors import WaitTimeoutError
from brace_rl.training import run
from brace_rl.training.backends.base import Backend
from brace_rl.training.backends.inline import InlineBackend
from brace_rl.training.driver_spec import DriverSpec
from brace_rl.training.learner import Learner
from brace_rl.training.run import run_training

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS, SAMPLES = 4, 2
"""Per step, as in tiny_config."""


class WatchedBackend(Backend):
    """Passes everything on to another backend; ``before_collect(self)`` may do mischief first."""

    def __init__(self, inner, before_collect=lambda backend: None):
        self.inner = inner
        self.before_collect = before_collect
        self.collects = 0
        self.published = []

    @property
    def restarts(self):
        return self.inner.restarts

    def publish(self, weights, version):
        self.published.append(version)
        self.inner.publish(weights, version)

    def submit(self, requests):
        self.inner.submit(requests)

    def collect(self):
        self.collects += 1
        self.before_collect(self)
        return self.inner.collect()

    def close(self):
        self.inner.close()


class LateBackend(WatchedBackend):
    """Answers come as they are made, but prompt 0's is kept back until version 2 was published or nothing else is left.

    Answers are given one at a time, so that something else usually is.
    """

    def __init__(self, inner):
        super().__init__(inner)
        self.ready = []
        self.late = None

    def submit(self, requests):
        super().submit(requests)
        if requests:
            self.ready += self.inner.collect()
        late = [group for group in self.ready if group.request.index == 0]
        if late:
            self.late = late[0]
            self.ready.remove(self.late)

    def collect(self):
        if self.late is not None and (self.published[-1] >= 2 or not self.ready):
            late, self.late = self.late, None
            return [late]
        if not self.ready:
            raise WaitTimeoutError("trainer waits for rollouts, but every prompt it submitted is answered")
        return [self.ready.pop(0)]


def in_process(config, run_dir, actor):
    return InlineBackend(DriverSpec(config, run._model_dir(config, run_dir), slots=config.rollout.slots).build())


def run_with(monkeypatch, make_backend, config, run_dir, **options):
    """The finished run's outcome and the backend it used."""
    made = []

    def backend(*arguments):
        made.append(make_backend(*arguments))
        return made[-1]

    monkeypatch.setattr(run, "_backend", backend)
    return run_training(config, run_dir, **options), made[0]


def everything_sampled(steps, **changes):
    """Asynchronous, S = 1 unless changed, with every trajectory written to samples.jsonl."""
    run_settings = {"samples_per_step": PROMPTS * SAMPLES, **changes.pop("run", {})}
    optim = {"steps": steps, **changes.pop("optim", {})}
    staleness = changes.pop("max_staleness", 1)
    return tiny_config("async", staleness, run=run_settings, optim=optim, **changes)


def consumed_responses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return Counter((row["request_index"], row["sample_index"]) for row in rows)


def assert_balanced(ledger, *, steps, dropped=0):
    assert ledger["issued"] == ledger["consumed"] + ledger["dropped"] + ledger["in_flight"] + ledger["buffered"]
    assert (ledger["consumed"], ledger["dropped"]) == (steps * PROMPTS, dropped)
    assert (ledger["in_flight"], ledger["buffered"]) == (0, 0)


def assert_each_response_consumed_once(run_dir, *, steps):
    counts = consumed_responses(run_dir)
    assert set(counts.values()) == {1}
    assert len(counts) == steps * PROMPTS * SAMPLES
    assert len({index for index, _ in counts}) == steps * PROMPTS


@pytest.mark.slow
def test_a_killed_rollout_process_is_replaced_and_every_prompt_consumed_once(tmp_path, monkeypatch):
    steps = 6
    real_backend = run._backend
    killed = []

    class KillingBackend(WatchedBackend):
        """Kills the process once, right after it was given prompts: it cannot have answered them."""

        def submit(self, requests):
            super().submit(requests)
            if self.published[-1] >= 1 and requests and not killed:
                killed.append(self.inner.pid)
                os.kill(self.inner.pid, signal.SIGKILL)

    outcome, backend = run_with(
        monkeypatch,
        lambda *arguments: KillingBackend(real_backend(*arguments)),
        everything_sampled(steps, max_staleness=2),
        tmp_path / "killed",
    )
    assert outcome.status == "finished"
    assert len(killed) == 1
    assert backend.restarts == 1
    assert backend.inner.pid not in killed
    rows = metrics_of(tmp_path / "killed")
    assert rows[steps]["backend/restarts"] == 1
    assert max(rows[step]["staleness/max"] for step in range(1, steps + 1)) <= 2
    assert_balanced(outcome.summary["ledger"], steps=steps)
    assert_each_response_consumed_once(tmp_path / "killed", steps=steps)


def test_asynchronous_rollouts_run_ahead_and_a_response_is_consumed_once(tmp_path, monkeypatch):
    steps = 5
    outcome, backend = run_with(
        monkeypatch, lambda *a: WatchedBackend(in_process(*a)), everything_sampled(steps), tmp_path / "it"
    )
    assert backend.published == list(range(steps + 1))
    assert_balanced(outcome.summary["ledger"], steps=steps)
    assert_each_response_consumed_once(tmp_path / "it", steps=steps)
    rows = metrics_of(tmp_path / "it")
    # Two batches are answered together: the second is consumed one version later.
    assert [rows[step]["staleness/max"] for step in range(1, steps + 1)] == [0, 1, 0, 1, 0]


def test_drop_leaves_out_what_is_too_old_and_counts_it_with_its_length(tmp_path, monkeypatch):
    steps = 5
    config = everything_sampled(steps, schedule={"too_old": "drop"})
    seen = []

    class Recording(LateBackend):
        def collect(self):
            groups = super().collect()
            seen.extend(groups)
            return groups

    outcome, _ = run_with(monkeypatch, lambda *a: Recording(in_process(*a)), config, tmp_path / "it")
    assert_balanced(outcome.summary["ledger"], steps=steps, dropped=1)
    assert outcome.summary["ledger"]["issued"] == steps * PROMPTS + 1
    lengths = [len(t.response_ids) for group in seen if group.request.index == 0 for t in group.trajectories]
    assert outcome.summary["dropped_length_mean"] == sum(lengths) / SAMPLES
    rows = metrics_of(tmp_path / "it")
    assert rows[steps]["ledger/dropped_length_mean"] == sum(lengths) / SAMPLES
    assert max(rows[step]["staleness/max"] for step in range(1, steps + 1)) <= 1
    assert (0, 0) not in consumed_responses(tmp_path / "it")
    assert_each_response_consumed_once(tmp_path / "it", steps=steps)


def test_wait_consumes_what_would_be_too_old_before_it_is(tmp_path, monkeypatch):
    steps = 5
    outcome, _ = run_with(
        monkeypatch, lambda *a: LateBackend(in_process(*a)), everything_sampled(steps), tmp_path / "it"
    )
    assert_balanced(outcome.summary["ledger"], steps=steps)
    assert outcome.summary["dropped_length_mean"] is None
    rows = metrics_of(tmp_path / "it")
    assert max(rows[step]["staleness/max"] for step in range(1, steps + 1)) <= 1
    samples = [json.loads(line) for line in (tmp_path / "it" / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in samples if row["request_index"] == 0} == {2}


@pytest.mark.parametrize(("sync_every", "published"), [(2, [0, 2, 4, 6]), (3, [0, 3, 6])])
def test_weights_are_sent_every_so_many_steps_and_the_bound_holds(sync_every, published, tmp_path, monkeypatch):
    steps = 6
    config = everything_sampled(steps, max_staleness=2, schedule={"sync_every": sync_every})
    outcome, backend = run_with(monkeypatch, lambda *a: WatchedBackend(in_process(*a)), config, tmp_path / "it")
    assert backend.published == published
    assert_balanced(outcome.summary["ledger"], steps=steps)
    assert_each_response_consumed_once(tmp_path / "it", steps=steps)
    samples = [json.loads(line) for line in (tmp_path / "it" / "samples.jsonl").read_text().splitlines()]
    assert {version for row in samples for version, _ in row["versions"]} <= set(published)
    assert max(metrics_of(tmp_path / "it")[step]["staleness/max"] for step in range(1, steps + 1)) <= 2


# Interruptions


def interrupted_run(tmp_path, monkeypatch, *, mode="lag", at_collect):
    def press_ctrl_c(backend):
        if backend.collects == at_collect:
            signal.raise_signal(signal.SIGINT)

    config = tiny_config(mode, 1, run={"checkpoint_every": 0})
    run_dir = tmp_path / "interrupted"
    outcome, _ = run_with(monkeypatch, lambda *a: WatchedBackend(in_process(*a), press_ctrl_c), config, run_dir)
    return config, run_dir, outcome


@pytest.mark.parametrize("at_collect", [1, 3])
def test_ctrl_c_while_waiting_saves_at_once_and_the_resumed_run_ends_bit_identical(at_collect, tmp_path, monkeypatch):
    config, run_dir, outcome = interrupted_run(tmp_path, monkeypatch, at_collect=at_collect)
    assert (outcome.status, outcome.summary["steps"]) == ("interrupted", at_collect - 1)
    assert outcome.report.is_file()
    monkeypatch.undo()
    assert run_training(config, run_dir, resume=True).status == "finished"
    run_training(config, tmp_path / "whole")
    assert_same_weights(weights_of(run_dir), weights_of(tmp_path / "whole"))


def during_update(monkeypatch, step, action):
    """Have ``action()`` done in the middle of the update that follows ``step`` completed ones."""
    original = Learner.evaluate

    def evaluate(self, *args):
        if self.version == step:
            action()
        return original(self, *args)

    monkeypatch.setattr(Learner, "evaluate", evaluate)


def test_ctrl_c_during_an_update_finishes_and_saves_the_step(tmp_path, monkeypatch):
    during_update(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGINT))
    config = tiny_config("lag", 1, run={"checkpoint_every": 0})
    outcome = run_training(config, tmp_path / "it")
    assert (outcome.status, outcome.summary["steps"]) == ("interrupted", 2)
    assert (tmp_path / "it" / "checkpoints" / "step_000002" / "state.json").is_file()


def test_a_second_ctrl_c_during_an_update_saves_nothing_half_done(tmp_path, monkeypatch):
    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    during_update(monkeypatch, 3, press_twice)
    config = tiny_config("lag", 1)
    with pytest.raises(KeyboardInterrupt):
        run_training(config, tmp_path / "it")
    names = [path.name for path in (tmp_path / "it" / "checkpoints").iterdir()]
    assert names == ["step_000002"]  # the one of checkpoint_every, whole
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", 3)
    monkeypatch.undo()
    assert run_training(config, tmp_path / "it", resume=True).status == "finished"


def test_the_signal_handlers_of_the_caller_come_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run_training(tiny_config("sync", 0, optim={"steps": 2}), tmp_path / "it")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# Errors


def fail_at(collect, error):
    def fail(backend):
        if backend.collects == collect:
            raise error

    return fail


@pytest.mark.parametrize("error", [WaitTimeoutError("trainer waited 60 s for rollouts"), RuntimeError("a bug")])
def test_a_run_that_fails_leaves_figures_samples_summary_and_report(error, tmp_path, monkeypatch):
    config = tiny_config("lag", 1)
    run_dir = tmp_path / "it"
    with pytest.raises(type(error), match=str(error)):
        run_with(monkeypatch, lambda *a: WatchedBackend(in_process(*a), fail_at(3, error)), config, run_dir)
    assert list(metrics_of(run_dir)) == [0, 1, 2]
    assert {json.loads(line)["step"] for line in (run_dir / "samples.jsonl").read_text().splitlines()} == {1, 2}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    ledger = summary["ledger"]
    assert ledger["issued"] == ledger["consumed"] + ledger["in_flight"] + ledger["buffered"]
    assert ledger["consumed"] == 2 * PROMPTS
    assert "failed" in (run_dir / "report.html").read_text()


def test_trouble_in_the_last_evaluation_does_not_cost_the_training(tmp_path, monkeypatch):
    config = tiny_config("sync", 0, run={"checkpoint_every": 0})
    original = run.Evaluator.run

    def fail_at_the_end(self, version, problems):
        if version == config.optim.steps:
            raise RuntimeError("a bug")
        return original(self, version, problems)

    monkeypatch.setattr(run.Evaluator, "run", fail_at_the_end)
    with pytest.raises(RuntimeError, match="a bug"):
        run_training(config, tmp_path / "it")
    monkeypatch.undo()
    run_training(config, tmp_path / "whole")
    assert_same_weights(weights_of(tmp_path / "it"), weights_of(tmp_path / "whole"))


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path, monkeypatch):
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        run_with(
            monkeypatch,
            lambda *a: WatchedBackend(in_process(*a), fail_at(1, error)),
            tiny_config("async", 1),
            tmp_path / "it",
        )
    assert not (tmp_path / "it").exists()


def test_a_resumed_run_that_fails_at_once_keeps_what_there_was(tmp_path, monkeypatch):
    config = tiny_config("sync", 0)
    run_training(config, tmp_path / "it")
    longer = tiny_config("sync", 0, optim={"steps": 6})
    with pytest.raises(RuntimeError, match="a bug"):
        run_with(
            monkeypatch,
            lambda *a: WatchedBackend(in_process(*a), fail_at(1, RuntimeError("a bug"))),
            longer,
            tmp_path / "it",
            resume=True,
        )
    assert list(metrics_of(tmp_path / "it")) == [0, 1, 2, 3, 4]
    monkeypatch.undo()
    assert run_training(longer, tmp_path / "it", resume=True).summary["steps"] == 6
