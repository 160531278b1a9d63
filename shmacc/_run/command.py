"""The command ``shmacc-run``: `shmacc.run` for programs in files, as torchrun is for torch's."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

from shmacc._run.run import run
from shmacc.errors import ShmaccError, WorkerDiedError

_DESCRIPTION = """\
Run a Python program once as chief and several times as worker, and start again what is killed.
SHMACC_ROLE (chief or worker), SHMACC_RANK (from 0; the chief's is -1) and SHMACC_WORKERS in the
environment tell a process what it is. The names that they use in shared memory are in a namespace
of their own, and are removed at the end. The exit status is that of the chief.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser("shmacc-run", description=_DESCRIPTION)
    parser.add_argument("--workers", type=int, required=True, help="how many workers")
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        help="how often each process may be started again within 60 seconds (default: 3)",
    )
    parser.add_argument(
        "--restart-on",
        choices=("killed", "failure"),
        default="killed",
        help="failure: also after another exit status than 0",
    )
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds from the chief's end to SIGTERM"
    )
    parser.add_argument(
        "--name", help="the namespace; after Ctrl-C or a kill the same command goes on with the run"
    )
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    asked = parser.parse_args(arguments)
    logging.basicConfig(format="shmacc-run: %(message)s")
    program = [*(["-m"] if asked.module else []), asked.program, *asked.args]
    try:
        run(
            _become,
            _become_worker if asked.workers else None,
            workers=asked.workers,
            args=(program,),
            restarts=asked.restarts,
            restart_on=asked.restart_on,
            grace=asked.grace,
            name=asked.name,
        )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ShmaccError as error:
        sys.stderr.write(f"shmacc-run: {error}\n")
        status = error.__cause__ if isinstance(error, WorkerDiedError) else None
        return int(status.code or 0) if isinstance(status, SystemExit) else 1
    return 0


def _become(program: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, *program])  # noqa: S606  what the user asked for


def _become_worker(_: int, program: list[str]) -> None:
    _become(program)
