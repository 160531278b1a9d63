"""`shmacc-inspect` has help, a manual, exit statuses, completion and a quick start."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import segment_layout
from helpers.inspect_tool import COMMAND, run
from helpers.pages import PAGES, ROOT, page_id
from helpers.support import run_to_end

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection
from shmacc.inspection import _unlinked
from shmacc_inspect import sorting
from shmacc_inspect.parsers import VERBS, parser_of

DOCS = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
OF_COMMAND = {"inspect", "standing-still"}
MANUAL = (ROOT / "docs" / "inspect" / "shmacc-inspect.1").read_text(encoding="utf-8")
LONG_NAME = "n" * 5000


@pytest.fixture
def bias() -> Iterator[ConditionalAccumulator]:
    with ConditionalAccumulator(np.float64, [3], "bias") as acc:
        yield acc
        acc.unlink()


def section_of(verb: str) -> str:
    [section] = re.findall(rf"^## `{verb}.*?(?=^## |\Z)", DOCS, re.DOTALL | re.MULTILINE)
    return str(section)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_help_and_its_place_in_the_docs(verb: str) -> None:
    said = run(verb, "--help")
    assert said.returncode == 0
    assert run("help", verb).stdout == said.stdout
    assert f"\n  {verb} " in run("--help").stdout
    for words in (f"shmacc-inspect {verb}", "Examples:", "--json"):
        assert words in said.stdout
    assert f"shmacc-inspect {verb}" in section_of(verb)
    manual = MANUAL.replace("\\-", "-")
    titles = rf"^\.SH (?:{verb.upper()}|OPTIONS OF EVERY VERB)\n.*?(?=^\.SH )"
    own, common = re.findall(titles, manual, re.DOTALL | re.MULTILINE)
    for option in set(re.findall(r"--[a-z][a-z-]+", said.stdout)) - {"--help"}:
        assert option in own + common, f"{option} of {verb} is not documented"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pages_use_existing_options(page: Path) -> None:
    """Pages write `shmacc-inspect VERB ...`; the command's own pages also write `VERB ...`."""
    text = page.read_text(encoding="utf-8")
    for verb in VERBS:
        before = "(?:shmacc-inspect |`)" if page.stem in OF_COMMAND else "shmacc-inspect "
        commands = re.findall(rf"{before}{verb}\b([^`|\n#&;]*)", text)
        declared = [option for each in parser_of(verb).declared() for option in each.option_strings]
        for option in re.findall(r"(?<!\S)(--?[a-zA-Z][a-z-]*)", " ".join(commands)):
            assert option in declared, f"{verb} {option}"


def test_the_page_names_every_sort_key() -> None:
    for verb, keys in (("list", sorting.SORTS_OF_LIST), ("watch", sorting.SORTS)):
        words = re.sub(r" \([^)]*\)", "", " ".join(section_of(verb).split()))
        *first, last = keys
        assert re.search(rf"{', '.join(first)} (or|and) {last}\b", words)


def test_version_prints_the_package_and_the_layout_version() -> None:
    versions = f"shmacc-inspect {shmacc.__version__}, layout version {segment_layout.VERSION}\n"
    assert run("--version").stdout == versions


LINES = {
    0: "help; list; check; clean; clean no*; wait nobody no* --for gone",
    3: "clean no* nobody; list no*; show no*; watch no* --count 1; check no*; metrics no*; "
    "remove no* --yes; wait nobody --for step=1; watch nobody --count 1; "
    "list nobody --json; show nobody --json; check nobody --json; metrics nobody --json; "
    "remove nobody --yes --json; cancel nobody --yes --json; show shmacc.other:nobody",
    2: "; frobnicate; show; show shmacc.a%41; show bias --rows -1; list --sort colour; "
    "list -n a -A; "
    "clean --older-than soon; watch --interval 0; watch --interval nan; watch --interval 1e300; "
    "watch --interval 9999999999999d; watch --count 99999999999999999999; "
    "wait bias; wait bias --for step; wait bias --for gone=1; "
    "metrics --output a --listen b; metrics --listen localhost:x; metrics --listen 127.0.0.1",
}
TOO_LONG = (
    f"show {LONG_NAME}; show {LONG_NAME}*; show shmacc.{LONG_NAME}; list -n {LONG_NAME}; "
    f"wait {LONG_NAME} --for gone; wait x --for {LONG_NAME}; {LONG_NAME}; help {LONG_NAME}"
)


@pytest.mark.parametrize("status", LINES)
def test_exit_statuses_are_as_documented(status: int) -> None:
    for line in LINES[status].split("; "):
        done = run(*line.split())
        assert done.returncode == status, (line, done.stderr)
        assert status == 0 or (done.stdout == "" and done.stderr), line


def test_a_name_of_5000_characters_is_shortened_in_every_error() -> None:
    for line in TOO_LONG.split("; "):
        done = run(*line.split())
        assert done.returncode in {2, 3}, line
        assert len(done.stderr) < 1000, line
    with pytest.raises(errors.InvalidArgumentError, match="5002 characters") as refused:
        ConditionalAccumulator(np.float32, [2], LONG_NAME)
    assert len(str(refused.value)) < 500


