# %% [markdown]
# # 05 · Launch: one program, many machines, and what to do when it dies
#
# The training program of lesson 04 is finished. What is missing is everything around it: who starts its ranks, how they
# find each other, what happens when one of them is killed at three in the morning, and how a cluster's scheduler fits in.
# This is where most distributed trainings fail, and none of it is deep learning.
#
# After this lesson
#
# 1. you have started one program in four ways, and trained with three launchers to the same weights;
# 2. you have killed a rank in the middle of a training, and it made no difference to the result;
# 3. you can send jobs to Slurm from a notebook, watch them, and let them outlive their time limit;
# 4. you can find out why ranks hang, while they hang.
#
# **New since lesson 04:** not a line of the training loop. New are the launchers, `jobs.submit`, and SIGKILL.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
width = 16
batch = 4  # samples per step on each rank
max_steps = 60  # of the jobs
long_steps = 120  # of the run that is killed, and of the one that runs out of time
checkpoint_every = 25  # steps

# %% [markdown]
# ## Who says which rank this is?
#
# A rank must know three things before it can do anything: its own number, how many there are, and where they meet. It is
# told by *environment variables*, which its launcher sets. Here is a program that prints those it finds.

# %%
import json
import os
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import torch

from course_lib import checkpoint, faults, hangs, jobs, plots, processes, ranks
from course_lib.cockpit import Table
from course_lib.config import Config
from course_lib.lesson import numbers, shell, show
from course_lib.metrics import read_log

Path(runs).mkdir(exist_ok=True)

# %%
# %%writefile {runs}/where.py
import json
import os

ours = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
theirs = ["PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"]
print(json.dumps({name: os.environ.get(name, "–") for name in ours + theirs}))

# %% [markdown]
# Now start it in every way that this machine has: plainly, by *torchrun* (PyTorch's launcher), by *mpirun* (MPI's), and by
# *srun* (Slurm's).
#
# Slurm is the scheduler of most clusters; it deals out machines, its *nodes*. A *job* asks for nodes and CPUs: its
# *allocation*. `sbatch` puts a script into the queue, to be run in an allocation; `salloc` waits for one; `srun` starts
# processes in it, which are called *tasks*. Is there a Slurm here? On a cluster, yes. On your own Linux machine with Slurm's
# packages, the next cell starts a small one with two nodes, which are both this machine.

# %%
nodes = jobs.find_cluster()

# %%
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # this environment's torchrun and mpirun
launchers = {
    "python": "{}",
    "torchrun": "torchrun --standalone --nproc-per-node=2 --no-python {}",
    "mpirun": "mpirun -n 2 {}",
}
if nodes:
    launchers["srun"] = "srun --ntasks=2 {}"
    launchers["srun, translated"] = (
        "salloc --quiet --ntasks=2 bash -c 'source slurm/site.sh; srun slurm/rank_env.sh {}'"
    )

# %% [markdown]
# Two ranks each time (one for plain `python`), of which we keep what the second one was told.

# %%
found = {}
for name, launcher in launchers.items():
    command = launcher.format(f"{sys.executable} {Path(runs, 'where.py').resolve()}")
    code, printed = processes.run(["bash", "-c", f"cd .. && {command}"], timeout=120)
    told = [json.loads(one) for one in re.findall(r"{.*?}", printed)]  # two ranks may print into one line
    found[name] = next((t for t in told if "1" in (t["RANK"], t["PMI_RANK"], t["SLURM_PROCID"])), told[0])

Table(("", *found), [(variable, *(one[variable] for one in found.values())) for variable in found["python"]])

# %% [markdown]
# Each launcher has its own words. torchrun says all; mpirun and srun give number and size, but no place to meet. (`LOCAL_RANK`
# is a rank's number on its own node, by which it chooses its GPU. `PMI_…` are the words of MPICH; Open MPI has others.) A
# program that tries to understand them all soon has a page of `if "SLURM_PROCID" in os.environ`, and guesses wrong inside of
# a notebook that is itself a Slurm job. Ours understands one dialect, torchrun's. For Slurm six lines of shell translate;
# this is all of `slurm/rank_env.sh`:

# %%
shell("cat slurm/rank_env.sh")

