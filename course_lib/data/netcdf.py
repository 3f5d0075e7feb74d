"""What one NetCDF file of one variable and one year says about itself; readers.py reads its time steps."""

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import netCDF4
import numpy as np

from course_lib.config import UserError

_LOCK = threading.RLock()  # HDF5 is not thread-safe, and conda's netCDF4 and h5py share one


def _fresh_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)  # another thread may have held it when we forked


def hdf5_lock() -> threading.RLock:
    """To be held in every call of h5py and netCDF4."""
    return _LOCK


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


def broken(path: Path, error: object) -> UserError:
    """What to say of a file that can't be read."""
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
        with hdf5_lock():
            return (_hdf5_header if h5py.is_hdf5(path) else _classic_header)(path, variable)
    except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as error:
        raise broken(path, error) from error


def read_times(header: Header) -> list:
    """The first two and the last time stamps, to see whether two years join without a gap."""
    try:
        with hdf5_lock(), netCDF4.Dataset(header.path) as dataset:
            time = dataset.variables[dataset.variables[header.variable].dimensions[0]]
            values = np.asarray(time[:])[[0, min(1, len(time) - 1), -1]]
            return list(netCDF4.num2date(values, header.time_units, header.calendar))
    except (OSError, RuntimeError) as error:
        raise broken(header.path, error) from error
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{header.path} needs a time coordinate to join it to another year ({error}): add one"
        ) from error
