"""How fast n ranks are: the arithmetic of speed-up, and a model that predicts a step from what a probe has measured.

    T(n) = compute + the part of communication that nothing hides

A message costs alpha seconds, and beta seconds for each byte. An all-reduce of S bytes is 2(n−1) messages of S/n bytes one
after the other round a ring, or 2·log2(n) messages up and down a tree. Amdahl's and Gustafson's laws are the special case in
which communication costs nothing.

What it takes for granted: backward is 2/3 of a step's compute, the fixed part included; it fills the buckets evenly in time,
so many bytes a second; messages and compute slow each other down only where a core must do both; loading data costs nothing;
and no rank is ever late, though a real step ends with the slowest of n.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from course_lib.config import UserError

# ---- arithmetic ------------------------------------------------------------------------------------------------------------


def speed_up(alone: float, together: float) -> float:
    """How many times as fast: seconds on one rank over seconds on several."""
    return alone / together


def efficiency(speed_up: float, ranks: int) -> float:
    """Which part of the ranks is not wasted."""
    return speed_up / ranks


def amdahl(serial: float, ranks: float) -> float:
    """Speed-up of a fixed amount of work, of which this share can't be divided."""
    return 1 / (serial + (1 - serial) / ranks)


def gustafson(serial: float, ranks: float) -> float:
    """Speed-up when the work grows with the ranks; this share of each rank's time is the part that can't be divided."""
    return serial + (1 - serial) * ranks


def cost(seconds: float, *, nodes: float, watts: float) -> dict[str, float]:
    """What a run takes from a project's account, and from the grid if each of its nodes draws so many watts."""
    hours = nodes * seconds / 3600
    return {"node_hours": hours, "kilowatt_hours": hours * watts / 1000}


# ---- messages --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """alpha: seconds a message; beta: seconds a byte."""

    alpha: float
    beta: float

    def ring(self, ranks: int, size: float) -> float:
        """Seconds of an all-reduce: 2(n−1) rounds, in each of which everybody passes on a piece of size/n."""
        return 2 * (ranks - 1) * (self.alpha + size / ranks * self.beta)

    def tree(self, ranks: int, size: float) -> float:
        """Seconds of an all-reduce up a tree and down again, cut into so many small pieces that all levels work at once."""
        return 2 * math.ceil(math.log2(ranks)) * self.alpha + 2 * size * self.beta * (ranks > 1)


def fit_network(messages: Sequence[dict], cores: int) -> Network:
    """alpha and beta of the ring, by least squares of relative errors: a small message counts as much as a large one.

    Where ranks share cores, a message waits for its turn: its cost is `crowd` times as high.
    """
    if len({(m["ranks"], m["bytes"]) for m in messages}) < 2:
        raise UserError("alpha and beta need all-reduces of at least two sizes: probe more")
    seconds = np.array([statistics.median(m["seconds"]) for m in messages])
    rounds = np.array([2 * (m["ranks"] - 1) * crowd(m["ranks"], cores) for m in messages])
    pieces = rounds * [m["bytes"] / m["ranks"] for m in messages]
    columns = np.stack([rounds, pieces], axis=1) / seconds[:, None]
    scale = columns.max(axis=0)  # bytes and rounds differ by many orders of magnitude
    alpha, beta = np.linalg.lstsq(columns / scale, np.ones(len(seconds)), rcond=None)[0] / scale
    if min(alpha, beta) < 0:  # noise; neither can be: take the better of the two alone
        alone = [columns[:, i] @ np.ones(len(seconds)) / (columns[:, i] @ columns[:, i]) for i in (0, 1)]
        alpha, beta = (alone[0], 0.0) if beta < 0 else (0.0, alone[1])
    return Network(float(alpha), float(beta))


def busy(ranks: int, cores: int) -> float:
    """Which part of the other cores has a rank to run."""
    return (min(ranks, cores) - 1) / (cores - 1) if cores > 1 else 0.0


def crowd(ranks: int, cores: int) -> float:
    """How many ranks share a core; with cores = 0 each has a device of its own."""
    return max(1.0, ranks / cores) if cores else 1.0


