"""The break-it labs: a program that breaks on real ranks, what it leaves behind, and whether the learner has understood it.

case = Case("1a")          # runs the program, in which something is wrong, on three ranks; a few seconds
case.program()             # its lines, numbered
case.printed(), case.events("step"), case.timeline(), case.flight_recorder(), case.stacks()      # the evidence
case.check(answer), case.check_fix(answer)     # what, which rank, which line; and whether the fix mends it
"""

import hashlib
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from course_lib import plots
from course_lib.checks import WrongAnswer, alone, difference, require
from course_lib.cockpit import Table
from course_lib.faults import FAULTS, REMEDIES
from course_lib.hangs import read_flight_records
from course_lib.lab_runs import (
    EPOCHS,
    GOOD,
    IMAGES,
    RANKS,
    finished,
    first_failure,
    good_notes,
    how_it_ended,
    mend,
    notes,
    run,
    said,
)
from course_lib.timeline import read_timelines
from course_lib.trial import stack

CASES = dict(zip((f"{lab}{letter}" for lab in (1, 2, 3) for letter in "abcd"), FAULTS))


def victim(name: str, seed: int) -> int | str | tuple:
    """The rank of a case: where the fault strikes one of them, the seed decides which."""
    rank = FAULTS[CASES[name]].rank
    return int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest(), 16) % RANKS if rank == "one" else rank


class Case:
    """A run of the program with one thing wrong, and all that it left behind. Another seed, another rank."""

    def __init__(self, name: str, *, seed: int = 1):
        self.name, self._what = name, CASES[name]
        self._fault = FAULTS[self._what]
        self._rank = victim(name, seed)
        self._folder = tempfile.TemporaryDirectory(prefix=f"lab-{name}-")
        self.folder = Path(self._folder.name)
        self._other_job = socket.create_server(("127.0.0.1", 0))  # it has its port for as long as there is the case
        port = self._other_job.getsockname()[1]
        self.text = GOOD.read_text().split("\n", 2)[2]  # without the docstring, which would give it away
        for good, bad in self._fault.edits:
            self.text = self.text.replace(good, bad.format(rank=self._rank, port=port))
        self.codes = run(self.text, self.folder, disturbance=(self._fault.around, self._rank))
        print(f"case {name}: {how_it_ended(self.folder, self.codes)}")

    def __getstate__(self) -> dict:
        """An answer may look at its case, and answers are sent to a process of their own."""
        return {name: value for name, value in vars(self).items() if name not in ("_folder", "_other_job")}

    # ---- the evidence --------------------------------------------------------------------------------------------------------

    def program(self) -> None:
        """The program that was run, with numbered lines."""
        html = highlight(self.text, PythonLexer(), HtmlFormatter(linenos="inline", noclasses=True, nowrap=False))
        display({"text/html": html, "text/plain": _numbered(self.text)}, raw=True)

    def printed(self, last: int = 6) -> None:
        """The last lines that each rank printed, tracebacks among them."""
        for rank in range(RANKS):
            lines = said(self.folder, rank).splitlines()
            print(f"--- rank {rank} printed {len(lines)} lines; the last of them:")
            print("\n".join(line[:200] for line in lines[-last:]) or "(nothing)")

    def events(self, kind: str) -> Table:
        """One kind of the program's notes: start, step, evaluated, valid or end; a row a note, in the order of ranks."""
        return _table(notes(self.folder), kind)

    def timeline(self) -> None:
        """What the ranks did when: the first steps."""
        found = read_timelines(self.folder) if list(self.folder.glob("timeline.*.json")) else []
        if not any(one.total("load") for one in found):
            return print("the timeline is empty: no rank has begun its first step")
        plots.timeline({f"case {self.name}": found}, skip=0, steps=3)

    def flight_recorder(self, last: int = 8) -> Table:
        """The last collectives that each rank has begun, side by side."""
        table = read_flight_records(self.folder)
        return Table(table.titles, table.rows[-last:])

    def stacks(self) -> None:
        """Where the ranks were that had to be stopped, the innermost call last."""
        found = {rank: stack(self.folder, rank) for rank in range(RANKS)}
        for rank, calls in found.items():
            mine = [f"line {line} of the program" for file, line, _ in calls if file.endswith("program.py")]
            print(f"rank {rank}: {' → '.join(mine) if mine else 'has left no stack'}")

    # ---- the answer ----------------------------------------------------------------------------------------------------------

    def check(self, answer: Callable[[], dict]) -> None:
        """What, which rank and which line."""
        given = self._ask(answer)
        what = given["what"]
        if what not in FAULTS:
            raise WrongAnswer(f'"what" is {what!r}; choose one of {", ".join(sorted(FAULTS))}')
        why = f"{FAULTS[what].shows if what != self._what else ''}: do you see that here?"
        require(what == self._what, f"case {self.name}, what", f"not {what!r}. There {why}")
        right = self._rank if isinstance(self._rank, tuple) else (self._rank,)
        everybody = '"all", if no rank is special'
        require(
            given["rank"] in right,
            f"case {self.name}, which rank",
            f"not {given['rank']!r}. Which rank does or suffers what the others don't? ({everybody})",
        )
        lines, number = self.text.splitlines(), given["line"]
        require(
            any(piece in lines[number - 1] for piece in self._fault.lines),
            f"case {self.name}, which line",
            f"line {number} is `{lines[number - 1].strip()}`; it may be mended there, too, but does not come from there",
        )

    def check_fix(self, answer: Callable[[], dict]) -> None:
        """Run the program with the fix on real ranks; or, where no line can help, the name of the remedy."""
        given = self._ask(answer)
        fix, what = given["fix"], f"case {self.name}, the fix"
        if self._fault.remedy:
            line = "no remedy's name, and the program is not to blame here: which of the remedies would help?"
            why = f"{REMEDIES[fix]}: that does not help here" if fix in REMEDIES else f"{fix!r} is {line}"
            return require(fix == self._fault.remedy, what, why)
        if fix in REMEDIES:
            raise WrongAnswer(
                f"{what}: {REMEDIES[fix]}: no, the program itself can be mended; write the line as it should be"
            )
        with tempfile.TemporaryDirectory(prefix="lab-fix-") as name:
            text = mend(self.text, given["line"], fix)
            codes = run(text, Path(name), disturbance=(self._fault.around, self._rank))
            if not finished(Path(name)):
                why = "; ".join(filter(None, (how_it_ended(Path(name), codes), first_failure(Path(name)))))
                raise WrongAnswer(f"{what}: with your line the program still breaks: {why}")
            got = notes(Path(name))
        for kind in ("start", "evaluated", "valid", "end"):
            _require_alike(got, kind, what)
        if self._fault.exact:
            _require_equal(got, good_notes(), what)
        else:
            _require_whole_epochs(got, what)
        pattern, why = self._fault.no_cure or ("(?!)", "")
        require(not re.search(pattern, fix), what, f"with {fix.strip()!r} it runs, but {why}")

    def _ask(self, answer: Callable[[], dict]) -> dict:
        given = alone(answer)
        wanted = ("what", "rank", "line", "fix")
        if not isinstance(given, dict) or set(given) != set(wanted):
            raise WrongAnswer(f"case {self.name}: the answer is a dictionary with {', '.join(wanted)}, not {given!r}")
        count, number = len(self.text.splitlines()), given["line"]
        if not isinstance(number, int) or not 1 <= number <= count:
            raise WrongAnswer(f'"line" is {number!r}; it is a number from 1 to {count}, see program()')
        if given["rank"] not in (*range(RANKS), "all"):
            raise WrongAnswer(f'"rank" is {given["rank"]!r}; it is a number from 0 to {RANKS - 1}, or "all"')
        if not isinstance(given["fix"], str):
            raise WrongAnswer(
                f'"fix" is {given["fix"]!r}; it is a line of the program or the name of a remedy, as text'
            )
        return given


