"""One function a figure: labelled axes with units, colours that everybody can tell apart, readable at notebook width."""

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from course_lib.timeline import Timeline

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
KINDS = {
    "load": ORANGE,
    "compute": BLUE,
    "forward": SKY,
    "backward": BLUE,
    "sync": "#D9D9D9",
    "update": PINK,
    "communicate": RED,
    "wait": GREY,
    "scatter": ORANGE,
    "replicate": RED,
    "apply": BLUE,
    "gather": GREEN,
    "reduce": PINK,
}
NAMES = {"sync": "wait for gradients", "wait": "wait for the other rank"}


def _axes(width: float = 8.0, height: float = 3.0, columns: int = 1, **options) -> tuple:
    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", **options)
    for axis in np.atleast_1d(axes):
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain_ticks(axis: Axis) -> None:
    """A logarithmic axis with 1, 2, 5, 10, … written out."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


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


def losses(events: Sequence[dict], *, references: Mapping[str, float] | None = None) -> None:
    """A run's training and validation loss against its steps, from its log, with levels to beat."""
    figure, axis = _axes()
    steps = [event for event in events if event["event"] == "step"]
    axis.plot([e["step"] for e in steps], [e["loss"] for e in steps], color=BLUE, label="training, this batch")
    evaluations = [event for event in events if event["event"] == "eval"]
    axis.plot([e["step"] for e in evaluations], [e["loss"] for e in evaluations], "o", color=RED, label="held-out year")
    for (name, level), style in zip((references or {}).items(), ("--", ":", "-.")):
        axis.axhline(level, color=GREY, linestyle=style, label=name)
    axis.set(xlabel="step", ylabel="mean squared error\n(standardised)", yscale="log")
    _plain_ticks(axis.yaxis)
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()


def grouped_bars(groups: Mapping[str, Mapping[str, float]], *, ylabel: str, title: str = "") -> None:
    """Bars in groups: {series: {group: value}}."""
    figure, axis = _axes()
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


def bars(values: Mapping[str, float], *, xlabel: str, logarithmic: bool = False) -> None:
    """Horizontal bars in the order given, each with its value."""
    figure, axis = _axes(height=0.4 * len(values) + 0.9)
    names, lengths = list(values)[::-1], list(values.values())[::-1]
    drawn = axis.barh(names, lengths, color=BLUE)
    axis.bar_label(drawn, [f" {value:,.0f}" if value >= 100 else f" {value:.3g}" for value in lengths], fontsize=9)
    axis.set(xlabel=xlabel + " (logarithmic scale)" * logarithmic, xscale="log" if logarithmic else "linear")
    axis.margins(x=0.15)
    plt.show()


def shares(parts: Mapping[str, float], *, xlabel: str, title: str = "") -> None:
    """Horizontal bars, the longest on top, each with its share of the whole."""
    figure, axis = _axes(height=0.35 * len(parts) + 1.0)
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: item[1])
    bars = axis.barh([name for name, _ in ordered], [value for _, value in ordered], color=BLUE)
    axis.bar_label(bars, [f" {value / total:.0%}" for _, value in ordered], fontsize=9)
    axis.set(xlabel=xlabel, title=title)
    axis.margins(x=0.1)
    plt.show()


def curves(series: Mapping[str, tuple], *, xlabel: str, ylabel: str, logarithmic: bool = False) -> None:
    """Lines without regard to where zero is; with `logarithmic` both axes have that scale, and points are shown."""
    figure, axis = _axes()
    for (name, (x, y)), colour in zip(series.items(), COLOURS):
        axis.plot(x, y, "o-" if logarithmic else "-", color=colour, label=name)
    scale = "log" if logarithmic else "linear"
    axis.set(xlabel=xlabel, ylabel=ylabel, xscale=scale, yscale=scale)
    if logarithmic:
        axis.xaxis.set_major_formatter("{x:g}")
        _plain_ticks(axis.yaxis)
    axis.legend(frameon=False, fontsize=9)
    plt.show()


def lines(series: Mapping[str, tuple], *, xlabel: str, ylabel: str, dashed: Sequence[str] = ()) -> None:
    """Lines with points; those named in `dashed` are predictions."""
    figure, axis = _axes()
    for (name, (x, y)), colour in zip(series.items(), COLOURS):
        axis.plot(x, y, "--" if name in dashed else "o-", color=colour, label=name)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, fontsize=9)
    plt.show()


def attempts(runs: Mapping[str, Sequence[dict]]) -> None:
    """How far each run was at which time, from logs with repeats: a line breaks off where the run was killed."""
    figure, axis = _axes()
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


