"""The prefetcher changes when a batch is loaded, never which, in what order, or what goes wrong where."""

import gc
import itertools
import threading
import traceback
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from helpers import assert_same, prefetch_threads, wait_until
from torch.utils.data import DataLoader

from course_lib.prefetch import Prefetcher, apply_to_tensors


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


MAKERS = {
    "tensor": lambda n: torch.full((2, 3), n),
    "tuple": lambda n: (torch.tensor(n), torch.tensor([n + 0.5])),
    "list": lambda n: [torch.tensor(n), torch.tensor([n + 0.5])],
    "dict": lambda n: {"x": torch.tensor(n), "y": torch.tensor([n + 0.5])},
    "named tuple": lambda n: Pair(torch.tensor(n), torch.tensor([n + 0.5])),
    "nested": lambda n: {
        "pair": Pair(torch.tensor(n), [torch.ones(n)]),
        "rest": ((torch.zeros(n),), {"n": torch.tensor(n)}),
    },
    "not only tensors": lambda n: (torch.tensor(n), n, f"sample {n}", None, {"when": (1980, n)}),
    "None": lambda n: None,
}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert prefetch_threads() == []


class Counting:
    """A loader that tells how many batches it has begun to give, and whether it was closed."""

    def __init__(self, numbers=None):
        self.numbers, self.loaded, self.closed = numbers, 0, False

    def __iter__(self):
        try:
            for number in itertools.count() if self.numbers is None else self.numbers:
                self.loaded += 1
                yield torch.tensor(number)
        finally:
            self.closed = True


class Broken(Exception):
    pass


def read_a_damaged_file():
    raise Broken("file 3 is damaged")


def breaks_after(good: int):
    for number in range(good):
        yield torch.tensor(number)
    read_a_damaged_file()


# ---- same batches, same order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_prefetched_equals_plain(make, depth):
    batches = [make(number) for number in range(10)]
    assert_same(list(Prefetcher(batches, depth=depth)), batches)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_tensor_moves(make):
    [moved] = Prefetcher([make(3)], "meta")
    apply_to_tensors(moved, lambda tensor: pytest.fail("left behind") if tensor.device.type != "meta" else tensor)


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_equals_plain_over_a_data_loader(workers):
    loader = DataLoader([(torch.tensor(n), float(n)) for n in range(23)], batch_size=4, num_workers=workers)
    plain = list(DataLoader(loader.dataset, batch_size=4))
    prefetcher = Prefetcher(loader)
    assert len(prefetcher) == len(plain) == 6
    for _ in range(2):  # two epochs
        assert_same(list(prefetcher), plain)


def test_an_empty_loader_gives_nothing():
    assert list(Prefetcher([])) == []


@pytest.mark.parametrize("depth", [0, -1])
def test_without_room_for_a_batch_there_is_no_prefetching(depth):
    with pytest.raises(ValueError, match=f"depth .* {depth}"):
        Prefetcher([], depth=depth)


# ---- how far ahead ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_it_runs_ahead_by_depth_plus_one_and_no_further(depth):
    """The queue holds `depth` batches, and the thread one more that waits for room."""
    loader = Counting(range(12))
    for taken, _ in enumerate(Prefetcher(loader, depth=depth), start=1):
        furthest = min(taken + depth + 1, 12)
        wait_until(lambda: loader.loaded >= furthest)  # noqa: B023 (it is called at once)
        threading.Event().wait(0.01)  # time enough to go too far
        assert loader.loaded == furthest


# ---- what goes wrong -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("good", [0, 1, 3, 7])
def test_an_exception_comes_in_its_place(good, depth):
    batches = iter(Prefetcher(breaks_after(good), depth=depth))
    assert [int(next(batches)) for _ in range(good)] == list(range(good))
    with pytest.raises(Broken, match="^file 3 is damaged$") as raised:
        next(batches)
    assert "read_a_damaged_file" in [frame.name for frame in traceback.extract_tb(raised.tb)]
    with pytest.raises(StopIteration):
        next(batches)


