"""What the tests share: small simulated years, runs on them, a writer of hand-made files, the rule for integration tests."""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import netCDF4
import numpy as np
import pytest
import torch
from helpers import BIN, LAUNCH_VARIABLES, prefetch_threads, start_cluster, torchrun, use_no_slurm, use_slurm
from units import Units, turn_of

from course_lib.bert import make_small
from course_lib.config import Config
from course_lib.data.squad_files import read

SLURM_PROGRAMS = {"sacct", "salloc", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore ^C
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
torch.set_num_threads(1)
hypothesis.settings.register_profile("course", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("course")


def pytest_configure(config):
    config.addinivalue_line("markers", "integration: needs something from outside; with CI=true it must not be skipped")


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # in a worker of make test; alone, the order is that of the files
        items.sort(key=lambda item: turn_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log) -> Units:
    config.option.loadscopereorder = False  # ours is the order of turn_of
    return Units(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and item.get_closest_marker("integration") and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"CI=true, and this integration test was skipped: {report.longrepr[-1]}"
    return report


def run_module(module: str, *arguments: object) -> subprocess.CompletedProcess:
    """python -m <module> <arguments>, to its end."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="session")
def years(tmp_path_factory) -> Path:
    """Three simulated years of 30 hours on 16 × 16 points, made by the real command. Read only: copy it to change it."""
    out = tmp_path_factory.mktemp("simulated") / "years"
    done = run_module(
        "course_lib.data.make", "--out", out, "--years", "1980-1982", "--hours", 30, "--size", 16, "--jobs", 2
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def alone(monkeypatch):
    """No launcher's variables from outside, and no thread left behind."""
    for name in (*LAUNCH_VARIABLES, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COURSE_PLAIN", "1")
    yield
    assert prefetch_threads() == []


@pytest.fixture(scope="session")
def base(years, tmp_path_factory) -> Config:
    """50 samples to train on, which no batch divides, and 25 to validate on, which two ranks can't share evenly."""
    runs = tmp_path_factory.mktemp("runs")
    return Config(data=str(years), runs=str(runs), lead=5, width=2, depth=1, batch=4, lr=2e-3, warmup=5, log_every=1)


@pytest.fixture
def config(base, tmp_path) -> Config:
    return base.replace(runs=str(tmp_path))


@pytest.fixture(scope="session")
def trained(base) -> dict[str, Config]:
    """Two epochs of six steps on two ranks by the real command, with every strategy; the first six are on a timeline."""
    config = base.replace(epochs=2, timeline=6, bucket_mb=5e-4)  # 500 bytes: several buckets
    names = ["ddp", "ddp_naive", "ddp_bucketed", "ddp_overlapped"]
    configs = {name: config.replace(name=f"trained-{name}", strategy=name) for name in names}
    with ThreadPoolExecutor() as threads:  # at the same time: launchers mostly wait
        runs = list(threads.map(lambda c: torchrun(2, "-m", "course_lib.train", *c.arguments()), configs.values()))
    for code, output in runs:
        assert code == 0, output
        assert output.count("done: ") == 1  # however many ranks there are, one speaks
    return configs


def make_data(kind: str, out: Path, *, count: int) -> Path:
    """A folder of generated data, by the real command."""
    done = run_module("course_lib.data.make", "--kind", kind, "--out", out, "--count", count)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> Path:
    """130 generated digits, 13 of each: 110 to train on, 20 to judge by."""
    return make_data("digits", tmp_path_factory.mktemp("drawn") / "digits", count=130)


@pytest.fixture(scope="session")
def errands(tmp_path_factory) -> Path:
    """Questions and answers, made by the real command: 40 paragraphs to train on, 8 to judge by."""
    return make_data("questions", tmp_path_factory.mktemp("asked") / "questions", count=40)


@pytest.fixture(scope="session")
def tiny_bert(errands, tmp_path_factory) -> Path:
    """A BERT of two thin layers with random weights, and a tokenizer that knows the words of those questions."""
    squad = read(errands / "train.json")
    torch.manual_seed(7)  # a seed that no test takes
    return make_small(
        tmp_path_factory.mktemp("tiny") / "bert", [*squad.contexts, *(one.text for one in squad.questions)]
    )


@pytest.fixture(scope="session")
def case_studies(drawn, errands, tiny_bert) -> dict[str, dict]:
    """What the jobs of lessons 12 and 13 need instead of the years."""
    return {
        "12_rnn_digits": {"data": str(drawn), "global_batch": 8},
        "13_bert_squad": {"data": str(errands), "pretrained": str(tiny_bert), "tokens": 96, "stride": 16},
    }


@pytest.fixture(scope="session")
def cluster():
    """The folder of a running Slurm with two nodes, for all tests: leave it running, and its queue empty."""
    if not shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("Slurm is not installed: apt-get install slurm-wlm slurm-client munge")
    with start_cluster() as folder:
        yield folder


@pytest.fixture
def slurm(cluster, monkeypatch) -> Path:
    use_slurm(monkeypatch, cluster / "slurm.conf")
    return cluster


@pytest.fixture(scope="session")
def path_without(tmp_path_factory) -> str:
    """A PATH like this one, but without Slurm's programs."""
    folder = tmp_path_factory.mktemp("bin")
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place) != BIN and Path(place).is_dir() else ():
            if program.name not in SLURM_PROGRAMS and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return f"{BIN}:{folder}"


@pytest.fixture
def no_slurm(path_without, monkeypatch) -> None:
    use_no_slurm(monkeypatch, path_without)


def write_year(
    path: Path,
    values: np.ndarray,
    *,
    kind: str = "f4",
    attributes: dict | None = None,
    since: str = "",
    calendar: str | None = "standard",
    format: str = "NETCDF4",
    unlimited: bool = False,
    **storage,
) -> np.ndarray:
    """Write <VARIABLE>_<YEAR>.nc by hand, an hour a time step; returns the values as netCDF4 reads them, in float32."""
    name, year = path.stem.rsplit("_", 1)
    path.unlink(missing_ok=True)  # a new file, not new bytes in one that somebody may hold open
    with netCDF4.Dataset(path, "w", format=format) as file:
        dimensions = ("time", "level", "y", "x") if values.ndim == 4 else ("time", "y", "x")[: values.ndim]
        for dimension, length in zip(dimensions, values.shape):
            file.createDimension(dimension, None if unlimited and dimension == "time" else length)
        if calendar:
            time = file.createVariable("time", "f8", ("time",))
            time.units, time.calendar = f"hours since {since or f'{year}-01-01'}", calendar
            time[:] = np.arange(len(values))
        field = file.createVariable(name, kind, dimensions, **storage)
        field.setncatts(attributes or {})
        field[:] = values
    return read_plain(path)


def read_plain(path: Path) -> np.ndarray:
    """All of a file's values by netCDF4 and numpy alone: float32 (time, y, x), NaN where there is none."""
    with netCDF4.Dataset(path) as file:
        values = np.ma.masked_array(file[path.stem.rsplit("_", 1)[0]][:]).astype(np.float32).filled(np.nan)
    return values[:, 0] if values.ndim == 4 else values
