"""Serves metrics by HTTP."""

from __future__ import annotations

import ipaddress
import signal
import socket
import socketserver
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from shmacc_inspect import failures, page

if TYPE_CHECKING:
    from types import FrameType

_HIGHEST_PORT: Final = 65535
_PATIENCE: Final = 30.0  # seconds; for a client that sends no request


class Address(NamedTuple):
    """An address to serve at: its family, and what `bind` takes (host and port first)."""

    family: socket.AddressFamily
    place: tuple[Any, ...]

    def shown(self, port: int) -> str:
        """Return the address as a client names it."""
        host = f"[{self.place[0]}]" if self.family == socket.AF_INET6 else self.place[0]
        return f"http://{host}:{port}/metrics"


def parse(text: str, *, insecure: bool) -> Address:
    """Return the address that the text names.

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
    family, _type, _protocol, _name, place = found[0]
    if not insecure and not ipaddress.ip_address(place[0]).is_loopback:
        raise failures.UsageError(
            f"--listen: {host} is not a loopback address. There is neither encryption nor a "
            "password: put a proxy with both in front, or give --insecure"
        )
    return Address(family, place)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Answers each request in a thread, so that a client that hangs delays no other."""

    daemon_threads = True

    def __init__(self, address: Address) -> None:
        self.address_family = address.family
        super().__init__(address.place, _Handler)

    def server_bind(self) -> None:
        # The base class looks up the host's name, which can take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hangs up or says nothing is no error of ours.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE

    def log_message(self, *_: Any) -> None:
        """Print nothing: a scrape every few seconds is no news."""


def serve(registry: Any, address: Address) -> None:
    """Serve until a signal ends it."""
    from prometheus_client import make_wsgi_app  # late: optional

    # A client that hangs up must not end the server.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    try:
        server = _Server(address)
    except OSError as error:
        page.write_line(f"--listen: {address.shown(address.place[1])}: {error.strerror}")
        failures.end(failures.WRONG_OR_FAILED)
    server.set_app(make_wsgi_app(registry))
    page.write_line(f"listening on {address.shown(server.server_port)}")
    with server:
        server.serve_forever()


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
