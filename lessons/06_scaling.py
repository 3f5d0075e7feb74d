# %% [markdown]
# # 06 · Scaling: when to stop adding ranks
#
# Twice the ranks, half the time? In this lesson you say beforehand how fast a training will be on more ranks, then measure
# it, then find out why the two differ. The model that you build on the way predicts 1,024 ranks from a few seconds of
# measurements, and tells where more of them only heat the room. And since nobody wants samples per second for their own
# sake: does the *result* come sooner?
#
# After this lesson
#
# 1. you can measure strong and weak scaling so that somebody else would believe it;
# 2. you have a model of your own machine's training step, and know how wrong it is;
# 3. you know what DDP, FSDP and HSDP send on 1,024 ranks, to the byte;
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
watts = 400  # that a node draws: look yours up

# %% [markdown]
# ## The task: find the nuclei
#
# A microscope's image, and the question for every pixel: does it belong to the nucleus of a cell? The images are real:
# HeLa cells of the [Cell Tracking Challenge](http://celltrackingchallenge.net), blurred and with few photons, as if the
# microscope were cheap. (Where they could not be fetched, generated ones take their place.)

# %%
import json
from pathlib import Path

import torch

from course_lib import plots, ranks, results, scaling, sweep
from course_lib.config import Config
from course_lib.data.tasks import make_task
from course_lib.lesson import numbers, show

settings = f"width{width}_batch{batch}_epochs{epochs}"  # change one, and the runs get folders of their own
config = Config(task="segment", data=data, runs=runs, strategy="ddp", padding="zeros", width=width, batch=batch)
config = config.replace(name=f"06_weak_{settings}", epochs=epochs, lr=2e-3, scale_lr=True, warmup=10, log_every=5)
task = make_task(config)
print(json.loads((Path(data) / "about.json").read_text())["source"])
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
# one. 1 is perfect, and "nothing anywhere" scores 0. Here is how it is computed; look at what `sums` returns:

# %%
show(type(task.score))

# %% [markdown]
# Sums, never quotients: ranks add up their intersections and unions and divide *once* (lesson 04). The mean of each tile's
# own IoU is another number, in which a tile with one nucleus counts as much as one with ten:

# %%
common, union = torch.stack([task.score.sums(x[None] - level, y[None]) for x, y in task.valid]).T[1:3]
of_tiles = (common / union)[union > 0].mean()
print(f"all pixels {float(common.sum() / union.sum()):.3f}, mean of tiles {float(of_tiles):.3f}")
assert abs(float(common.sum() / union.sum()) - threshold) < 1e-9

# %% [markdown]
# ## Predict first
#
# Before you measure anything: **write down** how many samples per second you expect on 2 and on 4 ranks, if one rank does
# 100. This machine has so many cores:

# %%
from course_lib.probe import cores

print(
    cores(), "cores;", "more ranks than that must share them" if cores() < max(ranks_to_try) else "enough for all ranks"
)

# %% [markdown]
# A guess is good, a model is better. Two things cost time in a step of DDP: computing, and sending gradients. Both can be
# measured apart from each other in half a minute. `course_lib.probe` does it on real ranks: all-reduces of many sizes, and
# training steps without any communication.

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
# messages, one after the other, each of 1/*n* of the data; through a tree it is fewer messages, but each carries all:

# %%
show(scaling.Network)

# %% [markdown]
# gloo uses a ring. The fit takes all sizes and all numbers of ranks at once, two numbers for everything:

# %%
import statistics

model = scaling.fit_model(found)
measured, modelled = {}, {}
for n in sorted({m["ranks"] for m in found["messages"]}):
    mine = [m for m in found["messages"] if m["ranks"] == n]
    sizes = [m["bytes"] for m in mine]
    measured[n] = sizes, [statistics.median(m["seconds"]) for m in mine]
    modelled[n] = sizes, [model.network.ring(n, size) * scaling.crowd(n, model.cores) for size in sizes]
plots.messages(measured, modelled)
print(f"α = {model.network.alpha * 1e6:.0f} µs a message, 1/β = {1e-9 / model.network.beta:.2f} GB/s")

