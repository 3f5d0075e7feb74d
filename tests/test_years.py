"""The lazy dataset: lazy == eager == plain netCDF4, the index == a list of samples, and every mistake is one clear line."""

import fcntl
import os
import pickle
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from pathlib import Path

import netCDF4
import numpy as np
import psutil
import pytest
import torch
from conftest import read_plain, run_module, write_year
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from course_lib.config import Config, UserError, run_main
from course_lib.data import stats
from course_lib.data import years as module
from course_lib.data.netcdf import Header, read_header
from course_lib.data.tasks import make_task
from course_lib.data.years import YearsDataset

SHAPE = (40, 12, 16)
PACKED = {"scale_factor": 0.0123, "add_offset": 273.15}
STORAGES = {
    "contiguous": {"contiguous": True},
    "chunked": {"chunksizes": (1, *SHAPE[1:])},
    "chunked with a remainder": {"chunksizes": (3, 5, 7)},
    "compressed": {"chunksizes": (1, *SHAPE[1:]), "compression": "zlib", "shuffle": True},
    "default chunks": {"compression": "zlib"},  # the library's choice: many time steps a chunk
    "unlimited": {"unlimited": True},
    "classic": {"format": "NETCDF3_CLASSIC"},
    "classic, unlimited": {"format": "NETCDF3_CLASSIC", "unlimited": True},
    "64-bit offset": {"format": "NETCDF3_64BIT_OFFSET"},
    "packed": {"kind": "i2", "fill_value": -32768, "attributes": PACKED},
    "packed, compressed": {"kind": "i2", "fill_value": -32768, "attributes": PACKED, "compression": "zlib"},
    "packed, classic": {"kind": "i2", "fill_value": -32768, "attributes": PACKED, "format": "NETCDF3_CLASSIC"},
    "packed by float32": {"kind": "i2", "attributes": {name: np.float32(value) for name, value in PACKED.items()}},
    "big-endian": {"kind": ">f4", "endian": "big"},
    "big-endian, compressed": {"kind": ">f4", "endian": "big", "compression": "zlib"},
    "float64": {"kind": "f8"},
}
THREE_KINDS = ["contiguous", "compressed", "classic"]  # one for each way of reading


def write_years(root: Path, storage: str, *, years: int = 2, level: bool = False) -> dict[str, list[np.ndarray]]:
    """Hand-made years of the variables A and B: {variable: [(time, y, x) of each year]}, as netCDF4 reads them."""
    random, plain, options = np.random.default_rng(0), {"A": [], "B": []}, dict(STORAGES[storage])
    if level and "chunksizes" in options:
        options["chunksizes"] = (options["chunksizes"][0], 1, *options["chunksizes"][1:])
    for name, mean in (("A", 280), ("B", 290)):
        for year in range(1980, 1980 + years):
            values = random.normal(mean, 9, SHAPE)
            values = values[:, None] if level else values
            plain[name].append(write_year(root / f"{name}_{year}.nc", values, **options))
    return plain


