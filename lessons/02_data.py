# %% [markdown]
# # 02 · Data: lazy years, and loading while computing
#
# Lesson 01 read its samples as if that cost nothing. It costs memory if everything is kept, time if every file is opened
# anew, and waiting if the loop reads and computes in turn. This lesson takes the three costs one by one.
#
# After this lesson
#
# 1. you can train on more data than fits into memory, and have watched the memory stay flat;
# 2. you know what makes reading a sample slow, and have measured how much faster another way is;
# 3. you can predict a step's time as max(load, compute), and have seen the two overlap.
#
# **New since lesson 01:** nothing that runs. Lesson 01 already loaded its batches in this way; now we look inside.

# %% [markdown]
# The settings: where the data is, and how large the files and the net are with which loading and computing are timed.

# %% tags=["parameters"]
data = "../data/years"  # made by `make data`
runs = "../runs"
lead = 6  # forecast this many hours ahead
batch = 8
compressed_size = 128  # grid of the compressed files made below
compressed_hours = 96
width = 4  # of the small UNet that computes while we load
batches = 40  # how many to time

# %% [markdown]
# ## What lies on disk
#
# One file for each variable and year. An hour of one variable is a grid of 4-byte numbers, so the size of everything is
# a product that fits on the back of an envelope.

# %%
from course_lib.data.years import YearsDataset

dataset = YearsDataset(data, lead=lead, normalise=False)
hours, rows, columns = dataset.headers[0][0].shape
year_bytes = hours * len(dataset.variables) * rows * columns * 4
total = len(dataset.years) * year_bytes
print(
    f"{len(dataset.years)} years × {hours} hours × {len(dataset.variables)} variables × {rows} × {columns} × 4 bytes "
    f"= {total / 1e6:.0f} MB"
)

# %% [markdown]
# That fits into memory. Do the same sum for what a centre has on its disks: forty years, every hour, six variables on a
# quarter-degree grid.

# %%
centre = 40 * 8766 * 6 * 721 * 1440 * 4
print(f"{centre / 1e12:.1f} TB, or the memory of {centre / 256e9:.0f} nodes with 256 GB each")

# %% [markdown]
# So a dataset must not hold its data. It must not be slow either. Look at both ends before building the middle.
#
# ## Too slow: open the files for every sample
#
# The obvious lazy way: for each sample open each variable's file, read the hour that is wanted, close it; then again for
# the target. Programs that real groups trained with did just this.

# %%
import netCDF4
import numpy as np


def open_every_time(index: int) -> list[np.ndarray]:
    pair = []
    for year, hour in dataset.locate(index):
        fields = []
        for header in dataset.headers[year]:
            with netCDF4.Dataset(header.path) as file:
                fields.append(file[header.variable][hour])
        pair.append(np.stack(fields))
    return pair


x, y = open_every_time(0)
print(x.shape, y.shape)

# %% [markdown]
# It works, and it opened twelve files for one sample. How slow that is we shall measure below, beside the others.
#
# ## Too big: keep everything
#
# The opposite is to read all files once and keep the arrays: the *eager* way. Its memory is the product above.

# %%
eager = YearsDataset(data, lead=lead, normalise=False, preload=True)

# %% [markdown]
# ## Lazy: the arithmetic of years
#
# The dataset in the middle keeps neither data nor a list of samples. It only knows at which sample each year begins.

# %%
print("first sample of each year, and the end:", dataset.sample_starts)
samples_a_year = hours - lead
for index in (0, samples_a_year - 1, samples_a_year):
    print(f"sample {index}: (year, hour) now and later: {dataset.locate(index)}")

# %% [markdown]
# A pair never spans two years unless one asks for it: the last `lead` hours of a year have no target in the same file.
# `bisect_right` finds in the short list the year that a sample falls into; a subtraction gives the hour.

# %%
from course_lib.lesson import numbers, show

show(YearsDataset.locate)

# %% [markdown]
# The arithmetic must agree with the list that it replaces:

# %%
brute_force = []
for year in range(len(dataset.years)):
    brute_force += [((year, hour), (year, hour + lead)) for hour in range(hours - lead)]
