# %% [markdown]
# # Exercise 11 · What Lightning asks of you
#
# The Trainer has taken the loop, and Fabric starts the ranks. Three things remain yours, and each can go wrong without a
# word: what a step is and how often the learning rate changes; how a score is made when ranks have unequal shares; and which
# rank reads which sample. Each check trains or judges on real processes and compares with a loop by hand in one process.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens it.
# A check that fails says what differs. (The first one may take a while: the process that all ranks are forked from imports
# Lightning, once.) A rank that never comes back is stopped after twenty seconds, here not five, since Lightning needs some of
# them to begin. Stuck? Each task has three hints; open them one at a time.

# %%
import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from course_lib import places, plots
from course_lib.checks import alone, on_ranks, prepare, require, same, unseen

torch.set_num_threads(1)
prepare("torch._dynamo", "lightning")  # imports that take seconds: once, not on every rank

# %% [markdown]
# All tasks share a small net, samples of three classes, and a Trainer that is quiet and leaves the samplers alone:


# %%
def make_net() -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_samples(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(dim=1))


def make_trainer(ranks: int, **options) -> lightning.Trainer:
    places.quiet()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    options |= {"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}
    return lightning.Trainer(**dict.fromkeys(off, False), **options)


# %% [markdown]
# ## 1 · From a loop to a module
#
# Here is a loop as you know it. Move it into a LightningModule: `training_step` returns the loss of a batch, and
# `configure_optimizers` returns the optimizer and its schedule in a dictionary. `zero_grad`, `backward` and both `step`s are
# the Trainer's. One of them it does more rarely than this loop, unless you say so. (`every` is there to show what happens
# then.) The same module must do on several ranks, each with its part of every batch: there the Trainer wraps it in DDP, which
# averages the gradients.


# %%
def by_hand(samples, *, lr: float, warmup: int, batch: int, epochs: int, every: str = "step") -> dict:
    """The weights after some epochs."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda done: min(1, (done + 1) / warmup))
    for _ in range(epochs):
        for x, y in DataLoader(samples, batch_size=batch):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            if every == "step":
                schedule.step()
        if every == "epoch":
            schedule.step()
    return net.state_dict()


# %% solution="module"
class Classifier(lightning.LightningModule):
    """What is ours of a training. The rest is the Trainer's."""

    def __init__(self, net: nn.Module, lr: float, warmup: int):
        super().__init__()
        self.net, self.lr, self.warmup = net, lr, warmup

    def training_step(self, batch: tuple, number: int) -> torch.Tensor:
        """The loss of a batch (x, y)."""
        ### BEGIN SOLUTION
        x, y = batch
        return F.cross_entropy(self.net(x), y)
        ### END SOLUTION

    def configure_optimizers(self) -> dict:
        """{"optimizer": …, "lr_scheduler": …}"""
        ### BEGIN SOLUTION
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = LambdaLR(optimizer, lambda done: min(1, (done + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through the loop line by line and ask of each: is it the same in every project? Then it is the Trainer's. Two lines are
# left for `training_step`, and two, with a dictionary, for `configure_optimizers`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The Trainer takes what `training_step` *returns* and calls `backward` on it. A schedule that is returned alone moves on once
# an epoch. `"lr_scheduler"` may also be a dictionary: the schedule under `"scheduler"`, and how often it moves on under
# `"interval"`.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `training_step`: `return F.cross_entropy(self.net(x), y)`. `configure_optimizers`: make `optimizer` and `schedule` as in the
# loop, with `self.lr` and `self.warmup`, and return
# `{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}`.
#
# </details>
#
# The rate that your optimizer should have in three epochs of five steps, and what becomes of it by default:

# %%
steps = list(range(15))
plots.lines(
    {
        "once a step: yours": (steps, [0.1 * min(1, (step + 1) / 10) for step in steps]),
        "once an epoch: the default": (steps, [0.1 * min(1, (step // 5 + 1) / 10) for step in steps]),
    },
    xlabel="step",
    ylabel="learning rate",
)


# %% check="module" points=3
def check_module(ranks: int, count: int, *, batch: int, epochs: int) -> None:
    samples, rate = make_samples(count), {"lr": 0.1, "warmup": 10}

    @unseen
    def run(rank):
        model, mine = Classifier(make_net(), **rate), Subset(samples, range(rank, count, ranks))
        try:
            make_trainer(ranks, max_epochs=epochs).fit(model, DataLoader(mine, batch_size=batch // ranks))
        except RuntimeError as error:
            why = "this loss has been through backward already, which is the Trainer's part"
            raise (RuntimeError(why) if "second time" in str(error) else error) from None
        return model.net.state_dict()

    def one(**other):  # process that has every batch whole
        return by_hand(samples, **(rate | {"batch": batch, "epochs": epochs} | other))

    mistakes = {
        "the net as it was: nothing has been learned. Does training_step return the loss, and configure_optimizers what "
        "it has made?": make_net().state_dict(),
        "a schedule that moves on once an epoch, the default": one(every="epoch"),
        "a rate that never changes: where is the schedule?": one(warmup=1),
        'a rate that stays as it was at step 0: does the Trainer get the schedule, as "lr_scheduler"?': one(every="never"),
        "a loss or a rate divided by the number of ranks: DDP has averaged the gradients already": one(lr=0.1 / ranks),
        "a loss or a rate times the number of ranks: the batch of all of them is that of one process": one(
            lr=0.1 * ranks
        ),
    }
    mistakes = {why: [weights] * ranks for why, weights in mistakes.items()}
    what = f"the weights after {epochs} epochs of {count} samples on {ranks} rank{'s' * (ranks > 1)}"
    same(on_ranks(ranks, run, seconds=20), [one()] * ranks, what, ranks=True, mistakes=mistakes)


check_module(1, 40, batch=8, epochs=3)
check_module(2, 36, batch=8, epochs=2)
### BEGIN HIDDEN TESTS
check_module(1, 23, batch=5, epochs=2)
check_module(3, 33, batch=6, epochs=2)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · A score on uneven shards
#
# Five samples are on rank 0 and four on rank 1. Log `"accuracy"`: the share of *all* samples that the net gets right, the
# same number on every rank, and right on one rank as well. `self.sums` is set to zero for you before each validation; keep in
# it what can be added up. Do not leave it to `sync_dist=True`: Lightning 2.6 divides by a count that it has rounded down.


# %% solution="judge"
class Judge(lightning.LightningModule):
    """Judges a net on samples that are spread over the ranks."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def on_validation_epoch_start(self) -> None:
        self.sums = torch.zeros(2)

    def validation_step(self, batch: tuple, number: int) -> None:
        """Take note of a batch (x, y) of this rank."""
        ### BEGIN SOLUTION
        x, y = batch
        right = (self.net(x).argmax(dim=1) == y).sum()
        self.sums += torch.tensor([right, len(y)])
        ### END SOLUTION

    def on_validation_epoch_end(self) -> None:
        """Log "accuracy", that of all samples on all ranks."""
        ### BEGIN SOLUTION
        right, count = self.trainer.strategy.reduce(self.sums, reduce_op="sum")
        self.log("accuracy", right / count)
        ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which two numbers of a batch may be added over batches and over ranks, and give the accuracy when one is divided by the
# other at the very end?
#
# </details>
# <details><summary>Hint 2</summary>
#
# How many are right, and how many there are. The class with the largest output is `self.net(x).argmax(dim=1)`. Over the
# ranks, `self.trainer.strategy.reduce(tensor, reduce_op="sum")` adds them up, and leaves the tensor as it is where there is
# one rank.
#
# </details>
# <details><summary>Hint 3</summary>
#
# In `validation_step`: `self.sums += torch.tensor([right, len(y)])` with `right = (self.net(x).argmax(dim=1) == y).sum()`. In
# `on_validation_epoch_end`: reduce `self.sums`, then `self.log("accuracy", right / count)`.
#
# </details>
#
# Rank 0 has three right of five, rank 1 has four of four. After adding, both have what they need, and both log 7 / 9 = 0.78;
# the mean of 3 / 5 and 4 / 4 would be 0.8.

# %%
plots.collective("adding (right, count)", [[3, 5], [4, 4]], [[7, 9], [7, 9]])


# %% check="judge" points=3
def check_judge(shares: list[int], batch: int) -> None:
    ranks, samples = len(shares), make_samples(sum(shares))
    ends = [sum(shares[: rank + 1]) for rank in range(ranks)]
    mine = [range(end - share, end) for end, share in zip(ends, shares)]  # rank by rank

    @unseen
    def run(rank):
        loader = DataLoader(Subset(samples, mine[rank]), batch_size=batch)
        logged = make_trainer(ranks).validate(Judge(make_net()), loader, verbose=False)
        return {name: value for one in logged for name, value in one.items() if name == "accuracy"}

    x, y = samples.tensors
    right = (make_net()(x).argmax(dim=1) == y).double()
    own = [right[part].mean().item() for part in mine]
    mean, total = sum(own) / ranks, right.sum().item()
    rounded = total / ranks / (len(right) // ranks)
    mistakes = {
        "each rank's own accuracy: add up over the ranks": own,
        "the mean of the ranks' accuracies: a rank with few samples counts as much as one with many": [mean] * ranks,
        "what sync_dist=True gives on uneven shards: a sum over a count that it has rounded down": [rounded] * ranks,
        "the sum over all ranks, not divided": [total] * ranks,
    }
    mistakes = {why: [{"accuracy": value} for value in values] for why, values in mistakes.items()}
    wanted = [{"accuracy": right.mean().item()}] * ranks
    same(on_ranks(ranks, run, seconds=20), wanted, f"what is logged of {shares} samples", ranks=True, mistakes=mistakes)


check_judge([5, 4], 2)
check_judge([7], 3)
### BEGIN HIDDEN TESTS
check_judge([3, 6, 2], 4)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · A loader for every rank
#
# With Fabric the loop is yours again. Make the DataLoader of one rank, such that any number of ranks together take the steps
# of one: in each step `batch` samples over *all* ranks, from an order that is the same on all of them and new in every epoch.
# (Fabric, like the Trainer, calls the sampler's `set_epoch` for you.) What does not fill a batch at the end of an epoch
# nobody gets, and no sample is seen twice.


# %% solution="loader"
def make_loader(samples, batch: int, rank: int, ranks: int) -> DataLoader:
    """The batches of this rank. `batch` is that of all ranks together, and a multiple of their number."""
    ### BEGIN SOLUTION
    sampler = DistributedSampler(samples, num_replicas=ranks, rank=rank, shuffle=True, drop_last=True)
    return DataLoader(samples, batch_size=batch // ranks, sampler=sampler, drop_last=True)
    ### END SOLUTION


# %% [markdown]
# This is the loop that uses it. Fabric is told how many ranks there are; the steps themselves need not know. What every rank
# has seen is kept, for the check:


# %%
def by_fabric(count: int, batch: int, rank: int, ranks: int) -> tuple[list, dict]:
    """The samples that this rank takes, epoch by epoch and step by step, and the weights after two epochs."""
    places.quiet()
    fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    (x, y), net = make_samples(count).tensors, make_net()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = make_loader(TensorDataset(torch.arange(count)), batch, rank, ranks)  # a sample is its number
    assert isinstance(loader, DataLoader), f"make_loader has returned a {type(loader).__name__}, not a DataLoader"
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    seen = []
    for _ in range(2):
        seen.append([])
        for (numbers,) in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(net(x[numbers]), y[numbers]))
            optimizer.step()
            seen[-1].append(numbers.tolist())
    return seen, net.state_dict()


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `DistributedSampler(samples, num_replicas=ranks, rank=rank)` shuffles all samples, with the epoch as part of the seed, and
# takes every n-th. How many samples should a rank's own DataLoader take at a time?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Sampler and loader have an option `drop_last` each, and they mean different things. Without it the sampler repeats samples
# so that all ranks get equally many; the loader ends with a batch that is smaller.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Give `drop_last=True` to the DistributedSampler and to the DataLoader, hand the sampler over as `sampler=sampler`, and let
# the batch size be `batch // ranks`.
#
# </details>
#
# One epoch of thirteen samples with a batch of six, on two ranks: both know the same order, and take turns. Three of a rank's
# six are a step; the thirteenth sample is left over.

# %%
order = torch.randperm(13, generator=torch.Generator().manual_seed(0)).tolist()
plots.collective("dealing", [order, order], [order[:12][rank::2] for rank in range(2)])


# %% check="loader" points=3
def check_loader(ranks: int, count: int, batch: int) -> None:
    found = on_ranks(ranks, lambda rank: by_fabric(count, batch, rank, ranks), seconds=20)
    alone_seen, weights = alone(lambda: by_fabric(count, batch, 0, 1), seconds=20)
    # the samples of all ranks, epoch by epoch and step by step
    together = [[sorted(sum(step, [])) for step in zip(*epoch)] for epoch in zip(*(seen for seen, _ in found))]
    by_one = [[sorted(step) for step in epoch] for epoch in alone_seen]
    sizes = {len(step) for seen, _ in found for epoch in seen for step in epoch}
    steps, steps_of_one = ([len(step) for step in epochs[0]] for epochs in (together, by_one))
    first = sum(together[0], [])
    twice = sorted({number for number in first if first.count(number) > 1})
    reasons = {
        f"a rank takes up to {max(sizes, default=0)} samples in a step, expected {batch // ranks}: `batch` is that of all "
        "ranks together": max(sizes, default=0) != batch // ranks,
        f"samples {twice[:3]}, … are seen twice in an epoch: does every rank take others?": len(twice) >= ranks,
        f"samples {twice} are seen twice in an epoch: who fills up the ranks that have fewer?": bool(twice),
        f"an epoch has steps of {steps} samples on {ranks} ranks and {steps_of_one} on one: who keeps the rest?": not (
            steps == steps_of_one == [batch] * (count // batch)
        ),
        "epochs 0 and 1 have the same batches: shuffle": together[0] == together[1],
        "the ranks together take other samples than one rank does: is there one order for all?": together != by_one,
    }
    what = f"{count} samples in batches of {batch} on {ranks} ranks"
    require(not any(reasons.values()), what, next((why for why, wrong in reasons.items() if wrong), ""))
    same([trained for _, trained in found], [weights] * ranks, f"the weights, {what}", ranks=True, close=1e-6)


check_loader(2, 25, 8)
check_loader(2, 23, 8)
### BEGIN HIDDEN TESTS
check_loader(2, 23, 4)
check_loader(3, 32, 6)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `course_lib/lit.py` has all three: `LitModel.configure_optimizers` with its interval, `validation_step` and
# `on_validation_epoch_end` with sums, and `LitData` with batches of its own, which is why its Trainer is told
# `use_distributed_sampler=False`. In `val_dataloader` some batches are given to the net again and not counted.
#
# *In task 2 one rank called the net three times, the other twice, and nothing hung. Why does `val_dataloader` still take care
# that all ranks call it equally often? Think of a net that is sharded, as with FSDP.*
#
# **Next:** [12 · A recurrent net reads digits](../../notebooks/12_rnn_digits.ipynb).
