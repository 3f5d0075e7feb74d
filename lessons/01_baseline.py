# %% [markdown]
# # 01 · Baseline: one device
#
# Before work can be shared it must be known. This lesson trains the course's UNet on one device to forecast the weather
# six hours ahead, and finds out where a step's time and memory go.
#
# After this lesson
#
# 1. you have a trained forecaster that beats two honest baselines on a year it has never seen;
# 2. you can predict a model's parameters and memory with a pencil, and have checked it;
# 3. you know which part of a training step costs what, and so what is worth sharing.
#
# **New since lesson 00:** a task, a model, a training loop. Still one process.

# %% [markdown]
# The sizes below suit a laptop: the two trainings take a few minutes. On a GPU the first one runs for more epochs.

# %% tags=["parameters"]
import torch

gpu = torch.cuda.is_available()
data = "../data/years"  # simulated weather, made by `make data`
real_data = "../data/ncep"  # real temperatures, made by `make data` where the package registry can be reached
runs = "../runs"
train_years = "1980-1986"
valid_years = "1987"
width = 16  # channels of the UNet's first level
depth = 2  # how often it halves the image
batch = 8
epochs = 10 if gpu else 1
max_steps = 0  # 0: as many as the epochs need
real_epochs = 5
real_width = 12
threads = 1  # CPU threads; from lesson 03 on every rank gets one

# %% [markdown]
# A run is described by one `Config`. Each of its fields is also a flag of the program that trains in a terminal or in a
# batch job; the last line prints that command.

# %%
from course_lib import plots
from course_lib.config import Config
from course_lib.lesson import numbers, show

torch.set_num_threads(threads)
config = Config(name="01_baseline", data=data, runs=runs, train_years=train_years, valid_years=valid_years)
config = config.replace(width=width, depth=depth, batch=batch, epochs=epochs, max_steps=max_steps, threads=threads)
print("python -m course_lib.train", *config.arguments())

# %% [markdown]
# ## The task
#
# On disk lie years of hourly weather, one file for each variable and year, as a climate group keeps them. To stay small,
# each year has only its first days. The data comes from a small solver of simplified equations of the atmosphere, so the
# course needs no download. Its planet has no edges: what leaves on the right comes in on the left, and the same at top
# and bottom. A sample is a pair: all six variables now, and all six six hours later.

# %%
from course_lib.data.tasks import make_task
from course_lib.data.weather import VARIABLES

task = make_task(config)
x, y = task.valid[100]
print(f"{len(task.train)} samples to learn from, {len(task.valid)} held out; {tuple(x.shape)} → {tuple(y.shape)}")
for name in task.train.variables:
    print(f"{name:7} {VARIABLES[name][1]} ({VARIABLES[name][0]})")

# %% [markdown]
# Values are standardised: each variable has its mean taken off and is divided by its standard deviation, both computed
# once from the training years. An error of 1 then means "as wrong as always saying the average".

# %%
plots.fields(
    dict(zip(task.valid.variables, x.numpy())), alike=False, columns=3, units="standard deviations from the mean"
)

# %% [markdown]
# `ASOB_S` is sunshine. Its bright patch, half at the top and half at the bottom because the planet wraps round, goes
# round once a day. `PMSL` is pressure: the wind blows round its highs and lows and draws the temperature out into
# tongues. Nobody tells the network any of this.

# %% [markdown]
# ## What must be beaten
#
# *How good is a forecast that says: in six hours the weather will be what it is now?* That is **persistence**. A harder
# opponent is **linear regression** at each grid point, fitted on the same training years: it knows how this place
# usually changes, but not what the wind is about to bring.

# %%
from torch.utils.data import DataLoader

from course_lib.baselines import PixelRegression, persistence
from course_lib.trainer import evaluate

valid_loader = DataLoader(task.valid, batch_size=32)
regression = PixelRegression(DataLoader(task.train, batch_size=32))
scores = {"persistence": evaluate(persistence, valid_loader), "regression": evaluate(regression, valid_loader)}
assert scores["regression"]["loss"] < scores["persistence"]["loss"]
for name, score in scores.items():
    print(f"{name:12} mean squared error on the held-out year: {score['loss']:.4f}")

# %% [markdown]
# Regression is better than persistence, as it should be. These two numbers are the bar. Both are computed over every
# sample of a year that was not used for fitting anything.
#
# ## The model
#
# A UNet looks at the image at several sizes. Going down, it halves the image and doubles the channels. Going up, it
# enlarges the coarse picture and puts the fine one, kept on the way down, beside it. This is its building block, and
# its whole forward pass:

