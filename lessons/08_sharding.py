# %% [markdown]
# # 08 · Sharding: every weight once
#
# DDP has one waste that nobody sees: all ranks keep the same weights, the same averages of Adam, and after every step the same
# gradients. On 64 ranks everything is there 64 times. *Sharding* keeps each number on one rank, and lends it to the others when
# they need it. The model stays in one piece, and the data is shared as in DDP.
#
# After this lesson
#
# 1. you have sharded an optimizer and gradients by hand, and seen what each stage saves;
# 2. you know DeviceMesh and DTensor, the two words in which PyTorch says all of this;
# 3. you have trained with FSDP, HSDP and tensor parallel, and proved them equal to one process;
# 4. you have counted their messages, and saved a checkpoint on four ranks that two ranks have read.
#
# **New since lesson 07:** tensors of which each rank has only a part.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
width = 16
batch = 4  # samples per step on each rank
steps = 5  # of the proofs
max_steps = 10  # of the training runs that are compared; in many more, rounding would part them

# %% [markdown]
# ## Predict: what does a rank keep?
#
# Per weight, in bytes: 4 for the weight, 4 for its gradient, 8 for Adam's two averages (with mixed precision 2, 2 and 12: the
# same sum). **ZeRO** (Rajbhandari et al., 2020) cuts
# them one after the other. Stage 1 shards the optimizer's averages, stage 2 the gradients too, stage 3 the weights too.

# %%
import torch

from course_lib import plots, ranks
from course_lib.cockpit import Table
from course_lib.config import Config
from course_lib.data.tasks import make_task
from course_lib.lesson import numbers, show
from course_lib.parallel.shard import needed
from course_lib.trainer import fit, make_model
from course_lib.world import World

world = World()  # here, in the notebook, we are alone
config = Config(data=data, runs=runs, width=width, batch=batch, max_steps=max_steps, log_every=max_steps)
config = config.replace(launcher="mpi", timeout=60)
task = make_task(config)
model = make_model(config, task)
show(needed)

# %%
stages = {0: "0: DDP", 1: "1: optimizer", 2: "2: + gradients", 3: "3: + weights (FSDP)"}
series = {
    f"{n} ranks": {
        name: sum(needed(model, n, stage=stage).values()) / sum(needed(model, 1, stage=0).values())
        for stage, name in stages.items()
    }
    for n in (2, 8, 64)
}
plots.grouped_bars(series, ylabel="memory of a rank, DDP = 1")

# %% [markdown]
# Activations are not in it: each rank keeps those of its own samples, as before. So sharding helps where the *weights* fill the
# memory, as in language models with billions of them; for our small UNet we learn it, but do not need it.
#
# ## Two more collectives
#
# An all-reduce is two things in a row. **Reduce-scatter**: the sums are there, but each rank gets only its part.
# **All-gather**: each rank has a part, and all get the whole. *So what is an all-reduce, in these words?*

# %%
team = ranks.start(2)
team["config"], team["steps"] = config, steps

# %%
# %%px
import torch
import torch.distributed as dist

from course_lib.world import start as join_world

world = join_world(config)
before = torch.arange(1.0, 5.0, device=world.device) * 10**world.rank
scattered, gathered = before.new_empty(2), before.new_empty(4)
dist.reduce_scatter_single(scattered, before)
dist.all_gather_single(gathered, scattered)
summed = before.clone()
dist.all_reduce(summed)
before, scattered, gathered, summed = (tensor.cpu() for tensor in (before, scattered, gathered, summed))

# %%
plots.collective("reduce-scatter", team["before"], team["scattered"])
plots.collective("all-gather", team["scattered"], team["gathered"])
assert all(torch.equal(a, b) for a, b in zip(team["gathered"], team["summed"]))

# %% [markdown]
# One after the other they *are* the all-reduce: the assertion holds. This is all that ZeRO needs. Between the two halves each
# rank has the finished sum of its part of the gradients. It updates just those weights, and has Adam's averages for just those.
# Then the all-gather, of new weights instead of gradients: the same bytes as DDP, and less memory. (Before PyTorch 2.13 the two
# functions were called `reduce_scatter_tensor` and `all_gather_into_tensor`.)
#
# ## ZeRO by hand
#
# The weights of a block lie side by side in one tensor, filled up so that all ranks get equally much. `mine` is a view of this
# rank's part: what Adam changes there is changed in the model.