# %% [markdown]
# Under mpirun our program asks MPI itself for number and size (`--launcher mpi`), and rank 0 tells the others by MPI where to
# meet.
#
# A trap lies here. Start ranks with the *wrong* launcher, `srun` without the translation or the mpirun of another MPI, and
# each of them believes that it is rank 0 of 1. Nothing fails: you get N trainings on the whole data, all of which write the
# same checkpoint. Always compare the size of the world with what was launched; our `world.start` does, and refuses.
#
# ## Where they meet, and why the port is never fixed
#
# `MASTER_ADDR` and `MASTER_PORT` name the place where rank 0 listens and the others report. Many examples have a fixed
# port in them. *What happens when two users, or two of your own jobs, share a node?*

# %%
import socket

first = socket.create_server(("127.0.0.1", 0))  # port 0: any that is free
port = first.getsockname()[1]
try:
    socket.create_server(("127.0.0.1", port))
    raise AssertionError("two programs got the same port")
except OSError as error:
    print(f"the second program at port {port}: {error}")
first.close()

# %% [markdown]
# So on one machine take port 0 and let the system choose; `torchrun --standalone` does that. Over several nodes all must
# know the port beforehand: derive it from something that is the same on all nodes and different for every job, the job's
# number. `slurm/site.sh` does; it is also the only file that you have to edit for your cluster:

# %%
shell("grep -A 3 SLURM_JOB_ID:- slurm/site.sh")

# %% [markdown]
# ## The same training by three launchers
#
# Now train for real, with two ranks, on two nodes if there are nodes. Three job scripts start the same program.
# `jobs.submit` calls `sbatch` with a script of `slurm/`: what a training understands (`max_steps`, `width`) becomes its flag,
# what Slurm understands (`nodes`, `time`) becomes sbatch's.

# %%
asked = {"data": data, "runs": runs, "width": width, "batch": batch, "max_steps": max_steps, "log_every": 10}
by_torchrun = jobs.submit("04_ddp", nodes=2, cpus_per_task=1, **asked)
by_srun = jobs.submit("05_launch", nodes=2, ntasks_per_node=1, **asked)
by_mpirun = jobs.submit("09_mpi", nodes=2, ntasks_per_node=1, **asked)

# %% [markdown]
# They run now, or wait for their turn; the notebook is free. While they do, read one of the scripts. Lines that begin with
# `#SBATCH` are for the scheduler: how many nodes, how many *tasks* on each of them, how many CPUs for each task, for how
# long. A task is a process that `srun` starts. Here one torchrun is started on each node, which then starts the ranks; in
# `05_launch.sbatch` each task is itself a rank.

# %%
shell("sed -n '/^#SBATCH/,$p' slurm/04_ddp.sbatch")

# %% [markdown]
# torchrun's three `--rdzv` words are its *rendezvous*. All torchruns with the same id meet at the endpoint, the first
# node; when the expected number is there, they agree on who has which ranks, and start them. When a rank dies they meet
# again and start all ranks anew, up to `--max-restarts` times.
#
# *The job's script is the same for 2 ranks and for 2,000. What of it would you have to change for your own program?*
#
# <details><summary>Answer</summary>
#
# The last line. Everything above it describes the machine.
#
# </details>

# %%
results = {"torchrun": by_torchrun.result(), "srun": by_srun.result(), "mpirun": by_mpirun.result()}
jobs.table(runs)

# %% [markdown]
# `result()` waited for each job's end. Run the cells again, or restart the kernel and *Run All*: the same call finds the
# job that it made before and submits nothing. That matters where a job waits for hours. `again=True` makes a new one.
#
# Are the results the same? Not just nearly: to the last bit. (So it is with CPU ranks. On GPUs some operations add in a
# changing order; expect tiny differences, unless you ask PyTorch for deterministic ones.)


# %%
def weights(run):
    """All weights of a run's checkpoint as one vector."""
    model = checkpoint.load(Path(run) / "checkpoint.pt")["model"]
    return torch.cat([part.flatten().double() for part in model.values()])


def apart(one, other):
    """The largest difference between any weight of two runs."""
    return (weights(one) - weights(other)).abs().max().item()


launchers_apart = max(apart(results[name]["run"], results["torchrun"]["run"]) for name in results)
print(f"largest difference between weights: {launchers_apart:g}")
assert launchers_apart == 0

# %% [markdown]
# ## Kill a rank
#
# On a thousand GPUs something breaks every few hours. Without a plan the whole job is lost: the other ranks notice that a
# message does not come, and end as well (lesson 04, first question).
#
# The plan has two halves. A *launcher* that notices the death and starts all ranks again: `torchrun --max-restarts=1`. And
# a *program* that can go on from where it was: our trainer saves a checkpoint every few steps, and looks for one when it
# starts. A *launch* has an id: Slurm's job number, or one that torchrun makes up, and the same after a restart. If a
# checkpoint carries the id of its own launch, the trainer goes on from there.
#
# The next cell trains on two ranks of this machine, and in the middle of it `faults.kill` sends rank 1 the signal SIGKILL,
# which ends a process at once and can't be caught. *What do you expect to read after the kill?*