# %% [markdown]
# Flat on the left: there α rules, and a thousand bytes cost as much as one. Rising on the right: there β rules. Real
# points do not lie on the lines: the model knows nothing of caches, or of a busy machine. Where ranks outnumber cores a
# message also waits until its receiver is allowed to run, so its cost is multiplied by ranks per core (`crowd`).
#
# ### What a step costs
#
# From steps of several batch sizes on one rank: a fixed part (Python, the optimizer) and a part for each sample. From steps
# on all cores at once: how much they slow each other down.

# %%
print(
    f"fixed {1e3 * model.fixed:.1f} ms, each sample {1e3 * model.per_sample:.2f} ms, all cores busy: × {model.slowdown:.2f}"
)
print(f"gradients: {model.buckets[0] / 1e3:.0f} kB in one bucket")

# %% [markdown]
# ### The sum, and what hides
#
# Gradients travel while backward still computes, bucket by bucket (lesson 04), so only what is left over at the end counts.
# The last bucket always does. And on a machine without a spare core nothing hides: moving bytes is work too.

# %%
show(scaling.Model.exposed)

# %% [markdown]
# That is the whole model. **Weak scaling** keeps the batch of each rank: more ranks do more work. **Strong scaling** keeps
# the global batch: more ranks share the same work. *Which of the two is harder, and why?*
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
    print(f"{name:>6}: " + ", ".join(f"{n} ranks × {value:.2f}" for n, value in line.items()))

# %% [markdown]
# ## Then measure
#
# `sweep.run` trains on every number of ranks with every seed, and each run writes its own log. Interrupt it if you like
# (the stop button) and run the cell again: what is done stays done, and what was cut off goes on from its checkpoint.

# %%
weak_rows = sweep.run(config, ranks_to_try, seeds, slurm=on_slurm)
results.show(weak_rows)

# %% [markdown]
# What has it learned? The first run's net, on the part of a frame that you have seen above:

# %%
from course_lib import checkpoint
from course_lib.trainer import make_model

learned = make_model(config, task).eval()
learned.load_state_dict(checkpoint.load(results.collect(config.run)[0]["run"] / "checkpoint.pt")["model"])
with torch.no_grad():
    panels["UNet"] = learned(torch.from_numpy(frame)[None, None])[0, 0].numpy() > 0
plots.fields({name: panels[name] for name in ("image", "reference", "blurred, then threshold", "UNet")})

# %% [markdown]
# Several seeds, because one run proves nothing: the ± is their standard deviation. Samples per second are the median over
# the log's lines, without the first, in which everything is still warming up. Evaluation and start-up are not in it.
#
# The strong one needs no result, only its speed. We let DDP race against another way to average the same gradients: Horovod
# where it is installed (lesson 10), else the naive one of lesson 04, one all-reduce for each parameter. **Predict** the loser.

# %%
from importlib.util import find_spec

from course_lib.parallel import STRATEGIES

rival = "horovod" if "horovod" in STRATEGIES and find_spec("horovod") else "ddp_naive"
strong = config.replace(name=f"06_strong_{settings}", global_batch=global_batch, max_steps=strong_steps, scale_lr=False)
strong_rows = []
for strategy in ("ddp", rival):
    strong_rows += sweep.run(strong.replace(strategy=strategy), ranks_to_try, slurm=on_slurm)
results.show(strong_rows)

# %% [markdown]
# ## Then compare

# %%
plots.speed_up(weak_rows, {"weak, predicted": weak_model})
plots.speed_up(strong_rows, {"strong, predicted": strong_model})

# %% [markdown]
# Look at where measurement and prediction part. Beyond the cores the efficiency must fall: two ranks on one core each have
# half of it, and no trick of communication changes that. On a cluster every rank has a GPU or a core of its own, and the
# bend comes later.
#
# How wrong is the model, in seconds of a step? The probe has also timed real DDP steps, which the fit has not seen:

# %%
from course_lib.cockpit import Table

