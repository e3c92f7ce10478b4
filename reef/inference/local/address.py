"""Where an engine's data plane listens: a path, or `tcp://TOKEN@HOST:PORT`."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

MAX_SOCKET_PATH_BYTES = 100  # sockaddr_un holds 108 on Linux, 104 on macOS

NODE = "node"
"""The host that stands for whatever address others reach this machine at."""

_TCP = re.compile(r"tcp://(?P<token>[^@\s]+)@(?P<host>[^@\s]+):(?P<port>\d+)")


@dataclass(frozen=True, slots=True)
class Address:
    """Either `path` or the other three are set."""

    path: str = ""
    token: str = ""  # secret
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError."""
        if match := _TCP.fullmatch(text):
            return cls(token=match["token"], host=match["host"].strip("[]"), port=int(match["port"]))
        if text.startswith("tcp:"):
            raise ValueError("a TCP address must be tcp://TOKEN@HOST:PORT")
        if len(os.fsencode(text)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"socket path must have at most {MAX_SOCKET_PATH_BYTES} bytes, got {text!r}")
        return cls(path=text)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"tcp://{self.token}@{host}:{self.port}"

    @property
    def shown(self) -> str:
        """For messages: without the token."""
        return self.path or f"{self.host}:{self.port}"


def node_address() -> str:
    """The address of this machine's way out, or the loopback's where there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737: connecting a datagram socket only picks a route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
