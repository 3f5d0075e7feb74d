# %% [markdown]
# # 13 · Case study: BERT answers questions
#
# "Which tool did Ann buy?" Given a paragraph, point at the words that answer it: that is *question answering* as SQuAD, the
# Stanford Question Answering Dataset, defined it. A **BERT**, a net that has read millions of pages before, learns it from some
# thousand examples. A student's lab work trained one in a plain loop on one A100 GPU, and then on four with Lightning: DDP,
# FSDP, DeepSpeed. We do the same with a small BERT, and take care of what was left open there: where an answer ends, long
# texts, questions without an answer, and a score that can be compared with others.
#
# After this lesson
#
# 1. you can turn text into windows of tokens without losing or shifting an answer, and judge answers as SQuAD does;
# 2. you know what pretrained weights are worth, for you have trained the same net without them;
# 3. you have trained it with DDP and FSDP by a word, proved both equal to one process, and predicted what a rank keeps.
#
# **New since lesson 12:** text, a net that somebody else has trained, and the Trainer of lesson 11 with a real task.

# %% tags=["parameters"]
data = "../data/questions"  # or a folder with SQuAD's own files
pretrained = "../data/minilm"  # a folder with a BERT and its tokenizer; where it is missing, recorded results are shown
runs = "../runs"
tokens = 48  # that the net reads at once
stride = 12  # tokens by which two windows overlap
batch = 8  # windows per step on each of two ranks
max_steps = 80  # of the two trainings that are compared
steps = 8  # of the proofs
lr = 4e-4

# %%
import json
import shutil
from pathlib import Path

import torch

from course_lib import board, checkpoint, lit, places, plots, results, simulate
from course_lib.bert import Reader, make_small
from course_lib.cockpit import Table
from course_lib.config import Config, UserError
from course_lib.data import squad_files
from course_lib.data.tasks import make_task
from course_lib.launch import torchrun
from course_lib.lesson import REFERENCE, numbers, recall, shell, show
from course_lib.metrics import read_log
from course_lib.trainer import make_model

torch.set_num_threads(1)
places.quiet()
folder = Path(runs, "13_bert_squad").resolve()
have = Path(pretrained, "config.json").is_file()
if not have:
    print(
        "no BERT is here (make data fetches one): you will see what it had learned; the rest runs with a small random net"
    )
    texts = [squad_files.read(squad_files.find(data, part)) for part in ("train", "valid")]
    words = [text for one in texts for text in (*one.contexts, *(question.text for question in one.questions))]
    pretrained = make_small(folder / "small", words)

# %%
where = {"data": str(Path(data).resolve()), "pretrained": str(Path(pretrained).resolve()), "runs": str(folder)}
config = Config(task="squad", tokens=tokens, stride=stride, batch=batch, lr=lr, warmup=10, device="cpu", **where)
task = make_task(config)
asked = task.valid.squad.questions
print(f"{len(task.train.squad.questions):,} questions to train on, {len(asked):,} to judge by")

# %% [markdown]
# ## A paragraph and its questions
#
# SQuAD itself is in no package that one may train on. Our questions have its format, and are made from patterns. But no
# paragraph says that a hammer is a tool: one has to know what words mean. And validation uses other things, other people and
# other patterns than training; the words of this one occur nowhere there:

# %%
paragraph = task.valid.squad.contexts[0]
print(paragraph)
rows = [(one.text, one.answers[0][0] if one.answers else "(no answer)") for one in asked if one.paragraph == 0]
Table(("question", "right answer"), rows)

# %% [markdown]
# One question in four has no answer. SQuAD 2.0 introduced those, since a net that must always point somewhere will always
# sound sure. *What would a net score that has understood nothing, and always says "no answer"?* Keep that number in mind:

# %%
trivial = sum(not one.answers for one in asked) / len(asked)
print(f"{trivial:.0%} of the questions would be judged right")

# %% [markdown]
# ## From characters to tokens
#
# BERT reads *tokens*: common words are one, rare ones several pieces. The file says at which *character* an answer begins. So
# the first token and the last one must be found, and for that the tokenizer tells where in the text each token stands:

