# %% [markdown]
# # Exercise 13 · Answers from windows
#
# Between a net's outputs and an answer in words there are a few short functions, and each has a trap that costs points on the
# score and never raises an error. You write four: the windows of a long text, the best span in one of them, the best one over
# windows that lie on different ranks, and the F1 score. The third is checked on real processes against one.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says what differs. A loop that does not end is stopped after five seconds. Stuck? Each task has three
# hints; open them one at a time.

# %%
import string
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist

from course_lib import plots, squad_metrics
from course_lib.checks import alone, on_ranks, prepare, same
from course_lib.data.squad import cut

torch.set_num_threads(1)
prepare()

# %% [markdown]
# ## 1 · Cut a long text into windows
#
# A net reads `size` tokens at once. Cover a text of `length` tokens by windows: the first begins at 0, each next one takes up
# the last `stride` tokens of the one before again, and the last ends with the text. Then every answer of up to `stride`
# tokens is whole in some window. There must be no window that has nothing new, and at least one window.


# %% solution="windows"
def windows(length: int, size: int, stride: int) -> list[tuple[int, int]]:
    """[(first token, one after the last), …]; stride < size."""
    ### BEGIN SOLUTION
    found = [(0, min(size, length))]
    while found[-1][1] < length:
        begin = found[-1][1] - stride
        found.append((begin, min(begin + size, length)))
    return found
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How far is it from the beginning of one window to the beginning of the next? Beware of the name: elsewhere a stride is that
# distance, here it is what two windows share.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The distance is `size - stride`. And when is it enough? When a window has reached the end of the text, not when the next one
# would begin behind it.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Begin with `[(0, min(size, length))]`. While the last window ends before `length`: the next begins at that end minus
# `stride`, and ends at `min(begin + size, length)`.
#
# </details>
#
# Eighteen tokens in windows of eight that share three. A point is a token in a window:

# %%
seen = {n: list(range(begin, min(begin + 8, 18))) for n, begin in enumerate(cut(18, 8, 3), start=1)}
plots.lines({f"window {n}": (seen[n], [n] * len(seen[n])) for n in seen}, xlabel="token", ylabel="window")


# %% check="windows" points=2
def check_windows(length: int, size: int, stride: int) -> None:
    def made(begins):
        return [(begin, min(begin + size, length)) for begin in begins]

    mistakes = {
        "the same and a last window that has nothing new": made(range(0, length, size - stride)),
        "windows that begin every `stride` tokens: that is how much they share": made(range(0, length, stride or 1)),
        "the same without the last window: an answer at the end is lost": made(cut(length, size, stride))[:-1],
        "windows that share nothing: an answer at a border is in none of them": made(range(0, length, size)),
        "windows that go on behind the text": [(begin, begin + size) for begin in cut(length, size, stride)],
    }
    got = alone(lambda: windows(length, size, stride))
    wanted = made(cut(length, size, stride))
    same(got, wanted, f"{length} tokens in windows of {size} that share {stride}", mistakes=mistakes)


check_windows(18, 8, 3)
check_windows(20, 8, 3)
check_windows(2, 8, 3)
### BEGIN HIDDEN TESTS
check_windows(100, 20, 6)
check_windows(8, 8, 3)
check_windows(5, 8, 3)
check_windows(6, 3, 2)
check_windows(21, 7, 0)
check_windows(1, 4, 2)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · The best span
#
# For each token of a window the net says how much it looks like the first of the answer, and how much like the last. The
# score of a span is the sum of the two. Return the first and the last token of the best span that does not end before it
# begins and has at most `longest` tokens. The best first token and the best last one, each for itself, need not make a span
# at all.


# %% solution="span"
def best_span(starts: torch.Tensor, ends: torch.Tensor, longest: int) -> tuple[int, int]:
    """(first, last) of the best span, both included. starts, ends: (tokens,)."""
    ### BEGIN SOLUTION
    scores = starts[:, None] + ends[None, :]  # (first, last)
    allowed = torch.ones_like(scores).triu().tril(longest - 1).bool()
    place = scores.masked_fill(~allowed, -torch.inf).argmax().item()
    return divmod(place, len(starts))
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Think of a table with a row for each first token and a column for each last one. Which of its cells are spans?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Those on the diagonal and the `longest - 1` next to it on the right. `starts[:, None] + ends[None, :]` is the table. Two
# loops do as well: over `first`, and over `last` in `range(first, min(first + longest, len(ends)))`.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Set what is not allowed to `-torch.inf`: `allowed = torch.ones_like(scores).triu().tril(longest - 1).bool()`, then
# `scores.masked_fill(~allowed, -torch.inf).argmax().item()`, and `divmod` of that by `len(starts)` is (first, last).
#
# </details>
#
# A row for each first token, a column for each last one. Left all pairs, right those that may be an answer of up to three
# tokens; the brightest cell there is the one that you want: first 4, last 5.

