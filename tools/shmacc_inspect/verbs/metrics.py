"""`metrics`: for a monitoring system."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shmacc_inspect import failures, options, page

if TYPE_CHECKING:
    from collections.abc import Iterator

EPILOG: Final = """\b
Examples:
  shmacc-inspect metrics
  shmacc-inspect metrics --output /var/lib/node_exporter/shmacc.prom
  shmacc-inspect metrics --listen 127.0.0.1:9470"""

_FILE_MODE: Final = 0o644
_HIGHEST_PORT: Final = 65535


def run(
    *,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS:PORT",
            help="Serve them by HTTP, on loopback only, until Ctrl-C; port 0 picks one.",
            show_default=False,
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            dir_okay=False,
            help="Write them to this file, in one piece, for a textfile collector.",
            show_default=False,
        ),
    ] = None,
    everywhere: options.AllNamespaces = False,
    json: options.Json = False,
) -> None:
    """Print OpenMetrics text of all segments, or serve it.

    Counters and gauges with the labels `name` and `namespace`. Needs prometheus_client, which comes
    with `pip install 'shmacc[metrics]'` (--json does not).
    """
    namespace = options.namespace(everywhere=everywhere)
    if json:
        if listen or output_file:
            raise typer.BadParameter("goes to stdout only", param_hint="'--json'")
        _print_json(namespace)
        return
    address = None if listen is None else _loopback(listen)
    registry = _registry(namespace)
    if address is not None:
        _serve(registry, *address)
        return
    from prometheus_client.openmetrics.exposition import generate_latest  # late: optional

    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    if output_file is None:
        print(text.decode(), end="")
    else:
        _write(output_file, text)


def _print_json(namespace: str | None) -> None:
    from shmacc_inspect import gauges  # late: see the package
    from shmacc_inspect.output import to_json
    from shmacc_inspect.output.metrics import Metrics

    print(to_json(Metrics(list(gauges.gather(namespace)))))


def _registry(namespace: str | None) -> Any:
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.registry import Collector, CollectorRegistry
    except ImportError:
        page.write_line("`metrics` needs prometheus_client: pip install 'shmacc[metrics]'")
        failures.end(failures.WRONG_OR_FAILED)
    from shmacc_inspect import gauges  # late: see the package

    class SegmentCollector(Collector):
        """Looks at the segments at each request."""

        def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
            families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
            for metric in gauges.gather(namespace):
                family = families[metric.type](metric.name, metric.help)
                for sample in metric.samples:
                    family.add_sample(sample.name, sample.labels, sample.value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(SegmentCollector())
    return registry


def _loopback(text: str) -> tuple[str, int]:
    """Return the address and port to listen on.

    Raises:
        typer.BadParameter: It is malformed, or reachable from other machines.
    """
    import ipaddress  # late: slow to import
    import socket

    hint = "'--listen'"
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not colon or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise typer.BadParameter(f"{text!r} is not ADDRESS:PORT", param_hint=hint)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise typer.BadParameter(f"{host!r}: {error.strerror}", param_hint=hint) from error
    address = str(found[0][4][0])
    if not ipaddress.ip_address(address).is_loopback:
        raise typer.BadParameter(
            f"{host} is not a loopback address; to serve others, put a proxy with authentication "
            "in front",
            param_hint=hint,
        )
    return address, int(port)


def _serve(registry: Any, address: str, port: int) -> None:
    from prometheus_client import start_wsgi_server  # late: optional

    # A client that hangs up must not end the server.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    server, _thread = start_wsgi_server(port, address, registry)
    shown = f"[{address}]" if ":" in address else address
    page.write_line(f"listening on http://{shown}:{server.server_port}/metrics")
    try:
        threading.Event().wait()
    finally:
        server.shutdown()
        server.server_close()


def _write(path: Path, text: bytes) -> None:
    """Write a file so that a reader sees the old text or the new one, never half of it."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
            os.fchmod(file.fileno(), _FILE_MODE)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
