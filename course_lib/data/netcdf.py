"""One NetCDF file of one variable and one year: its header, and the fastest safe way to read a time step of it.

An uncompressed, contiguous variable is read by `pread` at the byte offset that HDF5 reports: no library in the way, no lock,
no private memory. Chunked and compressed variables go through h5py, classic NetCDF-3 files through netCDF4.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import h5py
import netCDF4
import numpy as np

from course_lib.config import UserError

_LOCK = threading.Lock()  # HDF5 is not thread-safe, and conda's netCDF4 and h5py share one


def _fresh_lock() -> None:
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)  # another thread may have held it when we forked


@dataclass(frozen=True)
class Header:
    """What one file says about itself."""

    path: Path
    variable: str
    shape: tuple[int, int, int]  # (time, y, x)
    dtype: np.dtype
    scale: float
    offset: float
    missing: tuple[float, ...]  # stored values that mean "no value"
    time_units: str
    calendar: str
    storage: tuple  # ("contiguous",), ("chunked", chunk sizes) or ("classic",)

    @property
    def plain(self) -> bool:
        """Stored just as we want it: native float32, not packed."""
        return self.dtype == np.float32 and self.dtype.isnative and (self.scale, self.offset) == (1.0, 0.0)

    def unpack(self, raw: np.ndarray, out: np.ndarray, *, mask: bool) -> None:
        """Turn stored values into float32 ones; with `mask`, NaN where the file has no value."""
        np.copyto(out, raw, casting="unsafe")
        if (self.scale, self.offset) != (1.0, 0.0):
            out *= np.float32(self.scale)
            out += np.float32(self.offset)
        for value in self.missing if mask else ():
            out[raw == value] = np.nan


def _broken(path: Path, error: object) -> UserError:
    return UserError(
        f"{path} can't be read ({error}): it is truncated, corrupt or no NetCDF file; make or copy it again"
    )


def _pick(dataset: netCDF4.Dataset, path: Path, name: str) -> netCDF4.Variable:
    """The variable called as the file is, or the only one with a time and two space dimensions."""
    for key, variable in dataset.variables.items():
        if key.casefold() == name.casefold():
            return variable
    fields = [v for v in dataset.variables.values() if v.ndim >= 3]
    if len(fields) != 1:
        have = ", ".join(dataset.variables) or "none"
        raise UserError(f"{path} holds no variable {name} (it has {have}): rename the file or the variable")
    return fields[0]


def read_header(path: Path, variable: str) -> Header:
    """Read one file's header and none of its data."""
    try:
        with _LOCK, netCDF4.Dataset(path) as dataset:
            stored = _pick(dataset, path, variable)
            stored.set_auto_maskandscale(False)
            shape = stored.shape
            if len(shape) < 3 or np.prod(shape[1:-2], dtype=int) != 1:
                raise UserError(f"{path}: {variable} must have the shape (time, y, x), and has {shape}")
            attributes = {name: stored.getncattr(name) for name in stored.ncattrs()}
            time = dataset.variables.get(stored.dimensions[0])
            default = netCDF4.default_fillvals.get(np.dtype(stored.dtype).str[1:])
            missing = {attributes.get("_FillValue", default), attributes.get("missing_value")} - {None}
            chunks = stored.chunking()
            storage = ("contiguous",) if chunks == "contiguous" else ("chunked", tuple(chunks or ()))
            return Header(
                path=path,
                variable=stored.name,
                shape=(shape[0], *shape[-2:]),
                dtype=np.dtype(stored.dtype).newbyteorder({"big": ">", "little": "<"}.get(stored.endian(), "=")),
                scale=float(attributes.get("scale_factor", 1.0)),
                offset=float(attributes.get("add_offset", 0.0)),
                missing=tuple(sorted(np.asarray(value).astype(stored.dtype).item() for value in missing)),
                time_units=str(getattr(time, "units", "")),
                calendar=str(getattr(time, "calendar", "standard")).replace("gregorian", "standard"),
                storage=storage if dataset.disk_format == "HDF5" else ("classic",),
            )
    except (OSError, RuntimeError) as error:
        raise _broken(path, error) from error


