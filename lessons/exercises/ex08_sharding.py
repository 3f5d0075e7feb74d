# %% [markdown]
# # Exercise 08 · Every number once
#
# In lesson 08 each rank kept 1/n of what training needs. Here you cut a row of numbers into equal slices, write an Adam whose
# averages are shared out over the ranks (ZeRO, stage 1), and lend weights that lie in slices to a computation, with gradients
# that find their way back (the heart of FSDP). The checks of these two compare with one process that has everything.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says on which rank and in which element; `print` works on the ranks, too. A rank that never comes
# back is stopped after five seconds, and you are told where it was. Stuck? Each task has three hints; open them one at a
# time.

# %%
import torch
import torch.distributed as dist
from torch import nn

from course_lib import plots
from course_lib.checks import alone, on_ranks, prepare, require, same

torch.set_num_threads(1)
prepare("torch._dynamo")  # optimizers import it: once, not on every rank

# %% [markdown]
# ## 1 · Equal slices
#
# All weights of a model lie side by side in one flat tensor of `total` numbers. Reduce-scatter and all-gather want slices of
# the same length, so the tensor is filled up with zeros, no more than are needed. Return for each rank where its slice of the
# filled tensor begins and where it ends, as Python counts: the end is not part of it.


# %% solution="slices"
def slices(total: int, ranks: int) -> list[tuple[int, int]]:
    """(first, end) of each rank's slice."""
    ### BEGIN SOLUTION
    size = -(-total // ranks)
    return [(rank * size, (rank + 1) * size) for rank in range(ranks)]
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which is the smallest multiple of `ranks` that has room for `total` numbers?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A slice has `total / ranks` numbers, rounded up. With ten numbers on four ranks that is 3, and two zeros are added. With
# eight it is 2, and nothing is added.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `size = -(-total // ranks)` rounds up. Rank r has `(r * size, (r + 1) * size)`.
#
# </details>
#
# Ten numbers, 1 to 10, on four ranks. Every rank begins with all of them and two zeros, and keeps its slice:

# %%
row = [*range(1, 11), 0, 0]
plots.collective("cutting", [row] * 4, [row[3 * rank : 3 * rank + 3] for rank in range(4)])


# %% check="slices" points=1
def check_slices(total: int, ranks: int) -> None:
    got = alone(lambda: slices(total, ranks))

    def cut(size) -> list[tuple]:
        return [(rank * size, (rank + 1) * size) for rank in range(ranks)]

    size = next(size for size in range(total + 1) if size * ranks >= total)
    lengths = [(total + ranks - 1 - rank) // ranks for rank in range(ranks)]
    mistakes = {
        f"slices for {total // ranks * ranks} numbers: the last {total % ranks} belong to nobody": cut(total // ranks),
        "slices of a length that was not rounded": cut(total / ranks),
        "more zeros than are needed": cut(total // ranks + 1),
        "slices of which the last is shorter: fill up with zeros": [(a, min(b, total)) for a, b in cut(size)],
        "slices of different lengths, as tensor_split makes them: fill up with zeros": [
            (sum(lengths[:rank]), sum(lengths[: rank + 1])) for rank in range(ranks)
        ],
        "the length instead of the end": [(a, size) for a, _ in cut(size)],
        "the number of the last one instead of the end": [(a, b - 1) for a, b in cut(size)],
    }
    same(got, cut(size), f"{total} numbers on {ranks} ranks", mistakes=mistakes)


check_slices(10, 4)
check_slices(8, 4)
### BEGIN HIDDEN TESTS
check_slices(2, 4)
check_slices(1_000_003, 7)
check_slices(5, 1)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · A sharded Adam
#
# In `__init__` make `self.mine`, a copy of this rank's slice of all weights, and `self.adam`, a `torch.optim.Adam` for it
# alone. In `step` every parameter has a gradient of this rank's samples. Bring the mean over all ranks into `self.mine.grad`,
# of your slice only; let Adam update the slice; gather all slices, and write them into the parameters. For a collective take
# `self.mine.data`, which autograd does not follow. Adam hardly notices whether all gradients are n times too long; the check
# looks at its averages.
#
# These two helpers lay tensors side by side, filled up with zeros, and bring them back:


# %%
def side_by_side(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One flat tensor, with zeros at its end: as many numbers for each rank."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return torch.cat([flat, flat.new_zeros(-len(flat) % dist.get_world_size())])


def write_back(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Each parameter gets its part of the flat tensor."""
    first = 0
    for parameter in parameters:
        parameter.data.copy_(flat[first : first + parameter.numel()].view_as(parameter))
        first += parameter.numel()


# %% solution="adam"
class ShardedAdam:
    """Adam over all ranks: each has the averages of its slice of the weights, and updates that slice."""

    def __init__(self, parameters, lr: float):
        self.parameters = list(parameters)
        ### BEGIN SOLUTION
        slices = side_by_side(self.parameters).chunk(dist.get_world_size())
        self.mine = nn.Parameter(slices[dist.get_rank()].clone())
        self.adam = torch.optim.Adam([self.mine], lr=lr)
        ### END SOLUTION

    def step(self) -> None:
        """Mean gradients of the slice, Adam, and everybody gets the new weights."""
        ### BEGIN SOLUTION
        gradients = side_by_side([parameter.grad for parameter in self.parameters]) / dist.get_world_size()
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_single(self.mine.grad, gradients)
        self.adam.step()
        weights = torch.empty_like(gradients)
        dist.all_gather_single(weights, self.mine.data)
        write_back(weights, self.parameters)
        ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `side_by_side(…)` of weights and of gradients has the same layout, and a length that the number of ranks divides. Its
# `chunk` cuts it into slices. Adam wants leaves: `nn.Parameter(slice.clone())` is one.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `dist.reduce_scatter_single(part, whole)` adds up `whole` over the ranks, and leaves this rank's slice of the sum in `part`.
# `dist.all_gather_single(whole, part)` puts the slices of all ranks together. What is missing from a sum to be a mean?
#
# </details>
# <details><summary>Hint 3</summary>
#
# `gradients = side_by_side([p.grad for p in self.parameters]) / dist.get_world_size()`; `self.mine.grad =
# torch.empty_like(self.mine)` and reduce-scatter into it; `self.adam.step()`; all-gather `self.mine.data` into a tensor like
# `gradients`; `write_back` that.
#
# </details>
#
# What Adam keeps for a million weights, on each rank:

# %%
shares = {f"one of {n}": 2 * -(-1_000_000 // n) / 1000 for n in (1, 2, 3, 4, 8)}
plots.bars(shares, xlabel="thousands of numbers in Adam's averages, on each rank")


# %% check="adam" points=4
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def flat(tensors, ranks: int = 1) -> torch.Tensor:
    row = torch.cat([torch.zeros(0).double(), *(tensor.detach().flatten() for tensor in tensors)])
    return torch.cat([row, row.new_zeros(-len(row) % ranks)])


def gradient(model, batch, ranks: int = 1) -> torch.Tensor:
    """Backward, and all gradients in a row."""
    model.zero_grad()
    (model(batch) - batch).square().mean().backward()
    return flat([parameter.grad for parameter in model.parameters()], ranks)


def one_process(batches, *, forgets=False) -> list[torch.Tensor]:
    """The weights at the beginning and after each step, of one process with the samples of all ranks."""
    model = make()
    adam, weights = torch.optim.Adam(model.parameters(), lr=0.01), [flat(model.parameters())]
    for batch in batches:
        gradient(model, batch.flatten(0, 1))
        if forgets:
            adam = torch.optim.Adam(model.parameters(), lr=0.01)
        adam.step()
        weights.append(flat(model.parameters()))
    return weights


def check_adam(ranks: int, steps: int) -> None:
    batches = torch.randn(steps, ranks, 5, 3, dtype=torch.double, generator=torch.Generator().manual_seed(1))

    def run(rank):
        model, kept, averages, weights = make(), [], [], []
        optimizer = ShardedAdam(model.parameters(), lr=0.01)
        for batch in batches:
            gradient(model, batch[rank])
            optimizer.step()
            states = optimizer.adam.state.values()
            kept.append(sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in states))
            averages.append(flat([state["exp_avg"] for state in states]))
            weights.append(flat(model.parameters()))
        return kept[0], averages[0], weights[0], weights[-1]

    kept, averages, first, last = zip(*on_ranks(ranks, run))
    weights, what = one_process(batches), f"{steps} steps on {ranks} ranks"
    total, size = len(weights[0]), -(-len(weights[0]) // ranks)

    why = f"they keep {list(kept)} numbers, and two for each of {size} weights are {2 * size}"
    why += ": is self.adam for the slice alone, and has the slice a gradient?"
    require(list(kept) == [2 * size] * ranks, f"each rank keeps its share, {what}", why)

    own = [0.1 * gradient(make(), batches[0, rank], ranks) for rank in range(ranks)]  # Adam's average after one step
    mean = list((sum(own) / ranks).chunk(ranks))
    mistakes = {
        "that of the sum of the gradients: divide by the number of ranks": [ranks * part for part in mean],
        "that of this rank's own gradients: nothing was added up": [own[r].chunk(ranks)[r] for r in range(ranks)],
        "that of different slices added up: each rank has brought its own, and all must bring the same": [
            sum(own[r].chunk(ranks)[r] for r in range(ranks)) / ranks for _ in range(ranks)
        ],
        "that of other weights: which slice is this rank's?": mean[::-1],
    }
    same(averages, mean, f"Adam's average after one step, {what}", ranks=True, mistakes=mistakes)

    places = torch.arange(total) // size
    mistakes = {
        "what they were before: Adam's slice never comes back into the parameters": [weights[0]] * ranks,
        "new in this rank's slice only: gather those of all": [
            torch.where(places == rank, weights[1], weights[0]) for rank in range(ranks)
        ],
    }
    same(first, [weights[1]] * ranks, f"weights after one step, {what}", ranks=True, mistakes=mistakes)
    mistakes = {
        "the work of an Adam that begins anew in each step": [one_process(batches, forgets=True)[-1]] * ranks,
        "what they were after the first step": [weights[1]] * ranks,
    }
    same(last, [weights[-1]] * ranks, f"weights at the end, {what}", ranks=True, mistakes=mistakes)


check_adam(2, 3)
### BEGIN HIDDEN TESTS
check_adam(3, 5)
check_adam(4, 2)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Lend the weights
#
# In stage 3 a rank has only a slice of the weights, and borrows the others' while it computes. Write that as a function that
# gradients pass through. Forward: from this rank's slice to the whole flat tensor. Backward: `gradient` is that of the whole,
# from this rank's samples; return the slice's, as the mean over all ranks, for every rank has used this slice. All slices are
# equally long.


# %% solution="lend"
class Lend(torch.autograd.Function):
    """This rank's slice → the whole, the same on all ranks."""

    @staticmethod
    def forward(ctx, mine: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        whole = mine.new_empty(mine.numel() * dist.get_world_size())
        dist.all_gather_single(whole, mine)
        return whole
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        mine = gradient.new_empty(gradient.numel() // dist.get_world_size())
        dist.reduce_scatter_single(mine, gradient.contiguous())
        return mine / dist.get_world_size()
        ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Forward is one collective, and backward is its mirror image. Which two are they? The table of lesson 08 has them.
#
# </details>
# <details><summary>Hint 2</summary>
#
# An all-gather, and a reduce-scatter. Both want a tensor to write into: `mine.new_empty(length)` makes one of the same kind.
# A reduce-scatter adds; the mean is wanted.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Forward: `dist.all_gather_single(whole, mine)`, with a whole of `mine.numel() * dist.get_world_size()` numbers. Backward:
# `dist.reduce_scatter_single(mine, gradient.contiguous())`, with a slice of `gradient.numel() // dist.get_world_size()`;
# return it divided by the number of ranks.
#
# </details>
#
# Two ranks with two weights each, forward; and below that, gradients of the whole that became those of the slices:

# %%
plots.collective("forward", [[1, 2], [3, 4]], [[1, 2, 3, 4]] * 2)
whole = torch.tensor([[1.0, 2, 3, 4], [11, 22, 33, 44]])
plots.collective("backward", whole.tolist(), whole.mean(dim=0).view(2, 2).tolist())


# %% check="lend" points=3
def check_lend(ranks: int, size: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    weights, batch = (torch.randn(*shape, generator=generator) for shape in ((ranks * size,), (ranks, 6, ranks * size)))
    parts, what = list(weights.chunk(ranks)), f"{ranks} ranks with {size} weights each"

    def run(rank):
        mine = parts[rank].clone().requires_grad_()
        loss(Lend.apply(mine), batch[rank]).backward()
        return mine.grad

    def loss(whole, samples):
        return (samples @ whole).square().mean()

    got = on_ranks(ranks, lambda rank: Lend.apply(parts[rank]))
    mistakes = {
        "this rank's slice alone": parts,
        "this rank's slice in all places": [part.repeat(ranks) for part in parts],
        "the sum of all slices": [sum(parts)] * ranks,
    }
    same(got, [weights] * ranks, f"forward, {what}", ranks=True, mistakes=mistakes)

    whole = weights.clone().requires_grad_()  # one process with all weights and all samples
    own = [torch.autograd.grad(loss(whole, samples), whole)[0] for samples in batch]
    wanted = torch.autograd.grad(loss(whole, batch.flatten(0, 1)), whole)[0].chunk(ranks)
    mistakes = {
        "the sum over the ranks: divide it by their number": [ranks * part for part in wanted],
        "what this rank's samples say: the others have used this slice as well": [
            one.chunk(ranks)[rank] for rank, one in enumerate(own)
        ],
        "what this rank's samples say, divided by the number of ranks: what do the others'?": [
            one.chunk(ranks)[rank] / ranks for rank, one in enumerate(own)
        ],
    }
    same(on_ranks(ranks, run), list(wanted), f"backward, {what}", ranks=True, mistakes=mistakes)


check_lend(2, 3)
### BEGIN HIDDEN TESTS
check_lend(3, 1)
check_lend(4, 5)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `course_lib/parallel/shard.py` has the sharded optimizer by hand, in pieces of one block each (`Piece`, `ShardedAdam`), and
# below it `fully_shard`, PyTorch's own lending. There the whole weights are dropped after forward, and gathered once more for
# backward. *Your `Lend` never drops anything by itself. What keeps the whole tensor alive until backward, and what would that
# mean for a model of many layers?*
#
# **Next:** [lab 3](../lab3_break_it/lab3_break_it.ipynb), in which things break,
# then [09 · MPI](../../notebooks/09_mpi.ipynb).
