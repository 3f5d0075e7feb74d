"""DDP by hand == torch's own == one process with the whole batch, on 2 and 4 real ranks; and no mistake hangs.

On 2 ranks equal to the last bit: a + b is b + a. On 4 ranks the order of the sums depends on where a bucket ends, and one
process adds up the whole batch in another order still: rtol 1e-9 and atol 1e-12 for gradients in float64, and 1e-6 and 1e-8
for weights, because Adam divides by small gradients.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import on_ranks
import pytest
import torch
from helpers import assert_same, result, torchrun
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from course_lib.metrics import read_log
from course_lib.parallel import TOGETHER
from course_lib.parallel.ddp import Bucket, make_buckets, start_equal
from course_lib.trainer import fit
from course_lib.unet import UNet
from course_lib.world import World

BY_HAND = ["ddp_naive", "ddp_bucketed", "ddp_overlapped"]
EQUAL_TO_ONE = [case for case in on_ranks.CASES if case != "batch norm"]  # whose statistics are each rank's own
PROGRAM = Path(on_ranks.__file__)
pytestmark = pytest.mark.usefixtures("alone")


def on_real_ranks(ranks: int, part: str, folder: Path, *flags: str) -> list[dict]:
    """What every rank found."""
    code, output = torchrun(ranks, PROGRAM, part, folder, *flags)
    assert code == 0, output
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_epochs(base):
    """The same as the runs of `trained`, without a timeline."""
    return base.replace(epochs=2, bucket_mb=5e-4)


@pytest.fixture(scope="module")
def two(two_epochs, tmp_path_factory) -> list[dict]:
    return on_real_ranks(2, "all", tmp_path_factory.mktemp("two"), *two_epochs.arguments())


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    return on_real_ranks(4, "learn", tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def one() -> dict:
    """One process with the whole batch."""
    return {case: run(World(), "single") for case, run in on_ranks.CASES.items()}


def assert_close(a: dict, b: dict) -> None:
    """The tolerances of this file, wider where a layer is in float32; no gradient may stand for zeros."""
    for name in b["weights"]:
        single = b["weights"][name].dtype != torch.float64 or "middle" in name
        tight, wide = ((1e-4, 1e-6), (1e-3, 1e-5)) if single else ((1e-9, 1e-12), (1e-6, 1e-8))
        for mine, theirs in zip(a["gradients"], b["gradients"], strict=True):
            if theirs.get(name) is not None:
                torch.testing.assert_close(mine[name], theirs[name], rtol=tight[0], atol=tight[1])
            elif mine.get(name) is not None:
                assert not mine[name].any()
        torch.testing.assert_close(a["weights"][name], b["weights"][name], rtol=wide[0], atol=wide[1])


# ---- theorems: gradients of every step, and weights after several ----------------------------------------------------------


@pytest.mark.parametrize("case", EQUAL_TO_ONE)
def test_a_case_is_what_its_name_says(one, case):
    """Or else the equalities below would be easy: it learns, step by step."""
    run = one[case]
    assert len(run["gradients"]) == on_ranks.STEPS
    moved = {name for name in run["weights"] if not torch.equal(run["weights"][name], run["started"][name])}
    still = set(run["weights"]) - moved
    assert moved and still == {
        name for name in run["weights"] if (case, name.split(".")[0]) in [("unused", "never"), ("frozen", "down")]
    } - {name for name in run["weights"] if name.startswith("down.1")}


@pytest.mark.parametrize("case", EQUAL_TO_ONE)
@pytest.mark.parametrize("strategy", TOGETHER)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_equal_one_process_with_the_whole_batch(request, one, ranks, strategy, case):
    for rank in request.getfixturevalue({2: "two", 4: "four"}[ranks]):
        assert_close(rank[strategy][case], one[case])


@pytest.mark.parametrize("case", on_ranks.CASES)
@pytest.mark.parametrize("strategy", BY_HAND)
def test_on_two_ranks_every_strategy_is_torchs_to_the_last_bit(two, strategy, case):
    for rank in two:
        mine, torchs = rank[strategy][case], rank["ddp"][case]
        for name, gradient in [pair for step in torchs["gradients"] for pair in step.items()]:
            assert (gradient is None) == (name.startswith("never") or (case == "frozen" and name.startswith("down.0")))
        if case == "unused":  # torch leaves None what nobody used; by hand it is zeros
            for step in mine["gradients"]:
                assert not any(step.pop(name).any() for name in ("never.weight", "never.bias"))
            torchs["gradients"] = [
                {name: gradient for name, gradient in step.items() if gradient is not None}
                for step in torchs["gradients"]
            ]
        assert_same(mine, torchs)


@pytest.mark.parametrize("case", EQUAL_TO_ONE)
@pytest.mark.parametrize("strategy", BY_HAND)
def test_on_four_ranks_every_strategy_is_torchs(four, strategy, case):
    for rank in four:
        assert_close(rank[strategy][case], rank["ddp"][case])


@pytest.mark.parametrize("case", on_ranks.CASES)
@pytest.mark.parametrize("strategy", TOGETHER)
def test_all_ranks_stay_equal(two, four, strategy, case):
    """Gradients and weights, to the last bit, or the models would drift apart. Only BatchNorm's averages are a rank's own."""

    def learned(rank: dict) -> dict:
        run = rank[strategy][case]
        weights = {name: value for name, value in run["weights"].items() if name in run["gradients"][0]}
        return {"gradients": run["gradients"], "weights": weights}

    for ranks in (two, four):
        for rank in ranks[1:]:
            assert_same(learned(rank), learned(ranks[0]))


@pytest.mark.parametrize("case", on_ranks.CASES)
@pytest.mark.parametrize("strategy", TOGETHER)
def test_all_ranks_start_with_rank_0s_weights_and_averages(one, two, four, strategy, case):
    """Every rank had drawn its own."""
    for rank in [*two, *four]:
        assert_same(rank[strategy][case]["started"], one[case]["started"])
    assert not torch.equal(on_ranks.make_net(World(rank=1)).head.weight, one["one bucket"]["started"]["head.weight"])


@pytest.mark.parametrize("case", ["some buckets", "a bucket a parameter", "checkpointing"])
@pytest.mark.parametrize("strategy", TOGETHER)
def test_buckets_and_recomputation_change_no_bit_on_two_ranks(two, strategy, case):
    for rank in two:
        assert_same(rank[strategy][case], rank[strategy]["one bucket"])


@pytest.mark.parametrize("strategy", TOGETHER)
def test_accumulated_gradients_are_those_of_the_whole(two, strategy):
    """Two backward passes under no_sync and one without == one backward pass: the same gradients, sent once."""
    for rank in two:
        assert_close(rank[strategy]["accumulated"], rank[strategy]["one bucket"])


def test_a_second_backward_without_no_sync_is_refused(two):
    """Its gradients would be lost: the buckets have left."""
    for rank in two:
        assert rank["twice"] == "a second backward before sync(): put all but the last one under no_sync()"


# ---- buckets ---------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([torch.float32, torch.float64])), max_size=20),
    st.floats(0, 2e-3),
)
def test_buckets_hold_every_parameter_once_and_in_order(shapes, megabytes):
    """One type of number each, no larger than told unless it holds one parameter alone, and no smaller than need be."""
    parameters = [nn.Parameter(torch.zeros(length, dtype=dtype)) for length, dtype in shapes]
    buckets = make_buckets(parameters, megabytes)
    assert [id(p) for bucket in buckets for p in bucket.parameters] == [id(p) for p in parameters]
    limit = megabytes * 2**20
    for bucket in buckets:
        assert {p.dtype for p in bucket.parameters} == {bucket.flat.dtype}
        assert bucket.flat.nbytes <= limit or len(bucket.parameters) == 1
    for bucket, following in zip(buckets, buckets[1:]):
        more = following.parameters[0]
        assert bucket.flat.nbytes + more.nbytes > limit or more.dtype != bucket.flat.dtype


@pytest.mark.parametrize("megabytes, count", [(0, 28), (25, 1)])
def test_buckets_take_the_last_parameter_first(megabytes, count):
    """As backward does. Frozen parameters have no place in them."""
    net = UNet(3, 2, width=2, depth=2)
    net.down[0].requires_grad_(False)
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    buckets = make_buckets(start_equal(net, World()), megabytes)
    assert [id(p) for bucket in buckets for p in bucket.parameters] == [id(p) for p in reversed(learned)]
    assert len(buckets) == count


def test_mixed_types_are_in_buckets_of_their_own():
    buckets = make_buckets(start_equal(on_ranks.Mixed(World()), World()), 25)
    assert [bucket.flat.dtype for bucket in buckets] == [torch.float32, torch.float64, torch.float32]


def test_a_bucket_divides_and_hands_back_without_a_copy():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(2, 3), (4,), (1,)]]
    parameters[0].grad, parameters[2].grad = torch.full((2, 3), 4.0), torch.tensor([6.0])
    bucket = Bucket(parameters)
    bucket.flat.fill_(9)  # of the step before
    assert bucket.fill(2).tolist() == [2.0] * 6 + [0.0] * 4 + [3.0]
    bucket.hand_back()
    assert [p.grad.shape for p in parameters] == [p.shape for p in parameters]
    bucket.flat.fill_(5)
    assert all((p.grad == 5).all() for p in parameters)


# ---- runs by the real command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", BY_HAND)
def test_a_run_with_any_strategy_leaves_the_checkpoint_of_ddp(trained, strategy):
    """Bit for bit, log included, in 12 steps of two epochs."""
    assert_same(result(trained[strategy]), result(trained["ddp"]))
    assert result(trained["ddp"])["position"] == {"step": 12, "epoch": 1, "seen": 48}


def test_a_global_batch_of_8_is_a_batch_of_4_on_two_ranks(trained, two, two_epochs):
    """And a timeline changes nothing: only one of the two recorded one."""
    shared = two_epochs.replace(name="shared")
    assert_same(result(shared), result(trained["ddp"]))
    assert not list(shared.run.glob("timeline.*")) and list(trained["ddp"].run.glob("timeline.*"))


def test_the_learning_rate_is_scaled_by_the_ranks_after_a_warm_up(trained, two, two_epochs):
    def rates(config) -> list[float]:
        return [event["lr"] for event in read_log(config.run) if event["event"] == "step"]

    rising = [0.8e-3, 1.6e-3, 2.4e-3, 3.2e-3, 4e-3]  # --warmup 5 to twice --lr 2e-3
    falling = [4e-3 * (1 + math.cos(math.pi * step / 7)) / 2 for step in range(7)]
    assert rates(two_epochs.replace(name="scaled")) == pytest.approx(rising + falling)
    assert rates(trained["ddp"]) == pytest.approx([rate / 2 for rate in rising + falling])


@pytest.mark.parametrize("strategy", TOGETHER)
def test_all_ranks_evaluate_with_rank_0s_batch_norm(two, two_epochs, strategy):
    """On shards of 13 and 12 samples, that is with 4 and 3 batches: they must not talk to each other while they evaluate."""
    seen = [rank["averages"][strategy] for rank in two]
    assert len(seen[0]["trained"]) == len(seen[0]["evaluated"]) == 2  # epochs
    assert_same(seen[1]["evaluated"], seen[0]["evaluated"])
    assert_same(seen[0]["evaluated"], seen[0]["trained"])
    for epoch in range(2):
        means = [rank["trained"][epoch][0] for rank in seen]
        assert not torch.equal(*means)  # they had seen different samples
    config = two_epochs.replace(name=f"batch-norm-{strategy}")
    assert_same(result(config), result(config.replace(name="batch-norm-ddp")))


@pytest.mark.parametrize("scaled", [False, True])
def test_one_rank_of_torchrun_needs_no_others(two_epochs, tmp_path, scaled):
    """Every strategy is then one model, and a learning rate times one is itself."""
    config = two_epochs.replace(runs=str(tmp_path), max_steps=4, scale_lr=scaled)
    fit(config.replace(name="plain", scale_lr=False))
    if scaled:
        fit(config.replace(name="alone"))
        return assert_same(result(config.replace(name="alone")), result(config.replace(name="plain")))
    [runs] = on_real_ranks(1, "alone", tmp_path, *config.arguments())
    assert [Path(run).name for run in runs] == [f"alone-{strategy}" for strategy in TOGETHER]
    for strategy in TOGETHER:
        assert_same(result(config.replace(name=f"alone-{strategy}")), result(config.replace(name="plain")))


# ---- mistakes: one line, every rank stops, none waits for the others until the time is up ----------------------------------


@pytest.mark.parametrize("words", on_ranks.MISTAKES)
def test_a_mistake_is_one_line_on_every_rank(two, words):
    for rank in two:
        [line] = rank["mistakes"][words].splitlines()
        assert line.startswith(on_ranks.MISTAKES[words])


def test_one_rank_that_fails_ends_them_all(base):
    """Far from the time-out of an hour; nothing hangs for the four minutes that the helper grants."""
    config = base.replace(name="failed", strategy="ddp_overlapped", timeout=3600)
    commands = {
        "early": [PROGRAM, "early", "-", *config.arguments()],
        "trips": [PROGRAM, "trips", "-", *config.replace(strategy="ddp", name="tripped").arguments()],
        "mistake": ["-m", "course_lib.train", *config.replace(name="mistaken", global_batch=5).arguments()],
    }
    with ThreadPoolExecutor() as threads:
        ended = dict(zip(commands, threads.map(lambda words: torchrun(2, *words), commands.values())))
    said = {}
    for name, (code, output) in ended.items():
        assert code == 1, output  # torchrun's own, for a rank that failed
        assert "done: " not in output
        said[name] = {line for line in output.splitlines() if line.startswith("error: ")}
    assert said["early"] == {
        "error: the loader of rank 1 ended 3 batches early in epoch 0: every rank must have as many as the others; "
        "look at its part of the data"
    }
    assert said["mistake"] == {"error: --global-batch 5 can't be shared evenly by 2 ranks; try 4"}
    assert said["trips"] == set() and "ZeroDivisionError: rank 1 trips" in ended["trips"][1]
    for name in ("failed", "tripped"):
        events = [event["event"] for event in read_log(base.replace(name=name).run)]
        assert events == ["start", "step", "step", "step"]
