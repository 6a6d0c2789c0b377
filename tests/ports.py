"""A port for the processes of one test to meet at."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last of the ports which Linux gives to whoever asks for any: one of these is taken again before a test binds it."""


def free_port() -> int:
    """Return a port that nobody listens at, and that the system gives to nobody who did not ask for it."""
    low = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32768
    for port in random.SystemRandom().sample(range(low // 2, low), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of 100 ports below {low} is free")
