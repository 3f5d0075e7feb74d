"""Training, on one rank and on real ranks: resumed == uninterrupted, split == whole, and every mistake is one line."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch
from helpers import BIN, assert_same, environment, result, wait_until

from course_lib import checkpoint, train, trainer
from course_lib.config import Config, UserError, run_main
from course_lib.data.batches import shard
from course_lib.data.tasks import make_task
from course_lib.metrics import read_log
from course_lib.parallel import STRATEGIES
from course_lib.ports import claim_ports, next_port
from course_lib.trainer import evaluate, fit, make_loader, make_model
from course_lib.world import World, start

LAUNCHERS = {
    "python": [sys.executable],
    "torchrun 1": [BIN / "torchrun", "--standalone", "--nproc-per-node", "1"],
    "torchrun 2": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"],
    "mpirun 2": [BIN / "mpirun", "-n", "2", sys.executable, "-m", "mpi4py"],
}
LOADERS = [(0, 0), (2, 0), (0, 1), (2, 1)]  # (prefetch, workers)
pytestmark = pytest.mark.usefixtures("alone")


def command(config: Config, launcher: str = "python") -> list[str]:
    return [*map(str, LAUNCHERS[launcher]), "-m", "course_lib.train", *config.arguments()]


def run(config: Config, launcher: str) -> None:
    """Train by the real command, to success."""
    done = subprocess.run(
        command(config, launcher), env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: ") == 1  # however many ranks there are, one speaks


@contextmanager
def running(config: Config, launcher: str) -> Iterator[psutil.Process]:
    """The command under way, with some steps done; nothing of it is left afterwards."""
    process = psutil.Popen(
        command(config, launcher), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: process.poll() is not None or logged_step(config) > 9)  # its checkpoint follows
        yield process
    finally:
        for left in [*process.children(recursive=True), process] if process.is_running() else []:
            left.kill()
        process.wait()


def logged_step(config: Config) -> int:
    there = (config.run / "metrics.jsonl").exists()
    return max([event["step"] for event in read_log(config.run)], default=0) if there else 0


def assert_unfinished(config: Config, *, steps: int) -> None:
    assert 8 < checkpoint.load(config.run / "checkpoint.pt")["position"]["step"] < steps
    assert "end" not in [event["event"] for event in read_log(config.run)]


class Crash(Exception):
    pass


def crash(config: Config, monkeypatch, *, function: str, call: int) -> None:
    """Train until the trainer calls a function for the nth time."""
    real, calls = getattr(trainer, function), iter(range(1, call))

    def fails(*args, **options):
        if next(calls, None) is None:
            raise Crash
        return real(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(trainer, function, fails)
        fit(config)


# ---- one rank: resumed == uninterrupted ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(base) -> dict:
    """The result of three epochs of 12 steps, uninterrupted, without prefetching."""
    config = base.replace(name="whole", epochs=3, prefetch=0)
    fit(config)
    return result(config)


def test_a_run_validates_and_logs_as_it_should(whole):
    assert whole["position"] == {"step": 36, "epoch": 2, "seen": 48}
    assert [event["step"] for event in whole["log"] if event["event"] == "step"] == list(range(1, 37))
    evals = [event for event in whole["log"] if event["event"] == "eval"]
    assert [(event["step"], event["count"]) for event in evals] == [(12, 25), (24, 25), (36, 25)]
    assert evals[0]["loss"] > evals[1]["loss"] > evals[2]["loss"]  # it learns


@pytest.mark.parametrize("prefetch, workers", LOADERS)
@pytest.mark.parametrize(
    "every, function, call, resumed_at",
    [
        (0, "train_step", 18, {"step": 12, "epoch": 1, "seen": 0}),
        (5, "train_step", 18, {"step": 15, "epoch": 1, "seen": 12}),
        (12, "evaluate", 2, {"step": 24, "epoch": 1, "seen": 48}),
    ],
    ids=["epoch boundary", "mid-epoch", "after the last step of an epoch"],
)
def test_resumed_equals_uninterrupted(config, whole, monkeypatch, prefetch, workers, every, function, call, resumed_at):
    config = config.replace(epochs=3, prefetch=prefetch, workers=workers, checkpoint_every=every)
    crash(config, monkeypatch, function=function, call=call)
    assert checkpoint.load(config.run / "checkpoint.pt")["position"] == resumed_at
    torch.rand(7)  # a new process stands elsewhere in the stream of random numbers
    fit(config.replace(resume=True))
    assert_same(result(config), whole)


@pytest.fixture(scope="module")
def long(base) -> dict:
    config = base.replace(name="long", epochs=12)
    fit(config)
    return result(config)


@pytest.mark.parametrize("prefetch, workers", [(2, 0), (0, 1)])
def test_killed_and_resumed_equals_uninterrupted(config, long, prefetch, workers):
    config = config.replace(epochs=12, prefetch=prefetch, workers=workers)
    with running(config.replace(checkpoint_every=1), "python") as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert_unfinished(config, steps=144)
    fit(config.replace(resume=True))
    assert_same(result(config), long)


def test_a_finished_run_resumed_stays_as_it_is(config):
    fit(config.replace(max_steps=3))
    before = result(config)
    fit(config.replace(max_steps=3, resume=True))
    assert_same(result(config), before)


def test_a_new_run_under_an_old_name_keeps_the_old_one_aside(config):
    fit(config.replace(max_steps=3))
    old = {path.name: path.read_bytes() for path in config.run.iterdir()}
    fit(config.replace(max_steps=2))
    assert {name: (config.run / f"{name}.previous").read_bytes() for name in old} == old
    assert [event["step"] for event in read_log(config.run) if event["event"] == "step"] == [1, 2]


# ---- determinism -----------------------------------------------------------------------------------------------------------


def test_the_seed_decides_everything(config):
    configs = [config.replace(name=name, seed=seed, max_steps=4) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    first, again, other = (fit(config).model.state_dict() for config in configs)
    assert_same(result(configs[0]), result(configs[1]))
    assert_same(first, again)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_every_epoch_has_an_order_of_its_own(config, monkeypatch):
    real, seen = trainer.train_step, []
    monkeypatch.setattr(trainer, "train_step", lambda m, batch, *rest: seen.append(batch[0]) or real(m, batch, *rest))
    fit(config.replace(epochs=2))
    assert len(seen) == 24
    assert not any(torch.equal(*pair) for pair in zip(seen[:12], seen[12:]))


def test_recomputed_activations_change_nothing(config):
    config = config.replace(max_steps=4)
    fit(config)
    fit(config.replace(name="recomputed", checkpointing=True))
    assert_same(result(config), result(config.replace(name="recomputed")))


# ---- several ranks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(base) -> Config:
    """DDP on two ranks by torchrun, uninterrupted: ten epochs of six steps."""
    config = base.replace(name="two-ranks", strategy="ddp", epochs=10)
    run(config, "torchrun 2")
    return config


def test_two_ranks_equal_one_rank_with_twice_the_batch(two_ranks, config):
    """Within rtol 1e-4 and atol 1e-5 after 60 steps: the same sums, added up in another order."""
    one_rank = config.replace(batch=8, epochs=10)
    fit(one_rank)
    two, one = result(two_ranks), result(one_rank)
    assert two["position"] == one["position"] == {"step": 60, "epoch": 9, "seen": 48}
    torch.testing.assert_close(two["model"], one["model"], rtol=1e-4, atol=1e-5)
    evals = [[event for event in run["log"] if event["event"] == "eval"] for run in (two, one)]
    assert len(evals[0]) == len(evals[1]) == 10
    for a, b in zip(*evals):
        assert (a["step"], a["epoch"], a["count"]) == (b["step"], b["epoch"], b["count"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["rmse"] == pytest.approx(b["rmse"], rel=1e-5)


def test_metrics_of_uneven_shards_are_those_of_the_whole(two_ranks):
    """13 and 12 samples: the mean of the ranks' means would be another number."""
    task = make_task(two_ranks)
    model = make_model(two_ranks, task)
    model.load_state_dict(checkpoint.load(two_ranks.run / "checkpoint.pt")["model"])

    def on(world: World) -> dict:
        return evaluate(model.eval(), make_loader(two_ranks, task.valid, shard(25, 4, world), World()))

    logged = next(event for event in reversed(read_log(two_ranks.run)) if event["event"] == "eval")
    whole, shards = on(World()), [on(World(rank, rank, 2)) for rank in (0, 1)]
    assert [part["count"] for part in shards] == [13, 12]
    assert logged["loss"] == pytest.approx(whole["loss"], rel=1e-7)
    assert list(logged["rmse"].values()) == pytest.approx(whole["rmse"], rel=1e-7)
    assert sum(part["loss"] for part in shards) / 2 != pytest.approx(whole["loss"], rel=1e-6)


