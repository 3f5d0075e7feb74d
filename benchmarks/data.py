"""Measure what the course claims about its data, side by side with the peers it claims it against.

    python -m benchmarks.data                   # everything: a quarter of an hour, 3 GB of temporary files
    python -m benchmarks.data --quick           # small and short: it shows that all runs; its numbers are no claims
    python -m benchmarks.data --only reading    # one part: reading, memory, index or overlap
    python -m benchmarks.data --json FILE       # the table as JSON too

reading  samples a second in random order. Every reader has a process to itself, as in training; they take turns, and the
         best round of each counts. The page cache is warm, so a reader never waits, and its CPU seconds are timed: other
         programs' turns don't count.
memory   private memory (USS) after reading, with 1 and with 10 times the years, beyond a process that only imports.
index    seconds to open a century of hourly files.
overlap  seconds a step over max(load, compute), each measured alone in the same round; the median of the rounds.

One thread computes. All readers give the same normalised samples; that is checked.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import table
from benchmarks.overlap import MACHINE, PREFETCHER, over_floor, step_seconds
from benchmarks.readers import (
    FORKED,
    FRESH,
    IMPORTS,
    OPENED,
    OURS,
    PRELOADED,
    READERS,
    XARRAY,
    readers,
    write_century,
    write_years,
)
from benchmarks.table import Row
from course_lib.data.make import FORMATS
from course_lib.data.years import YearsDataset


def sample_rates(root: Path, *, rounds: int, seconds: float) -> dict[str, float]:
    """Samples a second of each reader: the best of several rounds of about so many seconds, taken in turns."""
    order = np.random.default_rng(1).permutation(len(YearsDataset(root))).tolist()
    best = dict.fromkeys(READERS, 0.0)
    with readers(root, READERS) as started:
        assert np.allclose([reader.first for reader in started.values()], started[OURS].first, rtol=1e-3), "not alike"
        for number, (name, reader) in itertools.product(range(rounds + 1), started.items()):
            count = int(best[name] * seconds) if number else 4  # a first look tells how many fit into a round
            picked = [order[k % len(order)] for k in range(max(4, count))]
            best[name] = max(best[name], len(picked) / reader.ask("samples", picked))
    return best


def measure_reading(folder: Path, *, quick: bool) -> Iterator[Row]:
    rounds, seconds = (2, 0.02) if quick else (15, 0.15)
    sizes = ((64, 24),) if quick else ((64, 360), (256, 72))
    for (size, hours), format in itertools.product(sizes, FORMATS):
        root = write_years(folder / f"{format}{size}", 2, size=size, hours=hours, format=format)
        rates = sample_rates(root, rounds=rounds, seconds=seconds)
        goals = {OPENED: (">=", 10)}
        if format == "contiguous":
            goals = {OPENED: (">=", 100), PRELOADED: (">=", 0.75 if size == 256 else 0.4)}
        for peer in itertools.islice(READERS, 1, None):
            yield Row(f"samples/s, {format} {size}×{size}", rates[OURS], peer, rates[peer], goals.get(peer))


def private_memory(root: Path, name: str, *, samples: int, context) -> float:
    """MiB that a fresh process has to itself after reading so many samples."""
    picked = np.random.default_rng(2).integers(len(YearsDataset(root)), size=samples).tolist()
    with readers(root, [name], context) as started:
        return started[name].ask("memory", picked) / 2**20


def measure_memory(folder: Path, *, quick: bool) -> Iterator[Row]:
    years, hours = (1, 24) if quick else (2, 1008)
    options = {"samples": 20, "context": FORKED} if quick else {"samples": 200, "context": FRESH}
    peers, ours = (OPENED, PRELOADED, XARRAY), {}
    for times in (1, 10):
        root = write_years(folder / f"years{times}", times * years, size=64, hours=hours, format="contiguous")
        used = {name: private_memory(root, name, **options) for name in (IMPORTS, OURS, *peers)}
        ours[times] = used[OURS]
        extra = {name: max(used[name] - used[IMPORTS], 0.1) for name in used}
        for peer in peers:
            goal = ("<=", 0.05) if peer == PRELOADED else None
            yield Row(f"private MiB beyond imports, {times}× years", extra[OURS], peer, extra[peer], goal)
    yield Row("private MiB in all, 10× years", ours[10], "itself at 1× years", ours[1], ("<=", 1.05))


def measure_index(folder: Path, *, quick: bool) -> Iterator[Row]:
    root = write_century(folder / "century", 5 if quick else 100, hours=8784)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        dataset = YearsDataset(root)
        seconds.append(time.perf_counter() - began)
    what = f"s to index {len(dataset):,} samples in {6 * len(dataset.years)} files"
    yield Row(what, min(seconds), "one second", 1.0, ("<=", 1.0))


def measure_overlap(folder: Path, *, quick: bool) -> Iterator[Row]:
    steps, rounds, size = (3, 1, 32) if quick else (8, 9, 256)
    root = write_years(folder / "overlap", 2, size=size, hours=72, format="compressed")
    nets = [(4, 0, 1), (4, 1, 1), (4, 0, 2)]  # load a good half of compute, a quarter of it, and more than it
    for width, depth, every in nets[:1] if quick else nets:
        seconds = step_seconds(root, steps=steps, rounds=rounds, width=width, depth=depth, every=every)
        load, compute = (statistics.median(seconds[name]) * 1e3 for name in ("load", "compute"))
        ratios = over_floor(seconds)
        what = f"step / max(load {load:.0f} ms, compute {compute:.0f} ms)"
        yield Row(what, ratios[PREFETCHER], "max(load, compute)", 1.0, ("<=", 1.05))
        for peer in itertools.islice(ratios, 3, None):
            yield Row(what, ratios[PREFETCHER], peer, ratios[peer], None if peer == MACHINE else ("<=", 1.0))


PARTS = {"reading": measure_reading, "memory": measure_memory, "index": measure_index, "overlap": measure_overlap}


if __name__ == "__main__":
    table.main("benchmarks.data", __doc__, PARTS)
