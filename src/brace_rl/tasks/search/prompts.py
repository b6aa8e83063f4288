"""What the policy is told in the families with real data."""

from __future__ import annotations

from collections.abc import Mapping

_ANSWER = (
    "When you know the answer, write it between <answer> and </answer>, as short as the question allows and without "
    "explanation, for example <answer>Paris</answer>."
)


def search_instructions(*, searches: int, max_calls: int) -> str:
    """Of a task with a search tool; ``searches`` turns may search, each ``max_calls`` times."""
    several = (
        ""
        if max_calls == 1
        else f" You may write up to {max_calls} searches one after the other and end your turn: they run together."
    )
    return (
        "Answer the question below. Begin by thinking between <think> and </think>, and do so again whenever you have "
        "read something new. If you lack knowledge, search for it: write a query between <search> and </search>, and "
        f"the best passages are inserted between <information> and </information>.{several} You may search in at most "
        f"{searches} turns. {_ANSWER}"
    )


def research_instructions(*, turns: int, max_calls: int) -> str:
    """Of a task with a search tool and documents to open; ``turns`` turns may use them."""
    return (
        "Answer the question below by research in a collection of documents. Think between <think> and </think>. You "
        "have two tools. <search>query</search> lists the best documents, each with its id in brackets, its title and "
        "the beginning of its text. <open>id</open> shows a document; of a long one it shows the first page, and "
        f"<open>id 2</open> the second. Write up to {max_calls} calls one after the other and end your turn: they run "
        "together, and what they return is put between <information> and </information>. Documents may be wrong or "
        "beside the point, so check what matters in a second one. You may use tools in at most "
        f"{turns} turns. {_ANSWER}"
    )


def messages(instructions: str, question: str) -> tuple[Mapping[str, str], ...]:
    """One message of the user; models whose templates refuse a system message take it as well."""
    return ({"role": "user", "content": f"{instructions}\n\nQuestion: {question}"},)


RETRY = (
    "\nThis turn held neither a search nor an answer. To search, put a query between <search> and </search>; to "
    "answer, put the answer between <answer> and </answer>.\n"
)
"""Said after a turn that does nothing."""
