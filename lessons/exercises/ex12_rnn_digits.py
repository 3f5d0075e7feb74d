# %% [markdown]
# # Exercise 12 · A recurrent net on several ranks
#
# A recurrent net has something that a UNet has not: a memory, with a shape of its own. And it brings old friends in new
# clothes: a score over ranks whose sampler has repeated samples, and gradients that explode and must be clipped, although no
# rank has all of them. You write one function for each. Each check runs yours on real processes and compares with one
# process.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says on which rank and in which element; `print` works on the ranks, too. Stuck? Each task has three
# hints; open them one at a time.

# %%
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from course_lib import plots
from course_lib.checks import on_ranks, prepare, same
from course_lib.rnn import RowReader

torch.set_num_threads(1)
prepare()

# %% [markdown]
# ## 1 · Share out a memory
#
# An LSTM with `batch_first=True` reads rows of shape (batch, row, column) and goes on from a memory: two tensors of shape
# (layer, batch, width). Give each rank its part of both: consecutive samples, as equal as possible, the first ranks one more
# where it does not come out even. The LSTM's outputs of all ranks, put together, must be those of the whole batch.


# %% solution="share"
def share(rows: torch.Tensor, memory: tuple, rank: int, ranks: int) -> tuple[torch.Tensor, tuple]:
    """The rows and the memory of this rank's samples: (rows, (h, c))."""
    ### BEGIN SOLUTION
    mine = [part.tensor_split(ranks, dim=1)[rank].contiguous() for part in memory]
    return rows.tensor_split(ranks)[rank], tuple(mine)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Read the shapes again. `batch_first` is a promise about rows and outputs. What does it say about the memory?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The memory's batch is dimension 1. `tensor.tensor_split(ranks, dim=…)` makes exactly that many parts, the first ones larger;
# `chunk` may make fewer.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `rows.tensor_split(ranks)[rank]`, and for h and c `part.tensor_split(ranks, dim=1)[rank].contiguous()`; return
# `(rows, (h, c))`. (A part of dimension 1 is not contiguous in memory, and the LSTM may ask for that.)
#
# </details>
#
# The memory of two layers (rows) and five samples (columns), every place in its own colour. On two ranks the first gets three
# samples of *both* layers, and the second two:

# %%
memory = np.arange(10).reshape(2, 5)
parts = {f"rank {rank}": part for rank, part in enumerate(np.array_split(memory, 2, axis=1))}
plots.fields({"the whole memory": memory} | parts, units="place in the memory")


# %% check="share" points=2
def check_share(ranks: int, batch: int, layers: int) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, num_layers=layers, batch_first=True)
    rows, memory = torch.randn(batch, 6, 3), (torch.randn(layers, batch, 4), torch.randn(layers, batch, 4))
    what = f"{batch} samples on {ranks} ranks, layers: {layers}"

    def cut(dim):
        parts = [part.tensor_split(ranks, dim=dim) for part in memory]
        return [(rows.tensor_split(ranks)[rank], (parts[0][rank], parts[1][rank])) for rank in range(ranks)]

    got = on_ranks(ranks, lambda rank: share(rows, memory, rank, ranks))
    mistakes = {
        "a memory that is cut by its layers: its batch is dimension 1, also with batch_first": cut(0),
        "a memory whose layers are cut as the samples are: its batch is dimension 1, also with batch_first": [
            (rows[some], tuple(part[some[0] : some[-1] + 1] for part in memory))
            for some in torch.arange(batch).tensor_split(ranks)
        ],
        "a memory that is whole on every rank: cut it, too": [(mine, memory) for mine, _ in cut(1)],
        "every n-th sample: take consecutive ones": [
            (rows[rank::ranks], tuple(part[:, rank::ranks] for part in memory)) for rank in range(ranks)
        ],
    }
    same(got, cut(1), f"the shares, {what}", ranks=True, mistakes=mistakes)
    found = on_ranks(ranks, lambda rank: lstm(*share(rows, memory, rank, ranks)))
    outputs, (last, _) = lstm(rows, memory)
    same(torch.cat([output for output, _ in found]), outputs, f"the outputs, {what}")
    same(torch.cat([state[0] for _, state in found], dim=1), last, f"the memory afterwards, {what}")


