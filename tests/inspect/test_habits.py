"""Habits of a good tool: help, documentation, exit statuses, a quick start."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import segment_layout
from helpers.inspect_tool import COMMAND, run
from helpers.pages import PAGES, ROOT, page_id
from helpers.support import LONG

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator
from shmacc_inspect import sorting
from shmacc_inspect.parsers import VERBS, parser_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCS = ROOT / "docs" / "inspect.md"
OF_COMMAND = {"inspect", "standing-still"}
MANUAL = ROOT / "docs" / "inspect" / "shmacc-inspect.1"


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
    manual = MANUAL.read_text(encoding="utf-8").replace("\\-", "-")
    [section] = re.findall(
        rf"^\.SH {verb.upper()}\n.*?(?=^\.SH )", manual, re.DOTALL | re.MULTILINE
    )
    for option in set(re.findall(r"--[a-z][a-z-]+", said.stdout)) - {"--help"}:
        assert option in section, f"{option} of {verb} is not documented"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_names_options_that_there_are(page: Path) -> None:
    """In each `shmacc-inspect VERB ...`; and on the pages of the command in `VERB ...`, too."""
    text = page.read_text(encoding="utf-8")
    for verb in VERBS:
        before = "(?:shmacc-inspect |`)" if page.stem in OF_COMMAND else "shmacc-inspect "
        commands = re.findall(rf"{before}{verb}\b([^`|\n#&;]*)", text)
        declared = [option for each in parser_of(verb).declared() for option in each.option_strings]
        for option in re.findall(r"(?<!\S)(--?[a-zA-Z][a-z-]*)", " ".join(commands)):
            assert option in declared, f"{verb} {option}"


@pytest.mark.parametrize(
    ("verb", "keys"), [("list", sorting.SORTS_OF_LIST), ("watch", sorting.SORTS)]
)
def test_every_key_of_a_sort_stands_on_the_page(verb: str, keys: dict[str, object]) -> None:
    page = DOCS.read_text(encoding="utf-8")
    [section] = re.findall(rf"^## `{verb}.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    words = re.sub(r" \([^)]*\)", "", " ".join(section.split()))
    *first, last = keys
    assert re.search(rf"{', '.join(first)} (or|and) {last}\b", words)


def test_the_verbs_stand_in_the_help() -> None:
    said = run("--help")
    assert said.returncode == 0
    for verb in VERBS:
        assert f"\n  {verb} " in said.stdout


def test_the_version_is_that_of_the_package_and_that_of_segments() -> None:
    versions = f"shmacc-inspect {shmacc.__version__}, layout version {segment_layout.VERSION}\n"
    assert run("--version").stdout == versions


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["list"], 0),
        (["check"], 0),
        (["clean"], 0),
        (["clean", "no*"], 0),
        (["clean", "no*", "nobody"], 3),
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
        (["list", "-n", "a/b"], 2),
        (["list", "-n", "a", "-A"], 2),
        (["wait", "bias"], 2),
        (["wait", "bias", "--for", "step"], 2),
        (["wait", "bias", "--for", "gone=1"], 2),
        (["metrics", "--output", "a", "--listen", "b"], 2),
        (["metrics", "--listen", "localhost:x"], 2),
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


def test_a_name_alike_is_suggested(bias: ConditionalAccumulator, namespace: str) -> None:
    assert "there is bias" in run("show", "bais").stderr
    assert "there is watch" in run("wacth").stderr
    elsewhere = run("show", "bias", SHMACC_NAMESPACE=f"{namespace}-other")
    assert elsewhere.returncode == 3
    assert ":bias" in elsewhere.stderr
    assert bias.stats().attached == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list", "--help"],
        ["list"],
        ["check"],
        ["clean"],
        ["watch", "--count", "1", "--interval", "0.05"],
        ["wait", "nobody", "--for", "gone"],
        ["cancel", "bias"],
        ["cancel", "bias", "--yes"],
        ["metrics", "--json"],
    ],
)
@pytest.mark.usefixtures("bias")
def test_it_starts_without_what_it_does_not_need(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=LONG,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"numpy", "prometheus_client", "http.server"}
    assert not loaded & {"asyncio", "importlib.metadata", "subprocess", "tempfile", "socket"}
    assert not loaded & {"shutil", "textwrap"} or "--help" in arguments
    assert "json" not in loaded or "--json" in arguments
    if "--help" in arguments:
        assert "shmacc" not in loaded


COUNTING_THREADS = """
import atexit, os, sys

def _count():
    threads = len(os.listdir("/proc/self/task"))
    print(f"NumPy: {'numpy' in sys.modules}, threads: {threads}", file=sys.stderr)

atexit.register(_count)
"""


def test_check_starts_no_threads(tmp_path: Path) -> None:
    """NumPy's linear algebra would, one for each core, and that takes longer than the check."""
    (tmp_path / "sitecustomize.py").write_text(COUNTING_THREADS, encoding="utf-8")
    with SparseConditionalAccumulator(np.float32, [100, 4], "table") as acc:
        acc.apply_grad([1], np.ones((1, 4), np.float32))
        done = run("check", "table", PYTHONPATH=str(tmp_path))
        assert done.stderr.splitlines()[-1] == "NumPy: True, threads: 1"
        acc.unlink()
