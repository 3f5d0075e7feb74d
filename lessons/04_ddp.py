# %% [markdown]
# # 04 · DDP: one process for each device
#
# Lesson 03 ended with three limits: one Python, one first device, all messages through it. The cure is to drop the first
# device. Start the whole program once for each device, give every copy its part of the data, and let the copies agree on
# one thing only: the gradients. That is *distributed data parallel*, DDP, and most large trainings stand on it.
#
# After this lesson
#
# 1. you have averaged gradients by hand in three ways, and then with PyTorch's own DDP;
# 2. you have proved that all four, and one process with the large batch, end with the same weights;
# 3. you have *seen* communication disappear behind computation;
# 4. you know what goes wrong with samplers, learning rates, metrics and BatchNorm, and what to do.
#
# **New since lesson 03:** several processes. The loop stays; `sync()` between `backward` and `step` now does something.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
world_size = 2  # ranks; 4 works as well, on 2 cores only slower
width = 16
batch = 4  # samples a step on each rank
steps = 5  # of the proof
timeline_width = 32  # of the larger net whose messages are looked at
max_steps = 40  # of the trainings that are compared

# %% [markdown]
# ## Ranks in this notebook
#
# A notebook has one process, its kernel. `ranks.start` starts more of them, in one MPI world. From then on, a cell that
# begins with `%%px` runs on *all ranks* and not here. What a rank prints comes with its number in front.

# %%
from course_lib import plots, ranks
from course_lib.lesson import numbers, show

team = ranks.start(world_size)

# %% [markdown]
# They are processes but they don't know each other yet. `start` finds out which one each is and joins them in a
# process group of `torch.distributed`. Each rank takes one thread, or one GPU where there are some.

# %%
# %%px
import os

import torch
import torch.distributed as dist

from course_lib.config import Config
from course_lib.world import start

world = start(Config(launcher="mpi", timeout=60))
print(
    f"rank {world.rank} of {world.world_size}, process {os.getpid()}, {world.device}, {torch.get_num_threads()} thread"
)

# %% [markdown]
# The same lines ran on every rank, with different results. That is all the magic there is.
#
# ## Two collectives
#
# DDP needs two operations in which all ranks take part. The first is **broadcast**: all take what one of them has.

# %%
# %%px
mine = torch.tensor([1.0, 2.0, 3.0], device=world.device) * 10**world.rank
before = mine.clone()
dist.broadcast(mine, src=0)
print(tuple(mine.shape), before.tolist(), "→", mine.tolist())

# %%
plots.collective("broadcast", team["before"], team["mine"])

# %% [markdown]
# The second is **all-reduce**: all give, and all get the sum. *What will everybody have in the end, if rank 0 brings 1, 2, 3
# and rank 1 brings 10, 20, 30?*

# %%
# %%px
mine = before.clone()
dist.all_reduce(mine)
print(tuple(mine.shape), before.tolist(), "→", mine.tolist())

# %%
plots.collective("all-reduce", team["before"], team["mine"])
assert all(sums.tolist() == sum(team["before"]).tolist() for sums in team["mine"])

# %% [markdown]
# Every rank calls it, in the same order, with the same shape. A rank that doesn't come is waited for, until the time-out.
#
# ## Who gets which samples
#
# Every epoch has one order of all samples, shuffled by the seed and the epoch, the same on all ranks. Cut it into *global
# batches*, and give each rank its part of every one. Then two ranks with batches of 4 see what one sees with 8:

# %%
from itertools import islice

from course_lib.data.batches import Batches
from course_lib.world import World

alone = Batches(1000, world_size * batch)
parts = [Batches(1000, batch, world=World(rank=rank, world_size=world_size)) for rank in range(world_size)]
for number, (whole, *shares) in enumerate(islice(zip(alone, *parts), 3)):
    print(f"step {number}: {whole} = " + " + ".join(map(str, shares)))
assert all(whole == sum(shares, []) for whole, *shares in zip(alone, *parts))

# %% [markdown]
# PyTorch's own `DistributedSampler` does much the same, with two traps. It must be *told* which epoch it is. And it wants
# equal shares: for 9 samples on 2 ranks it takes one of them twice.

