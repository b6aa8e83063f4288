"""Whole runs over Ray: the trace is that of the local backend, and faults cost no prompt and no step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
from fake_ray import fake_cluster
from ray_environment import join_cluster, prepare_environment
from test_run import assert_same_weights, figures_of, metrics_of, tiny_config, wait_for_step, weights_of

from brace_rl.training import run
from brace_rl.training.backends.ray_workers import RayBackend
from brace_rl.training.engines.simulated import ResponseLengths, SimulatedSpec
from brace_rl.training.run import run_training

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS, SAMPLES, STALENESS, STEPS = 4, 2, 2, 12
KILLED_AT = 5
"""Step after which the trainer itself is killed."""
SLOW_WORKER, SLOWNESS = 3, 10.0
PATIENCE_S = 900.0


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("mode", "staleness"), [("lag", 2), ("async", 0)])
def test_with_one_worker_the_trace_is_that_of_the_local_backend(mode, staleness, tmp_path):
    for kind in ("local", "ray"):
        config = tiny_config(mode, staleness, backend={"kind": kind}, schedule={"timeout_s": PATIENCE_S})
        run_training(config, tmp_path / kind)
    assert len(figures_of(tmp_path / "ray")) > 1
    assert figures_of(tmp_path / "ray") == figures_of(tmp_path / "local")
    assert_same_weights(weights_of(tmp_path / "ray"), weights_of(tmp_path / "local"))


class FaultyBackend(RayBackend):
    """Four workers: one 10 times slower, one killed every third version, one update lost."""

    def __init__(self, spec: SimulatedSpec, **arguments):
        self.spec = spec
        self.to_lose = {2, 7}
        super().__init__(spec, workers=4, timeout_s=PATIENCE_S, **arguments)

    def _start(self, number, **arguments):
        slowness = SLOWNESS if number == SLOW_WORKER else 1.0
        self._factory = SimulatedSpec(self.spec.config, self.spec.tokens_per_s / slowness, self.spec.lengths)
        return super()._start(number, **arguments)

    def _deliver(self, worker, weights):
        if worker.number == 0 and weights.version in self.to_lose:
            self.to_lose.remove(weights.version)
            worker.offered = weights.version
        else:
            super()._deliver(worker, weights)

    def publish(self, weights, version):
        import ray

        super().publish(weights, version)
        if version % 3 == 1:
            ray.kill(self._workers[version // 3 % 3].handle)


def faulty_config():
    everything = PROMPTS * SAMPLES
    return tiny_config(
        "async",
        STALENESS,
        optim={"steps": STEPS},
        backend={"kind": "ray", "workers": 4},
        run={"samples_per_step": everything, "checkpoint_every": 2},
        warm_start={"steps": 0},
    )


def faulty_run(run_dir, *, resume=False):
    """The outcome and the backend."""
    made = []

    def backend(config, run_dir, actor):
        lengths = ResponseLengths(median=6, spread=0.7, longest=12)
        made.append(FaultyBackend(SimulatedSpec(config, tokens_per_s=100.0, lengths=lengths)))
        return made[0]

    real, run._backend = run._backend, backend
    try:
        return run_training(faulty_config(), run_dir, resume=resume), made[0]
    finally:
        run._backend = real


def main(run_dir, cluster):
    """What the trainer that is going to be killed runs."""
    with fake_cluster() if cluster == "threads" else nullcontext():
        if cluster == "ray":
            join_cluster(cpus=4)
        faulty_run(Path(run_dir))


def kill_a_trainer(run_dir, cluster):
    """A run in a process of its own, killed after step ``KILLED_AT``."""
    prepare_environment()
    code = f"from test_ray_runs import main; main({str(run_dir)!r}, {cluster!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    wait_for_step(run_dir, KILLED_AT, process, timeout=PATIENCE_S)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_dying_slow_and_deaf_workers_and_a_killed_trainer_cost_no_prompt_and_no_step(cluster, tmp_path):
    run_dir = tmp_path / "faults"
    kill_a_trainer(run_dir, cluster)
    outcome, backend = faulty_run(run_dir, resume=True)
    ledger = outcome.summary["ledger"]
    print(f"ledger: {ledger}; workers replaced: {backend.restarts}; updates sent again: {backend.resent}")

    assert (outcome.status, outcome.summary["steps"]) == ("finished", STEPS)
    assert backend.restarts >= 2
    assert backend.resent >= 1
    assert ledger["issued"] == ledger["consumed"] == STEPS * PROMPTS
    assert (ledger["dropped"], ledger["in_flight"], ledger["buffered"]) == (0, 0, 0)
    rows = metrics_of(run_dir)
    assert max(rows[step]["staleness/max"] for step in range(1, STEPS + 1)) <= STALENESS
    samples = [json.loads(line) for line in Path(run_dir / "samples.jsonl").read_text().splitlines()]
    counts = Counter((row["request_index"], row["sample_index"]) for row in samples)
    assert counts == Counter({(i, j): 1 for i in range(STEPS * PROMPTS) for j in range(SAMPLES)})
