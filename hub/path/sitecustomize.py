"""On the PYTHONPATH of a learner's programs: ~/course comes after Python's own modules, so a json.py of theirs does no harm."""

import os
import sys

sys.path.append(os.path.expanduser("~/course"))
