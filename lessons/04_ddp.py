# %% [markdown]
# # 04 · DDP: one process for each device
#
# Lesson 03 ended with three limits: one Python, one first device with the most memory, all messages through it. The cure is
# to have no first device. Start the whole program once for each device, give every copy its part of the data, and let the
# copies agree on one thing only: the gradients. That is *distributed data parallel*, DDP, and most large training runs are
# built on it.
#
# After this lesson
#
# 1. you have averaged gradients by hand in three ways, and then with PyTorch's own DDP;
# 2. you have proved that all four, and one process with the large batch, end with the same weights;
# 3. you have *seen* communication disappear behind computation;
# 4. you know what goes wrong with samplers, learning rates, metrics and BatchNorm, and what to do.
#
# **New since lesson 03:** several processes. The loop stays; `sync()` between `backward` and `step` now does something. And
# `batch` is now the batch of *one rank*: the **global batch** is that times the number of ranks.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
world_size = 2  # ranks; 4 works as well, on 2 cores only slower
width = 16
batch = 4  # samples per step on each rank
steps = 5  # of the proof
timeline_width = 32  # of the larger net whose messages are looked at
max_steps = 40  # of the training runs that are compared

# %% [markdown]
# ## Ranks in this notebook
#
# As in lesson 00, `ranks.start` starts processes that wait for cells. Four things to know about them:
#
# | | |
# |---|---|
# | `%%px` | the cell runs on all ranks, not here |
# | `%%px --local`, `--targets 0` | there *and* here; on rank 0 only |
# | `team["a"]` | the list of all ranks' `a` |
# | `team["a"] = value` | gives `a` to all ranks |

# %%
from course_lib import plots, ranks
from course_lib.lesson import numbers, show

team = ranks.start(world_size)

# %% [markdown]
# They are processes that do not know each other yet. The next cell joins them in a *process group*. MPI has only started
# them and tells each its rank; their messages go through *gloo* here, and through *NCCL*, NVIDIA's library, on GPUs. Each
# rank takes one thread, or one GPU where there are some.

# %%
# %%px
import os

import torch
import torch.distributed as dist

from course_lib.config import Config
from course_lib.world import start as join_world

world = join_world(Config(launcher="mpi", timeout=60))
print(
    f"rank {world.rank} of {world.world_size}, process {os.getpid()}, {world.device}, {torch.get_num_threads()} thread"
)

# %% [markdown]
# ## Two collectives
#
# DDP needs two operations in which all ranks take part. **Broadcast**: every rank gets a copy of what one rank has.
# **All-reduce**: all give, and all get the sum. *What will everybody have in the end, if rank 0 brings 1, 2, 3 and rank 1
# brings 10, 20, 30?*

# %%
# %%px
before = torch.tensor([1.0, 2.0, 3.0], device=world.device) * 10**world.rank
copied, summed = before.clone(), before.clone()
dist.broadcast(copied, src=0)
dist.all_reduce(summed)
print(f"{tuple(before.shape)} {before.tolist()}: broadcast {copied.tolist()}, all-reduce {summed.tolist()}")

# %%
plots.collective("broadcast", team["before"], team["copied"])
plots.collective("all-reduce", team["before"], team["summed"])
assert all(summed.tolist() == sum(team["before"]).tolist() for summed in team["summed"])

# %% [markdown]
# Every rank must call them, in the same order, with the same shapes; a rank that does not come is waited for until the
# time-out. Nobody collects the sum: each rank passes pieces on to its neighbour, round and round. That is the *ring* of
# lesson 03, and lesson 09 builds it.
#
# ## Who gets which samples
#
# Every epoch has one order of all samples, shuffled by the seed and the epoch, the same on all ranks. Cut it into global
# batches, and give each rank its part of every one. Then two ranks with batches of 4 see what one sees with 8:

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
# equal shares: of 9 samples on 2 ranks, one is taken twice.

# %%
from torch.utils.data import DistributedSampler

sampler = DistributedSampler(range(9), num_replicas=2, rank=0)
first_epoch, second_epoch = list(sampler), list(sampler)
sampler.set_epoch(1)
print("epoch 0:", first_epoch)
print("epoch 1:", second_epoch, "← the same again!")
print("epoch 1:", list(sampler), "after set_epoch(1)")
assert first_epoch == second_epoch != list(sampler)
assert len(first_epoch) == 5  # and 5 on the other rank: 10 of 9