# %%
from course_lib.unet import Block, UNet, Up, count_activations, count_parameters, measure_activations

show(Block, Up, UNet.forward)

# %% [markdown]
# **Predict.** A 3 × 3 convolution from $a$ to $b$ channels has $9ab$ weights, its normalisation $2b$. Going down, the
# levels have $w, 2w, 4w$ channels. Going up, $2c$ channels come from below, and a 1 × 1 convolution with $2c^2$ weights makes
# $c$ of them while the image is still small. Beside them lie the $c$ that were kept on the way down, so the block reads $2c$
# and gives $c$. The last layer has $w + 1$ for each output. Add it up, then count the real one.

# %%
from course_lib.trainer import make_model

model = make_model(config, task)
predicted = count_parameters(task.inputs, task.outputs, width=width, depth=depth)
counted = sum(parameter.numel() for parameter in model.parameters())
assert predicted == counted
assert torch.equal(model(x[None]), x[None])
print(f"predicted {predicted:,} parameters, counted {counted:,}; untrained, it says: no change")

# %% [markdown]
# The sum is exact. And the untrained network *is* persistence: it predicts the change, and its last layer starts at zero.
#
# ## One step
#
# Everything that this course parallelises is in these lines: forward, loss, backward, step. (`span` notes the time if
# somebody asks for it.) The call to `sync` does nothing yet. Later, our own first ways of sharing average the ranks'
# gradients there; PyTorch's own does it during `backward`.

# %%
from course_lib.trainer import fit, train_step

show(train_step)

# %% [markdown]
# ## Train
#
# `fit` repeats the step over the training years, evaluates on the held-out year after each epoch, saves a checkpoint and
# now and then writes a line of numbers to a log.

# %%
fitted = fit(config)
unet = fitted.model.cpu().eval()  # wherever it was trained, from here on it forecasts on the CPU

# %% [markdown]
# The figures read that log, not the live process, so a run on a cluster looks just the same.

# %%
from course_lib.metrics import read_log

plots.losses(read_log(fitted.run), references={name: score["loss"] for name, score in scores.items()})

# %% [markdown]
# The curve starts at persistence and goes down. Each of its points is one batch, before the update, so it is noisy. The
# round point is the number that counts: all of the held-out year.

# %% [markdown]
# ## Did it learn weather?
#
# Skill has a definition: one minus the model's mean squared error divided by the reference's. Zero is no better than the
# reference, one is perfect.

# %%
scores["UNet"] = evaluate(unet, valid_loader)
rmse = {name: dict(zip(task.valid.variables, score["rmse"])) for name, score in scores.items()}
skill = {name: 1 - scores["UNet"]["loss"] / scores[name]["loss"] for name in ("persistence", "regression")}
assert min(skill.values()) > 0.3, "the UNet should beat both baselines clearly"
assert all(rmse["UNet"][wind] < rmse["regression"][wind] for wind in ("U_10M", "V_10M"))
print({name: f"skill {value:.2f}" for name, value in skill.items()})

# %%
plots.grouped_bars(rmse, ylabel="RMSE on the held-out year\n(standard deviations)")

# %% [markdown]
# For `ASOB_S` persistence is worse than 1, worse than always saying the average: the sun has moved on. There the gain is
# largest, for the sun's path is easy. It is large for the wind too, where the air really has to be moved. For the
# pressure regression is nearly as good: pressure changes slowly. A number is one thing, a picture another:

# %%
x, y = task.valid[60]
with torch.no_grad():
    forecast = unet(x[None])[0]
variable = task.valid.variables.index("T_2M")
mean, std = (values[variable] for values in task.train.normalisation)
panels = {"now = persistence": x, "UNet, 6 h ahead": forecast, "truth, 6 h ahead": y}
kelvin = {name: panel[variable].numpy() * std + mean for name, panel in panels.items()}
plots.fields(kelvin, units="temperature (K)")

# %% [markdown]
# Follow one tongue of warm air from the left picture to the right one: it has moved, and the network moved it. *Where is
# the forecast still wrong?* Compare its error with how steep the truth is.

# %%
import numpy as np

truth = kelvin["truth, 6 h ahead"]
error = np.abs(kelvin["UNet, 6 h ahead"] - truth)
steepness = np.hypot(*np.gradient(truth))
edges = steepness > np.quantile(steepness, 0.9)  # the steepest tenth of the map
assert error[edges].mean() > error[~edges].mean()
plots.fields({"UNet's error (K)": error, "steepness of the truth (K per grid point)": steepness}, alike=False)
print(f"in the steepest tenth the error is {error[edges].mean() / error[~edges].mean():.1f} times that of the rest")

