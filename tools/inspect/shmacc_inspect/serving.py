"""Serves metrics by HTTP, on an address and port or on a unix socket."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import socketserver
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from shmacc_inspect import failures, page

if TYPE_CHECKING:
    from types import FrameType

_UNIX: Final = "unix:"
_HIGHEST_PORT: Final = 65535
_SOCKET_UMASK: Final = 0o117  # 0660: its owner and group may ask
_PATIENCE: Final = 30.0  # seconds; for a client that sends no request


@dataclass(frozen=True, slots=True)
class Address:
    """An address to serve at.

    Attributes:
        family: Its family.
        place: As `bind` takes it: a path, or host and port.
        shown: As a client names it.
    """

    family: socket.AddressFamily
    place: Any
    shown: str


def parse(text: str, *, insecure: bool) -> Address:
    """Return the address that the text names.

    Raises:
        UsageError: It is malformed, or reachable from other machines and not `insecure`.
    """
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        return Address(socket.AF_UNIX, path, f"{_UNIX}{path}")
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not colon or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise failures.UsageError(f"--listen: {text!r} is neither ADDRESS:PORT nor unix:PATH")
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
    shown = f"[{place[0]}]" if family == socket.AF_INET6 else place[0]
    return Address(family, place, f"http://{shown}:{{port}}/metrics")


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Answers each request in a thread, so that a client that hangs delays no other."""

    daemon_threads = True

    def __init__(self, address: Address) -> None:
        self.address_family = address.family
        # Else a restart would have to wait for the end of old connections.
        self.allow_reuse_address = address.family != socket.AF_UNIX
        super().__init__(address.place, _Handler)

    def server_bind(self) -> None:
        # Not that of the base classes: it looks up the host's name, which may take its time.
        socketserver.TCPServer.server_bind(self)
        self.server_name = "localhost"
        self.server_port = 0
        if self.address_family != socket.AF_UNIX:
            self.server_port = self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        connection, client = super().get_request()
        return connection, client or ("local", 0)  # a unix socket's client has no address

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hangs up or says nothing is no error of ours.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE

    def log_message(self, *_: Any) -> None:
        """Print nothing: a scrape every few seconds is no news."""

    def address_string(self) -> str:
        return str(self.client_address[0])


def serve(registry: Any, address: Address) -> None:
    """Serve until a signal ends it."""
    from prometheus_client import make_wsgi_app  # late: optional

    # A client that hangs up must not end the server.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    is_file = address.family == socket.AF_UNIX
    if is_file:
        _remove_stale(Path(address.place))
    before = os.umask(_SOCKET_UMASK) if is_file else None
    try:
        server = _Server(address)
    except OSError as error:
        where = address.shown.replace(":{port}", f":{address.place[1]}")
        page.write_line(f"--listen: {where}: {error.strerror}")
        failures.end(failures.WRONG_OR_FAILED)
    finally:
        if before is not None:
            os.umask(before)
    server.set_app(make_wsgi_app(registry))
    page.write_line(f"listening on {address.shown.replace('{port}', str(server.server_port))}")
    try:
        server.serve_forever()
    finally:
        server.server_close()
        if is_file:
            with contextlib.suppress(FileNotFoundError):
                Path(address.place).unlink()


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that the socket is removed


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that was killed: one that refuses connections.

    Raises:
        UsageError: Something else is there, or a server that lives.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise failures.UsageError(f"--listen: {path} is there, and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise failures.UsageError(f"--listen: a server answers at {path} already")