# %%
from course_lib.parallel.shard import Piece, ShardedAdam

show(Piece, ShardedAdam.step)

# %% [markdown]
# In stage 1 every rank still gets all gradients, and uses its part: written like that, for all to see, it sends half as much
# again as DDP. Stage 2 hands them in while backward runs, block by block (a hook on every parameter, as in lesson 04), and
# lets go of what is not its own. *So how many whole gradients are there at the same time, at most?* Both work in our
# `train_step` as they are, in the optimizer's place. (In double precision here: Adam divides by the gradient's size, and
# where that is nearly zero it would make a visible step of a rounding error.)

# %%
# %%px --local
from itertools import islice

import torch

from course_lib import simulate
from course_lib.data.batches import Batches
from course_lib.data.tasks import make_task
from course_lib.parallel.shard import ShardedAdam, blocks, fsdp, held
from course_lib.trainer import make_model, train_step

task = make_task(config)


def fresh_model():
    """The trainer's begins with a head of zeros: then nearly all gradients are zero, and equal zeros prove nothing."""
    model = make_model(config, task).double()
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    return model.to(world.device)


def train(model, optimizer, world, batch: int):
    for indices in islice(Batches(len(task.train), batch, world=world), steps):
        samples = [task.train[index] for index in indices]
        tensors = [torch.stack(several).double().to(world.device) for several in zip(*samples)]
        train_step(model, tensors, optimizer)
    return model


# %%
# %%px
kept, sent, weights, most = {}, {}, {}, {0: 0, 1: 0, 2: 0}


def note(_):
    """Bytes of the whole gradients that are here now."""
    now = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    most[stage] = max(most[stage], now)


for stage in (0, 1, 2):
    model = fresh_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)  # before the optimizer's own hooks
    if stage:
        optimizer = ShardedAdam(model, world, stage=stage)
        with simulate.Traffic() as traffic:
            kept[stage] = held(train(model, optimizer, world, config.batch), optimizer.adam)
        sent[stage] = traffic.sent / steps
    else:
        ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)  # else it keeps them twice
        optimizer = torch.optim.Adam(model.parameters())
        train(ddp, optimizer, world, config.batch)
        kept[stage] = held(model, optimizer)
        del ddp
    weights[stage] = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}

# %%
model = fresh_model()
optimizer = torch.optim.Adam(model.parameters())
whole = train(model, optimizer, world, 2 * batch).state_dict()
by_rank = team["weights"]
for stage, mine in by_rank[0].items():
    assert all(torch.equal(mine[name], by_rank[1][stage][name]) for name in mine)
    apart = max((mine[name] - whole[name]).abs().max().item() for name in mine)
    assert apart < 1e-9
    print(f"stage {stage}: both ranks equal to the last bit; from one process they differ by at most {apart:.1g}")

# %%
rows = []
for stage, found in team["kept"][0].items():
    for name, size in found.items():
        rows.append((stage, name, f"{needed(model, 2, stage=stage)[name] / 1e3:.1f}", f"{size / 1e3:.1f}"))
        assert 0.99 < size / needed(model, 2, stage=stage)[name] < 1.05, (stage, name)
Table(("stage", "kB of (8 bytes a number here)", "predicted", "counted"), rows)

# %% [markdown]
# The prediction holds for what stays between two steps. Now what is sent, and what is there for a moment:

# %%
by_hand, most = team["sent"][0], team["most"][0]
by_ddp = simulate.ddp_bytes(model, 2)
assert by_hand[1] == 1.5 * by_hand[2] and 1 <= by_hand[2] / by_ddp < 1.01  # a little more, for the zeros at the end
print(
    f"kB that a rank sends in a step: stage 1 {by_hand[1] / 1e3:.0f}, stage 2 {by_hand[2] / 1e3:.0f}, DDP {by_ddp / 1e3:.0f}"
)
largest = max(sum(parameter.nbytes for parameter in block.parameters()) for block in blocks(model))
assert most[1] == sum(parameter.nbytes for parameter in model.parameters()) and most[2] == largest
print(
    f"kB of whole gradients at the same time: stage 1 {most[1] / 1e3:.0f}, stage 2 {most[2] / 1e3:.0f}, the largest block's"
)