# %%
config = Config(
    name="05_killed",
    data=data,
    runs=runs,
    width=width,
    batch=batch,
    max_steps=long_steps,
    epochs=100,
    checkpoint_every=checkpoint_every,
    strategy="ddp",
    log_every=10,
)
with faults.kill(1, config, step=2 * checkpoint_every + 10):
    ranks.torchrun(2, config, max_restarts=1)

# %% [markdown]
# A traceback of rank 0, if there is one, is only a consequence: its connection to rank 1 is gone. Rank 1 itself says nothing,
# SIGKILL leaves no time for that. Then both ranks are started anew, and the steps between the last checkpoint and the
# death are done again. Now the same training without an accident, and both on one clock; the log of a run keeps what was
# repeated.

# %%
straight = config.replace(name="05_straight")
ranks.torchrun(2, straight, quiet=True)

logs = {name: read_log(one.run, repeats=True) for name, one in {"killed": config, "straight": straight}.items()}
plots.attempts(logs)

# %% [markdown]
# The line of the killed run breaks off at the cross, and begins again at its last checkpoint; between the two lies the time
# in which torchrun noticed, made sure that no rank was left, and started two new processes, which import torch and read
# the data's headers first.
#
# Is the result worth anything? From its weights nobody can tell that a rank has died:

# %%
starts = [event["step"] for event in logs["killed"] if event["event"] == "start"]
restart_apart = apart(config.run, straight.run)
print(f"started at steps {starts}; largest difference between weights: {restart_apart:g}")
assert len(starts) == 2 and restart_apart == 0

# %% [markdown]
# <details><summary>A warning for your own programs</summary>
#
# The place where ranks meet keeps their addresses. torch 2.13 uses one place for all restarts, so new ranks may find the
# address of a dead one, and fail with "connection refused". `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in front of torchrun
# helps. Our `world.start` and `slurm/site.sh` take care of it.
#
# </details>
#
# ## What must be in a checkpoint
#
# That zero is not easy to get. All that a training step depends on must be in the file:


# %%
def size(part):
    """Bytes of all tensors in a part of a checkpoint."""
    if isinstance(part, torch.Tensor):
        return part.nbytes
    return sum(size(inner) for inner in part.values()) if isinstance(part, dict) else 0


content = checkpoint.load(config.run / "checkpoint.pt")
for name, part in content.items():
    print(f"{name:12} {size(part) / 1e3:7.1f} kB", part if name in ("position", "launch") else "")

# %% [markdown]
# *model*: the weights. *optimizer*: for every weight Adam keeps two running means, so this part is twice as large.
# *position*: where in which epoch, so that no sample is seen twice and none is left out. *random*: for dropout, if there
# were any. *config*: so that nobody resumes with another learning rate by mistake. *launch*: the id of above.
#
# Two parts are forgotten again and again, and nothing fails when they are. Let us forget them on purpose. First a run that
# nobody disturbs, and one that is told to stop half-way. (`told` is asked at every line of the log; a job's time limit will
# come in by the same door.)

# %%
from course_lib.trainer import fit

half = max_steps // 2
whole = Config(name="05_whole", data=data, runs=runs, width=width, batch=batch, max_steps=max_steps, log_every=half)
fit(whole)
stopped = fit(whole.replace(name="05_half"), told=lambda: True).run

# %% [markdown]
# Then three runs that go on from that checkpoint: with all of it, without the optimizer's state, and with the epoch begun
# again from its first sample.


# %%
def no_optimizer(content):
    content["optimizer"]["state"] = {}


def epoch_repeated(content):
    content["position"]["seen"] = 0


def go_on(mistake):
    """Copy the stopped run, spoil its checkpoint, and train to the end."""
    config = whole.replace(name=f"05_{mistake.__name__}", resume=True)
    shutil.copytree(stopped, config.run, dirs_exist_ok=True)
    content = checkpoint.load(config.run / "checkpoint.pt")
    mistake(content)
    checkpoint.save(config.run / "checkpoint.pt", content)
    return fit(config)


# %%
def all_of_it(content):
    pass


