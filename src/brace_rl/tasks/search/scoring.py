"""Exact match and F1 of short answers, with the normalisation of SQuAD (Rajpurkar et al. 2016).

Both are the largest value over the gold answers. Normalisation lower-cases, drops ASCII punctuation, drops the English
articles and joins what is left with single spaces; it keeps accents, other scripts' punctuation, and currency signs.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BARE = ("yes", "no", "noanswer")
"""Answers that HotpotQA's scorer gives no partial credit: F1 is 1 or 0."""


def normalize_answer(text: str) -> str:
    """``text`` as SQuAD compares it: ``The  Beatles!`` becomes ``beatles``."""
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(words.split())


def exact_match(prediction: str, golds: Sequence[str]) -> bool:
    """Whether ``prediction`` equals one of ``golds`` after normalisation.

    A prediction that normalises to nothing matches no gold answer, not even one that normalises to nothing as well.

    Raises:
        ValueError: there are no gold answers.
    """
    _require(golds)
    normalized = normalize_answer(prediction)
    return bool(normalized) and any(normalized == normalize_answer(gold) for gold in golds)


def f1_score(prediction: str, golds: Sequence[str]) -> float:
    """Largest F1 of the bags of normalised words, from 0 to 1.

    ``yes``, ``no`` and ``noanswer`` are right or wrong as a whole (as in HotpotQA's scorer): one of them against
    anything else is 0.

    Raises:
        ValueError: there are no gold answers.
    """
    _require(golds)
    return max(_f1(normalize_answer(prediction), normalize_answer(gold)) for gold in golds)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in _BARE or gold in _BARE):
        return 0.0
    predicted, wanted = prediction.split(), gold.split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    return 2 * common / (len(predicted) + len(wanted))


def _require(golds: Sequence[str]) -> None:
    if isinstance(golds, str) or not golds:
        raise ValueError("golds must be a list of at least one gold answer")
