"""Ports that nobody takes between the moment they are found free and the moment a program listens."""

import random
import socket

from course_lib.config import UserError

PORTS = range(20_000, 32_000, 25)  # below those that systems give out; a controller of ipyparallel needs 19 of a block


def claim_ports() -> socket.socket:
    """The first of a block of free ports, taken: nobody else who asks here gets this block until it is closed.

    Left to themselves, programs look for free ports and bind them a moment later. When a class starts at nine, that is
    too late for one in a hundred.
    """
    for first in random.sample(PORTS, len(PORTS)):
        claim = socket.socket()
        try:
            claim.bind(("", first))
            for port in range(first + 1, first + PORTS.step):
                with socket.socket() as other:
                    other.bind(("", port))
            return claim
        except OSError:
            claim.close()
    raise UserError(f"no {PORTS.step} free ports in a row between {PORTS.start} and {PORTS.stop} on this machine")


def next_port(claim: socket.socket) -> int:
    """The first of a claimed block that is free to listen on."""
    return claim.getsockname()[1] + 1
