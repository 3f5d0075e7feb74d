"""What a task's loss is, and how its results are judged.

A score turns a batch into sums; sums and counts of all batches and all ranks are added up before anything is divided. Each
loss is a mean over samples, so the mean over ranks with equal batches is the loss of the global batch.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

NAMES = {
    "iou": "IoU",
    "accuracy": "accuracy",
    "f1": "F1",
    "exact": "exact match",
}  # of the scores of which more is better


class SquaredError:
    """Of fields: the mean squared error, and each variable's root of it. `weight` says how much a grid point counts."""

    def __init__(self, variables: Sequence[str] = (), weight: torch.Tensor | None = None):
        self.variables, self.weight = variables, weight

    @staticmethod
    def loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(prediction, target)

    def sums(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        share = torch.ones(1, device=target.device) if self.weight is None else self.weight.to(target.device)
        errors = ((prediction - target).double().square() * share).sum(dim=(0, 2, 3))  # one a channel
        weights = share.expand(target.shape[-2:]).sum() * len(target)
        return torch.cat([errors, errors.new_tensor([weights, len(target)])])

    def result(self, sums: list[float]) -> dict:
        *errors, weights, count = sums
        mean = [error / weights for error in errors]
        rmse = [math.sqrt(m) for m in mean]
        named = dict(zip(self.variables, rmse)) if self.variables else rmse
        return {"loss": sum(mean) / len(mean), "rmse": named, "count": round(count)}


class Overlap:
    """Of masks: BCE + Dice as the loss, and the intersection over union (IoU) of all pixels together.

    A net's output is a logit: above zero means "nucleus". Dice is taken sample by sample: over a whole batch it would not be
    a mean of samples any more, and splitting the batch over ranks would change the gradient.
    """

    @classmethod
    def loss(cls, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cls.losses(prediction, target).mean()

    @staticmethod
    def losses(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """One a sample: binary cross entropy, and what is missing from a perfect (soft) overlap."""
        each = (1, 2, 3)
        entropy = F.binary_cross_entropy_with_logits(prediction, target, reduction="none").mean(dim=each)
        inside = prediction.sigmoid()
        common = (inside * target).sum(dim=each)
        dice = (2 * common + 1) / (inside.sum(dim=each) + target.sum(dim=each) + 1)  # an empty tile, left empty: 1
        return entropy + 1 - dice

    def sums(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found, real = prediction > 0, target > 0.5
        loss = self.losses(prediction, target).double().sum()
        return torch.stack([loss, (found & real).sum(), (found | real).sum(), loss.new_tensor(len(target))])

    def result(self, sums: list[float]) -> dict:
        loss, common, union, count = sums
        return {"loss": loss / count, "iou": common / union if union else 1.0, "count": round(count)}


class Accuracy:
    """Of classes: the cross entropy as the loss, and the share of samples whose class is found."""

    @staticmethod
    def loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(prediction, target)

    def sums(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(prediction, target, reduction="none").double().sum()
        return torch.stack([loss, (prediction.argmax(dim=1) == target).sum(), loss.new_tensor(len(target))])

    def result(self, sums: list[float]) -> dict:
        loss, right, count = sums
        return {"loss": loss / count, "accuracy": right / count, "count": round(count)}
