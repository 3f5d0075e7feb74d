# %% [markdown]
# # 11 · Lightning: somebody else's loop
#
# Ten lessons long the training loop was ours, and every strategy was a few lines around it. **Lightning** is a library that
# has those lines already. It comes in two strengths. *Fabric* starts the ranks and wraps model and optimizer; the loop stays
# yours. The *Trainer* takes the loop as well, and asks you only for the parts that are different in every project. You will
# meet both in other people's repositories, and want to know where things have gone, and whether the results are still the
# same.
#
# After this lesson
#
# 1. you can turn a loop into a Fabric program and into a LightningModule, and say where each line has gone;
# 2. you have proved that both end with the weights of our DDP, to the last bit, and handed a run from one to the other;
# 3. you know the Trainer's callbacks, loggers, profiler and flags, and what they cost.
#
# **New since lesson 10:** nothing is sent in another way. DDP is underneath; this lesson is about who calls it.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
width = 16
batch = 4  # samples per step on each of two ranks
steps = 5  # of the proofs
max_steps = 40  # of the runs whose speed is compared, at least 20
epochs = 4  # that the run with early stopping could have

# %%
import contextlib
import csv
from pathlib import Path

import torch

from course_lib import board, checkpoint, lit, places, plots, results, trainer
from course_lib.cockpit import Table
from course_lib.config import Config
from course_lib.data.tasks import make_task, split_years
from course_lib.launch import torchrun
from course_lib.lesson import changes, numbers, shell, show
from course_lib.metrics import read_log

torch.set_num_threads(1)
places.quiet()
where = {"data": str(Path(data).resolve()), "runs": str(Path(runs).resolve()), "device": "cpu"}
config = Config(width=width, batch=batch, max_steps=steps, warmup=2, log_every=steps, **where)

# %% [markdown]
# ## Fabric: the loop stays yours
#
# We begin where lesson 10 began, with a loop in one process, and look at what Fabric changes. `+` is new, and `-` is what it
# replaces:

# %%
lines_fabric = changes("lessons/programs/single.py", "lessons/programs/fabric.py")

# %% [markdown]
# | line | what it is for | by hand |
# |---|---|---|
# | `Fabric(devices=2, strategy="ddp")` | how many ranks, how they share the work | torchrun's flags, `DistributedDataParallel` |
# | `fabric.launch()` | start the others, or find who has; join them | torchrun, `init_process_group` |
# | `fabric.setup(model, optimizer)` | to the device, into the wrapper | `.to(device)`, `DistributedDataParallel(model)` |
# | `fabric.backward(loss)` | with the precision's scaling, if it has one | `loss.backward()` |
# | `fabric.save(…)` | one rank writes, the others wait | `if rank == 0`, `barrier` |
#
# That is the point of it: one word, `strategy`, where there were lines. *Will the weights be those of lesson 10's DDP
# program?*


# %%
def words(name: str) -> str:
    """The command line of a run of this name."""
    return " ".join(config.replace(name=f"11_{name}").arguments())


shell(f"torchrun --standalone --nproc-per-node 2 lessons/programs/ddp.py {words('ddp')}")
shell(f"python lessons/programs/fabric.py {words('fabric')} 2>&1 | grep -i rank || true")

# %% [markdown]
# No torchrun in the second line: `fabric.launch()` found that nobody had started ranks, and started the other one itself, by
# running the whole program again. (Under torchrun or `srun` it finds that somebody has.)


# %%
def weights(name: str) -> torch.Tensor:
    """All weights of a program's run as one vector."""
    saved = torch.load(config.replace(name=f"11_{name}").run / "weights.pt", weights_only=True)
    return torch.cat([part.flatten() for part in saved.values()])


fabric_apart = (weights("fabric") - weights("ddp")).abs().max().item()
print(f"largest difference between Fabric's weights and DDP's after {steps} steps: {fabric_apart:g}")
assert fabric_apart == 0

# %% [markdown]
# Not one bit. Of course not: it *is* DDP, and the samples are the same. The library has this too, with our log and checkpoint
# around it: `python -m course_lib.fabric` takes the flags of `course_lib.train`. Lesson 12 uses it.
#
# ## The Trainer: four parts of yours
#
# A **LightningModule** has four parts, whatever it learns: what the net is, what it does with an input, what a step is, which
# optimizer. Here is ours as small as it can be, with the data as it comes from a plain DataLoader:


# %%
import lightning

task = make_task(config)


class Small(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = trainer.make_model(config, task)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, number):
        x, y = batch
        return torch.nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=config.lr)


