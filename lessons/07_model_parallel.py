# %% [markdown]
# # 07 · Model parallel: one model over several devices
#
# So far every rank had the whole model, and a part of the data. That ends when the model, or what it must keep of a single
# sample, no longer fits into one device. Then the *model* has to be divided. This lesson cuts it in two directions: across,
# into stages that follow each other, as on an assembly line; and along the image, so that each rank has a strip of it.
#
# After this lesson
#
# 1. you have cut a UNet that knows nothing of it, and seen what has to cross the cut;
# 2. you have predicted how long the stages of a pipeline wait for each other, and seen them do it;
# 3. you have split images over ranks, with halos, and know when that is the better cut;
# 4. you have proved that all of it trains what one process trains.
#
# **New since lesson 06:** ranks that see the *same* samples, because they share one model. Task, trainer and log are those of
# lesson 01.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
width = 16
depth = 2  # at least 1
batch = 8
micro_batches = 4  # at least 2, and a divisor of batch // 2
max_steps = 10  # of the training runs that are compared; in many more, rounding would part them

# %%
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import plots, ranks
from course_lib.cockpit import Table
from course_lib.config import Config
from course_lib.data.tasks import make_task
from course_lib.lesson import numbers, show
from course_lib.trainer import fit, make_model

torch.set_num_threads(1)  # as every rank
config = Config(data=data, runs=runs, width=width, depth=depth, batch=batch, micro_batches=micro_batches)
config = config.replace(max_steps=max_steps, log_every=max_steps, launcher="mpi", timeout=60)
task = make_task(config)


def fresh_model(config: Config = config) -> nn.Module:
    """The trainer's begins with a head of zeros: then nearly all gradients are zero, and equal zeros prove nothing."""
    model = make_model(config, task)
    torch.manual_seed(1)
    nn.init.normal_(model.head.weight, std=0.1)
    return model


