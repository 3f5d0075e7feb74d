"""Running a lab's program on real ranks, and reading what they leave in its folder."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np

from course_lib.failures import LOST
from course_lib.faults import ALL
from course_lib.lab_rank import run_program
from course_lib.lesson import ROOT
from course_lib.ports import claim_ports, next_port
from course_lib.trial import fork_ranks, prepare, read_outcomes, stack
from course_lib.trial_rank import Failure

RANKS, EPOCHS = 3, 2
IMAGES = {"train": 37, "valid": 10}  # three ranks can't share either evenly
START_UP, PATIENCE = 20.0, 6.0  # seconds without a note after which a rank is taken to hang: until its first, and then
GOOD = ROOT / "lessons" / "programs" / "lab.py"


def run(text: str, folder: Path, *, disturbance: tuple[str, int | str | tuple] = ("", ALL)) -> list:
    """Run a program's text on real ranks; what they print, record and return is left in the folder. Their exit codes."""
    (folder / "program.py").write_text(text)
    make_images(folder / "data")
    prepare("course_lib.lab_rank", "torch._dynamo")
    kind, struck = disturbance
    struck = ALL if isinstance(struck, tuple) else struck
    with claim_ports() as claim:
        return fork_ranks(
            RANKS,
            functools.partial(run_program, folder, kind, struck, next_port(claim), PATIENCE),
            folder,
            seconds=START_UP,
            join=False,
        )


@functools.cache
def good_notes() -> list[dict]:
    """What the program notes when nothing is wrong."""
    with tempfile.TemporaryDirectory(prefix="lab-good-") as name:
        codes = run(GOOD.read_text(), Path(name))
        assert finished(Path(name)), how_it_ended(Path(name), codes)
        return notes(Path(name))


def make_images(folder: Path) -> None:
    """Noise to train and to validate on, the same every time."""
    random = np.random.default_rng(0)
    for part, count in IMAGES.items():
        (folder / part).mkdir(parents=True)
        for number in range(count):
            scale = 1 + number / count  # the last images are the harder ones: it matters who has which
            image = scale * random.standard_normal((1, 128, 128)).astype(np.float32)
            np.save(folder / part / f"{number:02}.npy", image)


def mend(text: str, line: int, fix: str) -> str:
    """The program with one line replaced by what may be several, of which the first is indented as that line was."""
    lines, new = text.splitlines(), fix.strip("\n").splitlines()
    move = _indent(lines[line - 1]) - _indent(new[0]) if new else 0
    lines[line - 1 : line] = [" " * (_indent(one) + move) + one.lstrip() for one in new]
    return "\n".join(lines) + "\n"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


# ---- reading ---------------------------------------------------------------------------------------------------------------


def notes(folder: Path) -> list[dict]:
    """All that the program noted, rank after rank."""
    lines = [line for rank in range(RANKS) for line in said(folder, rank).splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def how_it_ended(folder: Path, codes: list) -> str:
    """In one line, without a diagnosis."""
    if finished(folder):
        return "all ranks have finished"
    outcomes, words = read_outcomes(folder, RANKS), []
    for rank in range(RANKS):
        if isinstance(outcomes.get(rank), Failure):
            failure = outcomes[rank]
            words.append(f"rank {rank} failed ({failure.kind})")
        elif rank in outcomes:
            words.append(f"rank {rank} finished")
        elif codes[rank] and codes[rank] < 0 and not stack(folder, rank):
            words.append(f"rank {rank} was ended by signal {-codes[rank]}")
        else:
            words.append(f"rank {rank} did not come back")
    return ", ".join(words)


def first_failure(folder: Path) -> str:
    """What a rank raised, and in which line of the program; "" if none did."""
    failures = [one for one in read_outcomes(folder, RANKS).values() if isinstance(one, Failure)]
    if not failures:
        return ""
    first = min(failures, key=lambda one: bool(LOST.search(one.message)))  # not those whom it has left
    lines = [number for file, number, _ in first.calls if file == "program.py"]
    return f"{f'line {lines[-1]}: ' if lines else ''}{first.kind}: {first.message[:300]}"


def finished(folder: Path) -> bool:
    """Whether all ranks came to their end."""
    outcomes = read_outcomes(folder, RANKS)
    return len(outcomes) == RANKS and not any(isinstance(outcome, Failure) for outcome in outcomes.values())


def said(folder: Path, rank: int) -> str:
    """All that a rank has printed."""
    path = folder / f"said.{rank}"
    return path.read_text(errors="replace") if path.exists() else ""
