"""The loops of which benchmarks.data measures the step time: how well does each hide loading behind computing?"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.readers import OURS, readers
from benchmarks.table import keep_memory, take_turns
from course_lib.data.batches import Batches
from course_lib.data.years import YearsDataset
from course_lib.prefetch import Prefetcher
from course_lib.trainer import train_step
from course_lib.unet import UNet

BATCH = 8
WARM = 4  # steps before the clock starts: by then worker processes run and queues are as full as they will be
PREFETCHER = "course_lib.prefetch.Prefetcher"
PLAIN = "DataLoader without workers"
COPY_ONLY = "prefetcher of the copy only, next() on the training thread"
MACHINE = "machine limit: an independent process loads alongside"


def copy_only(loader: Iterable) -> Iterator:
    """As the forecaster that this grew from did (v4): the next batch is fetched as soon as this one is handed out."""
    batches = iter(loader)
    following = next(batches, None)
    while (batch := following) is not None:
        following = next(batches, None)  # on the training thread: on a GPU only the copy would go on alongside
        yield batch


def seconds_a_step(batches: Iterable, work: Callable, steps: int) -> float:
    """Fetch and work, over and over: the mean of so many steps after the first few."""
    began = 0.0
    for number, batch in enumerate(batches, start=1):
        work(batch)
        if number == WARM:
            began = time.perf_counter()
        if number == WARM + steps:
            return (time.perf_counter() - began) / steps
    raise ValueError(f"{number} batches are too few")


def make_step(dataset: YearsDataset, *, width: int, depth: int, every: int) -> Callable:
    """A training step of a small UNet on every so many grid points."""
    torch.manual_seed(0)
    channels = len(dataset.variables)
    model = UNet(channels, channels, width=width, depth=depth, residual=True)
    optimizer = torch.optim.Adam(model.parameters())
    return lambda batch: train_step(model, [fields[..., ::every, ::every] for fields in batch], optimizer)


def beside(reader, orders: Iterable[list[int]], batch) -> Iterator:
    """The same batch over and over, while another process makes one like it: a step ends when both are done."""
    for order in orders:
        reader.pipe.send(("batch", order))
        try:
            yield batch
        finally:
            reader.pipe.recv()


def step_seconds(root: Path, *, steps: int, rounds: int, **options) -> dict[str, list[float]]:
    """Seconds a step of every loop, of loading alone and of computing alone: one number a round, taken in turns."""
    keep_memory()
    dataset = YearsDataset(root)
    step, batches = make_step(dataset, **options), Batches(len(dataset), BATCH)

    def loader(workers: int = 0) -> DataLoader:
        return DataLoader(dataset, batch_sampler=batches, num_workers=workers)

    batch = next(iter(loader()))
    with readers(root, [OURS]) as started:
        loops = {
            "load": lambda: seconds_a_step(loader(), lambda batch: None, steps),
            "compute": lambda: seconds_a_step(itertools.repeat(batch), step, steps),
            PREFETCHER: lambda: seconds_a_step(Prefetcher(loader()), step, steps),
            PLAIN: lambda: seconds_a_step(loader(), step, steps),
            "DataLoader with 1 worker": lambda: seconds_a_step(loader(1), step, steps),
            "DataLoader with 2 workers": lambda: seconds_a_step(loader(2), step, steps),
            COPY_ONLY: lambda: seconds_a_step(copy_only(loader()), step, steps),
            MACHINE: lambda: seconds_a_step(beside(started[OURS], batches, batch), step, steps),
        }
        return take_turns(loops, rounds)


def over_floor(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Each loop's step over max(load, compute) of the same round; the median over the rounds."""
    floors = list(map(max, seconds["load"], seconds["compute"]))
    return {name: statistics.median(s / f for s, f in zip(values, floors)) for name, values in seconds.items()}
