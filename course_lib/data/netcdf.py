"""One NetCDF file of one variable and one year: its header, and the fastest safe way to read a time step of it.

An uncompressed, contiguous variable is read by `pread` at the byte offset that HDF5 reports: no library in the way, no lock,
no private memory. Chunked and compressed variables go through h5py, classic NetCDF-3 files through netCDF4.
"""

import os
import re
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import netCDF4
import numpy as np

from course_lib.config import UserError

_SHUFFLE, _DEFLATE = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE
_LOCK = threading.RLock()  # HDF5 is not thread-safe, and conda's netCDF4 and h5py share one


def _fresh_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)  # another thread may have held it when we forked


@dataclass(frozen=True)
class Header:
    """What one file says about itself."""

    path: Path
    variable: str
    shape: tuple[int, int, int]  # (time, y, x)
    dtype: np.dtype
    scale: float | np.floating  # as the file has it: in float32 or in float64
    offset: float | np.floating
    missing: tuple[float, ...]  # stored values that mean "no value"
    time_units: str
    calendar: str
    storage: tuple  # ("contiguous",), ("chunked", chunk sizes) or ("classic",)
    size: int  # of the file, in bytes

    @property
    def plain(self) -> bool:
        """Stored just as we want it: native float32, not packed."""
        return self.dtype == np.float32 and self.dtype.isnative and (self.scale, self.offset) == (1.0, 0.0)

    def unpack(self, raw: np.ndarray, out: np.ndarray, *, mask: bool) -> None:
        """Turn stored values into float32 ones; with `mask`, NaN where the file has no value."""
        packed = (self.scale, self.offset) != (1.0, 0.0)
        np.copyto(out, raw * self.scale + self.offset if packed else raw, casting="unsafe")
        for value in self.missing if mask else ():
            out[raw == value] = np.nan


def _broken(path: Path, error: object) -> UserError:
    return UserError(
        f"{path} can't be read ({error}): it is truncated, corrupt or no NetCDF file; make or copy it again"
    )


def _pick(variables: Mapping, path: Path, name: str):
    """The variable called as the file is, or the only one with a time and two space dimensions."""
    if getattr(found := variables.get(name), "ndim", 0):
        return found
    fields = {key: variable for key, variable in variables.items() if getattr(variable, "ndim", 0) >= 3}
    alike = [variable for key, variable in fields.items() if key.casefold() == name.casefold()] or [*fields.values()]
    if len(alike) != 1:
        have = ", ".join(variables) or "none"
        raise UserError(f"{path} holds no variable {name} (it has {have}): rename the file or the variable")
    return alike[0]


def _variables(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Without the groups, and without the dimensions that HDF5 shows as if they were variables."""
    mark = b"This is a netCDF dimension but not a netCDF variable"
    sets = {name: found for name, found in file.items() if isinstance(found, h5py.Dataset)}
    return {name: found for name, found in sets.items() if mark not in np.bytes_(found.attrs.get("NAME", b""))}


def _attributes(stored: h5py.Dataset, *names: str) -> dict:
    return {name: stored.attrs[name] for name in names if name in stored.attrs}  # `get` is slow to find nothing


def _value(attributes: Mapping, name: str, default):
    """An attribute as one value: HDF5 may hold it in an array of one, a text as bytes or as nothing at all."""
    value = attributes.get(name, default)
    value = default if isinstance(value, h5py.Empty) else np.ravel(value)[0] if np.ndim(value) else value
    return value.decode() if isinstance(value, bytes) else value


def _make_header(path: Path, stored, attributes: Mapping, time: Mapping, *, dtype: np.dtype, storage: tuple) -> Header:
    """A header of what either library found; `attributes` are the variable's, `time` its first dimension's."""
    name, shape = stored.name.lstrip("/"), stored.shape
    if len(shape) < 3 or np.prod(shape[1:-2], dtype=int) != 1:
        raise UserError(f"{path}: {name} must have the shape (time, y, x), and has {shape}; leave it out")
    default = netCDF4.default_fillvals.get(dtype.str[1:])
    missing = [attributes.get("_FillValue", default), attributes.get("missing_value")]  # some name several
    missing = np.hstack([value for value in missing if value is not None] or [[]]).astype(dtype)
    return Header(
        path=path,
        variable=name,
        shape=(shape[0], *shape[-2:]),
        dtype=dtype,
        scale=_value(attributes, "scale_factor", 1.0),
        offset=_value(attributes, "add_offset", 0.0),
        missing=tuple(np.unique(missing).tolist()),
        time_units=str(_value(time, "units", "")),
        calendar=re.sub("^gregorian$", "standard", str(_value(time, "calendar", "standard"))),
        storage=storage,
        size=path.stat().st_size,
    )


def _hdf5_header(path: Path, variable: str) -> Header:
    """By h5py, which reads a few hundred bytes for it: to open a file, netCDF4 reads the first 4 MiB."""
    with h5py.File(path, "r", locking=False) as file:
        stored = _pick(file if variable in file else _variables(file), path, variable)
        coordinates = stored.attrs.get("DIMENSION_LIST", [[]])[0]
        time = _attributes(file[coordinates[0]], "units", "calendar") if len(coordinates) else {}
        attributes = _attributes(stored, "_FillValue", "missing_value", "scale_factor", "add_offset")
        storage = ("contiguous",) if stored.chunks is None else ("chunked", stored.chunks)
        return _make_header(path, stored, attributes, time, dtype=stored.dtype, storage=storage)


def _classic_header(path: Path, variable: str) -> Header:
    with netCDF4.Dataset(path) as dataset:
        size = path.stat().st_size
        if size < sum(v.size * v.dtype.itemsize for v in dataset.variables.values()):
            raise OSError(f"its {size} bytes can't hold its variables")
        stored = _pick(dataset.variables, path, variable)
        time = dataset.variables.get(stored.dimensions[0]) if stored.ndim else None
        dtype = np.dtype(stored.dtype).newbyteorder({"big": ">", "little": "<"}.get(stored.endian(), "="))
        return _make_header(path, stored, vars(stored), vars(time) if time else {}, dtype=dtype, storage=("classic",))


def read_header(path: Path, variable: str) -> Header:
    """Read one file's header and none of its data."""
    try:
        with _LOCK:
            return (_hdf5_header if h5py.is_hdf5(path) else _classic_header)(path, variable)
    except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as error:
        raise _broken(path, error) from error


def read_times(header: Header) -> list:
    """The first two and the last time stamps, to see whether two years join without a gap."""
    try:
        with _LOCK, netCDF4.Dataset(header.path) as dataset:
            time = dataset.variables[dataset.variables[header.variable].dimensions[0]]
            values = np.asarray(time[:])[[0, min(1, len(time) - 1), -1]]
            return list(netCDF4.num2date(values, header.time_units, header.calendar))
    except (OSError, RuntimeError) as error:
        raise _broken(header.path, error) from error
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{header.path} needs a time coordinate to join it to another year ({error}): add one"
        ) from error


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
        if self.offset is None:
            raise OSError(f"{self.header.variable} was never written")
        self.step_bytes = int(np.prod(self.header.shape[1:])) * self.header.dtype.itemsize
        self.descriptor = os.open(self.header.path, os.O_RDONLY | os.O_CLOEXEC)

    def stored(self, step: int, out: np.ndarray) -> None:
        if os.preadv(self.descriptor, (out,), self.offset + step * self.step_bytes) != self.step_bytes:
            raise _broken(self.header.path, f"it ends within time step {step}")

    def __del__(self):
        if self.descriptor is not None:
            os.close(self.descriptor)


