"""One function a figure: labelled axes with units, colours that everybody can tell apart, readable at notebook width."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from course_lib.figure import BLUE, COLOURS, GREY, RED, new_axes, plain_ticks
from course_lib.scaling_plots import against as against
from course_lib.scaling_plots import draw_speed_up as draw_speed_up
from course_lib.scaling_plots import messages as messages
from course_lib.scaling_plots import outlook as outlook
from course_lib.scaling_plots import speed_up as speed_up
from course_lib.timeline_plots import collective as collective
from course_lib.timeline_plots import rounds as rounds
from course_lib.timeline_plots import schedules as schedules
from course_lib.timeline_plots import timeline as timeline
from course_lib.timeline_plots import timelines as timelines


def fields(panels: Mapping[str, np.ndarray], *, units: str = "", alike: bool = True, columns: int = 4) -> None:
    """Maps side by side; `alike` gives them one colour scale, so that they can be compared."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    tall = next(iter(panels.values())).shape[0] / next(iter(panels.values())).shape[1]
    size = (2.5 * columns + 0.8, rows * (2.5 * tall + 0.6))
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    low = min(float(np.min(panel)) for panel in panels.values())
    high = max(float(np.max(panel)) for panel in panels.values())
    for axis, (name, panel) in zip(axes.flat, panels.items()):
        image = axis.imshow(panel, cmap="viridis", **({"vmin": low, "vmax": high} if alike else {}))
        axis.set_title(name, fontsize=10)
        axis.set(xticks=[], yticks=[])
        if not alike:
            figure.colorbar(image, ax=axis, shrink=0.8)
    if alike:
        figure.colorbar(image, ax=axes, label=units)
    elif units:
        figure.suptitle(units)
    plt.show()


def thumbnails(images: np.ndarray, titles: Sequence[object], *, columns: int = 10) -> None:
    """Small grey images in rows, dark on white as on paper, each with a title."""
    rows = -(-len(images) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(0.8 * columns, 1.05 * rows), layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, image, title in zip(axes.flat, images, titles):
        axis.imshow(image, cmap="gray_r")
        axis.set_title(title, fontsize=9)
    plt.show()


def losses(events: Sequence[dict], *, references: Mapping[str, float] | None = None) -> None:
    """A run's training and validation loss against its steps, from its log, with levels to beat."""
    figure, axis = new_axes()
    steps = [event for event in events if event["event"] == "step"]
    axis.plot([e["step"] for e in steps], [e["loss"] for e in steps], color=BLUE, label="training, this batch")
    evaluations = [event for event in events if event["event"] == "eval"]
    axis.plot([e["step"] for e in evaluations], [e["loss"] for e in evaluations], "o", color=RED, label="held-out year")
    for (name, level), style in zip((references or {}).items(), ("--", ":", "-.")):
        axis.axhline(level, color=GREY, linestyle=style, label=name)
    axis.set(xlabel="step", ylabel="mean squared error\n(standardised)", yscale="log")
    plain_ticks(axis.yaxis)
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()


def grouped_bars(groups: Mapping[str, Mapping[str, float]], *, ylabel: str, title: str = "") -> None:
    """Bars in groups: {series: {group: value}}."""
    figure, axis = new_axes()
    names = list(next(iter(groups.values())))
    width = 0.8 / len(groups)
    for number, (series, values) in enumerate(groups.items()):
        places = np.arange(len(names)) + (number - (len(groups) - 1) / 2) * width
        drawn = axis.bar(places, [values[name] for name in names], width, color=COLOURS[number], label=series)
        axis.bar_label(drawn, fmt="%.2g", fontsize=8)
    axis.set_xticks(range(len(names)), names)
    axis.set(ylabel=ylabel, title=title)
    axis.legend(frameon=False, fontsize=9, ncols=len(groups), loc="upper center", bbox_to_anchor=(0.5, 1.2))
    plt.show()


def bars(
    values: Mapping[str, float], *, xlabel: str, logarithmic: bool = False, spread: Mapping[str, float] | None = None
) -> None:
    """Horizontal bars in the order given, each with its value, and how far it strays where that is known."""
    figure, axis = new_axes(height=0.4 * len(values) + 0.9)
    names, lengths = list(values)[::-1], list(values.values())[::-1]
    errors = [spread[name] for name in names] if spread else None
    drawn = axis.barh(names, lengths, xerr=errors, color=BLUE, error_kw={"capsize": 3, "ecolor": GREY})
    axis.bar_label(drawn, [f" {value:,.0f}" if value >= 100 else f" {value:.3g}" for value in lengths], fontsize=9)
    axis.set(xlabel=xlabel + " (logarithmic scale)" * logarithmic, xscale="log" if logarithmic else "linear")
    axis.margins(x=0.15)
    plt.show()


def shares(parts: Mapping[str, float], *, xlabel: str, title: str = "") -> None:
    """Horizontal bars, the longest on top, each with its share of the whole."""
    figure, axis = new_axes(height=0.35 * len(parts) + 1.0)
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: item[1])
    bars = axis.barh([name for name, _ in ordered], [value for _, value in ordered], color=BLUE)
    axis.bar_label(bars, [f" {value / total:.0%}" for _, value in ordered], fontsize=9)
    axis.set(xlabel=xlabel, title=title)
    axis.margins(x=0.1)
    plt.show()


def curves(series: Mapping[str, tuple], *, xlabel: str, ylabel: str, logarithmic: bool = False) -> None:
    """Lines without regard to where zero is; with `logarithmic` both axes have that scale, and points are shown."""
    figure, axis = new_axes()
    for (name, (x, y)), colour in zip(series.items(), COLOURS):
        axis.plot(x, y, "o-" if logarithmic else "-", color=colour, label=name)
    scale = "log" if logarithmic else "linear"
    axis.set(xlabel=xlabel, ylabel=ylabel, xscale=scale, yscale=scale)
    if logarithmic:
        axis.xaxis.set_major_formatter("{x:g}")
        plain_ticks(axis.yaxis)
    axis.legend(frameon=False, fontsize=9)
    plt.show()


def lines(series: Mapping[str, tuple], *, xlabel: str, ylabel: str, dashed: Sequence[str] = ()) -> None:
    """Lines with points; those named in `dashed` are predictions."""
    figure, axis = new_axes()
    for (name, (x, y)), colour in zip(series.items(), COLOURS):
        axis.plot(x, y, "--" if name in dashed else "o-", color=colour, label=name)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, fontsize=9)
    plt.show()


def attempts(runs: Mapping[str, Sequence[dict]]) -> None:
    """How far each run was at which time, from logs with repeats: a line breaks off where the run was killed."""
    figure, axis = new_axes()
    for (name, events), colour in zip(runs.items(), COLOURS):
        begins = [number for number, event in enumerate(events) if event["event"] == "start"]
        for first, last in zip(begins, [*begins[1:], len(events)]):
            part = [event for event in events[first:last] if event["event"] in ("start", "step")]
            seconds = [event["time"] - events[0]["time"] for event in part]
            label = name if first == begins[0] else None
            axis.plot(seconds, [event["step"] for event in part], ".-", color=colour, label=label)
            if last < len(events):
                axis.plot(seconds[-1], part[-1]["step"], "X", color=RED, markersize=10)
    axis.set(xlabel="seconds since the run's first start", ylabel="step", ylim=(0, None))
    axis.legend(frameon=False, fontsize=9)
    plt.show()
