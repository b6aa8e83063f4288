"""Settings of the four search families. Torch-free."""

from __future__ import annotations

from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from brace_rl.tasks.search.facts import MOST_PEOPLE, RELATIONS
from brace_rl.tasks.settings import DataSettings, GeneratedSettings, ToolSettings

_RETRIEVER = "http://127.0.0.1:8000/retrieve"
_JUDGE = "http://127.0.0.1:8000/v1"


def _web_address(value: str, info: ValidationInfo) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError(f"must be an address such as {_JUDGE if info.field_name == 'judge_url' else _RETRIEVER}")
    if "@" in parts.netloc:
        raise ValueError("must hold no user and password, which would be saved with the run")
    return value


class _Calls(ToolSettings):
    """How tools are called."""

    max_calls_per_turn: int = Field(1, ge=1, le=64, description="tool calls of one turn that are served, concurrently")


class _Retrieval(_Calls):
    """Where documents come from."""

    corpus: str = Field("", description="documents: .jsonl with id and contents, or docid, text and url")
    index: str = Field("", description="folder of the BM25 index; empty: CORPUS.bm25 beside the corpus")
    retriever_url: str = Field("", description="search with a server in Search-R1's format instead of BM25")
    retriever_retries: int = Field(2, ge=0, le=10, description="attempts after the first when the server fails")
    top_k: int = Field(3, ge=1, le=100, description="documents one search returns")
    skip_unanswered: bool = Field(
        False, description="leave rows without a gold answer out instead of refusing the file"
    )

    _address = field_validator("retriever_url")(_web_address)


class SearchQaSettings(DataSettings, _Retrieval):
    """Questions answered by searching (NQ, TriviaQA, PopQA, HotpotQA, 2WikiMultihopQA, MuSiQue, Bamboogle)."""

    name: str = "search_qa"
    max_turns: int = Field(8, ge=1, description="model turns per episode; the episode ends unrewarded after the last")
    passage_chars: int = Field(0, ge=0, description="characters shown of each passage; 0: all")

    @model_validator(mode="after")
    def _some_retriever(self) -> SearchQaSettings:
        if self.corpus and self.retriever_url:
            raise ValueError("task.retriever_url: task.corpus is given too; leave one of them out")
        return self


class WebResearchSettings(DataSettings, _Retrieval):
    """Hard questions answered by searching and opening documents (BrowseComp-Plus), judged by a language model."""

    name: str = "web_research"
    max_turns: int = Field(50, ge=1, description="model turns per episode; the episode ends unrewarded after the last")
    max_calls_per_turn: int = Field(4, ge=1, le=64, description="tool calls of one turn that are served, concurrently")
    top_k: int = Field(5, ge=1, le=100, description="documents one search returns")
    snippet_chars: int = Field(400, ge=1, description="characters shown of each result")
    page_chars: int = Field(12_000, ge=100, description="characters of a document that one open call shows")
    judge: Literal["llm", "rule"] = Field("llm", description="who decides: a language model, or exact match")
    judge_url: str = Field("", description=f"OpenAI-compatible server, such as {_JUDGE}")
    judge_model: str = Field("", description="the judge's name on that server")
    judge_key_variable: str = Field(
        "OPENAI_API_KEY", description="environment variable that holds the key; may be unset"
    )
    judge_timeout_s: float = Field(
        120.0, gt=0, description="longest one verdict may take; each of its attempts gets an equal share"
    )
    judge_retries: int = Field(2, ge=0, le=10, description="attempts after the first, of requests and of verdicts")
    judge_max_tokens: int = Field(2048, ge=16, description="length of the judge's reply, its reasoning included")

    _judge_address = field_validator("judge_url")(_web_address)


class _Facts(GeneratedSettings, _Calls):
    """What generated questions are about."""

    turns_per_hop: ClassVar[int] = 1

    hops: tuple[int, int] = Field((2, 3), description="fewest and most relations in a question, all different")
    people: int = Field(150, ge=20, le=MOST_PEOPLE, description="people in the generated world")
    worlds: int = Field(24, ge=1, description="worlds trained on; with few of them their facts are remembered")
    relations: int = Field(5, ge=2, le=len(RELATIONS), description="facts about each of them")
    top_k: int = Field(3, ge=2, le=20, description="documents one search returns")

    @model_validator(mode="after")
    def _can_be_answered(self) -> _Facts:
        if not 1 <= self.hops[0] <= self.hops[1] < self.relations:
            raise ValueError("task.hops: needs 1 <= fewest <= most < task.relations")
        needed = self.turns_per_hop * self.hops[1] + 1
        if self.max_turns < needed:
            raise ValueError(f"task.max_turns: a question with {self.hops[1]} relations takes {needed} turns")
        return self


class SearchFactsSettings(_Facts):
    """Generated multi-hop questions about facts that a search tool finds."""

    name: str = "search_facts"


class WebFactsSettings(_Facts):
    """Generated chains of facts on pages, true and false, to be searched and opened."""

    turns_per_hop: ClassVar[int] = 2

    name: str = "web_facts"
    hops: tuple[int, int] = Field((2, 4), description="fewest and most relations in a question, all different")
    max_turns: int = Field(10, ge=1, description="model turns per episode; the episode ends unrewarded after the last")
    max_calls_per_turn: int = Field(2, ge=1, le=64, description="tool calls of one turn that are served, concurrently")