rows, errors = [], []
for one in found["together"]:
    if one["ranks"] > 1:
        real, said = statistics.median(one["seconds"]), model.step(one["ranks"], one["batch"])
        errors.append(said / real - 1)
        crowded = f"{one['ranks']} ranks on {model.cores} cores" if one["ranks"] > model.cores > 0 else ""
        shown = f"{1e3 * real:.1f}", f"{1e3 * said:.1f}", f"{errors[-1]:+.0%}"
        rows.append((one["ranks"], one["batch"], *shown, crowded))
print(f"mean error {statistics.fmean(map(abs, errors)):.0%}, largest {max(map(abs, errors)):.0%}")
Table(("ranks", "batch", "measured (ms)", "predicted (ms)", "error", "shared"), rows)

# %% [markdown]
# A model from two fits and a handful of lines that is right within some ten per cent is a good model. Where it is far off,
# something happens that it does not know about: that is worth more than an agreement.
#
# ## Two old laws
#
# Let communication cost nothing. What is left of the model is a part that can't be divided and one that can, and it says
# what Amdahl wrote in 1967 (strong scaling) and Gustafson in 1988 (weak scaling, where the *work* grows):

# %%
show(scaling.amdahl, scaling.gustafson)

# %%
free = model.replace(network=scaling.Network(0.0, 0.0), cores=0, slowdown=1.0)
serial = free.fixed / free.step(1, batch)  # the share of one rank's step that can't be divided
for n in (2, 16, 1024):
    assert abs(free.strong(n, batch) - scaling.amdahl(serial, n)) < 1e-9 * n
    assert abs(free.step(1, n * batch) / free.step(n, batch) - scaling.gustafson(serial, n)) < 1e-9 * n
print(f"{serial:.0%} can't be divided: at most × {1 / serial if serial else float('inf'):.1f}, by Amdahl")

# %% [markdown]
# ## 1,024 ranks
#
# Nobody here has them; the model does not mind. Each rank gets a core (or a GPU) of its own now, and the network is the one
# that you measured. **Predict:** ring or tree, which one wins for this small net? The bands are from measurements drawn
# again, with repetition, from yours: they say how sure the *fit* is, not how right the model is.

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
    print(f"{algorithm}: at least half of the ranks is not wasted up to {scaling.where_to_stop(line)} ranks")
plots.outlook(lines, bands, ylabel="efficiency of weak scaling (%)")

# %% [markdown]
# A ring passes 2(*n*−1) messages on, one after the other, and for a small net each of them costs α and nothing else: its
# time grows with the ranks. A tree needs 2·log₂*n*. For large messages the ring sends no byte too many and is as good as
# anything. NCCL knows both, and chooses by size.
#
# What would a real network do? Put in numbers of your own; these are of the order of an InfiniBand card, **assumed, not
# measured here**:

# %%
fast = scaling.Network(alpha=5e-6, beta=1 / 20e9)
there = model.replace(network=fast, **alone)
outlooks = {}
for algorithm in ("ring", "tree"):
    line = [100 * there.replace(algorithm=algorithm).weak(n, batch) / n for n in ahead]
    outlooks[f"{algorithm}, {batch} samples a rank"] = ahead, line
outlooks["ring, strong scaling"] = ahead, [100 * there.strong(n, 1024) / n for n in ahead]
plots.outlook(outlooks, ylabel="efficiency (%)")

# %% [markdown]
# Strong scaling (1,024 samples a step, divided) runs out of work: with one sample a rank the fixed part of a step is most
# of it.
#
# ## What is really sent
#
# The model believes that DDP sends its gradients once round the ring. Does it? torch has a *fake* process group for its own
# tests: it accepts every collective and sends nothing. So one process can be rank 0 of 1,024, run a real step and note what
# it is asked to send. And we can let it do what lesson 08 is about: **FSDP** keeps only 1/*n* of the weights on each rank
# and gathers a block's weights when they are needed; **HSDP** does that within groups of 8 and copies between groups.

# %%
from course_lib import simulate

x, _ = next(iter(valid_loader))
make = lambda: make_model(config, task)  # noqa: E731
traffic = {name: simulate.count(name, make, x[:1], ranks=1024) for name in ("ddp", "fsdp", "hsdp")}
for name, one in traffic.items():
    print(f"{name}: {dict(one.calls)}, {one.sent / 1e6:.2f} MB sent by each rank")