# %% [markdown]
# Without `set_epoch` every epoch has the same order and the same batches: it trains, it looks fine, and nobody notices. Our
# trainer makes new `Batches` for every epoch and passes its number.
#
# ## First way: one gradient after the other
#
# Model, data and loop are those of lesson 01.

# %%
import torch

from course_lib.config import Config

config = Config(data=data, runs=runs, width=width, batch=batch, bucket_mb=0.1, max_steps=steps)
team["config"], team["timeline_width"] = config, timeline_width
world = World()  # here, in the notebook, we are alone

# %% [markdown]
# The next cell runs on all ranks and here. It defines what both sides need: a model that has the same weights wherever it
# is made, and a way to load samples by their numbers.

# %%
# %%px --local
from torch.nn import functional as F

from course_lib.data.tasks import make_task
from course_lib.trainer import make_model

task = make_task(config, world)


def fresh_model(**changes) -> torch.nn.Module:
    model = make_model(config.replace(**changes), task)
    torch.nn.init.normal_(model.head.weight, std=0.1)  # it starts at zero, and zero gradients would be equal too easily
    return model.double().to(world.device)  # 16 digits, as in lesson 03's proof


def load(indices) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*(task.train[index] for index in indices))
    return torch.stack(x).double().to(world.device), torch.stack(y).double().to(world.device)


# %% [markdown]
# Every rank runs forward and backward on its own samples. If each made its update now, the models would drift apart. So
# between `backward` and `step` the ranks take the mean of all gradients. In the most naive way:

# %%
from course_lib.parallel.ddp import naive

show(naive)

# %% [markdown]
# (`start_equal` broadcasts the weights of rank 0, in case they differ.) Look at one gradient, before and after `sync`:

# %%
# %%px
from course_lib.data.batches import Batches
from course_lib.parallel.ddp import naive

indices = next(iter(Batches(len(task.train), config.batch, world=world)))
x, y = load(indices)
model, sync = naive(fresh_model(), world)
F.mse_loss(model(x), y).backward()
own = model.head.bias.grad[0].item()
sync()
averaged = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
print(f"samples {indices}: a gradient was {own:.6f}, and is now {model.head.bias.grad[0]:.6f}")

# %% [markdown]
# *Why the mean, where DataParallel took the sum?*
#
# <details><summary>Answer</summary>
#
# Here every rank has a loss of its own: the mean over *its* batch. The mean over the global batch is the mean of these
# means, as long as all ranks have batches of the same size. The gradient follows the loss.
#
# </details>
#
# All ranks have the same gradient now. And it must be the one that a single process finds on the whole global batch:

# %%
x, y = load(next(iter(Batches(len(task.train), world_size * batch))))
whole = fresh_model()
F.mse_loss(whole(x), y).backward()
exact = {name: parameter.grad.cpu() for name, parameter in whole.named_parameters()}
for of_rank in team["averaged"]:
    torch.testing.assert_close(of_rank, exact, rtol=1e-9, atol=1e-12)
print(f"{len(exact)} gradients on {world_size} ranks = those of one process with the batch of {world_size * batch}")

# %% [markdown]
# That is the heart of it. What follows makes it fast.
#
# ## Second way: buckets
#
# How long does a message take? A fixed time before its first byte arrives, the *latency*, and then a time for its length.
# We send messages of one number, of ten, a hundred …, ten of each in a row; then our gradients, one by one; then all of
# them in one flat tensor.

# %%
from course_lib.profiling import seconds_to_send

show(seconds_to_send)

# %%
# %%px
from course_lib.profiling import seconds_to_send

lengths = [10**power for power in range(7)]
messages = [seconds_to_send([torch.zeros(length, device=world.device)] * 10) / 10 for length in lengths]
pieces = [torch.zeros_like(parameter).float() for parameter in model.parameters()]
one_by_one = seconds_to_send(pieces)
all_in_one = seconds_to_send([torch.cat([piece.flatten() for piece in pieces])])

# %%
kilobytes, lasting = [4 * length / 1e3 for length in team["lengths"][0]], [1e3 * s for s in team["messages"][0]]
plots.curves({"all-reduce": (kilobytes, lasting)}, xlabel="message (kB)", ylabel="time (ms)", logarithmic=True)

# %% [markdown]
# To the left the line is nearly level: a hundred numbers take about as long as one, and it is all latency. To the right the
# length counts. **Predict** from this line: gradients one by one, and all in one message.

