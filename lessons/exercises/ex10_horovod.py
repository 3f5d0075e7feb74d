# %% [markdown]
# # Exercise 10 · What Horovod does
#
# Lesson 10 read a Horovod program line by line. Here you write what stands behind three of its lines, with
# `torch.distributed`: `broadcast_parameters` together with `broadcast_optimizer_state`, the `DistributedOptimizer`, and the
# negotiation of gradients by name. No Horovod is needed. Each check compares with one process: the one that rank 0 would have
# been, or the one that has the whole batch.
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
from course_lib.checks import on_ranks, prepare, require, same, unseen

torch.set_num_threads(1)
prepare("torch._dynamo")  # optimizers import it: once, not on every rank

# %% [markdown]
# ## 1 · Begin as rank 0
#
# Rank 0 has perhaps loaded a checkpoint, the others have not. Make all ranks equal to it: the weights, the buffers
# (BatchNorm's running averages), and all of the optimizer's state: Adam's averages, its count of steps, the learning rate.
# The other ranks may have no state at all yet, or another one. If rank 0's optimizer is new, then all are new afterwards;
# nobody makes a step to have something to send.


# %% solution="broadcast"
def broadcast_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Model and optimizer of rank 0, on all ranks."""
    ### BEGIN SOLUTION
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state, src=0)
    optimizer.load_state_dict(state[0])
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `model.parameters()` has no buffers. `model.state_dict()` has both, as tensors that share their memory with the model.
#
# </details>
# <details><summary>Hint 2</summary>
#
# All ranks must make the same calls. A loop over the optimizer's tensors is longer on rank 0 than where there are none. But
# `optimizer.state_dict()` is one object on every rank, and `dist.broadcast_object_list([…], src=0)` sends objects.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `dist.broadcast(tensor, src=0)` for each tensor in `model.state_dict().values()`. Then `state = [optimizer.state_dict()]`,
# `dist.broadcast_object_list(state, src=0)`, and `optimizer.load_state_dict(state[0])`.
#
# </details>
#
# A weight, a running average, Adam's average and its count of steps, on three ranks, of which rank 0 has a checkpoint:

# %%
before = [[0.5, 0.2, 0.1, 3], [-0.8, 0, 0, 0], [0.3, 0, 0, 0]]
plots.collective("the broadcast", before, [before[0]] * 3)


# %% check="broadcast" points=3
def made(rank: int, steps: int):
    """A model with buffers and an Adam that has made some steps; every rank has its own."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (1 + rank))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def parts(model, optimizer) -> dict:
    """All that has to be equal, in its parts."""
    state = optimizer.state_dict()
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "state of Adam": {number: dict(one) for number, one in state["state"].items()},
        "learning rate": [group["lr"] for group in state["param_groups"]],
    }


def check_broadcast(*steps: int) -> None:
    ranks, what = len(steps), f"where the ranks have made {list(steps)} steps"

    def run(rank):
        model, optimizer = made(rank, steps[rank])
        broadcast_state(model, optimizer)
        return parts(model, optimizer)

    got, own = on_ranks(ranks, run), [parts(*made(rank, steps[rank])) for rank in range(ranks)]
    zeros = {n: torch.zeros_like(weight) for n, weight in enumerate(own[0]["weights"].values())}
    pretended = {n: {"step": torch.tensor(1.0), "exp_avg": zero, "exp_avg_sq": zero} for n, zero in zeros.items()}
    reasons = {
        "weights": "each rank's own: nothing has come",
        "buffers": "each rank's own: buffers are no parameters, but state_dict() has them",
        "state of Adam": "each rank's own: the optimizer has a state_dict(), too",
        "learning rate": "each rank's own: it is in the optimizer's state_dict()",
    }
    for name, reason in reasons.items():
        mistakes = {
            reason: [one[name] for one in own],
            "the state of an Adam that has made a step with zeros, to have something to send": [pretended] * ranks,
        }
        same([one[name] for one in got], [own[0][name]] * ranks, f"{name} {what}", ranks=True, mistakes=mistakes)


