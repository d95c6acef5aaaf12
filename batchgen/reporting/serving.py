"""The port that Prometheus scrapes."""

import contextlib
import errno
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

# Metrics tell names of runs and how many documents there are: nobody's business on a machine that others use.
_ADDRESS = "127.0.0.1"
_LAST = 65535
log = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Ports:
    """An address and the ports there, of which the first free one is taken; port 0 is any free one."""

    address: str
    first: int
    last: int

    @classmethod
    def read(cls, text: str) -> "Ports":
        """`9400`, `9400-9415`, `0.0.0.0:9400` or `[::]:9400`. Raises ValueError."""
        found = re.fullmatch(r"(?:(?:\[([\da-fA-F:]+)\]|([^:\s]+)):)?(\d{1,5})(?:-(\d{1,5}))?", text)
        if found is None:
            raise ValueError("write it like 9400, 9400-9415 or 0.0.0.0:9400")
        six, four, first, last = found.groups()
        ports = cls(six or four or _ADDRESS, int(first), int(last or first))
        if not ports.first <= ports.last <= _LAST:
            raise ValueError(f"ports go from 0 to {_LAST}, the first before the last")
        return ports

    def at(self, port: int) -> str:
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"

    def __str__(self) -> str:
        return self.at(self.first) + (f"-{self.last}" if self.last > self.first else "")


@contextlib.contextmanager
def serving(ports: Ports, metrics: "Collector") -> Iterator[None]:
    """Answer scrapes while this is entered. Raises ConfigError where no port can be had."""
    from prometheus_client import start_http_server

    for port in range(ports.first, ports.last + 1):
        try:
            server, thread = start_http_server(port, ports.address, metrics)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise ConfigError(f"--metrics-port: cannot listen at {ports.at(port)}: {e.strerror or e}") from e
            continue
        break
    else:
        what = "in use" if ports.first == ports.last else "all in use"
        raise ConfigError(
            f"--metrics-port: {ports} {what} by other processes: name another port, or a range such as "
            f"{ports.first}-{min(ports.first + 15, _LAST)}, of which the first free one is taken"
        )
    log.info("metrics: http://%s/metrics", ports.at(server.server_port))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