# %% [markdown]
# Closed formulas say the same, to the byte. *S* is the size of all weights:
#
# | | a rank sends in a step |
# |---|---|
# | DDP | 2(*n*−1)/*n* · *S*: gradients to where they are added up, and back |
# | FSDP | 3(*n*−1)/*n* · *S*: weights gathered for forward and for backward, gradients scattered |
# | HSDP | FSDP within the group, and an all-reduce of its own piece between the groups |

# %%
unet = make()
formulas = {"ddp": simulate.ddp_bytes, "fsdp": simulate.fsdp_bytes, "hsdp": simulate.hsdp_bytes}
for name, one in traffic.items():
    assert one.sent == formulas[name](unet, 1024)
many = [8 * 2**power for power in range(1, 8)]
sent = {name: (many, [formula(unet, n) / 1e6 for n in many]) for name, formula in formulas.items()}
plots.outlook(sent, ylabel="MB sent by each rank in a step", logarithmic=True)

# %% [markdown]
# *DDP and HSDP stay flat, as they should. FSDP explodes, where the formula says 1.5 times DDP. Why?*
#
# <details><summary>Answer</summary>
#
# FSDP cuts each weight along its first dimension into *n* pieces. Ours have 8 to 32 rows; on 1,024 ranks each is filled up
# with zeros to 1,024 rows, and the zeros travel too. A net with thousands of channels would not notice. Sharding over a few
# ranks and copying between groups, HSDP, is one cure; not sharding a net that fits anyway is the other.
#
# </details>
#
# ## Faster, but not sooner?
#
# So far we have counted samples. Does the *result* come sooner? Every rank has its own batch, so with the ranks the global
# batch grows, and an epoch has fewer steps. The learning rate is multiplied by the number of ranks and warmed up, as lesson
# 04 advised.

# %%
from course_lib.metrics import read_log

every = results.collect(config.run)
table = []
for row in weak_rows:
    logs = [read_log(one["run"], repeats=True) for one in every if one["ranks"] == row["ranks"]]
    needed = [results.seconds_to(log, lambda event: event["iou"] >= target) for log in logs]
    reached = [seconds for seconds in needed if seconds is not None]
    soonest = f"{statistics.fmean(reached):.1f}" if reached else "–"
    judged = f"{row['iou']:.3f} ± {row['iou_spread']:.3f}"
    table.append((row["ranks"], f"{row['speed_up']:.2f}", judged, f"{len(reached)} of {len(logs)}", soonest))
Table(("ranks", "speed-up", f"IoU after {epochs} epochs", f"reached {target}", "seconds until then"), table)

# %%
x_ranks = [row["ranks"] for row in weak_rows]
iou = [row["iou"] for row in weak_rows], [row["iou_spread"] for row in weak_rows]
speed = [row["samples_per_s"] for row in weak_rows], [row["samples_per_s_spread"] for row in weak_rows]
plots.against(
    {"samples/s": {"": (x_ranks, *speed)}, f"IoU after {epochs} epochs": {"": (x_ranks, *iou)}}, xlabel="ranks"
)

# %% [markdown]
# If the IoU falls with the ranks although every sample was seen as often: that is no error of the distribution. Lesson 04
# proved that *n* ranks do exactly what one process does with *n* times the batch. It is the price of fewer, larger steps.
# Since the two are equal we can study it here, without any ranks, with the batch that many ranks would have:

# %%
from course_lib.trainer import fit

