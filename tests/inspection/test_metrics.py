"""`metrics` prints, writes to files, and serves metrics; it changes nothing."""

import os
import signal
import socket
import stat
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from helpers.apart import Crew
from helpers.inspect_tool import COMMAND, HEEDING_CTRL_C, ask, path_of, run
from helpers.standing_still import apply, begin, wait_for_ever
from helpers.support import LONG, until
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_classic_text

from shmacc import ConditionalAccumulator


@pytest.fixture
def bias() -> Iterator[ConditionalAccumulator]:
    with ConditionalAccumulator(np.float64, [3], "bias") as acc:
        yield acc
        acc.unlink()


def test_metrics_prints_valid_openmetrics(bias: ConditionalAccumulator) -> None:
    bias.apply_grad([1, 2, 3])
    text = run("metrics").stdout
    families = {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    applied = families["shmacc_applied"]
    assert applied.type == "counter"
    assert applied.documentation
    [sample] = [s for s in applied.samples if s.labels["name"] == "bias"]
    assert (sample.name, sample.value) == ("shmacc_applied_total", 1.0)
    assert families["shmacc_gradients"].type == "gauge"

    metrics = {metric["name"]: metric for metric in ask("metrics")["metrics"]}
    assert metrics["shmacc_applied_bytes"]["samples"][0]["value"] == 24.0
    assert set(metrics) == set(families)


@pytest.mark.parametrize(
    ("where", "more", "number"),
    [("127.0.0.1", (), signal.SIGINT), ("0.0.0.0", ("--insecure",), signal.SIGTERM)],  # noqa: S104
)
def test_metrics_are_served_to_other_machines_only_by_an_explicit_flag(
    bias: ConditionalAccumulator, namespace: str, where: str, more: tuple[str, ...], number: int
) -> None:
    listen = ("metrics", "--listen", f"{where}:0")
    if more:
        refused = run(*listen)
        assert (refused.returncode, "--insecure" in refused.stderr) == (2, True)
    command = [*HEEDING_CTRL_C, str(COMMAND), *listen, *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = server.stderr.readline().split()[-1].replace(where, "127.0.0.1")
        for gradients in (1, 2):
            bias.apply_grad([1, 2, 3])
            with urllib.request.urlopen(address, timeout=LONG) as answer:  # noqa: S310 - our own
                assert f'namespace="{namespace}"}} {gradients}.0' in answer.read().decode()
        server.send_signal(number)
        _, talk = server.communicate(timeout=LONG)
    assert (server.returncode, talk) == (128 + number, "")


def test_a_client_that_hangs_up_is_not_logged() -> None:
    command = [str(COMMAND), "metrics", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = server.stderr.readline().split()[-1]
        tasks = Path(f"/proc/{server.pid}/task")
        before = len(list(tasks.iterdir()))
        where = urlsplit(address)
        with socket.create_connection((where.hostname, where.port)) as client:
            client.sendall(b"GET /met")
            until(lambda: len(list(tasks.iterdir())) > before)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: len(list(tasks.iterdir())) == before)
        with urllib.request.urlopen(address, timeout=LONG) as answer:  # noqa: S310 - our own
            assert b"shmacc_segments" in answer.read()
        server.terminate()
        assert server.communicate(timeout=LONG)[1] == ""


_MISSING = "raise ModuleNotFoundError(\"No module\", name='prometheus_client')"


@pytest.mark.parametrize(("content", "why"), [
    (_MISSING, "needs prometheus_client: pip install"),
    ("raise ImportError('libz.so.1')", "import failed (ImportError('libz.so.1'))"),
    ("", "import failed (ModuleNotFoundError(\"No module named 'prometheus_client.core'"),
])  # fmt: skip
def test_metrics_names_the_missing_package(tmp_path: Path, content: str, why: str) -> None:
    """If the package is installed but cannot be imported, the message says why."""
    (tmp_path / "prometheus_client.py").write_text(content, encoding="ascii")
    done = run("metrics", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install prometheus_client" in done.stderr
    assert why in done.stderr


def test_a_textfile_has_the_classic_format(bias: ConditionalAccumulator, tmp_path: Path) -> None:
    bias.apply_grad([1, 2, 3])
    file = tmp_path / "shmacc.prom"
    assert run("metrics", "--output", str(file)).returncode == 0
    text = file.read_text(encoding="utf-8")
    assert "# EOF" not in text
    # A textfile collector needs the same name in the TYPE line and in the samples.
    assert "# TYPE shmacc_applied_total counter" in text.splitlines()
    families = {family.name: family for family in parse_classic_text(text)}
    assert families["shmacc_applied"].type == "counter"
    assert file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_file_is_replaced_in_one_piece_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "shmacc.prom"
    file.write_text("old", encoding="ascii")
    file.chmod(0o600)
    with file.open(encoding="ascii") as old:
        assert run("metrics", "--output", str(file)).returncode == 0
        assert old.read() == "old"
    assert "shmacc_segments" in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o777 == 0o600


def test_devices_and_pipes_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Terminals are devices, too."""
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert run("metrics", "--output", str(fifo)).returncode == 0
    assert b"shmacc_segments" in os.read(reader, 1 << 16)
    os.close(reader)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    printed = run("metrics", "--output", "/dev/stdout", command=(str(COMMAND),))
    assert "shmacc_segments" in printed.stdout
    (tmp_path / "directory").mkdir()
    refused = run("metrics", "--output", str(tmp_path / "directory"))
    assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "directory"}


@pytest.mark.parametrize("there", [True, False])
def test_output_to_a_symbolic_link_is_refused(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if there:
        target.write_text("precious", encoding="ascii")
    link.symlink_to(target)
    refused = run("metrics", "--output", str(link))
    assert refused.returncode == 2
    assert str(target) in refused.stderr
    assert link.is_symlink()
    assert target.exists() == there
    assert not there or target.read_text(encoding="ascii") == "precious"


def _value(metric: str) -> float:
    found = {family["name"]: family["samples"] for family in ask("metrics", "tight")["metrics"]}
    return float(found[metric][0]["value"])


def test_waits_and_open_rounds_have_metrics(crew: Crew) -> None:
    with ConditionalAccumulator(np.float32, [1], "tight", capacity=1) as acc:
        for _ in range(2):
            begin(crew, wait_for_ever, name="tight")
        until(lambda: _value("shmacc_waiting_for_step") == 2)
        assert _value("shmacc_waiting_for_room") == 0
        full = begin(crew, apply, apply, name="tight")
        until(lambda: _value("shmacc_waiting_for_room") == 1)
        assert _value("shmacc_round_open_seconds") == 0
        with acc.round(1):
            until(lambda: _value("shmacc_round_open_seconds") > 0)
        full.result()
        assert _value("shmacc_round_open_seconds") == 0
        acc.unlink()  # this ends the waits


def test_metrics_can_be_limited_to_some_segments(bias: ConditionalAccumulator) -> None:
    with ConditionalAccumulator(np.float32, [2], "other") as other:
        for names in (["bias"], ["b*"], [path_of("bias").name]):
            found = ask("metrics", *names)["metrics"]
            [info] = [metric for metric in found if metric["name"] == "shmacc_segment_info"]
            assert [sample["labels"]["name"] for sample in info["samples"]] == ["bias"]
        other.unlink()
    assert bias.stats().attached == 1
