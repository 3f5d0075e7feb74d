"""Everything a run can be told, in one flat dataclass; the command line is made from it.

python -m course_lib.train --help
"""

import argparse
import atexit
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn


class UserError(ValueError):
    """A user's mistake, said in one line that names the file or flag and what to do about it."""


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag is one line like every other mistake, without the usage of all thirty flags."""

    def error(self, message: str):
        raise UserError(f"{message}; {self.prog} --help lists the flags")


def _option(default, help: str, choices: Sequence[str] = ()):
    return field(default=default, metadata={"help": help, "choices": tuple(choices)})


@dataclass(frozen=True)
class Config:
    """One run. Every field is a flag: `train_years` is `--train-years`."""

    data: str = _option("data/years", "folder of <VARIABLE>_<YEAR>.nc files, or of what another --task learns from")
    runs: str = _option("runs", "folder that holds all runs")
    name: str = _option("baseline", "this run's folder below --runs")
    resume: bool = _option(False, "go on from the run's checkpoint")

    task: str = _option(
        "forecast", "what to learn from the files", ["forecast", "superres", "segment", "digits", "squad"]
    )
    variables: str = _option("", "comma-separated variables; empty: all that are found")
    train_years: str = _option("", "such as 1980-1986 or 1980,1982; empty: all but the last year")
    valid_years: str = _option("", "years held out; empty: the last year")
    lead: int = _option(6, "forecast this many time steps ahead")

    width: int = _option(16, "channels of the UNet's first level, or of the recurrent net's memory")
    depth: int = _option(2, "how often the UNet halves the image, or layers of the recurrent net")
    norm: str = _option("group", "normalisation in the UNet", ["group", "batch", "none"])
    padding: str = _option("circular", "what lies beyond the image's edge", ["circular", "zeros"])
    checkpointing: bool = _option(False, "recompute activations in the backward pass instead of keeping them")

    pretrained: str = _option("", "folder of a BERT and its tokenizer, for --task squad")
    fresh: bool = _option(False, "that BERT with random weights, to see what its own are worth")
    tokens: int = _option(128, "length of the windows that BERT reads, question and special tokens included")
    stride: int = _option(32, "tokens by which two windows of a long text overlap")

    epochs: int = _option(2, "passes over the training years")
    batch: int = _option(8, "samples a step on each rank")
    global_batch: int = _option(
        0, "samples a step on all ranks together, instead of --batch on each; 0: --batch counts"
    )
    max_steps: int = _option(0, "stop after this many steps in all; 0: when the epochs are done")
    lr: float = _option(4e-3, "peak learning rate")
    scale_lr: bool = _option(False, "multiply --lr by the number of ranks: the batch is that many times as large")
    warmup: int = _option(20, "steps in which the learning rate rises to its peak")
    seed: int = _option(0, "of the weights and of the order of the samples")

    strategy: str = _option("single", "how the ranks share the work: a name in course_lib.parallel.STRATEGIES")
    devices: int = _option(
        2, "stages of --strategy split and hybrid, ranks in a group of hsdp; threads of dp where there is no GPU"
    )
    bucket_mb: float = _option(25.0, "megabytes of gradients that the ddp strategies send at once")
    micro_batches: int = _option(4, "pieces of each batch that follow each other through a pipeline")
    launcher: str = _option("env", "who says which rank this is: RANK, WORLD_SIZE … or MPI", ["env", "mpi"])
    device: str = _option("auto", "auto takes a GPU where there is one", ["auto", "cpu", "cuda"])
    timeout: int = _option(120, "seconds that a rank waits for the others before it gives up")
    threads: int = _option(1, "CPU threads of each rank")
    workers: int = _option(0, "DataLoader worker processes of each rank")
    prefetch: int = _option(2, "batches loaded ahead by a thread; 0: none")

    log_every: int = _option(10, "steps between two lines of metrics.jsonl")
    checkpoint_every: int = _option(0, "steps between two checkpoints; 0: one an epoch")
    timeline: int = _option(0, "record what each rank does when in its first so many steps")

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            flag = "--" + f.name.replace("_", "-")
            if type(value) is not f.type and not (f.type is float and type(value) is int):
                raise UserError(f"{flag} must be {f.type.__name__}, not {value!r}")
            if choices and value not in choices:
                raise UserError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")
        for name in (
            "width",
            "batch",
            "epochs",
            "threads",
            "timeout",
            "log_every",
            "devices",
            "micro_batches",
            "tokens",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        not_negative = ("depth", "lead", "max_steps", "warmup", "workers", "prefetch", "checkpoint_every", "timeline")
        for name in (*not_negative, "global_batch", "stride"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name.replace('_', '-')} must not be negative, and is {getattr(self, name)}")
        if not 0 <= self.lr <= 1e30:  # nor may it be "not a number"
            raise UserError(f"--lr must be from 0 to 1e30, not {self.lr}")
        if not 0 <= self.bucket_mb <= 1e6:
            raise UserError(f"--bucket-mb must be from 0 to 1e6, not {self.bucket_mb}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed must be from 0 to {2**32 - 1}, not {self.seed}")
        if self.name in ("", "..") or Path(self.name).name != self.name:
            raise UserError(f"--name must be a plain folder name, not {self.name!r}")

    @property
    def run(self) -> Path:
        """The run's own folder."""
        return Path(self.runs) / self.name

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None, prog: str = "python -m course_lib.train") -> "Config":
        """Read the command line; a mistake is a UserError."""
        parser = Parser(prog=prog, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for f in dataclasses.fields(cls):
            flag, meta = "--" + f.name.replace("_", "-"), f.metadata
            if f.type is bool:
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=meta["help"])
            else:
                parser.add_argument(
                    flag, type=f.type, default=f.default, help=meta["help"], choices=meta["choices"] or None
                )
        return cls(**vars(parser.parse_args(arguments)))

    def arguments(self) -> list[str]:
        """The command line that gives this config: only what differs from the defaults."""
        return [as_flag(f.name, getattr(self, f.name)) for f in FIELDS.values() if getattr(self, f.name) != f.default]

    def replace(self, **changes) -> "Config":
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def as_flag(name: str, value: object) -> str:
    """train_years="1980" → --train-years=1980, resume=True → --resume."""
    flag = name.replace("_", "-")
    if FIELDS[name].type is bool:
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def parse_years(text: str, flag: str = "--years") -> list[int]:
    """`1980-1982,1985` → [1980, 1981, 1982, 1985]."""
    parts = text.split(",")
    spans = [(int(part[:4]), int(part[-4:])) for part in parts if re.fullmatch(r"\d{4}(-\d{4})?", part)]
    years = [year for first, last in spans for year in range(first, last + 1)]
    falls = any(first > last for first, last in spans)
    if len(spans) < len(parts) or falls or years != sorted(set(years)):
        raise UserError(f"{flag} must look like 1980-1989 or 1980,1982 in rising order, not {text!r}")
    return years


def run_main(main: Callable[[], int | None]) -> None:
    """Run a command's main(): a user's mistake is one line on stderr and exit code 2, without a traceback."""
    try:
        sys.exit(main())
    except UserError as error:
        line = str(error).strip().splitlines()[-1]  # one raised in a DataLoader worker brings its traceback along
        line = line.removeprefix("course_lib.config.UserError: ")
        sys.stderr.write(f"error: {line}\n")  # one write, and not print's two: all ranks may say it at the same moment
        if _is_in_group():
            _end_at_once(2)
        sys.exit(2)
    except Exception:
        if not _is_in_group():
            raise
        sys.excepthook(*sys.exc_info())
        _end_at_once(1)


def _is_in_group() -> bool:
    """Whether this is a rank that could not leave the others; not under mpi4py, which must see a failure to end them all."""
    group = sys.modules.get("torch.distributed")  # imported here by nobody who does without
    return group is not None and group.is_available() and group.is_initialized() and "mpi4py.run" not in sys.modules


def _end_at_once(code: int) -> NoReturn:
    """End with this code. Python would first take apart what gloo's threads still work on, and at times abort by signal 6."""
    atexit._run_exitfuncs()  # they end DataLoader workers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
