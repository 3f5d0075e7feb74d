"""How much memory a dataset needs, measured in a fresh process: Python does not always give memory back."""

import multiprocessing
from collections.abc import Sequence

import psutil

from course_lib.data.years import YearsDataset


def measure(root: str, years: list[int], preload: bool) -> float:
    """Private megabytes (USS: what would be freed if this process ended) of a dataset and of reading from it."""
    process = psutil.Process()
    YearsDataset(root, years=years[:1])[0]  # brings in what the libraries need for a first sample, whatever its dataset
    before = process.memory_full_info().uss
    dataset = YearsDataset(root, years=years, preload=preload)
    for index in range(0, len(dataset), 7):
        dataset[index]
    return (process.memory_full_info().uss - before) / 1e6


def private_megabytes(root: str, cases: Sequence[tuple[list[int], bool]]) -> list[float]:
    """Measure several cases of (years, preload), each in a process of its own, alone: what two share is not private."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(measure, [(root, *case) for case in cases], chunksize=1)
