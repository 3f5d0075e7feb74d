"""How noisy a gradient is, and from which batch size on a larger batch hardly helps.

Every batch of b samples gives the true gradient G plus noise whose variance falls as 1/b. Where noise and gradient are of
equal length lies the *gradient noise scale*: far below it, twice the batch lets you go twice as far in a step; far above, it
only costs (McCandlish et al., An Empirical Model of Large-Batch Training, 2018).
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn


def gradient(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], measure: Callable) -> torch.Tensor:
    """All of a model's gradients on one batch, as one long vector."""
    x, y = batch
    parts = torch.autograd.grad(measure(model(x), y), list(model.parameters()))
    return torch.cat([part.flatten() for part in parts]).double()


def noise_scale(gradients: Iterable[torch.Tensor], batch: int) -> float:
    """The noise scale in samples, from the gradients of several batches of this size.

    The mean of m gradients still has 1/m of their noise in it, which is taken off again: both estimates are unbiased.
    """
    found = torch.stack(list(gradients))
    noise = found.var(dim=0).sum()  # of a batch, over all directions
    signal = found.mean(dim=0).square().sum() - noise / len(found)
    return float(batch * noise / signal) if signal > 0 else float("inf")  # lost in the noise: take more batches
