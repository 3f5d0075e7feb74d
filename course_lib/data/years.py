"""The lazy dataset: years of hourly fields on disk, one sample in memory.

    dataset = YearsDataset("data/years", lead=6)
    x, y = dataset[0]          # (variable, y, x) now, and six time steps later

A sample's number becomes (year, time step) by arithmetic; there is no list of samples. A file is opened when the process
that needs it first touches it, and only a few stay open.
"""

import os
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch

from course_lib.config import UserError
from course_lib.data import stats
from course_lib.data.netcdf import Header, read_header, read_times
from course_lib.data.readers import Reader, open_reader

FILE_NAME = re.compile(r"(?P<variable>.+)_(?P<year>\d{4})\.nc")


def find_files(root: str | Path) -> dict[int, dict[str, Path]]:
    """{year: {variable: path}} of a folder's <VARIABLE>_<YEAR>.nc files."""
    files: dict[int, dict[str, Path]] = {}
    for path in sorted(Path(root).glob("*.nc")):
        if match := FILE_NAME.fullmatch(path.name):
            files.setdefault(int(match["year"]), {})[match["variable"]] = path
    if not files:
        hint = "make some with: python -m course_lib.data.make --out " + str(root)
        raise UserError(f"{root} has no <VARIABLE>_<YEAR>.nc files; {hint}")
    return dict(sorted(files.items()))