# %%
import numpy as np

sizes = [gradient.numel() * 4e-3 for gradient in exact.values()]  # kB
predicted = {
    "one by one": np.interp(sizes, kilobytes, lasting).sum(),
    "all in one": np.interp(sum(sizes), kilobytes, lasting),
}
measured = {"one by one": 1e3 * team["one_by_one"][0], "all in one": 1e3 * team["all_in_one"][0]}
plots.grouped_bars({"predicted": predicted, "measured": measured}, ylabel=f"{len(exact)} gradients (ms)")
print(f"one by one takes {measured['one by one'] / measured['all in one']:.0f} times as long")

# %% [markdown]
# The two may differ by a factor of a few, since other programs share these cores. The message is the ratio: one by one
# takes many times as long. So gradients are put side by side into **buckets**, and a bucket is one message. After it,
# each gradient is a view of its bucket, so that nothing is copied back:

# %%
from course_lib.parallel.ddp import Bucket, add_up, bucketed

show(Bucket, bucketed, add_up)

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
# The gradients of the *last* layers come first: backward walks the net from its end. They could travel while the earlier
# layers are still being computed. So: buckets in that order, a hook that counts, and a bucket leaves as soon as it is
# full. Here is all that is new:

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
# `DistributedDataParallel` is this third way in C++: it broadcasts rank 0's weights, makes buckets, and attaches hooks to the
# parameters. In our library it is one call. (Buffers are BatchNorm's running means. By default DDP sends rank 0's before
# every forward pass of training; our trainer does so once before it evaluates.)

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
for name in TOGETHER:
    assert all(torch.equal(mine[name][key], by_rank[0][name][key]) for mine in by_rank for key in one_process)
    furthest = max((by_rank[0][name][key] - one_process[key]).abs().max().item() for key in one_process)
    assert furthest < 1e-9
    print(f"{name:15} all ranks equal to the last bit; from one process they differ by at most {furthest:.1g}")

# %% [markdown]
# All ranks hold the same weights, bit for bit, and have sent none since the first broadcast: the same start and the same
# gradients are enough. That is why only gradients travel.
#
# ## See it
#
# *Before you look: in which of the four is communication hidden behind computing?* The trainer can record what every rank
# does when (`--timeline 8`: in its first eight steps). We take a larger net, so that there is something to send.

# %%
# %%px
from course_lib.trainer import fit

for name in TOGETHER:
    recorded = {"name": f"04_{name}", "strategy": name, "width": timeline_width, "bucket_mb": 0.5}
    fit(config.replace(**recorded, max_steps=8, timeline=8, log_every=8), world)

# %%
from course_lib.timeline import read_timelines

ways = ("ddp_naive", "ddp_bucketed", "ddp_overlapped", "ddp")
recorded = {name: read_timelines(f"{runs}/04_{name}") for name in ways}
plots.timeline(recorded)

# %% [markdown]
# The upper row of a rank is what it computes, the lower row a message on its way. In the first two pictures messages begin
# where backward ends, and the rank stands still (light grey). In the other two they lie *under* backward: the first
# buckets travel while the earlier layers are computed. PyTorch's DDP waits for the last one inside `backward`, so it has no
# light grey at all. Dark grey is a rank that came early and waits for the other: no strategy cures that. In numbers, the
# part of all communication that happened during backward:

# %%
from course_lib.timeline import share_during

hidden = {name: 100 * share_during(recorded[name], "communicate", "backward") for name in ways}
plots.bars(hidden, xlabel="communication hidden behind backward (%)")
assert hidden["ddp_naive"] == hidden["ddp_bucketed"] == 0

# %% [markdown]
# For PyTorch's DDP it is all of it, because its `backward` does not end before everything has arrived; the fair comparison is
# in the pictures. On a CPU a message needs a core too, so hiding it gains less time here than it would on a GPU, where the
# network card does the sending.
#
# ## Accumulate: several small batches, one message
#
# If the batch you want does not fit into memory, run several backward passes, let the gradients add up, then step once.
# Sending them each time would be a waste: `no_sync()`, around forward and backward, keeps the hooks silent until the last
# pass. Each half's loss is divided by two, for the loss is a mean.

