"""Measure how well the model of lesson 06 predicts steps that it has not seen, on this machine.

    python -m benchmarks.scaling            # everything: three minutes
    python -m benchmarks.scaling --quick    # small and short: it shows that all runs; its numbers are no claims
    python -m benchmarks.scaling --json FILE

prediction  milliseconds of a DDP step on 2 to 4 ranks: predicted from single all-reduces and from steps without communication,
            against measured in the same minute. Four ranks on two cores share them: `crowd` in the model says so.
            The mean error is the claim.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import table
from benchmarks.table import Row
from course_lib import scaling
from course_lib.config import Config
from course_lib.data import cells
from course_lib.launch import torchrun

CASES = {"8 wide, 2 deep, 110 kB": {"width": 8, "depth": 2}, "24 wide, 3 deep, 4.3 MB": {"width": 24, "depth": 3}}
QUICK = {"2 wide, 1 deep": {"width": 2, "depth": 1}}


def probe(folder: Path, case: dict, *, quick: bool) -> dict:
    config = Config(task="segment", data=str(folder), padding="zeros", **case)
    out = folder / "probe.json"
    words = ["-m", "course_lib.probe", f"--out={out}", f"--repeats={2 if quick else 15}", *config.arguments()]
    torchrun(2 if quick else 4, words, quiet=True)
    return json.loads(out.read_text())


def measure_prediction(folder: Path, *, quick: bool) -> Iterator[Row]:
    cells.make(folder, real=False, frames=5, height=192)
    for name, case in (QUICK if quick else CASES).items():
        found = probe(folder, case, quick=quick)
        rows = scaling.errors(scaling.fit_model(found), found)
        for one in rows:
            what = f"{name}: {one['ranks']} ranks, batch {one['batch']}, ms"
            yield Row(what, 1e3 * one["predicted"], "measured", 1e3 * one["measured"])
        what = f"{name}: mean error, of a measured step"
        yield Row(what, statistics.fmean(abs(one["error"]) for one in rows), "1 measured step", 1.0, ("<=", 0.15))


if __name__ == "__main__":
    table.main("benchmarks.scaling", __doc__, {"prediction": measure_prediction})
