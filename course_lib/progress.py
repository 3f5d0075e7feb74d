"""A run's progress: a bar in a terminal or in Lab, plain lines everywhere else (batch jobs, papermill, logs)."""

import os
import sys
from typing import Self

from tqdm.auto import tqdm


def has_bar() -> bool:
    """Whether somebody is watching. COURSE_PLAIN=1 says that nobody is."""
    return os.environ.get("COURSE_PLAIN") != "1" and (sys.stderr.isatty() or "ipykernel" in sys.modules)


class Progress:
    """Shows steps done, loss and speed; silent on every rank but the first."""

    def __init__(self, steps: int, *, done: int = 0, quiet: bool = False):
        self.steps, self.quiet = steps, quiet
        self.bar = tqdm(total=steps, initial=done, unit="step") if has_bar() and not quiet else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, step: int, *, loss: float, samples_per_s: float) -> None:
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix_str(f"loss {loss:.4f}, {samples_per_s:.0f} samples/s")
        elif not self.quiet:
            print(f"step {step}/{self.steps}  loss {loss:.4f}  {samples_per_s:.0f} samples/s", flush=True)

    def note(self, text: str) -> None:
        """A line that stays: the end of an epoch."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        elif not self.quiet:
            print(text, flush=True)
