"""Holds the alert rules to real jobs, scraped by a real Prometheus: `make alerts`.

Every scene of `alert_scenes` must raise its alerts, and an hour of healthy churn none. Time is
scaled: the rules' durations and limits are divided, Prometheus looks twice a second. It runs in a
mount namespace with a /dev/shm of its own, so that it may fill it, and meets nobody else's
segments. Needs `prometheus` on the PATH (Debian's package of that name, or its unpacked files).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import alert_scenes
from shmacc import inspection

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES: Final = Path(__file__).parents[2] / "docs" / "inspect" / "alerts.yml"
COMMAND: Final = Path(sys.executable).with_name("shmacc-inspect")
SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
LOOK: Final = 0.5  # seconds between two scrapes
SHORTEST: Final = 1  # seconds: of what a rule waits for, and of the windows that it looks at
LONGEST_IN_A_SCENE: Final = 15
OF_SCENES: Final = 60.0  # by how much time is divided
OF_CHURN: Final = 20.0
PATIENCE: Final = 90.0
SHM: Final = 256 << 20
OF_NO_SEGMENT: Final = {"ShmaccDamaged", "ShmaccOrphans", "ShmaccSharedMemoryLow"}
APART: Final = "--apart"


def scaled(rules: str, by: float, longest: float) -> str:
    """Return the rules with all times divided."""

    def shorter(match: re.Match[str]) -> str:
        seconds = int(match[2]) * SECONDS[match[3]] / by
        return f"{match[1]}{1000 * min(max(seconds, SHORTEST), longest):.0f}ms{match[4]}"

    rules = re.sub(r"(for: )(\d+)([smh])($)", shorter, rules, flags=re.MULTILINE)
    rules = re.sub(r"(\[)(\d+)([smh])(\])", shorter, rules)
    return re.sub(
        r"(_seconds\S* > )(\d+)", lambda found: f"{found[1]}{int(found[2]) / by:g}", rules
    )


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that ends with the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Watched:
    """A Prometheus that scrapes the command, as it runs here."""

    def __init__(self, api: str, metrics: subprocess.Popen[bytes]) -> None:
        """Ask there."""
        self._api = api
        self.metrics = metrics

    def firing(self) -> set[tuple[str, str]]:
        """Return each alert that fires, with the segment that it is about."""
        alerts = self._ask("alerts")["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"].get("name", ""))
            for alert in alerts
            if alert["state"] == "firing"
        }

    def is_ready(self) -> bool:
        """Whether it has scraped something."""
        with contextlib.suppress(OSError):
            return bool(self._ask("query?query=shmacc_segments")["result"])
        return False

    def _ask(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self._api}/{what}", timeout=PATIENCE) as answer:  # noqa: S310  ours
            return json.load(answer)["data"]


@contextlib.contextmanager
def watched(by: float, longest: float) -> Iterator[Watched]:
    """Yield a Prometheus with the scaled rules."""
    port, of_metrics = free_port(), free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(COMMAND, "metrics", "--listen", f"127.0.0.1:{of_metrics}") as metrics,
    ):
        here = Path(folder)
        rules = scaled(RULES.read_text(encoding="utf-8"), by, longest)
        (here / "alerts.yml").write_text(rules, encoding="utf-8")
        settings = f"""
global: {{scrape_interval: {LOOK * 1000:.0f}ms, evaluation_interval: {LOOK * 1000:.0f}ms}}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: shmacc
    scrape_timeout: {LOOK * 1000:.0f}ms
    static_configs: [{{targets: ["127.0.0.1:{of_metrics}"]}}]
"""
        (here / "prometheus.yml").write_text(settings, encoding="utf-8")
        with running(
            "prometheus",
            f"--config.file={here / 'prometheus.yml'}",
            f"--storage.tsdb.path={here / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ):
            found = Watched(f"http://127.0.0.1:{port}/api/v1", metrics)
            alert_scenes.wait_until(found.is_ready)
            yield found


def try_scenes() -> list[str]:
    """Return what was not raised by its scene."""
    stage = alert_scenes.Stage()
    try:
        with watched(OF_SCENES, LONGEST_IN_A_SCENE) as prometheus:
            names = {scene: scene.__name__.replace("_", "-") for scene in alert_scenes.SCENES}
            with ThreadPoolExecutor() as threads:
                begun = [threads.submit(scene, stage, name) for scene, name in names.items()]
            for future in begun:
                future.result()
            alert_scenes.fill_memory(stage)
            wanted = {(alert, "") for alert in OF_NO_SEGMENT} | {
                (alert, names[scene])
                for scene, alerts in alert_scenes.SCENES.items()
                for alert in alerts - OF_NO_SEGMENT
            }
            missing = _wait_for(prometheus, wanted)
            prometheus.metrics.kill()
            gone = {("ShmaccMetricsMissing", "")}
            missing |= _wait_for(prometheus, gone)
            for alert, name in sorted(wanted | gone):
                print(f"{'no ' if (alert, name) in missing else 'yes'}  {alert:<28} {name}")
    finally:
        stage.clear()
        for segment in inspection.list_names():  # all of them are ours: see above
            inspection.remove(segment.system_name, force=True)
    return [f"{alert} is not raised by {name or 'its scene'}" for alert, name in sorted(missing)]


def _wait_for(prometheus: Watched, wanted: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return those of the alerts that do not fire in time."""
    missing, deadline = set(wanted), time.monotonic() + PATIENCE
    while missing and time.monotonic() < deadline:
        missing -= prometheus.firing()
        time.sleep(LOOK)
    return missing


def try_churn(hours: float) -> list[str]:
    """Return what was raised by a healthy job."""
    stage, raised, changes = alert_scenes.Stage(), set[tuple[str, str]](), 0
    try:
        jobs = alert_scenes.Healthy(stage)
        with watched(OF_CHURN, float("inf")) as prometheus:
            end = time.monotonic() + hours * SECONDS["h"] / OF_CHURN
            while time.monotonic() < end:
                changes += 1
                jobs.change(kill=changes % 10 == 0)
                raised |= prometheus.firing()
                time.sleep(LOOK)
        print(f"{changes} processes or jobs came and went")
    finally:
        stage.clear()
    return [f"{alert} is raised by the healthy {name}" for alert, name in sorted(raised)]


def main() -> None:
    """Try the rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("scenes", "churn"), help="not both")
    parser.add_argument("--hours", type=float, default=1.0, help="of healthy churn (1), scaled")
    parser.add_argument(APART, action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is not on the PATH (Debian: apt-get install prometheus)")
    if not asked.apart:
        mount = f'mount -t tmpfs -o size={SHM} tmpfs /dev/shm && exec "$@"'
        apart = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        again = [sys.executable, *sys.argv, APART]
        os.execvp(apart[0], [*apart, "sh", "-c", mount, "sh", *again])  # noqa: S606
    os.environ.pop("SHMACC_NAMESPACE", None)
    failures = []
    if asked.only != "churn":
        failures += try_scenes()
    if asked.only != "scenes":
        failures += try_churn(asked.hours)
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
