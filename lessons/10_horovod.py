# %% [markdown]
# # 10 · Horovod: the same training in other words
#
# In 2017 most programs on many GPUs sent their gradients to servers that added them up. Baidu had shown that the ring
# all-reduce, which you know from lesson 09, does better, and a team at Uber wrapped it so that five lines turned a training
# program for one GPU into one for many: **Horovod**, first for TensorFlow, then for PyTorch too. Today PyTorch has DDP, and
# Horovod's last release is from 2023. But programs live long. You will meet it in somebody's repository, and want to know what
# those five lines do, whether the results can be trusted, and how to replace them.
#
# After this lesson
#
# 1. you can read a Horovod program, and say what each of its lines is for;
# 2. you have proved that it ends with the weights of DDP, and know two traps in which it does not;
# 3. you have seen how it puts gradients together, and measured it beside DDP.
#
# **New since lesson 09:** not the model but the *optimizer* is wrapped.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
width = 16
batch = 4  # samples per step on each of two ranks
steps = 5  # of the proof
max_steps = 60  # of the runs whose speed is compared, at least 20
horovod = True  # False: show what was recorded, as where it is not installed

# %% [markdown]
# Horovod is not part of this course's packages: it has to be compiled for the PyTorch and the MPI that are here. `make
# horovod` does that, in about five minutes. Without it this lesson shows what was recorded where it was there, and says so.

# %%
import json
from importlib.util import find_spec
from pathlib import Path

import torch

from course_lib import plots
from course_lib.config import Config
from course_lib.lesson import changes, listing, numbers, recall, shell, show

have = horovod and find_spec("horovod") is not None
print("Horovod is here" if have else "Horovod is not here (or not wanted): you will see what was recorded")

# %% [markdown]
# ## The loop that everything starts from
#
# One process, the data and the UNet of lesson 01, and a training loop that could be anybody's:

# %%
listing("lessons/programs/single.py")

# %% [markdown]
# ## Horovod's lines
#
# Here is what makes it run on many ranks. `+` is new, and `-` is what it replaces:

# %%
lines_horovod = changes("lessons/programs/single.py", "lessons/programs/hvd.py")

# %% [markdown]
# | line | what it is for | in DDP |
# |---|---|---|
# | `hvd.init()` | find the other ranks | `init_process_group` |
# | `hvd.rank()`, `hvd.size()` | who gets which samples, and who saves | `get_rank`, `get_world_size` |
# | `hvd.broadcast_parameters` | all begin with rank 0's weights | DDP does it when it is made |
# | `hvd.DistributedOptimizer` | average the gradients | DDP does it in `backward` |
# | `if world.is_main` | one rank saves | the same |
#
# On GPUs there is a sixth: `torch.cuda.set_device(hvd.local_rank())`. And this is the way to DDP, from the same beginning:

# %%
lines_ddp = changes("lessons/programs/single.py", "lessons/programs/ddp.py")
print(f"new or different: {lines_horovod} lines for Horovod, {lines_ddp} for DDP")

# %% [markdown]
# The difference is one of taste. Horovod leaves the model alone and takes the optimizer: a hook on every parameter starts its
# all-reduce during backward, and `step` waits for all of them. DDP takes the model, and `backward` itself is over only when
# all gradients have been averaged. *When does that matter?*
#
# <details><summary>Answer</summary>
#
# Whenever somebody looks at the gradients between `backward` and `step`: to clip them, to log their norm, to look for
# infinities. With DDP they are averaged by then. With Horovod they are still under way, and each rank sees its own, or half
# of a sum: first call `optimizer.synchronize()`, and then `step` under `optimizer.skip_synchronize()`.
#
# </details>
#
# ## Prove it
#
# Three programs, the same samples: one process with the whole global batch, two ranks with half of it each by DDP, two ranks by
# Horovod. All on CPUs, so that we can ask for the same bits.

# %%
config = Config(
    data=str(Path(data).resolve()),
    runs=str(Path(runs).resolve()),
    width=width,
    batch=batch,
    max_steps=steps,
    device="cpu",
)


def words(name: str, **changes) -> str:
    """The command line of a run of this name."""
    return " ".join(config.replace(name=f"10_{name}", **changes).arguments())


