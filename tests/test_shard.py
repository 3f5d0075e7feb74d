"""Sharded training is that of one process: optimizer, gradients, weights, whole layers over ranks; so are its checkpoints."""

from pathlib import Path

import pytest
import torch
from helpers import assert_same, torchrun

from course_lib import checkpoint, sharded_checkpoint, simulate
from course_lib.checkpoint import State
from course_lib.config import UserError
from course_lib.parallel.shard import hsdp, needed
from course_lib.parallel.tensor import cut, tensor_parallel
from course_lib.unet import Block, UNet
from course_lib.world import World

SHARDS = Path(__file__).parent / "on_shards.py"
NAMES = ["stage 1", "stage 2", "fsdp"]


@pytest.mark.parametrize(
    "ranks, names",
    [
        (2, [*NAMES, "tp, group", "tp, none"]),
        (3, [*NAMES, "tp, none"]),
        (4, [*NAMES, "hsdp", "tp, group", "tp, none"]),
    ],
)
def test_every_kind_of_sharding_trains_what_one_process_trains(ranks, names):
    """Odd images, weights that n does not divide; memory and traffic by the formulas."""
    code, output = torchrun(ranks, SHARDS, "equal")
    assert code == 0, output
    assert [name for name in names if output.count(f"<{name}: equal>") != 1] == [], output
    assert output.count(": equal>") == len(names)
    assert output.count("<bytes and messages: as the formulas say>") == 1


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Saved by four ranks, then loaded by two and by three, which go on."""
    folder = tmp_path_factory.mktemp("sharded")
    for ranks, what in [(4, "save"), (2, "load"), (3, "load")]:
        code, output = torchrun(ranks, SHARDS, what, folder)
        assert code == 0, output
    return folder


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resharded_checkpoint_is_the_original_and_training_goes_on(written, ranks):
    then, after = (checkpoint.load(written / f"{name}.pt") for name in ("then", "after"))
    mine, mine_after = (checkpoint.load(written / f"{name}-{ranks}.pt") for name in ("then", "after"))
    for part in ("model", "optimizer", "position"):
        assert_same(mine[part], then[part])
    assert not torch.equal(after["model"]["head.weight"], then["model"]["head.weight"])
    torch.testing.assert_close(mine_after["model"], after["model"], rtol=1e-9, atol=1e-9)


def test_every_rank_has_written_its_own_part(written):
    names = {path.name for path in sharded_checkpoint.newest(written).iterdir()}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}


def test_what_was_cut_off_does_not_count(written, tmp_path):
    (written / "step-00000099").mkdir(exist_ok=True)
    assert sharded_checkpoint.newest(written).name == "step-00000004"
    net = UNet(3, 2)
    with pytest.raises(UserError, match="holds no complete sharded checkpoint"):
        sharded_checkpoint.load(tmp_path, State(net, torch.optim.Adam(net.parameters())))


def test_memory_a_rank_by_hand():
    """1,000 weights of four bytes over four ranks: DDP keeps 16 bytes a weight, each stage a quarter of one thing more."""
    net = torch.nn.Linear(1000, 1, bias=False)
    sizes = [tuple(needed(net, 4, stage=stage).values()) for stage in range(4)]
    assert sizes == [(4000, 4000, 8000), (4000, 4000, 2000), (4000, 1000, 2000), (1000, 1000, 2000)]


def test_a_mesh_that_does_not_divide_the_ranks(config):
    with pytest.raises(UserError, match="^3 ranks can't be divided into groups of --devices 2; start 2$"):
        hsdp(UNet(3, 2), World(world_size=3), config)


@pytest.mark.parametrize(
    "width, norm, told",
    [
        (3, "none", "^15 channels can't be shared by 2 ranks: change --width$"),
        (4, "batch", "^BatchNorm over channels"),
        (5, "group", "^5 groups of channels can't be shared by 2 ranks: change --width, or use --norm none$"),
    ],
)
def test_layers_that_cant_be_shared(width, norm, told):
    with simulate.fake_world(2), pytest.raises(UserError, match=told):
        if width == 4:
            tensor_parallel(UNet(3, 2, norm=norm), World(world_size=2))
        else:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
            cut(Block(3, {3: 15, 5: 10}[width], norm=norm, padding="zeros"), mesh)