# %% [markdown]
# What is left is larger where the temperature changes sharply. An edge in slightly the wrong place is wrong twice: where
# it is, and where it should be.

# %% [markdown]
# ## Where does the time go?
#
# *Guess first: is it the convolutions, the normalisation, or something else?* The profiler records every operation of a
# few steps; we keep the time that each kind of operation spent itself, on one CPU thread, also where there is a GPU.

# %%
from course_lib.profiling import profile_steps

model = make_model(config, task).train()
optimizer = torch.optim.Adam(model.parameters())
one_batch = next(iter(DataLoader(task.train, batch_size=batch)))
spent = profile_steps(lambda: train_step(model, one_batch, optimizer))
plots.shares(spent, xlabel="time per step (ms)", title="a training step on one CPU thread")

# %% [markdown]
# Convolutions usually take the largest part, and their backward pass more than their forward pass: it computes two
# gradients, for the weights and for the input. Then come copies. Most of them are the price of a planet without edges:
# before each convolution the left edge is glued to the right one and the top to the bottom. Reading data is left out: every step
# used the same batch. Lesson 02 is about that.

# %% [markdown]
# ## Where does the memory go?
#
# **Predict.** Training keeps four things as large as the model: the weights, their gradients, and two averages that Adam
# keeps for each weight: 4 × 4 bytes per parameter. And it keeps the **activations**: what the forward pass computed and
# the backward pass will need. They grow with the batch, the image and the channels. Twice the width means twice the
# activations, but four times the weights.

# %%
show(count_activations)

# %% [markdown]
# Read one line of it: a block keeps what enters it, and for each convolution its result and that result after the ReLU.
# Four bytes a value, times the area of the image at that level. To measure, PyTorch lets us look at every tensor that it
# puts aside for the backward pass; `measure_activations` adds up their bytes.

# %%
shape = {"size": task.train.shape, "width": width, "depth": depth, "padding": config.padding}
foretold = {"weights": 4 * counted, "gradients": 4 * counted, "Adam": 8 * counted}
foretold["activations"] = batch * count_activations(task.inputs, **shape)
found = {
    "weights": sum(p.nbytes for p in model.parameters()),
    "gradients": sum(p.grad.nbytes for p in model.parameters()),
    "Adam": sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim()),
    "activations": measure_activations(model, one_batch[0]),
}
for name in found:
    assert abs(foretold[name] / found[name] - 1) < 0.01, name

# %%
megabytes = {
    series: {name: value / 1e6 for name, value in parts.items()}
    for series, parts in {"predicted": foretold, "measured": found}.items()
}
plots.grouped_bars(megabytes, ylabel="memory (MB)")

# %% [markdown]
# The formulas are right to within one per cent, and the picture is lopsided: nearly everything is activations. That
# decides which remedy helps. Giving each rank only a part of the weights (*sharding*, lesson 08) would do little for this
# net; a smaller batch on each rank (lesson 04) or a part of the image (lesson 07) does a lot. So does **recomputing**: keep
# only what enters a block, and run the block again when the backward pass needs the rest. PyTorch calls this *activation
# checkpointing*; it has nothing to do with the checkpoint that `fit` saves to disk.

# %%
lean = make_model(config.replace(checkpointing=True), task).train()
kept = measure_activations(lean, one_batch[0])
promised = batch * count_activations(task.inputs, **shape, checkpointing=True)
assert abs(promised / kept - 1) < 0.01
print(f"activations kept: {found['activations'] / 1e6:.1f} MB, when recomputing {kept / 1e6:.1f} MB")

# %% [markdown]
# *What is the price?*
#
# <details><summary>Answer</summary>
#
# Every block's forward pass is computed twice. A backward pass costs about two forward passes, so a step grows from three
# to four: about a third more work.
#
# </details>

# %% [markdown]
# ## The same on real weather
#
# Is simulated weather too easy? The NCEP reanalysis (a weather model held to the observations of its time) has the
# monthly temperatures of the Earth since 1948. The task here is **super-resolution**: the field has been averaged over
# 4 × 4 grid points, and the fine one is wanted. Bicubic interpolation draws a smooth surface through the coarse points.
# The honest baseline adds the mean error that this makes in each month of the training years, for mountains and coasts
# stay where they are.

# %%
from pathlib import Path

real = any(Path(real_data).glob("AIR_*.nc"))
if real:
    where = {"data": real_data, "train_years": "1948-2005", "valid_years": "2016-2025"}
else:
    where = {"data": data, "train_years": train_years, "valid_years": valid_years, "variables": "T_2M"}
