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

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

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
from course_lib.data.make import FORMATS
from course_lib.data.years import YearsDataset


class Row(NamedTuple):
    """One line of the table: our number, the peer's, and what their ratio should be."""

    what: str
    ours: float
    peer: str
    theirs: float
    goal: tuple[str, float] | None = None  # (">=", 100): ours is at least 100 times theirs

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        sign, bound = self.goal or ("", 0.0)
        return {"": None, ">=": self.ratio >= bound, "<=": self.ratio <= bound}[sign]


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
LINE = "{:52} {:>10} {:>10}  {:62} {:>8}  {:8} {}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show(row: Row) -> None:
    goal = "{} {:g}".format(*row.goal) if row.goal else ""
    met = {None: "", True: "met", False: "MISSED"}[row.met]
    print(
        LINE.format(row.what, number(row.ours), number(row.theirs), row.peer, number(row.ratio), goal, met), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and short; its numbers are no claims")
    parser.add_argument("--only", choices=PARTS, help="measure one part")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "quick": options.quick}
    print(machine | versions, LINE.format("what", "ours", "theirs", "peer", "ratio", "goal", ""), sep="\n")
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for part in [options.only] if options.only else PARTS:
            for row in PARTS[part](Path(folder), quick=options.quick):
                show(row._replace(goal=None) if options.quick else row)
                rows.append({"part": part, **row._asdict(), "ratio": row.ratio, "met": row.met})
    if options.json:
        options.json.write_text(json.dumps({**machine, **versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
