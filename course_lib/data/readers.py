"""The fastest safe way to read a time step of one file.

An uncompressed, contiguous variable is read by `pread` at the byte offset that HDF5 reports: no library in the way, no lock,
no private memory. Chunked and compressed variables go through h5py, classic NetCDF-3 files through netCDF4.
"""

import abc
import os
import zlib

import h5py
import netCDF4
import numpy as np

from course_lib.data.netcdf import Header, broken, hdf5_lock

_SHUFFLE, _DEFLATE = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE


class Reader(abc.ABC):
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

    @abc.abstractmethod
    def open(self) -> None:
        """Open the file and find out where its values lie."""

    @abc.abstractmethod
    def stored(self, step: int, out: np.ndarray) -> None:
        """Fill `out` with one time step as it is stored."""


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
            raise broken(self.header.path, f"it ends within time step {step}")

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
            with hdf5_lock():
                self.space.select_hyperslab(start, self.count)
                self.dataset.read(self.memory, self.space, out)
        except (OSError, RuntimeError, ValueError, zlib.error) as error:
            raise broken(self.header.path, error) from error

    def _unpacked(self, start: tuple[int, ...], out: np.ndarray) -> bool:
        """Fetch one chunk and undo its filters; False where that is for HDF5 to do."""
        try:
            with hdf5_lock():
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
            with hdf5_lock():
                out[...] = self.variable[step].reshape(out.shape)
            if (size := os.stat(self.header.path).st_size) < self.header.size:
                raise OSError(f"it had {self.header.size} bytes, and has {size}")
        except (OSError, RuntimeError) as error:
            raise broken(self.header.path, error) from error

    def __del__(self):
        if self.dataset is not None:
            with (
                hdf5_lock()
            ):  # closing is a call like any other; left to the garbage collector, it comes late and unlocked
                self.dataset.close()


def open_reader(header: Header, *, mask: bool = True) -> Reader:
    """Open a file for reading; `mask` looks for missing values and makes them NaN."""
    kind, *_ = header.storage
    readers = {"contiguous": ContiguousReader, "chunked": ChunkedReader, "classic": ClassicReader}
    try:
        with hdf5_lock():
            return readers[kind](header, mask=mask)
    except (OSError, RuntimeError, KeyError) as error:
        raise broken(header.path, error) from error