# %%
from torch.utils.data import DistributedSampler

sampler = DistributedSampler(range(9), num_replicas=2, rank=0)
first_epoch, second_epoch = list(sampler), list(sampler)
sampler.set_epoch(1)
print(
    "epoch 0:",
    first_epoch,
    "\nepoch 1:",
    second_epoch,
    "← the same again!\nepoch 1:",
    list(sampler),
    "with set_epoch(1)",
)
assert first_epoch == second_epoch != list(sampler)
assert 2 * len(first_epoch) == 10

# %% [markdown]
# Without `set_epoch` every epoch has the same order: it trains, it looks fine, and it learns less. Our `Batches` takes the
# epoch as an argument, so that it can't be forgotten.
#
# ## First way: one gradient after the other
#
# Model, data and loop are those of lesson 01. The cell after the next one runs on all ranks *and here* (`--local`). It
# defines what both sides need: a model that has the same weights wherever it is made, and a way to load samples.

# %%
import torch

from course_lib.config import Config

config = Config(data=data, runs=runs, width=width, batch=batch, bucket_mb=0.1, max_steps=steps)
team["config"], team["timeline_width"] = config, timeline_width
world = World()  # here, in the notebook, we are alone

# %%
# %%px --local
from torch.nn import functional as F

from course_lib.data.tasks import make_task
from course_lib.trainer import make_model

task = make_task(config, world)


def fresh_model(**changes) -> torch.nn.Module:
    model = make_model(config.replace(**changes), task)
    torch.nn.init.normal_(model.head.weight, std=0.1)  # it starts at zero, and most gradients with it: a poor test
    return model.to(world.device)


def load(indices) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*(task.train[index] for index in indices))
    return torch.stack(x).to(world.device), torch.stack(y).to(world.device)


# %% [markdown]
# Every rank takes its part of the first global batch, and runs forward and backward. Nobody has talked to anybody yet.

# %%
# %%px
from course_lib.data.batches import Batches

indices = next(iter(Batches(len(task.train), config.batch, world=world)))
x, y = load(indices)
model = fresh_model()
loss = F.mse_loss(model(x), y)
loss.backward()
print(f"samples {indices}, loss {loss:.4f}, a gradient: {model.head.bias.grad[0]:.6f}")

# %% [markdown]
# Different samples, different losses, different gradients. If every rank made its update now, the models would drift
# apart. So between `backward` and `step` they take the mean of all gradients. In the most naive way:

# %%
from course_lib.parallel.ddp import naive

show(naive)

# %% [markdown]
# *Why the mean, where DataParallel took the sum?*
#
# <details><summary>Answer</summary>
#
# Here every rank has a loss of its own: the mean over *its* batch. The mean over the global batch is the mean of these
# means, as long as all ranks have batches of the same size. The gradient follows the loss.
#
# </details>

# %%
# %%px
from course_lib.parallel.ddp import naive

model, sync = naive(model, world)
sync()
averaged = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
print(f"a gradient: {model.head.bias.grad[0]:.6f}")

# %% [markdown]
# All ranks have the same gradient now. And it must be the one that a single process finds on the whole global batch:

# %%
x, y = load(next(iter(Batches(len(task.train), world_size * batch))))
whole = fresh_model()
F.mse_loss(whole(x), y).backward()
exact = {name: parameter.grad.cpu() for name, parameter in whole.named_parameters()}
for averaged in team["averaged"]:
    torch.testing.assert_close(averaged, exact, rtol=1e-4, atol=1e-6)
print(f"{len(exact)} gradients on {world_size} ranks = those of one process with the batch of {world_size * batch}")

# %% [markdown]
# That is the heart of it. What follows makes it fast.
#
# ## Second way: buckets
#
# How long does a message take? A fixed time before its first byte arrives, the *latency*, and then a time for its length.
# Let us send messages of one number, of ten, a hundred …, ten of each in a row:

# %%
# %%px
import time


def seconds(*tensors: torch.Tensor) -> float:
    """For an all-reduce of each of these, one after the other: the fastest of several rounds."""
    taken = []
    for _ in range(10):
        dist.barrier()
        began = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor)
        taken.append(time.perf_counter() - began)
    return min(taken)