resumed = {mistake.__name__.replace("_", " "): go_on(mistake) for mistake in (all_of_it, no_optimizer, epoch_repeated)}
distances = {name: apart(fitted.run, whole.run) for name, fitted in resumed.items()}
plots.bars(distances, xlabel="largest difference of a weight from the undisturbed run's")
assert distances["all of it"] == 0 < min(distances["no optimizer"], distances["epoch repeated"])

# %% [markdown]
# With all of it the difference is zero. The other two trained without an error, and their losses look quite normal. They
# are just not the training that you believe to have run: without its means Adam's next steps have about the same size for
# every weight, however small its gradient, and in a repeated epoch some samples count twice. Where checkpoints are saved at
# the *end* of an epoch, the usual form of the second mistake is to save the number of the finished epoch, and to begin with
# that same number again.
#
# One more thing can go wrong: the kill that comes while the checkpoint itself is being written. Then the file is half new,
# and the old one is gone. Therefore it is written under another name, and renamed when it is complete, which a file system
# does all at once or not at all:

# %%
show(checkpoint.save)

# %% [markdown]
# *Why is every checkpoint loaded with `weights_only=True`?*
#
# <details><summary>Answer</summary>
#
# A PyTorch file is a pickle, and a pickle may contain calls of any function: loading one from a stranger can delete your
# home. With `weights_only=True` only tensors and plain values are accepted.
#
# </details>
#
# ## Slurm, by hand
#
# Everything that `jobs.submit` does can be typed. What nodes are there?

# %%
shell("sinfo --Node --long", live=bool(nodes))

# %% [markdown]
# `srun` outside of a job asks for an allocation and starts its tasks in it. `--label` puts the number of the task in front of
# what it prints. `nproc` tells how many CPUs a task may use. Where a cluster *binds* tasks to CPUs, that is what was asked
# for, here 1. The small Slurm of this course does not bind, and `nproc` counts all that the machine really has; the CPUs in
# the list above are only what that Slurm was told.

# %%
shell(
    "srun --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --label bash -c 'echo $(hostname): $(nproc) CPUs' | sort",
    live=bool(nodes),
)

# %% [markdown]
# An *array* is one script submitted many times, and `$SLURM_ARRAY_TASK_ID` tells the copies apart: for a sweep over learning
# rates, seeds or numbers of ranks. A *dependency* makes a job wait for others: here one that collects what the array has
# made. `afterok` means after success; `sbatch` also knows `--kill-on-invalid-dep=yes`: removed, if that can't come any more.

# %%
shell(
    """
mkdir -p runs
array=$(sbatch --parsable --array=1,2,4 --output=runs/array-%A-%a.log --wrap='echo $SLURM_ARRAY_TASK_ID ranks')
srun --quiet --dependency=afterok:$array bash -c "cat runs/array-$array-*.log"
rm runs/array-$array-*.log
""",
    live=bool(nodes),
)

# %% [markdown]
# That `srun` was a job of its own; it waited until all three of the array were done. `slurm/sweep.sh 1,2,4` does the same
# with trainings, and draws their speed-up. Lesson 06 will need it.
#
# ## Longer than the time limit
#
# Every job has a time limit, and long trainings have more to do than any limit allows. So a job must stop in good time, and
# come back. The chain has four links, and `04_ddp.sbatch` and `05_launch.sbatch` have them all:
#
# 1. `#SBATCH --signal=B:USR1@60`: Slurm sends the script a signal a minute before the end;
# 2. `slurm/requeue.sh` passes it on to the ranks, which agree to stop, and save: that is `told`;
# 3. it calls `scontrol requeue`, and the job goes back into the queue with the same number;
# 4. when it starts again, the trainer finds a checkpoint of the same launch, and goes on.
#
# The minute must be long enough: the ranks ask each other at every line of the log, so `--log-every` steps and the saving
# have to fit in (with torchrun into half of it, then it loses patience).

# %%
shell("sed -n '/^again/,$p' slurm/requeue.sh")

# %% [markdown]
# We don't wait for a real limit: `scancel --signal` sends the very signal that Slurm would send. A requeued job may not start
# for some seconds (on a big cluster: minutes), and then queues like any other; its status says so.

# %%
if nodes:
    longer = asked | {"max_steps": long_steps, "epochs": 100}
    job = jobs.submit("05_launch", nodes=2, ntasks_per_node=1, **longer)
    while not job.status().finished and job.status().step < checkpoint_every:
        time.sleep(0.1)
    if not job.status().finished:
        shell(f"scancel --batch --signal=USR1 {job.number}")
    job.result()

