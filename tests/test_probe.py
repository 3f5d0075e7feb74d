"""The probe measures on real ranks what the model needs; the noise of a gradient is found again where it is known."""

import itertools
import json

import pytest
import torch
from conftest import run_module
from helpers import torchrun

from course_lib import scaling
from course_lib.noise import gradient, noise_scale
from course_lib.probe import SIZES


def test_two_ranks_measure_all_that_the_model_needs(base, tmp_path):
    out = tmp_path / "new" / "probe.json"
    words = ["-m", "course_lib.probe", f"--out={out}", "--repeats=3", *base.arguments()]
    code, output = torchrun(2, *words)
    assert code == 0 and output.count("done: ") == 1, output
    found = json.loads(out.read_text())
    assert [(m["ranks"], m["bytes"]) for m in found["messages"]] == [(2, size) for size in SIZES]
    points = list(itertools.product((1, 2), (2, 4, 8)))
    for kind in ("steps", "together"):
        assert [(s["ranks"], s["batch"]) for s in found[kind]] == points
    rows = [row for kind in ("messages", "steps", "together") for row in found[kind]]
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in rows)
    model = scaling.fit_model(found)
    assert model.cores >= 1 and model.buckets == (4 * found["parameters"],) and model.step(2, 4) > 0


def test_one_process_has_no_messages_to_measure(base, tmp_path):
    done = run_module("course_lib.probe", f"--out={tmp_path / 'probe.json'}", "--repeats=1", *base.arguments())
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "probe.json").read_text())["messages"] == []


@pytest.mark.parametrize(
    "words, told", [(["--repeats=0", "--out=x"], "--repeats must be at least 1, not 0"), ([], "required: --out")]
)
def test_mistakes_are_one_line(words, told):
    done = run_module("course_lib.probe", *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and told in done.stderr


# ---- noise -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_a_known_noise_scale_is_found_again(batch, scale):
    """Gradients G + noise with |G|² = 1 and a variance of `scale` a sample, so `scale` / batch for a batch."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.nn.functional.normalize(torch.randn(500, generator=generator, dtype=torch.float64), dim=0)
    noise = torch.randn(400, 500, generator=generator, dtype=torch.float64) * (scale / batch / 500) ** 0.5
    assert noise_scale(truth + noise, batch) == pytest.approx(scale, rel=0.15)


def test_gradients_without_noise_and_without_signal():
    same = torch.ones(10, 5, dtype=torch.float64)
    assert noise_scale(same, 8) == 0
    assert noise_scale(torch.cat([same, -same]), 8) == float("inf")


def test_a_gradient_is_that_of_backward():
    net = torch.nn.Linear(3, 2).double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    found = gradient(net, (x, y), torch.nn.functional.mse_loss)
    torch.nn.functional.mse_loss(net(x), y).backward()
    torch.testing.assert_close(found, torch.cat([p.grad.flatten() for p in net.parameters()]))