def samples(plain: dict[str, list[np.ndarray]], lead: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The eager way that needs no explanation: all pairs (x, y) of all years."""
    years = [np.stack(fields, axis=1) for fields in zip(*plain.values())]  # (time, variable, y, x)
    return [(year[step], year[step + lead]) for year in years for step in range(len(year) - lead)]


def assert_same(dataset, expected) -> None:
    """Bit for bit and in order."""
    assert len(dataset) == len(expected)
    for (x, y), (plain_x, plain_y) in zip(dataset, expected, strict=True):
        assert x.dtype == y.dtype == torch.float32 and x.shape == plain_x.shape
        assert x.numpy().tobytes() == plain_x.tobytes() and y.numpy().tobytes() == plain_y.tobytes()


def handles(root: Path) -> dict[int, str]:
    """{descriptor: file name} of a folder's files that this process has open."""
    return {file.fd: Path(file.path).name for file in psutil.Process().open_files() if Path(file.path).parent == root}


def open_files(root: Path) -> list[str]:
    return sorted(handles(root).values())


# ---- lazy == eager == plain ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [False, True], ids=["", "with a level"])
@pytest.mark.parametrize("storage", STORAGES)
def test_lazy_is_eager_is_plain(tmp_path, storage, level):
    expected = samples(write_years(tmp_path, storage, level=level), lead=3)
    options = {"lead": 3, "normalise": False}
    assert_same(YearsDataset(tmp_path, **options), expected)  # every value is searched for missing ones
    assert_same(YearsDataset(tmp_path, preload=True, **options), expected)
    _ = YearsDataset(tmp_path).normalisation
    assert (tmp_path / "stats.json").exists()
    assert_same(YearsDataset(tmp_path, **options), expected)  # and now none: they are known to be whole


def test_default_chunks_hold_many_time_steps(tmp_path):
    write_years(tmp_path, "default chunks")
    kind, chunks = read_header(tmp_path / "A_1980.nc", "A").storage
    assert kind == "chunked" and chunks[0] > 10


def test_simulated_years(years):
    names = ["PMSL", "T_2M"]  # the order asked for
    plain = {name: [read_plain(years / f"{name}_{year}.nc") for year in (1980, 1981, 1982)] for name in names}
    for preload in (False, True):
        assert_same(YearsDataset(years, names, 6, normalise=False, preload=preload), samples(plain, lead=6))
    assert YearsDataset(years).variables == sorted(["T_2M", "U_10M", "V_10M", "PMSL", "ASOB_S", "ATHB_S"])


@pytest.mark.parametrize("storage", ["contiguous", "compressed", "classic", "packed", "big-endian"])
@pytest.mark.parametrize("known", [False, True], ids=["", "known"])
def test_missing_values_become_nan_where_allowed(tmp_path, storage, known):
    values = np.ma.masked_array(np.random.default_rng(0).normal(280, 9, SHAPE), mask=np.zeros(SHAPE, bool))
    values[5, 3, 2] = values[7, :, 1] = np.ma.masked
    plain = write_year(tmp_path / "A_1980.nc", values, **STORAGES[storage])
    assert np.isnan(plain).sum() == 1 + SHAPE[1]
    if known:
        mean, std = YearsDataset(tmp_path, allow_nan=True).normalisation
        np.testing.assert_allclose([mean[0], std[0]], [np.nanmean(plain, dtype=float), np.nanstd(plain, dtype=float)])
    for preload in (False, True):
        dataset = YearsDataset(tmp_path, lead=2, normalise=False, allow_nan=True, preload=preload)
        for (x, y), (plain_x, plain_y) in zip(dataset, samples({"A": [plain]}, lead=2), strict=True):
            np.testing.assert_array_equal(x, plain_x)
            np.testing.assert_array_equal(y, plain_y)


@pytest.mark.parametrize("format", ["NETCDF4", "NETCDF3_CLASSIC"])
@pytest.mark.parametrize("name", ["air", "temperature"])
def test_the_only_field_of_a_file_will_do(tmp_path, name, format):
    plain = write_year(tmp_path / f"{name}_1980.nc", np.random.default_rng(0).normal(size=SHAPE), format=format)
    (tmp_path / f"{name}_1980.nc").rename(tmp_path / "AIR_1980.nc")
    assert_same(YearsDataset(tmp_path, lead=3, normalise=False), samples({"AIR": [plain]}, lead=3))


def test_several_missing_values(tmp_path):
    values = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    plain = write_year(tmp_path / "A_1980.nc", values, attributes={"missing_value": np.float32([3, 5])})
    x, _ = YearsDataset(tmp_path, lead=1, normalise=False, allow_nan=True)[0]
    np.testing.assert_array_equal(x[0], plain[0])
    assert x.isnan().sum() == 2


def test_transform_is_told_when(tmp_path):
    write_years(tmp_path, "contiguous")
    dataset = YearsDataset(tmp_path, lead=3, transform=lambda x, y, when: when)
    assert [dataset[index] for index in (0, 36, 37, -1)] == [(1980, 0), (1980, 36), (1981, 0), (1981, 36)]


# ---- normalisation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(years, tmp_path) -> Path:
    """The simulated years, to be changed at will."""
    return Path(shutil.copytree(years, tmp_path / "copy"))


def numpys(root: Path, variables: list[str], years=(1980, 1981, 1982)) -> list[np.ndarray]:
    values = [np.concatenate([read_plain(root / f"{name}_{year}.nc") for year in years]) for name in variables]
    return [np.array([v.mean(dtype=float) for v in values]), np.array([v.std(dtype=float) for v in values])]


def test_normalisation_from_what_make_kept(years, monkeypatch):
    monkeypatch.setattr(stats, "of_file", None)  # no pass over any file
    dataset = YearsDataset(years)
    np.testing.assert_allclose(dataset.normalisation, numpys(years, dataset.variables), rtol=1e-6)


def test_normalisation_from_a_streaming_pass(copy):
    (copy / "stats.json").unlink()
    dataset = YearsDataset(copy)
    np.testing.assert_allclose(dataset.normalisation, numpys(copy, dataset.variables), rtol=1e-6)
    some = YearsDataset(copy, ["T_2M"], years=[1980, 1982])
    np.testing.assert_allclose(some.normalisation, numpys(copy, ["T_2M"], [1980, 1982]), rtol=1e-6)


def test_only_changed_files_are_passed_over_again(copy, monkeypatch):
    passes, of_file = [], stats.of_file
    monkeypatch.setattr(stats, "of_file", lambda header: passes.append(header.path.name) or of_file(header))
    write_year(copy / "PMSL_1981.nc", np.full((30, 16, 16), 9.0), since="1981-01-01 00:00:00")
    os.utime(copy / "T_2M_1980.nc", ns=(1, 1))  # as large as before, but from another time
    dataset = YearsDataset(copy)
    np.testing.assert_allclose(dataset.normalisation, numpys(copy, dataset.variables), rtol=1e-6)
    assert passes == ["T_2M_1980.nc", "PMSL_1981.nc"]
    _ = YearsDataset(copy).normalisation
    assert len(passes) == 2


def test_a_read_only_folder_serves_too(copy, monkeypatch):
    (copy / "stats.json").unlink()
    monkeypatch.setattr(stats.os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    dataset = YearsDataset(copy)
    np.testing.assert_allclose(dataset.normalisation, numpys(copy, dataset.variables), rtol=1e-6)
    assert not (copy / "stats.json").exists()
    assert all(tensor.isfinite().all() for tensor in dataset[0])


def test_samples_are_normalised(years):
    raw, dataset = YearsDataset(years, normalise=False), YearsDataset(years)
    mean, std = (values[:, None, None] for values in numpys(years, dataset.variables))
    given = YearsDataset(years, normalise=([1.0] * 6, [2.0] * 6))
    for index in (0, 17, -1):
        for plain, normalised, by_given in zip(raw[index], dataset[index], given[index]):
            np.testing.assert_allclose(normalised, (plain.numpy() - mean) / std, atol=1e-4)
            np.testing.assert_allclose(by_given, (plain.numpy() - 1) / 2, rtol=1e-6)


def test_a_constant_is_not_divided_by_zero(tmp_path):
    write_year(tmp_path / "A_1980.nc", np.full(SHAPE, 7.0))
    assert not YearsDataset(tmp_path, lead=1)[0][0].any()


def test_validation_is_normalised_by_the_training_years(years):
    task = make_task(Config(data=str(years)))
    assert (task.train.years, task.valid.years) == ([1980, 1981], [1982])
    expected = numpys(years, task.train.variables, [1980, 1981])
    np.testing.assert_allclose(task.train.normalisation, expected, rtol=1e-6)
    np.testing.assert_array_equal(task.valid.normalisation, task.train.normalisation)
    assert task.inputs == task.outputs == 6


@given(st.lists(st.lists(st.floats(-1e4, 1e4, width=32) | st.just(np.nan), min_size=1), min_size=1))
def test_merged_statistics_are_those_of_all_at_once(parts):
    merged = stats.Stats()
    for part in parts:
        merged = merged.merge(stats.of_values(np.array(part, np.float32)))
    everything = np.array(sum(parts, []), np.float32)
    valid = everything[~np.isnan(everything)].astype(float)
    assert (merged.count, merged.missing) == (valid.size, np.isnan(everything).sum())
    np.testing.assert_allclose(merged.mean, valid.mean() if valid.size else 0, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(merged.std, valid.std() if valid.size else 0, rtol=1e-6, atol=1e-9)


# ---- the index -----------------------------------------------------------------------------------------------------------


def dataset_of(lengths: list[int], *, variables: str = "A", **options) -> YearsDataset:
    """A dataset over years of these many hours, without any files: joined to each other, and never to be read."""
    first = dict(zip(range(1900, 2100), accumulate(lengths, initial=0)))
    length = dict(zip(range(1900, 2100), lengths))
    files = {year: {name: Path(f"{name}_{year}.nc") for name in variables} for year in length}

    def header(path: Path, name: str) -> Header:
        shape = (length[int(path.stem[-4:])], 2, 2)
        return Header(path, name, shape, np.dtype("f4"), 1.0, 0.0, (), "", "standard", ("contiguous",), 0)

    def times(header: Header) -> list[datetime]:
        year = int(header.path.stem[-4:])
        steps = (0, min(1, length[year] - 1), length[year] - 1)
        return [datetime(1900, 1, 1) + timedelta(hours=first[year] + step) for step in steps]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find_files", lambda root: files)
        patch.setattr(module, "read_header", header)
        patch.setattr(module, "read_times", times)
        return YearsDataset("nowhere", **options)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 12), st.booleans())
def test_the_index_is_the_list_of_all_samples(lengths, lead, across):
    assume(not across or len(lengths) == 1 or max(lengths) > 1)
    steps = [(year, step) for year, length in enumerate(lengths) for step in range(length)]
    pairs = [(a, b) for a, b in zip(steps, steps[lead:]) if across or a[0] == b[0]]
    if not pairs:
        with pytest.raises(UserError, match=f"lead={lead} time steps; ask for a shorter lead"):
            dataset_of(lengths, lead=lead, across_years=across)
        return
    dataset = dataset_of(lengths, lead=lead, across_years=across)
    assert [dataset.locate(index) for index in range(len(dataset))] == pairs
    assert [dataset.locate(index) for index in range(-len(dataset), 0)] == pairs
    for beyond in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match="sample"):
            dataset.locate(beyond)


