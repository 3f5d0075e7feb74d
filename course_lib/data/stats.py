"""Mean and standard deviation of each variable: one streaming pass a file, kept beside the data in stats.json.

Each file has its own entry (count, mean, sum of squared deviations, missing values), so that any choice of years is a merge
of entries, a new year costs one pass over that year, and the values of a year are known to be whole before it is trained on.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm

from course_lib.data.netcdf import Header
from course_lib.data.readers import open_reader


class Stats(NamedTuple):
    """What one file, or several merged, hold."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean
    missing: int = 0

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def merge(self, other: "Stats") -> "Stats":
        """Chan's formula: the statistics of both together, without cancellation."""
        count = self.count + other.count
        delta, share = other.mean - self.mean, other.count / max(count, 1)
        squares = self.squares + other.squares + delta**2 * self.count * share
        return Stats(count, self.mean + delta * share, squares, self.missing + other.missing)


def of_values(values: np.ndarray) -> Stats:
    """The statistics of one array; NaN counts as missing."""
    valid = values[np.isfinite(values)].astype(np.float64)
    if not valid.size:
        return Stats(missing=values.size)
    mean = valid.mean()
    return Stats(valid.size, float(mean), float(np.square(valid - mean).sum()), values.size - valid.size)


def of_file(header: Header) -> Stats:
    """One pass over a file, a time step in memory at a time."""
    reader, step = open_reader(header), np.empty(header.shape[1:], np.float32)
    total = Stats()
    for index in range(header.shape[0]):
        reader.read(index, step)
        total = total.merge(of_values(step))
    return total


def _key(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def write_json(path: Path, content: object) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, path)


def load(root: Path) -> dict[str, dict]:
    """The entries of stats.json; none where it is missing or unreadable, for it can be made again."""
    try:
        return json.loads((root / "stats.json").read_text())
    except (OSError, ValueError):
        return {}


def save(root: Path, new: dict[Path, Stats]) -> None:
    """Add entries to stats.json; on a read-only folder they are simply not kept."""
    entries = load(root) | {path.name: {"file": _key(path), **stats._asdict()} for path, stats in new.items()}
    with contextlib.suppress(OSError):
        write_json(root / "stats.json", entries)


def known(root: Path, headers: Iterable[Header]) -> dict[Path, Stats]:
    """What stats.json says about these files, unless a file has changed since."""
    entries, found = load(root), {}
    for header in headers:
        entry = dict(entries.get(header.path.name, {}))
        if entry and entry.pop("file") == _key(header.path):
            found[header.path] = Stats(**entry)
    return found


def of_files(root: Path, headers: list[Header]) -> dict[Path, Stats]:
    """The statistics of all files: from stats.json where it knows them, by a pass over the file where it does not."""
    found = known(root, headers)
    todo = [header for header in headers if header.path not in found]
    if todo:
        new = {header.path: of_file(header) for header in tqdm(todo, desc="statistics", unit="file")}
        save(root, new)
        found |= new
    return found