assert [dataset.locate(index) for index in range(len(dataset))] == brute_force
print(f"{len(dataset)} samples, from a list of {len(dataset.sample_starts)} numbers")

# %% [markdown]
# And how is one hour read without opening its file anew? A NetCDF file of today is an HDF5 file: a container with a table
# of contents. Ours keep a variable in one piece, hour after hour (*contiguous*: neither compressed nor cut into chunks). So
# we ask HDF5 once where it begins, and keep the file open. From then on, `preadv` copies an hour's bytes from that place
# straight into our array:

# %%
from course_lib.data.readers import ContiguousReader

show(ContiguousReader.stored)

# %% [markdown]
# Three ways, one content. All three must give the same numbers to the last bit:

# %%
import torch

order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
for index in order[:20]:
    for lazy, kept, opened in zip(dataset[index], eager[index], open_every_time(index)):
        assert torch.equal(lazy, kept)
        assert np.array_equal(lazy.numpy(), opened)
print("lazy == eager == plain netCDF4")

# %% [markdown]
# *How much faster than opening every time will the lazy one be: twice, ten times, a hundred times? And how far behind
# memory itself?* One more way helps to read the result: opening and closing the files without reading anything.

# %%
import time


def open_only(index: int) -> None:
    for year, _ in dataset.locate(index):
        for header in dataset.headers[year]:
            netCDF4.Dataset(header.path).close()


def samples_per_second(read, count: int) -> float:
    start = time.perf_counter()
    for index in order[:count]:
        read(index)
    return count / (time.perf_counter() - start)


# %%
from course_lib import plots

torch.set_num_threads(1)
ways = {
    "open and read": (open_every_time, 10),
    "open only": (open_only, 10),
    "lazy": (dataset.__getitem__, 400),
    "everything in memory": (eager.__getitem__, 400),
}
speed = {name: max(samples_per_second(*way) for _ in range(3)) for name, way in ways.items()}
plots.bars(speed, xlabel="samples per second", logarithmic=True)
print(
    f"lazy: {speed['lazy'] / speed['open and read']:.0f} times as fast as opening every time, "
    f"and {speed['lazy'] / speed['everything in memory']:.0%} of the speed of memory"
)

# %% [markdown]
# Opening and closing alone is already slow: the library looks the file up, parses its table of contents and builds its
# objects, twelve times for each sample. The rest of the first bar goes into finding the hour in a file that was opened a
# moment ago. All these files have been read before, so the operating system still has them in memory (its *page cache*), and the
# lazy way's reading is a mere copy. From a cold disk all bars but the last would be shorter.
#
# ## Memory stays flat
#
# **Predict:** eager memory grows by the size of a year for each year; lazy memory does not grow. The measure is USS, a
# process's private memory: what would be freed if it ended. Each measurement gets a fresh process.

# %%
from course_lib import memory

show(memory.measure)

# %%
del eager
chosen = [count for count in (1, 2, 4, 8) if count <= len(dataset.years)]
cases = [(dataset.years[:count], preload) for preload in (True, False) for count in chosen]
measured = memory.private_megabytes(data, cases)
eager_mb, lazy_mb = measured[: len(chosen)], measured[len(chosen) :]
assert lazy_mb[-1] - lazy_mb[0] < 0.1 * (eager_mb[-1] - eager_mb[0])

# %%
product = [count * year_bytes / 1e6 for count in chosen]
plots.lines(
    {"eager, predicted": (chosen, product), "eager": (chosen, eager_mb), "lazy": (chosen, lazy_mb)},
    xlabel="years",
    ylabel="private memory (MB)",
    dashed=["eager, predicted"],
)

# %% [markdown]
# The eager line climbs as predicted. The lazy one stays where it is, and would for forty years.
#
# ## Normalise without a second copy
#
# Standardising needs the mean and the standard deviation of each variable over all training years (here: over all years).
# That is a pass over everything, but with only one hour in memory at a time. The sums are kept beside the data in
# `stats.json`, one entry for each file, so the pass happens once. It must agree with NumPy on all values at once:

# %%
normalised = YearsDataset(data, lead=lead)
mean, std = normalised.normalisation
place = normalised.variables.index("T_2M")
values = np.stack([netCDF4.Dataset(row[place].path)["T_2M"][:] for row in normalised.headers]).astype(np.float64)
assert np.isclose(mean[place], values.mean(), rtol=1e-6) and np.isclose(std[place], values.std(), rtol=1e-6)
print(f"T_2M: {mean[place]:.2f} ± {std[place]:.2f} K, as NumPy says")

# %% [markdown]
# ## Loading while computing
#
# Contiguous files in the page cache are the easy case. Archives are usually compressed, and then every hour has to be
# unpacked. Let us make such files, with the command that prepared the course's own data and other sizes.

# %%
import subprocess
import sys

packed_data = f"{data}_{compressed_size}_{compressed_hours}"
command = [sys.executable, "-m", "course_lib.data.make", "--out", packed_data, "--years", "1980-1981"]
command += ["--size", str(compressed_size), "--hours", str(compressed_hours), "--format", "compressed"]
made = subprocess.run(command, capture_output=True, text=True, check=False)
assert made.returncode == 0, made.stderr
packed = YearsDataset(packed_data, lead=lead)
print(f"{len(packed)} samples of {tuple(packed[0][0].shape)}")

# %% [markdown]
# Two times decide everything: how long it takes to **load** a batch, and how long to **compute** a step with it.
#
# **Predict.** A loop that loads, then computes, then loads again takes load + compute. If something else loads the next
# batch meanwhile, a step takes max(load, compute): the shorter one disappears. First measure each alone.

# %%
from torch.utils.data import DataLoader

from course_lib.timeline import Timeline
from course_lib.trainer import train_step
from course_lib.unet import UNet

samples = torch.randint(len(packed), (batches, batch), generator=torch.Generator().manual_seed(0)).tolist()
loader = DataLoader(packed, batch_sampler=samples)  # the same batches each time
model = UNet(len(packed.variables), len(packed.variables), width=width, depth=1, residual=True)
optimizer = torch.optim.Adam(model.parameters())

# %% [markdown]
# The loop is the one from lesson 01, with a clock: a `Timeline` notes when each kind of work began and ended.


# %%
def seconds_per_step(loader, timeline: Timeline) -> float:
    """Train over the loader; the first two steps are not timed."""
    for number, loaded in enumerate(loader):
        if number == 2:
            start = time.perf_counter()
        with timeline.span("compute"):
            train_step(model, loaded, optimizer)
    return (time.perf_counter() - start) / (number - 1)


# %%
alone = Timeline()
for one_batch in alone.watch(loader):  # noqa: B007
    pass
load = alone.total("load") / batches
compute = seconds_per_step([one_batch] * batches, Timeline())
print(f"load {load * 1e3:.0f} ms, compute {compute * 1e3:.0f} ms per batch")
print(f"predicted: in turn {(load + compute) * 1e3:.0f} ms per step, overlapped {max(load, compute) * 1e3:.0f} ms")

# %% [markdown]
# What loads the next batch meanwhile is a thread. It runs the whole loader and puts batches into a queue with room for
# two; the training loop takes them out. This is all it does:

# %%
from course_lib import prefetch
from course_lib.prefetch import Prefetcher

show(prefetch._produce)

# %% [markdown]
# Python has a lock, the *GIL*: only one thread at a time runs Python code. Then why does a thread help? Because reading a
# file, unpacking it and multiplying matrices happen in C code, which lets go of the lock meanwhile. On a GPU the thread
# also copies the batch to the device on a stream of its own, and the copy disappears too.

# %%
plain, ahead = Timeline(), Timeline()
plain_step = seconds_per_step(plain.watch(loader), plain)
ahead_step = seconds_per_step(Prefetcher(ahead.watch(loader)), ahead)
plots.timelines({"in turn": plain, "with the prefetcher": ahead})

