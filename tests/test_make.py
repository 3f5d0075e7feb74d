"""Making the data: a year is the same however it is made, a killed run leaves nothing half, and real data is what it says."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from datetime import datetime, timedelta
from pathlib import Path

import netCDF4
import numpy as np
import psutil
import pytest
import torch
from conftest import read_plain, run_module

from course_lib.config import UserError
from course_lib.data import make, ncep, packages, stats, weather
from course_lib.data.years import YearsDataset

COMMAND = ["--hours", "30", "--size", "16"]  # as the fixture `years` was made


def assert_same_values(folder: Path, years: Path, names: list[str]) -> None:
    for name in names:
        assert read_plain(folder / name).tobytes() == read_plain(years / name).tobytes(), name


def files(folder: Path, pattern: str = "*.nc") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def main(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["make", *map(str, arguments)])
    return make.main()


# ---- what is made --------------------------------------------------------------------------------------------------------


def test_files_and_their_time(years):
    assert files(years) == sorted(f"{name}_{year}.nc" for name in weather.VARIABLES for year in (1980, 1981, 1982))
    for path in years.glob("*.nc"):
        with netCDF4.Dataset(path) as file:
            variable, year = path.stem.rsplit("_", 1)
            dates = netCDF4.num2date(file["time"][:], file["time"].units, only_use_cftime_datetimes=False)
            assert list(dates) == [datetime(int(year), 1, 1) + timedelta(hours=hour) for hour in range(30)]
            assert (file[variable].units, file[variable].long_name) == weather.VARIABLES[variable]
            assert file[variable].shape == (30, 16, 16) and file[variable].dtype == np.float32


def test_files_hold_what_was_simulated(years):
    simulated = np.stack(list(weather.simulate(1981, hours=30, size=16)), axis=1)  # (variable, time, y, x)
    for name, values in zip(weather.VARIABLES, simulated):
        assert read_plain(years / f"{name}_1981.nc").tobytes() == values.tobytes()


def test_a_year_alone_with_other_jobs_and_format_has_the_same_values(years, tmp_path):
    alone = ["--out", tmp_path, "--years", 1981, "--jobs", 1, "--format", "compressed"]
    done = run_module("course_lib.data.make", *alone, *COMMAND)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == files(years, "*_1981.nc")
    assert_same_values(tmp_path, years, files(tmp_path))
    with netCDF4.Dataset(tmp_path / "T_2M_1981.nc") as file:
        assert file["T_2M"].filters()["zlib"]


@pytest.mark.parametrize(
    "format, chunks, zlib",
    [("contiguous", "contiguous", False), ("chunked", [1, 16, 16], False), ("compressed", [1, 16, 16], True)],
)
def test_format_is_the_storage(tmp_path, format, chunks, zlib):
    found = make.make_year(tmp_path, 1980, size=16, hours=4, format=format, recipe="a test")
    for path in tmp_path.glob("*.nc"):
        with netCDF4.Dataset(path) as file:
            field = file[path.stem.rsplit("_", 1)[0]]
            assert field.chunking() == chunks and field.filters()["zlib"] == zlib
            values = field[:].data.astype(float)
        assert found[path].count == values.size
        np.testing.assert_allclose([found[path].mean, found[path].std], [values.mean(), values.std()], rtol=1e-6)
    assert torch.is_grad_enabled()


def test_hours_of_a_year():
    assert [make.hours_of(year) for year in (1980, 1981, 1900, 2000)] == [8784, 8760, 8760, 8784]


def test_hours_0_is_the_whole_year(years, monkeypatch, capsys):
    monkeypatch.setattr(make, "hours_of", {1980: 30, 1981: 30, 1982: 31}.get)
    main(monkeypatch, "--out", years, "--years", "1980-1981", "--size", 16, "--hours", 0)
    assert "years 1980 to 1981 are there" in capsys.readouterr().out
    main(monkeypatch, "--out", years, "--years", "1980-1981", "--size", 16, "--hours", 99)  # not more than it has
    assert "years 1980 to 1981 are there" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"_1982.nc was made as .*hours 30, .* not .*hours 31, "):
        main(monkeypatch, "--out", years, "--years", "1980-1982", "--size", 16, "--hours", 0)


# ---- killed, and started again -------------------------------------------------------------------------------------------


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_run_leaves_nothing_half_and_the_next_completes_it(years, tmp_path, monkeypatch):
    out = tmp_path / "killed"
    command = ["--out", str(out), "--years", "1980-1982", *COMMAND, "--jobs"]
    for pattern, count in (
        (".*.part", 1),
        ("*.nc", 1),
        ("*.nc", 7),
    ):  # as the first year begins and ends, and the second
        run = subprocess.Popen([sys.executable, "-m", "course_lib.data.make", *command, "1"], stderr=subprocess.DEVNULL)
        while run.poll() is None and len(files(out, pattern)) < count:
            time.sleep(0.002)
        workers = psutil.Process(run.pid).children(recursive=True)
        with pytest.raises(UserError, match="another course_lib.data.make is writing to .*; wait for it to end"):
            main(monkeypatch, *command, 1)
        run.kill()
        assert run.wait() == -signal.SIGKILL
        while any(map(is_alive, workers)):  # they notice by themselves; should they not, the test times out
            time.sleep(0.01)
        assert len(files(out)) < len(files(years))
        assert_same_values(out, years, files(out))

    kept = (out / "V_10M_1980.nc").stat().st_mtime_ns
    (out / "PMSL_1981.nc").unlink(missing_ok=True)
    (out / ".PMSL_1981.nc.part").write_bytes(b"what a killed run may leave")
    done = run_module("course_lib.data.make", *command, 2)
    assert done.returncode == 0, done.stderr
    assert files(out) == files(years) and not files(out, ".*.part")
    assert_same_values(out, years, files(years))
    assert (out / "V_10M_1980.nc").stat().st_mtime_ns == kept  # a year that is whole is left alone
    np.testing.assert_allclose(YearsDataset(out).normalisation, YearsDataset(years).normalisation, rtol=1e-6)


# ---- mistakes ------------------------------------------------------------------------------------------------------------


def test_a_mistake_on_the_command_line_is_exit_2_and_one_line(years):
    done = run_module("course_lib.data.make", "--out", years, "--years", "1980-1982", "--hours", 30, "--size", 24)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    path = years / f"{next(iter(weather.VARIABLES))}_1980.nc"
    assert line.startswith(f"error: {path} was made as") and line.endswith("delete it or choose another --out")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--years", "soon"], "--years must look like 1980-1989 or 1980,1982 in rising order, not 'soon'"),
        (["--years", "1982-1980"], "--years must look like"),
        (["--years", "1980,1980"], "--years must look like"),
        (["--years", "80-87"], "--years must look like"),
        (["--size", "15"], "--size must be an even number of at least 16, not 15"),
        (["--size", "8"], "--size must be an even number of at least 16, not 8"),
        (["--hours", "-1"], "--hours must not be negative"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--size", "large"], "--size: invalid int value: 'large'"),
        (["--format", "zarr"], "--format: invalid choice: 'zarr'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_make_no_sense(tmp_path, monkeypatch, arguments, message):
    with pytest.raises(UserError, match=message):
        main(monkeypatch, "--out", tmp_path / "new", *arguments)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out .*file can't be written to .*; choose another folder"):
        main(monkeypatch, "--out", tmp_path / "file")


def test_a_corrupt_file_in_the_way(years, tmp_path, monkeypatch):
    out = Path(shutil.copytree(years, tmp_path / "years"))
    os.truncate(out / "PMSL_1981.nc", 1000)
    with pytest.raises(UserError, match=r"PMSL_1981.nc can't be read .*: delete it, and it is made again"):
        main(monkeypatch, "--out", out, "--years", "1980-1982", *COMMAND)


# ---- the real data -------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_real_data(tmp_path):
    done = run_module("course_lib.data.make", "--real", "ncep", "--out", tmp_path)
    if done.returncode == 2 and "pip could not download" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == [f"AIR_{year}.nc" for year in range(1948, 2027)]
    assert read_plain(tmp_path / "AIR_1948.nc").shape == (12, 73, 144)
    assert read_plain(tmp_path / "AIR_2026.nc").shape == (2, 73, 144)
    dataset = YearsDataset(tmp_path, lead=1, across_years=True, normalise=False)
    assert len(dataset) == 78 * 12 + 2 - 1
    january, february = dataset[0]
    assert january.shape == (1, 73, 144) and not torch.equal(january, february)
    assert january[0, :10].mean() < -15 < 20 < january[0, 30:42].mean() < 30  # the far north and the tropics, in °C
    [mean], [std] = dataset.normalisation
    everything = np.concatenate([read_plain(path) for path in sorted(tmp_path.glob("*.nc"))])
    np.testing.assert_allclose([mean, std], [everything.mean(dtype=float), everything.std(dtype=float)], rtol=1e-6)
    assert 0 < mean < 15 and 15 < std < 30


def test_real_data_is_split_by_year(tmp_path):
    values = np.random.default_rng(0).normal(size=(14, 5, 6)).astype(np.float32)
    dates = [datetime(1948 + month // 12, month % 12 + 1, 1) for month in range(14)]
    with netCDF4.Dataset(tmp_path / "source.nc", "w") as file:
        for dimension, length in zip(("time", "lat", "lon"), values.shape):
            file.createDimension(dimension, length)
        time = file.createVariable("time", "f8", ("time",))
        time.units = "hours since 1800-01-01 00:00:0.0"
        time[:] = netCDF4.date2num(dates, time.units)
        file.createVariable("air", "f4", ("time", "lat", "lon"), fill_value=-9.9e36)[:] = values
    out = tmp_path / "out"
    out.mkdir()
    ncep.make_years(tmp_path / "source.nc", out, format="contiguous")
    assert files(out) == ["AIR_1948.nc", "AIR_1949.nc"]
    dataset = YearsDataset(out, lead=1, across_years=True, normalise=False)  # the months join
    assert [x.numpy().tobytes() for x, _ in dataset] == [field[None].tobytes() for field in values[:-1]]
    with netCDF4.Dataset(out / "AIR_1949.nc") as file:
        stamps = netCDF4.num2date(file["time"][:], file["time"].units, only_use_cftime_datetimes=False)
        assert list(stamps) == dates[12:]
    assert stats.load(out)["AIR_1948.nc"]["count"] == 12 * 5 * 6


def test_a_package_of_another_hash_is_refused(tmp_path, monkeypatch):
    (tmp_path / "air.nc").write_bytes(b"not the real data")
    with tarfile.open(tmp_path / "fake.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "air.nc", ncep.MEMBER)

    def download(command, **_):
        shutil.copy(tmp_path / "fake.tar.gz", Path(command[command.index("-d") + 1]) / "pyunicorn-1.0.0.tar.gz")
        return subprocess.CompletedProcess(command, 0, "", "")

    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(packages.subprocess, "run", download)
    found = hashlib.sha256((tmp_path / "fake.tar.gz").read_bytes()).hexdigest()
    with pytest.raises(UserError, match=f"{ncep.PACKAGE} has the hash {found}, not {ncep.SHA256}"):
        ncep.fetch(folder)
    assert not (folder / ncep.MEMBER).exists()  # nothing was unpacked
    monkeypatch.setattr(ncep, "SHA256", found)
    assert ncep.fetch(folder).read_bytes() == b"not the real data"


def test_a_registry_out_of_reach_is_one_line(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: trying again\nERROR: no network\n")
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        UserError, match=r"^pip could not download pyunicorn==1.0.0 \(ERROR: no network\); the lessons run"
    ):
        ncep.fetch(tmp_path)


def test_with_ci_a_skipped_integration_test_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "true")
    for name in ("conftest.py", "helpers.py", "units.py"):
        shutil.copy(Path(__file__).parent / name, tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.integration\ndef test_outside(): pytest.skip('the registry is gone')\n"
        "def test_inside(): pytest.skip('as one may')\n"
    )
    done = run_module("pytest", "-p", "no:cacheprovider", "--strict-markers", tmp_path)
    assert done.returncode == 1
    assert "1 failed, 1 skipped" in done.stdout
    assert "CI=true, and this integration test was skipped: Skipped: the registry is gone" in done.stdout