def test_mpirun_equals_torchrun(two_ranks, config):
    config = config.replace(strategy="ddp", epochs=10, launcher="mpi")
    run(config, "mpirun 2")
    assert_same(result(config), result(two_ranks))


def test_two_ranks_killed_and_resumed_equal_two_ranks_uninterrupted(two_ranks, config):
    """One rank is killed; torchrun then ends the other."""
    config = config.replace(strategy="ddp", epochs=10)
    with running(config.replace(checkpoint_every=1), "torchrun 2") as process:
        rank = max(process.children(), key=lambda child: child.pid)
        rank.kill()
        assert process.wait() == 1
    assert_unfinished(config, steps=60)
    run(config.replace(resume=True), "torchrun 2")
    assert_same(result(config), result(two_ranks))


def test_torchrun_with_one_rank_equals_no_launcher_at_all(config):
    config = config.replace(max_steps=4)
    fit(config)
    launched = config.replace(name="launched", strategy="ddp")
    run(launched, "torchrun 1")
    assert_same(result(launched), result(config))


# ---- the world -------------------------------------------------------------------------------------------------------------


def test_without_a_launcher_the_world_is_one_rank():
    assert start(Config(device="cpu")) == World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("threads", [2, 1])
def test_a_rank_takes_the_threads_it_is_given(threads):
    start(Config(threads=threads))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launchers_variables_are_refused(monkeypatch, missing):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    del variables[missing]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{missing} must be set"):
        start(Config())


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "HOROVOD_SIZE"])
def test_ranks_that_nobody_told_their_number_are_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(UserError, match="2 processes were launched, but none was told its rank.*rank_env.sh.*mpi"):
        start(Config(device="cpu"))
    monkeypatch.setenv(variable, "1")
    assert start(Config(device="cpu")).world_size == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="^--device cuda"):
        start(Config(device="cuda"))