# %%
# %%px
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def accumulate(halves: list[slice]) -> tuple[list[int], dict]:
    wrapped, sent = DistributedDataParallel(fresh_model()), []
    wrapped.register_comm_hook(sent, lambda sent, bucket: sent.append(1) or allreduce_hook(None, bucket))
    with wrapped.no_sync():
        (F.mse_loss(wrapped(x[halves[0]]), y[halves[0]]) / 2).backward()
    before = len(sent)
    (F.mse_loss(wrapped(x[halves[1]]), y[halves[1]]) / 2).backward()
    return [before, len(sent)], {name: p.grad.cpu() for name, p in wrapped.module.named_parameters()}


sent, accumulated = accumulate([slice(None, len(x) // 2), slice(len(x) // 2, None)])
print("messages after the first half:", sent[0], "and after the second:", sent[1])

# %% [markdown]
# ## DDP's switches
#
# | switch | when |
# |---|---|
# | `bucket_cap_mb=25` | smaller: earlier departure, more latency; larger: the reverse. Our net fits into one |
# | `gradient_as_bucket_view=True` | nearly always: gradients live in the buckets, which saves the memory of a copy |
# | `find_unused_parameters=True` | if some parameters get no gradient in some steps; costs a search and a message, every time |
# | `static_graph=True` | if the same parameters are used in the same way in every step: it finds out once, then pays nothing |
# | `register_comm_hook` | to send something else, such as compressed gradients |
#
# Leaving out the third one causes an error that many people meet. A net with a branch that is not used:


# %%
# %%px
class Branches(torch.nn.ModuleList):
    def forward(self, x):
        return self[0](x)  # and self[1] is never used


def two_steps(**switches) -> str:
    wrapped = DistributedDataParallel(
        Branches([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]).to(world.device), **switches
    )
    try:
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(torch.full((1, 3), 1.0 + world.rank, device=world.device)).sum().backward()
            gradient = wrapped.module[0].weight.grad[0, 0].item()
    except RuntimeError as error:
        return f"gradient {gradient}, then: {str(error).split('.')[0]}"
    return f"gradient {gradient}, no error"


outcomes = two_steps(), two_steps(find_unused_parameters=True), two_steps(static_graph=True)
print(*outcomes, sep="\n")

# %% [markdown]
# Compare the first line of the ranks. The error comes in the *second* step. In the first one the bucket waited for a
# gradient that never came, nothing was sent, and the ranks went on with different gradients. Both switches cure it. Here
# is what we have claimed in this section and in the one before:

# %%
for of_rank, (before, after) in zip(team["accumulated"], team["sent"]):
    torch.testing.assert_close(of_rank, exact, rtol=1e-9, atol=1e-12)  # two halves = the whole
    assert before == 0 < after
without, searched, static = zip(*team["outcomes"])
assert len(set(without)) == world_size and all("finished reduction" in outcome for outcome in without)
assert len({*searched, *static}) == 1 and "no error" in searched[0]

# %% [markdown]
# Then why not switch the search on always? It has a price, the same for small and large images. So we look for it where
# it can be seen, with a tiny image, taking turns. (PyTorch itself warns that here the search finds nothing.)

# %%
# %%px
import statistics
import time

tiny = x[..., :8, :8].contiguous(), y[..., :8, :8].contiguous()


def step_ms(wrapped) -> float:
    dist.barrier()
    began = time.perf_counter()
    F.mse_loss(wrapped(tiny[0]), tiny[1]).backward()
    return 1e3 * (time.perf_counter() - began)


def prices() -> list[float]:
    wrapped = [DistributedDataParallel(fresh_model(), find_unused_parameters=search) for search in (False, True)]
    turns = [[step_ms(each) for each in wrapped] for _ in range(30)]
    return [statistics.median(column) for column in zip(*turns)]


plain, searching = prices()

# %%
print(f"forward and backward {team['plain'][0]:.1f} ms, with the search {team['searching'][0]:.1f} ms")

# %% [markdown]
# A **communication hook** may send anything in a bucket's place. For example half the bytes, as 16-bit numbers:


# %%
# %%px
def half_the_bytes(world_size: int, bucket):
    sent = bucket.buffer().div(world_size).to(torch.bfloat16)
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def compressed_gradient() -> dict[str, torch.Tensor]:
    wrapped = DistributedDataParallel(fresh_model().float())
    wrapped.register_comm_hook(world.world_size, half_the_bytes)
    F.mse_loss(wrapped(x.float()), y.float()).backward()
    return {name: parameter.grad.cpu() for name, parameter in wrapped.module.named_parameters()}


compressed = compressed_gradient()


# %%
def distance(some: dict, others: dict) -> float:
    """How far two sets of gradients are apart, as a part of their length."""
    some, others = (torch.cat([of[name].flatten() for name in exact]) for of in (some, others))
    return ((some - others).norm() / others.norm()).item()


error = distance(team["compressed"][0], exact)
assert distance(team["averaged"][0], exact) < 1e-9 < error < 0.02
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
shards = [load(indices) for indices in shard(9, 9, world)]
own = evaluate(model, shards)  # this rank alone
of_ranks = evaluate(model, shards, world)  # the sums and counts of all ranks, added up and then divided
print(f"{own['count']} samples, mean {own['loss']:.5f}; all {of_ranks['count']} samples, mean {of_ranks['loss']:.5f}")

# %%
from course_lib.trainer import evaluate

of_all = evaluate(fresh_model(), [load(range(9))])["loss"]
means = [own["loss"] for own in team["own"]]
print(f"all nine in one process: {of_all:.5f}; mean of the ranks' means: {sum(means) / len(means):.5f}")
assert abs(team["of_ranks"][0]["loss"] - of_all) < 1e-9 * of_all
assert abs(sum(means) / len(means) - of_all) > 1e-5 * of_all

# %% [markdown]
# A sample in the smaller shard counts for more, and the result changes with the number of ranks. So metrics are reduced
# as **(sum, count)**, never as means. It is worse still to drop every rank's incomplete batch, or to count some samples
# twice as `DistributedSampler` does: then the test set itself changes with the number of ranks.
#
# In training, a rank that runs out of batches would leave the others waiting. Our `Batches` gives all ranks equally many, and
# the trainer refuses a loader that ends early. Where data can't be shared evenly, PyTorch has a context manager, `Join`: in
# it, a rank that is done answers the others' all-reduces with zeros.

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
# GroupNorm the averaged gradient equals that of one process, with BatchNorm it does not, however carefully it is averaged.

# %%
# %%px --local
from course_lib.parallel.ddp import naive


def gradient_with(norm: str) -> dict[str, torch.Tensor]:
    model = fresh_model(norm=norm)
    F.mse_loss(model(x), y).backward()  # x and y: this rank's part of the first global batch, and here all of it
    if world.world_size > 1:
        naive(model, world)[1]()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


gradients = {norm: gradient_with(norm) for norm in ("group", "batch")}

# %%
apart = {norm: distance(team["gradients"][0][norm], gradients[norm]) for norm in gradients}
print("how far from one process:", {norm: f"{value:.2g}" for norm, value in apart.items()})
assert apart["group"] < 1e-9 and apart["batch"] > 0.01

# %% [markdown]
# On GPUs `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` is the cure: it adds up the statistics over all ranks, in
# every layer, forward and backward, and all ranks wait for each other there. GroupNorm needs none of this. On one rank with
# large batches BatchNorm is fine; on many ranks with a few samples each it is neither exact nor good.
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
# Does it matter? Three training runs over the same samples: one rank, then all ranks without and with scaling
# (`--scale-lr`). We take a quarter of the course's rate: with the best rate there is nothing left to scale.

# %%
compare = config.replace(strategy="ddp", max_steps=max_steps, warmup=5, log_every=1000, lr=1e-3)
team["compare"] = compare
one_rank = fit(compare.replace(name="04_one", max_steps=world_size * max_steps, warmup=5 * world_size)).metrics["loss"]

# %%
# %%px
unscaled = fit(compare.replace(name="04_unscaled"), world).metrics["loss"]
scaled = fit(compare.replace(name="04_scaled", scale_lr=True), world).metrics["loss"]

# %%
unscaled, scaled = team["unscaled"][0], team["scaled"][0]
losses = {"1 rank": one_rank, f"{world_size} ranks, same rate": unscaled, f"{world_size} ranks, scaled": scaled}
plots.bars(losses, xlabel="validation loss after the same samples")
assert scaled < unscaled

# %% [markdown]
# With the same rate, half the steps get less far; with the scaled one the ranks nearly catch up. The rule was found for
# SGD. With Adam, as here, many take the square root of the number of ranks instead. Both are places to start from, not
# laws, and lesson 06 shows where they end.
#
# ## A whole run
#
# Interactive ranks are for looking. Real training runs are programs, started by a launcher. `ranks.torchrun` starts one from
# here and passes on what the ranks print; in a terminal it is the line that the next cell shows first.

# %%
final = config.replace(name="04_final", strategy="ddp", max_steps=max_steps, log_every=10, bucket_mb=25.0)
print(f"torchrun --standalone --nproc-per-node {world_size} -m course_lib.train", *final.arguments(), "\n")
run = ranks.torchrun(world_size, final)

# %% [markdown]
# Only rank 0 has printed; it alone writes the log and the checkpoint too, since all ranks would write the same. Then one
# process with the global batch (`--global-batch` counts for all ranks together, `--batch` for each):

# %%
single_process = fit(final.replace(name="04_alone", strategy="single", global_batch=world_size * batch))

# %% [markdown]
# The training losses differ, for rank 0 prints that of its own half. The validation losses, over all samples, agree as far
# as many steps of Adam let them:

# %%
from course_lib.metrics import read_log

logs = [read_log(folder) for folder in (run, single_process.run)]
ddp_loss, alone_loss = ([event["loss"] for event in log if event["event"] == "eval"][-1] for log in logs)
ddp_speed, alone_speed = ([event["samples_per_s"] for event in log if event["event"] == "step"][-1] for log in logs)
assert abs(ddp_loss - alone_loss) < 0.01 * alone_loss
print(
    f"{world_size} ranks {ddp_loss:.6f}, one process {alone_loss:.6f}; files: {sorted(path.name for path in run.iterdir())}"
)
print(f"speed-up {ddp_speed / alone_speed:.2f}, efficiency {ddp_speed / alone_speed / world_size:.0%}")

# %% [markdown]
# How many times as fast is it? The *speed-up* is the ratio of samples per second, the *efficiency* the speed-up divided by
# the number of ranks. One run of a few steps is a poor measurement; lesson 06 makes it a good one.
#
# When all is done, the ranks leave their process group and end.

# %%
team.run("from course_lib.world import stop; stop(world)")
team.stop()

# %% [markdown]
# ## Your own script
#
# Six lines change in a training script of your own:
#
# ```python
# dist.init_process_group()                                    # torchrun has set RANK, WORLD_SIZE, MASTER_ADDR …
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))         # with GPUs: which one is mine
# loader = DataLoader(dataset, sampler=DistributedSampler(dataset), …)
# model = DistributedDataParallel(model.cuda())                # without GPUs: DistributedDataParallel(model)
# loader.sampler.set_epoch(epoch)                              # at the beginning of every epoch
# if dist.get_rank() == 0: torch.save(model.module.state_dict(), path)   # .module: the model without its wrapper
# ```
#
# and `dist.destroy_process_group()` at the end. If your model has dropout or your data is augmented, give every rank a
# random seed of its own for that, but let all start from the same weights.
#
# ## On the cluster
#
# The same program on two nodes with four GPUs each; lesson 05 takes the script apart:
#
#     sbatch --nodes=2 --gpus-per-node=4 slurm/04_ddp.sbatch --scale-lr
#
# ## Questions
#
# *A rank dies in the middle of an epoch. What do the others see?*
#
# <details><summary>Answer</summary>
#
# With gloo the broken connection makes their next all-reduce fail at once. With NCCL it may hang until the time-out, which
# is minutes. A launcher notices the dead process and ends all the others: always start ranks with one.
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
# *Rank 0 evaluates and saves by itself while the others go on with the next batch. What can go wrong?*
#
# <details><summary>Answer</summary>
#
# If evaluating calls the wrapped model, rank 0 may start a collective that the others don't: they meet in the wrong order,
# and hang or mix up data. And the others may run into the time-out while rank 0 is busy. In our trainer all ranks
# evaluate, each its own shard.
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
# - Of lesson 03's limits, one Python and one first device are gone. Memory is now the same on all devices, not smaller:
#   that is for lessons 07 and 08.
# - Sampler and epoch, (sum, count), learning rate and BatchNorm are where data parallel training goes wrong silently.
#
# **Exercise:** [ex04](../exercises/ex04_ddp/ex04_ddp.ipynb), gradients that agree.
# Then [lab 1](../exercises/lab1_break_it/lab1_break_it.ipynb), in which things break.
#
# **Next:** [05 · Launch](05_launch.ipynb), on one node and on many, with restarts, checkpoints and Slurm.
