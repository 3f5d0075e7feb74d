# %% [markdown]
# # Exercise 00 · Who does what
#
# In lesson 00 two processes ran one program and added up their numbers. Here you write what nearly every program on several
# ranks begins with: which part of the work is mine, what do all of us know together, and who reports it. Each is a function
# of a few lines. Each check runs yours on real processes and compares what comes out with what one process would say.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says on which rank and in which element; `print` works on the ranks, too. A rank that never comes
# back is stopped after five seconds, and you are told where it was. Stuck? Each task has three hints; open them one at a time.
#
# To try a function of yours without its check, add a cell: `on_ranks(2, lambda rank: my_share(10, rank, 2))` calls it on two
# ranks and shows what each of them returns.

# %%
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from course_lib import plots
from course_lib.checks import alone, on_ranks, prepare, same

torch.set_num_threads(1)
prepare()

# %% [markdown]
# ## 1 · My share
#
# There are `samples` samples, numbered from 0, and `ranks` ranks, numbered from 0. Every rank computes its own share, without
# any message: a `range` of consecutive numbers. All shares together hold every sample once, in order. If the division leaves
# a remainder, the first ranks take one sample more each, so that no two shares differ by more than one. With more ranks than
# samples the last shares are empty.


# %% solution="share"
def my_share(samples: int, rank: int, ranks: int) -> range:
    """The samples of this rank."""
    ### BEGIN SOLUTION
    size, more = divmod(samples, ranks)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `size, more = divmod(samples, ranks)` gives what everybody has at least, and how many ranks have one more. Which ranks are
# those?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The share of a rank begins where those of all ranks before it end. How many of the ranks before rank r have one sample more?
# All of them, as long as r is not larger than `more`; after that, `more` of them.
#
# </details>
# <details><summary>Hint 3</summary>
#
# It begins at `rank * size + min(rank, more)`, and its length is `size + 1` if `rank < more`, else `size`.
#
# </details>
#
# Ten samples on four ranks. Every rank knows all ten numbers and takes its own: each number once, in order, and the
# first two ranks have one more.

# %%
shares = [share.tolist() for share in np.array_split(np.arange(10), 4)]
plots.collective("sharing", [list(range(10))] * 4, shares)


