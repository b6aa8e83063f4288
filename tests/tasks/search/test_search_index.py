"""Corpora and their BM25 index."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import sys
from pathlib import Path

import pytest

from brace_rl.errors import ConfigError, DataError
from brace_rl.tasks.search.corpus import Document, split_title
from brace_rl.tasks.search.index import Bm25, index_documents, open_index, words_of
from brace_rl.tasks.search.retrievers import FileRetriever

ROWS = [
    {"id": "a", "contents": '"Paris"\nParis is the capital of France.'},
    {"id": "b", "contents": '"Lyon"\nLyon is a city in France, and no capital.'},
    {"id": "c", "contents": '"Züri"\nZürich lies in Switzerland.'},
]


@pytest.fixture(autouse=True)
def nothing_cached():
    open_index.cache_clear()


def write(path: Path, rows) -> Path:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8"
    )
    return path


def titles(index, query, count=10):
    return [index.documents[row].title for row, _ in index.ranking.top(query, count)]


def test_an_index_is_built_once_and_answers_alike_when_read_again(tmp_path):
    corpus = write(tmp_path / "corpus.jsonl", ROWS)
    first = open_index(corpus)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "corpus.jsonl.bm25").iterdir()}
    open_index.cache_clear()
    second = open_index(corpus)
    assert titles(first, "capital of France") == titles(second, "capital of France") == ["Paris", "Lyon"]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "corpus.jsonl.bm25").iterdir()} == written
    assert not [name for name in written if name.endswith((".pkl", ".pickle"))]


def test_the_folder_can_be_elsewhere(tmp_path):
    corpus = write(tmp_path / "corpus.jsonl", ROWS)
    open_index(corpus, tmp_path / "indices" / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "indices"]
    assert (tmp_path / "indices" / "mine" / "fingerprint.json").is_file()


def test_documents_are_read_from_their_places_and_found_by_id(tmp_path):
    index = open_index(write(tmp_path / "c.jsonl", ["", *ROWS, "", {"id": 7, "contents": "one line"}]))
    assert [index.documents[row].id for row in range(len(index.documents))] == ["a", "b", "c", "7"]
    assert index.documents[0] == Document("a", "Paris", "Paris is the capital of France.")
    assert index.documents[3] == Document("7", "", "one line")
    assert [index.documents.row_of(name) for name in ("a", "7", "z")] == [0, 3, None]


def test_the_columns_of_browsecomp_plus_are_read(tmp_path):
    rows = [{"docid": "5412", "text": "Some page about beavers.", "url": "https://example.org/b"}]
    index = open_index(write(tmp_path / "c.jsonl", rows))
    assert index.documents[0] == Document("5412", "https://example.org/b", "Some page about beavers.")


def test_an_index_of_another_corpus_is_refused(tmp_path):
    corpus = write(tmp_path / "c.jsonl", ROWS)
    open_index(corpus)
    open_index.cache_clear()
    write(corpus, ROWS[:2])
    with pytest.raises(DataError, match=r"c\.jsonl\.bm25: does not match .*c\.jsonl; delete the folder"):
        open_index(corpus)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: (folder / "fingerprint.json").unlink(), "not an index of this program"),
        (lambda folder: (folder / "fingerprint.json").write_text('{"format": 0}'), "another version"),
        (lambda folder: (folder / "fingerprint.json").write_text("{"), "damaged index"),
        (lambda folder: (folder / "places.safetensors").write_bytes(b"x"), "damaged index"),
        (lambda folder: (folder / "vocab.index.json").unlink(), "damaged index"),
    ],
)
def test_a_folder_that_is_no_whole_index_is_refused(tmp_path, spoil, match):
    corpus = write(tmp_path / "c.jsonl", ROWS)
    open_index(corpus)
    open_index.cache_clear()
    spoil(tmp_path / "c.jsonl.bm25")
    with pytest.raises(DataError, match=match) as caught:
        open_index(corpus)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], r"c\.jsonl: holds no documents"),
        (["{"], r"c\.jsonl:1: not valid JSON"),
        (["[1]"], r"c\.jsonl:1: a document must be a JSON object with named columns, not list"),
        ([{"id": "a", "text": "x"}], r"c\.jsonl:1: columns not understood \(id, text\)"),
        ([ROWS[0], {"docid": "a", "text": "x"}], r"c\.jsonl:2: a row with docid and text in a file that began with id"),
        ([{"id": "", "contents": "x"}], r"c\.jsonl:1: a document needs an id"),
        ([{"id": True, "contents": "x"}], r"c\.jsonl:1: a document needs an id"),
        ([{"id": "a", "contents": None}], r"c\.jsonl:1: a document needs an id"),
        ([ROWS[0], ROWS[1], ROWS[0]], r"c\.jsonl: documents 1 and 3 have the same id 'a'"),
        ([{"id": 1, "contents": "x"}, {"id": "1", "contents": "y"}], "documents 1 and 2 have the same id '1'"),
        (['{"id": "a", "contents": "\\ud800"}'], r"c\.jsonl:1: holds half of a surrogate pair"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused_and_leaves_no_index(tmp_path, rows, match):
    corpus = write(tmp_path / "c.jsonl", rows)
    with pytest.raises(DataError, match=match) as caught:
        open_index(corpus)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_corpus_that_is_not_there_or_not_utf8_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such corpus"):
        open_index(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('{"id": "a", "contents": "café"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:1: not UTF-8"):
        open_index(tmp_path / "latin.jsonl")


def test_documents_in_memory_need_ids_of_their_own():
    with pytest.raises(DataError, match="same id"):
        index_documents([Document("a", "", "x"), Document("a", "", "y")])
    with pytest.raises(DataError, match="at least one"):
        index_documents([])


def test_words_are_compared_without_case_accents_and_punctuation():
    assert words_of("The Zürich—Bâle line, No. 7 (ﬁne)") == ["zurich", "bale", "line", "7", "fine"]


def lucene_bm25(documents: list[list[str]], query: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Literal: sum over query words of ln(1 + (N - n + 0.5) / (n + 0.5)) * tf / (tf + k1 (1 - b + b l / mean l))."""
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score = 0.0
        for word in query:
            holding = sum(word in other for other in documents)
            if holding:
                rarity = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
                times = words.count(word)
                score += rarity * times / (times + k1 * (1 - b + b * len(words) / mean))
        scores.append(score)
    return scores