# %% [markdown]
# ## DeviceMesh and DTensor
#
# For stage 3 the weights themselves must be in parts, and every operation would have to know. PyTorch has two words for that.
# A **DeviceMesh** is a table of ranks with a name for each direction, like that of lesson 07. A **DTensor** is a tensor over a
# mesh: each rank has a part (`Shard(dim)`), or a copy (`Replicate()`), or a summand (`Partial()`). To go from one placement
# to another *is* a collective:

# %%
# %%px
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

mesh = init_device_mesh(world.device.type, (2,), mesh_dim_names=("shard",))
table = torch.arange(12.0, device=world.device).reshape(4, 3)
rows = distribute_tensor(table, mesh, [Shard(0)])
print(f"{rows.placements}: {tuple(rows.shape)} over all, {tuple(rows.to_local().shape)} here")
summand = DTensor.from_local(torch.full((2,), 1.0 + world.rank, device=world.device), mesh, [Partial()])
total = summand.redistribute(placements=[Replicate()])  # an all-reduce
assert torch.equal(rows.full_tensor(), table) and total.to_local().tolist() == [3, 3]
print(f"here {summand.to_local().tolist()} and there another summand: together {total.to_local().tolist()}")

# %% [markdown]
# | from | to | is |
# |---|---|---|
# | `Partial` | `Replicate` | all-reduce |
# | `Partial` | `Shard` | reduce-scatter |
# | `Shard` | `Replicate` | all-gather |
# | `Shard(0)` | `Shard(1)` | all-to-all (on CPUs PyTorch takes an all-gather, and keeps a part of it) |
# | `Replicate` | `Shard` | nothing: each keeps its part |
#
# `CommDebugMode` is PyTorch's own counter of collectives. What does it see in each of the five lines?

# %%
# %%px
from torch.distributed.tensor.debug import CommDebugMode

lines = [(Partial(), Replicate()), (Partial(), Shard(0)), (Shard(0), Replicate())]
lines += [(Shard(0), Shard(1)), (Replicate(), Shard(0))]
seen = []
for start, end in lines:
    with CommDebugMode() as counter:
        DTensor.from_local(torch.ones(4, 4, device=world.device), mesh, [start]).redistribute(placements=[end])
    seen.append({str(operation).split(".")[-1]: times for operation, times in counter.get_comm_counts().items()})
print(*seen)
assert seen[:3] == [{"all_reduce": 1}, {"reduce_scatter_tensor": 1}, {"all_gather_into_tensor": 1}]
assert sum(seen[3].values()) == 1 and seen[4] == {}

# %% [markdown]
# Everything in this lesson is one of these lines.
#
# ## FSDP: the weights too
#
# `fully_shard` turns a module's parameters into DTensors, `Shard(0)` over the mesh. Before the module's forward it gathers
# them, after that it lets the whole go; the same again around backward, and gradients leave by a reduce-scatter. We apply it
# to each block of the UNet and then to the rest, so that only the block that computes is whole (and that the next one's
# weights may already come meanwhile). The UNet's code does not change.

# %%
from course_lib.parallel.shard import shard

show(shard)

# %%
# %%px
model, _ = fsdp(fresh_model(), world)
optimizer = torch.optim.Adam(model.parameters())  # after sharding: it must see the parts
train(model, optimizer, world, config.batch)
kept_fsdp = held(model, optimizer)
name, parameter = next(iter(model.named_parameters()))
print(f"{name}: {tuple(parameter.shape)} over all, {tuple(parameter.to_local().shape)} here, {parameter.placements}")
full = {name: tensor.full_tensor().cpu() for name, tensor in model.state_dict().items()}

# %%
full = team["full"][0]
furthest = max((full[name] - whole[name]).abs().max().item() for name in whole)
assert furthest < 1e-9
ddp_bytes, fsdp_bytes = (sum(kept.values()) for kept in (team["kept"][0][0], team["kept_fsdp"][0]))
assert fsdp_bytes == 4 * simulate.padded(model, 2) / 2  # as many channels, made even, on each of two ranks
assert ddp_bytes / 2 <= fsdp_bytes
print(f"from one process the weights differ by at most {furthest:.1g}")
print(f"a rank keeps {fsdp_bytes / 1e3:.1f} kB, with DDP {ddp_bytes / 1e3:.1f} kB: {fsdp_bytes / ddp_bytes:.0%}")