# %%
from course_lib.data.squad import align, load_tokenizer

show(align)
tokenizer = load_tokenizer(pretrained)
text = "Renée paid £3.50 for a raspberry."
start = text.index("raspberry")
read = tokenizer.encode(text, add_special_tokens=False)
first, last = align(torch.tensor(read.offsets).numpy(), start, start + len("raspberry"))
print(read.tokens, "→", read.tokens[first : last + 1])
assert text[read.offsets[first][0] : read.offsets[last][1]] == "raspberry"

# %% [markdown]
# Two details go wrong easily. The lab's program took the token at the character *after* the answer for the last one, unless a
# space is there. *How often is it not a space, in our files?*


# %%
def one_after(places: list, stop: int) -> int:
    """The token at character `stop`, which the answer does not contain any more; if none is there, the one before."""
    there = [number for number, (begin, end) in enumerate(places) if begin <= stop < end]
    return there[0] if there else max(number for number, (_, end) in enumerate(places) if end <= stop)


last = one_after(read.offsets, start + len("raspberry"))
print(read.tokens[first : last + 1])
pairs = [(one, task.train.contexts.places(one.paragraph).tolist()) for one in task.train.squad.questions if one.answers]
stops = [(places, one.answers[0][1] + len(one.answers[0][0])) for one, places in pairs]
shifted = sum(places[one_after(places, stop)][1] > stop for places, stop in stops) / len(stops)
print(f"of our answers {shifted:.0%} would get a token too many")
assert shifted > 0.5

# %% [markdown]
# Nobody would have noticed: the score drops punctuation before it compares. The second detail is an offset that is wrong in
# the file, because somebody counted bytes, say, and `é` has two. The lab's program looks for the answer up to two characters
# further left:


# %%
def look_left(context: str, answer: str, start: int) -> int | None:
    """Where the answer is: at its place, or one or two characters before."""
    return next((place for place in (start, start - 1, start - 2) if context.startswith(answer, place)), None)


for names in ("Renée", "Renée and José", "Renée, Zoë, José and Chloë"):
    context = f"{names} bought a violin and a hammer."
    in_bytes = len(context[: context.index("hammer")].encode())
    print(f"off by {in_bytes - context.index('hammer')}: found at {look_left(context, 'hammer', in_bytes)}")
assert look_left(context, "hammer", in_bytes) is None

# %% [markdown]
# One accent or two are mended by luck, four are not, and a mended file stays wrong for everybody else. We don't guess. An
# answer that is not at its place is left out and counted, and a file with many of them is refused, by name:

# %%
wrong = {"id": "q1", "question": "Which tool?", "answers": [{"text": "hammer", "answer_start": in_bytes}]}
file = folder / "flawed" / "train.json"
file.parent.mkdir(parents=True, exist_ok=True)
file.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [wrong]}]}]}))
try:
    squad_files.read(file)
    refused = False
except UserError as error:
    refused = True
    print(str(error).replace(f"{folder}/", ""))
assert refused

# %% [markdown]
# And of our own files every answer must come back letter by letter, from its tokens, out of every window that has it:

# %%
found = {}
for number, (question, _, _) in enumerate(task.train.windows):
    first, last = task.train.targets[number].tolist()
    if last:
        found.setdefault(int(question), set()).add(task.train.score.words(number, first, last))
right = {n: {one.answers[0][0]} for n, one in enumerate(task.train.squad.questions) if one.answers}
print(f"{len(found):,} answers, all found to the letter")
assert found == right

# %% [markdown]
# ## Long texts
#
# The net reads a fixed number of tokens at once: `[CLS]`, the question, `[SEP]`, text, `[SEP]`. What is longer was cut off in
# the lab's program, with the answers there. We cut a long text into *windows* that overlap, so that an answer at a border is
# whole in one of them at least. Where it is not, or where there is none, the target is `[CLS]`, which means "not here". A
# question with several windows:

