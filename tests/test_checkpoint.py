"""A checkpoint is always whole, whatever kills the writer, and never runs what a stranger put into it."""

import copy
import io
import multiprocessing
import os
import pickle
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import assert_same, wait_until

from course_lib import checkpoint
from course_lib.checkpoint import State
from course_lib.config import Config, UserError
from course_lib.unet import UNet

CONFIG = Config(width=2, depth=1)


def trained(steps: int = 3, *, seed: int = 0, width: int = 2) -> State:
    """A model that has taken some steps: its optimizer then has a state worth keeping."""
    torch.manual_seed(seed)
    model = UNet(2, 2, width=width, depth=1)
    state = State(model, torch.optim.Adam(model.parameters(), lr=0.01), step=steps, epoch=1, seen=8)
    for _ in range(steps):
        model(torch.randn(2, 2, 8, 8)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
    return state


def parts(state: State) -> dict:
    return {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "position": (state.step, state.epoch, state.seen),
    }


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "checkpoint.pt"


@pytest.fixture
def saved(path) -> Path:
    trained().save(path, CONFIG)
    return path


def to_bytes(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


# ---- whole -----------------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_to_the_last_bit(path):
    state = trained()
    state.save(path, CONFIG)
    expected = torch.rand(3)  # what the saved random state brings next
    other = trained(1, seed=5)
    other.load(path, CONFIG)
    assert_same(parts(other), parts(state))
    assert torch.equal(torch.rand(3), expected)


def test_the_file_holds_only_tensors_and_plain_values(saved):
    content = torch.load(saved, weights_only=True)
    assert set(content) == {"model", "optimizer", "position", "random", "random_cuda", "config", "launch"}
    assert content["config"] == vars(CONFIG)


def large_state() -> State:
    """Some megabytes: it takes a while to save, and a kill falls into that."""
    layer = torch.nn.Linear(1024, 1024, bias=False)
    torch.nn.init.zeros_(layer.weight)
    return State(layer, torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))


def step_once(state: State) -> None:
    state.model.weight.grad = torch.full_like(state.model.weight, state.step % 7)
    state.optimizer.step()
    state.step += 1


def train_for_ever(path: Path) -> None:
    state = large_state()
    if path.exists():
        state.load(path, CONFIG)
    while True:
        step_once(state)
        state.save(path, CONFIG)


def is_newer(path: Path, seen: int | None) -> bool:
    return path.exists() and path.stat().st_mtime_ns != seen


def test_killed_twenty_times_while_it_saves_and_resumed_equals_uninterrupted(path):
    """Real kills at random moments: what is there afterwards is always whole, and never older than before."""
    step_once(large_state())  # what that imports, in seconds, the writers then have
    moments, halves, done = random.Random(0), 0, 0
    for _ in range(20):
        seen = path.stat().st_mtime_ns if path.exists() else None
        writer = multiprocessing.get_context("fork").Process(target=train_for_ever, args=(path,))
        writer.start()
        wait_until(partial(is_newer, path, seen))
        time.sleep(moments.uniform(0, 0.05))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        halves += path.with_name("checkpoint.pt.part").exists()
        before, done = done, checkpoint.load(path)["position"]["step"]
        assert done > before
    assert halves  # or no kill fell into a save, and nothing was shown
    resumed, uninterrupted = large_state(), large_state()
    resumed.load(path, CONFIG)
    for _ in range(done):
        step_once(uninterrupted)
    assert_same(parts(resumed), parts(uninterrupted))


def test_saving_that_fails_half_way_leaves_the_old_one(saved, monkeypatch):
    def full_disk(content, file):
        file.write(b"PK half of a checkpoint")
        raise OSError("No space left on device")

    before = saved.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(torch, "save", full_disk)
        trained(5).save(saved, CONFIG)
    assert saved.read_bytes() == before
    trained(5).save(saved, CONFIG)  # what the failure left behind is in nobody's way
    assert checkpoint.load(saved)["position"]["step"] == 5


# ---- damaged ---------------------------------------------------------------------------------------------------------------


def refuse(path: Path, config: Config = CONFIG) -> str:
    """Loading must fail with one line that names the file."""
    with pytest.raises(UserError) as raised:
        trained(0).load(path, config)
    line = str(raised.value)
    assert line.startswith(str(path)) and "\n" not in line
    return line


def test_nothing_to_resume(path):
    assert "leave out --resume" in refuse(path)


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_checkpoint_is_refused(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    refuse(saved)


def test_garbage_is_refused_without_a_word_more(path, recwarn):
    bytes_of = random.Random(0).randbytes
    for length in range(1, 200):
        path.write_bytes(bytes_of(length))
        refuse(path)
    assert not recwarn.list


def test_a_flipped_bit_is_refused_or_harmless(saved):
    """torch.load does not look at the checksums: without ours, a bit flipped in a weight would pass."""
    content, expected, positions = saved.read_bytes(), parts(trained()), random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        damaged[positions.randrange(len(damaged))] ^= 1 << positions.randrange(8)
        saved.write_bytes(damaged)
        state = trained(0)
        try:
            state.load(saved, CONFIG)
        except UserError:
            refused += 1
        else:
            assert_same(parts(state), expected)  # it fell between the parts, where nothing is kept
    assert refused > 50


@pytest.mark.parametrize(
    "content", [None, 5, "text", [1], {}, {"config": vars(CONFIG)}, {"config": {"task": "forecast"}}]
)
def test_a_file_of_something_else_is_refused(path, content):
    path.write_bytes(to_bytes(content))
    refuse(path)


@pytest.mark.parametrize("part", ["model", "optimizer", "position", "random"])
@pytest.mark.parametrize("content", [None, 5, {}, [1]])
def test_a_checkpoint_with_a_foreign_part_is_refused(saved, part, content):
    saved.write_bytes(to_bytes({**checkpoint.load(saved), part: content}))
    refuse(saved)


class Payload:
    """Runs when it is unpickled: it makes the file that its name says."""

    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize("dump", [to_bytes, pickle.dumps], ids=["torch.save", "pickle"])
def test_a_payload_is_refused_and_does_not_run(saved, tmp_path, dump):
    content = {**checkpoint.load(saved), "model": Payload(tmp_path / "victim")}
    saved.write_bytes(dump(content))
    refuse(saved)
    assert not (tmp_path / "victim").exists()
    torch.load(saved, weights_only=False) if dump is to_bytes else pickle.loads(saved.read_bytes())
    assert (tmp_path / "victim").exists()  # the payload was a live one


# ---- of another training ---------------------------------------------------------------------------------------------------


OTHER = {"task": "superres", "variables": "T_2M", "train_years": "1980", "norm": "none", "padding": "zeros"}
OTHER |= {"lead": 7, "width": 7, "depth": 7, "lr": 7.0, "warmup": 7, "seed": 7}


@pytest.mark.parametrize("name", OTHER)
def test_another_training_can_not_be_resumed(saved, name):
    changed = CONFIG.replace(**{name: OTHER[name]})
    assert f"--{name.replace('_', '-')} {vars(CONFIG)[name]}, not {vars(changed)[name]}" in refuse(saved, changed)


def test_another_width_under_the_same_config_is_refused(path):
    trained(width=4).save(path, CONFIG)
    assert "is not a checkpoint of this model" in refuse(path)


def test_what_may_change_between_two_parts_of_a_run(saved):
    changed = CONFIG.replace(data="elsewhere", batch=3, epochs=9, workers=1, prefetch=0, strategy="ddp", resume=True)
    trained(0).load(saved, changed)


@pytest.mark.parametrize("factor, gradients", [(1, 0), (2, 1), (0.5, 0.5)])
def test_two_trainings_are_compared_by_their_weights_and_their_gradients(tmp_path, factor, gradients):
    """With all gradients twice as long Adam takes the same way: only its averages tell."""
    torch.manual_seed(0)
    begun = UNet(2, 2, width=2, depth=1).double()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    for name, scale in (("mine", factor), ("other", 1)):
        net = copy.deepcopy(begun)
        state = State(net, torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-30))
        for _ in range(3):
            state.optimizer.zero_grad()
            (scale * net(x).square().mean()).backward()
            state.optimizer.step()
        state.save(tmp_path / name, CONFIG)
    found = checkpoint.compare(tmp_path / "mine", tmp_path / "other", begun)
    assert found == pytest.approx((0, gradients), abs=1e-6)
