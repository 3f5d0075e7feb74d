"""The forecasts that a network has to beat."""

import torch


def persistence(x: torch.Tensor) -> torch.Tensor:
    """The weather stays as it is."""
    return x


class PixelRegression:
    """At every grid point its own linear regression of all variables on all variables, fitted by least squares."""

    def __init__(self, batches, ridge: float = 1e-3):
        self.coefficients = self._fit(batches, ridge)  # (y, x, variable + 1, variable)

    def _fit(self, batches, ridge: float) -> torch.Tensor:
        products, targets = 0.0, 0.0
        for x, y in batches:  # (batch, variable, y, x)
            inputs = self._inputs(x)
            products = products + torch.einsum("byxi,byxj->yxij", inputs, inputs)
            targets = targets + torch.einsum("byxi,bjyx->yxij", inputs, y.double())
        penalty = ridge * torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
        return torch.linalg.solve(products + penalty, targets)

    @staticmethod
    def _inputs(x: torch.Tensor) -> torch.Tensor:
        """All variables of a grid point and a one, in double precision: (batch, y, x, variable + 1)."""
        x = x.double().permute(0, 2, 3, 1)
        return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("byxi,yxij->bjyx", self._inputs(x), self.coefficients).float()