class YearsDataset(torch.utils.data.Dataset):
    """Pairs (x, y) of float32 (variable, y, x): the fields at one time step and `lead` steps later.

    root         folder of <VARIABLE>_<YEAR>.nc files
    variables    which, in which order; None: all, by name
    years        which; None: all that are there
    across_years also take samples whose two ends lie in different years; the years must join without a gap
    normalise    True: by these files' own mean and standard deviation; a (mean, std) pair: by that; False: not at all
    allow_nan    accept missing values (they become NaN); otherwise they are an error
    preload      hold everything in memory: the eager way, for comparison
    transform    called as transform(x, y, when=(year, step)), returns the sample
    handles      how many files stay open in each process
    """

    def __init__(
        self,
        root: str | Path,
        variables: Sequence[str] | None = None,
        lead: int = 6,
        *,
        years: Sequence[int] | None = None,
        across_years: bool = False,
        normalise: bool | tuple[np.ndarray, np.ndarray] = True,
        allow_nan: bool = False,
        preload: bool = False,
        transform: Callable | None = None,
        handles: int = 256,
    ):
        if lead < 0:
            raise UserError(f"lead must not be negative, and is {lead}")
        self.root, self.lead, self.transform = Path(root), lead, transform
        self.normalise, self.allow_nan, self.handles = normalise, allow_nan, handles
        files = find_files(root)
        self.years = list(years) if years is not None else list(files)
        self.variables = list(variables) if variables else sorted(set().union(*files.values()))
        self.headers = [[self._header(files, year, name) for name in self.variables] for year in self.years]
        self._check_shapes()
        self.shape = self.headers[0][0].shape[1:]
        if across_years:
            self._check_joined()
        # A run is a stretch of time in which samples may begin and end: one year, or all of them joined.
        steps = [row[0].shape[0] for row in self.headers]
        self.year_starts = [0, *accumulate(steps)]  # in time steps over all years
        self.run_starts = [0, self.year_starts[-1]] if across_years else self.year_starts
        self.sample_starts = [0, *accumulate(max(0, b - a - lead) for a, b in pairwise(self.run_starts))]
        if not len(self):
            raise UserError(f"{root}: no year has more than lead={lead} time steps; ask for a shorter lead")
        self._forget()
        self.memory = self._preload() if preload else None

    def _header(self, files: dict[int, dict[str, Path]], year: int, name: str) -> Header:
        path = files.get(year, {}).get(name)
        if path is None:
            raise UserError(
                f"{self.root / f'{name}_{year}.nc'} is missing; make or copy it, or leave out "
                + (f"variable {name} or year {year}" if year in files else f"year {year}")
            )
        return read_header(path, name)

    def _check_shapes(self) -> None:
        first = self.headers[0][0]
        for row in self.headers:
            for header in row:
                for what, mine, theirs, other in (
                    ("a grid of", header.shape[1:], first.shape[1:], first),
                    ("the calendar", header.calendar, first.calendar, first),
                    ("time steps", header.shape[0], row[0].shape[0], row[0]),
                    ("time units", header.time_units, row[0].time_units, row[0]),
                ):
                    if mine != theirs:
                        raise UserError(
                            f"{header.path} has {what} {mine}, but {other.path} has {theirs}; "
                            "make one of them again or leave it out"
                        )

    def _check_joined(self) -> None:
        times = [read_times(row[0]) for row in self.headers]
        step = max(second - first for first, second, _ in times)  # a year may have one step only
        for (_, _, last), (first, _, _), row in zip(times, times[1:], self.headers[1:]):
            if abs(first - last - step) > step / 2:  # months differ in length
                raise UserError(
                    f"{row[0].path} starts at {first}, but the year before ends at {last}: "
                    "add what lies between, or leave out across_years"
                )

    def __len__(self) -> int:
        return self.sample_starts[-1]

    def locate(self, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Sample number → ((year, step) of x, (year, step) of y), the years counted from 0."""
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        run = bisect_right(self.sample_starts, index) - 1
        now = self.run_starts[run] + index - self.sample_starts[run]
        year = bisect_right(self.year_starts, now) - 1
        then = now + self.lead
        later = year if then < self.year_starts[year + 1] else bisect_right(self.year_starts, then) - 1
        return (year, now - self.year_starts[year]), (later, then - self.year_starts[later])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        now, then = self.locate(index)
        scale, shift = (1, 0) if self.normalise is False else self._affine  # first: it finds the missing values, too
        sample = torch.empty(2, len(self.variables), *self.shape)  # x and y side by side
        fields = sample.numpy()
        self._read(*now, fields[0])
        self._read(*then, fields[1])
        if self.normalise is not False:
            sample.mul_(scale).add_(shift)
        x, y = sample
        return (x, y) if self.transform is None else self.transform(x, y, when=(self.years[now[0]], now[1]))

    def _read(self, year: int, step: int, out: np.ndarray) -> None:
        if self.memory is not None:
            for variable, field in enumerate(self.memory[year]):
                out[variable] = field[step]
        else:
            for reader, field in zip(self._readers(year), out):
                self._fill(field, reader, step)

    def _fill(self, out: np.ndarray, reader: Reader, step: int) -> None:
        reader.read(step, out)
        if reader.mask and not self.allow_nan and not np.isfinite(out).all():
            raise UserError(f"{reader.header.path} lacks values in time step {step}; fill them, or pass allow_nan=True")

    # ---- normalisation -------------------------------------------------------------------------------------------------

    @cached_property
    def normalisation(self) -> tuple[np.ndarray, np.ndarray]:
        """(mean, std) of each variable; the first call may pass over the files, later ones read stats.json."""
        found = stats.of_files(self.root, [header for row in self.headers for header in row])
        self._check_missing(found)
        if not isinstance(self.normalise, bool):
            return self.normalise
        merged = []
        for column in zip(*self.headers):
            total = stats.Stats()
            for header in column:
                total = total.merge(found[header.path])
            merged.append((total.mean, total.std or 1.0))
        mean, std = np.array(merged).T
        return mean, std

    @cached_property
    def _affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalising is value × scale + shift, shaped to broadcast over (variable, y, x)."""
        mean, std = self.normalisation
        if len(mean) != len(self.variables):
            raise UserError(f"normalise has {len(mean)} means for {len(self.variables)} variables")
        scale, shift = 1 / np.asarray(std), -np.asarray(mean) / np.asarray(std)
        return tuple(torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (scale, shift))

    def _check_missing(self, found: dict[Path, stats.Stats]) -> None:
        for path, entry in found.items():
            if entry.missing and not self.allow_nan:
                raise UserError(f"{path} has {entry.missing} missing values; fill them, or pass allow_nan=True")

    # ---- open files ----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._lock, self._open = threading.Lock(), OrderedDict()
        self._pid = os.getpid()  # last: to another thread it says that the rest is set

    def _readers(self, year: int) -> list[Reader]:
        """One year's open files: opened on first touch in this process, the least recently used year closed for it."""
        if self._pid != os.getpid():  # forked: let go of the parent's handles, or HDF5 would go on using them
            self._forget()
        with self._lock:
            readers = self._open.get(year)
            if readers is None:
                readers = self._open[year] = [open_reader(h, mask=self._may_miss(h)) for h in self.headers[year]]
                if len(self._open) > max(1, self.handles // len(self.variables)):
                    self._open.popitem(last=False)  # closed when the last thread that reads from it is done
            else:
                self._open.move_to_end(year)
            return readers

    def _may_miss(self, header: Header) -> bool:
        """A file known to have no missing values needs no search for them."""
        return header.path not in self._known or self._known[header.path].missing > 0

    @cached_property
    def _known(self) -> dict[Path, stats.Stats]:
        """What stats.json has on these files."""
        known = stats.known(self.root, [header for row in self.headers for header in row])
        self._check_missing(known)
        return known

    def _preload(self) -> list[list[np.ndarray]]:
        memory = [[np.empty(header.shape, np.float32) for header in row] for row in self.headers]
        for row, arrays in zip(self.headers, memory):
            for header, array in zip(row, arrays):
                reader = open_reader(header)
                for step in range(len(array)):
                    self._fill(array[step], reader, step)
        return memory

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_open", "_pid")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()
