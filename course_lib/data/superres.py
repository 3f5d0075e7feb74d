"""Super-resolution: the fine field from its average over 4 × 4 grid points.

The honest baseline is bicubic interpolation plus the mean of what it got wrong in each month of the training years: mountains
and coasts stay where they are. The UNet starts from that baseline and learns the rest.
"""

import torch
from torch.nn import functional as F

from course_lib.data.years import YearsDataset


class SuperResolution:
    """A transform of YearsDataset(lead=0): (x, y) → (interpolated and corrected field with its correction, fine field)."""

    def __init__(self, factor: int = 4):
        self.factor = factor
        self.correction: torch.Tensor | None = None  # (time of year or day, variable, y, x)

    def interpolate(self, fine: torch.Tensor) -> torch.Tensor:
        """Average over blocks, then interpolate back: all that is left of a fine field. (variable, y, x)"""
        coarse = F.avg_pool2d(fine[None], self.factor, ceil_mode=True)
        rows, columns = fine.shape[-2:]
        size = (coarse.shape[-2] * self.factor, coarse.shape[-1] * self.factor)
        return F.interpolate(coarse, size=size, mode="bicubic", align_corners=False)[0, :, :rows, :columns]

    def fit(self, dataset: YearsDataset, *, period: int = 12) -> "SuperResolution":
        """Learn the mean error of each month (or hour) in one streaming pass over a dataset without transform."""
        counts = torch.zeros(period, 1, 1, 1)
        sums = torch.zeros(period, len(dataset.variables), *dataset.shape)
        for index in range(len(dataset)):
            (_, step), _ = dataset.locate(index)
            fine, _ = dataset[index]
            sums[step % period] += fine - self.interpolate(fine)
            counts[step % period] += 1
        self.correction = sums / counts.clamp(min=1)
        return self

    def __call__(self, x: torch.Tensor, y: torch.Tensor, when: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        blurred = self.interpolate(x)
        if self.correction is None:
            return blurred, y
        correction = self.correction[when[1] % len(self.correction)]
        return torch.cat([blurred + correction, correction]), y
