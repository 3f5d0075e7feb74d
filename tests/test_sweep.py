"""A sweep runs every point once, whatever interrupts it, and its rows are the means of what the logs say."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_module
from helpers import ask, assert_same, environment, remove_logs, result, wait_until, wait_until_idle

from course_lib import results, sweep
from course_lib.config import Config, UserError
from course_lib.failures import RanksError
from course_lib.metrics import Log, read_log
from course_lib.submission import sbatch
from course_lib.trainer import fit
from course_lib.world import World


@pytest.fixture
def small(config) -> Config:
    return config.replace(name="sweep", strategy="ddp", max_steps=3)


@pytest.fixture(scope="session")
def swept(base) -> tuple[Config, list[dict]]:
    """1 and 2 ranks with two seeds, three steps each, by the real launcher."""
    config = base.replace(name="swept", strategy="ddp", max_steps=3)
    return config, sweep.run(config, [1, 2], [0, 1])


# ---- running ---------------------------------------------------------------------------------------------------------------


def test_every_point_has_its_own_log(swept):
    config, rows = swept
    assert [(row["ranks"], row["seeds"]) for row in rows] == [(1, 2), (2, 2)]
    runs = sorted(config.run.iterdir())
    assert [run.name for run in runs] == [f"ddp-{n}-ranks-seed-{seed}" for n in (1, 2) for seed in (0, 1)]
    starts = [read_log(run)[0] for run in runs]
    assert [(start["world_size"], start["config"]["seed"]) for start in starts] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_table_and_figure_fill_themselves_in_lab(swept, base, monkeypatch):
    """A display that is changed after every run, with what is done so far."""
    config, rows = swept
    shown = []

    class Handle:
        def update(self, view) -> None:
            shown.append(view.data)

    monkeypatch.setattr(sweep, "has_bar", lambda: True)
    monkeypatch.setattr(sweep, "display", lambda view, display_id: shown.append(view.data) or Handle())
    monkeypatch.setattr(sweep, "_here", lambda n, one: shutil.copytree(config.run / one.name, one.run))
    again = config.replace(name="filled")
    assert [row["ranks"] for row in sweep.run(again, [1, 2], [0, 1])] == [1, 2]
    assert [f"{n} of 4 runs are done" in view for n, view in enumerate(shown)] == [True] * 5
    assert "<img" not in shown[0] and all("image/png;base64" in view for view in shown[1:])
    assert [view.count("<tr>") for view in shown] == [0, 2, 2, 3, 3]
    shutil.rmtree(again.run)


def test_what_is_done_is_not_done_again(swept, monkeypatch):
    config, rows = swept
    monkeypatch.setattr(sweep, "_here", lambda *_: pytest.fail("it was done"))
    assert sweep.run(config, [1, 2], [0, 1]) == rows


def test_what_was_cut_off_goes_on_and_what_was_not_begun_begins(small, monkeypatch):
    """One of three runs is done and the second is in the middle when the kernel dies."""
    small, begun, asked = small.replace(max_steps=6), [], iter([False, False, True])

    def here(n: int, config: Config) -> None:
        begun.append((config.seed, config.resume))
        told = (lambda: next(asked)) if begun == [(0, False), (1, False)] else None
        if not fit(config, told=told).metrics:  # saved and stopped after three steps
            raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_here", here)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(small, [1], [0, 1, 2])
    rows = sweep.run(small, [1], [0, 1, 2])
    assert begun == [(0, False), (1, False), (1, True), (2, False)]
    assert [row["seeds"] for row in rows] == [3]
    whole = small.replace(name="whole", seed=1)
    fit(whole)
    assert_same(
        result(small.replace(runs=str(small.run), name="ddp-1-ranks-seed-1")), result(whole)
    )  # to the same bits


def test_a_killed_sweep_leaves_no_ranks_and_goes_on(small):
    small = small.replace(max_steps=150, epochs=100, checkpoint_every=1)
    words = [sys.executable, "-m", "course_lib.sweep", "--ranks", "2", *small.arguments()]
    first = small.run / "ddp-2-ranks-seed-0"
    with subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        wait_until((first / "checkpoint.pt").exists)
        process.send_signal(signal.SIGKILL)
    said = f"--runs={small.run}"
    listed = ["ps", "axww"]
    wait_until(lambda: said not in subprocess.run(listed, capture_output=True, text=True, check=True).stdout, every=0.2)
    rows = sweep.run(small, [2])
    assert [(row["ranks"], row["seeds"]) for row in rows] == [(2, 1)]
    starts = [event["step"] for event in read_log(first, repeats=True) if event["event"] == "start"]
    assert len(starts) == 2 and 0 == starts[0] < starts[1]  # it went on


def test_other_settings_under_the_same_name_are_refused(swept):
    config, _ = swept
    for changes, flag in [({"lr": 0.5}, "--lr 0.002, not 0.5"), ({"data": "elsewhere"}, "--data years, not elsewhere")]:
        with pytest.raises(UserError, match=f"ran with {flag}: choose another --name, or delete it"):
            sweep.run(config.replace(**changes), [1], [0])
    assert sweep.is_done(sweep.grid(config.replace(data=f"x/../{config.data}"), [1], [0])[0][1])  # the same data


def test_the_ranks_words_come_through(small):
    with pytest.raises(RanksError, match=r"rank [01] ended with exit code 2: error: --batch 40 on 2 ranks needs 80"):
        sweep.run(small.replace(batch=40), [2])


def test_the_command_prints_the_table_and_draws_the_figure(swept):
    config, _ = swept
    done = run_module("course_lib.sweep", "--ranks", "1,2", "--seeds", "0,1", *config.arguments())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["strategy", "ranks", "seeds", "samples/s"] and lines[-1].startswith("done: ")
    assert (config.run / "scaling.png").stat().st_size > 10_000
    only = run_module("course_lib.sweep", f"--runs={config.runs}", f"--name={config.name}")
    assert only.stdout == done.stdout


@pytest.mark.parametrize(
    "words, told",
    [
        (["--ranks", "1,x"], "must look like 1,2,4 and not like '1,x'"),
        (["--name", "nothing-here"], "holds no finished runs; --ranks 1,2,4 makes some"),
        (["--wdth", "3"], "--wdth"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, told, tmp_path):
    done = run_module("course_lib.sweep", f"--runs={tmp_path}", *words)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.integration
def test_a_notebook_submits_it_and_gets_the_same_rows(slurm, small, swept):
    """By slurm/sweep.sh, a job for each number of ranks; a second call finds everything done and submits nothing."""
    config, here = swept
    small = small.replace(name="on-slurm")
    try:
        rows = sweep.run(small, [1, 2], slurm=True)
        assert [row["ranks"] for row in rows] == [1, 2]
        first = [row_of["loss"] for row_of in results.collect(config.run) if row_of["seed"] == 0]
        assert [row["loss"] for row in rows] == pytest.approx(first, rel=1e-4)
        jobs = subprocess.run(
            ["squeue", "--noheader", "--states=all"], capture_output=True, text=True, check=True
        ).stdout
        assert sweep.run(small, [1, 2], slurm=True) == rows
        again = subprocess.run(
            ["squeue", "--noheader", "--states=all"], capture_output=True, text=True, check=True
        ).stdout
        assert len(again.splitlines()) <= len(jobs.splitlines())
        with pytest.raises(RanksError, match=r"jobs \d+ have ended without ddp-2-ranks-seed-0: look at runs/sweep-"):
            sweep.run(small.replace(name="too-large", batch=40), [2], slurm=True)
    finally:
        remove_logs(slurm)


@pytest.mark.integration
def test_interrupted_and_run_again_it_finds_its_jobs_instead_of_submitting_them_twice(slurm, small, monkeypatch):
    """A job in the way keeps them queued. One that asks for more, of the same folders, waits until they are done."""
    small, waited = small.replace(name="found-again"), []
    in_the_way = sbatch(["--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"])

    def interrupt(jobs: list[str], *_) -> None:
        waited.append(jobs)
        raise KeyboardInterrupt

    try:
        for _ in range(2):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(sweep, "_wait", interrupt)
                sweep.run(small, [1, 2], slurm=True)
        assert waited[0] == waited[1]
        assert sweep.submit(small, [1], [0, 1])[0] not in waited[0]
        ask(slurm, "scancel", str(in_the_way))
        assert [row["seeds"] for row in sweep.run(small, [1], [0, 1], slurm=True)] == [2]
        wait_until_idle(slurm)
        logs = [read_log(run, repeats=True) for run in small.run.glob("ddp-*")]
        assert [[event["event"] for event in log].count("start") for log in logs] == [1, 1, 1]
    finally:
        ask(slurm, "scancel", "--me")
        remove_logs(slurm)


# ---- from logs to rows -----------------------------------------------------------------------------------------------------


def write_run(
    run: Path, ranks: int, speeds: list[float], *, seed: int = 0, iou: float = 0.5, ended: bool = True
) -> Path:
    with Log(run / "metrics.jsonl", World()) as log:
        log.write("start", step=0, world_size=ranks, config={"strategy": "ddp", "seed": seed, "batch": 8})
        for step, speed in enumerate(speeds, 1):
            log.write("step", step=step, samples_per_s=speed)
        log.write("eval", step=len(speeds), loss=1 - iou, iou=iou)
        if ended:
            log.write("end", step=len(speeds), seconds=100.0 / ranks)
    return run


def test_speed_up_and_efficiency_by_hand(tmp_path):
    """The median without the first line: 10, 18 and 30 samples a second."""
    speeds = {4: [1, 30, 30], 1: [1, 10, 99, 10, 9], 2: [18]}  # in any order; of a single line that one counts
    for ranks, speed in speeds.items():
        write_run(tmp_path / str(ranks), ranks, speed)
    rows = results.summarise(results.collect(tmp_path))
    found = [(row["ranks"], row["samples_per_s"], row["speed_up"], row["efficiency"], row["iou"]) for row in rows]
    assert found == [(1, 10, 1, 1, 0.5), (2, 18, 1.8, 0.9, 0.5), (4, 30, 3, 0.75, 0.5)]
    line = repr(results.show(rows)).splitlines()[2]
    assert re.split(r"\s{2,}", line) == ["ddp", "2", "1", "18.0", "1.80", "90%", "50.0", "0.5000"]
    from_two = results.summarise([results.row_of(tmp_path / n) for n in ("4", "2")])  # the fewest count as perfect
    assert [row["speed_up"] for row in from_two] == pytest.approx([2, 10 / 3])
    assert [row["efficiency"] for row in from_two] == pytest.approx([1, 5 / 6])


def test_means_and_spreads_over_seeds_by_hand(tmp_path):
    """10 and 14 samples a second: mean 12, standard deviation √8; 24 on two ranks and 30 ± 10 on three."""
    for seed, (speed, iou) in enumerate([(10, 0.6), (14, 0.8)]):
        write_run(tmp_path / f"one{seed}", 1, [speed], seed=seed, iou=iou)
        write_run(tmp_path / f"two{seed}", 2, [24], seed=seed, iou=0.7)
        write_run(tmp_path / f"three{seed}", 3, [30 + 50**0.5 * (-1) ** seed], seed=seed, iou=0.7)
    one, two, three = results.summarise(results.collect(tmp_path))
    assert (one["samples_per_s"], one["samples_per_s_spread"]) == pytest.approx((12, 8**0.5))
    assert (one["iou"], one["iou_spread"]) == pytest.approx((0.7, 0.02**0.5))
    assert (one["speed_up"], one["speed_up_spread"]) == (1, 0)  # by definition
    assert (two["speed_up"], two["speed_up_spread"]) == pytest.approx((2, 2 * 8**0.5 / 12))  # of the first alone
    assert (three["speed_up"], three["speed_up_spread"]) == pytest.approx((2.5, 2.5 * (8 / 144 + 100 / 900) ** 0.5))
    assert "12.0 ± 2.8" in repr(results.show([one, two]))


def test_strategies_are_compared_each_with_its_own_first_rank(tmp_path):
    for strategy, speeds in {"ddp": (10, 19), "ddp_naive": (8, 8)}.items():
        for ranks, speed in zip((1, 2), speeds):
            run = write_run(tmp_path / f"{strategy}{ranks}", ranks, [speed])
            path = run / "metrics.jsonl"
            path.write_text(path.read_text().replace('"strategy": "ddp"', f'"strategy": "{strategy}"'))
    rows = results.summarise(results.collect(tmp_path))
    assert [(row["strategy"], row["speed_up"]) for row in rows] == [
        ("ddp", 1.0),
        ("ddp", 1.9),
        ("ddp_naive", 1.0),
        ("ddp_naive", 1.0),
    ]


def test_a_run_that_has_not_ended_is_left_out_or_refused_by_name(tmp_path):
    write_run(tmp_path / "whole", 1, [1.0])
    half = write_run(tmp_path / "half", 2, [1.0], ended=False)
    assert [row["ranks"] for row in results.collect(tmp_path)] == [1]
    with pytest.raises(UserError, match=f"^{re.escape(str(half))} has not come to its end"):
        results.row_of(half)


def test_time_to_a_target_leaves_out_the_time_between_two_attempts():
    events = [("start", 0), ("step", 3), ("eval", 5, 0.5), ("start", 105), ("step", 107), ("eval", 110, 0.9)]
    log = [dict(zip(("event", "time", "iou"), event)) for event in events]
    assert results.seconds_to(log, lambda event: event["iou"] >= 0.4) == 5
    assert results.seconds_to(log, lambda event: event["iou"] >= 0.8) == 5 + 5
    assert results.seconds_to(log, lambda event: event["iou"] >= 0.95) is None


def test_all_attempts_of_a_run_are_paid_for(tmp_path):
    """Cut off after 7 seconds, and again after 2; the last one took 100."""
    run = write_run(tmp_path / "run", 1, [1.0, 2.0])
    start, step = read_log(run)[:2]
    before = [(start, -500), (step, -493), (start, -100), (step, -98)]
    lines = [json.dumps(event | {"time": start["time"] + seconds}) for event, seconds in before]
    path = run / "metrics.jsonl"
    path.write_text("\n".join([*lines, path.read_text()]))
    assert results.row_of(run)["seconds"] == pytest.approx(7 + 2 + 100)


def test_time_to_a_target_of_every_run(tmp_path):
    for seed, iou in enumerate([0.6, 0.9]):
        write_run(tmp_path / str(seed), 2, [1.0], seed=seed, iou=iou)
    found = results.to_target(results.collect(tmp_path), lambda event: event["iou"] >= 0.8)
    assert list(found) == [2] and found[2][0] is None and found[2][1] >= 0


def test_the_real_log_has_what_the_rows_need(swept):
    config, rows = swept
    row = results.collect(config.run)[0]
    events = read_log(row["run"])
    assert row["seconds"] == events[-1]["seconds"] and row["samples_per_s"] > 0
    judged = next(event for event in events if event["event"] == "eval")
    assert results.seconds_to(events, lambda event: True) == judged["time"] - events[0]["time"]
    assert [(row["ranks"], row["nodes"]) for row in rows] == [(1, 1), (2, 1)]