# %%
numbers_of = [n for n, (question, _, _) in enumerate(task.valid.windows) if asked[question].answers]
several = next(n for n in numbers_of if (task.valid.windows[:, 0] == task.valid.windows[n, 0]).sum() > 1)
question = int(task.valid.windows[several, 0])
rows = []
for n in (task.valid.windows[:, 0] == question).nonzero()[0]:
    _, begin, end = task.valid.windows[n]
    seen = task.valid.contexts.places(asked[question].paragraph)[begin:end]
    part = task.valid.squad.contexts[asked[question].paragraph][seen[0, 0] : seen[-1, 1]]
    first, last = task.valid.targets[n].tolist()
    rows.append((f"{begin} to {end - 1}", part, task.valid.score.words(n, first, last) if last else "[CLS]"))
print(asked[question].text)
Table(("tokens of the text", "window", "target"), rows)

# %%
share_long = 1 - len(asked) / len(task.valid)
print(f"{len(asked)} questions make {len(task.valid)} windows of {tokens} tokens that overlap by {stride}")
assert len(task.valid) > len(asked)

# %% [markdown]
# ## How answers are judged
#
# A net's answer may be right and still differ by an article. SQuAD's definition: drop case, punctuation and articles; then
# **exact match** is 1 or 0, and **F1** compares the words of both as two bags. Of several right answers the best counts. What
# has no answer must get none.

# %%
from course_lib import squad_metrics

show(squad_metrics.normalise, squad_metrics.f1)
cases = [("The Hammer!", "hammer", 1, 1), ("a small hammer", "hammer", 0, 2 / 3), ("to be or not to be", "to be", 0, 1 / 2),
         ("42,000 people", "42000", 0, 2 / 3), ("Zürich", "Zurich", 0, 0), ("", "hammer", 0, 0), ("the", "", 1, 1)]  # fmt: skip
rows = []
for answer, expected, exact, f1 in cases:
    rows.append((answer, expected, squad_metrics.exact(answer, expected), f"{squad_metrics.f1(answer, expected):.2f}"))
    assert rows[-1][2] == exact and abs(squad_metrics.f1(answer, expected) - f1) < 1e-9
Table(("answer", "right answer", "exact match", "F1"), rows)

# %% [markdown]
# On ranks this is harder than a mean. The windows of a question may lie on different ranks, and words can't be added up. But
# tables can: each rank fills in the rows of its own windows (best span, its score, the score of "no answer") and leaves zeros
# elsewhere. The sum over all ranks is the whole table, on every rank, and only then somebody decides:

# %%
show(type(task.score).sums, type(task.score).answers)

# %% [markdown]
# ## The net, and Lightning's part
#
# `Reader` is transformers' BERT with two outputs for each token: how much it looks like the first of the answer, how much like
# the last. Its weights come from a folder; no hub is asked. Dropout is off, or two ranks would not draw the same
# numbers as one process. In Lightning nothing is new since lesson 11: the same LightningModule, with another net in it.

# %%
show(Reader.forward, lit.LitModel.configure_model, lit.LitModel.training_step)
model = make_model(config, task)
count = sum(parameter.numel() for parameter in model.parameters())
print(f"{count:,} parameters in {len(model.layers)} layers, embeddings and a head")

# %% [markdown]
# ## What are pretrained weights worth?
#
# Two trainings of the same net, on the same samples: one begins with what BERT has learned from text, one with random numbers
# (`--fresh`). They run at the same time, on a core each. *What do you expect of the second, on things that it has never seen?*

# %%
trainings = {
    name: config.replace(
        name=name, fresh=name == "random", batch=2 * batch, max_steps=max_steps, epochs=100, log_every=2
    )
    for name in ("pretrained", "random")
}


def train_both() -> dict:
    """Both at the same time: {name: steps, losses, exact match and F1}."""
    one, other = (" ".join(run.arguments()) for run in trainings.values())
    lightning = "OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m course_lib.lit"
    both = f"{lightning} {one} | tail -n 1 & first=$!; {lightning} {other} | tail -n 1; wait $first"
    shell(f"set -o pipefail; {both}", timeout=3600)
    found = {}
    for name, run in trainings.items():
        log = read_log(run.run)
        made, judged = ([event for event in log if event["event"] == kind] for kind in ("step", "eval"))
        found[name] = {"steps": [event["step"] for event in made], "losses": [event["loss"] for event in made]}
        found[name] |= {kind: judged[-1][kind] for kind in ("exact", "f1")}
    return found