class ChunkedReader(Reader):
    """HDF5 finds the chunk. Where a chunk is one time step, we unpack it ourselves, so that nobody waits for its lock.

    Else HDF5 unpacks and joins the chunks, too; its cache holds what one time step touches, and no more.
    """

    def open(self) -> None:
        *_, chunks = self.header.storage
        covering = [-(-n // c) * c for n, c in zip(self.header.shape[-2:], chunks[-2:])]
        cache = chunks[0] * int(np.prod(covering)) * self.header.dtype.itemsize if chunks[0] > 1 else 0
        self.file = h5py.File(self.header.path, "r", rdcc_nbytes=cache, locking=False)
        self.dataset = self.file[self.header.variable].id
        self.space = self.dataset.get_space()
        self.count = (1, *self.space.shape[1:])
        self.memory = h5py.h5s.create_simple(self.count)
        made = self.dataset.get_create_plist()
        self.filters = [made.get_filter(number)[0] for number in range(made.get_nfilters())]
        self.by_step = chunks == self.count and self.filters in ([], [_DEFLATE], [_SHUFFLE, _DEFLATE])

    def stored(self, step: int, out: np.ndarray) -> None:
        start = (step,) + (0,) * (len(self.count) - 1)
        try:
            if self.by_step and self._unpacked(start, np.frombuffer(out, np.uint8)):
                return
            with _LOCK:
                self.space.select_hyperslab(start, self.count)
                self.dataset.read(self.memory, self.space, out)
        except (OSError, RuntimeError, ValueError, zlib.error) as error:
            raise _broken(self.header.path, error) from error

    def _unpacked(self, start: tuple[int, ...], out: np.ndarray) -> bool:
        """Fetch one chunk and undo its filters; False where that is for HDF5 to do."""
        try:
            with _LOCK:
                skipped, chunk = self.dataset.read_direct_chunk(start, out=None if self.filters else out)
        except (OSError, RuntimeError):  # such as a chunk that was never written
            return False
        if self.filters and not skipped:
            values = np.frombuffer(zlib.decompress(chunk, bufsize=out.size), np.uint8)
            width = self.header.dtype.itemsize if _SHUFFLE in self.filters else 1
            for byte, plane in enumerate(values.reshape(width, -1)):  # shuffled: first all first bytes, then all second
                out[byte::width] = plane
        return not skipped


class ClassicReader(Reader):
    """NetCDF-3, which is no HDF5 file. Beyond its end the library reads zeros, so we look at the size ourselves."""

    dataset = None

    def open(self) -> None:
        self.dataset = netCDF4.Dataset(self.header.path)
        self.variable = self.dataset.variables[self.header.variable]
        self.variable.set_auto_maskandscale(False)

    def stored(self, step: int, out: np.ndarray) -> None:
        try:
            with _LOCK:
                out[...] = self.variable[step].reshape(out.shape)
            if (size := os.stat(self.header.path).st_size) < self.header.size:
                raise OSError(f"it had {self.header.size} bytes, and has {size}")
        except (OSError, RuntimeError) as error:
            raise _broken(self.header.path, error) from error

    def __del__(self):
        if self.dataset is not None:
            with _LOCK:  # closing is a call like any other; left to the garbage collector, it comes late and unlocked
                self.dataset.close()


def open_reader(header: Header, *, mask: bool = True) -> Reader:
    """Open a file for reading; `mask` looks for missing values and makes them NaN."""
    kind, *_ = header.storage
    readers = {"contiguous": ContiguousReader, "chunked": ChunkedReader, "classic": ClassicReader}
    try:
        with _LOCK:
            return readers[kind](header, mask=mask)
    except (OSError, RuntimeError, KeyError) as error:
        raise _broken(header.path, error) from error