# %% check="share" points=2
def check_share(samples: int, ranks: int) -> None:
    got = alone(lambda: [my_share(samples, rank, ranks) for rank in range(ranks)])  # no messages: one process will do
    size, more = divmod(samples, ranks)
    up = -(-samples // ranks)  # rounded up
    without = [range(r * size, (r + 1) * size) for r in range(ranks)]
    early = [range(r * size, r * size + size + (r < more)) for r in range(ranks)]
    elsewhere = [range(r * samples // ranks, (r + 1) * samples // ranks) for r in range(ranks)]
    mistakes = {
        "a share without the remainder: the last samples belong to nobody": without,
        "all of the remainder for the last rank: the others wait for it": [
            *without[:-1],
            range((ranks - 1) * size, samples),
        ],
        "the right length from too early on: the ranks before this one may have a sample more": early,
        "a remainder for other ranks than the first ones": elsewhere,
        "a share rounded up: too little is left for the last rank": [
            range(samples)[r * up :][:up] for r in range(ranks)
        ],
        "dealing like cards: the numbers of a share should follow each other": [
            range(r, samples, ranks) for r in range(ranks)
        ],
    }
    wanted = [share.tolist() for share in np.array_split(np.arange(samples), ranks)]
    same(got, wanted, f"{samples} samples on {ranks} ranks", ranks=True, mistakes=mistakes)


check_share(10, 4)
check_share(6, 2)
### BEGIN HIDDEN TESTS
check_share(23, 3)
check_share(2, 4)
check_share(14, 5)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · The mean of everything
#
# Every rank has some values, a tensor of one dimension, and not all have equally many; a rank may even have none. Return the
# mean of all values of all ranks, the same on every rank. *Is that the mean of the ranks' means?* Only if all of them have
# equally many. And a rank without values has no mean at all, but the others wait for it all the same.


# %% solution="mean"
def mean_of_all(values: torch.Tensor) -> float:
    """The mean over the values of all ranks."""
    ### BEGIN SOLUTION
    total = torch.tensor([values.sum(), len(values)], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A mean is a sum divided by a count. Which of these two does a single rank not know?
#
# </details>
# <details><summary>Hint 2</summary>
#
# It knows neither, only its own part of each. Both can be added up over the ranks: `dist.all_reduce(tensor)` does that
# in place, on a tensor with two numbers as well as on one. The sum of no values is 0, so a rank without values needs
# nothing special.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `total = torch.tensor([values.sum(), len(values)], dtype=torch.float64)`, then all-reduce `total`, on every rank. The result
# is `total[0] / total[1]`; `.item()` makes a number of it.
#
# </details>
#
# Three ranks with three values, one and none. Their own means are 4 and 8, but the mean of the four values is 5:

# %%
held = [[2.0, 4.0, 6.0], [8.0], []]
plots.collective("the mean", held, [[np.mean(sum(held, start=[]))]] * 3)


# %% check="mean" points=3
def check_mean(*counts: int) -> None:
    everything = torch.randn(sum(counts), generator=torch.Generator().manual_seed(0)) + 3
    shares, ranks = everything.split(counts), len(counts)
    wanted = everything.double().mean().item()  # one process that has all values
    total, means = everything.sum().item(), [share.mean().item() for share in shares]
    mistakes = {
        "the mean of the ranks' means: a value on a rank with few counts for more": [np.mean(means)] * ranks,
        "the sum of the ranks' means": [sum(means)] * ranks,
        "the mean of each rank's own values": means,
        "the sum of all values: divide it by their number": [total] * ranks,
        "the sum of all values, divided by the number of ranks": [total / ranks] * ranks,
        "the sum of all values, divided by this rank's own count: add up the counts, too": [
            total / count if count else np.inf for count in counts
        ],
    }
    got = on_ranks(ranks, lambda rank: mean_of_all(shares[rank]))
    same(got, [wanted] * ranks, f"the mean with {counts} values on the ranks", ranks=True, mistakes=mistakes)


check_mean(4, 1)
check_mean(3, 0, 2)
### BEGIN HIDDEN TESTS
check_mean(2, 5, 9)
check_mean(0, 1, 0, 6)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Report to rank 0
#
# Ranks that all print make a mess, so it is usually rank 0 that writes. Every rank brings one thing: a number, a word, a
# dictionary. On rank 0 return a list of all of them, in the order of the ranks; on every other rank return `None`. For things
# that are no tensors there is `dist.gather_object(thing, places)`: on rank 0 `places` is a list with a place for each rank,
# which it fills; on the others it is `None`.


# %% solution="collect"
def collect(thing: Any) -> list | None:
    """What all ranks brought, on rank 0; None on the others."""
    ### BEGIN SOLUTION
    places = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(thing, places)
    return places
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Only rank 0 receives something, but who has to call `gather_object`? Think of a collective as a meeting.
#
# </details>
# <details><summary>Hint 2</summary>
#
# All ranks call it. They differ in `places` alone, and `dist.get_rank()` says who one is. How many places does rank 0 need?
#
# </details>
# <details><summary>Hint 3</summary>
#
# On rank 0 let `places` be `[None] * dist.get_world_size()`, on the others `None`. Then all call
# `dist.gather_object(thing, places)`, outside of any `if`, and all return `places`.
#
# </details>
#
# With numbers for things, rank 0 gets them all and the others have nothing:

# %%
things = [[1], [10], [100]]
plots.collective("collecting", things, [sum(things, start=[]), [], []])


# %% check="collect" points=2
def check_collect(things: list) -> None:
    ranks = len(things)
    got = on_ranks(ranks, lambda rank: collect(things[rank]))
    nobody = [None] * (ranks - 1)
    mistakes = {
        "the list on every rank: only rank 0 is to return it": [things] * ranks,
        "what rank 0 itself has brought, and nothing of the others": [[things[0]], *nobody],
        "an order from the last rank to the first": [things[::-1], *nobody],
        "a list of empty places: has anything been sent?": [[None] * ranks, *nobody],
        "None on all ranks: `gather_object` itself returns nothing, it fills `places`": [None] * ranks,
    }
    same(got, [things, *nobody], f"the things of {ranks} ranks", ranks=True, mistakes=mistakes)


check_collect([1, 10, 100])
### BEGIN HIDDEN TESTS
check_collect(["hello from rank 0", "from 1"])
check_collect([{"rank": rank, "seconds": 0.5 * rank} for rank in range(4)])
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `shard` in `course_lib/data/batches.py` gives each rank its samples for evaluation, `sum_over_ranks` in
# `course_lib/metrics.py` adds up sums and counts, and `Log` in the same file writes on rank 0 only.
#
# *`shard` deals the samples out like cards, you cut them into pieces. For a mean over all of them it makes no difference. For
# what would it make one?*
#
# **Next:** [01 · Baseline](../../notebooks/01_baseline.ipynb).
