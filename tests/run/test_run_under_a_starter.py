"""The process of a run was started by another one, which starts it again: a node's Ray.

If it is killed, the names stay for the next one. If its starter ends, too, nobody gets them.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import pytest
from helpers.support import until

from shmacc import testing
from shmacc._base import names
from shmacc._run import cleaner

_VARIABLE: Final = "SHMACC_TEST_OF_A_STARTER"

_RUN: Final = f"""
import signal, sys
import shmacc
from shmacc._run.namespaces import of_children
starter, own = int(sys.argv[1]), ("{_VARIABLE}=" + sys.argv[2],)
with of_children("inner", ["chief"], 3, starter=starter, variables=own):
    print(flush=True)
    signal.pause()
"""


def _started(*command: str, **variables: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*command], env={**os.environ, **variables}, stdout=subprocess.PIPE, start_new_session=True
    )


@pytest.fixture
def starter() -> Iterator["subprocess.Popen[bytes]"]:
    with _started("sleep", "600") as process:
        yield process
        process.kill()


def _killed_run(starter: "subprocess.Popen[bytes]", value: str) -> None:
    with _started(sys.executable, "-P", "-c", _RUN, str(starter.pid), value) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.kill()


def test_names_stay_as_long_as_the_starter_lives(
    starter: "subprocess.Popen[bytes]", namespace: str
) -> None:
    with _started("sleep", "600", **{_VARIABLE: namespace}) as older:
        _killed_run(starter, namespace)
        time.sleep(3.0)  # the cleaner looks for two seconds, and then each second
        assert testing.leaked_names(f"{namespace}.inner")
        assert older.poll() is None
        starter.kill()
        starter.wait()
        assert older.wait() == -signal.SIGKILL, "it might make a name again"
        until(lambda: not testing.leaked_names(f"{namespace}.inner"))


def test_names_stay_if_another_starter_has_begun(
    starter: "subprocess.Popen[bytes]", namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _killed_run(starter, namespace)
    job = cleaner.Job(
        *("", names.SHM_DIRECTORY, f"{namespace}.inner"),
        named=True,
        starter=starter.pid,
        variables=(f"{_VARIABLE}={namespace}",),
    )
    starter.send_signal(signal.SIGSTOP)  # the run's own cleaner waits on
    with _started("sleep", "600", **{_VARIABLE: namespace}) as later:
        with monkeypatch.context() as patched:
            patched.setattr(time, "clock_gettime", lambda _: 0.0)
            cleaner._outlive(job, begun=0)
        assert testing.leaked_names(f"{namespace}.inner")
        assert later.poll() is None
        cleaner._outlive(job, begun=0)
        assert later.wait() == -signal.SIGKILL
    assert not testing.leaked_names(f"{namespace}.inner")
