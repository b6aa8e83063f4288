"""Hard questions over a collection of web documents (BrowseComp-Plus): search, open, answer, be judged.

Queries are rows of ``query_id``, ``query``, ``answer``, ``gold_docs`` and ``evidence_docs`` (the data set once
decrypted), the corpus is rows of ``docid``, ``text`` and ``url``; other questions and corpora work as they do in
:mod:`.search_qa`. Answers are judged by a language model, or by exact match.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from brace_rl.errors import ConfigError
from brace_rl.tasks.base import Environment, Problem, Task
from brace_rl.tasks.search.environment import Layout, SearchEnvironment, stop_texts
from brace_rl.tasks.search.judge import AnswerVerifier, Judge, LlmJudge, RuleJudge
from brace_rl.tasks.search.passages import render_results
from brace_rl.tasks.search.prompts import RETRY, research_instructions
from brace_rl.tasks.search.questions import Question, split_questions
from brace_rl.tasks.search.retrievers import FileRetriever, HttpRetriever, Retriever
from brace_rl.tasks.search.settings import WebResearchSettings
from brace_rl.tasks.search.tools import OPEN_TAG, SEARCH_TAG, OpenTool, SearchTool, Shown


class WebResearchTask(Task):
    """See the module's docstring.

    Args:
        seed: unused; problems keep the order of the file.

    Raises:
        ConfigError: there is no corpus, or a language model is to judge and is not named.
        DataError: data, corpus or index cannot be used.
    """

    Settings = WebResearchSettings

    def __init__(self, settings: WebResearchSettings, *, seed: int) -> None:
        self._settings = settings
        self.max_observation_tokens = settings.max_observation_tokens
        self.stop = stop_texts((SEARCH_TAG, OPEN_TAG), max_calls=settings.max_calls_per_turn)
        self._judge = _judge(settings)
        train, evaluation = split_questions(
            settings.data,
            settings.eval_data,
            most_train=settings.train_problems,
            held_out=settings.eval_problems,
            skip_unanswered=settings.skip_unanswered,
        )
        if not settings.corpus:
            raise ConfigError("task.corpus: web_research needs documents to open; give a .jsonl corpus")
        self._documents = FileRetriever(Path(settings.corpus), Path(settings.index) if settings.index else None)
        self._retriever: Retriever = self._documents
        if settings.retriever_url:
            self._retriever = HttpRetriever(settings.retriever_url, settings.tool_timeout_s, settings.retriever_retries)
        self._train, self._eval = self._problems(train), self._problems(evaluation)

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        settings = self._settings
        shown, render = Shown(), partial(render_results, limit=settings.snippet_chars)
        return SearchEnvironment(
            tools={
                SEARCH_TAG: SearchTool(self._retriever, settings.top_k, render, shown),
                OPEN_TAG: OpenTool(self._documents, page=settings.page_chars, shown=shown),
            },
            verifier=AnswerVerifier(self._judge, problem.metadata["question"], tuple(problem.metadata["golds"])),
            layout=Layout(before="\n\n", after="\n\n", retry=RETRY, chat=True),
            stop=self.stop,
            max_turns=settings.max_turns,
            max_calls=settings.max_calls_per_turn,
            tool_timeout_s=settings.tool_timeout_s,
            shown=shown,
            evidence=problem.metadata["evidence"],
        )

    def _problems(self, questions: Sequence[Question]) -> list[Problem]:
        settings = self._settings
        instructions = research_instructions(turns=settings.max_turns - 1, max_calls=settings.max_calls_per_turn)
        return [question.problem(instructions) for question in questions]


def _judge(settings: WebResearchSettings) -> Judge:
    if settings.judge == "rule":
        return RuleJudge()
    if not settings.judge_url or not settings.judge_model:
        missing = "judge_model" if settings.judge_url else "judge_url"
        raise ConfigError(f"task.{missing}: a language model is to judge; name it, or set task.judge = 'rule'")
    return LlmJudge(
        url=settings.judge_url,
        model=settings.judge_model,
        key_variable=settings.judge_key_variable,
        timeout_s=settings.judge_timeout_s,
        retries=settings.judge_retries,
        max_tokens=settings.judge_max_tokens,
    )
