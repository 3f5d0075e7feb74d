"""A BERT trains on ranks what one process trains, by our loop and by Lightning's; its weights come from a folder alone."""

import shutil

import pytest
import torch
from helpers import assert_same, result, torchrun
from safetensors.torch import load_file, save_file

from course_lib import checkpoint
from course_lib.bert import Reader
from course_lib.config import Config, UserError
from course_lib.data.tasks import make_task
from course_lib.metrics import read_log
from course_lib.parallel.shard import blocks
from course_lib.trainer import evaluate, fit, make_model, train_step


@pytest.fixture(scope="module")
def config(errands, tiny_bert, tmp_path_factory) -> Config:
    options = {"tokens": 96, "stride": 16, "batch": 4, "warmup": 2, "max_steps": 6, "log_every": 1, "epochs": 1}
    runs = str(tmp_path_factory.mktemp("runs"))
    return Config(task="squad", data=str(errands), pretrained=str(tiny_bert), runs=runs, lr=1e-3, **options)


def judged(config: Config) -> dict:
    return [event for event in read_log(config.run) if event["event"] == "eval"][-1]


@pytest.fixture(scope="module")
def alone(config) -> Config:
    """One process with the batch of two ranks."""
    config = config.replace(name="one", global_batch=8)
    fit(config)
    return config


@pytest.mark.parametrize("loop, strategy", [("train", "ddp"), ("train", "fsdp"), ("lit", "ddp"), ("lit", "fsdp")])
def test_two_ranks_train_what_one_process_trains(config, alone, loop, strategy):
    """The same weights and gradients, to the rounding of sums in another order; and the same answers to every question."""
    config = config.replace(strategy=strategy, name=f"{loop}-{strategy}")
    code, output = torchrun(2, "-m", f"course_lib.{loop}", *config.arguments())
    assert code == 0, output
    start = make_model(config, make_task(config))
    weights, gradients = checkpoint.compare(config.run / "checkpoint.pt", alone.run / "checkpoint.pt", start)
    assert weights < 0.02 and gradients < 1e-4
    two, one = judged(config), judged(alone)
    assert two["count"] == one["count"] == len(make_task(config).valid)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["exact"] == pytest.approx(one["exact"], abs=0.04) and two["f1"] == pytest.approx(one["f1"], abs=0.04)


def test_what_was_trained_answers_as_it_did(alone):
    """From the checkpoint: the same loss, exact match and F1 as in the log."""
    task = make_task(alone)
    model = make_model(alone.replace(seed=5), task)
    model.load_state_dict(checkpoint.load(alone.run / "checkpoint.pt")["model"])
    batches = [tuple(part[None] for part in task.valid[index]) for index in range(len(task.valid))]
    again, was = evaluate(model.eval(), batches, score=task.score), judged(alone)
    assert again["loss"] == pytest.approx(was["loss"], rel=1e-5)
    assert (again["exact"], again["f1"]) == (was["exact"], was["f1"])


def test_it_resumes_to_the_same_bits(config):
    whole, part = config.replace(name="whole"), config.replace(name="part")
    fit(whole)
    asked = iter([False, False, True])
    assert not fit(part, told=lambda: next(asked)).metrics  # saved and stopped after three of six steps
    fit(part.replace(resume=True))
    assert_same(result(part), result(whole))


def test_strategies_that_cut_the_unet_say_so(config):
    code, output = torchrun(2, "-m", "course_lib.train", *config.replace(strategy="tp").arguments())
    assert code != 0 and "--strategy tp can't cut the net of --task squad; use one of " in output


# ---- the net ---------------------------------------------------------------------------------------------------------------


def seeded(folder, seed: int, **options) -> dict:
    torch.manual_seed(seed)
    return Reader(folder, **options).state_dict()