# %% [markdown]
# No `zero_grad`, no `backward`, no `step`, no rank, no device. The **Trainer** does all that, here on two ranks. In a
# notebook the strategy is called `ddp_notebook`: it *forks* this very process, since a program that lives in cells can't be
# run again. (`LightningEnvironment` tells it that nobody else has started ranks. Inside of a Slurm job, as on a JupyterHub,
# it would otherwise take itself for a rank of that job, and fail.)

# %%
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

small = Small()
before = torch.cat([part.flatten() for part in small.parameters()]).clone()
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_notebook", "plugins": [LightningEnvironment()]}
by_two = lightning.Trainer(max_steps=steps, **options, **quiet)
by_two.fit(small, DataLoader(task.train, batch_size=batch, shuffle=True))

# %%
moved = (torch.cat([part.flatten() for part in small.parameters()]) - before).abs().max().item()
print(f"the largest change of a weight: {moved:.1e}; steps that this notebook's Trainer knows of: {by_two.global_step}")
assert moved > 0 and by_two.global_step == 0

# %% [markdown]
# The trained weights came back from the forks, but little else: the Trainer in this process has not taken a step. So for all
# that is more than a look, start a program of its own, which is what we do from here on.
#
# Two more things it did by itself. It put a `DistributedSampler` into the DataLoader, or both ranks would have seen the same
# samples; and it called its `set_epoch`, which lesson 04 has shown to be easily forgotten.
#
# ## What moved where
#
# The library's LightningModule has the same four parts, made for a comparison: it trains every task of the course, with our
# batches, learning rate and scores.

# %%
show(lit.LitModel.training_step, lit.LitModel.validation_step, lit.LitModel.on_validation_epoch_end)

# %% [markdown]
# The score is made as in lesson 04: each rank has sums, the sums are added over all ranks, and only then something is
# divided. Lightning's own `self.log(…, sync_dist=True)` does not give that where shards are uneven; exercise 11 shows what
# it gives.
#
# Data have a class of their own, the **LightningDataModule**. `prepare_data` runs on one rank of each node, `setup` on every
# one, and the loaders belong to a rank:

# %%
show(lit.LitData.prepare_data, lit.LitData.setup, lit.LitData.train_dataloader)

# %% [markdown]
# | in our trainer | in Lightning |
# |---|---|
# | `start(config)`, `stop(world)` | `Trainer(devices=…, num_nodes=…, plugins=…)` |
# | `strategy(model, world, …)` | `Trainer(strategy="ddp")` |
# | `make_task`, rank 0 first | `LitData.prepare_data`, then `setup` |
# | `Batches`, `shard`, `make_loader` | `LitData.train_dataloader`, `val_dataloader` |
# | `make_model` | `LitModel.configure_model` |
# | `train_step` | `LitModel.training_step`; `zero_grad`, `backward`, `step` are the Trainer's |
# | `learning_rate` | `LitModel.configure_optimizers` returns it as a schedule |
# | `evaluate` | `LitModel.validation_step`, `on_validation_epoch_end` |
# | `Log`, `State.save`, timing | a callback, `callbacks.Records` |
# | `max_steps`, `epochs` | flags of the Trainer |
#
# ## Prove it
#
# Our trainer with DDP, and Lightning's Trainer: two ranks each, the same seed, the same order of samples. torchrun starts
# both, and Lightning finds its rank and the world's size in torchrun's variables.

# %%
ours = config.replace(name="11_ours", strategy="ddp")
theirs = ours.replace(name="11_trainer")
torchrun(2, ours, quiet=True)
torchrun(2, ["-m", "course_lib.lit", *theirs.arguments()])


