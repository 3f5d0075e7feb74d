"""Ranks that hang are looked at while they hang, and ranks are killed on purpose: on real processes."""

import json
import subprocess
import sys

import pytest
from helpers import assert_same, result, wait_until

from course_lib import faults, hangs, lesson, ranks
from course_lib.metrics import read_log

MISMATCH = """
import sys
import torch
import torch.distributed as dist
from course_lib.config import Config
from course_lib.hangs import save_flight_record
from course_lib.world import start

world = start(Config(timeout=3, device="cpu"))
try:
    dist.all_reduce(torch.ones(2, 3))
    dist.broadcast(torch.ones(5), src=0) if world.rank else dist.all_reduce(torch.ones(5))
finally:
    save_flight_record(sys.argv[1], world.rank)
"""


def test_a_stack_tells_where_a_process_is():
    program = (
        "import time\ndef sleep_on():\n    time.sleep(600)\ndef outer():\n    sleep_on()\nprint(flush=True)\nouter()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            wait_until(lambda: "sleep_on" in hangs.stack(process.pid))
            names = [line.split()[0] for line in hangs.stack(process.pid).splitlines()]
            assert names == ["sleep_on", "outer", "<module>"]  # the innermost first
            assert hangs.stack(process.pid, calls=1).split()[0] == "sleep_on"
        finally:
            process.kill()
    assert hangs.stack(process.pid).startswith(f"py-spy can't look into process {process.pid}")


def test_flight_records_show_where_the_ranks_part(tmp_path):
    program = tmp_path / "mismatch.py"
    program.write_text(MISMATCH)
    with pytest.raises(ranks.RanksError, match="Timed out|reset|closed"):
        ranks.torchrun(2, [program, tmp_path], quiet=True, environment={"TORCH_FR_BUFFER_SIZE": "10"})
    table = hangs.read_flight_records(tmp_path)
    assert table.titles == ("collective", "rank 0", "rank 1")
    assert table.rows == [(1, "all_reduce (2×3)", "all_reduce (2×3)"), (2, "all_reduce (5)", "broadcast (5)")]


def test_a_rank_killed_on_purpose_comes_back_to_the_same_bits(config, capsys):
    """The log with repeats shows both starts, without them it is that of the undisturbed run."""
    straight = config.replace(name="straight", strategy="ddp", epochs=60)  # seconds: time enough to be killed in
    again = straight.replace(name="killed", checkpoint_every=7)
    ranks.torchrun(2, straight, quiet=True)
    with faults.kill(1, again, step=20):
        ranks.torchrun(2, again, max_restarts=1, quiet=True)
    assert "[kill -9] rank 1" in capsys.readouterr().out
    starts = [event["step"] for event in read_log(again.run, repeats=True) if event["event"] == "start"]
    assert len(starts) == 2 and starts[0] == 0
    assert_same(result(again), result(straight))


def test_what_a_shell_printed_is_recorded_and_shown_where_it_can_not_run(tmp_path, monkeypatch, capsys):
    recorded = tmp_path / "slurm.json"
    recorded.write_text('{"where": "on a machine of the past", "found": {}}')
    monkeypatch.setattr(lesson, "REFERENCE", tmp_path)
    monkeypatch.setenv("COURSE_RECORD", "1")
    lesson.shell("echo $((6 * 7))", live=True)
    lesson.shell("echo $$", live=True, name="never the same")
    lesson.shell("echo runs everywhere")
    assert set(json.loads(recorded.read_text())["found"]) == {"echo $((6 * 7))", "never the same"}
    assert capsys.readouterr().out.startswith("42\n")
    lesson.shell("echo $((6 * 7))", live=False)
    assert capsys.readouterr().out == "not run here, but recorded: on a machine of the past\n\n42\n"
    with pytest.raises(RuntimeError, match="false: exit code 1"):
        lesson.shell("false")
    with pytest.raises(RuntimeError):
        lesson.shell("false\ntrue")  # it stops at the first mistake
