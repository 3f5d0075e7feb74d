"""A kernel that no port can be taken from: what executes notebooks unattended, papermill and nbgrader, starts this one.

Jupyter looks for free ports and tells the kernel, which binds them half a second later. Where forty are graded at once, or ranks
open connections all the time, another program has taken one of them now and then, and the kernel dies.
"""

import tempfile

from jupyter_client import AsyncKernelManager


class FileKernel(AsyncKernelManager):
    """Reached by sockets in a folder of its own, which is nobody else's."""

    def __init__(self, **settings):
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-")  # short, as a socket's path must be
        super().__init__(transport="ipc", connection_file=f"{self._folder.name}/kernel.json", **settings)