# %%
def trained(run: Config) -> torch.Tensor:
    """The weights and Adam's averages of a run's checkpoint as one vector."""
    saved = checkpoint.load(run.run / "checkpoint.pt")
    averages = [state[name] for state in saved["optimizer"]["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    return torch.cat([part.flatten() for part in (*saved["model"].values(), *averages)])


trainer_apart = (trained(theirs) - trained(ours)).abs().max().item()
print(f"largest difference of a weight, or of Adam's averages, after {steps} steps: {trainer_apart:g}")
assert trainer_apart == 0

# %% [markdown]
# The same bits again, in the optimizer's state too. *Why is that worth a proof, if DDP is underneath in both?*
#
# <details><summary>Answer</summary>
#
# Because between your code and DDP there is a large library that may do something else: another sampler, a last
# batch dropped or repeated, a schedule stepped once an epoch, gradients clipped by a default, a loss divided twice. Here
# every one of those would show. In your own project: fix the seed and the order of samples, take five steps with the old
# program and five with the new one, compare. It is an hour's work, once.
#
# </details>
#
# The run has also left *our* checkpoint beside Lightning's. So nothing is locked in: stop the Trainer half-way, and let our
# loop finish.

# %%
asked = []


def stop_half_way() -> bool:
    """Whether to stop; asked after every step."""
    asked.append(1)
    return len(asked) == steps // 2


whole, half = (config.replace(name=f"11_{name}", log_every=1) for name in ("whole", "half"))
trainer.fit(whole)
lit.fit(half, told=stop_half_way)
trainer.fit(half.replace(resume=True))
handed_over = (trained(half) - trained(whole)).abs().max().item()
print(f"{steps // 2} steps by Lightning and {steps - steps // 2} by us, against {steps} by us: {handed_over:g} apart")
assert handed_over == 0

# %% [markdown]
# ## Strategies by a word
#
# `strategy="ddp"` is a string, and `"fsdp"` is another. But that is torch's first FSDP, and Lightning wants GPUs for it:

# %%
try:
    lightning.Trainer(accelerator="cpu", devices=2, strategy="fsdp", **quiet)
    refused = False
except ValueError as error:
    refused = True
    print(f"{type(error).__name__}: {error}")
assert refused

# %% [markdown]
# For FSDP2, which you know from lesson 08, there is `ModelParallelStrategy`: Lightning makes the device mesh, and we cut the net
# in `configure_model`, which runs when the ranks have met. That works on CPUs as well:

# %%
show(lit.LitModel.configure_model, lit.strategies)
sharded = ours.replace(name="11_fsdp", strategy="fsdp")
torchrun(2, ["-m", "course_lib.lit", *sharded.arguments()], quiet=True)

# %%
fsdp_apart = (trained(sharded) - trained(ours)).abs().max().item()
print(f"largest difference between FSDP by Lightning and our DDP: {fsdp_apart:g}")
assert fsdp_apart < 1e-6

# %% [markdown]
# On two ranks there is only one order to add in, so usually even this is 0. One word has changed who keeps which weight.
#
# ## Callbacks
#
# What happens *around* the steps is in callbacks: objects with methods such as `on_train_batch_end`, called at that moment.
# Some come with Lightning, and our log is one of ours:
#
# | callback | what it does |
# |---|---|
# | `ModelCheckpoint` | keeps the best weights, by a metric's name |
# | `EarlyStopping` | ends the run when a metric gets no better |
# | `LearningRateMonitor` | logs the rate of every step |
# | `callbacks.Records` | ours: metrics.jsonl, checkpoint.pt, samples per second |
# | `callbacks.SlurmInfo` | ours: job, nodes and partition, beside the curves |
# | `callbacks.Told` | ours: saves and stops when Slurm says that time is nearly up |
#
# Early stopping, for example. We ask for the impossible: every epoch shall lower the validation loss, which is below 1 from
# the beginning, by 10. *After how many epochs does it give up?*

# %%
from lightning.pytorch.callbacks import EarlyStopping

one_year = str(split_years(config)[0][0])  # to train on: epochs should be short here
impatient = config.replace(name="11_early", train_years=one_year, epochs=epochs, max_steps=0, warmup=20, log_every=5)
with contextlib.redirect_stdout(None):  # many lines
    lit.fit(impatient, callbacks=[EarlyStopping("valid_loss", patience=1, min_delta=10.0)])
evaluations = [round(event["loss"], 4) for event in read_log(impatient.run) if event["event"] == "eval"]
print(f"validation losses: {evaluations}; it could have had {epochs}")
assert len(evaluations) == 2 < epochs

# %% [markdown]
# After two: the first sets the mark, the second is not better by 10, and with `patience=1` that is enough. On several ranks all
# must decide alike, or the others would wait for ever; they do, because our score is the same number on all of them.
#
# ## Loggers
#
# The Trainer hands its numbers to any number of loggers. Ours have been writing a CSV file and TensorBoard's files all the
# time. The learning rate that `LearningRateMonitor` has seen, against the formula of lesson 04:

# %%
rows = list(csv.DictReader((impatient.run / "lightning" / "csv" / "metrics.csv").open()))
seen = {int(row["step"]) + 1: float(row["lr-Adam"]) for row in rows if row["lr-Adam"]}
total = read_log(impatient.run)[0]["steps"]
wanted = {n: trainer.learning_rate(n - 1, peak=config.lr, warmup=impatient.warmup, steps=total) for n in seen}
plots.lines(
    {"formula": (list(wanted), list(wanted.values())), "LearningRateMonitor": (list(seen), list(seen.values()))},
    xlabel="step", ylabel="learning rate", dashed=["LearningRateMonitor"],
)  # fmt: skip
assert all(abs(seen[n] - wanted[n]) < 1e-12 for n in seen)

# %% [markdown]
# TensorBoard shows the same curves, of as many runs as you like, while they are under way. `board.show` starts it for a
# folder and brings it into this page. It listens on this machine alone; your browser reaches it through the Jupyter server.

# %%
curves = board.show(runs)
curves

# %%
name = "11_early/lightning/tensorboard"
print(f"curves of {name}: {', '.join(curves.tags()[name])}")
points = [round(value, 4) for _, value in curves.points(name, "valid_loss")]
print(f"validation losses there: {points}")
assert points == evaluations

# %% [markdown]
# ## Flags worth knowing
#
# **accumulate_grad_batches** adds up the gradients of several batches before each step: the answer when the batch that you
# want does not fit. Two halves must be the whole (to rounding; they are added in another order):

# %%
one, two = config.replace(name="11_one"), config.replace(name="11_two", batch=batch // 2)
fitted, _ = lit.fit(one)
lit.fit(two, accumulate_grad_batches=2)
weights_apart, gradients_apart = checkpoint.compare(
    two.run / "checkpoint.pt", one.run / "checkpoint.pt", trainer.make_model(config, task)
)
print(f"apart by {weights_apart:.1e} of the way that the weights have gone; Adam's averages by {gradients_apart:.1e}")
assert gradients_apart < 1e-4

# %% [markdown]
# **precision** is another word: `"bf16-mixed"` computes convolutions and matrix products in 16 bits, and keeps the weights in
# 32. On the GPUs that have hardware for it this is the cheapest factor of two there is. On most CPUs it is slower; that it
# still learns the same can be seen here. *How far will the loss be from that of 32 bits? A bfloat16 has 8 bits for the
# digits.*

# %%
mixed, _ = lit.fit(config.replace(name="11_bf16"), precision="bf16-mixed")
loss_32, loss_mixed = fitted.metrics["loss"], mixed.metrics["loss"]
bf16_apart = abs(loss_mixed / loss_32 - 1)
print(f"validation loss with 32 bits {loss_32:.4f}, mixed {loss_mixed:.4f}: {bf16_apart:.1e} of it apart")
assert 0 < bf16_apart < 0.05

# %% [markdown]
# **profiler** tells where the time goes, by the Trainer's own names for its parts. These took longest:

# %%
from lightning.pytorch.profilers import SimpleProfiler

profiler = SimpleProfiler()
profiled = config.replace(name="11_profile", max_steps=max_steps, epochs=100, log_every=max_steps)
lit.fit(profiled, profiler=profiler, limit_val_batches=1)
totals = {name: (sum(times), len(times)) for name, times in profiler.recorded_durations.items()}
longest = sorted(totals, key=lambda name: -totals[name][0])
wanted = [name for name in longest if name.startswith(("run_training_batch", "[Strategy]", "[Callback]", "[_Train"))]
assert wanted[0] == "run_training_batch"
rows = [(part.split("{")[0], totals[part][1], f"{totals[part][0]:.2f}") for part in wanted[:8]]
Table(("part", "calls", "seconds"), rows)

# %% [markdown]
# Most of it is `run_training_batch`, as it should be: that is forward, backward and update, whose parts follow. (Validation was
# cut to one batch here by `limit_val_batches`, another flag.) What remains is loading, and what the loop costs.
#
# ## What it costs
#
# Every step passes through some dozens of hooks. That is a time per step, whatever the net is. So we measure it with a net so
# small that there is hardly anything else, and *predict* what it means for a real one. Each run's own log says how fast it
# was.


# %%
def seconds_a_step(loop, name: str, **changes) -> float:
    """Of a run in this process, by its own log: the median, without its first line."""
    run = config.replace(name=f"11_speed_{name}", epochs=1000, **{"max_steps": max_steps} | changes)
    run = run.replace(log_every=run.max_steps // 10)
    with contextlib.redirect_stdout(None):
        loop(run)
    return run.batch / results.samples_per_s(read_log(run.run))


tiny = {"width": 2, "depth": 1, "batch": 1, "max_steps": 10 * max_steps}
loops = {"our loop": trainer.fit, "Trainer": lit.fit}
small_steps = {
    name: seconds_a_step(loop, f"small_{number}", **tiny) for number, (name, loop) in enumerate(loops.items())
}
extra = small_steps["Trainer"] - small_steps["our loop"]
print(
    f"a tiny net: {1e3 * small_steps['our loop']:.2f} ms a step by our loop, {1e3 * extra:.2f} ms more by the Trainer"
)

# %%
real_steps = {name: seconds_a_step(loop, f"real_{number}") for number, (name, loop) in enumerate(loops.items())}
predicted = real_steps["our loop"] + extra
shown = {name: 1e3 * seconds for name, seconds in real_steps.items()} | {"Trainer, predicted": 1e3 * predicted}
plots.bars(shown, xlabel=f"milliseconds per step, UNet of width {width}")
foretold, found = (seconds / real_steps["our loop"] - 1 for seconds in (predicted, real_steps["Trainer"]))
print(f"slower than our loop by {foretold:.1%}, was the prediction; measured: {found:.1%}")

# %% [markdown]
# What is much for a toy is little for a step of a tenth of a second. (One run of each, on a machine that does other things too:
# where the net is large the difference drowns in noise, and may even be negative. `benchmarks/ddp.py` lets them take turns.) Our
# loop prefetches with a thread, and the Trainer here does not; with small data in the page cache that matters little.
#
# ## On the cluster
#
#     sbatch slurm/11_lightning.sbatch --epochs 5                      # two nodes; rank and world size from SLURM_*
#     sbatch slurm/11_lightning.sbatch --epochs 5 --strategy fsdp
#
# Lightning sees that `srun` has started it, takes each task for a rank, and asks that `--ntasks-per-node` and `devices`
# agree. It also has a handler that saves and requeues a job before its time limit. That one saves in the middle of whatever a
# rank is doing, while another rank may be a step ahead; so ours (`callbacks.Told`) asks all ranks at the end of a step, as in
# lesson 05:

# %%
from course_lib import callbacks

show(callbacks.Told, places.settings)

# %% [markdown]
# ## Questions
#
# *A colleague's Trainer run on 4 GPUs needs as many epochs as on one, but each epoch has a quarter of the steps, and the
# result is worse. What has nobody changed?*
#
# <details><summary>Answer</summary>
#
# The learning rate. `batch_size` in a DataLoader is that of one rank, in Lightning as everywhere: on 4 ranks the global batch
# is 4 times as large, and there are a quarter of the steps. Lightning does not scale the rate for you; lessons 04 and 06 have
# the rule (`--scale-lr` here) and its limits.
#
# </details>
#
# *You add `if self.global_rank == 0: self.log("extra", value, sync_dist=True)` to `training_step`. What happens?*
#
# <details><summary>Answer</summary>
#
# `sync_dist=True` is an all-reduce, and only rank 0 calls it: the others are in the next backward by then, and the run hangs
# until the time-out, or mixes up the two collectives (lesson 05). Log on all ranks with `sync_dist=True`, or on one rank with
# `rank_zero_only=True` and without it.
#
# </details>
#
# *When would you use neither Fabric nor the Trainer?*
#
# <details><summary>Answer</summary>
#
# When the loop itself is what you work on: a pipeline's schedule, several models that take turns, a step that depends on
# other ranks' results. The Trainer can be bent (`automatic_optimization = False`), but then little is left of it. Fabric goes
# further, and below it there is plain PyTorch, which you know by now.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    lines_fabric=lines_fabric,
    fabric_apart_from_ddp=fabric_apart,
    trainer_apart_from_ours=trainer_apart,
    handed_over_apart=handed_over,
    loss_32=loss_32,
    evaluations=len(evaluations),
)
curves.stop()

# %% [markdown]
# ## What you have seen
#
# - Fabric changes a few lines of a loop; the Trainer takes the loop and leaves you four parts.
# - Both end with the bits of our DDP, and a run can go from one to the other half-way.
# - A strategy is a word, and FSDP a few lines in `configure_model`.
# - Callbacks and loggers are where everything else goes: checkpoints, early stopping, learning rates, TensorBoard.
# - The Trainer costs a fixed time for each step; whether that is much depends on the step.
#
# **Exercise:** [ex11](../exercises/ex11_lightning/ex11_lightning.ipynb), what Lightning asks of you.
#
# **Next:** [12 · A recurrent net reads digits](12_rnn_digits.ipynb): a case study with Fabric.