config_real = config.replace(name="01_superres", task="superres", epochs=real_epochs, width=real_width, max_steps=0)
task_real = make_task(config_real.replace(**where))
print("real NCEP temperatures" if real else "no real data here: the same on simulated temperature")

# %% [markdown]
# Ten years lie between the training years and those held out, so that no slow swing of the climate is in both. And the
# Earth is round: a grid point near the pole stands for less area than one at the equator. So errors are weighted by the
# cosine of the latitude; the evaluation is the same function as before.

# %%
from course_lib.scores import SquaredError

rows = task_real.train.shape[0]
latitude = torch.linspace(90, -90, rows) if real else torch.zeros(rows)
area = torch.cos(torch.deg2rad(latitude)).clamp(min=0)[:, None]
real_loader = DataLoader(task_real.valid, batch_size=32)
kelvin_per_unit = task_real.train.normalisation[1][0]


def kelvin_error(model) -> float:
    return evaluate(model, real_loader, score=SquaredError(weight=area))["rmse"][0] * kelvin_per_unit


# %% [markdown]
# The network's input has two channels: the interpolated and corrected field, and the correction itself. So both baselines
# can be read off it.

# %%
corrected = "bicubic + mean error"
baselines = {"bicubic": lambda x: x[:, :1] - x[:, 1:], corrected: lambda x: x[:, :1]}
errors = {name: kelvin_error(baseline) for name, baseline in baselines.items()}
print({name: f"{value:.3f} K" for name, value in errors.items()})

# %% [markdown]
# The second is far better than the first: most of what interpolation misses is geography. A network that is compared
# with bicubic alone looks brilliant and may have learned nothing but a map. We compare with the better one.

# %%
sharpener = fit(config_real.replace(**where)).model.cpu().eval()
errors["UNet"] = kelvin_error(sharpener)
print({name: f"{value:.3f} K" for name, value in errors.items()})
assert errors["UNet"] < 0.99 * errors[corrected]

# %% [markdown]
# Better than the honest baseline, on years it has not seen. Where?

# %%
x, y = task_real.valid[6]
with torch.no_grad():
    guesses = {"bicubic": x[:1] - x[1:], corrected: x[:1], "UNet": sharpener(x[None])[0]}
wrong = {name: np.abs((guess - y).numpy()[0]) * kelvin_per_unit for name, guess in guesses.items()}
plots.fields({"truth (standardised)": y[0].numpy(), **wrong}, alike=False, columns=2, units="absolute errors (K)")

# %% [markdown]
# Plain interpolation misses mountains and coasts. The correction brings them back: they are the same every year. What the
# UNet adds is the rest, and on real data that is modest. The dataset class, the UNet and the loop were those from above,
# without a change.

# %% [markdown]
# ## Questions
#
# *The UNet glues the map's edges together. On the real Earth, where is that right and where is it wrong?*
#
# <details><summary>Answer</summary>
#
# Right from west to east: the date line is not an edge. Wrong at the poles: the northernmost row is not next to the
# southernmost one. `padding="zeros"` would be wrong at both.
#
# </details>
#
# *Which of the two, time or memory, will limit the batch size of a larger net on a GPU?*
#
# <details><summary>Answer</summary>
#
# Memory: activations grow in proportion to the batch, and what does not fit does not run. Time grows too, but it only
# makes one wait.
#
# </details>
#
# ## On the cluster
#
# One rank with four CPU threads, as a batch job; flags of the command printed at the top go at the end. `--resume` lets it
# go on after a stop, with the same weights as if it had never been stopped. Lesson 05 takes that apart.
#
#     sbatch slurm/01_baseline.sbatch --epochs 5
#
# ## Numbers of this run

# %%
numbers(
    parameters=counted,
    activations_mb=found["activations"] / 1e6,
    persistence_loss=scores["persistence"]["loss"],
    regression_loss=scores["regression"]["loss"],
    unet_loss=scores["UNet"]["loss"],
    skill_against_persistence=skill["persistence"],
    skill_against_regression=skill["regression"],
    superres_error_ratio=errors["UNet"] / errors[corrected],
)

# %% [markdown]
# ## What you have seen
#
# - One step is forward, loss, backward, update; a run is that, many times, with a log and a checkpoint.
# - A model is judged on years it has not seen, against the best simple forecast one can think of.
# - Convolutions take the time, activations take the memory; the memory was predicted to one per cent.
# - The same code learned from simulated and from real weather.
#
# **Exercise:** [ex01](../exercises/ex01_baseline/ex01_baseline.ipynb), A large batch, and what a layer costs.
#
# **Next:** [02 · Data](02_data.ipynb): what if the years do not fit into memory, and reading takes as long as computing?