def speed_up(rows: Sequence[Mapping]) -> None:
    """Speed-up and efficiency against ranks, each with what would be ideal."""
    figure, (left, right) = _axes(columns=2)
    ranks = [row["ranks"] for row in rows]
    left.plot(ranks, ranks, "--", color=GREY, label="ideal")
    left.plot(ranks, [row["speed_up"] for row in rows], "o-", color=BLUE, label="measured")
    left.set(xlabel="ranks", ylabel="speed-up")
    right.axhline(100, color=GREY, linestyle="--")
    right.plot(ranks, [100 * row["efficiency"] for row in rows], "o-", color=BLUE)
    right.set(xlabel="ranks", ylabel="efficiency (%)", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks(ranks)
    left.legend(frameon=False, fontsize=9)
    plt.show()


def _draw_spans(axis: Axes, timeline: Timeline, rows: Mapping[str, float], *, first: float, last: float) -> None:
    for span in timeline.spans:
        start, end = max(span.start, first), min(span.end, last)  # what lies within the window
        if start < end and span.kind in rows:
            place = {"left": (start - first) * 1e3, "width": (end - start) * 1e3}
            axis.barh(rows[span.kind], color=KINDS[span.kind], edgecolor="white", linewidth=0.3, **place)


def _window(timeline: Timeline, kind: str, *, skip: int, steps: int) -> tuple[float, float]:
    """From the beginning of one step to the end of another, a step being a span of this kind."""
    found = [span for span in timeline.spans if span.kind == kind]
    return found[min(skip, len(found) - 1)].start, found[min(skip + steps, len(found)) - 1].end


def timelines(
    runs: Mapping[str, Timeline],
    *,
    step: str = "compute",
    skip: int = 2,
    steps: int = 5,
    kinds: Sequence[str] = tuple(KINDS),
) -> None:
    """A few steps of several runs on one scale, a row a kind of work: what happened when, and what overlapped."""
    shown = {name: [kind for kind in kinds if timeline.total(kind)] for name, timeline in runs.items()}
    heights = [0.3 * len(found) + 0.8 for found in shown.values()]
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(8, sum(heights)), layout="constrained", sharex=True, squeeze=False, height_ratios=heights
    )
    for axis, (name, timeline) in zip(axes.flat, runs.items()):
        rows = {kind: row for row, kind in enumerate(reversed(shown[name]))}
        first, last = _window(timeline, step, skip=skip, steps=steps)
        _draw_spans(axis, timeline, rows, first=first, last=last)
        axis.set_yticks(list(rows.values()), list(rows))
        axis.set_title(name, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("time (ms)")
        axis.label_outer()
    plt.show()


def timeline(runs: Mapping[str, Sequence[Timeline]], *, skip: int = 3, steps: int = 2) -> None:
    """A few steps of several runs, two rows a rank: what it computed, and below that what was on its way meanwhile."""
    lanes = [["load", "forward", "backward", "sync", "update"], ["communicate", "wait"]]
    ranks = max(len(found) for found in runs.values())
    figure, axes = plt.subplots(
        len(runs),
        1,
        figsize=(8, len(runs) * (0.5 * ranks + 0.7) + 0.4),
        layout="constrained",
        sharex=True,
        squeeze=False,
    )
    for axis, (name, found) in zip(axes.flat, runs.items()):
        windows = [_window(each, "load", skip=skip, steps=steps + 1) for each in found]
        first, last = min(window[0] for window in windows), max(window[1] for window in windows)
        for rank, each in enumerate(found):
            for lane, kinds in enumerate(lanes):
                row = (len(found) - 1 - rank) * 2.4 + 1 - lane
                _draw_spans(axis, each, dict.fromkeys(kinds, row), first=first, last=last)
        places = [(len(found) - 1 - rank) * 2.4 + 1 - lane for rank in range(len(found)) for lane in (0, 1)]
        axis.set_yticks(places, [text for rank in range(len(found)) for text in (f"rank {rank} computes", "sends")])
        axis.tick_params(axis="y", labelsize=8)
        axis.set_title(name, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("time (ms)")
        axis.label_outer()
    shown = [kind for kind in itertools.chain(*lanes) if any(t.total(kind) for found in runs.values() for t in found)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=KINDS[kind]) for kind in shown]
    figure.legend(
        handles, [NAMES.get(kind, kind) for kind in shown], loc="outside upper center", ncols=4, frameon=False
    )
    plt.show()


def collective(name: str, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> None:
    """What every rank holds before and after a collective; a value keeps the colour of the rank that it came from."""
    figure, axes = _axes(height=0.55 * len(before) + 0.7, columns=2)
    origin = {}
    for rank, values in enumerate(before):
        for value in values:
            origin.setdefault(float(value), COLOURS[rank % len(COLOURS)])
    for axis, title, ranks in zip(axes, (f"before {name}", "after"), (before, after)):
        longest = max(len(values) for values in (*before, *after))
        for rank, values in enumerate(ranks):
            for place, value in enumerate(values):
                colour = origin.get(float(value), GREY)
                axis.add_patch(plt.Rectangle((place, -rank), 0.9, 0.8, color=colour, alpha=0.35))
                axis.text(place + 0.45, 0.4 - rank, f"{float(value):g}", ha="center", va="center", fontsize=10)
        axis.set(xlim=(-0.1, max(longest, 4)), ylim=(-len(before) + 0.9, 1), title=title, xticks=[])
        axis.set_yticks([0.4 - rank for rank in range(len(before))], [f"rank {rank}" for rank in range(len(before))])
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    plt.show()