lengths = [10**power for power in range(7)]
messages = [seconds(*[torch.zeros(length, device=world.device)] * 10) / 10 for length in lengths]

# %%
kilobytes = [4 * length / 1e3 for length in team["lengths"][0]]
lasting = [1e3 * message for message in team["messages"][0]]
plots.curves({"all-reduce": (kilobytes, lasting)}, xlabel="message (kB)", ylabel="time (ms)", logarithmic=True)

# %% [markdown]
# A thousand numbers take about as long as one: it is nearly all latency. Only where the line bends upwards does the length
# count. Where are our gradients? **Predict:** one by one, they cost as many latencies as there are gradients; all in one
# flat tensor, a single message of that length.

# %%
# %%px
pieces = [torch.zeros_like(parameter) for parameter in model.parameters()]
flat = torch.cat([piece.flatten() for piece in pieces])
one_by_one, together = seconds(*pieces), seconds(flat)

# %%
import numpy as np

total = 4e-3 * sum(gradient.numel() for gradient in exact.values())  # kB
average, all_at_once = np.interp([total / len(exact), total], kilobytes, lasting)
predicted = {"one by one": len(exact) * average, "all in one": all_at_once}
measured = {"one by one": 1e3 * team["one_by_one"][0], "all in one": 1e3 * team["together"][0]}
plots.grouped_bars({"predicted": predicted, "measured": measured}, ylabel=f"{len(exact)} gradients (ms)")

# %% [markdown]
# So gradients are put side by side into **buckets**, and a bucket is one message. After it, each gradient is a view of its
# bucket, so that nothing is copied back:

# %%
from course_lib.parallel.ddp import Bucket, bucketed

show(Bucket, bucketed)

# %% [markdown]
# ## Third way: overlap
#
# Both ways wait until `backward` has ended. But which gradients are there first? A *hook* is called for each parameter at
# the moment when its gradient is complete:

# %%
# %%px --targets 0
arrived = []
model = fresh_model()
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
F.mse_loss(model(x), y).backward()
print("first:", *arrived[:3], "\nlast: ", *arrived[-3:])

# %% [markdown]
# The *last* layers' come first: backward walks the net from its end. They could travel while the earlier layers are
# still being computed. So: buckets in that order, a hook that counts, and a bucket leaves as soon as it is full. Here is
# all that is new:

# %%
from course_lib.parallel.ddp import Overlapped

show(Overlapped.count, Overlapped.leave, Overlapped.sync)

# %% [markdown]
# *Why must buckets leave in the same order on every rank, even if a later one is full first?*
#
# <details><summary>Answer</summary>
#
# Collectives have no names. The first all-reduce of one rank meets the first of the others, whatever is in it. If rank 0
# sent bucket 2 while rank 1 sent bucket 1, their contents would be added up: wrong gradients, or an error about sizes.
#
# </details>
#
# ## PyTorch's own
#
# `DistributedDataParallel` is this third way in C++: it broadcasts rank 0's weights, makes buckets, and hangs hooks on the
# parameters. In our library it is one call:

# %%
from course_lib.parallel.ddp import ddp

show(ddp)

# %% [markdown]
# ## Prove it
#
# Four ways on real ranks, and one process with the global batch: the same weights at the start, the same samples, several
# steps. The function is the same for all; what differs is the strategy that it is given.

# %%
# %%px --local
from itertools import islice

from course_lib.parallel import TOGETHER, single
from course_lib.trainer import train_step