# %%
starts, ends = np.array([-2, 0, 0, 0, 6, 0, 0, 0, 0]), np.array([9, 0, 0, 7, 1, 2, 0, 5, 6])
scores = starts[:, None] + ends[None, :]
spans = np.where(np.tril(np.triu(np.ones_like(scores)), 2) > 0, scores, scores.min())
plots.fields({"all pairs": scores, "spans of up to 3": spans}, units="start + end")


# %% check="span" points=2
def check_span(starts: list[float], ends: list[float], longest: int) -> None:
    starts, ends = torch.tensor(starts).float(), torch.tensor(ends).float()

    def best(shortest, longest):
        ok = [(a, b) for a in range(len(starts)) for b in range(len(ends)) if shortest <= b - a < longest]
        return max(ok, key=lambda pair: starts[pair[0]] + ends[pair[1]])

    wanted = best(0, longest)
    first, last = starts.argmax().item(), ends.argmax().item()
    mistakes = {
        "the best first and the best last token, each for itself": (first, last),
        "the best first token, and the best last one for it: another pair is better": (
            first,
            first + ends[first : first + longest].argmax().item(),
        ),
        "a span that may be too long: `longest` does not count": best(0, len(starts)),
        "a span that may be one token too long": best(0, longest + 1),
        "a span that may end before it begins": best(1 - longest, longest),
        "one after the last token, as in a slice": (wanted[0], wanted[1] + 1),
    }
    got = alone(lambda: best_span(starts, ends, longest))
    same(got, wanted, f"a span in {len(starts)} tokens, at most {longest} long", mistakes=mistakes)


check_span([-2, 0, 0, 0, 6, 0, 0, 0, 0], [9, 0, 0, 7, 1, 2, 0, 5, 6], 3)
check_span([5, 0, 0, 4, 0, 0, 1], [0, 3, 0, 5, 0, 0, 2], 3)
### BEGIN HIDDEN TESTS
random = torch.Generator().manual_seed(0)
for tokens, longest in ((40, 5), (12, 1), (6, 30), (1, 4), (25, 3)):
    check_span(torch.randn(tokens, generator=random).tolist(), torch.randn(tokens, generator=random).tolist(), longest)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · The best of all ranks
#
# Validation has dealt the windows out, so those of one question lie on different ranks. A rank knows the best span of each of
# its own windows: several of some questions, none of others, perhaps none at all. Return, on *every* rank, the best span of
# each question (0, 1, …; each has a window somewhere). Of equal scores the span that begins first wins: the answer must not
# depend on who had it.


# %% solution="choose"
def choose(found: list[tuple[int, float, int, int]], questions: int) -> list[tuple[int, int]]:
    """(first, last) of the best span of each question. found: (question, score, first, last), one for each window here."""
    ### BEGIN SOLUTION
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    best = {}
    for question, score, first, last in sum(gathered, []):
        best[question] = max(best.get(question, (-torch.inf,)), (score, -first, last))
    return [(-best[question][1], best[question][2]) for question in range(questions)]
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# If every rank knew what all have found, the rest would be a loop without messages, and all would come to the same result.
# Which collective brings lists of any length to all ranks?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `dist.all_gather_object(gathered, found)` with `gathered = [None] * dist.get_world_size()`. All ranks must call it, also one
# whose list is empty. (An all-reduce with `MAX` finds the best score, but the largest first token may be another window's.)
#
# </details>
# <details><summary>Hint 3</summary>
#
# Go through all that was gathered, `sum(gathered, [])`, and keep for each question the largest `(score, -first, last)`:
# Python compares tuples by their first elements, and where these are equal by the next. In the end, turn the sign of `-first`
# again.
#
# </details>
#
# One question, and the scores of its windows on three ranks. Afterwards all three know the best:

# %%
plots.collective("choosing", [[4.5, 2], [6.25], [3, 1, 5]], [[6.25]] * 3)


# %% check="choose" points=3
def check_choose(ranks: int, questions: int, each: int, idle: int = 0) -> None:
    random = torch.Generator().manual_seed(ranks)
    draws = torch.randint(0, 4, (questions * each, 3), generator=random).tolist()  # so few scores that some are equal
    rows = [(n % questions, float(score), 20 * n + a, 20 * n + a + b) for n, (score, a, b) in enumerate(draws)]
    busy = ranks - idle  # the others have no window
    held = [rows[busy - 1 - rank :: busy] if rank < busy else [] for rank in range(ranks)]  # the first is not on rank 0

    def asked(rows):
        return [[row[1:] for row in rows if row[0] == question] for question in range(questions)]

    def best(rows, sign=-1):
        return [max(some, key=lambda row: (row[0], sign * row[1]))[1:] if some else None for some in asked(rows)]

    apart = [(max(first for _, first, _ in some), max(last for _, _, last in some)) for some in asked(rows)]
    mistakes = {
        "each rank's own best: what have the others found?": [best(mine) for mine in held],
        "the largest first and the largest last token, of different windows": [apart] * ranks,
        "right but for equal scores: take the span that begins first": [best(rows, sign=1)] * ranks,
        "right but for equal scores, of which it is the first in the order of ranks: take the span that begins first": [
            best(sum(held, []), sign=0)
        ]
        * ranks,
    }
    got = on_ranks(ranks, lambda rank: choose(held[rank], questions))
    what = f"{questions} questions with {each} windows each on {ranks} ranks"
    same(got, [best(rows)] * ranks, what, ranks=True, mistakes=mistakes)