check_broadcast(3, 0)
check_broadcast(0, 0)
### BEGIN HIDDEN TESTS
check_broadcast(2, 5, 0)
check_broadcast(0, 4)
check_broadcast(1, 1, 1, 1)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · The optimizer averages
#
# Horovod leaves the model alone; its optimizer averages the gradients. `synchronize` makes every gradient, in all of
# the optimizer's groups of parameters, the mean over all ranks; one that is `None` here counts as zeros. `step` synchronises
# first, and then lets `self.optimizer` make its step. But whoever wants to clip gradients calls `synchronize` before; then
# `step` must not send everything once more. After a step the next gradients are new ones.


# %% solution="optimizer"
class DistributedOptimizer:
    """An optimizer whose step begins with the mean of all ranks' gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.synchronized = False

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        """Average all gradients over the ranks."""
        ### BEGIN SOLUTION
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.synchronized = True
        ### END SOLUTION

    def step(self) -> None:
        """Average, unless that has been done since the last step; then make a step."""
        ### BEGIN SOLUTION
        if not self.synchronized:
            self.synchronize()
        self.optimizer.step()
        self.synchronized = False
        ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The optimizer knows its parameters: `self.optimizer.param_groups` is a list of dictionaries, each with a list of parameters
# under `"params"`. There may be several groups.
#
# </details>
# <details><summary>Hint 2</summary>
#
# As in exercise 04: all-reduce, divide by the number of ranks, and a gradient that is `None` becomes zeros first, or this
# rank is one call behind. `self.synchronized` tells whether it has been done; who sets it to what, and when?
#
# </details>
# <details><summary>Hint 3</summary>
#
# `synchronize` ends with `self.synchronized = True`. `step`: `if not self.synchronized: self.synchronize()`, then
# `self.optimizer.step()`, then `self.synchronized = False`.
#
# </details>
#
# One weight w on two ranks. Rank 0's samples want it to be 1, those of rank 1 want 5. Each on its own goes there; with the
# mean of both gradients they go together, to 3, as one process with all samples would.

# %%
wishes, ways = (1.0, 5.0), {"rank 0 on its own": [0.0], "rank 1 on its own": [0.0], "mean of the gradients": [0.0]}
for way, wish in zip(ways.values(), (*wishes, sum(wishes) / 2)):
    for _ in range(8):
        way.append(way[-1] - 0.4 * (way[-1] - wish))
plots.lines({name: (list(range(9)), way) for name, way in ways.items()}, xlabel="step", ylabel="weight w")


# %% check="optimizer" points=4
def loss(model, batch, last=False):
    """Of one rank's share. The last rank does not use the second layer."""
    return (model[0](batch) if last else model[1](model[0](batch))).square().mean()


