"""Serves metrics by HTTP."""

from __future__ import annotations

import ipaddress
import signal
import socket
from typing import TYPE_CHECKING, Any, Final

from shmacc_inspect import failures, page

if TYPE_CHECKING:
    from types import FrameType

_HIGHEST_PORT: Final = 65535


def parse(text: str, *, insecure: bool) -> tuple[str, int]:
    """Return the numeric address and the port that the text names.

    Raises:
        UsageError: The text is malformed, or the address is reachable from other machines and
            `insecure` is false.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not colon or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise failures.UsageError(f"--listen: {text!r} is not ADDRESS:PORT")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise failures.UsageError(f"--listen: {host!r}: {error.strerror}") from error
    address = str(found[0][4][0])
    if not insecure and not ipaddress.ip_address(address).is_loopback:
        raise failures.UsageError(
            f"--listen: {host} is not a loopback address. There is neither encryption nor a "
            "password: put a proxy with both in front, or give --insecure"
        )
    return address, int(port)


def serve(registry: Any, address: str, port: int) -> None:
    """Serve until a signal ends it."""
    from prometheus_client import start_http_server  # late: optional

    # A client that hangs up must not end the server.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    host = f"[{address}]" if ":" in address else address
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        page.write_line(f"--listen: http://{host}:{port}/metrics: {error.strerror}")
        failures.end(failures.WRONG_OR_FAILED)
    page.write_line(f"listening on http://{host}:{server.server_port}/metrics")
    thread.join()


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
