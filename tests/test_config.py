"""The config and its command line are the same thing, and every mistake is named by its flag."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from course_lib.config import Config, UserError, parse_years, run_main
from course_lib.trainer import learning_rate

FIELDS = dataclasses.fields(Config)
NAMES = [f.name for f in FIELDS]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def values_of(f: dataclasses.Field) -> st.SearchStrategy:
    """What a field may hold."""
    if f.metadata["choices"]:
        return st.sampled_from(f.metadata["choices"])
    if f.name == "name":
        return st.text(min_size=1).filter(lambda text: Path(text).name == text != "..")
    return {
        bool: st.booleans(),
        int: st.integers(1, 2**32 - 1),
        float: st.floats(0, 1e6 if f.name == "bucket_mb" else 1e30),
        str: st.text(),
    }[f.type]


configs = st.builds(Config, **{f.name: values_of(f) for f in FIELDS})


# ---- the command line ------------------------------------------------------------------------------------------------------


@given(configs)
@example(Config(data="-x", variables="--width", name="-1", lr=1))
def test_the_command_line_gives_the_config_back(config):
    assert Config.parse(config.arguments()) == config


def test_defaults_need_no_command_line():
    assert Config().arguments() == [] and Config.parse([]) == Config()


@pytest.mark.parametrize("f", FIELDS, ids=NAMES)
def test_every_field_is_a_flag(f):
    other = next((choice for choice in f.metadata["choices"] if choice != f.default), None)
    other = other or {bool: True, int: 77, float: 0.5, str: "other"}[f.type]
    words = [flag_of(f.name)] if f.type is bool else [flag_of(f.name), str(other)]
    assert Config.parse(words) == Config().replace(**{f.name: other})


def test_a_switch_can_be_taken_back():
    assert Config.parse(["--resume", "--no-resume"]) == Config()


def test_help_has_a_line_of_its_own_for_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        Config.parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert all(f.metadata["help"] in shown for f in FIELDS)


# ---- mistakes --------------------------------------------------------------------------------------------------------------

ZERO_IS_TOO_LITTLE = ["width", "batch", "epochs", "threads", "timeout", "log_every", "devices", "micro_batches"]
ZERO_IS_TOO_LITTLE += ["tokens"]
MUST_NOT_BE_NEGATIVE = ["depth", "lead", "max_steps", "warmup", "workers", "prefetch", "checkpoint_every", "lr", "seed"]
MUST_NOT_BE_NEGATIVE += ["bucket_mb", "global_batch", "timeline", "stride"]
WRONG_TYPES = [
    ("width", "3"),
    ("width", 3.0),
    ("width", True),
    ("resume", 1),
    ("data", 5),
    ("data", None),
    ("lr", "1e-3"),
]


@pytest.mark.parametrize(
    "name, value",
    [
        *WRONG_TYPES,
        *((name, 0) for name in ZERO_IS_TOO_LITTLE),
        *((name, -1) for name in MUST_NOT_BE_NEGATIVE),
        *((f.name, "nonsense") for f in FIELDS if f.metadata["choices"]),
        *(("name", name) for name in ("", ".", "..", "a/b", "/a")),
        *(("lr", rate) for rate in (float("nan"), float("inf"), 1e31)),
        *(("bucket_mb", size) for size in (float("nan"), float("inf"), 1e7)),
        ("seed", 2**32),
    ],
)
def test_a_wrong_value_is_named_by_its_flag(name, value):
    with pytest.raises(UserError, match=rf"^{flag_of(name)} "):
        Config(**{name: value})


@pytest.mark.parametrize(
    "words, named",
    [
        (["--width", "x"], "--width"),
        (["--width", "2.5"], "--width"),
        (["--lr", "fast"], "--lr"),
        (["--norm", "layer"], "--norm"),
        (["--batch", "0"], "--batch"),
        (["--batch"], "--batch"),
        (["--wide", "3"], "--wide"),
        (["--resume=yes"], "--resume"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_named(words, named, capsys):
    with pytest.raises(UserError, match=re.escape(named)) as raised:
        Config.parse(words)
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().err == ""  # argparse would show the usage of all flags


def test_every_number_at_its_lower_limit_is_accepted():
    numbers = dict.fromkeys(ZERO_IS_TOO_LITTLE, 1) | dict.fromkeys(MUST_NOT_BE_NEGATIVE, 0)
    assert set(numbers) == {f.name for f in FIELDS if f.type in (int, float)}  # no number is left unchecked
    Config(**numbers)


@pytest.mark.parametrize(
    "message", ["one line", "Caught UserError in worker 0.\nTraceback …\ncourse_lib.config.UserError: one line\n"]
)
def test_a_users_mistake_is_one_line_and_exit_code_2(message, capsys):
    def main():
        raise UserError(message)

    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: one line\n"


def test_the_same_mistake_on_all_ranks_stays_lines():
    """Their stderr is one pipe, and unbuffered: a line in two writes would be cut by another rank's."""
    reading, writing = os.pipe2(os.O_DIRECT)  # where each write is a packet, and a read gives no more than one
    program = "from course_lib.config import *\ndef main(): raise UserError('one line')\nrun_main(main)"
    code = subprocess.run([sys.executable, "-u", "-c", program], stderr=writing, check=False).returncode
    assert code == 2
    assert os.read(reading, 4096) == b"error: one line\n"
    os.close(reading)
    os.close(writing)


FAILS_IN_GROUP = """
import os, sys, torch.distributed as dist
from course_lib.config import UserError, run_main

class Gloo:
    def __del__(self):
        os.abort()  # what its threads do at times when Python takes apart what they work on

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("last words")
    raise {"UserError": UserError, "RuntimeError": RuntimeError}[sys.argv[1]]("why")

gloo = Gloo()
run_main(main)
"""


@pytest.mark.parametrize("name, code, told", [("UserError", 2, "error"), ("RuntimeError", 1, "RuntimeError")])
def test_a_rank_that_fails_in_its_group_ends_with_its_own_exit_code(name, code, told):
    """And not with signal 6, for which nobody would be to blame."""
    program = [sys.executable, "-c", FAILS_IN_GROUP, name]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "last words\n")
    assert done.stderr.splitlines()[-1].endswith(f"{told}: why")


# ---- years and learning rate -----------------------------------------------------------------------------------------------


@given(st.sets(st.integers(1000, 9999), min_size=1, max_size=20).map(sorted))
def test_years_one_by_one(years):
    assert parse_years(",".join(map(str, years))) == years


def test_spans_of_years():
    assert parse_years("1980-1982,1985,1990-1990") == [1980, 1981, 1982, 1985, 1990]


@pytest.mark.parametrize(
    "text",
    ["", "x", "1980-", "-1980", "1980,", "1980,,1982", "1982-1980", "1979,1985-1983", "1980,1980", "1981,1980"]
    + ["1980-1982,1982", "1980-1981-1982", "1980 1981", "80", "1980.5", "1-999999999999"],
)
def test_years_that_are_none(text):
    with pytest.raises(UserError, match="^--train-years "):
        parse_years(text, "--train-years")


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, peak=0.8, warmup=4, steps=12) for step in range(13)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates[8] == pytest.approx(0.4)  # half way down
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[11] > 0 and rates[12] == 0  # the last step, number 11, still moves the weights


def test_the_learning_rate_without_warmup_starts_at_its_peak():
    assert learning_rate(0, peak=0.8, warmup=0, steps=5) == 0.8


def test_a_run_shorter_than_its_warmup_only_rises():
    assert [learning_rate(step, peak=1.0, warmup=10, steps=3) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