launch_ddp = "torchrun --standalone --nproc-per-node 2"
launch_horovod = "mpirun -n 2 python -m mpi4py"
shell(f"python lessons/programs/single.py {words('single', batch=2 * batch)}")
shell(f"{launch_ddp} lessons/programs/ddp.py {words('ddp')}")
if have:
    shell(f"{launch_horovod} lessons/programs/hvd.py {words('hvd')}")

# %% [markdown]
# Horovod brings a launcher of its own as well: `horovodrun --gloo -np 2 python …` starts ranks without MPI. (Without `--gloo` it
# calls an mpirun, if it finds one that it knows; ours it does not know.)


# %%
def weights(name: str) -> torch.Tensor:
    """All weights of a run as one vector."""
    model = torch.load(config.replace(name=f"10_{name}").run / "weights.pt", weights_only=True)
    return torch.cat([part.flatten().double() for part in model.values()])


def apart(one: str, other: str) -> float:
    """The largest difference between any weight of two runs."""
    return (weights(one) - weights(other)).abs().max().item()


def typically_apart(one: str, other: str) -> float:
    """The median of all differences."""
    return (weights(one) - weights(other)).abs().median().item()


typical = typically_apart("ddp", "single")
together = recall("hvd against ddp", lambda: apart("hvd", "ddp"), live=have, record="horovod")
print(f"after {steps} steps: a weight of DDP's is typically {typical:.0e} from that of one process")
print(f"and the largest difference between Horovod's and DDP's is {together:g}")
assert typical < 0.1 * config.lr and together == 0

# %% [markdown]
# DDP adds in another order than one process with the whole batch does, so they differ by rounding (a few weights by more:
# where a gradient is nearly zero, Adam makes a whole step of what is left of it). Between Horovod and DDP there is not one
# bit of difference: two libraries, two ways of sending, but on two ranks only one way to add. With more ranks the last digits
# differ here too.
#
# ## Two traps
#
# Horovod's documentation asks for one more line: `hvd.broadcast_optimizer_state(optimizer, root_rank=0)`, so that after a
# restart all ranks have the optimizer's state of the one that has read the checkpoint. *What could it do to an optimizer
# that is new, and has no state yet? And what becomes of a state when the optimizer is wrapped?*

# %%
look = """
import horovod.torch as hvd
import torch
hvd.init()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([weight])
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=[("weight", weight)])
if hvd.rank() == 0:
    print("steps that Adam has counted before the first one:", int(optimizer.state[weight]["step"]))
    print("what is left of its state once it is wrapped:", dict(wrapped.state))
"""
shell(f"{launch_horovod} -c '{look}'", live=have, name="two traps", record="horovod")

# %% [markdown]
# **The first:** there must be something to send, so Adam is made to take a step with gradients of zero. No weight moves, but
# Adam counts it. Its averages are young and are therefore scaled up, by a factor that depends on the number of steps (*bias
# correction*), and with a count that is one too high the factor is too small. (With weight decay even the weights move.)
#
# **The second:** `DistributedOptimizer` makes a *new* optimizer with the same parameters, and leaves the state behind. Load a
# checkpoint first and wrap then, and Adam begins anew without a word (lesson 05 has shown what that does).
#
# Put the line *after* the wrapping of a new optimizer, as many examples do, and you are in the first trap. How much does it
# matter after a few steps? We compare typical weights again.

# %%
wrapping = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"


def trap() -> float:
    """Train with the line in the wrong place, and compare with DDP."""
    program = Path("../lessons/programs/hvd.py").read_text()
    spoiled = program.replace(wrapping, f"{wrapping}hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n")
    assert spoiled != program
    Path(runs, "10_spoiled.py").write_text(spoiled)
    shell(f"{launch_horovod} {config.runs}/10_spoiled.py {words('spoiled')}")
    return typically_apart("spoiled", "ddp")


trapped = recall("trap", trap, live=have, record="horovod")
print(f"a weight is typically {trapped:.0e} from DDP's; between DDP and one process it was {typical:.0e}")
assert not have or trapped > 20 * typical

# %% [markdown]
# It trains, and nobody would notice; but it is another training than DDP's. The safe order: wrap, *then* load the checkpoint,
# and broadcast only if there was one. Here rank 0 has loaded an Adam that has taken three steps, and rank 1 has not:

# %%
right = """
import horovod.torch as hvd
import torch
hvd.init()
weight = torch.nn.Parameter(torch.ones(3))
before = torch.optim.Adam([weight])
for _ in range(3):
    weight.grad = torch.ones(3)
    before.step()
optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight]), named_parameters=[("weight", weight)])
if hvd.rank() == 0:
    optimizer.load_state_dict(before.state_dict())
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
steps = hvd.allgather(optimizer.state[weight]["step"].reshape(1)).int().tolist()
if hvd.rank() == 0:
    print("steps that Adam has counted on each rank:", steps)
    assert steps == [3, 3]
"""
shell(f"{launch_horovod} -c '{right}'", live=have, name="the right order", record="horovod")

# %% [markdown]
# Our trainer lets every rank read the checkpoint, so it needs no broadcast of states at all, and it refuses the second trap:

# %%
from course_lib.parallel import horovod as strategy

show(strategy.wrap_optimizer)

# %% [markdown]
# ## What it sends
#
# DDP decides once which gradients share a bucket (after the first backward, in the order that it saw), and sends the buckets in
# that order: one that is full early waits. Horovod decides while it runs. A thread in every process collects the gradients
# that are ready; every millisecond or so (the *cycle time*) the ranks *negotiate* by name which of them are ready everywhere;
# those are copied into one *fusion buffer* and travel together. The price is a conversation in every cycle.
#
# `HOROVOD_TIMELINE` names a file into which all of that is written. *How many messages does a step take, with fusion and
# without? The net has as many gradients as it has parameter tensors.*


# %%
def count(threshold: int) -> list[float]:
    """Gradients and messages a step; gradients are fused up to so many bytes."""
    file = Path(config.runs, f"10_timeline_{threshold}.json")
    variables = f"HOROVOD_TIMELINE={file} HOROVOD_FUSION_THRESHOLD={threshold} HOROVOD_CYCLE_TIME=5"
    shell(f"{variables} {launch_horovod} lessons/programs/hvd.py {words('timeline')}")
    return [number / steps for number in strategy.count_messages(file)]


fused = recall("fused", lambda: count(2**26), live=have, record="horovod")
single = recall("not fused", lambda: count(0), live=have, record="horovod")
print(f"{fused[0]:g} gradients a step: {fused[1]:g} messages, and {single[1]:g} without fusion")
assert fused[0] == single[0] == single[1] > fused[1]

# %% [markdown]
# Without fusion each gradient is a message of its own, the naive way of lesson 04. With it, what is ready in the same cycle
# goes together: few messages, but how many depends on the clock, and changes from run to run. A longer cycle time (here 5
# ms) fuses more, and lets the last gradient wait longer.
#
# ## In our trainer
#
# `--strategy horovod` is one more entry in the table of strategies. The learning-rate rule of Horovod's documentation,
# `lr * hvd.size()`, is the *linear scaling* of lessons 04 and 06, and our flag for it works with every strategy:
# `--scale-lr`. So the two commands differ in one word:


