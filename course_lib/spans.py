"""How answers are judged that a net points at: from logits of windows to words, over any number of batches and ranks."""

import unicodedata

import numpy as np
import torch
from torch.nn import functional as F

from course_lib import squad_metrics

LONGEST = 30  # tokens of an answer
COLUMNS = (
    5  # of what is known of a window: how often it was judged; score, first and last token of its best span; [CLS]
)


class Spans:
    """Of question answering: the cross entropy of first and last token, exact match and F1 over all questions.

    A question's windows may lie on different ranks, and text can't be added up. So the sums hold a table with a row for each
    window, zero but for those of this batch: adding such tables brings all rows together, and only then is anything decided.
    """

    def __init__(self, squad, contexts, windows: np.ndarray, begins):
        self.squad, self.contexts, self.windows = squad, contexts, windows
        self.begins = torch.tensor(begins)  # where the paragraph begins in each window
        self.lengths = torch.from_numpy(windows[:, 2] - windows[:, 1]).long()
        self.may_be_empty = any(not question.answers for question in squad.questions)  # SQuAD 1.1: never

    @classmethod
    def loss(cls, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cls.losses(prediction, target).mean()

    @staticmethod
    def losses(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """One a sample: the mean cross entropy of its first and its last token."""
        return F.cross_entropy(prediction.transpose(1, 2), target[:, :2], reduction="none").mean(dim=1)

    def sums(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self.losses(prediction, target).double().sum()
        which = target[:, 2].cpu()
        first = self.begins[which].to(prediction.device)
        found = best_spans(prediction, first, first + self.lengths[which].to(prediction.device))
        table = loss.new_zeros(len(self.windows), COLUMNS)
        table[target[:, 2]] = torch.cat([torch.ones_like(found[:, :1]), found], dim=1)
        return torch.cat([torch.stack([loss, loss.new_tensor(len(target))]), table.flatten()])

    def result(self, sums: list[float]) -> dict:
        answers = self.answers(sums)
        measured = {"exact": squad_metrics.exact, "f1": squad_metrics.f1}
        totals = dict.fromkeys(measured, 0.0)
        for number, found in answers.items():
            golds = [text for text, _ in self.squad.questions[number].answers]
            for name, measure in measured.items():
                totals[name] += squad_metrics.best(measure, found, golds)
        loss, count = sums[:2]
        return {"loss": loss / count} | {n: t / len(answers) for n, t in totals.items()} | {"count": round(count)}

    def answers(self, sums: list[float]) -> dict[int, str]:
        """{number of a question: the words that were pointed at, "" for none}, from all of its windows."""
        table = np.array(sums[2:]).reshape(-1, COLUMNS)
        table[:, 1:] /= np.maximum(table[:, :1], 1)  # some samplers show a window twice, to fill a batch
        best: dict[int, tuple] = {}
        empty: dict[int, float] = {}
        for window, (times, score, first, last, null) in enumerate(table):
            if times:
                number = int(self.windows[window, 0])
                best[number] = max(best.get(number, (-np.inf,)), (score, window, first, last))
                empty[number] = min(empty.get(number, np.inf), null)  # SQuAD's rule: the window that is least sure
        return {
            number: "" if self.may_be_empty and empty[number] > score else self.words(window, int(first), int(last))
            for number, (score, window, first, last) in best.items()
        }

    def words(self, window: int, first: int, last: int) -> str:
        """The characters from one token of a window to another, as they stand in the paragraph."""
        number, begin, _ = self.windows[window]
        paragraph = self.squad.questions[number].paragraph
        places = self.contexts.places(paragraph)
        shift = int(begin) - int(self.begins[window])
        if not len(places):
            return ""
        return excerpt(self.squad.contexts[paragraph], places[first + shift, 0], places[last + shift, 1])


def excerpt(text: str, start: int, stop: int) -> str:
    """text[start:stop], and the accents that follow: tokenizers drop those that are characters of their own."""
    while stop < len(text) and unicodedata.combining(text[stop]):
        stop += 1
    return text[start:stop]


def best_spans(prediction: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """(batch, 4): score, first and last token of the best span inside [begin, end), and the score of [CLS], float64."""
    logits = prediction.double()
    places = torch.arange(logits.shape[2], device=logits.device)
    outside = (places < begin[:, None]) | (places >= end[:, None])
    firsts, lasts = logits.masked_fill(outside[:, None], -1e30).unbind(dim=1)
    # (batch, first token, length): the last tokens that each first one may have
    lasts = F.pad(lasts, (0, LONGEST - 1), value=-1e30).unfold(1, LONGEST, 1)
    scores, which = (firsts[:, :, None] + lasts).flatten(1).max(dim=1)
    first = which // LONGEST
    return torch.stack([scores, first, first + which % LONGEST, logits[:, :, 0].sum(dim=1)], dim=1)
