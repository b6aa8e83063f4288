"""Which words after a number only name what is counted, and which are part of the answer.

``20 miles`` is 20; ``6 x``, ``8 thousand``, ``3 pi`` and ``5 or six`` are not 6, 8, 3 and 5. No list holds every noun
that can be counted, so a word counts as a unit unless something speaks against it: it is too short to be a word and no
known unit, or it belongs to a number, an operation, a variable or a sentence.
"""

from __future__ import annotations

import re

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Words that multiply the number before them by a power of ten."""

_LETTERS = "mgshLlCF"
"""Single letters that are units; any other is a variable."""
_SHORT = re.compile(
    r"cm|mm|km|nm|ft|in|yd|mi|kg|mg|gm|lb|oz|ml|dl|cl|kl|hr|pm|am|hz|kw|kj|ha|rs|sq|cu|st|nd|rd|th"
    r"|mph|kph|lbs|hrs|yds|cms|kms|mls|gms|pts|qts"
)
"""Units of two letters, or without a vowel."""
_NO_UNIT = re.compile(
    rf"""
    one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|seventy
    |eighty|ninety|half|halves|thirds|fifths|sixths|sevenths|eighths|ninths|tenths|twelfths|hundredths|thousandths|point
    |{"|".join(SCALES)}
    |plus|minus|times|over|divided|multiplied|squared|cubed|factorial|root|power|mod|modulo|choose|than|equals?
    |sqrt|frac|cdot|sin|cos|tan|cot|sec|csc|log|exp
    |alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|phi|rho|tau|abcd?|bcd|cde|def|mno|pqr|rst|uvw|xyzw?
    |or|and|not|but|is|are|was|were|wrong|right|maybe|perhaps|instead|except
    """,
    re.VERBOSE,
)
_WORD = re.compile(r"[A-Za-z]+")
_PHRASE = re.compile(r"\s*\(?\s*[A-Za-z]+(?:[ /.,-]+[A-Za-z]+)*\.?\s*\)?\s*")
_VOWEL = re.compile(r"[aeiouy]")


def is_unit(phrase: str) -> bool:
    """Whether words only name a quantity: ``miles``, ``cubic centimeters``, ``km/h``, ``(square inches)``."""
    return _PHRASE.fullmatch(phrase) is not None and all(map(_names_a_unit, _WORD.findall(phrase)))


def _names_a_unit(word: str) -> bool:
    if len(word) == 1:
        return word in _LETTERS
    small = word.casefold()
    if _SHORT.fullmatch(small):
        return True
    return len(small) > 2 and _NO_UNIT.fullmatch(small) is None and _VOWEL.search(small) is not None