# %%
def train(name: str) -> dict:
    """Two ranks by the trainer: the last validation loss, the highest learning rate, and samples per second."""
    from course_lib.metrics import read_log

    run = config.replace(name=f"10_trainer_{name}", strategy=name, launcher="mpi", scale_lr=True, warmup=5)
    run = run.replace(max_steps=max_steps, epochs=100, log_every=5)
    shell(f"{launch_horovod} -m course_lib.train {' '.join(run.arguments())} | tail -n 1", timeout=3600)
    log = read_log(run.run)
    made = [event for event in log if event["event"] == "step"]
    loss = [event["loss"] for event in log if event["event"] == "eval"][-1]
    speeds = sorted(event["samples_per_s"] for event in made[1:])
    return {"loss": loss, "lr": max(event["lr"] for event in made), "samples/s": speeds[len(speeds) // 2]}


by_ddp = train("ddp")
by_horovod = recall("trainer", lambda: train("horovod"), live=have, record="horovod")

# %%
rate = by_ddp["lr"] / config.lr
print(f"highest learning rate: {rate:.2f} times --lr; validation loss {by_ddp['loss']:.6f}, {by_horovod['loss']:.6f}")
assert 1.9 < rate <= 2 and (not have or by_horovod["loss"] == by_ddp["loss"])

# %% [markdown]
# With Horovod here it is the same loss to the last digit, as it must be. (A recorded one comes from the sizes of its day.) And
# the speed, of two ranks on one machine, where nothing has to travel far:

# %%
if have:
    plots.bars({"DDP": by_ddp["samples/s"], "Horovod": by_horovod["samples/s"]}, xlabel="samples per second, 2 ranks")
else:
    print("a recorded speed beside one of this machine would say nothing: it is left out")

# %% [markdown]
# Take it as one run on a machine that does other things as well; `benchmarks/horovod.py` lets the two take turns. Here
# MPI's shared memory competes with gloo's sockets, so Horovod may well be ahead. On GPUs both can send by NCCL. The study of
# lesson 06 measured both on V100 GPUs (it does not say how its Horovod was built), and these are *its* numbers:

# %%
from course_lib.cockpit import Table
from course_lib.lesson import REFERENCE

study = json.loads((REFERENCE / "unet_scaling_v100.json").read_text())
print(f"{study['source']}; {study['hardware']}")
rows = []
for number, gpus in enumerate(study["gpus"]):
    times = [study[name]["seconds"][number] for name in ("ddp", "horovod")]
    shares = [study[name]["seconds"][0] / time / gpus for name, time in zip(("ddp", "horovod"), times)]
    rows.append((gpus, *(f"{time:,}" for time in times), *(f"{share:.0%}" for share in shares)))
Table(("GPUs", "DDP (s)", "Horovod (s)", "DDP: efficiency", "Horovod: efficiency"), rows)

# %% [markdown]
# *Horovod's second GPU brought that study nearly nothing, and from 2 to 14 it scales almost as well as DDP. What would you
# look for?*

# %%
horovod_2, horovod_14 = (study["horovod"]["seconds"][study["gpus"].index(n)] for n in (2, 14))
alone = study["horovod"]["seconds"][0]
print(f"1 → 2 GPUs: × {alone / horovod_2:.2f}; 2 → 14 GPUs: × {horovod_2 / horovod_14:.2f} of × {14 / 2:.0f} possible")
assert alone / horovod_2 < 1.2 and horovod_2 / horovod_14 > 0.75 * 7

# %% [markdown]
# <details><summary>Answer</summary>
#
# Something that costs the same in every step as soon as there are two ranks, and hardly grows after that. It may be a Horovod
# that was built without NCCL, so that every gradient goes through the memory of the CPU and MPI; or a cycle time that does not
# fit a small net with short steps. `horovodrun --check-build` tells how it was built, and the timeline where the time goes. The
# study does not tell; without a profile it stays a guess.
#
# </details>
#
# ## On the cluster
#
#     sbatch slurm/10_horovod.sbatch --epochs 5          # two nodes; the same job with --strategy ddp compares
#
# Build Horovod on a node with the modules that the job loads (`HOROVOD_GPU_OPERATIONS=NCCL make horovod`), or it will not
# find its libraries there.
#
# ## Questions
#
# *You take over a Horovod program and want DDP instead. What do you change?*
#
# <details><summary>Answer</summary>
#
# The table above, from left to right. Then look for what has no entry in it: `hvd.allreduce(metric)` becomes `dist.all_reduce`
# of sums and counts; `backward_passes_per_step` becomes `no_sync`; `hvd.join()` for uneven data becomes DDP's `join`; and
# `hvd.elastic` becomes torchrun's restarts and a checkpoint that holds everything (lesson 05). Prove it by the weights
# after a few steps, as here.
#
# </details>
#
# *Rank 0 alone calls `hvd.allreduce(loss)` to log it. What happens?*
#
# <details><summary>Answer</summary>
#
# It waits for a tensor that is ready on one rank only. After a minute Horovod prints a warning that names it and the missing
# ranks: that is what negotiating by name is good for. It does not end by itself unless `HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`
# is set.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    lines_horovod=lines_horovod,
    lines_ddp=lines_ddp,
    horovod_apart_from_ddp=together,
    loss_ddp=by_ddp["loss"],
)

# %% [markdown]
# ## What you have seen
#
# - Horovod wraps the optimizer: a hook on every gradient starts its all-reduce, and `step` waits for them.
# - On two ranks its weights are DDP's to the last bit; with one documented line in the wrong place they are not.
# - Gradients are negotiated by name and fused while it runs; DDP decides once.
# - The learning rate follows the ranks by the same rule in both.
# - To replace it, go through the table of its lines, and prove the result equal.
#
# **Exercise:** [ex10](../exercises/ex10_horovod/ex10_horovod.ipynb), what Horovod does.
#
# **Next:** [11 · Lightning](11_lightning.ipynb): the loop itself is somebody else's.
