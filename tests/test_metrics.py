"""The log survives being killed, and the numbers are those of all samples, however they were batched."""

import json

import numpy as np
import pytest
import torch

from course_lib.metrics import Log, read_log, sum_over_ranks
from course_lib.scores import SquaredError
from course_lib.trainer import evaluate
from course_lib.world import World

# ---- the log ---------------------------------------------------------------------------------------------------------------


def write(run, *events: tuple[str, dict], world: World = World()) -> None:
    with Log(run / "metrics.jsonl", world) as log:
        for event, fields in events:
            log.write(event, **fields)


def steps(run) -> list[tuple]:
    return [(event["step"], event["loss"]) for event in read_log(run) if event["event"] == "step"]


def step(number: int, loss: float) -> tuple[str, dict]:
    return "step", {"step": number, "loss": loss}


def test_every_line_is_json_and_there_at_once(tmp_path):
    run = tmp_path / "runs" / "new"
    with Log(run / "metrics.jsonl", World()) as log:
        for number in range(3):
            log.write("step", step=number, loss=1 / 3, text="ü\n")
            lines = (run / "metrics.jsonl").read_bytes().decode("ascii").split("\n")
            assert lines.pop() == "" and len(lines) == number + 1  # readable while the run goes on
    for number, line in enumerate(lines):
        event = json.loads(line)
        assert (event["event"], event["step"], event["loss"], event["text"]) == ("step", number, 1 / 3, "ü\n")
        assert event["time"] > 1.7e9


def test_only_the_first_rank_writes(tmp_path):
    write(tmp_path / "run", step(1, 0.5), world=World(rank=1, world_size=2))
    assert not (tmp_path / "run").exists()


def test_a_line_cut_off_anywhere_is_survived_by_reader_and_writer(tmp_path):
    write(tmp_path, step(1, 0.5), step(2, 0.25))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        kept = [(1, 0.5), (2, 0.25)] if end == len(whole) - 1 else [(1, 0.5)]  # only its newline is missing
        path.write_bytes(whole[:end])
        assert steps(tmp_path) == kept
        write(tmp_path, step(3, 0.125))
        assert steps(tmp_path) == [*kept, (3, 0.125)]


def test_of_a_repeated_step_the_last_one_counts(tmp_path):
    write(tmp_path, ("start", {"step": 0}), step(10, 0.5), step(20, 0.4), ("eval", {"step": 20, "loss": 1.0}))
    write(tmp_path, ("start", {"step": 10}), step(20, 0.3), ("eval", {"step": 20, "loss": 2.0}), step(30, 0.2))
    told = [(event["event"], event["step"], event.get("loss")) for event in read_log(tmp_path)]
    before, after = [("start", 0, None), ("step", 10, 0.5)], [("start", 10, None), ("step", 20, 0.3)]
    assert told == [*before, *after, ("eval", 20, 2.0), ("step", 30, 0.2)]


# ---- the numbers -----------------------------------------------------------------------------------------------------------

X = torch.randn(10, 3, 4, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(10, 3, 4, 6, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 11)[:, None, None, None]


def model(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x


def batches(size: int):
    return zip(X.split(size), Y.split(size))


def check(metrics: dict, weight: np.ndarray) -> None:
    squares = (0.5 * X.numpy() - Y.numpy()).astype(float) ** 2
    weights = np.broadcast_to(weight, squares.shape)
    assert metrics["loss"] == pytest.approx(np.average(squares, weights=weights), rel=1e-6)
    expected = [np.sqrt(np.average(squares[:, c], weights=weights[:, c])) for c in range(3)]
    assert metrics["rmse"] == pytest.approx(expected, rel=1e-6)
    assert metrics["count"] == 10


@pytest.mark.parametrize("size", [1, 3, 4, 7, 10])
def test_evaluate_is_the_mean_over_all_samples(size):
    check(evaluate(model, batches(size)), np.ones(1))


@pytest.mark.parametrize("size", [1, 3, 4, 7, 10])
@pytest.mark.parametrize("shape", [(4, 1), (4, 6)], ids=["by latitude", "by point"])
def test_evaluate_with_weights_is_the_weighted_mean(size, shape):
    weight = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    check(evaluate(model, batches(size), score=SquaredError(weight=weight)), weight.numpy())


def test_a_mean_of_means_would_be_another_number():
    """So the tests above can fail: the last batch is smaller and its errors are larger."""
    means = [evaluate(model, [batch])["loss"] for batch in batches(4)]
    assert abs(np.mean(means) / evaluate(model, batches(4))["loss"] - 1) > 0.1


def test_evaluate_builds_no_graph():
    net = torch.nn.Conv2d(3, 3, 1)
    seen = []
    evaluate(lambda x: seen.append(net(x).requires_grad) or net(x), batches(4))
    assert seen == [False] * 3


def test_a_sum_over_one_rank_is_the_value_itself():
    assert sum_over_ranks(torch.tensor([1.0, 2.0]), World()).tolist() == [1.0, 2.0]
