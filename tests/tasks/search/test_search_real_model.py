"""Real questions and passages through a real model: loading, prompting, searching, scoring. Not about its skill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from real_model import END, SHARED, load, parts, responses

from brace_rl.config import load_config
from brace_rl.tasks.registry import parse_settings
from brace_rl.tasks.search.index import open_index
from brace_rl.tasks.search.search_qa import SearchQaTask
from brace_rl.tasks.search.web_research import WebResearchTask
from brace_rl.training.run import check

PASSAGES = SHARED / "qa_with_passages"
ITEMS = 2
NEW_TOKENS = 12

pytest.importorskip("bm25s")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PASSAGES.is_dir(), reason="the real data files are not here"),
]


def copied(tmp_path, name):
    """A corpus where its index may be written beside it."""
    open_index.cache_clear()
    return shutil.copy(PASSAGES / name, tmp_path / "corpus.jsonl")


def room(model, lines):
    """Tokens that hold the turns written and two short observations."""
    return 2 * max(len(model[1].encode(line)) for line in lines) + 140


@pytest.mark.parametrize("name", ["bamboogle", "hotpotqa"])
def test_real_items_pass_through_a_real_model(tmp_path, smollm2, name):
    model = load(smollm2)
    values = {"name": "search_qa", "data": str(PASSAGES / f"r1s_{name}_questions.jsonl")}
    values |= {"corpus": str(copied(tmp_path, f"r1s_{name}_corpus.jsonl")), "passage_chars": 60, "top_k": 2}
    task = SearchQaTask(parse_settings({**values, "eval_problems": ITEMS}), seed=0)
    problems = task.eval_problems()
    asked = [problem.metadata["question"] for problem in problems]

    (alone,) = responses(task, model, lambda n: [], items=1, tokens=NEW_TOKENS)
    prompt = model[1].decode(alone.prompt_ids)
    assert prompt.endswith(f"Question: {asked[0]}<|im_end|>\n<|im_start|>assistant\n")
    assert 0 < len(alone.response_ids) <= NEW_TOKENS
    assert all(alone.policy_mask)
    assert all(logprob < 0 for logprob in alone.behavior_logprobs)

    search = f"<search> {asked[0]} </search>"
    (searched,) = responses(task, model, lambda n: [search], items=1, tokens=room(model, [search]))
    (call, wrote), (told, environment), (went_on, again), *_ = parts(searched, model[1])
    assert (call, wrote, environment, again) == (search, True, False, True)
    assert told.startswith("\n\n<information>Doc 1(Title: ")
    assert told.endswith("\n</information>\n\n")
    assert went_on
    assert searched.info["search_calls"] >= 1  # the model may go on to search by itself

    def right_then_wrong(n):
        gold = problems[n].answer if n == 0 else f"not {problems[n].answer} at all"
        return [f"<search> {asked[n]} </search>", f"<think>So.</think><answer>{gold}</answer>"]

    tokens = room(model, [line for n in range(ITEMS) for line in right_then_wrong(n)])
    answered = responses(task, model, right_then_wrong, items=ITEMS, tokens=tokens)
    assert [trajectory.success for trajectory in answered] == [True, False]
    assert [trajectory.reward for trajectory in answered] == [1.0, 0.0]
    assert answered[0].info["f1"] == 1
    assert 0 < answered[1].info["f1"] < 1


def browsecomp_files(tmp_path):
    """Real HotpotQA questions and paragraphs in BrowseComp-Plus's columns: (queries, corpus)."""
    rows = [json.loads(line) for line in (PASSAGES / "hotpot_distractor100.jsonl").open(encoding="utf-8")][:3]
    documents, queries = {}, []
    for row in rows:
        for title, sentences in zip(row["context"]["title"], row["context"]["sentences"], strict=True):
            documents.setdefault(title, {"docid": f"d{len(documents)}", "text": "".join(sentences), "url": title})
        gold = [{"docid": documents[title]["docid"]} for title in dict.fromkeys(row["supporting_facts"]["title"])]
        queries.append({"query_id": row["id"], "query": row["question"], "answer": row["answer"], "gold_docs": gold})
    for name, lines in (("queries", queries), ("documents", documents.values())):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    open_index.cache_clear()
    return tmp_path / "queries.jsonl", tmp_path / "documents.jsonl"


def test_real_documents_are_searched_and_opened_in_one_turn_of_a_real_model(tmp_path, smollm2):
    model = load(smollm2)
    queries, corpus = browsecomp_files(tmp_path)
    values = {"name": "web_research", "eval_data": str(queries), "corpus": str(corpus), "judge": "rule"}
    task = WebResearchTask(parse_settings({**values, "top_k": 2, "snippet_chars": 60, "page_chars": 200}), seed=0)
    problem = task.eval_problems()[0]
    evidence = problem.metadata["evidence"]
    calls = f"<search>{problem.metadata['question']}</search>" + "".join(f"<open>{one}</open>" for one in evidence)
    script = [f"<think>Both.</think>{calls}{END}", f"<answer>{problem.answer}</answer>"]

    (trajectory,) = responses(task, model, lambda n: script, items=1, tokens=600)
    (wrote, by_policy), (told, by_tools), *_ = parts(trajectory, model[1])
    assert (wrote, by_policy, by_tools) == (script[0], True, False)
    assert told.startswith("\n<|im_start|>user\n<information>[d")  # the turn ended with the model's own end of turn
    assert told.endswith("</information><|im_end|>\n<|im_start|>assistant\n")
    assert all(f"[{one}] " in told for one in evidence)
    assert (trajectory.reward, trajectory.info["evidence_recall"]) == (1.0, 1.0)
    assert (trajectory.info["search_calls"], trajectory.info["open_calls"]) == (1.0, float(len(evidence)))


@pytest.mark.parametrize("name", ["search_r1", "browsecomp_plus"])
def test_the_recipes_at_the_papers_scale_are_checked_as_a_run_would_begin(tmp_path, smollm2, name):
    overrides = {
        "task.data": str(PASSAGES / "r1s_bamboogle_questions.jsonl"),
        "task.corpus": str(copied(tmp_path, "r1s_bamboogle_corpus.jsonl")),
        "task.eval_problems": "25",
        "model.path": str(smollm2),
    }
    if name == "browsecomp_plus":
        overrides |= {"task.judge_url": "http://127.0.0.1:8000/v1", "task.judge_model": "judge"}
    found = check(load_config(Path(__file__).parents[3] / "recipes" / f"{name}.toml", overrides))
    assert (found["training problems"], found["held-out problems"]) == ("100", "25")
    assert found["value target"] == "brace, window 100"