# %% [markdown]
# Above, the two kinds of work take turns: while one bar is drawn, the other row is empty. Below, the next batches are
# loaded while the current one is computed. Put the numbers beside the prediction:

# %%
foretold = {"in turn": 1e3 * (load + compute), "prefetcher": 1e3 * max(load, compute)}
found = {"in turn": 1e3 * plain_step, "prefetcher": 1e3 * ahead_step}
plots.grouped_bars({"predicted": foretold, "measured": found}, ylabel="time per step (ms)")
hidden = (plain_step - ahead_step) / min(load, compute)
print(
    f"step time / max(load, compute): in turn {plain_step / max(load, compute):.2f}, "
    f"prefetcher {ahead_step / max(load, compute):.2f}; {max(0.0, hidden):.0%} of the shorter one was hidden"
)

# %% [markdown]
# Near 100 % the shorter one has disappeared, as predicted. If you see much less, fewer than two cores are free: close
# other programs and run the last cells again.
#
# *When does a prefetcher gain little?*
#
# <details><summary>Answer</summary>
#
# When one of the two is nearly nothing: then max(load, compute) is nearly the sum. Or when no core is free for the
# thread. And if loading is the longer one, the step cannot become shorter than it: then loading itself must become
# faster, by worker processes (`DataLoader(num_workers=…)`), another file format, or data on the node's own disk.
#
# </details>
#
# ## A prefetcher's promises
#
# A background thread that changes the order, swallows an error or outlives its loop would be worse than none. So:

# %%
import threading

same = zip(loader, Prefetcher(loader), strict=True)
assert all(torch.equal(a, b) for one, other in same for a, b in zip(one, other))

for _ in Prefetcher(loader):
    break  # leave early
assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]
print("the same batches in the same order; leaving early leaves no thread behind")

# %% [markdown]
# And a loader that fails in the middle:


# %%
def broken_loader():
    yield one_batch
    raise OSError("the disk is gone")


arrived = iter(Prefetcher(broken_loader()))
next(arrived)  # the good batch comes
try:
    next(arrived)
except OSError as error:
    print("and then, where it happened:", error)
else:
    raise AssertionError("the error was swallowed")

# %% [markdown]
# The good batch came first, then the error, in the loop and not in a thread where nobody looks.
#
# ## Questions
#
# *Each rank opens every file of 40 years of 6 variables. How many open files has a rank, and what did we do about it?*
#
# <details><summary>Answer</summary>
#
# 40 × 6 = 240. The limit counts for each process: often 1,024 on Linux, 256 on a Mac, and each DataLoader worker is a
# process too. The dataset keeps only the most recently used files open: see `handles` in `YearsDataset`.
#
# </details>
#
# *Why is a compressed file that is chunked over many hours so slow to read at random?*
#
# <details><summary>Answer</summary>
#
# To give you one hour, HDF5 must unpack the whole chunk with all its hours. Chunk by what you read at once.
#
# </details>
#
# ## On the cluster
#
# Every batch job of this course loads ahead by a thread (`--prefetch 2`); the log's `wait_share` says what part of the time
# the loop waited for data. Near zero, loading is hidden. If it is not, read from the node's own disk:
#
#     sbatch slurm/02_data.sbatch --epochs 5
#
# ## Numbers of this run

# %%
numbers(
    years=len(dataset.years),
    samples=len(dataset),
    megabytes_of_data=total / 1e6,
    temperature_mean=mean[place],
    temperature_std=std[place],
)

# %% [markdown]
# ## What you have seen
#
# - A dataset needs arithmetic, not a list of samples, and one sample in memory, not all of them.
# - Opening files costs far more than reading them; keep them open, and read at the offset.
# - Private memory stays flat as the years grow, and the numbers stay the same to the last bit.
# - Loading can hide behind computing: a step takes max(load, compute) instead of their sum.
#
# **Exercise:** [ex02](../exercises/ex02_data/ex02_data.ipynb), years on disk, batches ahead.
#
# **Next:** [03 · DataParallel](03_data_parallel.ipynb). One device now waits as little as it can; the next lessons add more.
