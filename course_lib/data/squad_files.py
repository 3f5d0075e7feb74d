"""SQuAD's files: paragraphs, questions about them, and where in the paragraph the answers stand. Versions 1.1 and 2.0."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from course_lib.config import UserError

NAMES = {
    "train": ("train.json", "train-v1.1.json", "train-v2.0.json"),
    "valid": ("valid.json", "dev-v1.1.json", "dev-v2.0.json"),
}
MAKE = "python -m course_lib.data.make --kind questions makes some"
FLAWS = 0.01  # of the questions; more than that is not SQuAD's carelessness but a mistake


@dataclass(frozen=True)
class Question:
    """What is asked of which paragraph, and the right answers: (text, first character); none where there is no answer."""

    name: str
    text: str
    paragraph: int
    answers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Squad:
    """One file: its paragraphs, and the questions about all of them."""

    path: Path
    contexts: list[str]
    questions: list[Question]


def find(folder: str | Path, part: str) -> Path:
    """The part's file in a folder, by its name: ours, or one of SQuAD's own."""
    there = [path for name in NAMES[part] if (path := Path(folder) / name).exists()]
    if not there:
        raise UserError(f"--data {folder} has none of {', '.join(NAMES[part])}; {MAKE}")
    if len(there) > 1:
        both = " and ".join(path.name for path in there)
        raise UserError(f"--data {folder} has both {both}: keep each version in a folder of its own")
    return there[0]


def read(path: Path) -> Squad:
    """All paragraphs and questions of a file. A few whose answer is not where the file says are left out, with a word."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # which also says "not UTF-8"
        raise UserError(f"{path} can't be read as JSON ({error}); is it whole?") from error
    contexts: list[str] = []
    questions: list[Question] = []
    flaws: list[str] = []
    asked = "none"
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                context = paragraph["context"]
                for one in paragraph["qas"]:
                    asked = one["id"]
                    answers = () if one.get("is_impossible") else _answers(one)
                    question = Question(str(asked), str(one["question"]), len(contexts), answers)
                    wrong = [text for text, start in answers if start < 0 or not context.startswith(text, start)]
                    if wrong:
                        flaws.append(f"the answer {wrong[0]!r} of question {asked!r} is not where answer_start says")
                    else:
                        questions.append(question)
                contexts.append(context)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is not in SQuAD's format ({reason}; last question: {asked!r}); {MAKE}") from error
    if len(flaws) > FLAWS * (len(flaws) + len(questions)):
        raise UserError(f"{path}: {flaws[0]} (nor in {len(flaws) - 1} other questions); correct the file")
    if flaws:
        print(
            f"{path}: {len(flaws)} of {len(flaws) + len(questions)} questions left out: {flaws[0]} …", file=sys.stderr
        )
    if not questions:
        raise UserError(f"{path} has no questions; {MAKE}")
    return Squad(path, contexts, questions)


def _answers(one: dict) -> tuple[tuple[str, int], ...]:
    """The right answers, each once; a question that has none must say so."""
    answers = tuple(dict.fromkeys((answer["text"], int(answer["answer_start"])) for answer in one["answers"]))
    if not all(text for text, _ in answers) or not answers:
        raise ValueError("a question without an answer, and without is_impossible")
    return answers