both = recall("trainings", train_both, live=have, record="bert_squad")

# %%
curves = {f"{name} weights": (found["steps"], found["losses"]) for name, found in both.items()}
plots.lines(curves, xlabel="step", ylabel="training loss, this batch")
scores = {f"{name} weights": {"exact match": found["exact"], "F1": found["f1"]} for name, found in both.items()}
scores['always "no answer"'] = {"exact match": trivial, "F1": trivial}
plots.grouped_bars(scores, ylabel="share of held-out questions")

# %%
gain = both["pretrained"]["f1"] - both["random"]["f1"]
print(f"F1: {both['pretrained']['f1']:.2f} with pretrained weights, {both['random']['f1']:.2f} with random ones")
assert sum(both["pretrained"]["losses"]) < sum(both["random"]["losses"])
if both["pretrained"]["steps"][-1] >= 40:  # fewer are too few to tell
    assert gain > 0.1 and abs(both["random"]["f1"] - trivial) < 0.15

# %% [markdown]
# Without pretraining the net finds out what an answer looks like, and that "no answer" is a good bet, but for it a word that
# did not occur in training is noise. The pretrained one has met "hammer" where "saw" might stand, in many texts. This is why
# nobody trains a language model from the beginning for such a task; and why the rest of this lesson, the training on several
# ranks, is called *fine-tuning*.
#
# ## DDP, proved
#
# One process with the whole batch; two ranks with half of it each. We compare, as in lesson 08, by parts: of the way that the
# weights have gone, and of the length of Adam's averages of the gradients.

# %%
proof = config.replace(max_steps=steps, log_every=1, warmup=2)
one = proof.replace(name="one", batch=2 * batch)
lit.fit(one)
for strategy in ("ddp", "fsdp"):
    torchrun(2, ["-m", "course_lib.lit", *proof.replace(name=strategy, strategy=strategy).arguments()], quiet=True)


# %%
def compare(name: str, other: str) -> tuple[float, float, float]:
    """Of two runs: weights, gradients and validation losses apart."""
    paths = [Path(folder, run, "checkpoint.pt") for run in (name, other)]
    judged = [[event for event in read_log(path.parent) if event["event"] == "eval"][-1] for path in paths]
    loss = abs(judged[0]["loss"] / judged[1]["loss"] - 1)
    assert judged[0]["count"] == judged[1]["count"] == len(task.valid)  # every window once, on any number of ranks
    return *checkpoint.compare(*paths, model), loss


ddp_weights, ddp_gradients, ddp_loss = compare("ddp", "one")
print(f"DDP from one process: weights {ddp_weights:.1e}, gradients {ddp_gradients:.1e}, validation loss {ddp_loss:.1e}")
assert ddp_weights < 0.1 and ddp_gradients < 1e-3 and ddp_loss < 1e-3

# %% [markdown]
# Equal, to the rounding of sums in another order. And what is sent? All gradients, in every step. Half of a small BERT is its
# dictionary, one row of numbers for each token that there is. *How many of those rows can a batch of a few hundred tokens
# change?*

# %%
x, y = (torch.stack(side) for side in zip(*(task.train[n] for n in range(batch))))
task.score.loss(model(x), y).backward()
words = model.bert.base_model.embeddings.word_embeddings.weight
touched = int(words.grad.any(dim=1).sum())
print(
    f"{words.numel() / count:.0%} of all gradients are the dictionary's; of its {len(words):,} rows {touched} changed"
)
assert touched == len(x[:, 0][x[:, 1] == 1].unique()) < len(words)
model.zero_grad()

# %% [markdown]
# So most of what DDP sends for the dictionary are zeros. One could send rows and their numbers instead (`sparse=True` in
# `nn.Embedding`), but Adam keeps averages for all rows anyway; and in a large BERT the dictionary is a small part.
#
# ## FSDP: what does a rank keep?
#
# First the prediction, by ZeRO's formula of lesson 08: weights, gradients and Adam's two averages are 16 bytes a parameter, and
# with FSDP each of *n* ranks has 1/*n* of all. Then we count, in a process that believes to be one of *n* ranks.