check_share(2, 6, 2)
check_share(4, 6, 1)
### BEGIN HIDDEN TESTS
check_share(3, 8, 3)
check_share(4, 5, 2)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · Every digit once
#
# For an evaluation `DistributedSampler(digits, shuffle=False)` gives rank r the places r, r + n, r + 2n, … on n ranks. Where
# that does not come out even, it goes on with the first digits again until all ranks have equally many. `right` says which of
# this rank's digits were read rightly, in the sampler's order. Return the accuracy over all ranks, in which every digit
# counts once.


# %% solution="accuracy"
def accuracy(right: torch.Tensor, digits: int, rank: int, ranks: int) -> float:
    """The share of all `digits` that were read rightly, the same number on every rank. right: (judged,), bool."""
    ### BEGIN SOLUTION
    places = rank + ranks * torch.arange(len(right))
    total = right[places < digits].sum()
    dist.all_reduce(total)
    return total.item() / digits
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which place has the k-th of this rank's digits in the sampler's order? From which place on are they repeats?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Place `rank + k * ranks`; from `digits` on they are repeats. A rank may have nothing but a repeat: it must still take part
# in the all-reduce, with a zero.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `places = rank + ranks * torch.arange(len(right))`, then all-reduce `right[places < digits].sum()` and divide by `digits`.
# Counts, not shares: the ranks have unequal numbers of digits that count.
#
# </details>
#
# Nine digits on two ranks. The sampler gives digit 0 to both, and of rank 1 only four should count:

# %%
dealt = [list(DistributedSampler(range(9), num_replicas=2, rank=rank, shuffle=False)) for rank in range(2)]
plots.collective("leaving out repeats", dealt, [dealt[0], dealt[1][:4]])


