"""Figures of scaling: speed-up and efficiency, messages and their model, predictions with bands, results against ranks."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from course_lib.figure import COLOURS, GREY, new_axes, plain_ticks


def _ranks_axis(axis: Axes, ranks: Sequence[int]) -> None:
    """1, 2, 4, … as they are, evenly spaced when they double."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [f"{n:,}" for n in ranks])
    axis.xaxis.set_minor_locator(NullLocator())


def speed_up(rows: Sequence[Mapping], predicted: Mapping[str, Mapping[int, float]] | None = None) -> None:
    """Show the figure of draw_speed_up."""
    draw_speed_up(rows, predicted)
    plt.show()


def draw_speed_up(rows: Sequence[Mapping], predicted: Mapping[str, Mapping[int, float]] | None = None) -> Figure:
    """Speed-up and efficiency against ranks, with what would be ideal; a line a strategy, bars show the spread over seeds.

    predicted: {what the model calls it: {ranks: speed-up}}, drawn with dashes.
    """
    figure, (left, right) = new_axes(columns=2)
    every = sorted({row["ranks"] for row in rows} | {n for line in (predicted or {}).values() for n in line})
    left.plot(every, every, "--", color=GREY, label="ideal")
    right.axhline(100, color=GREY, linestyle="--")
    colours = iter(COLOURS)
    for strategy in dict.fromkeys(row.get("strategy", "measured") for row in rows):
        mine = [row for row in rows if row.get("strategy", "measured") == strategy]
        ranks, colour = [row["ranks"] for row in mine], next(colours)
        values, errors = [row["speed_up"] for row in mine], [row.get("speed_up_spread", 0) for row in mine]
        left.errorbar(ranks, values, errors, fmt="o-", capsize=3, color=colour, label=f"{strategy}, measured")
        share = [100 * value / n for value, n in zip(values, ranks)]
        right.errorbar(ranks, share, [100 * e / n for e, n in zip(errors, ranks)], fmt="o-", capsize=3, color=colour)
    for (name, line), colour in zip((predicted or {}).items(), colours):
        left.plot(list(line), list(line.values()), "s:", color=colour, label=name)
        right.plot(list(line), [100 * value / n for n, value in line.items()], "s:", color=colour)
    left.set(xlabel="ranks", ylabel="speed-up")
    right.set(xlabel="ranks", ylabel="efficiency (%)", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks(every)
    left.legend(frameon=False, fontsize=9)
    return figure


def messages(measured: Sequence[Mapping], predict: Callable[[int, int], float], mark: int) -> None:
    """The time of all-reduces against their size, for several numbers of ranks: median and range, and the model's lines.

    measured: rows of a probe; predict(ranks, bytes): seconds; mark: the bytes of the message that matters here.
    """
    figure, axis = new_axes()
    for ranks, colour in zip(sorted({row["ranks"] for row in measured}), COLOURS):
        rows = [row for row in measured if row["ranks"] == ranks]
        sizes, middle = [row["bytes"] for row in rows], [1e3 * statistics.median(row["seconds"]) for row in rows]
        low = [m - 1e3 * min(row["seconds"]) for m, row in zip(middle, rows)]
        high = [1e3 * max(row["seconds"]) - m for m, row in zip(middle, rows)]
        axis.errorbar(sizes, middle, (low, high), fmt="o", capsize=3, color=colour, label=f"{ranks} ranks")
        axis.plot(sizes, [1e3 * predict(ranks, size) for size in sizes], "--", color=colour)
    axis.axvline(mark, color=GREY, linewidth=1, label="our gradients")
    axis.set(xlabel="bytes", ylabel="all-reduce (ms)", xscale="log", yscale="log")
    axis.set_xscale("log", base=2)
    ticks = sorted({row["bytes"] for row in measured})
    axis.set_xticks(ticks, [f"{t // 2**20} MiB" if t >= 2**20 else f"{t // 2**10} KiB" for t in ticks], fontsize=9)
    axis.xaxis.set_minor_locator(NullLocator())
    plain_ticks(axis.yaxis)
    axis.plot([], [], "--", color=GREY, label="α–β model")
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()


def outlook(
    lines: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    *,
    ylabel: str,
    logarithmic: bool = False,
) -> None:
    """Predictions against ranks that double, each with the band in which it lies if the measurements were drawn again."""
    figure, axis = new_axes()
    for (name, (ranks, values)), colour in zip(lines.items(), COLOURS):
        axis.plot(ranks, values, "o-", color=colour, label=name, markersize=4)
        if bands and name in bands:
            axis.fill_between(ranks, *bands[name], color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="ranks", ylabel=ylabel)
    if logarithmic:
        axis.set_yscale("log")
        plain_ticks(axis.yaxis)
    else:
        axis.set_ylim(bottom=0)
    _ranks_axis(axis, max((ranks for ranks, _ in lines.values()), key=len))
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()


def against(panels: Mapping[str, Mapping[str, tuple]], *, xlabel: str) -> None:
    """Panels side by side, {ylabel: {name: (x, y) or (x, y, spread)}}: points with bars that show the spread."""
    figure, axes = new_axes(columns=len(panels), squeeze=False)
    for axis, (ylabel, series) in zip(axes[0], panels.items()):
        for (name, (x, y, *spread)), colour in zip(series.items(), COLOURS):
            look = {"fmt": "--", "color": GREY} if name == "ideal" else {"fmt": "o-", "color": colour}
            axis.errorbar(x, y, *spread, capsize=3, label=name, markersize=4, **look)
        axis.set(xlabel=xlabel, ylabel=ylabel)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(series) > 1:
            axis.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series))
    plt.show()