# ---- mistakes: exit code 2 and one line ------------------------------------------------------------------------------------


def only_line(text: str) -> str:
    [line] = text.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def complaint(monkeypatch, capsys):
    """What the command says to a mistake, run in this process: its one line on stderr."""

    def of(config: Config, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train", *config.arguments(), *words])
        with pytest.raises(SystemExit) as ended:
            run_main(train.main)
        assert ended.value.code == 2
        return only_line(capsys.readouterr().err)

    return of


@pytest.mark.parametrize(
    "words, named",
    [
        (["--strategy", "dpp"], f"--strategy must be one of {', '.join(STRATEGIES)}"),
        (["--resume"], "checkpoint.pt is not there"),
        (["--batch", "51"], "--batch 51 on 1 ranks needs 51 samples a step, and there are only 50"),
        (["--train-years", "1980-1982"], "year 1982 is in --train-years and in --valid-years"),
        (["--train-years", "1980", "--valid-years", "1980,1981"], "year 1980 is in --train-years"),
        (["--train-years", "1990"], "1990"),
        (["--train-years", "1982-1980"], "--train-years must look like"),
        (["--variables", "NONE"], "NONE_1980.nc is missing"),
        (["--lead", "30"], "lead=30"),
        (["--data", "/nowhere"], "/nowhere has no <VARIABLE>_<YEAR>.nc files"),
        (["--name", ".."], "--name"),
        (["--lr", "1e30", "--warmup", "0"], "lower --lr"),
        (
            ["--lr", "1e30", "--warmup", "0", "--batch", "25", "--log-every", "9"],
            "at step 2: lower --lr",
        ),  # by validation
    ],
)
def test_a_mistake_is_one_line(complaint, config, words, named):
    assert named in complaint(config, *words)


def test_a_single_year_leaves_nothing_to_train_on(complaint, config, years, tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    for path in years.glob("*_1981.nc"):
        shutil.copy(path, only)
    assert "has only the year 1981" in complaint(config.replace(data=str(only)))


def test_a_run_that_diverges_leaves_the_last_good_checkpoint(complaint, config, monkeypatch):
    """Two ways to find out: the loss of a step, and the validation."""
    fit(config.replace(max_steps=2))
    before = result(config)
    monkeypatch.setattr(trainer, "learning_rate", lambda *_, **__: 1e30)
    for steps in ("3", "9"):
        complaint(config, "--resume", "--max-steps", steps)
        content = checkpoint.load(config.run / "checkpoint.pt")
        assert_same(content["model"], before["model"])
    assert "NaN" not in (config.run / "metrics.jsonl").read_text()  # which is not JSON


def test_checkpoints_that_can_not_be_resumed(complaint, config):
    fit(config.replace(max_steps=2))
    saved = config.run / "checkpoint.pt"
    assert "--width 2, not 4" in complaint(config, "--resume", "--width", "4")
    content = saved.read_bytes()
    for damaged in (b"garbage", content[: len(content) // 2], b""):
        saved.write_bytes(damaged)
        assert f"{saved} is no checkpoint that can be trusted" in complaint(config, "--resume")


def start_rank(config: Config, *words: str, **variables: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command(config), *words], env=environment(**variables), **pipes)


def assert_complains(process: subprocess.Popen, named: str) -> None:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 2, err
    assert named in only_line(err) and out == ""


class Payload:
    def __reduce__(self):
        return print, ("the payload ran",)


def test_mistakes_on_the_real_command_line(config):
    """All at once, for each takes seconds to start."""
    poisoned = config.replace(name="poisoned", resume=True)
    poisoned.run.mkdir()
    torch.save({"config": vars(poisoned), "model": Payload()}, poisoned.run / "checkpoint.pt")
    expected = {
        "argument --width: invalid int value: 'x'": start_rank(config, "--width", "x"),
        "MASTER_ADDR and MASTER_PORT must be set": start_rank(config, RANK="0", WORLD_SIZE="2"),
        "each is alone in a world of 1": start_rank(config.replace(launcher="mpi"), PMI_SIZE="2"),
        "is no checkpoint that can be trusted": start_rank(poisoned),
    }
    for named, process in expected.items():
        assert_complains(process, named)


def test_the_single_strategy_under_two_ranks_is_refused_by_both(config):
    with claim_ports() as claim:
        together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next_port(claim))}
        for process in [start_rank(config, RANK=rank, **together) for rank in ("0", "1")]:
            assert_complains(process, "--strategy single is for one rank, and 2 were started")


def test_a_rank_starts_without_what_only_some_strategies_need():
    """DTensor and FSDP take a second or two to import: on every rank of every run, if nobody looks."""
    code = "import sys, course_lib.train; print([name for name in sys.modules if name in %r])"
    heavy = (
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "matplotlib",
        "pandas",
    )
    done = subprocess.run([sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
