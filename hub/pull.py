"""Bring a learner's copy of the course up to date, and never overwrite a learner's work.

python pull.py PUBLISHED COPY VENV DATA

A file that is as it was delivered is replaced. One that the learner has changed stays, and the new one is put beside it, as
NAME.new.SUFFIX. One that the learner has removed stays away until there is a newer one. What was delivered is noted, as
hashes, in COPY/.delivered.json. The venv and every folder of the data are linked. Needs nothing but Python's own library: it
runs in the learner's job, before the server.
"""

import hashlib
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

NOTE = ".delivered.json"


def pull(published: Path, copy: Path) -> dict[str, list[str]]:
    """What was done, by kind: new, updated, kept."""
    copy.mkdir(parents=True, exist_ok=True)
    delivered = read_note(copy / NOTE)
    done: dict[str, list[str]] = {"new": [], "updated": [], "kept": []}
    try:
        for source in sorted(path for path in published.rglob("*") if path.is_file()):
            name = str(source.relative_to(published))
            target, now = copy / name, hash_of(source)
            before, here = delivered.get(name), hash_of(target)
            if now in (before, here):  # nothing new, or the learner has it already
                kind = None
            elif (here and here == before) or not os.path.lexists(target):
                kind = "updated" if here else "new"
            else:
                kind, target = "kept", beside(target, copy, delivered)
            try:
                if kind:
                    put(source, target)
                    delivered[str(target.relative_to(copy))] = now
            except (FileExistsError, NotADirectoryError):  # the learner has a file where the course has a folder
                kind = "kept"
            if kind:
                done[kind].append(name)
            delivered[name] = now
    finally:  # what was delivered before a disk was full is noted, if there is room
        write_note(copy / NOTE, delivered)
    return done


def read_note(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        content = {}
    return content if isinstance(content, dict) else {}  # without it all counts as the learner's work, and is kept


def write_note(path: Path, content: dict[str, str]) -> None:
    half = path.with_suffix(".half")
    try:
        half.write_text(json.dumps(content, indent=0, sort_keys=True))
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def beside(target: Path, copy: Path, delivered: dict[str, str]) -> Path:
    """NAME.new.SUFFIX, or .new2 and so on, if the learner has gone on there."""
    for number in itertools.count(1):
        place = target.with_name(f"{target.stem}.new{number if number > 1 else ''}{target.suffix}")
        ours = delivered.get(str(place.relative_to(copy)))
        if not os.path.lexists(place) or (ours and hash_of(place) == ours):
            return place


def hash_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def put(source: Path, target: Path) -> None:
    """Whole or not at all, and the learner may write to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{target.name}.half")
    try:
        shutil.copyfile(source, half)
        half.chmod(0o700 if os.access(source, os.X_OK) else 0o600)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


def link(copy: Path, venv: Path, data: Path) -> None:
    """Too big to be copied. Folders of data are linked one by one, so that a learner can have more beside them."""
    for name, target in ({".venv": venv} | {f"data/{path.name}": path for path in data.glob("*")}).items():
        place = copy / name
        if place.is_symlink() and (name == ".venv" or not place.exists()):
            place.unlink()
        if not os.path.lexists(place):
            place.parent.mkdir(exist_ok=True)
            place.symlink_to(target)


def main() -> int:
    if len(sys.argv) != 5:
        print(__doc__, file=sys.stderr)
        return 2
    published, copy, venv, data = map(Path, sys.argv[1:])
    published = published.resolve()  # one course, even if a newer one takes its place meanwhile
    if not published.is_dir():
        print(f"{published} is missing: the course has not been published; see hub/README.md", file=sys.stderr)
        return 1
    try:
        done = pull(published, copy)
        link(copy, venv, data)
    except OSError as error:  # a full disk: what is there stays, and the server starts
        print(f"the course could not be brought up to date: {error}", file=sys.stderr)
        return 0 if copy.is_dir() else 1
    for kind, names in done.items():
        print(f"{kind}: {len(names)} files", *(names if kind == "kept" else []), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
