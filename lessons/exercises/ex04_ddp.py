# %% [markdown]
# # Exercise 04 · Gradients that agree
#
# In lesson 04 four strategies kept the models of all ranks equal. Here you write the pieces yourself: the average of the
# gradients, the same in buckets, the sampler that deals out the data, and the learning rate's warm-up. Each is a function of a
# few lines. Each check runs yours in processes of their own; what becomes of gradients is compared with one process that has
# the whole batch.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens it.
# A check that fails says on which rank and in which element; `print` works on the ranks, too. A rank that never comes back is
# stopped after five seconds, and you are told where it was. Stuck? Each task has three hints; open them one at a time.

# %%
import torch
import torch.distributed as dist
from torch import nn

from course_lib import plots
from course_lib.checks import alone, on_ranks, prepare, require, same, unseen
from course_lib.trainer import learning_rate

torch.set_num_threads(1)
prepare()

# %% [markdown]
# Gradients come from a small net of two layers. The last rank does not use the second of them, as happens in nets that
# choose a path for each sample:


# %%
def make() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))


def loss(model: nn.Module, batch: torch.Tensor, last: bool = False) -> torch.Tensor:
    """Of one rank's share."""
    return (model[0](batch) if last else model[1](model[0](batch))).square().mean()


def of_the_whole(batch: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of one process with the shares of all ranks. batch: (rank, sample, 3)."""
    model, ranks = make(), len(batch)
    (sum(loss(model, share, last=rank == ranks - 1) for rank, share in enumerate(batch)) / ranks).backward()
    return [parameter.grad for parameter in model.parameters()]


# %% [markdown]
# ## 1 · Average the gradients
#
# After `loss.backward()` every rank has gradients of its own part of the batch. Make them equal on all ranks: each gradient
# becomes the mean over the ranks. A parameter that this rank did not use has `grad` `None`; the others may have used it, so it
# takes part as zeros.


# %% solution="average"
def average(model: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks."""
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `dist.all_reduce(tensor)` adds a tensor over all ranks, in place. What is missing from a sum to be a mean?
#
# </details>
# <details><summary>Hint 2</summary>
#
# All ranks must call `all_reduce` equally often and in the same order. A rank that leaves out a parameter without a gradient
# is one call behind for ever after.
#
# </details>
# <details><summary>Hint 3</summary>
#
# For each of `model.parameters()`: if its `grad` is `None`, set it to `torch.zeros_like(parameter)`; all-reduce the gradient;
# divide it by `dist.get_world_size()`.
#
# </details>
#
# This is what should come out, on three ranks, for a gradient of four numbers:

# %%
before = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [100.0, 200.0, 300.0, 400.0]]
after = [torch.tensor(before).mean(dim=0).tolist()] * 3
plots.collective("average", before, after)


# %% check="average" points=2
def check_average(ranks: int, samples: int) -> None:
    batch = torch.randn(ranks, samples, 3, generator=torch.Generator().manual_seed(1))

    def run(rank, sync=True):
        model = make()
        loss(model, batch[rank], last=rank == ranks - 1).backward()
        if sync:
            average(model)
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    own, wanted = [run(rank, sync=False) for rank in range(ranks)], of_the_whole(batch)
    mistakes = {
        "the sum over the ranks: divide it by their number": [[g * ranks for g in wanted]] * ranks,
        "each rank's own gradient: nothing has been averaged": own,
        "right but for a parameter whose grad was None: it has to get the mean, too": [
            *[wanted] * (ranks - 1),
            wanted[:2] + own[-1][2:],
        ],
        "a mean over those ranks only that had a gradient: divide by the number of all": [
            wanted[:2] + [g * ranks / (ranks - 1) for g in wanted[2:]]
        ]
        * ranks,
    }
    same(on_ranks(ranks, run), [wanted] * ranks, f"average on {ranks} ranks", ranks=True, mistakes=mistakes)


check_average(2, 4)
check_average(3, 2)
### BEGIN HIDDEN TESTS
check_average(3, 5)
check_average(4, 1)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · Fill buckets
#
# A message costs its latency however small it is, so gradients travel together. Tensor i has `sizes[i]` elements. Group
# the tensors into buckets: in the order given, as many in a bucket as have together at most `limit` elements, but at
# least one. Return each bucket as the list of its tensors' numbers i. Backward finds the last layer's gradients first,
# so the order that you are given is already the reversed one; keep it.