def read_times(header: Header) -> list:
    """The first two and the last time stamps, to see whether two years join without a gap."""
    with _LOCK, netCDF4.Dataset(header.path) as dataset:
        time = dataset.variables[dataset.variables[header.variable].dimensions[0]]
        values = np.asarray(time[:])[[0, min(1, len(time) - 1), -1]]
        return list(netCDF4.num2date(values, header.time_units, header.calendar))


class Reader:
    """One open file. `read(step, out)` fills a float32 (y, x) array; closed when nobody holds it any more."""

    def __init__(self, header: Header, *, mask: bool):
        self.header, self.mask = header, mask
        self.plain = header.plain and not mask
        self.open()

    def read(self, step: int, out: np.ndarray) -> None:
        """Fill `out` with one time step in physical units."""
        if self.plain:  # nothing to unpack: the stored bytes are the sample's
            return self.stored(step, out)
        raw = np.empty(self.header.shape[1:], self.header.dtype)
        self.stored(step, raw)
        self.header.unpack(raw, out, mask=self.mask)

    def open(self) -> None:
        raise NotImplementedError

    def stored(self, step: int, out: np.ndarray) -> None:
        """Fill `out` with one time step as it is stored."""
        raise NotImplementedError


class ContiguousReader(Reader):
    """The bytes of a time step lie in one piece at a known offset."""

    descriptor = None

    def open(self) -> None:
        with h5py.File(self.header.path, "r", locking=False) as file:
            self.offset = file[self.header.variable].id.get_offset()
        self.step_bytes = int(np.prod(self.header.shape[1:])) * self.header.dtype.itemsize
        self.descriptor = os.open(self.header.path, os.O_RDONLY | os.O_CLOEXEC)

    def stored(self, step: int, out: np.ndarray) -> None:
        if os.preadv(self.descriptor, (out,), self.offset + step * self.step_bytes) != self.step_bytes:
            raise _broken(self.header.path, f"it ends within time step {step}")

    def __del__(self):
        if self.descriptor is not None:
            os.close(self.descriptor)


class ChunkedReader(Reader):
    """HDF5 finds, unpacks and joins the chunks. Its cache holds what one time step touches, and no more."""

    def open(self) -> None:
        *_, chunks = self.header.storage
        covering = [-(-n // c) * c for n, c in zip(self.header.shape[-2:], chunks[-2:])]
        cache = chunks[0] * int(np.prod(covering)) * self.header.dtype.itemsize if chunks[0] > 1 else 0
        self.file = h5py.File(self.header.path, "r", rdcc_nbytes=cache, locking=False)
        self.dataset = self.file[self.header.variable].id
        self.space = self.dataset.get_space()
        self.count = (1, *self.space.shape[1:])
        self.memory = h5py.h5s.create_simple(self.count)

    def stored(self, step: int, out: np.ndarray) -> None:
        try:
            with _LOCK:
                self.space.select_hyperslab((step,) + (0,) * (len(self.count) - 1), self.count)
                self.dataset.read(self.memory, self.space, out)
        except (OSError, RuntimeError) as error:
            raise _broken(self.header.path, error) from error


class ClassicReader(Reader):
    """NetCDF-3, which is no HDF5 file."""

    def open(self) -> None:
        self.dataset = netCDF4.Dataset(self.header.path)
        self.variable = self.dataset.variables[self.header.variable]
        self.variable.set_auto_maskandscale(False)

    def stored(self, step: int, out: np.ndarray) -> None:
        try:
            with _LOCK:
                out[...] = self.variable[step].reshape(out.shape)
        except (OSError, RuntimeError) as error:
            raise _broken(self.header.path, error) from error


def open_reader(header: Header, *, mask: bool = True) -> Reader:
    """Open a file for reading; `mask` looks for missing values and makes them NaN."""
    kind, *_ = header.storage
    readers = {"contiguous": ContiguousReader, "chunked": ChunkedReader, "classic": ClassicReader}
    try:
        with _LOCK:
            return readers[kind](header, mask=mask)
    except (OSError, RuntimeError, KeyError) as error:
        raise _broken(header.path, error) from error