# %%
from course_lib.parallel.shard import held, make_mesh, needed, shard


def kept(ranks: int) -> int:
    """Bytes that a rank keeps after a step, counted tensor by tensor."""
    with simulate.fake_world(ranks):
        net = shard(make_model(config, task), make_mesh("cpu", ranks))
        optimizer = torch.optim.Adam(net.parameters())
        task.score.loss(net(x[:1]), y[:1]).backward()
        optimizer.step()
        return sum(held(net, optimizer).values())


whole = sum(needed(model, 1, stage=0).values())
predicted = {f"{n} ranks": sum(needed(model, n, stage=3).values()) / whole for n in (2, 4, 8)}
counted = {f"{n} ranks": kept(n) / whole for n in (2, 4, 8)}
plots.grouped_bars({"predicted": predicted, "counted": counted}, ylabel="memory of a rank, DDP = 1")
print(f"1 is {whole / 2**20:.1f} MiB: what DDP keeps on every rank, however many there are")
assert all(1 <= counted[n] / predicted[n] < 1.05 for n in predicted)

# %% [markdown]
# A little more than predicted where *n* does not divide a tensor's rows. Activations come on top, as in lesson 08. And it
# trains the same: one word in the command line has changed who keeps which weight.

# %%
fsdp_weights, fsdp_gradients, fsdp_loss = compare("fsdp", "ddp")
print(f"FSDP from DDP: weights {fsdp_weights:.1e}, gradients {fsdp_gradients:.1e}, validation loss {fsdp_loss:.1e}")
assert fsdp_weights < 0.1 and fsdp_gradients < 1e-3 and fsdp_loss < 1e-3

# %% [markdown]
# ## How fast?
#
# From the logs of the same three runs: samples per second on one rank and on two. The batch per step is the same in all.

# %%
alone = results.row_of(one.run)
measured = [results.row_of(Path(folder, name)) for name in ("ddp", "fsdp")]
rows = results.summarise([row for two in measured for row in (alone | {"strategy": two["strategy"]}, two)])
plots.speed_up(rows)
results.show(rows)

# %% [markdown]
# A few steps on a machine that does other things too: take them as an order of magnitude. Two cores share one memory, and a
# step must send all gradients; FSDP sends half as much again, for weights are gathered twice (lesson 08). What does not show
# on two cores is what FSDP is for: a net that does not fit.
#
# ## TensorBoard
#
# Lightning has written curves for TensorBoard all the time: loss, learning rate, exact match and F1. Here they are, of all runs
# of this lesson:

# %%
curves = board.show(folder)
curves

# %%
tags = curves.tags()["ddp/lightning/tensorboard"]
print(", ".join(tags))
assert {"loss", "valid_exact", "valid_f1"} <= set(tags)
curves.stop()

# %% [markdown]
# ## What the lab published
#
# These are *its* numbers, not ours:

# %%
lab = json.loads((REFERENCE / "bert_squad_a100.json").read_text())
print(f"{lab['what']}\n{lab['source']}; {lab['hardware']}")
slowest = lab["runs"][0]["seconds"]
gains = {run["strategy"]: slowest / run["seconds"] for run in lab["runs"]}
rows = [
    (run["strategy"], run["gpus"], f"{run['seconds'] / 60:.1f}", run["training_loss"], f"{gains[run['strategy']]:.2f}",
     f"{gains[run['strategy']] / run['gpus']:.0%}")
    for run in lab["runs"]
]  # fmt: skip
assert gains["DDP"] > 4
Table(("", "GPUs", "minutes", "training loss", "speed-up", "efficiency"), rows)