def good_events(kind: str) -> Table:
    """What the good program notes of one kind."""
    return _table(good_notes(), kind)


def _require_alike(found: list[dict], kind: str, what: str) -> None:
    """All ranks hold the same weights and buffers, and have the same loss of all images."""
    ranks = [[note for note in found if note["event"] == kind and note["rank"] == rank] for rank in range(RANKS)]
    shared = ("weights", "buffers", "loss")
    values = [[[note.get(name) for name in shared] for note in events] for events in ranks]
    for events in zip(*values):
        for name, held in zip(shared, zip(*events)):
            if len(set(held)) > 1:
                there = ", ".join(f"{value:.6g}" for value in held)
                said = f'in its note "{kind}" {name} of ranks 0 to {RANKS - 1}: {there}'
                raise WrongAnswer(f"{what}: the program runs to its end, but the ranks do not agree; {said}")
    if len({len(events) for events in values}) > 1:
        raise WrongAnswer(f'{what}: the ranks make unequal numbers of notes "{kind}"')


def _require_equal(found: list[dict], good: list[dict], what: str) -> None:
    """The program makes the good one's steps, with its losses and weights."""
    kinds = ("step", "valid", "end")
    mine, theirs = ([note for note in some if note["event"] in kinds] for some in (found, good))
    for got, wanted in zip(mine, theirs):
        if why := difference(got, wanted):
            epoch = f" in epoch {wanted['epoch']}" if "epoch" in wanted else ""
            raise WrongAnswer(f'{what}: rank {wanted["rank"]}, note "{wanted["event"]}"{epoch}: {why}')
    if len(mine) != len(theirs):
        raise WrongAnswer(f"{what}: {len(mine)} notes of steps and epochs, expected {len(theirs)}")


def _require_whole_epochs(found: list[dict], what: str) -> None:
    """The ranks still share the work: equal numbers of steps, and in each epoch every image once, but for a few left over."""
    steps = [note for note in found if note["event"] == "step"]
    epochs = sorted({note["epoch"] for note in steps})
    if epochs != list(range(EPOCHS)):
        raise WrongAnswer(f"{what}: the program now makes steps in epochs {epochs}; it should in {list(range(EPOCHS))}")
    for epoch in epochs:
        mine = [note for note in steps if note["epoch"] == epoch]
        counts = [sum(note["rank"] == rank for note in mine) for rank in range(RANKS)]
        if len(set(counts)) > 1:
            raise WrongAnswer(f"{what}: in epoch {epoch} the ranks make {counts} steps; all should make equally many")
        seen = Counter(sample for note in mine for sample in note["samples"])
        if seen.total() - len(seen) >= RANKS:  # some may be repeated, so that all ranks have equally many
            raise WrongAnswer(
                f"{what}: in epoch {epoch} the ranks learn from {seen.total()} samples, which are only {len(seen)} images: "
                "they do not share them, or some are taken again and again"
            )
        if IMAGES["train"] - len(seen) >= RANKS:  # or left out
            raise WrongAnswer(f"{what}: in epoch {epoch} only {len(seen)} of {IMAGES['train']} images are learnt from")


def _table(found: list[dict], kind: str) -> Table:
    rows = [note for note in found if note["event"] == kind]
    names = [name for name in (rows[0] if rows else {"rank": 0}) if name != "event"]
    return Table(names, [[_short(row[name]) for name in names] for row in rows])


def _numbered(text: str) -> str:
    return "\n".join(f"{number:3}  {line}" for number, line in enumerate(text.splitlines(), 1))


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