# ---- steps -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Predicts the seconds of a training step on any number of ranks."""

    fixed: float  # seconds a step, whatever the batch: Python, the optimizer
    per_sample: float  # seconds of forward and backward for each sample of a rank's batch
    network: Network
    buckets: tuple[int, ...]  # bytes of gradients, in the order in which backward fills them
    cores: int = 0  # that the ranks share; 0: each rank has a device of its own
    slowdown: float = 1.0  # of a step while all cores are busy: they share memory
    algorithm: str = "ring"

    def compute(self, ranks: int, batch: float) -> float:
        """Seconds of a step without communication."""
        slower = 1 + (self.slowdown - 1) * busy(ranks, self.cores)
        return (self.fixed + self.per_sample * batch) * slower * crowd(ranks, self.cores)

    def exposed(self, ranks: int, batch: float) -> float:
        """Seconds of communication that backward does not hide.

        Buckets leave one after the other, each when it is full; the last one has nothing to hide behind. Where no core is
        left over, moving bytes takes the time of computing, and nothing is hidden at all.
        """
        if ranks == 1:
            return 0.0
        times = [getattr(self.network, self.algorithm)(ranks, size) * crowd(ranks, self.cores) for size in self.buckets]
        if self.cores and ranks >= self.cores:
            return sum(times)
        backward = self.compute(ranks, batch) * 2 / 3  # it computes two gradients where forward computes one output
        full = np.cumsum(self.buckets) / sum(self.buckets) * backward
        done = 0.0
        for ready, seconds in zip(full, times):
            done = max(done, ready) + seconds
        return done - backward

    def step(self, ranks: int, batch: float) -> float:
        """Seconds of a step in which each rank has a batch of this size."""
        return self.compute(ranks, batch) + self.exposed(ranks, batch)

    def strong(self, ranks: int, global_batch: float) -> float:
        """Speed-up of a step whose global batch stays the same."""
        return speed_up(self.step(1, global_batch), self.step(ranks, global_batch / ranks))

    def weak(self, ranks: int, batch: float) -> float:
        """Speed-up in samples a second when each rank keeps its batch."""
        return ranks * self.step(1, batch) / self.step(ranks, batch)

    def replace(self, **changes) -> "Model":
        return dataclasses.replace(self, **changes)


def fit_model(found: dict, buckets: Sequence[int] | None = None) -> Model:
    """A model of the machine that was probed; unless it is told otherwise, all gradients are in one bucket.

    Compute comes from the steps on one rank, the slowdown from those on the most ranks that have a core each. No step with
    communication is looked at, and none on more ranks than cores: those are there to be predicted.
    """
    cores = found["cores"]
    alone = {s["batch"]: statistics.median(s["seconds"]) for s in found["steps"] if s["ranks"] == 1}
    if len(alone) < 2:
        raise UserError("the time of a sample needs steps of at least two batch sizes: probe more")
    most = max(s["ranks"] for s in found["steps"] if s["ranks"] <= max(1, cores))
    full = {s["batch"]: statistics.median(s["seconds"]) for s in found["steps"] if s["ranks"] == most}
    per_sample, fixed = np.polyfit(list(alone), list(alone.values()), 1, w=[1 / t for t in alone.values()])
    if min(per_sample, fixed) < 0:  # noise: then all of it grows with the batch, or none
        per_sample, fixed = (
            (statistics.fmean(t / b for b, t in alone.items()), 0.0)
            if fixed < 0
            else (0.0, statistics.fmean(alone.values()))
        )
    longer = statistics.median(full[b] / alone[b] for b in alone) - 1
    slowdown = 1 + max(0.0, longer) / busy(most, cores) if most > 1 else 1.0
    network = fit_network(found["messages"], cores)
    buckets = tuple(buckets or [4 * found["parameters"]])
    return Model(float(fixed), float(per_sample), network, buckets, cores, slowdown)


def errors(model: Model, found: dict) -> list[dict]:
    """The probe's DDP steps, which the fit has not seen: measured and predicted seconds, and the relative error."""
    rows = []
    for one in found["together"]:
        if one["ranks"] > 1:
            measured, predicted = statistics.median(one["seconds"]), model.step(one["ranks"], one["batch"])
            facts = {"ranks": one["ranks"], "batch": one["batch"], "measured": measured, "predicted": predicted}
            rows.append(facts | {"error": predicted / measured - 1})
    return rows


def resample(found: dict, draws: int = 100, seed: int = 0) -> list[dict]:
    """The probe as it might have come out on other days: measurements drawn again from those that there are."""
    random = np.random.default_rng(seed)

    def drawn(rows: list[dict]) -> list[dict]:
        return [{**row, "seconds": list(random.choice(row["seconds"], len(row["seconds"])))} for row in rows]

    return [{**found, "messages": drawn(found["messages"]), "steps": drawn(found["steps"])} for _ in range(draws)]


def band(models: Sequence[Model], predict, ranks: Sequence[int]) -> tuple[list[float], list[float]]:
    """Between which values nine of ten models say that predict(model, n) lies, for each n."""
    values = np.array([[predict(model, n) for n in ranks] for model in models])
    low, high = np.quantile(values, (0.05, 0.95), axis=0)
    return low.tolist(), high.tolist()


def where_to_stop(speed_ups: dict[int, float], least: float = 0.5) -> int:
    """The most ranks at which at least this part of them is not wasted."""
    return max(ranks for ranks, value in speed_ups.items() if efficiency(value, ranks) >= least)