def train(strategy, batch: int) -> dict[str, torch.Tensor]:
    model = fresh_model()
    wrapped, sync = strategy(model, world, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for indices in islice(Batches(len(task.train), batch, world=world), config.max_steps):
        train_step(wrapped, load(indices), optimizer, sync)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


# %%
# %%px
weights = {name: train(strategy, config.batch) for name, strategy in TOGETHER.items()}

# %%
one_process = train(single, world_size * batch)
by_rank = team["weights"]
furthest = {}
for name in TOGETHER:
    assert all(torch.equal(mine[name][key], by_rank[0][name][key]) for mine in by_rank for key in one_process)
    furthest[name] = max((by_rank[0][name][key] - one_process[key]).abs().max().item() for key in one_process)
    print(f"{name:15} all ranks equal to the last bit; from one process they differ by at most {furthest[name]:.1g}")
assert max(furthest.values()) < 1e-4

# %% [markdown]
# All ranks hold the same weights, bit for bit, and have sent none since the first broadcast: the same start and the same
# gradients are enough. That is why only gradients travel.
#
# ## See it
#
# *Before you look: which of the three by hand spends the least time waiting for gradients?* We record what every rank does
# when, with a larger net, so that there is something to send.

# %%
# %%px
from pathlib import Path

from torch.utils.data import DataLoader

from course_lib.prefetch import Prefetcher
from course_lib.timeline import Timeline


def record(name: str) -> None:
    model, timeline = fresh_model(width=timeline_width), Timeline()
    wrapped, sync = TOGETHER[name](model, world, config.replace(bucket_mb=0.5), timeline)
    optimizer = torch.optim.Adam(model.parameters())
    eight = list(islice(Batches(len(task.train), config.batch, world=world), 8))
    for loaded in timeline.watch(Prefetcher(DataLoader(task.train, batch_sampler=eight), world.device)):
        train_step(wrapped, loaded, optimizer, sync, timeline.span)
    folder = Path(config.runs) / f"04_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    timeline.save(folder / f"timeline.{world.rank}.json")


for name in TOGETHER:
    record(name)

# %%
from course_lib.timeline import read_timelines

ways = ("ddp_naive", "ddp_bucketed", "ddp_overlapped", "ddp")
recorded = {name: read_timelines(f"{runs}/04_{name}") for name in ways}
plots.timeline(recorded)

# %% [markdown]
# Blue is computing; in the row below it, red is a message on its way. In the first two pictures red begins where blue
# ends, and the rank stands still (light grey). In the other two, red lies *under* blue: the first buckets travel while the
# earlier layers are computed, and only the last one is waited for. PyTorch's DDP waits inside `backward`, so it has no
# light grey at all. Dark grey is a rank that came early and waits for the other: no strategy cures that.

# %%
waiting = {name: sum(rank.total("sync") for rank in recorded[name]) / world_size / 8 for name in ways[:3]}
plots.bars({name: value * 1e3 for name, value in waiting.items()}, xlabel="waiting for gradients (ms per step)")

# %% [markdown]
# The trainer records the same for any run: `--timeline 10`.
#
# ## Accumulate: several small batches, one message
#
# If the batch you want does not fit into memory, run several backward passes, let the gradients add up, then step once.
# Sending them each time would be a waste: `no_sync()` keeps the hooks still until the last pass.

# %%
# %%px
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def accumulate() -> tuple[list[int], dict]:
    wrapped, sent = DistributedDataParallel(fresh_model()), []
    wrapped.register_comm_hook(None, lambda _, bucket: sent.append(bucket.index()) or allreduce_hook(None, bucket))
    half = len(x) // 2
    with wrapped.no_sync():
        (F.mse_loss(wrapped(x[:half]), y[:half]) / 2).backward()
        messages = [len(sent)]
    (F.mse_loss(wrapped(x[half:]), y[half:]) / 2).backward()
    return [*messages, len(sent)], {name: p.grad.cpu() for name, p in wrapped.module.named_parameters()}


sent, accumulated = accumulate()
print("messages after the first half:", sent[0], "and after the second:", sent[1])

# %%
for accumulated in team["accumulated"]:
    torch.testing.assert_close(accumulated, exact, rtol=1e-4, atol=1e-6)
assert all(first == 0 < second for first, second in team["sent"])
print("two halves with no_sync = the whole batch at once")

# %% [markdown]
# ## DDP's switches
#
# | switch | when |
# |---|---|
# | `bucket_cap_mb=25` | smaller: earlier departure, more latency; larger: the reverse |
# | `gradient_as_bucket_view=True` | always: gradients live in the buckets, and a copy of them is saved |
# | `find_unused_parameters=True` | only if some parameters get no gradient in some steps: it searches the graph every time |
# | `static_graph=True` | if it is the same in every step: it finds out once, then pays nothing |
# | `register_comm_hook` | to send something else, such as compressed gradients |
#
# The absence of the third one is an error that many have met. A net with a branch that is not used:


# %%
# %%px
class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def two_steps(**switches) -> str:
    wrapped = DistributedDataParallel(Branches().to(world.device), **switches)
    try:
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(torch.full((1, 3), 1.0 + world.rank, device=world.device)).sum().backward()
            gradient = wrapped.module.used.weight.grad[0, 0].item()
    except RuntimeError as error:
        return f"gradient {gradient}, then: {str(error).split('.')[0]}"
    return f"gradient {gradient}, no error"


outcomes = two_steps(), two_steps(find_unused_parameters=True), two_steps(static_graph=True)
print(*outcomes, sep="\n")

# %% [markdown]
# Compare the first line of the ranks. The error comes in the *second* step. In the first one the bucket waited for a
# gradient that never came, nothing was sent, and the ranks went on with different gradients. Both switches cure it.

# %%
for without, found, static in team["outcomes"]:
    assert "finished reduction" in without and "no error" in found and "no error" in static
assert len({outcome[0] for outcome in team["outcomes"]}) == world_size, "without the switch every rank has its own"
assert len({outcome[1] for outcome in team["outcomes"]}) == 1, "with it, all have the same"

# %% [markdown]
# Then why not switch the third one on always? It has a price: before every backward pass it walks through the whole graph
# to find out what will not come.


# %%
# %%px
def fastest_step(**switches) -> float:
    wrapped, taken = DistributedDataParallel(fresh_model(), **switches), []
    for _ in range(6):
        dist.barrier()
        began = time.perf_counter()
        F.mse_loss(wrapped(x), y).backward()
        taken.append(time.perf_counter() - began)
    return min(taken)


steps_ms = [fastest_step(find_unused_parameters=unused) * 1e3 for unused in (False, True)]

# %%
plain, searching = team["steps_ms"][0]
print(f"{plain:.1f} ms for forward and backward; with the search {searching:.1f} ms ({searching / plain - 1:+.1%})")

# %% [markdown]
# The price depends on the number of operations, not on their size: with a small net, or on a GPU, which is done sooner, it
# is a larger part. PyTorch itself warns here that the search found nothing.
#
# A **communication hook** may send anything in a bucket's place. For example half the bytes, as 16-bit numbers:


# %%
# %%px
def half_the_bytes(world_size: int, bucket):
    sent = bucket.buffer().div(world_size).to(torch.bfloat16)
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def compressed_gradient() -> dict[str, torch.Tensor]:
    wrapped = DistributedDataParallel(fresh_model())
    wrapped.register_comm_hook(world.world_size, half_the_bytes)
    F.mse_loss(wrapped(x), y).backward()
    return {name: parameter.grad.cpu() for name, parameter in wrapped.module.named_parameters()}


compressed = compressed_gradient()


# %%
def distance(some: dict, others: dict) -> float:
    """How far two sets of gradients are apart, in parts of their length."""
    some, others = (torch.cat([of[name].flatten() for name in exact]) for of in (some, others))
    return ((some - others).norm() / others.norm()).item()


error = distance(team["compressed"][0], exact)
assert distance(team["averaged"][0], exact) < 1e-4 < error < 0.02
print(f"half the bytes; the gradient is off by {error:.2%}")

# %% [markdown]
# Gradients of small batches are noisier than that anyway. PyTorch brings this hook for GPUs (`bf16_compress_hook`), and
# `powerSGD_hook`, which sends two thin matrices in place of a thick one and keeps the error for the next step. They pay
# where the network is slow; but the result is no longer that of one process, and so we leave it here.
#
# ## Uneven shards
#
# Nine samples on two ranks: five and four. Every rank knows the mean of its own. *Is the mean of the means the mean?*

# %%
# %%px
from course_lib.data.batches import shard
from course_lib.trainer import evaluate

model = fresh_model()
mine = [load(indices) for indices in shard(9, 9, world)]
own = evaluate(model, mine)  # this rank alone
of_ranks = evaluate(model, mine, world)  # the sums and counts of all ranks, added up and then divided
print(f"{own['count']} samples, mean {own['loss']:.5f}; all {of_ranks['count']} samples, mean {of_ranks['loss']:.5f}")

# %%
from course_lib.trainer import evaluate

of_all = evaluate(fresh_model(), [load(range(9))])["loss"]
means = [own["loss"] for own in team["own"]]
print(f"all nine in one process: {of_all:.5f}; mean of the ranks' means: {sum(means) / len(means):.5f}")
assert abs(team["of_ranks"][0]["loss"] - of_all) < 1e-6 * of_all
assert abs(sum(means) / len(means) - of_all) > 1e-5 * of_all

# %% [markdown]
# A sample in the smaller shard counts for more, and the result changes with the number of ranks. So metrics are reduced
# as **(sum, count)**, never as means. Worse is to drop every rank's incomplete batch, or to count some samples twice as
# `DistributedSampler` does: then the test set itself changes with the number of ranks.
#
# In training, a rank that runs out of batches leaves the others waiting. Our `Batches` gives all ranks equally many, and
# the trainer refuses a loader that ends early. Where data can't be shared evenly, `Join` lets a rank that is done answer
# the others' all-reduces with zeros:

# %%
# %%px
from torch.distributed.algorithms.join import Join


def uneven(batches: int) -> int:
    wrapped = DistributedDataParallel(fresh_model())
    with Join([wrapped]):
        for _ in range(batches):
            F.mse_loss(wrapped(x), y).backward()
    return batches


print(uneven(2 + world.rank), "batches, and no hang")

# %% [markdown]
# ## BatchNorm
#
# Our UNet has GroupNorm, which looks at one sample at a time. BatchNorm looks at the batch *of its rank*. **Predict:** with
# GroupNorm the averaged gradient equals that of one process, with BatchNorm it doesn't, however carefully it is averaged.

# %%
# %%px --local
from course_lib.parallel.ddp import naive


def gradient_with(norm: str) -> dict[str, torch.Tensor]:
    model = fresh_model(norm=norm)
    F.mse_loss(model(x), y).backward()
    if world.world_size > 1:
        naive(model, world)[1]()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


gradients = {norm: gradient_with(norm) for norm in ("group", "batch")}

# %%
apart = {norm: distance(team["gradients"][0][norm], gradients[norm]) for norm in gradients}
print({norm: f"{value:.2g}" for norm, value in apart.items()})
assert apart["group"] < 1e-4 and apart["batch"] > 0.01

# %% [markdown]
# `torch.nn.SyncBatchNorm` is the cure on GPUs: it adds up the statistics over all ranks, in every layer, forward and
# backward, and all ranks wait for each other there. GroupNorm needs none of this. On one rank with large batches
# BatchNorm is fine; on many ranks with a few samples each it is neither exact nor good.
#
# ## The learning rate
#
# Twice the ranks, twice the global batch, half the steps in an epoch. If each step stays as small as before, an epoch gets
# half as far. **Linear scaling**: multiply the learning rate by the number of ranks. In the beginning, when the weights
# still change a lot, a large rate is dangerous, so it rises slowly: **warm-up**.

# %%
from course_lib.trainer import fit, learning_rate

rates = {}
for n in (1, 2, 4):
    total = 400 // n  # steps for the same samples
    schedule = [learning_rate(step, peak=n * config.lr, warmup=40 // n, steps=total) for step in range(total)]
    rates[f"{n} rank{'s' * (n > 1)}"] = ([step * n for step in range(total)], schedule)
    assert max(schedule) == n * config.lr
plots.curves(rates, xlabel="samples seen, in batches of one rank", ylabel="learning rate")

# %% [markdown]
# Does it matter? Three trainings over the same samples: one rank, then all ranks without and with scaling (`--scale-lr`).

# %%
compare = config.replace(strategy="ddp", max_steps=max_steps, warmup=5, log_every=1000, lr=1e-3)
team["compare"] = compare
one_rank = fit(compare.replace(name="04_one", max_steps=world_size * max_steps, warmup=5 * world_size)).metrics["loss"]

# %%
# %%px
from course_lib.trainer import fit

unscaled = fit(compare.replace(name="04_unscaled"), world).metrics["loss"]
scaled = fit(compare.replace(name="04_scaled", scale_lr=True), world).metrics["loss"]

# %%
unscaled, scaled = team["unscaled"][0], team["scaled"][0]
validation = {
    "1 rank": one_rank,
    f"{world_size} ranks, same rate": unscaled,
    f"{world_size} ranks, scaled rate": scaled,
}
plots.bars(validation, xlabel="validation loss after the same samples")
assert scaled < unscaled

# %% [markdown]
# With the same rate, half the steps get less far. With the scaled one the ranks catch up. This holds while the batch is
# small compared with what the data has to say; lesson 06 shows where it ends.
#
# ## A whole run
#
# Interactive ranks are for looking. Real trainings are programs, started by a launcher. `ranks.torchrun` starts one from here
# and passes on what the ranks print; in a terminal it is the line that the next cell shows first.

# %%
final = config.replace(name="04_final", strategy="ddp", max_steps=max_steps, log_every=10, bucket_mb=25.0)
print(f"torchrun --standalone --nproc-per-node {world_size} -m course_lib.train", *final.arguments(), "\n")
run = ranks.torchrun(world_size, final)

# %% [markdown]
# Only rank 0 has printed; it alone writes the log and the checkpoint as well, since all ranks would write the same. Its
# result must be that of one process with the global batch:

# %%
from course_lib.metrics import read_log

ddp_loss = next(event["loss"] for event in reversed(read_log(run)) if event["event"] == "eval")
alone_loss = fit(final.replace(name="04_alone", strategy="single", global_batch=world_size * batch)).metrics["loss"]
assert abs(ddp_loss - alone_loss) < 1e-3 * alone_loss
print(sorted(path.name for path in run.iterdir()), f"\n{world_size} ranks {ddp_loss:.6f}, one process {alone_loss:.6f}")

# %% [markdown]
# When all is done, the ranks leave their process group and end.

# %%
# %%px
from course_lib.world import stop

stop(world)

# %%
team.stop()

# %% [markdown]
# ## On the cluster
#
# The same program on two nodes with four GPUs each; lesson 05 takes this line apart:
#
#     srun --nodes=2 torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$HOST:$PORT \
#          -m course_lib.train --strategy ddp --scale-lr
#
# ## Questions
#
# *A rank dies in the middle of an epoch. What do the others see?*
#
# <details><summary>Answer</summary>
#
# Their next all-reduce doesn't end. With gloo the connection is closed and they fail at once; with NCCL they may wait for the
# time-out. A launcher notices the dead process and ends all the others: start ranks with one, always.
#
# </details>
#
# *Every rank prints its loss, and they differ. Is something wrong?*
#
# <details><summary>Answer</summary>
#
# No: each has another part of the batch. The *gradients after sync* and the *weights* must be equal; the loss of the global
# batch is the mean of the ranks' losses.
#
# </details>
#
# *Rank 0 logs, evaluates and saves by itself while the others go on with the next batch. What can go wrong?*
#
# <details><summary>Answer</summary>
#
# If evaluating calls the wrapped model, rank 0 may start a collective that the others don't: they meet in the wrong order,
# and hang or mix up data. And the others may run into the time-out while rank 0 is busy. Here all ranks evaluate, each its
# own shard.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    ranks=world_size,
    gradients_compared=len(exact),
    loss_one_process=alone_loss,
    loss_ranks=ddp_loss,
    loss_one_rank=one_rank,
    loss_unscaled=unscaled,
    loss_scaled=scaled,
    batchnorm_apart=apart["batch"],
    bfloat16_error=error,
)

# %% [markdown]
# ## What you have seen
#
# - Each rank is a whole program with its own part of the data; only gradients travel.
# - Averaged gradients make the same weights on every rank, equal to one process with the global batch.
# - Buckets save latency; hooks let them travel while backward still computes: that is PyTorch's DDP.
# - Sampler and epoch, (sum, count), learning rate and BatchNorm are where data parallel trainings go wrong silently.
# - `torchrun` starts it, rank 0 prints and saves.
#
# **Next:** 05 · Launch, on one node and on many, with restarts, checkpoints and Slurm.