def test_a_century_is_a_few_numbers():
    lengths = [8784 if year % 4 == 0 else 8760 for year in range(1900, 2000)]
    dataset = dataset_of(lengths, variables="ABCDEF", lead=6)
    assert len(dataset) == 25 * 8784 + 75 * 8760 - 100 * 6
    assert len(dataset_of(lengths, lead=6, across_years=True)) == 25 * 8784 + 75 * 8760 - 6
    assert dataset.locate(8784 - 6 - 1) == ((0, 8777), (0, 8783))  # the end of a leap year
    assert dataset.locate(8784 - 6) == ((1, 0), (1, 6))
    assert dataset.locate(-1) == ((99, 8753), (99, 8759))
    assert len(pickle.dumps(dataset)) < len(dataset) / 8  # not even a bit for each of its samples


def test_building_the_index_reads_headers_only(tmp_path, monkeypatch):
    values = np.zeros((250, 128, 128), np.float32)
    for year in (1980, 1981, 1982):
        write_year(tmp_path / f"A_{year}.nc", values)
    touched = []
    monkeypatch.setattr(module, "open_reader", None)
    monkeypatch.setattr(module, "read_header", lambda path, name: touched.append(path.name) or read_header(path, name))
    before = psutil.Process().io_counters().read_chars
    YearsDataset(tmp_path)
    a_file = (psutil.Process().io_counters().read_chars - before) / 3
    assert a_file < 50_000 < values.nbytes / 100
    assert touched == ["A_1980.nc", "A_1981.nc", "A_1982.nc"]
    assert not open_files(tmp_path)


