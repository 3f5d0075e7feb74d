"""Exit with one clear line unless this Python is one on which the pinned packages install (runs on any Python 3)."""

import re
import sys
from pathlib import Path

text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
wanted = re.search(r'^requires-python = "(>=([\d.]+),<([\d.]+))"', text, re.M)
lowest, beyond = (tuple(map(int, wanted.group(n).split("."))) for n in (2, 3))
if not lowest <= sys.version_info[:3] < beyond:
    here = ".".join(map(str, sys.version_info[:3]))
    sys.exit(
        "error: the course needs Python " + wanted.group(1) + ", and this is " + here + "; try: make PYTHON=python3.11"
    )