def test_an_exception_in_a_worker_process_arrives_with_its_type():
    class Damaged(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index if index < 2 else read_a_damaged_file()

    batches = iter(Prefetcher(DataLoader(Damaged(), num_workers=1)))
    assert [int(next(batches)), int(next(batches))] == [0, 1]
    with pytest.raises(Broken, match="read_a_damaged_file"):
        next(batches)


def test_a_device_that_fails_is_an_exception_and_no_endless_wait(monkeypatch):
    def no_gpu(device):
        raise Broken("no GPU")

    monkeypatch.setattr(torch.cuda, "Stream", no_gpu)
    with pytest.raises(Broken, match="no GPU"):
        next(iter(Prefetcher([torch.ones(1)], "cuda")))


# ---- no thread survives its loop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [range(9), None], ids=["finite", "infinite"])
@pytest.mark.parametrize("full", [False, True], ids=["at once", "queue full"])
def test_breaking_off_ends_the_thread_and_closes_the_loader(numbers, full):
    loader = Counting(numbers)
    for batch in Prefetcher(loader, depth=2):
        assert int(batch) == 0 and len(prefetch_threads()) == 1
        if full:
            wait_until(lambda: loader.loaded == 4)  # one taken, two queued, one waits for room
        break
    assert prefetch_threads() == [] and loader.closed


def test_an_exception_in_the_loop_ends_the_thread():
    loader = Counting()
    with pytest.raises(Broken):
        for _ in Prefetcher(loader):
            read_a_damaged_file()
    assert prefetch_threads() == [] and loader.closed


def test_an_iterator_that_is_forgotten_ends_its_thread():
    loader = Counting()
    batches = iter(Prefetcher(loader))
    next(batches)
    assert len(prefetch_threads()) == 1
    del batches
    gc.collect()
    assert prefetch_threads() == [] and loader.closed


def test_two_iterations_at_once_do_not_mix():
    prefetcher = Prefetcher([torch.tensor(number) for number in range(6)])
    assert [(int(a), int(b)) for a, b in zip(prefetcher, prefetcher)] == [(number, number) for number in range(6)]


# ---- the copy to a GPU, on recording fakes ---------------------------------------------------------------------------------


class FakeStream:
    def __init__(self, name: str, seen: list):
        self.name, self.seen = name, seen

    def record_event(self) -> str:
        self.seen.append(f"event recorded on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.seen.append(f"{self.name} waits for {event}")


@pytest.fixture
def fake_gpu(monkeypatch) -> list[str]:
    """A GPU that only writes down what it is told, in order."""
    seen, active = [], threading.local()

    @contextmanager
    def use(stream):
        active.name = stream.name
        yield
        active.name = "compute"

    def to(tensor, device, non_blocking=False):
        where = getattr(active, "name", "compute")
        seen.append(f"copy to {device} on {where}" + (" without waiting" if non_blocking else ""))
        return tensor

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", seen))
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("compute", seen))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: seen.append("pin") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: seen.append(f"in use by {stream.name}"))
    return seen


def test_on_a_gpu_each_step_of_the_copy_has_its_place(fake_gpu):
    batches = iter(Prefetcher([{"x": torch.ones(1), "name": "first"}], "cuda:1"))
    batch = next(batches)
    assert batch == {"x": torch.ones(1), "name": "first"}
    assert fake_gpu == [
        "pin",
        "copy to cuda:1 on side without waiting",
        "event recorded on side",
        "compute waits for event of side",
        "in use by compute",
    ]
    assert next(batches, None) is None


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_on_a_gpu_a_batch_keeps_its_form(make, fake_gpu):
    assert_same(list(Prefetcher([make(3), make(4)], "cuda:0")), [make(3), make(4)])


def test_on_a_gpu_the_next_batch_is_copied_before_it_is_asked_for(fake_gpu):
    batches = iter(Prefetcher([(torch.ones(1),), (torch.ones(2), torch.ones(3))], "cuda:0"))
    next(batches)
    wait_until(lambda: fake_gpu.count("event recorded on side") == 2)
    assert fake_gpu.count("pin") == 3 and fake_gpu.count("compute waits for event of side") == 1
    next(batches)
    assert fake_gpu[-3:] == ["compute waits for event of side", "in use by compute", "in use by compute"]
    batches.close()
