"""What all figures share: colours that everybody can tell apart, axes without a box, a readable logarithmic scale."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#8C8C8C",
)  # Okabe and Ito
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW)


def new_axes(width: float = 8.0, height: float = 3.0, columns: int = 1, **options) -> tuple:
    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", **options)
    for axis in np.ravel(axes):
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plain_ticks(axis: Axis) -> None:
    """A logarithmic axis with 1, 2, 5, 10, … written out."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())
