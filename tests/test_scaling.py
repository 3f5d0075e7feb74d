"""Speed-up by hand, the two laws, alpha and beta found again under noise, predictions that follow from the parts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import scaling
from course_lib.config import UserError
from course_lib.scaling import Model, Network

SIZES = [2**power for power in range(10, 25, 2)]
FREE = Network(0.0, 0.0)


def probe(network: Network, *, cores: int = 0, noise: float = 0.0, seed: int = 0, ranks=(2, 3, 4)) -> dict:
    """What a probe would find on a machine that follows the model, with so much relative noise."""
    random = np.random.default_rng(seed)

    def times(seconds: float) -> list[float]:
        return list(seconds * (1 + noise * random.standard_normal(7)))

    messages = [
        {"ranks": n, "bytes": s, "seconds": times(network.ring(n, s) * scaling.crowd(n, cores))}
        for n in ranks
        for s in SIZES
    ]
    truth = Model(0.004, 0.006, network, (110_000,), cores, 1.2 if cores > 1 else 1.0)
    steps = [{"ranks": n, "batch": b, "seconds": times(truth.compute(n, b))} for n in (1, *ranks) for b in (2, 4, 8)]
    return {"messages": messages, "steps": steps, "cores": cores, "parameters": 27_500}


# ---- arithmetic ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks, seconds, speed_up, efficiency",
    [(1, 38765, 1.0, 1.0), (2, 20775, 1.866, 0.933), (8, 5535, 7.004, 0.875), (14, 3241, 11.961, 0.854)],
)
def test_speed_up_and_efficiency_of_the_published_table(ranks, seconds, speed_up, efficiency):
    found = scaling.speed_up(38765, seconds)
    assert found == pytest.approx(speed_up, abs=5e-4)
    assert scaling.efficiency(found, ranks) == pytest.approx(efficiency, abs=5e-4)


def test_the_two_laws_by_hand():
    """Amdahl with 5 % serial on 20 ranks: 1/(0.05 + 0.95/20) = 10.26; Gustafson: 0.05 + 0.95 · 20 = 19.05."""
    assert scaling.amdahl(0.05, 20) == pytest.approx(10.2564, abs=1e-4)
    assert scaling.gustafson(0.05, 20) == pytest.approx(19.05)
    assert scaling.amdahl(0.0, 64) == scaling.gustafson(0.0, 64) == 64
    assert scaling.amdahl(1.0, 64) == scaling.gustafson(1.0, 64) == 1


@given(st.floats(0, 1), st.floats(1e-3, 1), st.integers(1, 2000), st.integers(1, 512))
def test_both_laws_are_the_model_with_a_network_that_costs_nothing(fixed, per_sample, ranks, batch):
    model = Model(fixed, per_sample, FREE, (10**6,))
    serial = fixed / model.step(1, batch)
    assert model.strong(ranks, batch) == pytest.approx(scaling.amdahl(serial, ranks), rel=1e-9)
    longer = model.step(1, ranks * batch) / model.step(ranks, batch)
    assert longer == pytest.approx(scaling.gustafson(serial, ranks), rel=1e-9)
    assert model.weak(ranks, batch) == pytest.approx(ranks)


def test_node_hours_and_energy():
    assert scaling.cost(7200, nodes=4, watts=500) == {"node_hours": 8.0, "kilowatt_hours": 4.0}


def test_where_to_stop():
    assert scaling.where_to_stop({1: 1.0, 2: 1.9, 4: 3.0, 8: 4.0, 16: 4.5}) == 8
    assert scaling.where_to_stop({1: 1.0, 2: 1.9, 4: 3.0, 8: 4.0}, least=0.9) == 2


# ---- messages --------------------------------------------------------------------------------------------------------------


def test_ring_and_tree_by_hand():
    """4 ranks, 1 MB, 10 µs and 1 ns a byte: ring 6 · (10 µs + 250 µs), tree 4 · 10 µs + 2 · 1 ms."""
    network = Network(1e-5, 1e-9)
    assert network.ring(4, 1e6) == pytest.approx(1.56e-3)
    assert network.tree(4, 1e6) == pytest.approx(2.04e-3)
    assert network.ring(1, 1e6) == network.tree(1, 1e6) == 0


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7), st.integers(2, 4096))
def test_for_small_messages_the_tree_wins_and_for_large_ones_the_ring(alpha, beta, ranks):
    network = Network(alpha, beta)
    assert network.tree(ranks, 0) <= network.ring(ranks, 0)
    large = 1e3 * ranks**2 * alpha / beta  # bytes
    assert network.ring(ranks, large) < network.tree(ranks, large)


@pytest.mark.parametrize("cores", [0, 2, 3])
@pytest.mark.parametrize("alpha, beta", [(5e-6, 5e-11), (6e-4, 8e-10), (1e-3, 1e-8)])
def test_alpha_and_beta_are_found_again(alpha, beta, cores):
    exact = scaling.fit_network(probe(Network(alpha, beta), cores=cores)["messages"], cores)
    assert (exact.alpha, exact.beta) == pytest.approx((alpha, beta), rel=1e-6)
    for seed in range(5):
        noisy = probe(Network(alpha, beta), cores=cores, noise=0.1, seed=seed)
        found = scaling.fit_network(noisy["messages"], cores)
        assert (found.alpha, found.beta) == pytest.approx((alpha, beta), rel=0.1)


@pytest.mark.parametrize("alpha, beta", [(0.0, 1e-9), (1e-3, 0.0)])
def test_noise_never_makes_a_message_cheaper_than_nothing(alpha, beta):
    for seed in range(20):
        noisy = probe(Network(alpha, beta), noise=0.3, seed=seed)
        found = scaling.fit_network(noisy["messages"], 0)
        assert found.alpha >= 0 and found.beta >= 0 and found.alpha + found.beta > 0


def test_too_few_measurements_are_refused():
    found = probe(Network(1e-4, 1e-9))
    with pytest.raises(UserError, match="at least two sizes"):
        scaling.fit_network(found["messages"][:1], 0)
    with pytest.raises(UserError, match="at least two batch sizes"):
        scaling.fit_model({**found, "steps": found["steps"][:1]})


# ---- steps -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [0, 1, 2, 4, 8])  # 8: more than the probe has ranks, so never all of them busy
def test_a_machine_that_follows_the_model_is_predicted(cores):
    network = Network(5e-4, 8e-10)
    truth = Model(0.004, 0.006, network, (110_000,), cores, 1.2 if cores > 1 else 1.0)
    model = scaling.fit_model(probe(network, cores=cores))
    for ranks in (1, 2, 3, 4, 64):
        assert model.step(ranks, 8) == pytest.approx(truth.step(ranks, 8), rel=1e-3)
    noisy = scaling.fit_model(probe(network, cores=cores, noise=0.05))
    for ranks in (1, 2, 3, 4):
        assert noisy.step(ranks, 8) == pytest.approx(truth.step(ranks, 8), rel=0.1)


def test_nothing_negative_comes_out_of_noise():
    for seed in range(30):
        model = scaling.fit_model(probe(Network(1e-4, 1e-9), noise=0.5, seed=seed))
        assert model.fixed >= 0 and model.per_sample >= 0 and model.step(8, 8) > 0


def test_steps_that_seem_to_fall_with_the_batch_cost_the_same_for_all():
    found = probe(Network(1e-4, 1e-9))
    found["steps"] = [{"ranks": 1, "batch": batch, "seconds": [seconds]} for batch, seconds in ((2, 0.05), (8, 0.03))]
    model = scaling.fit_model(found)
    assert (model.fixed, model.per_sample) == (pytest.approx(0.04), 0.0)


def test_overlap_by_hand():
    """Compute 3 s, backward 2 s of them. Two equal buckets are full after 1 s and 2 s, each takes t on the wire."""
    for seconds, exposed in [
        (0.5, 0.5),
        (1.0, 1.0),
        (1.5, 2.0),
    ]:  # the last: the second waits half a second for the first
        network = Network(seconds / 2, 0.0)  # a ring of two: two messages
        assert Model(0.0, 3.0, network, (100, 100)).exposed(2, 1) == pytest.approx(exposed)
        assert Model(0.0, 3.0, network, (200,)).exposed(2, 1) == pytest.approx(seconds)  # one bucket hides nothing
        shared = Model(0.0, 3.0, network, (100, 100), cores=2)
        assert shared.exposed(2, 1) == pytest.approx(2 * seconds)  # no core is left over to hide behind
    assert Model(0.0, 3.0, network, (100, 100)).exposed(1, 1) == 0


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 10))
def test_overlap_hides_at_most_everything_but_the_last_bucket(ranks, batch, pieces):
    network = Network(1e-4, 1e-9)
    model = Model(0.004, 0.006, network, (10**6,) * pieces)
    last, every = network.ring(ranks, 10**6), pieces * network.ring(ranks, 10**6)
    assert last - 1e-12 <= model.exposed(ranks, batch) <= every + 1e-12


def test_ranks_that_share_cores_share_time():
    model = Model(0.0, 1.0, FREE, (1,), cores=2, slowdown=1.25)
    assert [model.compute(n, 1) for n in (1, 2, 4)] == [1.0, 1.25, 2.5]
    assert model.weak(2, 1) == pytest.approx(1.6) == model.weak(4, 1)  # more ranks than cores bring nothing


def test_nine_of_ten_bands_hold_the_truth_and_they_grow_with_the_noise():
    """Of 40 probes; 80 % is two standard deviations of such a count below 90 %."""
    network, ranks = Network(5e-4, 8e-10), [2, 64, 1024]
    truth = np.array([Model(0.004, 0.006, network, (110_000,)).step(n, 8) for n in ranks])

    def band(noise: float, seed: int) -> np.ndarray:
        drawn = scaling.resample(probe(network, noise=noise, seed=seed), draws=50)
        return np.array(scaling.band([scaling.fit_model(one) for one in drawn], lambda m, n: m.step(n, 8), ranks))

    bands = np.array([band(0.02, seed) for seed in range(40)])  # (probe, low and high, ranks)
    held = (bands[:, 0] < truth) & (truth < bands[:, 1])
    assert (held.mean(axis=0) >= 0.8).all()
    assert (np.diff(bands[0], axis=0) < np.diff(band(0.2, 0), axis=0)).all()


def test_resampling_is_the_same_every_time():
    found = probe(Network(5e-4, 8e-10), noise=0.1)
    assert scaling.resample(found, draws=3) == scaling.resample(found, draws=3)
    again = scaling.resample(found, draws=1)[0]
    assert set(again["messages"][0]["seconds"]) <= set(found["messages"][0]["seconds"])
    assert math.isfinite(scaling.fit_model(again).step(4, 8))
