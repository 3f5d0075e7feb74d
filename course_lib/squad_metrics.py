"""Exact match and F1 as SQuAD defines them: answers are compared as bags of words, without case, punctuation or articles."""

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)  # of ASCII alone, as the definition has it


def normalise(answer: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact(found: str, right: str) -> float:
    """1 if both are the same after normalising, else 0."""
    return float(normalise(found) == normalise(right))


def f1(found: str, right: str) -> float:
    """The harmonic mean of precision and recall of the words; where one has none, 1 only if the other has none either."""
    mine, theirs = normalise(found).split(), normalise(right).split()
    if not mine or not theirs:
        return float(mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs))  # 2pr / (p + r) with p = common / mine, r = common / theirs


def best(measure, found: str, golds: Sequence[str]) -> float:
    """Against the right answer that fits best; a question without an answer has the empty one."""
    return max(measure(found, right) for right in _with_words(golds))


def _with_words(golds: Sequence[str]) -> Sequence[str]:
    """The definition leaves out answers of which normalising leaves nothing; if no other is left, the right one is empty."""
    return [right for right in golds if normalise(right)] or [""]