# %% [markdown]
# *Is only one block whole at a time?* Look while each of them computes, in forward and in backward:

# %%
# %%px
at_once = []


def look(*_):
    at_once.append(sum(not any(isinstance(p, DTensor) for p in block.parameters()) for block in blocks(model)))


def look_twice(_, __, output):
    look()
    output.register_hook(look)  # when its gradient comes


for block in blocks(model):
    next(module for module in block.modules() if isinstance(module, torch.nn.Conv2d)).register_forward_hook(look_twice)
train(model, optimizer, world, config.batch)
print(f"{len(at_once)} looks: {set(at_once)} of {len(blocks(model))} blocks whole")
assert len(at_once) == steps * 2 * len(blocks(model)) and set(at_once) == {1}

# %% [markdown]
# *And why was the optimizer made after sharding?*
#
# <details><summary>Answer</summary>
#
# Because `fully_shard` puts new parameters in the place of the old ones. An optimizer made before holds the old ones, which get
# no gradients any more: its step does nothing, and nobody says so.
#
# </details>

# %%
# %%px
too_early = fresh_model()
optimizer = torch.optim.Adam(too_early.parameters())
too_early, _ = fsdp(too_early, world)
before = [parameter.full_tensor() for parameter in too_early.parameters()]
train(too_early, optimizer, world, config.batch)
changed = sum(not torch.equal(p.full_tensor(), was) for p, was in zip(too_early.parameters(), before))
print(f"{changed} of {len(before)} parameters have changed in {steps} steps")
assert changed == 0

# %% [markdown]
# *What is the price?* Count the messages. Lesson 06 has the formulas: DDP sends 2(*n*−1)/*n* · *S* bytes, FSDP 3(*n*−1)/*n* ·
# *S* for blocks, because weights are gathered twice. `CommDebugMode` counts collectives again, and `Traffic` from lesson 06
# their bytes:

# %%
# %%px
import warnings

x = torch.stack([task.train[index][0] for index in range(2)]).to(world.device)
counted = make_model(config, task).to(world.device)
for module in counted.modules():
    if isinstance(module, torch.nn.ReLU):
        module.inplace = False  # CommDebugMode's hooks do not bear it
counted, _ = fsdp(counted, world)
with warnings.catch_warnings(action="ignore"), CommDebugMode() as counter:
    counted(x).sum().backward()
model, _ = fsdp(make_model(config, task).to(world.device), world)
with simulate.Traffic() as traffic:
    model(x).sum().backward()
sent_fsdp = traffic.sent

# %%
# %%px
plain, count = make_model(config, task), len(blocks(model))
predicted, by_ddp = simulate.fsdp_bytes(plain, 2), simulate.ddp_bytes(plain, 2)
print(f"{dict(traffic.calls)} for {count} blocks and the head")
print(f"{traffic.sent:,.0f} bytes sent, {predicted:,.0f} by the formula: {traffic.sent / by_ddp:.2f} times DDP's")
assert traffic.sent == predicted and counter.get_total_counts() == len(traffic.messages)
assert traffic.calls == {"all-gather": 2 * count + 1, "reduce-scatter": count + 1}
assert 1.4 < traffic.sent / simulate.padded(plain, 2) < 1.5  # the head is gathered once

# %% [markdown]
# *Why two all-gathers for each block, but one for the head?*
#
# <details><summary>Answer</summary>
#
# Forward and backward each need a block's weights, and in between they are let go. The head belongs to the outermost
# `fully_shard`, which keeps its weights by default: what is last in forward is first in backward.
#
# </details>
#
# ## Fewer bytes: mixed precision
#
# Weights can be gathered as bfloat16, and computed with as such, while the shards that Adam updates stay float32; gradients are
# added up in float32. In FSDP that is a policy:

# %%
# %%px
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_lib.parallel.shard import make_mesh, shard

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
lean = shard(make_model(config, task).to(world.device), make_mesh(world.device.type, 2), mp_policy=policy)
kinds = {parameter.dtype for parameter in lean.parameters()}
with simulate.Traffic() as lean_traffic:
    lean(x).sum().backward()
