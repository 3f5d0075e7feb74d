"""Put the course where the servers of learners and teachers take it from.

python -m hub.publish FOLDER [--teachers GROUP]

FOLDER/learners has the files of `make release`: no solutions, no hidden tests. FOLDER/teachers has all files, and only the
group may look into it. Notebooks are those of their sources, not what somebody has made of them here. A server takes what it
can read.
"""

import argparse
import grp
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from course_lib.config import UserError, run_main
from hub.site import ROOT
from lessons import release

FOR_LEARNERS = (
    "hub/pull.py",
    "hub/learners/",
    "hub/path/",
)  # what a server needs beside the archive of make release


def here(name: str) -> bytes:
    return (ROOT / name).read_bytes()


def publish(
    folder: Path, names: list[str], mode: int = 0o755, group: str | None = None, content: Callable = here
) -> None:
    """All files in one step: FOLDER is a link, and a server gets the old course or the new one. The last one stays a while."""
    new = folder.with_name(f"{folder.name}-{time.time_ns()}")
    new.mkdir(mode=0o700, parents=True)
    for name in names:
        target = new / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content(name))
        target.chmod(0o755 if (ROOT / name).stat().st_mode & 0o100 else 0o644)
    for path in new.rglob("*/"):
        path.chmod(0o755)
    if group:
        shutil.chown(new, group=group)
    new.chmod(mode)
    link = folder.with_name(f".{folder.name}")
    link.unlink(missing_ok=True)
    link.symlink_to(new.name)
    link.replace(folder)
    ours = re.compile(rf"{re.escape(folder.name)}-\d{{19}}")  # and nobody's learners-2025
    for old in sorted(path for path in folder.parent.iterdir() if ours.fullmatch(path.name))[:-2]:
        shutil.rmtree(old)
    print(f"published {len(names)} files in {folder}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hub.publish", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--teachers", metavar="GROUP", help="who may read teachers/; without it: only you")
    options = parser.parse_args()
    if options.teachers:
        try:
            grp.getgrnam(options.teachers)
        except KeyError:
            message = f"--teachers {options.teachers}: there is no such group; groupadd {options.teachers}"
            raise UserError(message) from None
    if not options.folder.exists():
        options.folder.mkdir(parents=True)
        options.folder.chmod(0o755)
    folder = options.folder.resolve()
    own = [name for name in release.files(all=True) if name.startswith(FOR_LEARNERS)]
    publish(folder / "learners", [*release.files(), *own], content=release.text)
    publish(folder / "teachers", release.files(all=True), 0o750, options.teachers, content=release.whole)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