# %% [markdown]
# *Four GPUs, and nearly eight times as fast. Can that be?*
#
# <details><summary>Answer</summary>
#
# Not by sharing the work. Something else has changed with it. The lab's own notes say what: the Lightning program calls
# `torch.set_float32_matmul_precision("high")`, so that the A100's tensor cores multiply with fewer digits (TF32), and the plain
# loop does not. To know what DDP brought, run the *same* program on one GPU. Between DDP and FSDP, which ran the same program,
# the comparison is fair: FSDP is slower, as it should be where the net fits. And that the losses differ at the same number of
# epochs says as well that these were not the same trainings.
#
# </details>
#
# *Can you say from these numbers how good the net is?*
#
# <details><summary>Answer</summary>
#
# No. A training loss says how well it knows what it has seen, with targets that may be shifted or cut off, and without the
# questions that have no answer. Exact match and F1 on held-out questions, by the common definition, can be compared with
# anybody's. That is why they are in every evaluation of our log.
#
# </details>
#
# With SQuAD's files and a BERT of your own on disk it is one command; nothing is downloaded:
#
#     torchrun --standalone --nproc-per-node 4 -m course_lib.lit --task squad --strategy ddp --data /path/to/squad \
#         --pretrained /path/to/bert-base-uncased --tokens 384 --stride 128 --batch 12 --lr 3e-5 --epochs 2 --runs runs
#
# ## Room on the disk
#
# A checkpoint holds weights and Adam's two averages: 12 bytes a parameter, however many ranks there were. Each run has left
# three, one of ours and two of Lightning's:

# %%
sizes = {path.name: path.stat().st_size for path in sorted(one.run.rglob("*")) if path.suffix in (".pt", ".ckpt")}
print(*(f"{name}: {size / 2**20:.1f} MiB" for name, size in sizes.items()), f"predicted: {12 * count / 2**20:.1f} MiB")
assert all(1 <= size / (12 * count) < 1.2 for size in sizes.values())
for path in [*folder.rglob("*.ckpt"), *folder.rglob("checkpoint.pt*")]:
    path.unlink()  # we have compared them
shutil.rmtree(folder / "flawed")

# %% [markdown]
# ## On the cluster
#
#     sbatch slurm/13_bert_squad.sbatch --epochs 3                     # two nodes with two ranks each, DDP
#     sbatch slurm/13_bert_squad.sbatch --epochs 3 --strategy fsdp
#
# No `rank_env.sh` there: Lightning finds rank and world size in `SLURM_*` by itself.
#
# ## Questions
#
# *A colleague evaluates with a DistributedSampler, which repeats some samples so that all ranks get equally many. What happens
# to F1?*
#
# <details><summary>Answer</summary>
#
# With sums of F1 over samples the repeated ones would count twice. In our table a window has one row, with a count in it: seen
# twice it is divided by two, and nothing changes. (Our batches repeat none; but others' do.)
#
# </details>
#
# *FSDP shares out each layer of BERT on its own, and the rest, dictionary and head, as one. What is whole at the same time
# while the third layer computes?*
#
# <details><summary>Answer</summary>
#
# The third layer, perhaps the fourth, which is being gathered already, and the rest: it belongs to the outermost module, whose
# forward is not over. In our small BERT that is half of all weights. To do better, share out the embeddings on their own too.
#
# </details>
#
# *Why is dropout off here, and would you leave it off?*
#
# <details><summary>Answer</summary>
#
# For the proof: with dropout, two ranks and one process draw different numbers, so they train differently, without either
# being wrong. For a real fine-tuning of several epochs switch it on; it costs a line in `course_lib/bert.py`.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    questions=len(asked),
    share_without_answer=trivial,
    share_kept_by_fsdp_on_2=counted["2 ranks"],
    answers_found=len(found),
    share_of_ends_shifted=shifted,
)

# %% [markdown]
# ## What you have seen
#
# - An answer is found by its characters, aligned to tokens by the tokenizer's offsets; a wrong offset is said, never guessed.
# - Long texts become windows that overlap; "no answer" is an answer, and has to be judged too.
# - Exact match and F1 have one definition; over ranks, add tables and decide afterwards.
# - Pretrained weights know words that the training never shows; random ones score what "no answer" scores.
# - DDP and FSDP are a word in Lightning, equal to one process; FSDP keeps 1/*n*, counted.
#
# **Exercise:** [ex13](../exercises/ex13_bert_squad/ex13_bert_squad.ipynb), answers from windows.
#
# **Next:** your own net.
