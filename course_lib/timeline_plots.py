"""The figures of what ranks do when: timelines of one process and of several ranks, and what a collective does."""

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from course_lib.figure import BLUE, COLOURS, GREEN, GREY, ORANGE, PINK, RED, SKY, new_axes
from course_lib.timeline import Timeline

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
NAMES = {"sync": "wait for gradients", "wait": "wait for other ranks"}


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
        windows = [_window(each, "load", skip=skip, steps=steps + 1) for each in found if each.total("load")]
        first, last = min(window[0] for window in windows), max(window[1] for window in windows)
        for rank, each in enumerate(found):
            for lane, kinds in enumerate(lanes):
                row = (len(found) - 1 - rank) * 2.4 + 1 - lane
                _draw_spans(axis, each, dict.fromkeys(kinds, row), first=first, last=last)
        places = [(len(found) - 1 - rank) * 2.4 + 1 - lane for rank in range(len(found)) for lane in (0, 1)]
        below = "sends" if any(each.total("communicate") for each in found) else "waits"
        axis.set_yticks(places, [text for rank in range(len(found)) for text in (f"rank {rank} computes", below)])
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


def schedules(plans: Mapping[str, Sequence[Sequence]]) -> None:
    """Pipelines on paper, a row a stage: light boxes are forward, dark ones backward, with their micro-batch's number."""
    stages = max(len(plan) for plan in plans.values())
    _, axes = plt.subplots(
        len(plans), 1, figsize=(8, len(plans) * (0.35 * stages + 0.8)), layout="constrained", sharex=True, squeeze=False
    )
    for axis, (name, plan) in zip(axes.flat, plans.items()):
        for row, stage in enumerate(plan):
            for slot in stage:
                box = {"left": slot.start, "width": slot.end - slot.start, "height": 0.9}
                axis.barh(-row, color=KINDS[slot.kind], edgecolor="white", **box)
                if slot.end - slot.start > 0.6:  # there is room for it
                    place, colour = (slot.start + slot.end) / 2, "white" if slot.kind == "backward" else "black"
                    axis.text(place, -row, slot.number + 1, ha="center", va="center", fontsize=8, color=colour)
        axis.set_yticks([-row for row in range(len(plan))], [f"stage {row}" for row in range(len(plan))])
        axis.set_title(name, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("time")
        axis.label_outer()
    plt.show()


def collective(name: str, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> None:
    """What every rank holds before and after a collective; a value keeps the colour of the rank that it came from."""
    rows = max(len(before), len(after))
    figure, axes = new_axes(height=0.55 * rows + 0.7, columns=2)
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
        axis.set(xlim=(-0.1, max(longest, 4)), ylim=(-rows + 0.9, 1), title=title, xticks=[])
        axis.set_yticks([0.4 - rank for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    plt.show()


def rounds(states: Sequence[Sequence[Sequence[float]]], titles: Sequence[str]) -> None:
    """What every rank holds after each round of a collective: states[rank][round].

    Rank r begins with 10^r everywhere, so that a number tells whose values are in it: the more, the darker.
    """
    columns = min(4, len(titles))
    lines = -(-len(titles) // columns)
    tall = 0.32 * len(states) + 0.45
    _, axes = plt.subplots(lines, columns, figsize=(8.4, lines * tall), layout="constrained", squeeze=False)
    for axis in axes.flat[len(titles) :]:
        axis.set_visible(False)
    for number, (axis, title) in enumerate(zip(axes.flat, titles)):
        held = [[f"{int(value)}" for value in rank[number]] for rank in states]
        shades = [[text.count("1") / len(states) for text in row] for row in held]
        axis.imshow(shades, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
        for row, texts in enumerate(held):
            for column, text in enumerate(texts):
                axis.text(column, row, text, ha="center", va="center", fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.set(xticks=[])
        axis.set_yticks(range(len(states)), [f"rank {rank}" for rank in range(len(states))], fontsize=8)
        axis.label_outer()
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    plt.show()