def begun():
    """A model and an optimizer with two groups, which has made a step: it has a momentum, and must keep it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).double()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    loss(model, torch.ones(2, 3).double()).backward()
    optimizer.step()
    return model, optimizer


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def check_optimizer(ranks: int, steps: int, *, clip: bool) -> None:
    batches = torch.randn(steps, ranks, 4, 3, generator=torch.Generator().manual_seed(1)).double()

    def train(model, optimizer, share, between) -> list[torch.Tensor]:
        """The weights after each step; share(number) is the loss that a rank, or one process, goes backward from."""
        seen = []
        for number in range(steps):
            optimizer.zero_grad()
            share(model, number).backward()
            if clip:
                between(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            seen.append(weights(model))
        return seen

    def own(rank):
        return lambda model, number: loss(model, batches[number, rank], last=rank == ranks - 1)

    def run(rank):
        model, optimizer = begun()
        calls, all_reduce = [0], dist.all_reduce

        @unseen
        def counted(*given, **named):
            calls[0] += 1
            return all_reduce(*given, **named)

        dist.all_reduce = counted
        seen = train(model, DistributedOptimizer(optimizer), own(rank), lambda wrapped: wrapped.synchronize())
        return seen, calls[0] // steps

    def one_process(share, forgets=False) -> list[torch.Tensor]:
        model, optimizer = begun()
        if forgets:
            optimizer.state.clear()
        return train(model, optimizer, share, lambda optimizer: None)

    def total(model, number):
        return sum(own(rank)(model, number) for rank in range(ranks))

    def mean(model, number):
        return total(model, number) / ranks

    seen, calls = zip(*on_ranks(ranks, run))
    what = f"{steps} steps on {ranks} ranks" + ", clipped" * clip
    wanted = one_process(mean)
    mistakes = {
        "what they were before: has the optimizer made a step?": [[weights(begun()[0])] * steps] * ranks,
        "a training with the sum of the gradients: divide by the number of ranks": [one_process(total)] * ranks,
        "each rank's own training: nothing is averaged": [one_process(own(rank)) for rank in range(ranks)],
        "the work of an optimizer that has lost its momentum: wrap the one that there is": [
            one_process(mean, forgets=True)
        ]
        * ranks,
        "averaged in the first step only: what does `synchronized` say after it?": [
            one_process(lambda model, number, rank=rank: (own(rank) if number else mean)(model, number))
            for rank in range(ranks)
        ],
    }
    same(seen, [wanted] * ranks, f"weights after each of {what}", ranks=True, mistakes=mistakes)
    most = len(list(begun()[0].parameters()))
    why = f"{max(calls)} all-reduces in a step, for {most} gradients: step sends again what synchronize has sent"
    require(max(calls) <= most, f"nothing is sent twice, {what}", why)


check_optimizer(2, 3, clip=False)
check_optimizer(2, 2, clip=True)
### BEGIN HIDDEN TESTS
check_optimizer(3, 4, clip=False)
check_optimizer(4, 2, clip=True)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Negotiate
#
# In each of Horovod's cycles every rank has some gradients ready, in the order in which its backward has reached them; that
# order, and how far it has come, differ from rank to rank. All-reduces can begin for those that are ready everywhere, and all
# ranks must begin them in the same order. Return their names, in the order in which rank 0 has them. A rank with nothing
# ready takes part as well.


# %% solution="negotiate"
def negotiate(ready: list[str]) -> list[str]:
    """Names that are ready on all ranks, in rank 0's order."""
    ### BEGIN SOLUTION
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, ready)
    return [name for name in everywhere[0] if all(name in names for names in everywhere)]
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Every rank needs to know what the others have. Which collective gives everybody everything?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `dist.all_gather_object(everywhere, ready)` fills a list with one entry for each rank. A `set` has no order; rank 0's list
# has one, and it is the same for all.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `everywhere = [None] * dist.get_world_size()`, the all-gather, then those names of `everywhere[0]` that are in each list of
# `everywhere`.
#
# </details>
#
# Three ranks; a number stands for a gradient's name. On the left what is ready, on the right what can be sent now:

# %%
plots.collective("negotiating", [[4, 3, 2, 1], [4, 2, 3], [3, 4, 1, 2]], [[4, 3, 2]] * 3)


# %% check="negotiate" points=2
def check_negotiate(*ready: list[str]) -> None:
    ranks = len(ready)
    got = on_ranks(ranks, lambda rank: negotiate(ready[rank]))
    common = [name for name in ready[0] if all(name in names for names in ready)]
    union = list(dict.fromkeys(name for names in ready for name in names))
    mistakes = {
        "each rank's own order: they would begin different all-reduces at the same time": [
            [name for name in names if name in common] for names in ready
        ],
        "what is ready somewhere: the others would wait for it": [union] * ranks,
        "what is ready here: the others would wait for it": list(ready),
        "the order of the alphabet, not rank 0's": [sorted(common)] * ranks,
    }
    same(got, [common] * ranks, f"what is ready on all of {ranks} ranks", ranks=True, mistakes=mistakes)


check_negotiate(["f", "e", "d", "c", "b", "a"], ["d", "b", "c", "f", "e"])
check_negotiate(["b", "a"], [], ["a", "b"])
### BEGIN HIDDEN TESTS
check_negotiate(["3.bias", "3.weight", "1.bias"], ["1.bias", "3.weight", "3.bias"], ["3.weight", "2.bias", "3.bias"])
check_negotiate([], ["a"])
check_negotiate(["c", "a"], ["a", "c", "b"], ["b", "a", "c"], ["a", "c"])
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `course_lib/parallel/horovod.py` calls the real one, and refuses to wrap an optimizer that has a state already;
# `course_lib/parallel/ddp.py` has `start_equal`, which broadcasts the model before training. *Your optimizer waits with all
# of its all-reduces until `step`. Horovod starts each of them in a hook, while backward still runs. What would you have to
# change in `synchronize`, and which call would a hook make?*
#
# **Next:** [11 · Lightning](../../notebooks/11_lightning.ipynb).