model = fresh_model()
x, y = (torch.stack(tensors) for tensors in zip(*[task.train[n] for n in range(batch)]))
print(f"a batch: {tuple(x.shape)} → {tuple(y.shape)}; {sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# ## Where to cut
#
# A sequence of layers can be cut anywhere: what crosses is the activation. A UNet is not quite a sequence, for it has skip
# connections. But one can still walk through it piece by piece and, at any point, say what is needed later: the activation,
# and all skips that have not been used yet. `pieces` does that from outside. It holds the model's own blocks, copies nothing,
# and the UNet is not told.

# %%
from course_lib.parallel import split

show(split.Piece, split.Down, split.Up, split.Head)

# %% [markdown]
# *Before you look: the picture gets smaller on the way down. Is the lowest level the cheapest place to cut?*

# %%
from course_lib.parallel.pipeline import crossings

parts = split.pieces(model)
crossing = crossings([split.Stage([part]) for part in parts], x)
rows, after = [], []
for number, (part, state) in enumerate(zip(parts, crossing[1:]), start=1):
    size = sum(torch.Size(one.shape).numel() * 4 for one in state)
    weights = sum(p.numel() for p in part.parameters())
    after.append(size)
    shapes = " + ".join("×".join(map(str, one.shape[1:])) for one in state)
    rows.append((f"{number} · {type(part).__name__}", f"{weights:,}", shapes, f"{size / 1e6:.2f}"))
assert after[depth] == max(after) and after[-2] == min(after[:-1])  # behind the lowest level; before the head
Table(("piece", "parameters", "what leaves it, a sample (channels×y×x)", "MB a batch"), rows)

# %% [markdown]
# No, it is the most expensive: the skips of all levels above are still waiting, and they cross every cut between their block
# on the way down and its partner on the way up. The activation itself is first in each row, then the skips, the newest first;
# the last is the image itself, which the output will be added to. Cut low and you divide the *weights* well, most of which
# are at the bottom. But you always pay for the skips; the cheapest cut lies behind the last of them, where all the work is
# done.
#
# Now cut it in two. `Split` puts each stage on its own device and hands over what crosses; here both devices are the CPU, on
# a node with two GPUs they are `cuda:0` and `cuda:1`.

# %%
show(split.Split.forward)

# %%
import copy

halves = split.Split(copy.deepcopy(model), ["cpu", "cpu"])
for output, name in ((halves(x), "two devices"), (model(x), "one device")):
    F.mse_loss(output, y).backward()
    print(f"{name}: loss {F.mse_loss(output, y).item():.6f}")
pairs = list(zip(halves.parameters(), model.parameters()))
assert all(torch.equal(a.grad, b.grad) and a.grad.abs().max() > 0 for a, b in pairs)
print(f"{len(pairs)} gradients are equal to the last bit")

# %% [markdown]
# Equal to the last bit, not nearly: the same operations in the same order, only in another place. Any `nn.Sequential` is cut
# by the same function. Here is a small net in the manner of EfficientNet: each block widens its channels, looks at its
# neighbourhood one channel at a time, and narrows them again.


# %%
def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    wide = 4 * inputs
    return nn.Sequential(
        nn.Conv2d(inputs, wide, 1),
        nn.SiLU(),
        nn.Conv2d(wide, wide, 3, stride=stride, padding=1, groups=wide),  # one channel at a time
        nn.SiLU(),
        nn.Conv2d(wide, outputs, 1),
    )


torch.manual_seed(0)
end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
efficient = nn.Sequential(block(task.inputs, 8, 2), block(8, 16, 2), block(16, 24, 2), end)
stages = split.split(efficient, 3)
state = x
for stage in stages:
    state = stage(state)
assert torch.equal(state, efficient(x))
print("pieces in each stage:", [len(stage.parts) for stage in stages])

# %% [markdown]
# ## Balance
#
# The slowest stage sets the pace. Which pieces are slow? Parameters are a poor guide: in a UNet most of them are where the
# image is smallest. So measure each piece, forward and backward, and let `find_cuts` choose the cuts for which the slowest
# stage is as fast as it can be.

# %%
costs = split.measure_costs(parts, x)
by_weight = split.find_cuts([sum(p.numel() for p in part.parameters()) for part in parts], 2)
by_time = split.find_cuts(costs, 2)
names = [f"down {n}" for n in range(depth)] + ["bottom"] + [f"up {n}" for n in reversed(range(depth))] + ["head"]
total = sum(p.numel() for p in model.parameters())
share = {
    "parameters": {n: 100 * sum(p.numel() for p in part.parameters()) / total for n, part in zip(names, parts)},
    "measured time": {n: 100 * cost / sum(costs) for n, cost in zip(names, costs)},
}
plots.grouped_bars(share, ylabel="share of the model (%)")
for what, cuts in (("parameters", by_weight), ("time", by_time)):
    slowest = max(sum(costs[: cuts[0]]), sum(costs[cuts[0] :])) / sum(costs)
    print(f"balanced by {what}: cut after piece {cuts[0]}, the slower stage has {slowest:.0%} of the work")

# %% [markdown]
# Where the two bars of a piece differ, parameters mislead. So measure. (Our trainer, which must choose before anything has run,
# and in the same way on all ranks, goes by the parameters: remember that when its stages wait for each other.)
#
# ## Two ranks, one model
#
# Now for real: each rank computes one stage. Rank 0 does its part, sends what crosses, and rank 1 goes on. Then backward the
# other way. *Say both had half of the work. How long would each of them stand still?*
#
# (Our trainer leaves all weights on every rank, so that checkpoints stay simple; gradients, Adam's averages and activations are
# those of the stage alone. Only while a checkpoint is written do the averages of all stages come together. `pipeline_naive` is
# the pipeline that this lesson writes by hand; `pipeline_gpipe` and `pipeline_1f1b` are PyTorch's.)

# %%
team = ranks.start(2)
team["config"] = config

# %%
# %%px
from course_lib.trainer import fit
from course_lib.world import start as join_world

world = join_world(config)
device = world.device.type
counts = [count for count in (1, 2, 4, 8) if config.batch % count == 0]
for count in counts:
    recorded = config.replace(name=f"07_micro_{count}", strategy="pipeline_naive", micro_batches=count)
    fit(recorded.replace(max_steps=8, log_every=8, timeline=8), world)

# %%
from course_lib.timeline import at_once, idle_share, read_timelines

counts, measured = team["counts"][0], team["device"][0] == "cpu"  # else the clock sees launches only
recorded = {count: read_timelines(f"{runs}/07_micro_{count}") for count in counts}
most = max(count for count in counts if count <= 4)
plots.timeline({"1 micro-batch": recorded[1], f"{most} micro-batches": recorded[most]}, steps=1)

# %% [markdown]
# Upper picture: the whole batch as one piece. While one rank computes, the other waits (dark grey, in its lower row). They take
# turns, and two ranks are not faster than one: they only have more memory. (On GPUs these are the times at which the CPU
# *launched* the work, so the picture says little, and the lesson measures nothing in it.)

# %%
from course_lib.parallel.pipeline import bubble

if measured:
    turns = at_once(*recorded[1])
    print(
        f"1 micro-batch: both compute in {turns:.0%} of their computing time; with {most}: {at_once(*recorded[most]):.0%}"
    )
    print(f"if both had half of the work, each would stand still for {bubble(2, 1):.0%} of the time")
    assert turns < 0.05  # they take turns; a little for two clocks that differ

# %% [markdown]
# Lower picture: the same batch in several **micro-batches**. As soon as rank 0 is done with the first, rank 1 can begin, and
# rank 0 takes the second. That is the assembly line, here in the order of *GPipe*: all forward, then all backward. What is
# left of the waiting is where the line fills and where it drains, the **bubble**. On paper, with four stages (light: forward,
# dark: backward, which takes twice as long; time in forwards of one stage):

# %%
from course_lib.parallel.schedules import idle, in_flight, plan

plans = {
    "1 micro-batch": plan("gpipe", 1, [micro_batches] * 4),
    f"{micro_batches} micro-batches": plan("gpipe", micro_batches, [1.0] * 4),
    f"{2 * micro_batches} micro-batches of half the size": plan("gpipe", 2 * micro_batches, [0.5] * 4),
}
plots.schedules(plans)
for name, one in plans.items():
    print(f"{name}: {idle(one):.0%} of the time nothing is done")

# %% [markdown]
# The formula can be read off the picture. With *p* stages and *m* micro-batches every stage works in *m* of *m* + *p* − 1
# slots, so the bubble is
#
# $$\frac{p-1}{m+p-1}.$$
#
# **Predict, then measure.** The ranks have trained with several numbers of micro-batches, and recorded how long they waited and
# how long they computed (measured on CPUs only):

# %%
uneven = [sum(costs[: by_weight[0]]), sum(costs[by_weight[0] :])]  # seconds of the trainer's two stages, from above
lines = {
    "formula": (counts, [100 * bubble(2, count) for count in counts]),
    "plan with our two stages": (counts, [100 * idle(plan("gpipe", count, uneven)) for count in counts]),
}
if measured:
    lines["measured"] = (counts, [100 * idle_share(recorded[count]) for count in counts])
plots.lines(lines, xlabel="micro-batches", ylabel="idle (%)", dashed=list(lines)[:2])
assert all(abs(idle(plan("gpipe", m, [1.0, 1.0])) - bubble(2, m)) < 1e-9 for m in counts)

# %% [markdown]
# *The measured line usually lies above the formula, and more so on the right. What has the formula left out, and what the
# plan?*
#
# <details><summary>Answer</summary>
#
# The formula: that the stages are not equal, and the faster one waits for the slower one in every slot. Both: messages take
# time, and every micro-batch needs some; and small micro-batches compute less efficiently. So there is a best number of
# micro-batches, neither one nor the batch size. (On a machine with fewer free cores than ranks, the ranks also wait for a
# core.)
#
# </details>
#
# ## By hand
#
# The whole step is one screen: receive, compute, send; then the same backward. The gradient of what was received is what the
# rank before is waiting for. A message that is sent without waiting (`isend`) lets the rank go on at once, and one that is
# expected early (`irecv`, in `arrivals`) comes while the rank still computes: without that the ranks would wait for every
# message. What `learns` is what gets a gradient: the image is only passed on to be added at the end, so none comes back for
# it.

# %%
from course_lib.parallel.pipeline import GPipe

show(GPipe.arrivals, GPipe.step)

# %% [markdown]
# Nothing in it is new mathematics: each micro-batch's loss is divided by their number, and gradients add up. That is the
# accumulation of lesson 04, spread over ranks. Therefore it can be proved in the same way. (In double precision: with fewer
# digits a value near zero may fall on the other side of a ReLU, and a gradient comes or goes.)

# %%
# %%px
import torch
from torch.nn import functional as F

from course_lib.data.tasks import make_task
from course_lib.parallel import split
from course_lib.parallel.pipeline import GPipe, torch_schedule
from course_lib.parallel.staged import Strips
from course_lib.trainer import make_model

task = make_task(config, world)
samples = [task.train[n] for n in range(config.batch)]
x, y = (torch.stack(tensors).to(world.device) for tensors in zip(*samples))


def gradients_of(way: str) -> list[torch.Tensor]:
    """Of this rank's stage, after one step; of the strips further below, those of all parameters."""
    model = make_model(config, task)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    model.double().to(world.device)
    images, targets = x.double(), y.double()
    if way == "strips":
        strips = Strips(model, world, config)
        F.mse_loss(strips(images), targets).backward()
        strips.sync()
        return [parameter.grad.cpu() for parameter in model.parameters()]
    stages = split.split(model, 2)
    if way == "by hand":
        GPipe(stages, images, micro_batches=config.micro_batches).step(images, targets, F.mse_loss)
    else:
        schedule = torch_schedule(way, stages, images, micro_batches=config.micro_batches, measure=F.mse_loss)
        schedule.step(*([images] if world.rank == 0 else []), **({"target": targets} if world.rank == 1 else {}))
    return [parameter.grad.cpu() for parameter in stages[world.rank].parameters()]


gradients = {way: gradients_of(way) for way in ("by hand", "gpipe", "1f1b", "strips")}

# %%
accumulated = fresh_model().double()
for some, targets in zip(x.double().chunk(micro_batches), y.double().chunk(micro_batches)):
    (F.mse_loss(accumulated(some), targets) / micro_batches).backward()
whole = [p.grad for stage in split.split(accumulated, 2) for p in stage.parameters()]
by_rank = team["gradients"]


def apart(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """How far, in parts of the longest gradient."""
    longest = max(gradient.abs().max().item() for gradient in theirs)
    return max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True)) / longest


