"""`metrics`: print, write or serve metrics."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shmacc import inspection
from shmacc_inspect import failures, gauges, interrupts, naming, page
from shmacc_inspect.output import Metrics, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmacc.inspection import Run, SegmentName

    Watched = tuple[list[SegmentName], list[Run]]

_FILE_MODE: Final = 0o644
_HIGHEST_PORT: Final = 65535


def run(
    *,
    names: list[str],
    listen: str | None,
    output: Path | None,
    insecure: bool,
    everywhere: bool,
    json: bool,
) -> None:
    """Run the verb."""
    if json and (listen or output):
        raise failures.UsageError("--json goes to stdout only")
    # A name that does not exist now is an error; later, its segment may come and go.
    naming.select(names, everywhere=everywhere)
    watched = partial(_watched, names, everywhere=everywhere)
    if json:
        print(to_json(Metrics(list(gauges.gather(*watched())))))
    elif listen is not None:
        registry, (address, port) = _registry(watched), _parse(listen, insecure=insecure)
        with interrupts.raised():
            _serve(registry, address, port)
    elif output is not None:
        # Textfile collectors read this format only.
        text = _text("prometheus_client.exposition", watched)
        try:
            with interrupts.raised():
                _write(output, text)
        except OSError as error:
            page.write_line(f"--output: {output}: {error.strerror}")
            failures.end(failures.WRONG_OR_FAILED)
    else:
        text = _text("prometheus_client.openmetrics.exposition", watched)
        print(text.decode(), end="")


def _watched(names: list[str], *, everywhere: bool) -> Watched:
    """Return the existing segments, and the runs; if names are given, only the segments' runs."""
    segments = naming.select(names, everywhere=everywhere, missing_ok=True)
    runs = inspection.list_runs(None if names else naming.scope(everywhere=everywhere))
    of_segments = {name.namespace for name in segments}
    return segments, [run for run in runs if not names or run.namespace in of_segments]


def _text(exposition: str, watched: Callable[[], Watched]) -> bytes:
    registry = _registry(watched)  # first: it reports a missing prometheus_client
    text: bytes = importlib.import_module(exposition).generate_latest(registry)
    return text


def _registry(watched: Callable[[], Watched]) -> Any:
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.registry import Collector, CollectorRegistry
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "prometheus_client"
        why = "" if missing else f", whose import failed ({error!r}); to install it again"
        page.write_line(f"`metrics` needs prometheus_client{why}: pip install prometheus_client")
        failures.end(failures.WRONG_OR_FAILED)

    class SegmentCollector(Collector):
        """Reads the segments anew at each request."""

        def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
            families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
            for metric in gauges.gather(*watched()):
                family = families[metric.type](metric.name, metric.help)
                for sample in metric.samples:
                    family.add_sample(sample.name, sample.labels, sample.value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(SegmentCollector())
    return registry


def _write(path: Path, text: bytes) -> None:
    """Write to a file so that readers see the whole old text or the whole new text.

    A regular file is replaced; a device, a pipe or a terminal is written to. A link to a file is
    refused: to follow it would replace a file that somebody else chose.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG | _FILE_MODE
    if stat.S_ISREG(mode):
        _replace(path, text, stat.S_IMODE(mode))
        return
    if stat.S_ISLNK(mode) and (not path.exists() or path.is_file()):
        raise failures.UsageError(
            f"{path} is a link to {path.readlink()}: name the file itself, which is then replaced"
        )
    # Do not create the file. If it is a terminal, do not make it this process's controlling one.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "wb") as file:
        file.write(text)


def _replace(path: Path, text: bytes, mode: int) -> None:
    import tempfile  # late: only --output needs it

    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def _parse(text: str, *, insecure: bool) -> tuple[str, int]:
    """Return the numeric address and the port that the text names.

    Raises:
        UsageError: The text is malformed, or the address is reachable from other machines and
            `insecure` is false.
    """
    import ipaddress  # late: only --listen needs it
    import socket

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


def _serve(registry: Any, address: str, port: int) -> None:
    """Serve until a signal ends it."""
    from prometheus_client import start_http_server  # late: optional

    # A client that hangs up must not end the server.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupts.end)
    host = f"[{address}]" if ":" in address else address
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        page.write_line(f"--listen: http://{host}:{port}/metrics: {error.strerror}")
        failures.end(failures.WRONG_OR_FAILED)
    # Print no traceback when a client hangs up.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    page.write_line(f"listening on http://{host}:{server.server_port}/metrics")
    thread.join()