gathered = {
    name: sum(message.bytes for message in one.messages if message.name == "all-gather")
    for name, one in (("float32", traffic), ("bfloat16", lean_traffic))
}
print(f"parameters are kept as {kinds}; gathered: {gathered}")
assert gathered["bfloat16"] * 2 == gathered["float32"] and kinds == {torch.float32}
print(f"all that is sent: {lean_traffic.sent / traffic.sent:.0%} of before")
assert 0.6 < lean_traffic.sent / traffic.sent < 0.7  # half of two gathers, all of the scatter

# %% [markdown]
# ## HSDP: sharded inside, replicated across
#
# Gathering weights over 1,024 ranks is slow, and lesson 06 has shown that small weights are filled up with zeros there. So one
# shards within a node, where links are fast, and replicates between nodes: a reduce-scatter inside the node, then an all-reduce
# of each part between nodes. That is a mesh with two directions, `--devices` ranks to a row:
#
# | | shard 0 | shard 1 |
# |---|---|---|
# | **copy 0** (a node) | rank 0 | rank 1 |
# | **copy 1** (another) | rank 2 | rank 3 |
#
# In the code it is the same `shard` over another mesh. It takes four ranks, so it has to wait until the end of this lesson.
#
# ## Tensor parallel: one layer over several ranks
#
# FSDP gathers a layer before it computes. **Tensor parallel** never does: each rank computes with its part. All ranks then need
# the same samples. Write a fully connected layer as *Y = X A*, one sample a row. There are two ways to cut *A*:
#
# - by **columns**: each rank computes some of the outputs, from all inputs;
# - by **rows**: each rank uses some of the inputs, and the results are summands.
#
# Two layers, the first cut by columns and the second by rows, need one all-reduce in forward, and one in backward. PyTorch
# has a word for each. (It stores *A* transposed, so `ColwiseParallel` cuts dimension 0 of the weight and `RowwiseParallel`
# dimension 1.)

