"""Pack the course as learners get it: without solutions, hidden tests, their sources, and what only the authors need.

python -m lessons.release          # writes runs/release/course.tar.gz

The same files give the same archive, byte for byte. It holds what git knows, so commit first. Notebooks are built anew from
their sources: what an instructor has written or run in one stays where it is.
"""

import argparse
import functools
import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from course_lib.config import UserError, run_main
from lessons.build import ROOT, wanted_files

KEPT_BACK = (
    "solutions/",
    "lessons/exercises/",
    "lessons/grade.py",
    "lessons/release.py",
    "lessons/report.py",
    "lessons/TEACHING.md",
    "slurm/grade.sbatch",
    "tests/",
    "benchmarks/",
    "hub/",
    ".ci/run",
)


def files(all: bool = False) -> list[str]:
    """What learners get, in order, or all of the course. A notebook without a source is somebody's own."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{ROOT} is no git repository, so nobody can tell what belongs to the course; clone it")
    names = sorted(name for name in done.stdout.splitlines() if (ROOT / name).exists())
    ours = [name for name in names if not name.endswith(".ipynb") or name in notebooks()]
    return [name for name in ours if all or not name.startswith(KEPT_BACK)]


@functools.cache
def notebooks() -> dict[str, bytes]:
    """All of them, as built."""
    return {str(path.relative_to(ROOT)): text.encode() for path, text in wanted_files().items()}


def whole(name: str) -> bytes:
    """A file as the course has it: of a notebook not what is there, for somebody may have solved or run it."""
    return notebooks().get(name) or (ROOT / name).read_bytes()


def text(name: str) -> bytes:
    """A file as learners get it: with no link to what is kept back, and a word about that."""
    content = whole(name)
    if not name.endswith(".md"):
        return content

    def link(found: re.Match) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(name), found[2]))
        return found[1] if f"{path}/".startswith(KEPT_BACK) or path in KEPT_BACK else found[0]

    title, rest = re.sub(r"\[([^]]+)\]\(([^)]+)\)", link, content.decode()).split("\n", 1)
    note = "*This is the learners' archive. Solutions, tests and all for teaching are with whoever gives the course.*"
    return f"{title}\n\n{note}\n{rest}".encode()


def pack(path: Path) -> int:
    """Write the archive, whole or not at all; how many files it has."""
    content, names = io.BytesIO(), files()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            entry = archive.gettarinfo(ROOT / name, f"course/{name}")
            entry.mtime = entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            own = text(name)
            entry.size = len(own)
            archive.addfile(entry, io.BytesIO(own))
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_bytes(gzip.compress(content.getvalue(), mtime=0))
    half.replace(path)
    return len(names)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lessons.release", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "release" / "course.tar.gz", help="the archive")
    options = parser.parse_args()
    count = pack(options.out)
    print(f"wrote {options.out}: {count} files, {options.out.stat().st_size / 2**20:.1f} MB; no solution is among them")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
