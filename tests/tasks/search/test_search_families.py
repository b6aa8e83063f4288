"""Search QA and web research on files: building, prompting, whole episodes, wrong settings; recipes; real items."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from pathlib import Path

import pytest
from loopback import Reply, serve

from brace_rl.config import load_config
from brace_rl.errors import BraceError, ConfigError, DataError, ModelError
from brace_rl.tasks import build_task
from brace_rl.tasks.registry import parse_settings
from brace_rl.tasks.search.index import open_index
from brace_rl.tasks.search.search_facts import SearchFactsTask
from brace_rl.tasks.search.search_qa import SearchQaTask
from brace_rl.tasks.search.web_facts import WebFactsTask
from brace_rl.tasks.search.web_research import WebResearchTask

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
SHARED = ROOT / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data files are not here")

CORPUS = [
    {"id": "p1", "contents": '"Paris"\nParis is the capital of France.'},
    {"id": "p2", "contents": '"France"\nFrance lies in Europe.'},
]
QUESTIONS = [{"id": f"q{n}", "question": f"Capital of France ({n})?", "golden_answers": ["Paris"]} for n in range(4)]
PAGES = [
    {"docid": "11", "text": "Beavers build dams. " * 40, "url": "https://example.org/beaver"},
    {"docid": "12", "text": "Dams hold water.", "url": "https://example.org/dam"},
]
QUERIES = [
    {
        "query_id": str(n),
        "query": f"Who builds dams ({n})?",
        "answer": "Beavers",
        "gold_docs": [{"docid": "11"}],
        "evidence_docs": [{"docid": "11"}, {"docid": "12"}],
    }
    for n in range(4)
]


@pytest.fixture(autouse=True)
def nothing_cached():
    open_index.cache_clear()


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def search_qa(tmp_path, **more):
    values = {
        "name": "search_qa",
        "data": write(tmp_path / "questions.jsonl", QUESTIONS),
        "corpus": write(tmp_path / "corpus.jsonl", CORPUS),
        "eval_problems": 1,
    }
    return parse_settings({key: value for key, value in {**values, **more}.items() if value is not None})


def web_research(tmp_path, **more):
    values = {
        "name": "web_research",
        "data": write(tmp_path / "queries.jsonl", QUERIES),
        "corpus": write(tmp_path / "pages.jsonl", PAGES),
        "eval_problems": 1,
        "judge": "rule",
    }
    return parse_settings({**values, **more})


def play(task, problem, *turns):
    async def steps():
        environment = pickle.loads(pickle.dumps(task)).environment(problem)
        return [await environment.step(turn) for turn in turns]

    return asyncio.run(steps())


# Search QA


def test_a_question_is_asked_searched_answered_and_scored(tmp_path):
    task = build_task(search_qa(tmp_path), load_config(None).warm_start, 0)
    assert isinstance(task, SearchQaTask)
    (held_out,) = task.eval_problems()
    assert [problem.id for problem in task.train_problems()] == ["q0", "q1", "q2"]
    assert held_out.id == "q3"
    (message,) = held_out.prompt
    assert message["role"] == "user"
    assert message["content"].endswith("\n\nQuestion: Capital of France (3)?")
    assert all(
        tag in message["content"] for tag in ("<think>", "<search>", "<information>", "<answer>", "at most 7 turns")
    )
    found, answered = play(task, held_out, "<search>capital France</search>", "<answer>paris</answer>")
    assert found.text.startswith(
        "\n\n<information>Doc 1(Title: Paris) Paris is the capital of France.\nDoc 2(Title: France)"
    )
    assert (answered.success, answered.info["f1"]) == (True, 1.0)
    json.dumps(held_out.metadata)


def test_a_server_can_stand_in_for_the_corpus(tmp_path):
    reply = {"result": [[{"document": {"id": "1", "contents": '"Rome"\nOld.'}, "score": 1}]]}
    with serve(Reply(reply)) as server:
        task = SearchQaTask(search_qa(tmp_path, corpus="", retriever_url=f"{server.url}/retrieve"), seed=0)
        (found,) = play(task, task.eval_problems()[0], "<search>old city</search>")
    assert "Doc 1(Title: Rome) Old." in found.text
    assert server.requests[0][2]["queries"] == ["old city"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"corpus": ""}, r"task\.corpus: search_qa needs documents to search"),
        ({"retriever_url": "http://127.0.0.1:1/r"}, r"task\.retriever_url: task\.corpus is given too"),
        ({"retriever_url": "file:///etc/passwd", "corpus": ""}, r"task\.retriever_url: must be an address such as"),
        ({"retriever_url": "http://me:word@host/r", "corpus": ""}, r"must hold no user and password"),
        ({"corpus": "none.jsonl"}, "none.jsonl: no such corpus"),
        ({"top_k": 0}, r"task\.top_k"),
        ({"eval_problems": 4}, "leave nothing to train on"),
        ({"judge": "llm"}, r"task\.judge: no such setting"),
    ],
)
def test_wrong_settings_of_search_qa_are_one_clear_line(tmp_path, change, match):
    with pytest.raises(BraceError, match=match) as caught:
        SearchQaTask(search_qa(tmp_path, **change), seed=0)
    assert "\n" not in str(caught.value)


def test_evaluation_alone_needs_no_training_file(tmp_path):
    held_out = write(tmp_path / "held_out.jsonl", QUESTIONS[:2])
    task = SearchQaTask(search_qa(tmp_path, data="", eval_data=held_out, eval_problems=9), seed=0)
    assert (list(task.train_problems()), len(task.eval_problems())) == ([], 2)


def test_training_asks_for_a_file_and_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.data: search_qa needs a file"):
        load_config(None, {"task.name": "search_qa"})
    with pytest.raises(ConfigError, match=r"model\.path: search_qa needs a pretrained model"):
        load_config(None, {"task.name": "search_qa", "task.data": "x.jsonl"})


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    task = SearchQaTask(search_qa(tmp_path), seed=0)
    tokenizer = SearchFactsTask(
        parse_settings({"name": "search_facts", "train_problems": 9, "eval_problems": 9, "worlds": 1}), seed=0
    ).build_tokenizer()
    with pytest.raises(ModelError, match="has no chat template"):
        task.prompt_ids(task.train_problems()[0], tokenizer)


# Web research


def test_documents_are_searched_opened_together_answered_and_judged(tmp_path):
    task = build_task(web_research(tmp_path, page_chars=100), load_config(None).warm_start, 0)
    assert isinstance(task, WebResearchTask)
    problem = task.train_problems()[0]
    assert all(tag in problem.prompt[0]["content"] for tag in ("<open>", "up to 4 calls", "at most 49 turns"))
    found, opened, answered = play(
        task,
        problem,
        "<search>beavers build</search>",
        "<open>12</open><open>11 2</open><information>",
        "<answer>beavers</answer>",
    )
    (message,) = found.observation
    assert message["content"].startswith("<information>[11] https://example.org/beaver: Beavers build dams.")
    assert found.info["evidence_recall"] == 0.5
    assert opened.text.startswith(
        "[12] https://example.org/dam\nDams hold water.\n[11] https://example.org/beaver (page 2 of 8)\n"
    )
    assert (opened.info["evidence_recall"], opened.info["open_calls"]) == (1.0, 2.0)
    assert answered.success


def test_a_language_model_judges_and_a_failing_one_excludes_the_episode(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    right = Reply({"choices": [{"message": {"content": "Same.\nVERDICT: CORRECT"}}]})
    settings = {"judge": "llm", "judge_model": "m", "judge_retries": 1}
    with serve(right, Reply(status=500)) as server:
        task = WebResearchTask(web_research(tmp_path, judge_url=f"{server.url}/v1", **settings), seed=0)
        problem = task.train_problems()[0]
        (judged,) = play(task, problem, "<answer>It is the beaver.</answer>")
        (lost,) = play(task, problem, "<answer>It is the beaver.</answer>")
    assert (judged.success, judged.reward, judged.excluded) == (True, 1.0, False)
    assert (lost.excluded, lost.info["judge_failed"]) == (True, 1.0)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"judge": "llm"}, r"task\.judge_url: a language model is to judge; name it, or set task\.judge = 'rule'"),
        ({"judge": "llm", "judge_url": "http://h/v1"}, r"task\.judge_model: a language model is to judge"),
        ({"judge_url": "h:8000"}, r"task\.judge_url: must be an address such as http://127\.0\.0\.1:8000/v1"),
        ({"corpus": ""}, r"task\.corpus: web_research needs documents to open"),
    ],
)
def test_wrong_settings_of_web_research_are_one_clear_line(tmp_path, change, match):
    with pytest.raises(BraceError, match=match) as caught:
        WebResearchTask(web_research(tmp_path, **change), seed=0)
    assert "\n" not in str(caught.value)


def test_an_index_of_another_corpus_is_refused_by_the_family(tmp_path):
    SearchQaTask(search_qa(tmp_path), seed=0)
    open_index.cache_clear()
    other = write(tmp_path / "other.jsonl", CORPUS[:1])
    with pytest.raises(DataError, match="does not match"):
        SearchQaTask(search_qa(tmp_path, corpus=other, index=str(tmp_path / "corpus.jsonl.bm25")), seed=0)


# Recipes


def test_the_small_recipes_build_their_tasks():
    for name, task_class in (("search_facts", SearchFactsTask), ("web_facts", WebFactsTask)):
        config = load_config(RECIPES / f"{name}.toml")
        assert config.schedule.mode == "async"
        assert config.schedule.max_staleness >= 4
        assert config.algorithm.value_target == "brace"
        task = build_task(config.task, config.warm_start, config.run.seed)
        assert isinstance(task, task_class)
        tokenizer = task.build_tokenizer()
        longest = max(
            sum(len(tokenizer.encode(piece.text, add_special_tokens=False)) for piece in transcript.pieces)
            for transcript, _ in zip(task.demonstrations(0), range(50), strict=False)
        )
        assert longest < config.rollout.max_response_tokens


# Real items


@needs_shared
@pytest.mark.parametrize(("name", "least"), [("bamboogle", 0.95), ("hotpotqa", 0.95), ("2wiki", 0.95)])
def test_passages_that_held_a_real_answer_are_found_again(tmp_path, name, least):
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(SHARED / f"qa_with_passages/r1s_{name}_corpus.jsonl", corpus)
    index = open_index(corpus)
    rows = [
        json.loads(line) for line in (SHARED / f"qa_with_passages/r1s_{name}_questions.jsonl").open(encoding="utf-8")
    ]
    found = []
    for row in rows:
        for passage in row["retrieved_ids"][:3]:
            document = index.documents[index.documents.row_of(passage)]
            query = f"{document.title} {document.text[:80]}"
            found.append(passage in {index.documents[other].id for other, _ in index.ranking.top(query, 3)})
    assert len(found) > 200
    assert sum(found) / len(found) >= least


@needs_shared
def test_real_hotpotqa_questions_find_a_supporting_paragraph(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(SHARED / "qa_with_passages/hotpot_distractor100_corpus.jsonl", corpus)
    data = str(SHARED / "qa_with_passages/hotpot_distractor100.jsonl")
    settings = {"name": "search_qa", "data": data, "corpus": str(corpus), "eval_problems": 50, "top_k": 3}
    task = SearchQaTask(parse_settings(settings), seed=0)
    rows = {row["id"]: row for row in map(json.loads, Path(data).read_text(encoding="utf-8").strip().split("\n"))}
    hits = 0
    for problem in task.eval_problems():
        titles = rows[problem.id]["supporting_facts"]["title"]
        query = f"<search>{problem.metadata['question']}</search>"
        found, right = play(task, problem, query, f"<answer>{problem.answer}</answer>")
        hits += any(f"(Title: {title})" in found.text for title in titles)
        assert right.success
    assert hits >= 40