# %% [markdown]
# Did it really stop and come back? The job's own log tells, and the weights tell it better. They are compared with those of
# the run that torchrun made on this machine above: the same training, other launcher, and cut into two parts.

# %%
shell(f"grep -v '^s' {job.log_file if nodes else ''}", live=bool(nodes), name="log of a requeued job")
if nodes:
    print(f"largest difference between weights: {apart(job.run, straight.run):g}")
    assert apart(job.run, straight.run) == 0

# %% [markdown]
# ("STEP … CANCELLED" is Slurm's word for ending what is left of the ranks once the first has gone.)
#
# ## When a job fails
#
# A job that fails leaves a log, often with a traceback for every rank, most of which only say that another rank has gone.
# The cause is somewhere in the middle. `result()` looks for it. Here is a job with a mistake in it:

# %%
wrong = jobs.submit("05_launch", nodes=2, ntasks_per_node=2, train_years="1870", **asked)
try:
    wrong.result()
    raise AssertionError("there is no such year")
except jobs.JobError as error:
    print(f"\n{error}\n\nin a log of {len(wrong.log().splitlines())} lines")

# %% [markdown]
# ## When nothing happens
#
# Worse than a crash is a job that hangs: no error, no progress, and the hours run out. There are three classic causes. A
# small program has them all; it writes down what it did when it is over.

# %%
# %%writefile {runs}/hang.py
import os
import sys
import time

import torch
import torch.distributed as dist

from course_lib.config import Config
from course_lib.hangs import save_flight_record
from course_lib.world import start, stop

kind, folder = sys.argv[1:]
world = start(Config(timeout=5))  # seconds; PyTorch's own are half an hour with gloo, ten minutes with NCCL
gradient = torch.ones(4)


def load_batch():
    time.sleep(2 if world.rank == 1 and kind == "straggler" else 0)


try:
    for step in range(3):
        load_batch()
        if step == 2 and world.rank == 1 and kind == "dead peer":
            os._exit(1)
        if step == 2 and world.rank == 1 and kind == "mismatch":
            dist.broadcast(gradient, src=1)  # the others are in an all-reduce
        else:
            dist.all_reduce(gradient)
finally:
    save_flight_record(folder, world.rank)
stop(world)

# %% [markdown]
# **A dead peer.** Rank 1 ends in step 2 without a word. *How long until rank 0 knows?*


# %%
def hang(kind, **environment):
    """Run the program on two ranks and say how it ended."""
    began = time.monotonic()
    for old in Path(runs).glob("flight.*.json"):
        old.unlink()
    try:
        ranks.torchrun(2, [f"{runs}/hang.py", kind, runs], environment=environment, quiet=True)
    except ranks.RanksError as error:
        print(textwrap.fill(str(error), 110), f"\nafter {time.monotonic() - began:.0f} s")


hang("dead peer")

# %% [markdown]
# Almost at once; nearly all of that time the two ranks took to start. The operating system closes a dead process's
# connections, and gloo notices. NCCL on GPUs often does not, and waits for its time-out. That is the first rule: **give
# process groups a short time-out**, a little longer than the longest honest wait (a checkpoint, a slow file). And always use
# a launcher, which sees the death itself and names the rank that died first.
#
# **A mismatch.** In step 2 rank 1 calls another collective than rank 0: usually an `if rank == 0:` around something that
# all must do, or a rank with one batch less. Both wait for a message that nobody will send, until the time-out.

# %%
hang("mismatch", TORCH_FR_BUFFER_SIZE="100")

# %% [markdown]
# The message says *that* something is wrong, but not what. But the *Flight Recorder* was on: with `TORCH_FR_BUFFER_SIZE`
# PyTorch remembers the last so many collectives of each rank. Side by side they show where the ranks part:

# %%
hangs.read_flight_records(runs)

# %% [markdown]
# In the third collective the ranks part: that call, and where it is in the program, is what you look for. With NCCL the
# records are written by themselves after a time-out (`TORCH_FR_DUMP_TEMP_FILE` says where, and `torchfrtrace` compares
# them). If you can repeat the hang, there is a shorter way: with `TORCH_DISTRIBUTED_DEBUG=DETAIL` the ranks compare their
# collectives *before* each call. That is slow, and very clear:

# %%
hang("mismatch", TORCH_DISTRIBUTED_DEBUG="DETAIL")