check_choose(2, 5, 7)
check_choose(3, 4, 4, idle=1)
### BEGIN HIDDEN TESTS
check_choose(4, 5, 6, idle=1)
check_choose(3, 2, 7)
### END HIDDEN TESTS

# %% [markdown]
# ## 4 · F1
#
# SQuAD compares answers as bags of words, after dropping case, punctuation (`string.punctuation`) and the words a, an, the.
# With c words in common, F1 is 2c / (words of one + words of the other); a word that both have twice counts twice. Of several
# right answers the best counts. Where there is none, the right answer is the empty one. An empty answer scores 1 against an
# empty one and 0 against any other.


# %% solution="f1"
def f1(found: str, golds: list[str]) -> float:
    """F1 of an answer against the right answer that fits best."""

    ### BEGIN SOLUTION
    def words(text):
        plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return Counter(word for word in plain.split() if word not in ("a", "an", "the"))

    def one(mine, theirs):
        if not mine or not theirs:
            return float(mine == theirs)
        return 2 * (mine & theirs).total() / (mine.total() + theirs.total())

    return max(one(words(found), words(gold)) for gold in golds or [""])
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `set` forgets how often a word occurs. `collections.Counter` does not, and `&` of two counters is what they have in common.
#
# </details>
# <details><summary>Hint 2</summary>
#
# First lower case, then drop punctuation letter by letter, then split, then drop the articles. `counter.total()` is the
# number of words. Take care of answers without any word before you divide.
#
# </details>
# <details><summary>Hint 3</summary>
#
# With counters `mine` and `theirs`: if one is empty, `float(mine == theirs)`, else
# `2 * (mine & theirs).total() / (mine.total() + theirs.total())`. Return the largest over `golds or [""]`.
#
# </details>
#
# Some answers to "What did she quote?", of which the right one is "to be or not to be":

# %%
answers = ["To be, or not to be!", "to be or not", "be", "the question", ""]
plots.bars({f'"{text}"': squad_metrics.f1(text, "to be or not to be") for text in answers}, xlabel="F1")


# %% check="f1" points=2
def check_f1(found: str, golds: list[str]) -> None:
    def measured(words, together=max):
        def one(mine, theirs):
            common = sum(min(mine.count(word), theirs.count(word)) for word in set(mine))
            return 2 * common / (len(mine) + len(theirs)) if mine and theirs else float(mine == theirs)

        return together([one(words(found), words(gold)) for gold in golds or [""]])

    def normal(text):
        return squad_metrics.normalise(text).split()

    mistakes = {
        "a score that forgets how often a word occurs": measured(lambda text: sorted(set(normal(text)))),
        "the mean over the right answers: the best counts": measured(normal, lambda scores: sum(scores) / len(scores)),
        "the score against the first right answer alone": measured(normal, lambda scores: scores[0]),
        "a score without dropping case, punctuation and articles": measured(str.split),
        "a score without dropping case": measured(
            lambda text: [w for w in text.translate(squad_metrics.PUNCTUATION).split() if w not in ("a", "an", "the")]
        ),
        "a score with spaces in the place of punctuation: drop it": measured(
            lambda text: normal("".join(" " if letter in string.punctuation else letter for letter in text))
        ),
        "a score without dropping punctuation": measured(
            lambda text: [w for w in text.lower().split() if w not in ("a", "an", "the")]
        ),
        "a score without dropping articles": measured(
            lambda text: text.lower().translate(squad_metrics.PUNCTUATION).split()
        ),
    }
    got = alone(lambda: f1(found, golds))
    wanted = squad_metrics.best(squad_metrics.f1, found, golds)
    same(got, wanted, f"F1 of {found!r} against {golds}", mistakes=mistakes)


check_f1("The small hammer!", ["a hammer"])
check_f1("to be or not", ["to be or not to be"])
check_f1("in May 1871", ["1870", "May 1871"])
check_f1("U.S. army", ["US Army"])
check_f1("", [])
### BEGIN HIDDEN TESTS
check_f1("a China that trades", ["China"])
check_f1("the other day", ["another day"])
check_f1("the saw and the hammer", ["a saw, a hammer", "saw"])
check_f1("New York, New York", ["New York", "the city"])
check_f1("a saw", [])
check_f1("", ["saw"])
check_f1("The", [])
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `cut` in `course_lib/data/squad.py`, `best_spans` in `course_lib/spans.py` (for a whole batch at once) and
# `course_lib/squad_metrics.py`. The third is solved in another way there: `Spans.sums` fills a table with a row for each
# window, and adding up tables brings all rows together, by the same all-reduce that adds up the loss.
#
# *Which of the two would you take for a million windows, lists of objects or one table of numbers? And what happens to each
# if a sampler gives a window to two ranks?*
#
# **Next:** your own net.