# %% solution="buckets"
def make_buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Which tensors are in each bucket: sizes [3, 3, 5] and limit 6 give [[0, 1], [2]]."""
    ### BEGIN SOLUTION
    buckets, room = [], 0
    for number, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(number)
        room -= size
    return buckets
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through the sizes once. What do you need to remember about the bucket that is being filled?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A tensor opens a new bucket when there is none yet, or when it does not fit any more. One that is larger than `limit` gets a
# bucket of its own, and nothing else fits in there.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Keep `room`, what is left in the last bucket. If there is no bucket or `size > room`: append an empty list and set `room` to
# `limit`. Then append the number to the last list and take `size` off `room`.
#
# </details>
#
# Six tensors, a limit of 60: the bars should fall into these groups.

# %%
plots.bars(
    {f"bucket 0, tensor {n}": size for n, size in enumerate([10, 40])}
    | {"bucket 1, tensor 2": 50}
    | {"bucket 2, tensor 3": 90}
    | {"bucket 3, tensor 4": 30, "bucket 3, tensor 5": 30},
    xlabel="elements in the tensor",
)


# %% check="buckets" points=2
def check_buckets(sizes, limit, wanted) -> None:
    got = alone(lambda: make_buckets(sizes, limit))
    one_each = [[number] for number in range(len(sizes))]
    mistakes = {
        "the sizes of the tensors: return their places in the list": [[sizes[n] for n in bucket] for bucket in wanted],
        "how many are in each bucket: return which": [len(bucket) for bucket in wanted],
        "one tensor a bucket: fill a bucket while there is room": one_each,
        "a first bucket that is empty": [[], *wanted],
        "the same without the last bucket: is it kept when the loop ends?": wanted[:-1],
    }
    same(got, wanted, f"buckets of {limit} for {sizes}", mistakes=mistakes)


check_buckets([10, 40, 50, 90, 30, 30], 60, [[0, 1], [2], [3], [4, 5]])
check_buckets([3, 3, 5], 6, [[0, 1], [2]])
### BEGIN HIDDEN TESTS
check_buckets([100, 1, 1, 1], 3, [[0], [1, 2, 3]])
check_buckets([2, 2, 2, 2, 2], 4, [[0, 1], [2, 3], [4]])
check_buckets([7], 1, [[0]])
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Send buckets
#
# Now they travel. `buckets` are lists of parameters, the same on every rank. After backward, lay the gradients of a bucket side
# by side in one flat tensor, all-reduce that, and give each parameter its part: the mean over all ranks, in its own shape. One
# message a bucket, in the order given. A `grad` that is `None` takes part as zeros, as in task 1.


# %% solution="send"
def average_in_buckets(buckets: list[list[nn.Parameter]]) -> None:
    """Replace every gradient by its mean over all ranks, with one all-reduce a bucket."""
    ### BEGIN SOLUTION
    for bucket in buckets:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
            parameter.grad = part.view_as(parameter)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.cat` wants tensors of one dimension here, which `grad.flatten()` gives. It makes a copy: what all-reduce does to that,
# the gradients do not notice by themselves.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `flat.split([12, 4])` cuts a tensor into parts of 12 and of 4 elements. A parameter `p` has `p.numel()` elements, and
# `part.view_as(p)` has its shape.
#
# </details>
# <details><summary>Hint 3</summary>
#
# For each bucket: `flat = torch.cat([…])` of all its gradients, flattened, with `torch.zeros_like(p)` where there is none.
# All-reduce `flat`, divide it by `dist.get_world_size()`. For `p, part` in
# `zip(bucket, flat.split([p.numel() for p in bucket]))`: set `p.grad` to `part.view_as(p)`.
#
# </details>
#
# A bucket with two gradients, of four numbers and of two, on two ranks: one message of six numbers instead of two.

# %%
flat = [[1.0, 2.0, 3.0, 4.0, 50.0, 60.0], [3.0, 4.0, 5.0, 6.0, 70.0, 80.0]]
plots.collective("averaging one bucket", flat, [torch.tensor(flat).mean(dim=0).tolist()] * 2)


# %% check="send" points=3
def check_send(ranks: int, samples: int, groups: list[list[int]]) -> None:
    batch = torch.randn(ranks, samples, 3, generator=torch.Generator().manual_seed(2))

    def run(rank, sync=True):
        model, all_reduce, sent = make(), dist.all_reduce, []

        @unseen
        def count(tensor, *given, **named):
            sent.append(tensor.numel())
            return all_reduce(tensor, *given, **named)

        loss(model, batch[rank], last=rank == ranks - 1).backward()
        parameters, dist.all_reduce = list(model.parameters()), count
        try:
            if sync:
                average_in_buckets([[parameters[number] for number in group] for group in groups])
        finally:
            dist.all_reduce = all_reduce
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters], sent

    own, wanted = [run(rank, sync=False)[0] for rank in range(ranks)], of_the_whole(batch)
    mistakes = {
        "the sum over the ranks: divide it by their number": [[g * ranks for g in wanted]] * ranks,
        "each rank's own gradient: the average stayed in the flat tensor, which is a copy": own,
        "the mean of the weights: it is their `grad` that travels": [[p.detach() for p in make().parameters()]] * ranks,
        "right but for a parameter whose grad was None: it has to get the mean, too": [
            *[wanted] * (ranks - 1),
            wanted[:2] + own[-1][2:],
        ],
    }
    found, what = on_ranks(ranks, run), f"buckets {groups} on {ranks} ranks"
    same([got for got, _ in found], [wanted] * ranks, f"gradients, {what}", ranks=True, mistakes=mistakes)
    sizes = [parameter.numel() for parameter in make().parameters()]
    together = [sum(sizes[number] for number in group) for group in groups]
    mistakes = {
        "one message a parameter: put the gradients of a bucket side by side first": [
            [sizes[number] for group in groups for number in group]
        ]
        * ranks,
        "one message for all: the first bucket should leave before the last one is full": [[sum(sizes)]] * ranks,
    }
    sent = [sent for _, sent in found]
    same(sent, [together] * ranks, f"elements in each all-reduce, {what}", ranks=True, mistakes=mistakes)


check_send(2, 4, [[3, 2], [1, 0]])
check_send(3, 2, [[3], [2, 1, 0]])
### BEGIN HIDDEN TESTS
check_send(4, 1, [[3, 2, 1], [0]])
check_send(2, 5, [[0, 1, 2, 3]])
### END HIDDEN TESTS

# %% [markdown]
# ## 4 · Deal out the samples
#
# The samples are numbered from 0. Every epoch has one random order of all of them, the same on every rank and however
# many ranks there are, and the next epoch has another. Of n ranks, rank r takes every n-th sample of it, beginning with
# the one at place r. What is left over at the end, fewer than n, nobody gets: all ranks must make equally many steps.


# %% solution="deal"
def deal(samples: int, epoch: int, rank: int, ranks: int) -> list[int]:
    """The samples of this rank in this epoch."""
    ### BEGIN SOLUTION
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
    return order[: samples // ranks * ranks][rank::ranks].tolist()
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.randperm(samples, generator=generator)` gives an order. What must the generator's seed depend on, and on what must it
# not depend?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.Generator().manual_seed(epoch)` is the same on every rank, without any message. Were `rank` part of the seed, some
# samples would be seen twice and others never.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Cut the order to `samples // ranks * ranks` samples, then take `[rank::ranks]` of it; `.tolist()` makes a list of a
# tensor.
#
# </details>
#
# Eight samples on two ranks, in one epoch of many. Both know the same order, and each takes every second number of it:
# each number once, and both rows of the same length.

# %%
one_epoch = [5, 2, 0, 7, 3, 1, 6, 4]
plots.collective("dealing", [one_epoch] * 2, [one_epoch[rank::2] for rank in range(2)])


# %% check="deal" points=3
def check_deal(samples: int, ranks: int) -> None:
    what, size = f"{samples} samples on {ranks} ranks", samples // ranks

    def hand(epoch, rank, ranks):
        cards = deal(samples, epoch, rank, ranks)
        return torch.as_tensor(cards).tolist() if cards is not None else None  # an array is fine, too

    epochs = [on_ranks(ranks, lambda rank, epoch=epoch: hand(epoch, rank, ranks)) for epoch in (0, 1, 0)]
    order = alone(lambda: hand(0, 0, 1))  # a single rank has all of it
    lengths = [None if cards is None else len(cards) for cards in epochs[0]]
    why = f"the ranks have {lengths}" + "; is there a return?" * (None in lengths)
    require(lengths == [size] * ranks, f"equally many for each, {what}", why)
    dealt = sorted(sum(epochs[0], start=[]))
    twice = [sample for sample in dealt if dealt.count(sample) > 1]
    require(
        not twice,
        f"no sample twice, {what}",
        f"sample {twice[0] if twice else ''} is seen twice in an epoch: do all ranks shuffle with the same seed?",
    )
    why = "epochs 0 and 1 have the same order: set_epoch! Here that is a seed that depends on `epoch`"
    require(epochs[0] != epochs[1], f"a new order each epoch, {what}", why)
    require(
        epochs[0] == epochs[2], f"epoch 0 again is epoch 0, {what}", "the order is not the same when it is asked again"
    )
    why = "rank 0 has the same samples in every epoch, in another order: shuffle all samples first, then deal"
    require(ranks == 1 or {*epochs[0][0]} != {*epochs[1][0]}, f"other samples for a rank each epoch, {what}", why)
    why = f"a single rank should have each number from 0 to {samples - 1} once; yours has {order}"
    require(sorted(order) == [*range(samples)], f"every sample, {samples} on one rank", why)
    mistakes = {
        "a piece of the order for each rank: deal like cards, every n-th for each": [
            order[rank * size :][:size] for rank in range(ranks)
        ]
    }
    wanted = [order[rank : size * ranks : ranks] for rank in range(ranks)]
    same(epochs[0], wanted, f"every n-th of a single rank's order, {what}", ranks=True, mistakes=mistakes)


check_deal(20, 2)
check_deal(23, 3)
### BEGIN HIDDEN TESTS
check_deal(17, 2)
check_deal(50, 4)
### END HIDDEN TESTS

# %% [markdown]
# ## 5 · Warm up
#
# With n ranks the batch is n times as large, and the learning rate grows with it. Such steps are too long for a net that knows
# nothing yet: let the rate rise in a line over the first `warmup` steps, from `peak / warmup` at step 0 to `peak` at step
# `warmup - 1`, and stay there. The peak is `lr`, the rate of one rank, times the number of ranks.


# %% solution="rate"
def rate(step: int, *, lr: float, ranks: int, warmup: int) -> float:
    """The learning rate at a step."""
    ### BEGIN SOLUTION
    peak = lr * ranks
    return peak * min(1, (step + 1) / warmup)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which rate belongs to step 0? If it is zero, that step is for nothing.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The steps count from 0, so during warm-up the rate is `(step + 1) / warmup` of the peak.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `min(1, (step + 1) / warmup)` is right before and after the warm-up. Multiply it with `lr * ranks`.
#
# </details>
#
# Two ranks, `lr` 0.1, ten steps of warm-up, drawn with the trainer's own rate. That one falls after the warm-up, here
# too slowly to be seen; yours stays.

# %%
steps = range(20)
plots.lines(
    {"warm-up": (list(steps), [learning_rate(s, peak=0.2, warmup=10, steps=10**9) for s in steps])},
    xlabel="step",
    ylabel="learning rate",
)


# %% check="rate" points=1
def check_rate(lr: float, ranks: int, warmup: int) -> None:
    steps = range(2 * warmup + 2)
    got = alone(lambda: [rate(step, lr=lr, ranks=ranks, warmup=warmup) for step in steps])

    def line(peak, first):
        return [peak * min(1.0, (step + first) / warmup) for step in steps]

    mistakes = {
        "the rate of one rank: scale it with their number": line(lr, 1),
        "a rate of zero at step 0: that step does nothing": line(lr * ranks, 0),
        "a rise that begins at the rate of one rank: begin at peak / warmup": [
            lr + (lr * ranks - lr) * min(1.0, (step + 1) / warmup) for step in steps
        ],
        "a rate that goes on rising after the warm-up": [lr * ranks * (step + 1) / warmup for step in steps],
    }
    same(got, line(lr * ranks, 1), f"warm-up in {warmup} steps on {ranks} ranks", mistakes=mistakes)


check_rate(0.1, 2, 10)
### BEGIN HIDDEN TESTS
check_rate(0.03, 8, 5)
check_rate(0.5, 1, 1)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `course_lib/parallel/ddp.py` has the first three, `course_lib/data/batches.py` the fourth and `learning_rate` in
# `course_lib/trainer.py` the fifth. Compare yours with them: where do they differ, and why?
#
# **Next:** [lab 1](../lab1_break_it/lab1_break_it.ipynb), in which things break,
# then [05 · Launch](../../notebooks/05_launch.ipynb).