# %% [markdown]
# **A straggler.** Nothing is wrong, but rank 1 is slow: a busy node, a full disk, a larger file. All the others look as if
# they were hanging, and are only waiting. The question is: for whom? *py-spy* looks into running processes; it stops them for
# a moment, and changes nothing. (It needs the right to *ptrace* them, which some machines give to nobody but root.) We start
# the program in the background, and look.

# %%
from concurrent.futures import ThreadPoolExecutor

background = ThreadPoolExecutor().submit(ranks.torchrun, 2, [f"{runs}/hang.py", "straggler", runs])
stacks = {}
while not background.done() and "load_batch" not in stacks.get(1, ""):
    time.sleep(0.5)
    stacks = {rank: hangs.stack(process.pid) for rank, process in ranks.find_ranks("hang.py").items()} or stacks
for rank, stack in sorted(stacks.items()):
    print(f"rank {rank}\n{stack}\n")
background.result()

# %% [markdown]
# Rank 0 is in `all_reduce`, rank 1 in `load_batch`: the one that is *not* in a collective is the one to look at. On a
# cluster, go to the node of a job with `srun --overlap --jobid=… --nodelist=… --pty bash`, and call `py-spy dump --pid …`.
#
# | you see | it is | look with |
# |---|---|---|
# | all ranks end, one with another message | a crash; the rest only lost it | the launcher's "first failure" |
# | a time-out, different collectives | a mismatch | Flight Recorder, `TORCH_DISTRIBUTED_DEBUG=DETAIL` |
# | no time-out, no progress, all but one in a collective | a straggler | py-spy |
# | every rank says 0 of 1 | the wrong launcher | the size of the world |
#
# ## On the cluster
#
# Edit `slurm/site.sh` once, then from the repository's folder:
#
#     sbatch --nodes=4 --gpus-per-node=4 slurm/04_ddp.sbatch --epochs 50 --checkpoint-every 200
#
# It survives dead ranks and its time limit. For a program of your own, keep the script and change its last line. Your part is
# a checkpoint that is whole, atomic, and looked for at every start; and when it gets SIGUSR1, your program must save and end
# with an exit code other than 0 (ours: 75), or nobody knows that it has more to do.
#
# ## Questions
#
# *How often should a run save?*
#
# <details><summary>Answer</summary>
#
# So rarely that saving costs little, so often that a death costs little. If saving takes s seconds and something dies every
# M seconds, the waste is least when a checkpoint is written about every √(2·s·M) seconds (Young's rule). With s = 10 s and
# a death a day that is every 22 minutes.
#
# </details>
#
# *After a node has died for good, fewer ranks are left. Can the run go on?*
#
# <details><summary>Answer</summary>
#
# With `torchrun --nnodes=2:4`, and a job that Slurm does not end because of the node (`--no-kill`), the launcher goes on with
# what is left, unless it was the first node, where all meet. And our trainer can: the checkpoint says how many samples of
# the epoch were seen by all. But the same `--batch` on fewer ranks is a smaller global batch: another training.
# `--global-batch` keeps it, as long as it can be divided; sums then run in another order, and the bits differ.
#
# </details>
#
# *Your job asks for `--ntasks-per-node=4` and calls `srun torchrun --nproc-per-node=4`. What do you get?*
#
# <details><summary>Answer</summary>
#
# Four torchruns on each node with four ranks each: sixteen processes on four GPUs, and if they don't know of each other, four
# trainings that write the same checkpoint. One launcher is enough.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    launchers_apart=launchers_apart,
    restart_apart=restart_apart,
    loss_launched=results["torchrun"]["loss"],
    loss_all_of_it=resumed["all of it"].metrics["loss"],
    loss_no_optimizer=resumed["no optimizer"].metrics["loss"],
    loss_epoch_repeated=resumed["epoch repeated"].metrics["loss"],
)

# %% [markdown]
# ## What you have seen
#
# - A launcher tells each rank its number, the number of ranks and where to meet. The program needs one dialect for that.
# - Ports come from the system or from the job's number; the size of the world is checked, never assumed.
# - A launcher that restarts and a checkpoint that holds everything make a death invisible, to the last bit.
# - A Slurm job that is told in good time saves, stops and comes back, as often as it takes.
# - For hangs: short time-outs, the Flight Recorder, py-spy, and the debug mode. Look for the rank that differs.
#
# **Exercise:** [ex05](../exercises/ex05_launch/ex05_launch.ipynb), what survives a death.
# Then [lab 2](../exercises/lab2_break_it/lab2_break_it.ipynb), in which things break.
#
# **Next:** [06 · Scaling](06_scaling.ipynb): how much faster are more ranks, and when do they stop helping?
