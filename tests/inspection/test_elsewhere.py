"""`shmacc-inspect` in another pid namespace than the processes', or as a user who may only read."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest
from helpers import inspect_tool
from helpers import segment_layout as layout
from helpers.apart import Crew, needs_root
from helpers.inspect_tool import ask, path_of, run, scribble, start, stopped_with_the_lock
from helpers.stepping_namespaces import needs_pid_namespaces
from helpers.support import LONG, run_to_end, until

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, inspection

BESIDE: Final = ("unshare", "--pid", "--fork", "--mount-proc")
AS_NOBODY: Final = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
_INSTALLED: Final = ("shmacc", "numpy", "posix_ipc", "ml_dtypes")
_NOT_NEEDED: Final = shutil.ignore_patterns("site-packages", "test", "config-*", "idlelib")
_START: Final = "import sys; from shmacc_inspect.start import main; sys.exit(main())"

pytestmark = [
    needs_pid_namespaces,
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare"),
]


@contextmanager
def command_for_everyone() -> Iterator[tuple[str, ...]]:
    """Yield the command that starts a copy of `shmacc-inspect` that everyone can read.

    The checkout and the Python under test may be where only their owner can read.
    """
    # Use /tmp: TMPDIR may be readable only to this user.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home, packages = Path(folder), Path(folder, "packages")
        python = shutil.copy(sys.executable, folder)
        standard = Path(sysconfig.get_path("stdlib"))
        shutil.copytree(standard, home / "lib" / standard.name, ignore=_NOT_NEEDED)
        library = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
        if library.suffix != ".a" and library.exists():
            shutil.copy(library, home / "lib")
        for distribution in _INSTALLED:
            _copy_installed(distribution, packages)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        search = (f"LD_LIBRARY_PATH={home}/lib", f"PYTHONHOME={home}", f"PYTHONPATH={packages}")
        yield ("env", *search, python, "-P", "-c", _START)


def _copy_installed(distribution: str, packages: Path) -> None:
    for file in metadata.files(distribution) or ():
        if ".." not in file.parts:  # only scripts in bin have such a path
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), packages / file)


@pytest.fixture
def holder(crew: Crew) -> Iterator[int]:
    """Stop a process that holds a table's lock, while another waits in the queue; yield its pid."""
    with SparseConditionalAccumulator("f4", [50_000, 16], "table", mode=0o644) as acc:
        start(crew, inspect_tool.wait_in_queue, "table", 10**6)
        until(lambda: acc.stats().waiting == 1)
        with stopped_with_the_lock(crew, "table") as pid:
            yield pid
        acc.cancel()
        acc.unlink()


@pytest.mark.patience(LONG)
def test_every_verb_works_from_a_sibling_namespace_of_a_stopped_process(holder: int) -> None:
    look_at_the_stopped(holder, before=BESIDE)
    how: dict[str, Any] = {"before": BESIDE}
    [line] = run("watch", "--interval", "0.1", "--count", "1", **how).stdout.splitlines()
    assert f" lock={holder}*" in line
    # From there, the command cannot see that the process is stopped.
    found = json.loads(run("check", "table", "--json", **how).stdout)["findings"]
    assert not [finding for finding in found if "_stopped" in finding["kind"]]
    assert run("clean", **how).stdout == ""
    assert f"{holder}*" in run("remove", "table", **how).stderr
    assert run("wait", "table", "--for", "count=0", **how).returncode == 0
    metrics = {each["name"]: each["samples"] for each in ask("metrics", **how)["metrics"]}
    assert [each["value"] for each in metrics["shmacc_attached_alive"]] == [3]
    cancelling = run("cancel", "table", **how)
    assert "would cancel the take of pid" in cancelling.stdout
    assert "* for 1000000 gradients" in cancelling.stdout


@needs_root
@pytest.mark.patience(LONG)
def test_every_verb_works_as_another_user(holder: int) -> None:
    with command_for_everyone() as command:
        how: dict[str, Any] = {"before": (*BESIDE, *AS_NOBODY), "command": command}
        look_at_the_stopped(holder, **how)
        cancelling = run("cancel", "table", **how)
    assert (cancelling.returncode, "to cancel is to write" in cancelling.stderr) == (1, True)


def look_at_the_stopped(holder: int, **how: Any) -> None:
    [segment] = ask("list", **how)["segments"]
    assert (segment["state"], segment["attached_alive"]) == ("sound", 3)
    shown = ask("show", "table", **how)
    assert {process["pid_is_here"] for process in shown["processes"]} == {False}
    assert {process["condition"] for process in shown["processes"]} == {""}
    lock = shown["lock"]
    assert (lock["pid"], lock["pid_is_here"]) == (holder, False)
    assert f"held by pid {holder}*, in an operation for" in run("show", "table", **how).stdout


def test_an_event_from_another_pid_namespace_is_marked() -> None:
    with ConditionalAccumulator("f4", [2], "acc") as acc:
        acc.cancel()
        assert run("cancel", "acc", "--yes", before=BESIDE).returncode == 0
        here, there = ask("show", "acc")["events"]
        assert (here["pid"], here["pid_is_here"]) == (os.getpid(), True)
        assert (there["pid"], there["pid_is_here"]) == (1, False)
        assert re.search(r"cancelled +1\* ", run("show", "acc").stdout)
        here, there = ask("show", "acc", before=BESIDE)["events"]
        assert here["pid_is_here"] is False
        acc.unlink()


def test_a_reused_pid_namespace_number_is_not_taken_for_the_old_namespace(crew: Crew) -> None:
    with ConditionalAccumulator("f4", [2], "acc") as acc:
        start(crew, inspect_tool.idle, "acc").kill()
        [process] = [each for each in inspection.describe("acc").processes if not each.alive]
        assert process.pid_is_here
        place = layout.region("participants") + process.entry * 128
        moment = struct.pack("<q", 1)  # when the machine was started
        scribble(path_of("acc"), place + layout.Participant.attached_ns.offset, moment)
        number = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116  a link's target
        said = _python(
            "from shmacc import inspection\n"
            "look = inspection.Look()\n"
            f"look.own_namespace = {number}\n"
            "seen = inspection.describe('acc', look).processes\n"
            "print([each.pid_is_here for each in seen if not each.alive])\n",
            BESIDE,
        )
        assert said == "[False]\n"
        acc.unlink()


def test_a_proc_of_another_pid_namespace_is_not_used() -> None:
    """Process 1 in that /proc is not process 1 of the command's pid namespace."""
    said = _python(
        "from shmacc import inspection\n"
        "look = inspection.Look()\n"
        "print(repr(look.condition(1) + look.command(1)))\n",
        ("unshare", "--pid", "--fork"),
    )
    assert said == "''\n"


def _python(script: str, before: tuple[str, ...]) -> str:
    done = run_to_end([*before, sys.executable, "-P", "-c", script])
    return done.stdout