# %%
# %%px
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.manual_seed(0)
two_layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(world.device)
values = torch.randn(5, 6).to(world.device)
right = two_layers(values)
cut_in_two = parallelize_module(two_layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
with CommDebugMode() as counter:
    found = cut_in_two(values)
print("weights here:", *(tuple(layer.weight.to_local().shape) for layer in (two_layers[0], two_layers[2])))
print(f"{counter.get_total_counts()} collective; differs by at most {(found - right).abs().max().item():.1g}")
assert counter.get_total_counts() == 1 and torch.allclose(found, right, atol=1e-6)

# %% [markdown]
# *And a convolution?* Its weight is (output channel, input channel, 3, 3): a matrix of small kernels. Columns are now output
# channels, rows are input channels, and everything else stays. A UNet's block is two convolutions in a row, with a GroupNorm
# between them whose groups lie on one rank each. So a block needs one all-reduce in forward and one in backward:

# %%
from course_lib.parallel import tensor

show(tensor.ColumnConv2d, tensor.RowConv2d)

# %%
# %%px
from course_lib.checkpoint import whole
from course_lib.parallel.tensor import cut

lowest = make_model(config, task).bottom.to(world.device)
for module in lowest.modules():
    if isinstance(module, nn.ReLU):
        module.inplace = False
values = torch.randn(2, lowest.layers[0].in_channels, 8, 8, device=world.device, requires_grad=True)
right = lowest(values)
gradients = torch.autograd.grad(right.square().mean(), [values, *lowest.parameters()])
cut(lowest, mesh)
with warnings.catch_warnings(action="ignore"), CommDebugMode() as counter:
    found = lowest(values)
    found.square().mean().backward()
pairs = [(whole(one.grad), gradient) for one, gradient in zip([values, *lowest.parameters()], gradients, strict=True)]
furthest = [max((a - b).abs().max().item() for a, b in some) for some in ([(found, right)], pairs)]
print(
    "{} collectives; result and gradients differ by at most {:.1g} and {:.1g}".format(
        counter.get_total_counts(), *furthest
    )
)
assert counter.get_total_counts() == 2 and max(furthest) < 1e-5

# %%
bottom = sum(p.numel() for p in model.bottom.parameters()) / sum(p.numel() for p in model.parameters())
print(f"the lowest level has {bottom:.0%} of the weights: --strategy tp cuts that one")

# %%
# %%px
from course_lib.trainer import fit

names = ("ddp", "fsdp", "tp")
shared = {"tp": config.batch * 2}  # the same samples on both ranks: together as many as the others see
losses = {
    name: fit(config.replace(name=f"08_{name}", strategy=name, batch=shared.get(name, config.batch)), world).metrics[
        "loss"
    ]
    for name in names
}

# %%
from pathlib import Path

from course_lib import checkpoint

alone = fit(config.replace(name="08_single", strategy="single", launcher="env", batch=2 * batch)).metrics["loss"]
losses = {"single": alone} | team["losses"][0]
for name, loss in losses.items():
    path, single = (Path(runs, f"08_{run}", "checkpoint.pt") for run in (name, "single"))
    weights, gradients = checkpoint.compare(path, single, make_model(config, task))
    print(f"{name:7} validation loss {loss:.6f}; weights {weights:.1g}, averages of gradients {gradients:.1g} apart")
    assert abs(loss - alone) < 1e-3 * alone and weights < 0.1 and gradients < 0.01, name

# %% [markdown]
# All train the same, as far as so many steps of Adam in single precision let them: weights are compared in parts of the way that
# the training went, gradients in parts of their length, as in lesson 07. The proofs above were sharper. And the trainer's
# checkpoints are whole, whoever wrote them: FSDP's shards are brought together on all ranks, and rank 0 writes. For our small
# net that is right. For a large one it is not: nobody may have room for all of it. (The training losses printed above are those
# of rank 0's own samples; compare the validation losses.)
#
# ## Checkpoints in parts
#
# So every rank writes its own part, at the same time, and beside them a list of what is where. Another number of ranks reads
# just what it needs:

# %%
from course_lib import sharded_checkpoint

show(sharded_checkpoint.save_in_background, sharded_checkpoint.load)

# %% [markdown]
# *Four ranks save; two go on.* That takes two launches, so it is a small program: four ranks, HSDP on a mesh of 2 × 2, train 5
# steps, save in the background, and train 5 more; two ranks, FSDP, load and train the same 5. Each launch writes down its last
# loss.

# %%
from course_lib import reshard

show(reshard.save_and_go_on, reshard.load_and_go_on)

# %%
import shutil

folder = Path(runs, "08_sharded")
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
ranks.torchrun(4, ["-m", "course_lib.reshard", folder])
written = sorted(path.name for path in sharded_checkpoint.newest(folder).iterdir())
print(written)
assert written == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]  # each rank has written its part

# %%
ranks.torchrun(2, ["-m", "course_lib.reshard", folder])
four, two = (float(Path(folder, f"loss-{n}").read_text()) for n in (4, 2))
assert abs(four - two) < 1e-5

# %% [markdown]
# The same loss at step 10: the two ranks have gone on where the four had been at step 5, and Adam's averages have come with
# the weights. It also shows that HSDP and FSDP train the same. The four had already trained on while a thread wrote; it wrote
# a *copy* of step 5. And the threads talk in a process group of their own, or their messages would meet those of the
# training.
#
# *The machine fails while the files are being written. What will be loaded?*
#
# <details><summary>Answer</summary>
#
# The checkpoint before. The list of parts is written last, and a folder without one does not count; each checkpoint has a
# folder of its own.
#
# </details>
#
# ## torch.compile
#
# `torch.compile` rewrites a model into fewer, larger operations. With the strategies of this course it is one line more: with
# DDP compile the wrapped model, so that it knows where the buckets end; with FSDP compile the blocks, before they are sharded.
# First that they agree. (`aot_eager` does everything except generating code, so it needs no compiler and little time.)

# %%
# %%px
small = config.replace(width=4, depth=1)
plain, with_ddp, with_fsdp = (make_model(small, task).to(world.device) for _ in range(3))
for net in (plain, with_ddp, with_fsdp):
    torch.manual_seed(1)
    nn.init.normal_(net.head.weight)
for block in blocks(with_fsdp):
    block.compile(backend="aot_eager")
with_fsdp, _ = fsdp(with_fsdp, world)
wrapped = torch.compile(nn.parallel.DistributedDataParallel(with_ddp), backend="aot_eager")
for net in (plain, wrapped, with_fsdp):
    net(x).square().mean().backward()