for way in ("by hand", "gpipe", "1f1b"):
    mine = by_rank[0][way] + by_rank[1][way]  # the first stage's, then the second's
    assert apart(mine, whole) < 1e-10
    print(
        f"{way:8} {len(mine)} gradients over two ranks; from plain accumulation: {apart(mine, whole):.1g} of the longest"
    )

# %% [markdown]
# ## PyTorch's own, and another order
#
# The other two lines are `torch.distributed.pipelining` over the very same stages. It takes a stage, says what comes in and
# what goes out, and a schedule does the rest:

# %%
from course_lib.parallel.pipeline import torch_schedule

show(torch_schedule)

# %% [markdown]
# **1F1B** (one forward, one backward) is a second schedule. A stage begins with a micro-batch's backward as soon as it can,
# instead of waiting until all have gone forward:

# %%
both = {name: plan(name.lower(), 2 * micro_batches, [1.0] * 4) for name in ("GPipe", "1F1B")}
plots.schedules(both)
for name, one in both.items():
    print(
        f"{name}: idle {idle(one):.0%}; micro-batches kept by each stage at the same time: {[in_flight(s) for s in one]}"
    )
assert abs(idle(both["GPipe"]) - idle(both["1F1B"])) < 1e-9
assert [in_flight(stage) for stage in both["1F1B"]] == [4, 3, 2, 1]

