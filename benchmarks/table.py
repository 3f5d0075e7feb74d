"""What all benchmarks share: the turns they take, and the table with our number beside a peer's, their ratio and its goal."""

import argparse
import ctypes
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """One line of the table: our number, the peer's, and what their ratio should be."""

    what: str
    ours: float
    peer: str
    theirs: float
    goal: tuple[str, float] | None = None  # (">=", 100): ours is at least 100 times theirs
    paired: float | None = None  # the ratio where both took turns; else that of the two numbers

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.paired is None else self.paired

    @property
    def met(self) -> bool | None:
        sign, bound = self.goal or ("", 0.0)
        return {"": None, ">=": self.ratio >= bound, "<=": self.ratio <= bound}[sign]


Part = Callable[..., Iterator[Row]]  # called with a folder for its files and quick=True or False


def keep_memory() -> None:
    """Let glibc keep freed memory: else a step may or may not fault in thousands of pages, and that drowns the rest."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_trim_threshold, 2**30)
        libc.mallopt(m_mmap_threshold, 2**25)


def take_turns(loops: Mapping[str, Callable], rounds: int) -> dict[str, list]:
    """One result a round from each loop. Each round begins with another one, so that none always follows the same."""
    names, found = list(loops), {name: [] for name in loops}
    for first in range(rounds):
        for number in range(len(names)):
            name = names[(first + number) % len(names)]
            found[name].append(loops[name]())
    return found


def compare(
    what: str, ours: Sequence[float], peer: str, theirs: Sequence[float], goal: tuple[str, float] | None = None
) -> Row:
    """Two that took turns: the ratio within each round, then the median. The machine's moods last longer than a round."""
    paired = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Row(what, statistics.median(ours), peer, statistics.median(theirs), goal, paired)


LINE = "{:52} {:>10} {:>10}  {:62} {:>8}  {:8} {}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show(row: Row) -> None:
    goal = "{} {:g}".format(*row.goal) if row.goal else ""
    met = {None: "", True: "met", False: "MISSED"}[row.met]
    print(
        LINE.format(row.what, number(row.ours), number(row.theirs), row.peer, number(row.ratio), goal, met), flush=True
    )


def main(program: str, about: str, parts: Mapping[str, Part]) -> None:
    """The command line of a benchmark: measure its parts one after the other and show each row when it is there."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and short; its numbers are no claims")
    parser.add_argument("--only", choices=parts, help="measure one part")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "quick": options.quick}
    print(machine | versions, LINE.format("what", "ours", "theirs", "peer", "ratio", "goal", ""), sep="\n", flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for part in [options.only] if options.only else parts:
            for row in parts[part](Path(folder), quick=options.quick):
                show(row._replace(goal=None) if options.quick else row)
                rows.append({"part": part, **row._asdict(), "ratio": row.ratio, "met": row.met})
    if options.json:
        options.json.write_text(json.dumps({**machine, **versions, "rows": rows}, indent=1) + "\n")