theirs = [parameter.grad for parameter in plain.parameters()]
for name, net in (("DDP", with_ddp), ("FSDP", with_fsdp)):
    mine = [whole(parameter.grad) for parameter in net.parameters()]
    apart = max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))
    print(f"{name}, compiled: gradients differ by at most {apart:.1g}")
    assert apart < 1e-5 * max(gradient.abs().max().item() for gradient in theirs)
del wrapped

# %% [markdown]
# Then whether it helps. That depends on the device, on the net and on the sizes, and the first call takes long, so it must pay
# in a long training. Measure before you decide; here with one block, forward and backward, in one process. (On ranks
# we have only shown that it is correct, not that it is faster.)

# %%
import os
import statistics
import sysconfig
import time

device = "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(model, x: torch.Tensor, repeats: int = 10) -> float:
    taken = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        model(x).square().mean().backward()
        if x.is_cuda:
            torch.cuda.synchronize()  # else only the launch is timed
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken[2:])


# %%
if shutil.which(os.environ.get("CXX", "g++")) and Path(sysconfig.get_path("include"), "Python.h").exists():
    x, block = task.train[0][0][None].to(device), make_model(config, task).down[0].to(device)
    began, eager, compiled = time.perf_counter(), block(x), torch.compile(block)
    assert torch.allclose(compiled(x), eager, atol=1e-4)
    print(f"the first call took {time.perf_counter() - began:.0f} s")
    print(f"a step of one block: {milliseconds(block, x):.2f} ms as it is, {milliseconds(compiled, x):.2f} ms compiled")
else:
    print("no C++ compiler, or no Python.h for it: left out (on Debian: apt install g++ python3-dev)")

# %%
team_sent = team["sent_fsdp"][0]
team.run("from course_lib.world import stop; del model, counted, lean, too_early, optimizer; stop(world)")
team.stop()

# %% [markdown]
# ## Which one?
#
# | what does not fit | take | what travels |
# |---|---|---|
# | nothing, it is only slow | DDP | gradients, once a step |
# | weights, gradients, optimizer | FSDP; HSDP over many nodes | weights twice, gradients once, by block |
# | a single layer | tensor parallel, within a node | activations, in every layer |
# | the layers together, links are slow | pipeline (lesson 07) | activations, at the cuts |
# | one sample's activations | recomputing; strips (lesson 07) | nothing; halos |
#
# Large trainings multiply them: a mesh with a direction for each, tensor parallel innermost, where links are fastest.
#
# ## On the cluster
#
#     sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 slurm/08_sharding.sbatch --strategy hsdp --devices 4
#
# ## Questions
#
# *FSDP sends one and a half times as much as DDP. When is it nevertheless as fast?*
#
# <details><summary>Answer</summary>
#
# When the messages hide behind computing: while one block computes, the next one's weights are already being gathered. Large
# blocks and fast links hide them; small nets like ours do not.
#
# </details>
#
# *Rank 0 evaluates two batches, rank 1 only one. With DDP that is fine. With FSDP?*
#
# <details><summary>Answer</summary>
#
# Rank 0 would wait until its time-out: in forward it gathers weights, and rank 1 does not come. Our `evaluate` makes every
# rank call the model equally often, and counts each sample once.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    kept_ddp=ddp_bytes,
    kept_fsdp=fsdp_bytes,
    fsdp_sent=team_sent,
    share_of_the_bottom=bottom,
    loss_single=alone,
    loss_fsdp=losses["fsdp"],
    loss_resharded=two,
    loss_tp=losses["tp"],
)

# %% [markdown]
# ## What you have seen
#
# - An all-reduce is a reduce-scatter and an all-gather. Between the two lies all of ZeRO.
# - Stage by stage a rank keeps 1/*n* of the optimizer, of the gradients, of the weights; counted to the byte.
# - DTensor says where a tensor's parts are; to change that is a collective.
# - FSDP gathers blocks, tensor parallel never does; a convolution is cut by its channels.
# - A checkpoint in parts belongs to no number of ranks.
#
# **Exercise:** [ex08](../exercises/ex08_sharding/ex08_sharding.ipynb), every number once.
# Then [lab 3](../exercises/lab3_break_it/lab3_break_it.ipynb), in which things break.
#
# **Next:** [09 · MPI](09_mpi.ipynb): the messages themselves, and the ring by hand.
