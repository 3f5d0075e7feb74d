"""The ways of reading a sample that benchmarks.data compares, each in a process of its own, and the files they read."""

import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import netCDF4
import numpy as np
import psutil
import torch
import xarray
from torch.utils.data import default_collate

from course_lib.data import make, stats, weather
from course_lib.data.years import YearsDataset, find_files

FRESH = multiprocessing.get_context("spawn")
FORKED = multiprocessing.get_context("forkserver")  # as fresh, from a server that imported everything once
FORKED.set_forkserver_preload(["benchmarks.overlap"])
OURS = "YearsDataset, lazy"
IMPORTS = "imports only"
OPENED = "(a) netCDF4, each file opened for each sample"
PRELOADED = "(b) YearsDataset, all in memory"
READY = "(b+) all in memory, normalised in advance"
XARRAY = "(c) xarray.open_mfdataset, isel and load"


def write_years(root: Path, years: int, *, size: int, hours: int, format: str) -> Path:
    """Years of fields that compress as weather does (to 0.55): a smooth pattern and one per cent of noise."""
    root.mkdir()
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.standard_normal((24, 1, 8, 8), dtype=np.float32))
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic")[:, 0].numpy()
    fields = 280 + 10 * smooth + 0.1 * rng.standard_normal(smooth.shape, dtype=np.float32)
    found, day = {}, stats.of_values(fields)
    for year, (name, (units, long_name)) in itertools.product(range(1980, 1980 + years), weather.VARIABLES.items()):
        path, total = root / f"{name}_{year}.nc", stats.Stats()
        options = {"steps": hours, "shape": (size, size), "format": format, "recipe": "benchmark"}
        with make.year_file(path, units=units, long_name=long_name, **options) as (variable, time_):
            time_[:] = np.arange(hours)
            for hour in range(0, hours, len(fields)):
                variable[hour : hour + len(fields)], total = fields, total.merge(day)
        found[path] = total
    stats.save(root, found)  # or each process would pass over all files first
    return root


def write_century(root: Path, years: int, *, hours: int) -> Path:
    """Files as long as a year of hours, and sparse: only their last hour is written."""
    root.mkdir()
    for year, name in itertools.product(range(1900, 1900 + years), weather.VARIABLES):
        with netCDF4.Dataset(root / f"{name}_{year}.nc", "w") as file:
            file.set_fill_off()
            for dimension, length in (("time", hours), ("y", 16), ("x", 16)):
                file.createDimension(dimension, length)
            file.createVariable("time", "f8", ("time",)).units = f"hours since {year}-01-01"
            file.createVariable(name, "f4", ("time", "y", "x"), contiguous=True)[-1] = 0.0
    return root


# ---- the readers: each turns a folder into a function from a sample's number to (x, y) ------------------------------------


def read_lazily(root: Path) -> Callable:
    return YearsDataset(root).__getitem__


def read_preloaded(root: Path) -> Callable:
    return YearsDataset(root, preload=True).__getitem__


def affine(dataset: YearsDataset) -> Callable:
    mean, std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in dataset.normalisation)
    scale, shift = 1 / std, -mean / std
    return lambda fields: fields.mul_(scale).add_(shift)


def read_ready(root: Path) -> Callable:
    """Nothing is left to do for a sample but to copy it."""
    dataset = YearsDataset(root, preload=True)
    normalise = affine(dataset)
    years = [normalise(torch.from_numpy(np.stack(fields, axis=1))) for fields in dataset.memory]
    return lambda index: tuple(years[year][step].clone() for year, step in dataset.locate(index))


def read_opened(root: Path) -> Callable:
    """As the forecaster that this grew from did (v3): open every variable's file for x, and again for y."""
    dataset, files = YearsDataset(root), find_files(root)
    normalise = affine(dataset)

    def read_field(year: int, name: str, step: int) -> np.ndarray:
        with netCDF4.Dataset(files[dataset.years[year]][name]) as file:
            return file.variables[name][step]

    def read(index: int) -> tuple[torch.Tensor, ...]:
        ends = dataset.locate(index)
        fields = [np.stack([read_field(year, name, step) for name in dataset.variables]) for year, step in ends]
        return tuple(normalise(torch.from_numpy(field)) for field in fields)

    return read


def read_xarray(root: Path) -> Callable:
    """One dataset over all files, one dask chunk a file and slices pushed down to the file, computed on this thread."""
    dataset = YearsDataset(root)
    normalise, starts = affine(dataset), dataset.year_starts
    files = xarray.open_mfdataset(sorted(root.glob("*.nc")), combine="by_coords")[dataset.variables]

    def read(index: int) -> tuple[torch.Tensor, ...]:
        moments = files.isel(time=[starts[year] + step for year, step in dataset.locate(index)])
        moments = moments.load(scheduler="synchronous")
        fields = np.stack([moments[name].values for name in dataset.variables], axis=1)
        return tuple(normalise(torch.from_numpy(fields)))

    return read


READERS = {OURS: read_lazily, OPENED: read_opened, PRELOADED: read_preloaded, READY: read_ready, XARRAY: read_xarray}


class Reader:
    """A process with one reader in it. It reads samples when asked, and tells the CPU seconds or its private memory."""

    def __init__(self, name: str, root: Path, context=FORKED):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, root), daemon=True)
        self.process.start()
        theirs.close()
        self.first = self.pipe.recv()  # the sum of the first sample's y

    def ask(self, what: str, indices: Iterable[int] = ()) -> float:
        self.pipe.send((what, indices))
        return self.pipe.recv()


def serve(pipe, name: str, root: Path) -> None:
    """Runs in the process: answer until the other end is closed."""
    torch.set_num_threads(1)
    read = READERS[name](root) if name != IMPORTS else lambda index: (0, torch.zeros(1))
    pipe.send(read(0)[1].double().sum().item())
    while True:
        what, indices = pipe.recv()
        began = time.process_time()
        samples = (read(index) for index in indices)
        default_collate(list(samples)) if what == "batch" else deque(samples, maxlen=0)
        seconds = time.process_time() - began
        pipe.send(psutil.Process().memory_full_info().uss if what == "memory" else seconds)


@contextmanager
def readers(root: Path, names: Iterable[str], context=FORKED) -> Iterator[dict[str, Reader]]:
    started = {name: Reader(name, root, context) for name in names}
    try:
        yield started
    finally:
        for reader in started.values():
            reader.process.kill()
            reader.process.join()
