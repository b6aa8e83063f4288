"""Question files: seven public data sets in their own formats, on rows of ours, and the real files where they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from brace_rl.errors import DataError
from brace_rl.tasks.search.questions import Question, detect_format, load_questions, split_questions

SHARED = Path(__file__).parents[3] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data files are not here")

FORMATS = {
    "NQ-open": (
        "plain",
        {"question": "who wrote the river song", "answer": ["Ann Lee", "A. Lee"]},
        Question("rows.jsonl:1", "who wrote the river song", ("Ann Lee", "A. Lee")),
    ),
    "TriviaQA": (
        "TriviaQA",
        {
            "Question": "Which lake is the deepest?",
            "QuestionId": "tc_1",
            "QuestionSource": "x",
            "Answer": {
                "Aliases": ["Baikal", "Lake Baikal"],
                "NormalizedAliases": ["baikal"],
                "Type": "WikipediaEntity",
                "Value": "Lake Baikal",
            },
            "SearchResults": [],
        },
        Question("tc_1", "Which lake is the deepest?", ("Lake Baikal", "Baikal")),
    ),
    "TriviaQA of the hub": (
        "TriviaQA",
        {"question": "Deepest?", "question_id": "tc_2", "answer": {"value": "Baikal", "aliases": [], "type": "x"}},
        Question("tc_2", "Deepest?", ("Baikal",)),
    ),
    "PopQA": (
        "PopQA",
        {
            "id": 42,
            "subj": "Ann Lee",
            "prop": "occupation",
            "obj": "poet",
            "question": "What is Ann Lee's occupation?",
            "possible_answers": '["poet", "lyric poet"]',
        },
        Question("42", "What is Ann Lee's occupation?", ("poet", "lyric poet")),
    ),
    "HotpotQA": (
        "HotpotQA",
        {
            "_id": "5a",
            "question": "Are both rivers?",
            "answer": "yes",
            "type": "comparison",
            "level": "hard",
            "supporting_facts": [["Aa", 0], ["Bb", 1]],
            "context": [["Aa", ["Aa is a river."]], ["Bb", ["x.", "Bb is a river."]]],
        },
        Question("5a", "Are both rivers?", ("yes",)),
    ),
    "2WikiMultihopQA": (
        "HotpotQA",
        {
            "_id": "13f",
            "type": "compositional",
            "question": "Who is the mother of the director of Xx?",
            "answer": "Ann Lee",
            "context": [["Xx", ["Xx is a film."]]],
            "supporting_facts": [["Xx", 0]],
            "evidences": [["Xx", "director", "Bo Lee"], ["Bo Lee", "mother", "Ann Lee"]],
            "entity_ids": "Q1_Q2",
        },
        Question("13f", "Who is the mother of the director of Xx?", ("Ann Lee",)),
    ),
    "MuSiQue": (
        "MuSiQue",
        {
            "id": "2hop__1_2",
            "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "p", "is_supporting": True}],
            "question": "Where was the writer of the river song born?",
            "question_decomposition": [{"id": 1, "question": "river song >> writer", "answer": "Ann Lee"}],
            "answer": "Aatown",
            "answer_aliases": ["Aa", "Aatown"],
            "answerable": True,
        },
        Question("2hop__1_2", "Where was the writer of the river song born?", ("Aatown", "Aa")),
    ),
    "Bamboogle": ("plain", {"Question": "Who?", "Answer": "Bo"}, Question("rows.jsonl:1", "Who?", ("Bo",))),
    "FlashRAG": (
        "golden_answers",
        {"id": "test_0", "question": "Who?", "golden_answers": ["Bo", "Bo Lee"], "metadata": {}},
        Question("test_0", "Who?", ("Bo", "Bo Lee")),
    ),
    "Search-R1": (
        "verl",
        {
            "id": "train_0",
            "question": "Who?",
            "data_source": "nq",
            "prompt": [{"role": "user", "content": "Answer the given question. Question: Who?"}],
            "reward_model": {"ground_truth": {"target": ["Bo"]}, "style": "rule"},
            "extra_info": {"index": 0, "split": "train"},
        },
        Question("train_0", "Who?", ("Bo",)),
    ),
    "verl": (
        "verl",
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Who?"}],
            "reward_model": {"ground_truth": "Bo"},
        },
        Question("rows.jsonl:1", "Who?", ("Bo",)),
    ),
    "R1-Searcher": (
        "plain",
        {"idx": 3, "question": "How many?", "answer": 847, "gen_text_store": ""},
        Question("3", "How many?", ("847",)),
    ),
    "BrowseComp-Plus": (
        "BrowseComp-Plus",
        {
            "query_id": 769,
            "query": "Which paper ...?",
            "answer": "On Rivers",
            "gold_docs": [{"docid": "2", "text": "t", "url": "u"}],
            "evidence_docs": [{"docid": "1", "text": "t", "url": "u"}, {"docid": "2", "text": "t", "url": "u"}],
            "negative_docs": [{"docid": "9", "text": "t", "url": "u"}],
        },
        Question("769", "Which paper ...?", ("On Rivers",), evidence=("1", "2")),
    ),
}


def write(path: Path, *rows) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_each_data_set_is_read_in_its_own_format(tmp_path, name):
    expected_format, row, question = FORMATS[name]
    assert detect_format(row, "here") == expected_format
    assert load_questions(write(tmp_path / "rows.jsonl", row)) == [question]


def test_the_containers_of_the_data_sets_are_read(tmp_path):
    trivia = write(tmp_path / "unfiltered.json", {"Data": [FORMATS["TriviaQA"][1]], "Version": 1.0})
    assert load_questions(trivia) == [FORMATS["TriviaQA"][2]]
    row = FORMATS["PopQA"][1]
    quoted = ['"' + str(value).replace('"', '""') + '"' for value in row.values()]
    (tmp_path / "popqa.tsv").write_text("\t".join(row) + "\n" + "\t".join(quoted) + "\n")
    assert load_questions(tmp_path / "popqa.tsv") == [FORMATS["PopQA"][2]]
    (tmp_path / "bamboogle.csv").write_text("Question,Answer\nWho?,Bo\n")
    assert load_questions(tmp_path / "bamboogle.csv") == [Question("bamboogle.csv:1", "Who?", ("Bo",))]
    table = pyarrow.Table.from_pylist([FORMATS["Search-R1"][1]])
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")
    assert load_questions(tmp_path / "test.parquet") == [FORMATS["Search-R1"][2]]


NQ = {"question": "who", "answer": ["Bo"]}


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (
            [NQ, {"id": "1", "question": "q", "golden_answers": ["a"]}],
            "rows.jsonl:2: a golden_answers row in a file that",
        ),
        ([{"question": "q", "answer": None}], "rows.jsonl:1: no gold answer; add one, or set task.skip_unanswered"),
        ([{"question": "q", "answer": []}], "rows.jsonl:1: no gold answer"),
        ([{"question": "q", "answer": ["", "  "]}], "rows.jsonl:1: no gold answer"),
        ([{"question": "q"}], "rows.jsonl:1: no gold answer"),
        ([{"question": "q", "answer": {"value": "<unk>", "aliases": []}}], "rows.jsonl:1: no gold answer"),
        (
            [{"query_id": "1", "query": "dGhlcXVlcnlpc2VuY3J5cHRlZA==", "answer": "YW5z"}],
            "query is encrypted",
        ),
        ([{"question": "q", "answers": ["x"]}], None),
        ([{"question": "q", "answer": [{"x": 1}]}], "rows.jsonl:1: a gold answer must be text or a number"),
        ([{"question": "q", "answer": True}], "rows.jsonl:1: a gold answer must be text or a number"),
        ([{"question": " ", "answer": "a"}], "rows.jsonl:1: the question must be text that is not blank"),
        ([{"question": ["q"], "answer": "a"}], "rows.jsonl:1: the question must be text"),
        (
            [{"id": "x", **NQ}, {"id": "x", **NQ}],
            r"rows.jsonl:2: id 'x' was used at .*rows.jsonl:1; ids must be unique",
        ),
        ([{"id": 1, **NQ}, {"id": "1", **NQ}], "rows.jsonl:2: id '1' was used"),
        ([{"id": [1], **NQ}], "rows.jsonl:1: id must be text or an integer"),
        ([{"text": "q", "answer": "a"}], r"rows.jsonl:1: columns not understood \(text, answer\)"),
        ([{"question": "q", "possible_answers": "[broken"}], "rows.jsonl:1: a gold answer must be text or a number"),
        ([{"question": "q", "answer": {"value": None, "aliases": "x"}}], None),
        (
            [{"query_id": 1, "query": "q", "answer": "a", "gold_docs": [{"text": "t"}]}],
            "evidence documents must be ids",
        ),
        ([{"prompt": [], "reward_model": {"ground_truth": "a"}}], "rows.jsonl:1: the question must be text"),
        (['{"question": "\\ud800", "answer": "a"}'], "rows.jsonl:1: holds half of a surrogate pair"),
        (["{"], "rows.jsonl:1: not valid JSON"),
        (["\n"], "rows.jsonl: holds no questions"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, rows, match):
    path = write(tmp_path / "rows.jsonl", *rows)
    if match is None:
        assert load_questions(path)[0].golds == ("x",)
        return
    with pytest.raises(DataError, match=match) as caught:
        load_questions(path)
    assert "\n" not in str(caught.value)


def test_rows_without_a_gold_answer_are_left_out_and_counted_when_asked_for(tmp_path, caplog):
    # The unanswerable twin of a question has its id.
    rows = [FORMATS["MuSiQue"][1], {**FORMATS["MuSiQue"][1], "answerable": False}]
    path = write(tmp_path / "musique_full.jsonl", *rows)
    with pytest.raises(DataError, match=r"musique_full\.jsonl:2: no gold answer"):
        load_questions(path)
    with caplog.at_level(logging.WARNING):
        assert [question.id for question in load_questions(path, skip_unanswered=True)] == ["2hop__1_2"]
    assert "1 of 2 questions have no gold answer and are left out" in caplog.text
    with pytest.raises(DataError, match="holds no answered questions"):
        load_questions(write(tmp_path / "none.jsonl", rows[1]), skip_unanswered=True)


def test_no_question_is_both_trained_on_and_held_out(tmp_path):
    data = write(tmp_path / "data.jsonl", *({"question": f"q{n}", "answer": "a"} for n in range(6)))
    other = write(tmp_path / "other.jsonl", {"question": " Q1 ", "answer": "a"}, {"question": "q9", "answer": "a"})
    train, held = split_questions(str(data), "", most_train=3, held_out=2)
    assert ([q.text for q in train], [q.text for q in held]) == (["q0", "q1", "q2"], ["q4", "q5"])
    train, held = split_questions(str(data), str(other), most_train=9, held_out=2)
    assert ([q.text for q in train], [q.text for q in held]) == (["q0", "q2", "q3", "q4", "q5"], ["Q1", "q9"])
    train, held = split_questions("", str(other), most_train=9, held_out=1)
    assert (train, [q.text for q in held]) == ([], ["Q1"])
    with pytest.raises(DataError, match="leave nothing to train on"):
        split_questions(str(data), "", most_train=3, held_out=6)


@needs_shared
@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("qa/nq_open_dev_first500.jsonl", 500, ("14 December 1972 UTC", "December 1972")),
        ("qa/nq_open_efficientqa_dev_first100.jsonl", 100, ("1988",)),
        ("qa/bamboogle_r1searcher.jsonl", 125, ("james madison",)),
        ("qa/bamboogle_simpledeepsearcher.json", 125, ("james madison",)),
        ("qa/arpo_bamboogle_aliases.jsonl", 125, ("james madison",)),
        ("qa/arpo_hotpotqa_aliases.jsonl", 200, ("Frank Lowy",)),
        ("qa/arpo_2wiki_aliases.jsonl", 200, None),
        ("qa/arpo_simpleqa_aliases.jsonl", 500, ("Michio Sugeno",)),
        ("qa/2wiki_dev500_r1searcher.jsonl", 500, ("Tetisheri",)),
        ("qa/hotpotqa_dev500_r1searcher.jsonl", 500, ("Kauffman Stadium",)),
        ("qa/musique_dev500_r1searcher.jsonl", 500, ("Academy Award for Best Live Action Short Film",)),
        ("qa_with_passages/hotpot_distractor100.jsonl", 100, ("Gesellschaft mit beschränkter Haftung",)),
        ("qa_with_passages/r1s_bamboogle_questions.jsonl", 125, ("Yes",)),
        ("qa_with_passages/r1s_hotpotqa_questions.jsonl", 150, ("comic",)),
        ("qa_with_passages/r1s_2wiki_questions.jsonl", 150, ("Key House Mirror",)),
        ("qa_with_passages/cognee_hotpot_50_qa_pairs.json", 50, ("1755",)),
        ("formats/r1searcher_stage2_first500.jsonl", 500, None),
        ("formats/verl_arpo_hard_search_1k.parquet", 1071, None),
        ("formats/verl_arpo_valid.parquet", 180, None),
    ],
)
def test_real_files_are_read_whole(name, count, first):
    questions = load_questions(SHARED / name)
    assert len(questions) == count
    assert all(question.golds for question in questions)
    assert first is None or questions[0].golds == first