# %% check="accuracy" points=3
def check_accuracy(digits: int, ranks: int) -> None:
    read = torch.rand(digits, generator=torch.Generator().manual_seed(digits)) < 0.5
    read[: digits // 2] = True  # those that are repeated are right, which flatters
    dealt = [list(DistributedSampler(range(digits), ranks, rank, shuffle=False)) for rank in range(ranks)]
    right = [read[mine] for mine in dealt]
    once = [read[rank::ranks].double() for rank in range(ranks)]
    shares = [part.mean().item() for part in once]
    mistakes = {
        "an accuracy in which repeated digits count twice": [torch.cat(right).double().mean().item()] * ranks,
        "a count with repeated digits, divided by the number of digits: leave the repeats out": [
            torch.cat(right).sum().item() / digits
        ]
        * ranks,
        "the mean of the ranks' accuracies: a rank with fewer digits counts as much": [sum(shares) / ranks] * ranks,
        "each rank's own accuracy: add up over the ranks": shares,
        "each rank's own accuracy, with repeated digits": [part.double().mean().item() for part in right],
        "a count: divide it by the number of digits": [read.sum().item()] * ranks,
    }
    got = on_ranks(ranks, lambda rank: accuracy(right[rank], digits, rank, ranks))
    wanted = [read.double().mean().item()] * ranks
    same(got, wanted, f"the accuracy of {digits} digits on {ranks} ranks", ranks=True, mistakes=mistakes)


check_accuracy(9, 2)
check_accuracy(10, 4)
check_accuracy(3, 4)
### BEGIN HIDDEN TESTS
check_accuracy(8, 2)
check_accuracy(7, 3)
check_accuracy(2, 3)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Clip what no rank has whole
#
# Through many rows gradients grow, and one bad step ruins a training. So one *clips*: if the norm of all gradients, taken as
# one long vector, is above `limit`, all are multiplied by limit / norm; else they stay. Here every rank has the gradients of
# other parameters, as in lesson 08, and perhaps none at all. The factor must be the same on all ranks.


# %% solution="clip"
def clip(gradients: list[torch.Tensor], limit: float) -> float:
    """Scale this rank's gradients in place; return the norm of those of all ranks together, as it was before."""
    ### BEGIN SOLUTION
    squares = torch.zeros(1, dtype=torch.float64)
    for gradient in gradients:
        squares += gradient.double().square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > limit:  # the same answer on every rank
        for gradient in gradients:
            gradient.mul_(limit / norm)
    return norm
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A norm is the root of a sum of squares. Which of the three may be added over ranks: squares, sums of squares, or roots?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Begin with `squares = torch.zeros(1)`, so that a rank without gradients has something to send. Whether to clip is decided
# after the all-reduce, when all ranks know the same norm. Were it decided before, some ranks would not call it.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Add `gradient.square().sum()` of each to `squares`, all-reduce it, take the root with `.sqrt().item()`. If that `norm` is
# above `limit`, multiply every gradient in place by `limit / norm`. Return `norm` in any case.
#
# </details>
#
# Rank 0 has gradients of norm 3, rank 1 of norm 4. Together that is 5, not 7, and with a limit of 1 all are divided by 5:

# %%
norms = torch.tensor([3.0, 4.0])
whole = norms.square().sum().sqrt()
bars = {"rank 0 before": norms[0], "rank 1 before": norms[1], "all before": whole}
bars |= {"rank 0 after": norms[0] / whole, "rank 1 after": norms[1] / whole, "all after": whole / whole}
plots.bars({name: float(norm) for name, norm in bars.items()}, xlabel="norm of the gradients")


# %% check="clip" points=3
def make_net(factor: float) -> RowReader:
    """A net with gradients, the larger the factor the longer."""
    torch.manual_seed(0)
    net = RowReader(columns=5, classes=3, width=4)
    (factor * net(torch.randn(8, 7, 5))).square().mean().backward()
    return net


def check_clip(ranks: int, factor: float, limit: float) -> None:
    def gradients(rank, net):
        everything = [parameter.grad for parameter in net.parameters()]
        each = -(-len(everything) // ranks)
        return everything[rank * each : (rank + 1) * each]  # of four ranks the last has none

    def run(rank):
        mine = gradients(rank, make_net(factor))
        norm = clip(mine, limit)
        return mine, norm

    def times(factors):
        return [[g * f for g in gradients(rank, make_net(factor))] for rank, f in enumerate(factors)]

    whole = make_net(factor)  # in one process
    norm = nn.utils.clip_grad_norm_(whole.parameters(), limit).item()
    own = [sum(g.square().sum().item() for g in mine) ** 0.5 for mine in times([1.0] * ranks)]
    mistakes = {
        "what each rank's own norm gives: the norm is that of all ranks together": times(
            [min(1, limit / max(n, 1e-9)) for n in own]
        ),
        "what a sum of norms gives: add up squares, then take the root": times([min(1, limit / sum(own))] * ranks),
        "what the sum of squares gives: take its root": times([min(1, limit / norm**2)] * ranks),
        "gradients that have grown: below the limit they stay as they are": times([limit / norm] * ranks),
        "gradients that have not changed: are they scaled in place?": times([1.0] * ranks),
    }
    got, norms = zip(*on_ranks(ranks, run))
    wanted = [gradients(rank, whole) for rank in range(ranks)]
    what = f"a norm of {norm:.3g} and a limit of {limit:g} on {ranks} ranks"
    same(got, wanted, f"the gradients, {what}", ranks=True, mistakes=mistakes)
    same(norms, [norm] * ranks, f"what is returned, {what}", ranks=True)


check_clip(2, 10.0, 10.0)
check_clip(2, 1.0, 10.0)
check_clip(4, 10.0, 10.0)
### BEGIN HIDDEN TESTS
check_clip(4, 30.0, 0.5)
check_clip(3, 1.0, 0.5)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `course_lib/rnn.py` begins every image with an empty memory, so nobody has to share one out; nets that read long texts in
# pieces do. `course_lib/data/batches.py` avoids the second problem: its `shard` deals out every sample once, and shards may
# be uneven; `sum_over_ranks` in `course_lib/metrics.py` is the all-reduce. FSDP has the third for you: `clip_grad_norm_` of a
# sharded net adds up over the ranks.
#
# *With DDP every rank has all gradients. Does it matter whether they are clipped before or after they are averaged? And in
# the lesson's table of times: which column would show you that ranks wait for one another, and which would hide it?*
#
# **Next:** [13 · BERT answers questions](../../notebooks/13_bert_squad.ipynb).
