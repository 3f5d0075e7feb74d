"""Run a program for as long as the process that asked for it lives, without Slurm's and MPI's marks in its environment.

    python -m course_lib.guard PARENT PROGRAM ARGUMENTS…

A notebook's kernel may be killed at any moment; what it started must go too, on every system and however it happens.
"""

import contextlib
import os
import signal
import sys

import psutil

from course_lib.processes import clean_environment, kill_tree


def main() -> int:
    (parent, *command), told = sys.argv[1:], []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: told.append(number))  # it may be starting the program just now
    program = psutil.Popen(command, env=clean_environment())
    try:
        while os.getppid() == int(parent) and not told:  # an orphan gets another parent
            with contextlib.suppress(psutil.TimeoutExpired):
                return program.wait(0.2)
        return 128 + told[0] if told else 1
    finally:
        if command[0] == "srun":  # it ends its ranks on other nodes when it is told to, and can't when it is killed
            with contextlib.suppress(psutil.Error):
                program.terminate()
                program.wait(5)
        kill_tree([program])


if __name__ == "__main__":
    sys.exit(main())