@pytest.mark.parametrize("calendar", ["standard", "gregorian", "proleptic_gregorian", "noleap"])
def test_a_sample_may_cross_into_a_year_that_joins(tmp_path, calendar):
    values = np.random.default_rng(0).normal(size=(10 + 8, 4, 4)).astype(np.float32)
    write_year(tmp_path / "A_1981.nc", values[:10], since="1981-12-31 14:00", calendar=calendar)
    write_year(tmp_path / "A_1982.nc", values[10:], since="1982-01-01", calendar=calendar)
    dataset = YearsDataset(tmp_path, lead=3, across_years=True, normalise=False)
    assert_same(dataset, samples({"A": [values]}, lead=3))  # as if it were one file
    assert_same(YearsDataset(tmp_path, lead=3, normalise=False), samples({"A": [values[:10], values[10:]]}, lead=3))


def test_months_join_though_they_differ_in_length(tmp_path):
    for year in (1980, 1981):
        write_year(tmp_path / f"A_{year}.nc", np.zeros((12, 4, 4)))
        starts = [datetime(year + month // 12, month % 12 + 1, 1) - datetime(year, 1, 1) for month in range(13)]
        with netCDF4.Dataset(tmp_path / f"A_{year}.nc", "a") as file:  # stamped in the middle of each month
            file["time"][:] = [(a + b) / timedelta(hours=2) for a, b in pairwise(starts)]
    assert len(YearsDataset(tmp_path, lead=1, across_years=True)) == 23


# ---- open files, processes and threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", THREE_KINDS)
def test_files_are_opened_on_first_touch_and_closed_when_there_are_too_many(tmp_path, storage):
    write_years(tmp_path, storage, years=5)
    dataset = YearsDataset(tmp_path, lead=1, normalise=False, handles=4)
    assert open_files(tmp_path) == []
    dataset[0]
    assert open_files(tmp_path) == ["A_1980.nc", "B_1980.nc"]
    for index in random.Random(0).choices(range(len(dataset)), k=50):
        dataset[index]
        assert len(open_files(tmp_path)) <= 4
    for year in (0, 3, 0, 1):  # the least recently used goes: 3, not 0
        dataset[year * (SHAPE[0] - 1)]
    assert open_files(tmp_path) == ["A_1980.nc", "A_1981.nc", "B_1980.nc", "B_1981.nc"]
    del dataset
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("storage", THREE_KINDS)
def test_pickling_leaves_the_open_files_behind(tmp_path, storage):
    expected = samples(write_years(tmp_path, storage), lead=3)
    dataset = YearsDataset(tmp_path, lead=3, normalise=False)
    dataset[0]
    before = open_files(tmp_path)
    copy = pickle.loads(pickle.dumps(dataset))
    assert open_files(tmp_path) == before
    assert_same(copy, expected)


@pytest.mark.parametrize("storage", THREE_KINDS)
def test_threads_read_at_once(tmp_path, storage):
    expected = samples(write_years(tmp_path, storage, years=4), lead=3)
    dataset = YearsDataset(tmp_path, lead=3, normalise=False, handles=2)  # one year: threads close each other's files
    order = random.Random(0).choices(range(len(dataset)), k=400)
    with ThreadPoolExecutor(4) as pool:
        for index, (x, y) in zip(order, pool.map(dataset.__getitem__, order)):
            assert x.numpy().tobytes() == expected[index][0].tobytes()
            assert y.numpy().tobytes() == expected[index][1].tobytes()
    assert len(open_files(tmp_path)) == 2


def is_own(descriptor: int) -> bool:
    """Whether a descriptor is not the one that the parent process has locked, nor a copy of it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("storage", THREE_KINDS)
def test_forked_workers_open_files_of_their_own(tmp_path, storage):
    def look(x, y, when):
        files = [fd for fd, name in handles(tmp_path).items() if name == f"A_{when[0]}.nc"]
        return x, y, [is_own(fd) for fd in files], os.getpid()

    expected = samples(write_years(tmp_path, storage), lead=3)
    dataset = YearsDataset(tmp_path, lead=3, normalise=False, transform=look)
    assert [dataset[index][2] for index in (0, -1)] == [
        [False],
        [False],
    ]  # the parent has all files open, and locks them
    loaded = list(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert_same([(x, y) for x, y, _, _ in loaded], expected)
    assert [own for _, _, own, _ in loaded] == [[True]] * len(expected)
    assert len({pid for *_, pid in loaded} - {os.getpid()}) == 2
    assert_same([(x, y) for x, y, _, _ in dataset], expected)  # and the parent's are still good


def test_spawned_workers_give_the_same_samples_in_order(years):
    dataset = YearsDataset(years, lead=6)
    plain = list(DataLoader(dataset, batch_size=8))
    workers = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context="spawn")
    for (x, y), (plain_x, plain_y) in zip(workers, plain, strict=True):
        assert torch.equal(x, plain_x) and torch.equal(y, plain_y)


# ---- mistakes ------------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


ZEROS = np.zeros(SHAPE)
MISTAKES = {  # what: (the mistake, made in a folder of A and B in 1980 and 1981; options; words of the message)
    "no files": (
        lambda root: [path.unlink() for path in root.glob("*.nc")],
        {},
        ["has no <VARIABLE>_<YEAR>.nc files", "make some with: python -m course_lib.data.make --out"],
    ),
    "a year that is not there": (
        lambda root: [(root / f"{name}_1981.nc").rename(root / f"{name}_1982.nc") for name in "AB"],
        {"years": [1980, 1981, 1982]},
        ["A_1981.nc is missing", "make or copy it, or leave out year 1981"],
    ),
    "a variable that one year lacks": (
        lambda root: (root / "B_1981.nc").unlink(),
        {},
        ["B_1981.nc is missing", "make or copy it, or leave out variable B or year 1981"],
    ),
    "another grid": (
        lambda root: write_year(root / "A_1981.nc", np.zeros((40, 12, 17))),
        {},
        ["A_1981.nc has a grid of (12, 17)", "A_1980.nc has (12, 16)", "make one of them again or leave it out"],
    ),
    "another calendar": (
        lambda root: [write_year(root / f"{name}_1981.nc", ZEROS, calendar="noleap") for name in "AB"],
        {},
        ["A_1981.nc has the calendar noleap", "A_1980.nc has standard", "make one of them again or leave it out"],
    ),
    "a variable with fewer time steps": (
        lambda root: write_year(root / "B_1980.nc", ZEROS[:39]),
        {},
        ["B_1980.nc has time steps 39", "A_1980.nc has 40", "make one of them again or leave it out"],
    ),
    "variables at different times": (
        lambda root: write_year(root / "B_1980.nc", ZEROS, since="1980-01-02"),
        {},
        ["B_1980.nc has time units hours since 1980-01-02", "A_1980.nc", "make one of them again or leave it out"],
    ),
    "a truncated file": (
        lambda root: cut(root / "B_1981.nc"),
        {},
        ["B_1981.nc can't be read", "make or copy it again"],
    ),
    "a truncated classic file": (
        lambda root: [write_year(root / "B_1981.nc", ZEROS, format="NETCDF3_CLASSIC"), cut(root / "B_1981.nc")],
        {},
        ["B_1981.nc can't be read", "make or copy it again"],
    ),
    "an empty file": (
        lambda root: (root / "B_1981.nc").write_bytes(b""),
        {},
        ["B_1981.nc can't be read", "make or copy it again"],
    ),
    "a corrupt file": (
        lambda root: (root / "B_1981.nc").write_bytes(np.random.default_rng(0).bytes(10_000)),
        {},
        ["B_1981.nc can't be read", "make or copy it again"],
    ),
    "a name that is no text": (
        lambda root: [
            write_year(root / "B_1981.nc", ZEROS, format="NETCDF3_CLASSIC"),
            (root / "B_1981.nc").write_bytes((root / "B_1981.nc").read_bytes().replace(b"time", b"\xff\xfe\xfd\xfc")),
        ],
        {},
        ["B_1981.nc can't be read", "make or copy it again"],
    ),
    "a variable of two dimensions": (
        lambda root: write_year(root / "B_1981.nc", ZEROS[0]),
        {},
        ["B_1981.nc: B must have the shape (time, y, x), and has (12, 16)", "leave it out"],
    ),
    "several levels": (
        lambda root: write_year(root / "B_1981.nc", np.zeros((40, 2, 12, 16))),
        {},
        ["B_1981.nc: B must have the shape (time, y, x), and has (40, 2, 12, 16)", "leave it out"],
    ),
    "no such variable in the file": (
        lambda root: write_year(root / "C_1981.nc", ZEROS[0]) is (root / "C_1981.nc").replace(root / "B_1981.nc"),
        {},
        ["B_1981.nc holds no variable B (it has time, C)", "rename the file or the variable"],
    ),
    "a lead longer than the years": (
        lambda root: None,
        {"lead": 40},
        ["no year has more than lead=40 time steps", "ask for a shorter lead"],
    ),
    "a negative lead": (lambda root: None, {"lead": -1}, ["lead must not be negative"]),
    "a gap to be crossed": (
        lambda root: None,  # the years have forty hours each
        {"across_years": True},
        ["A_1981.nc starts at 1981-01-01", "ends at 1980-01-02 15:00", "or leave out across_years"],
    ),
    "years to be joined that don't say when they are": (
        lambda root: [write_year(root / f"{name}_1981.nc", ZEROS, calendar=None) for name in "AB"],
        {"across_years": True},
        ["A_1981.nc needs a time coordinate", "add one"],
    ),
    "too few means": (
        lambda root: None,
        {"normalise": ([0.0], [1.0])},
        ["normalise has 1 means for 2 variables"],
    ),
    "a variable that was never written": (
        lambda root: write_unwritten(root / "B_1980.nc"),
        {},
        ["B_1980.nc can't be read (B was never written)", "make or copy it again"],
    ),
}


def write_unwritten(path: Path) -> None:
    write_year(path, ZEROS)
    with netCDF4.Dataset(path, "w") as file:
        for dimension, length in zip(("time", "y", "x"), SHAPE):
            file.createDimension(dimension, length)
        time = file.createVariable("time", "f8", ("time",))
        time.units = "hours since 1980-01-01"
        file.createVariable("B", "f4", ("time", "y", "x"), contiguous=True)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(tmp_path, mistake):
    make_it, options, words = MISTAKES[mistake]
    write_years(tmp_path, "contiguous")
    YearsDataset(tmp_path, lead=3)[0]  # all is well, until …
    make_it(tmp_path)
    with pytest.raises(UserError) as caught:
        YearsDataset(tmp_path, **{"lead": 3, **options})[0]
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("opened", [False, True], ids=["", "opened before"])
@pytest.mark.parametrize("storage", THREE_KINDS)
def test_a_file_truncated_after_the_index_was_built(tmp_path, storage, opened):
    write_years(tmp_path, storage, years=1)
    dataset = YearsDataset(tmp_path, lead=3, normalise=False)
    if opened:
        dataset[0]
    cut(tmp_path / "B_1980.nc")
    with pytest.raises(UserError, match=r"B_1980.nc can't be read .* make or copy it again"):
        dataset[-1]


@pytest.mark.parametrize("known", [False, True], ids=["", "known"])
@pytest.mark.parametrize("options", [{}, {"normalise": False}, {"normalise": False, "preload": True}], ids=str)
@pytest.mark.parametrize(
    "missing, storage",
    [
        (np.nan, {}),
        (np.inf, {}),
        (np.ma.masked, {}),
        (np.ma.masked, {"kind": "i2", "attributes": PACKED}),
        (-999, {"attributes": {"missing_value": np.float32(-999)}}),
    ],
    ids=["NaN", "infinity", "fill value", "packed fill value", "missing value"],
)
def test_missing_values_where_none_is_allowed(tmp_path, missing, storage, options, known):
    values = np.ma.array(np.random.default_rng(0).normal(280, 9, SHAPE))
    write_year(tmp_path / "A_1980.nc", values)
    values[-1, 2, 3] = missing
    write_year(tmp_path / "B_1980.nc", values, **storage)
    if known:
        _ = YearsDataset(tmp_path, allow_nan=True).normalisation
    with pytest.raises(UserError, match=r"B_1980.nc (has 1 missing|lacks) values.*; fill them, or pass allow_nan=True"):
        whole, lacking = 0, -1
        YearsDataset(tmp_path, lead=3, **options)[
            whole if known or not options else lacking
        ]  # once it is known, at once


def test_a_mistake_in_a_worker_is_one_line_too(tmp_path, capsys):
    write_years(tmp_path, "contiguous")
    dataset = YearsDataset(tmp_path, lead=3, normalise=False)
    cut(tmp_path / "B_1981.nc")
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(UserError, match=r"B_1981.nc can't be read"):
        list(loader)
    with pytest.raises(SystemExit) as exit:
        run_main(lambda: list(loader))
    assert exit.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'B_1981.nc'} can't be read") and line.endswith("make or copy it again")


@pytest.mark.parametrize(
    "break_it, words",
    [
        (lambda root: cut(root / "B_1980.nc"), "B_1980.nc can't be read"),
        (lambda root: write_year(root / "B_1980.nc", np.full(SHAPE, np.nan)), "B_1980.nc has 7680 missing values"),
    ],
    ids=["truncated", "missing values"],
)
def test_a_mistake_on_the_command_line(tmp_path, break_it, words):
    write_years(tmp_path, "contiguous")
    break_it(tmp_path)
    done = run_module("course_lib.train", "--data", tmp_path, "--runs", tmp_path / "runs")
    assert done.returncode == 2, done.stderr
    *progress, line = done.stderr.splitlines()
    assert line.startswith("error: ") and words in line
    assert all(not other or other.startswith("statistics: ") for other in progress)  # no traceback, nothing else