# %% [markdown]
# *The bubble is the same. What is better?*
#
# <details><summary>Answer</summary>
#
# The memory. Between its forward and its backward a micro-batch's activations must be kept. GPipe keeps those of all
# micro-batches, on every stage; 1F1B at most as many as there are stages, however many micro-batches there are. So one can take
# more micro-batches, and *that* makes the bubble small.
#
# </details>
#
# ## The other way to save memory
#
# Activations fill the memory, lesson 01 has shown, and there was a remedy without any other rank: keep only what enters a block
# and compute the rest again (`--checkpointing`). It goes together with all of the above. We measure what autograd keeps of one
# micro-batch, and compute how much that makes:

# %%
from course_lib.unet import measure_activations

lean = make_model(config.replace(checkpointing=True), task).train()
stage = split.split(model, 2)[0].train()
small = x[: batch // micro_batches]
few = in_flight(plan("1f1b", micro_batches, [1.0, 1.0])[0])  # micro-batches that the first stage keeps
kept = {
    "one device": measure_activations(model.train(), x),
    "one device, recomputing": measure_activations(lean, x),
    "first of 2 stages, GPipe": micro_batches * measure_activations(stage, small),
    "first of 2 stages, 1F1B": few * measure_activations(stage, small),
    "first of 2, 1F1B, recomputing": few * measure_activations(split.split(lean, 2)[0].train(), small),
}
plots.bars({name: size / 1e6 for name, size in kept.items()}, xlabel="activations kept (MB)")
assert kept["first of 2, 1F1B, recomputing"] < kept["first of 2 stages, 1F1B"]
assert (kept["first of 2 stages, 1F1B"] < kept["first of 2 stages, GPipe"]) == (micro_batches > 2)  # it keeps two
assert kept["first of 2 stages, GPipe"] < kept["one device"]

# %% [markdown]
# The price of recomputing is a third more work; the price of the pipeline is the bubble and the messages. Large models pay
# both: while a block is recomputed its activations are there again, those of the whole batch on one device, those of one
# micro-batch in a pipeline.
#
# ## Both at once: 2 × 2
#
# Pipelines do not replace data parallel training, they multiply with it. Four ranks: two copies of the model, each in two
# stages. The copies see different samples; within a copy the ranks see the same. And each stage averages its gradients with the
# same stage of the other copy, as DDP does:
#
# | | stage 0 | stage 1 |
# |---|---|---|
# | **copy 0**, first half of the samples | rank 0 | rank 1 |
# | **copy 1**, second half | rank 2 | rank 3 |
#
# Messages along a row are activations and their gradients, messages down a column are the weights' gradients. Such a table of
# ranks is called a *mesh*; lesson 08 starts from there. In the trainer it is one word, `--strategy hybrid`, with `--devices`
# stages to a copy.

# %%
hybrid = config.replace(name="07_hybrid", strategy="hybrid", launcher="env", batch=batch // 2)
print("torchrun --standalone --nproc-per-node 4 -m course_lib.train", *hybrid.arguments(), "\n")
run = ranks.torchrun(4, hybrid)

# %% [markdown]
# ## Another cut: along the image
#
# A stage has all of the image and some of the layers. One can also give each rank all of the layers and some of the image: a
# strip of rows. (Weather models have been parallel in this way for decades; they call it domain decomposition.) Every rank then
# computes the same thing at the same time, and there is no bubble at all. *What goes wrong at the seams?*

# %%
# %%px
from course_lib.parallel.spatial import spread, strip

torch.manual_seed(1)
layer = torch.nn.Conv2d(task.inputs, 1, 3, padding=1, padding_mode=config.padding, bias=False).to(world.device)
mine = strip(x[:1])  # this rank's rows
with torch.no_grad():
    without = layer(mine).cpu()
    with_halo = spread(layer)(mine).cpu()

# %%
torch.manual_seed(1)
layer = nn.Conv2d(task.inputs, 1, 3, padding=1, padding_mode=config.padding, bias=False)
with torch.no_grad():
    right = layer(x[:1])
errors = {
    name: (torch.cat(team[variable], dim=-2) - right).abs()[0, 0]
    for name, variable in (("strips alone", "without"), ("strips with halos", "with_halo"))
}
plots.fields({f"error of {name}": error.numpy() for name, error in errors.items()})
assert errors["strips alone"].max() > 0.01 and errors["strips with halos"].max() < 1e-5

# %% [markdown]
# A 3 × 3 convolution looks one row beyond its strip. Alone, a strip wraps around onto itself, as our whole planet rightly
# does. Its first and last rows come out wrong, and after a few layers that would spread over the image. So before each
# convolution neighbours exchange their edge rows, the **halo**. In backward the gradients of those rows travel back to whom
# they belong:

# %%
from course_lib.parallel import spatial

show(spatial.Halo, spatial.StripConv2d)

# %% [markdown]
# A normalisation, too, looks at the whole image: its mean and variance are sums, and sums over strips can be added up. Pooling
# and growing look at one place only, as long as a strip's rows can be halved evenly. The proof was above already, under
# `strips`:

# %%
everything = [p.grad for p in accumulated.parameters()]
assert apart(by_rank[0]["strips"], everything) < 1e-10
print(f"gradients of strips: {apart(by_rank[0]['strips'], everything):.1g} of the longest from one process")

# %% [markdown]
# *How much is sent? Compare with the cut between two stages.* Every 3 × 3 convolution sends one row of what enters it, up and
# down; every normalisation adds up two numbers for each group. A pipeline sends what crosses its cut, once. First the formula:

# %%
breadth = x.shape[-1]
blocks = [width * 2**level for level in range(depth + 1)]
halo = 0  # values for one sample that one rank sends to one neighbour in forward
for level, channels in enumerate(blocks):
    inputs = blocks[level - 1] if level else task.inputs
    row = breadth >> level
    halo += (inputs + channels) * row  # down, or at the bottom
    halo += (2 * channels + channels) * row if level < depth else 0  # and up
layers = sum(isinstance(module, nn.GroupNorm) for module in model.modules())  # each behind a 3 × 3 convolution

# %% [markdown]
# Then what two ranks really send in a forward pass. `Traffic`, the counter of lesson 06, sees single messages too. Our planet is
# round: with two strips, the other rank is the neighbour above and below.

# %%
# %%px
from course_lib import simulate

strips = Strips(make_model(config, task).to(world.device), world, config)
with simulate.Traffic() as traffic, torch.no_grad():
    strips(x)
calls = traffic.calls
sent = sum(message.bytes for message in traffic.messages if message.name == "send")

# %%
assert team["sent"] == [2 * batch * 4 * halo] * 2  # two neighbours, four bytes a value
assert team["calls"] == [{"send": 2 * layers, "all-reduce": 2 * layers}] * 2
crossing_it = len(crossing[by_weight[0]])
rows = [
    (
        "a pipeline's cut",
        f"{after[by_weight[0] - 1] / batch / 1e3:.0f}",
        f"{crossing_it} a micro-batch",
        "in the bubble",
    ),
    ("halos, to each neighbour", f"{4 * halo / 1e3:.0f}", f"{layers} and {2 * layers} all-reduces", "at every layer"),
]
Table(("", "kB a sample in forward", "messages", "ranks wait"), rows)

# %% [markdown]
# It is the circumference that travels, not the area: the larger the image, the better for strips. That is why high-resolution
# weather and microscopy nets are cut this way. But there are many small messages, each is waited for, and strips must add up
# all weights' gradients besides, as DDP does: on our small images that costs more than it saves, as the last column below
# shows. (Language models are cut along the text in the same spirit, *context parallel*; but attention looks at everything, so
# more than a halo has to travel.)
#
# ## All the same
#
# Every strategy of this lesson, in the trainer, with the same samples and the same seed; one process beside them. The speeds are
# those of a few steps, the first ones included.

# %%
# %%px
names = ("pipeline_naive", "pipeline_gpipe", "pipeline_1f1b", "spatial")
losses = {name: fit(config.replace(name=f"07_{name}", strategy=name), world).metrics["loss"] for name in names}

# %%
from course_lib.metrics import read_log
from course_lib.results import samples_per_s

alone = fit(config.replace(name="07_single", strategy="single", launcher="env")).metrics["loss"]
devices = fit(config.replace(name="07_split", strategy="split", launcher="env")).metrics["loss"]
ends = [event["loss"] for event in read_log(f"{runs}/07_hybrid") if event["event"] == "eval"]
losses = {"single": alone, "split": devices} | team["losses"][0] | {"hybrid": ends[-1]}
rows = []
for name, loss in losses.items():
    assert abs(loss - alone) < 1e-3 * alone, name
    rows.append((name, f"{loss:.6f}", f"{samples_per_s(read_log(f'{runs}/07_{name}')):.0f}"))
Table(("strategy", "validation loss", "samples/s"), rows)

# %% [markdown]
# One word on the command line, and the same loss to a thousandth. A loss forgives much, though. So look at the checkpoints: how
# far are the weights from those of one process, compared with the way that the training went? And Adam's averages of the
# gradients? (If all gradients were twice as long, Adam would take the very same way; only its averages would tell.)

# %%
from pathlib import Path

from course_lib import checkpoint

begun = make_model(config, task)
single = Path(runs, "07_single", "checkpoint.pt")
for name in losses:
    weights, gradients = checkpoint.compare(Path(runs, f"07_{name}", "checkpoint.pt"), single, begun)
    print(f"{name:15} weights {weights:.1g} of the way apart, averages of gradients {gradients:.1g} of their length")
    assert weights < 0.1 and gradients < 0.01, name

# %% [markdown]
# Some are equal to rounding, others a little further apart. Single precision does that: a value falls to the other side of a
# ReLU, a gradient comes or goes, and Adam makes whole steps even of the smallest gradients. The gradients in double precision,
# above, are the sharper proof; for the 2 × 2 mesh that one is among the tests of this course.
#
# Their checkpoints are alike, too: what strips have begun on two ranks, one process goes on with.

# %%
onward = config.replace(name="07_spatial", strategy="single", launcher="env", resume=True, max_steps=max_steps + 5)
fit(onward)
last = {event["event"]: event["step"] for event in read_log(f"{runs}/07_spatial")}
print(f"went on at step {last['start']}, came to step {last['end']}")
assert (last["start"], last["end"]) == (max_steps, max_steps + 5)

# %%
team.run("from course_lib.world import stop; stop(world)")
team.stop()

# %% [markdown]
# ## On the cluster
#
# Stages on two nodes, or both on one with two GPUs; strips likewise:
#
#     sbatch slurm/07_model_parallel.sbatch --strategy pipeline_1f1b --micro-batches 8
#     sbatch --nodes=1 --ntasks-per-node=4 slurm/07_model_parallel.sbatch --strategy spatial
#
# Put what talks most onto one node, and count before you decide. A copy of the mesh above has half of the batch; what crosses its
# cut crosses it forward, and its gradients come back. Down the columns the gradients of all weights are averaged:

# %%
from course_lib import simulate

learns = [one.learns for one in crossing[by_weight[0]]]
sizes = [4 * torch.Size(one.shape).numel() / 2 for one in crossing[by_weight[0]]]
along = sum(sizes) + sum(size for size, one in zip(sizes, learns) if one)
down = simulate.ddp_bytes(model, 2)
more = "row" if along > down else "column"
print(
    f"a copy sends {along / 1e6:.2f} MB a step along its row, {down / 1e6:.2f} MB down the columns: keep a {more} on one node"
)

# %% [markdown]
# For a small UNet with its skips that is the row. In a large language model the cut is thin and the gradients are thick, and
# stages go across nodes.
#
# ## Questions
#
# *A model fits into one GPU, with its batch. Should you cut it to be faster?*
#
# <details><summary>Answer</summary>
#
# No. DDP sends gradients once a step and hides most of that; a pipeline sends activations all the time and idles in its bubble.
# Cut only what does not fit. (Strips are the exception where the batch can't grow any more: they divide the time of a *single*
# sample.)
#
# </details>
#
# *Why does the trainer refuse BatchNorm in a pipeline?*
#
# <details><summary>Answer</summary>
#
# It would take its mean over a micro-batch instead of the batch, so the result would depend on `--micro-batches`. GroupNorm
# looks at one sample only.
#
# </details>
#
# *Your images have 100 rows and the UNet halves them twice. On how many ranks can you run strips?*
#
# <details><summary>Answer</summary>
#
# Each strip must be halved evenly twice, so 100 rows must be a multiple of 4 · ranks: on 1, 5 or 25. The trainer says so in one
# line. Often it is easier to cut the images to a better size.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    pieces=len(parts),
    crosses_the_cut_bytes=after[by_weight[0] - 1],
    halo_bytes_a_sample=4 * halo,
    kept_one_device=kept["one device"],
    kept_gpipe=kept["first of 2 stages, GPipe"],
    kept_1f1b=kept["first of 2 stages, 1F1B"],
    loss_single=alone,
    loss_1f1b=losses["pipeline_1f1b"],
    loss_hybrid=losses["hybrid"],
    loss_spatial=losses["spatial"],
    sent_along_the_row=along,
    sent_down_the_columns=down,
)

# %% [markdown]
# ## What you have seen
#
# - A model can be cut from outside. What crosses is the activation and every skip that is still needed.
# - Two stages without micro-batches take turns. With *m* of them (*p* − 1)/(*m* + *p* − 1) of the time is lost, and more.
# - GPipe and 1F1B have the same bubble; 1F1B keeps fewer activations. Recomputing keeps fewer still.
# - Strips have no bubble and send the seams only; every layer that looks beyond its place has to be taught to ask.
# - Every one of them equals the training of one process, and so does a 2 × 2 mesh of pipelines and DDP.
#
# **Exercise:** [ex07](../exercises/ex07_model_parallel/ex07_model_parallel.ipynb), stages and strips.
#
# **Next:** [08 · Sharding](08_sharding.ipynb): keep the model in one piece, but store each weight only once.