def test_errors_of_metrics_name_the_path_or_the_address(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "x"
    done = run("metrics", "--output", str(missing))
    assert done.returncode == 1
    assert f"--output: {missing}: No such file or directory" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("metrics", "--listen", address)
    assert done.returncode == 1
    assert f"--listen: http://{address}/metrics: Address already in use" in done.stderr


def test_a_similar_name_is_suggested(bias: ConditionalAccumulator, namespace: str) -> None:
    assert "there is bias" in run("show", "bais").stderr
    assert "there is watch" in run("wacth").stderr
    assert "there is list" in run("help", "lsit").stderr
    elsewhere = run("show", "bias", SHMACC_NAMESPACE=f"{namespace}-other")
    assert (elsewhere.returncode, ":bias" in elsewhere.stderr) == (3, True)
    assert bias.stats().attached == 1


def completed(*words: str, how: str = "--complete") -> list[str]:
    """Return the completions of the last word."""
    return run(how, str(len(words)), *words).stdout.splitlines()


def test_values_of_options_are_completed_and_fish_gets_descriptions() -> None:
    assert completed("wait", "x", "--for", "") == ["count=", "gone", "step="]
    assert completed("wait", "x", "--for", "st") == ["step="]
    assert completed("help", "wat") == ["watch"]
    described = "--complete-described"
    assert f"check\t{VERBS['check']}" in completed("", how=described)
    (orphaned,) = completed("list", "--orph", how=described)
    assert orphaned == "--orphaned\tonly those that no living process has attached"
    # Values of options have no descriptions.
    for verb in VERBS:
        for action in parser_of(verb).declared():
            for option in action.option_strings:
                found = completed(verb, option, "", how=described) if action.nargs is None else []
                assert all("\t" not in candidate for candidate in found), (verb, option)
    assert described in run("--completion", "fish").stdout
    assert described not in run("--completion", "bash").stdout


def test_removal_at_logout_is_noted_only_where_logind_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container image may have logind's folders, but no logind, which would remove names."""
    folders = [tmp_path / place for place in ("etc", "run")]
    monkeypatch.setattr(_unlinked, "_LOGIND_FOLDERS", tuple(map(str, folders)))
    monkeypatch.setattr(_unlinked, "_LOGIND_USERS", str(tmp_path))
    assert not _unlinked.goes_at_logout(1000, inspection.Look())
    own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    monkeypatch.setattr(_unlinked, "_LOGIND", own)
    assert _unlinked.goes_at_logout(1000, inspection.Look())
    assert not _unlinked.goes_at_logout(0, inspection.Look())
    # Each of these files overrides those written before it.
    for file, says in (
        ("run/logind.conf", "no"),
        ("etc/logind.conf", "yes"),
        ("run/logind.conf.d/50-ipc.conf", "no"),
        ("run/logind.conf.d/60-ipc.conf", "yes"),
        ("etc/logind.conf.d/60-ipc.conf", "no"),
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[Login]\n#RemoveIPC=?\nRemoveIPC={says}\n", encoding="utf-8")
        assert _unlinked.goes_at_logout(1000, inspection.Look()) == (says == "yes")


QUICK = "list --help; list; check; watch --count 1 --interval 0.05; wait nobody --for gone; "
QUICK += "cancel bias --yes; metrics --json"


@pytest.mark.parametrize("line", QUICK.split("; "))
@pytest.mark.usefixtures("bias")
def test_the_command_imports_only_what_it_needs(line: str) -> None:
    done = run_to_end([sys.executable, "-X", "importtime", COMMAND, *line.split()])
    loaded = {entry.rpartition("|")[2].strip() for entry in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"numpy", "prometheus_client", "http.server"}
    assert not loaded & {"asyncio", "importlib.metadata", "subprocess", "tempfile", "socket"}
    assert not loaded & {"shutil", "textwrap"} or "--help" in line
    assert "json" not in loaded or "--json" in line
    assert "shmacc" not in loaded or "--help" not in line


COUNTING_THREADS = """
import atexit, os, sys

def _count():
    threads = len(os.listdir("/proc/self/task"))
    print(f"NumPy: {'numpy' in sys.modules}, threads: {threads}", file=sys.stderr)

atexit.register(_count)
"""


def test_check_starts_no_threads(tmp_path: Path) -> None:
    """NumPy's linear algebra would start a thread for each core, and take longer than the check."""
    (tmp_path / "sitecustomize.py").write_text(COUNTING_THREADS, encoding="utf-8")
    with SparseConditionalAccumulator(np.float32, [100, 4], "table") as acc:
        acc.apply_grad([1], np.ones((1, 4), np.float32))
        done = run("check", "table", PYTHONPATH=str(tmp_path))
        assert done.stderr.splitlines()[-1] == "NumPy: False, threads: 1"
        acc.unlink()


@pytest.mark.parametrize(("status", "pages"), [(0, False), (1, True), (2, True), (4, False)])
def test_the_cron_line_pages_if_action_is_needed(tmp_path: Path, status: int, pages: bool) -> None:
    """The line is in docs/operating.md. It ignores segments that could not be read or compared."""
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(shmacc-inspect check [^`]*page-somebody)`", page)
    assert line in run("check", "--help").stdout
    for name, does in (("shmacc-inspect", f"exit {status}"), ("page-somebody", "echo paged")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n", encoding="ascii")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", line], env=path, capture_output=True, check=False)
    assert (done.stdout == b"paged\n") == pages