large = config.replace(strategy="single", scale_lr=False, batch=times * batch, epochs=epochs, log_every=1000)
steps = epochs * (len(task.train) // large.batch)
variants = {"same rate": (1, 0), "rate scaled": (times, 0), "rate scaled, warm-up": (times, max(2, steps // 10))}
tried = {f"batch {batch}": next(one["iou"] for one in every if one["ranks"] == 1)}
for name, (factor, warmup) in variants.items():
    fitted = fit(large.replace(name=f"06_large_{factor}_{warmup}", lr=factor * config.lr, warmup=warmup))
    tried[f"batch {large.batch}, {name}"] = fitted.metrics["iou"]

# %%
plots.bars(tried, xlabel=f"IoU after {epochs} epochs")
assert tried[f"batch {large.batch}, rate scaled, warm-up"] > tried[f"batch {large.batch}, same rate"]

# %% [markdown]
# Scaling the rate helps, and with a rate this large warm-up helps again; but so few steps are too few. How far could they go
# at best? A batch's gradient is the true one plus noise, and a larger batch only removes noise. Where noise and gradient are
# equally long lies the **gradient noise scale**; with batches far above it, ranks are wasted.

# %%
from course_lib.noise import gradient, noise_scale

torch.manual_seed(0)
batches = [next(iter(DataLoader(task.train, batch, sampler=torch.randperm(len(task.train))))) for _ in range(40)]
scales = {}
for name, net in (("before training", make()), ("after it", fitted.model)):
    scales[name] = noise_scale([gradient(net, one, task.score.loss) for one in batches], batch)
    print(f"{name}: a batch of {scales[name]:.1f} samples has as much noise as gradient")

# %% [markdown]
# Compare that with the batch of one rank, and with the large one. Early in training all samples say the same ("nuclei are
# bright"), and a few are enough; later they disagree, and larger batches begin to pay. Large tasks have noise scales of
# thousands to millions, which is why they can use as many GPUs.

# %%
show(noise_scale)

# %% [markdown]
# ## A published study, and its puzzle
#
# This lesson's task is modelled on a study by others: a UNet on microscope images, 1 to 14 GPUs, native DDP against Horovod.
# These are **its authors' numbers on its authors' hardware**, not ours:

# %%
study = json.loads(Path("../reference/unet_scaling_v100.json").read_text())
print(f"{study['what']}\n{study['source']}, {study['hardware']}\n{study['settings']}")
gpus = study["gpus"]
ups = {name: (gpus, [study[name]["seconds"][0] / s for s in study[name]["seconds"]]) for name in ("ddp", "horovod")}
ious = {name: (gpus, study[name]["iou"]) for name in ("ddp", "horovod")}
plots.against({"speed-up": ups | {"ideal": (gpus, gpus)}, "IoU": ious}, xlabel="GPUs (published)")
for name, (_, values) in ups.items():
    print(f"{name}: × {values[-1]:.2f} on {gpus[-1]} GPUs, efficiency {values[-1] / gpus[-1]:.0%}")

# %% [markdown]
# On the left Horovod loses nearly half of its speed at the step from one GPU to two and never gets it back; lesson 10 runs it
# beside DDP. On the right is the puzzle. **The IoU falls as GPUs are added, which we understand by now. Then, at 14, it
# jumps above that of a single GPU.** For both libraries. *What happened? Think before you go on: which part of a program
# depends on the number of GPUs, and has nothing to do with training?*
#
# Their test loader drops the last, incomplete batch: of every rank. Let us do the same to *one* trained net of ours. Nothing
# is trained anew, only judged as *n* ranks would judge it:

# %%
from torch.utils.data import DistributedSampler

judged = fitted.model.eval()
with torch.no_grad():
    each = torch.stack([task.score.sums(judged(x[None]), y[None]) for x, y in task.valid])


def as_published(n: int, size: int) -> tuple[int, float]:
    """Tiles that are left on n ranks, and the mean of the ranks' IoU, when each drops its incomplete batch."""
    shares = [list(DistributedSampler(range(len(each)), n, rank, shuffle=False)) for rank in range(n)]
    kept = [share[: len(share) // size * size] for share in shares]
    of_ranks = [float(common / union) for common, union in (each[share].sum(dim=0)[1:3] for share in kept if share)]
    return sum(map(len, kept)), statistics.fmean(of_ranks) if of_ranks else float("nan")


# %%
size = min(16, len(each) // 10)
x_ranks = list(range(1, 15))
left, moving = zip(*(as_published(n, size) for n in x_ranks))
steady = [task.score.result(each.sum(dim=0).tolist())["iou"]] * len(x_ranks)
series = {"last batches dropped": (x_ranks, moving), "(sum, count) of all": (x_ranks, steady)}
plots.against({"IoU of the same net": series, "tiles that count": {"": (x_ranks, left)}}, xlabel="ranks")
shown = [value for value in moving if value == value]
print(f"the same weights score from {min(shown):.3f} to {max(shown):.3f}")
print(f"{x_ranks[-1]} ranks judge {left[-1]} of {len(each)} tiles")
assert max(shown) - min(shown) > 0.001 and steady[0] == fitted.metrics["iou"]

# %% [markdown]
# **The metric moved, not the model.** Which tiles are left depends on the number of ranks (and where the sampler fills up
# the shares, some count twice). Some tiles are easy and some are hard, and when hardly any are left, anything may come out.
# The cure costs nothing: let every rank judge every sample of its uneven share, add up sums and counts, divide once. On our
# evaluation the number of ranks has no influence:

# %%
from course_lib.data.batches import shard
from course_lib.world import World

for n in (1, 2, 7, 14):
    parts = [each[sum(shard(len(each), size, World(rank=rank, world_size=n)), [])].sum(dim=0) for rank in range(n)]
    assert abs(task.score.result(sum(parts).tolist())["iou"] - steady[0]) < 1e-12

# %% [markdown]
# ## What it costs
#
# A project pays for **node-hours**, and somebody pays for electricity. Both are simple products, and both belong beside every
# result. (The power is the `watts` of the parameters cell, an assumption; Slurm's accounting may know better:
# `sacct -o ConsumedEnergy`.) For this machine, which is one node however many ranks it has:

# %%
bills = []
for row in weak_rows:
    bill = scaling.cost(row["seconds"], nodes=1, watts=watts)
    hours, energy = f"{bill['node_hours']:.5f}", f"{1e3 * bill['kilowatt_hours']:.2f}"
    bills.append((row["ranks"], f"{row['seconds']:.0f}", hours, energy, f"{row['iou']:.3f}"))
Table(("ranks", "seconds", "node-hours", "Wh", "IoU"), bills)

# %% [markdown]
# On a cluster nodes grow with the ranks, so a result costs 1/efficiency times as much as on one rank: at an efficiency of
# 50 % it is there sooner and costs double. Below that, a second experiment beside the first is the better use of the nodes.
#
# **Where to stop adding GPUs?** Where one of these comes first: the efficiency falls below what you are willing to pay for;
# the batch is above the noise scale; or you would have to wait longer in the queue than you save.
#
# ## On the cluster
#
# The same sweep as an array of Slurm jobs, and a last job that draws the figure. Called again under the same name it goes on
# where it was cut off:
#
#     slurm/sweep.sh 1,2,4,8 --seeds 0,1,2 --name weak --task segment --data data/cells --padding zeros --batch 8 --scale-lr
#
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
# *α is 10 µs and the net has 1,000 parameters tensors. What do buckets save on 64 ranks?*
#
# <details><summary>Answer</summary>
#
# One all-reduce a tensor: 1,000 × 126 messages × 10 µs = 1.26 s of latency in every step. In 10 buckets: 12.6 ms.
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
    large_batch_same_rate=tried[f"batch {large.batch}, same rate"],
    large_batch_scaled=tried[f"batch {large.batch}, rate scaled"],
    large_batch_warm=tried[f"batch {large.batch}, rate scaled, warm-up"],
    ddp_bytes=traffic["ddp"].sent,
    fsdp_bytes=traffic["fsdp"].sent,
    hsdp_bytes=traffic["hsdp"].sent,
    noise_scale_before=scales["before training"],
    tiles_left_on_10_ranks=left[9],
)

# %% [markdown]
# ## What you have seen
#
# - Predict, measure, compare: a model of two fits is right within some ten per cent, and where it is not you learn something.
# - Weak scaling keeps the work of a rank, strong scaling shares it out and runs out of it; Amdahl and Gustafson are the case
#   of a network that costs nothing.
# - On many ranks latency decides: a ring grows with *n*, a tree with log *n*; FSDP may send more padding than weights.
# - Samples per second are not results: a larger batch means fewer steps. Scaled rates and warm-up help, up to the noise scale.
# - A test set that changes with the number of ranks makes numbers move that should not: sums and counts of everything.
#
# **Next:** 07 · Model parallel: when the net does not fit on one device.
