"""The four files of the full MNIST as their authors publish them, in the IDX format, packed by gzip or not.

A file begins with a magic number, which says how many dimensions there are; the length of each follows, in four bytes, the
high one first; then comes one byte a value.
"""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from course_lib.config import UserError

PREFIXES = {"train": "train", "valid": "t10k"}  # what MNIST calls its parts
STEMS = {"images": ("images-idx3-ubyte", "images.idx3-ubyte"), "labels": ("labels-idx1-ubyte", "labels.idx1-ubyte")}
DIMENSIONS = {"images": 3, "labels": 1}


def find(root: Path, part: str, kind: str) -> Path | None:
    """The file of this part and kind, whichever way it is spelled."""
    names = [f"{PREFIXES[part]}-{stem}{packed}" for stem in STEMS[kind] for packed in ("", ".gz")]
    return next((root / name for name in names if (root / name).is_file()), None)


def found_in(root: Path) -> bool:
    """Whether a folder holds any of the four."""
    return any(find(root, part, kind) for part in PREFIXES for kind in STEMS)


def load(root: Path, part: str, kind: str) -> np.ndarray:
    """One file's values as uint8: (image, row, column) or (image,)."""
    path = find(root, part, kind)
    if path is None:
        raise UserError(f"{root / f'{PREFIXES[part]}-{STEMS[kind][0]}'} is not there; MNIST has four files")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} can't be read ({error}); take it from MNIST again") from error
    count = DIMENSIONS[kind]
    if content[:4] != bytes([0, 0, 8, count]) or len(content) < 4 + 4 * count:  # 8: bytes without sign
        raise UserError(f"{path} is no IDX file of {count} dimensions; take it from MNIST again")
    shape = struct.unpack(f">{count}I", content[4 : 4 + 4 * count])
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * count)
    if len(values) != np.prod(shape, dtype=object):
        raise UserError(f"{path} has {len(values)} values where its head says {shape}; take it from MNIST again")
    return values.reshape(shape)
