"""Why ranks or a whole job failed, found in what they printed: the rank that failed first, not those that only lost it."""

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.scheduler import WAITING, Status

if TYPE_CHECKING:
    from course_lib.jobs import Job

LOST = re.compile(
    r"(?i)\bgloo|nccl|pair closure|connection|timed out|timeout"
)  # said by those whom another rank has left; ProcessGroupGloo's words are about one's own tensors


class RanksError(RuntimeError):
    """What went wrong on the ranks: the rank that failed first, in its own words."""

    def __init__(self, summary: str, details: str = ""):
        super().__init__(summary)
        self.details = details

    def _render_traceback_(self) -> list[str]:
        """IPython shows this: the rank's own traceback, not the way that it took to the notebook."""
        return [*self.details.splitlines(), f"{type(self).__name__}: {self}"]


class JobError(RanksError):
    """Why a job failed, and what to do about it."""


def first_failure(lines: list[str], code: int, who: str = "torchrun") -> RanksError:
    """From all that torchrun or srun printed: the rank that failed first, and its last words."""
    ended = _ended(lines)
    if not ended:
        words = min(last_words(lines), key=_weight, default="")
        summary = words.splitlines()[-1] if words else f"{who} ended with exit code {code}"
        return RanksError(summary, words or "\n".join(lines[-30:]))
    said = {rank: min(last_words(lines, rank), key=_weight, default="") for rank, _ in ended}
    rank, how = min(ended, key=lambda one: _weight(said[one[0]]))
    words = said[rank] or next((words for words in last_words(lines) if _weight(words) == 0), "")  # nobody is named
    details = "" if _weight(words) == 0 else words
    return RanksError(f"rank {rank} {how}" + (f": {words.splitlines()[-1]}" if words else ""), details)


def _weight(words: str) -> int:
    """What to believe first: a user's mistake, then a failure of its own, or a sudden death; at last one that lost others."""
    if words.startswith("error: "):
        return 0
    return 2 if words and LOST.search(words.splitlines()[-1]) else 1


def _ended(lines: list[str]) -> list[tuple[int, str]]:
    """Ranks that failed, and how; those first that the launcher saw first."""
    text = "\n".join(lines)
    summary = re.findall(r"rank\s+: (\d+) \(local_rank.*?exitcode\s+: (-?\d+)", text, re.DOTALL)
    seen = [(int(rank), int(code)) for rank, code in reversed(summary)]  # torchrun prints the first that it saw last
    seen = seen[:1] + [one for one in seen[1:] if one[1] != -signal.SIGTERM]  # by which it ends the rest
    found = [
        (rank, f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}") for rank, code in seen
    ]
    if "torch.distributed.elastic" in text:  # then Slurm's tasks are torchruns, not ranks
        return found
    tasks = re.findall(r"^srun: error: \S+ tasks? (\d+)\S*: (.+)", text, re.MULTILINE)
    return found + [(int(task), how.lower()) for task, how in tasks if how != "Terminated"]


def last_words(lines: list[str], rank: int | None = None) -> list[str]:
    """A rank's tracebacks and lines that begin with error, the oldest first; without a rank: everybody's.

    Each tag's lines are read by themselves: torchrun copies two streams of each rank, and one may cut the other's traceback.
    """
    number, said = r"\d+" if rank is None else str(rank), {}
    tags = re.compile(rf"(\[rank {number}\]|\s*{number}:|) ?(\[rank{number}\]: ?)?")  # torchrun's, srun's; torch's own
    for line in lines:
        if (tag := tags.match(line)) and (rank is None or tag[1] or tag[2]):
            said.setdefault(tag.groups(), []).append(line[tag.end() :])
    last = re.compile(r"^(?:error: .+|Traceback .+(?:\n .*)*\n.+)", re.MULTILINE)
    return [words for part in said.values() for words in last.findall("\n".join(part))]


def why(job: "Job", status: Status) -> JobError:
    """The cause of a failure in one line, then the last words of the rank that failed first."""
    lines = job.log().splitlines()
    going_on = f'submit("{job.script}", …, name="{Path(job.run).name}", resume=True)'
    at = f" at step {status.step} of {status.steps}" if status.steps else ""
    over = next((line for line in lines if re.search(r"(?i)exceeded memory|oom.?kill|out of memory", line)), "")
    if status.state in WAITING:
        return JobError(f"{job} can never start ({status.reason}): cancel() it, and look at what it waits for")
    if status.state == "OUT_OF_MEMORY" or over:
        return JobError(f"{job} needed more memory than it had{at}: ask for more with mem= or mem_per_cpu=", over)
    if status.state == "TIMEOUT":
        kept = f", and go on with {going_on}" if (Path(job.run) / "checkpoint.pt").exists() else ""
        return JobError(f"{job} was over its time limit of {status.limit}{at}: ask for more with time={kept}")
    if status.state == "CANCELLED":
        return JobError(f"{job} was cancelled{at}; again=True submits it anew")
    if status.state == "FAILED":
        cause = first_failure(lines, 1, "it")
        return JobError(f"{job} failed{at}: {cause}", cause.details)
    return JobError(f"{job} ended as {status.state}{at}; again=True submits it anew", "\n".join(lines[-10:]))
