"""Habits of a good tool: help, documentation, exit statuses, completion, a quick start, metrics."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers.inspect_tool import COMMAND, HEEDING_CTRL_C, ask, run
from helpers.support import LONG
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from shmacc import ConditionalAccumulator
from shmacc_inspect import output
from shmacc_inspect.main import VERBS

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[1] / "docs" / "inspect.md"


@pytest.fixture
def bias() -> Iterator[ConditionalAccumulator]:
    """An accumulator that is gone after the test."""
    with ConditionalAccumulator(np.float64, [3], "bias") as acc:
        yield acc
        acc.unlink()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_help_and_its_place_in_the_docs(verb: str) -> None:
    said = run(verb, "--help")
    assert said.returncode == 0
    assert f"shmacc-inspect {verb}" in said.stdout
    assert "Examples:" in said.stdout
    assert "--json" in said.stdout
    page = DOCS.read_text(encoding="utf-8")
    [section] = re.findall(rf"^## `{verb}.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert f"shmacc-inspect {verb}" in section
    for option in set(re.findall(r"--[a-z][a-z-]+", said.stdout)) - {"--help"}:
        assert option in page, f"{option} of {verb} is not documented"


def test_the_schema_is_documented() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for module in pkgutil.iter_modules(output.__path__, "shmacc_inspect.output."):
        for found in vars(importlib.import_module(module.name)).values():
            if isinstance(found, type) and dataclasses.is_dataclass(found):
                for field in dataclasses.fields(found):
                    assert f"`{field.name}`" in page, f"{found.__name__}.{field.name}"


def test_the_verbs_stand_in_the_help() -> None:
    said = run("--help")
    assert said.returncode == 0
    for verb in VERBS:
        assert f"\n  {verb} " in said.stdout
    assert re.fullmatch(r"shmacc-inspect \d+\.\d+.*\n", run("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["list"], 0),
        (["check"], 0),
        (["clean"], 0),
        (["clean", "no*", "nobody"], 0),
        (["list", "no*"], 3),
        (["show", "no*"], 3),
        (["watch", "no*", "--count", "1"], 3),
        (["check", "no*"], 3),
        (["metrics", "no*"], 3),
        (["remove", "no*", "--yes"], 3),
        (["wait", "nobody", "--for", "step=1"], 3),
        (["wait", "nobody", "no*", "--for", "gone"], 0),
        (["list", "nobody"], 3),
        (["show", "nobody"], 3),
        (["watch", "nobody", "--count", "1"], 3),
        (["check", "nobody"], 3),
        (["remove", "nobody", "--yes"], 3),
        (["cancel", "nobody", "--yes"], 3),
        (["show", "shmacc.other:nobody"], 3),
        ([], 2),
        (["frobnicate"], 2),
        (["show"], 2),
        (["show", "a/b"], 2),
        (["show", "bias", "--rows", "-1"], 2),
        (["list", "--sort", "colour"], 2),
        (["clean", "--older-than", "soon"], 2),
        (["watch", "--interval", "0"], 2),
        (["watch", "--interval", "inf"], 2),
        (["watch", "--interval", "nan"], 2),
        (["watch", "--interval", "1e300"], 2),
        (["watch", "--interval", "9999999999999d"], 2),
        (["watch", "--count", "99999999999999999999"], 2),
        (["list", "--columns", "colour"], 2),
        (["list", "-n", "a/b"], 2),
        (["list", "-n", "a", "-A"], 2),
        (["wait", "bias"], 2),
        (["wait", "bias", "--for", "step"], 2),
        (["wait", "bias", "--for", "gone=1"], 2),
        (["metrics", "--output", "a", "--listen", "b"], 2),
        (["metrics", "--listen", "unix:/dev/null"], 2),
        (["metrics", "--listen", "0.0.0.0:0"], 2),
        (["metrics", "--listen", "127.0.0.1"], 2),
        (["metrics", "--output", "/nowhere/at/all"], 1),
    ],
)
def test_exit_status(arguments: list[str], status: int) -> None:
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if status:
        assert done.stdout == ""
        assert done.stderr


def test_a_name_alike_is_suggested(bias: ConditionalAccumulator) -> None:
    assert "there is bias" in run("show", "bais").stderr
    elsewhere = run("show", "bias", SHMACC_NAMESPACE="another")
    assert elsewhere.returncode == 3
    assert ":bias" in elsewhere.stderr
    assert bias.stats().attached == 1


def test_completion_knows_verbs_and_names(bias: ConditionalAccumulator) -> None:
    def complete(words: str, word: int) -> str:
        return run(
            _SHMACC_INSPECT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(word)
        ).stdout

    assert complete("shmacc-inspect ch", 1).split() == ["check"]
    assert complete("shmacc-inspect show b", 2).split() == ["bias"]
    assert (
        "shmacc-inspect"
        in run("--show-completion", "bash").stdout
        + run(_SHMACC_INSPECT_COMPLETE="source_bash").stdout
    )
    assert bias.stats().attached == 1


@pytest.mark.parametrize("arguments", [["--help"], ["list", "--help"], ["list"], ["clean"]])
def test_it_starts_without_what_it_does_not_need(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=LONG,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"numpy", "rich", "prometheus_client", "http.server"}
    if "--help" in arguments:
        assert "shmacc" not in loaded


def test_metrics_are_openmetrics(bias: ConditionalAccumulator, tmp_path: Path) -> None:
    bias.apply_grad([1, 2, 3])
    text = run("metrics").stdout
    families = {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    applied = families["shmacc_applied"]
    assert applied.type == "counter"
    assert applied.documentation
    [sample] = [s for s in applied.samples if s.labels["name"] == "bias"]
    assert (sample.name, sample.value) == ("shmacc_applied_total", 1.0)
    assert families["shmacc_gradients"].type == "gauge"

    file = tmp_path / "shmacc.prom"
    assert run("metrics", "--output", str(file)).returncode == 0
    assert 'shmacc_applied_total{name="bias"' in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == [file.name]

    metrics = {metric["name"]: metric for metric in ask("metrics")["metrics"]}
    assert metrics["shmacc_applied_bytes"]["samples"][0]["value"] == 24.0
    assert set(metrics) == set(families)


def test_metrics_are_served_on_loopback(bias: ConditionalAccumulator) -> None:
    server = subprocess.Popen(
        [*HEEDING_CTRL_C, COMMAND, "metrics", "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    address = server.stderr.readline().split()[-1]
    for gradients in (1, 2):
        bias.apply_grad([1, 2, 3])
        with urllib.request.urlopen(address, timeout=LONG) as answer:  # noqa: S310 - our own server
            assert f'namespace="{_namespace()}"}} {gradients}.0' in answer.read().decode()
    server.send_signal(signal.SIGINT)
    _, talk = server.communicate(timeout=LONG)
    assert server.returncode == 130
    assert talk == ""


def _namespace() -> str:
    return os.environ["SHMACC_NAMESPACE"]


def test_without_prometheus_client_metrics_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError", encoding="ascii")
    done = run("metrics", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install 'shmacc[metrics]'" in done.stderr
    assert run("metrics", "--json", PYTHONPATH=str(tmp_path)).returncode == 0