def test_weights_come_from_the_folder_and_the_head_from_the_seed(tiny_bert, tmp_path):
    """A folder without a head: everything else is its weights, bit for bit; the head differs with the seed alone."""
    shutil.copytree(tiny_bert, tmp_path, dirs_exist_ok=True)
    stored = {name: tensor for name, tensor in load_file(tiny_bert / "model.safetensors").items() if "qa_" not in name}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    first, again, other = (seeded(tmp_path, seed) for seed in (0, 0, 1))
    assert_same(first, again)
    assert [name for name in first if not torch.equal(first[name], other[name])] == ["bert.qa_outputs.weight"]
    assert all(torch.equal(first[f"bert.{name}"], tensor) for name, tensor in stored.items())


def test_fresh_is_the_same_net_with_weights_of_the_seed(tiny_bert):
    stored, fresh, again, other = (
        seeded(tiny_bert, *options, fresh=new) for *options, new in ((0, False), (0, True), (0, True), (1, True))
    )
    assert_same(fresh, again)
    assert {name: tensor.shape for name, tensor in fresh.items()} == {name: t.shape for name, t in stored.items()}
    for weights in (stored, other):
        same = [name for name in fresh if torch.equal(fresh[name], weights[name])]
        assert all(name.endswith("bias") or "LayerNorm" in name for name in same)  # which begin as zeros and ones


def test_it_points_at_tokens_and_never_looks_at_padding(config):
    task = make_task(config)
    model = make_model(config, task)
    x = torch.stack([task.train[index][0] for index in range(4)])
    found = model.train()(x)  # no dropout: the same as in evaluation
    assert found.shape == (4, 2, config.tokens) and torch.equal(found, model.eval()(x))
    other = x.clone()
    other[:, 0][x[:, 1] == 0] = 7  # other ids where there is nothing
    there = (x[:, 1] == 1)[:, None].expand_as(found)
    torch.testing.assert_close(model(other)[there], found[there])


def test_every_parameter_takes_part(config):
    """Or DDP would wait for a gradient that never comes."""
    task = make_task(config)
    model = make_model(config, task)
    x, y = (torch.stack(several) for several in zip(*(task.train[index] for index in range(4))))
    task.score.loss(model(x), y).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert blocks(model) == list(model.layers) and len(model.layers) == 2


def test_it_learns(config):
    """A BERT that knows nothing learns two questions of a paragraph by heart: loss, windows and score fit together."""
    task = make_task(config)
    model = make_model(config, task)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch = tuple(torch.stack(several) for several in zip(*(task.train[index] for index in range(2))))
    for _ in range(80):
        train_step(model, batch, optimizer, measure=task.score.loss)
    with torch.no_grad():
        found = task.train.score.result(task.train.score.sums(model(batch[0]), batch[1]).tolist())
    assert found["loss"] < 0.1 and found["exact"] == 1 and found["count"] == 2


# ---- mistakes --------------------------------------------------------------------------------------------------------------


def test_folders_that_are_none_are_named(tiny_bert, tmp_path):
    for folder, told in (("", r"--pretrained \(empty\) must be a folder"), (tmp_path, "with a BERT's config.json")):
        with pytest.raises(UserError, match=told):
            Reader(folder)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json can't be read"):
        Reader(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="holds a gpt2, and only BERTs are known here"):
        Reader(tmp_path)
    shutil.copy(tiny_bert / "config.json", tmp_path)
    with pytest.raises(UserError, match="its weights can't be read"):
        Reader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tiny_bert / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="its weights can't be read"):
        Reader(tmp_path)
    weights = load_file(tiny_bert / "model.safetensors")
    weights.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its weights have no bert.encoder.layer.1.output.dense.weight"):
        Reader(tmp_path)


def test_windows_that_the_net_has_no_places_for(tiny_bert, errands, tmp_path):
    config = Config(task="squad", data=str(errands), pretrained=str(tiny_bert), runs=str(tmp_path), tokens=600)
    with pytest.raises(UserError, match=r"--tokens 600 is more than the 512 that .* can read"):
        make_task(config)


def test_loading_says_nothing(tiny_bert, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity()
    Reader(tiny_bert)
    captured = capfd.readouterr()
    assert captured.out == captured.err == "" and logging.get_verbosity() == before