def test_scores_are_those_of_the_literal_formula():
    texts = ["cat cat dog", "dog bird", "fish fish fish swim", "cat bird fish dog", "swim"]
    ranking = Bm25.build(texts)
    for query in ("cat", "dog fish", "cat cat swim", "bird unknown"):
        expected = lucene_bm25([text.split() for text in texts], query.split())
        found = dict(ranking.top(query, 10))
        assert found == pytest.approx({row: score for row, score in enumerate(expected) if score > 0}, rel=1e-5)
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_equal_scores_come_in_order_of_the_rows_also_at_the_border():
    ranking = Bm25.build(["x y", "y x", "z z", "x y", "y x", "x y x"])
    assert [row for row, _ in ranking.top("x y", 3)] == [row for row, _ in ranking.top("x y", 6)][:3]
    ties = [row for row, score in ranking.top("y", 6) if score == ranking.top("y", 1)[0][1]]
    assert ties == sorted(ties)


@pytest.mark.parametrize("query", ["", "the", "unknown words", "?!"])
def test_a_query_without_a_known_word_finds_nothing(query):
    assert index_documents([Document("a", "", "cat"), Document("b", "", "dog")]).ranking.top(query, 3) == []


def test_without_bm25s_its_installation_is_explained(tmp_path, monkeypatch):
    corpus = write(tmp_path / "c.jsonl", ROWS)
    monkeypatch.setitem(sys.modules, "bm25s", None)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"needs bm25s; pip install 'brace-rl\[tasks\]'"):
            open_index(corpus)
    monkeypatch.undo()
    open_index(corpus)
    open_index.cache_clear()
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match="needs bm25s"):
        open_index(corpus)


def test_a_pickled_retriever_holds_the_paths_and_not_the_index(tmp_path):
    rows = [{"id": n, "contents": f"word{n} " * 200} for n in range(200)]
    retriever = FileRetriever(write(tmp_path / "c.jsonl", rows))
    data = pickle.dumps(retriever)
    assert len(data) < 1000
    assert pickle.loads(data).find("word7", 1) == retriever.find("word7", 1)
    shutil.rmtree(tmp_path / "c.jsonl.bm25")


@pytest.mark.parametrize(
    ("contents", "parts"),
    [('"T"\ntext', ("T", "text")), ("T\na\nb", ("T", "a\nb")), ("text", ("", "text")), ("\ntext", ("", "text"))],
)
def test_the_first_line_is_the_title(contents, parts):
    assert split_title(contents) == parts
