"""The command ``shmacc-run``: runs a program as `shmacc.run` runs functions, like torchrun."""

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress

from shmacc._base.layout import LAYOUT_VERSION
from shmacc._run.child import Call, Surroundings, open_standard_streams
from shmacc._run.completion import Completion
from shmacc._run.prefixes import Prefixes
from shmacc._run.record import Called
from shmacc._run.run import count, limits, log_files, processors, supervise, variables
from shmacc._version import __version__
from shmacc.errors import (
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    ShmaccError,
    WorkerDiedError,
)

_DESCRIPTION = """\
Run a Python program once as chief and several times as worker, and start again what is killed.
SHMACC_ROLE (chief or worker), SHMACC_RANK (from 0; the chief's is -1) and SHMACC_WORKERS in the
environment tell a process what it is. The names that they use in shared memory are in a namespace
of their own, and are removed at the end. The exit status is that of the chief.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("shmacc-run", description=_DESCRIPTION)
    parser.add_argument(
        "--version",
        action="version",
        version=f"shmacc-run {__version__}, layout version {LAYOUT_VERSION}",
        help="print the versions of shmacc and of the layout of segments, and exit",
    )
    parser.add_argument(
        "--completion",
        action=Completion,
        help="print the script that makes this shell complete options and files, and exit",
    )
    parser.add_argument(
        "--workers", type=int, required=True, help="how many workers; with --ray: on each node"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run over the nodes of the Ray cluster at this address (auto: that of this machine): "
        "the chief on this node, workers on each; PROGRAM must be there on all of them",
    )
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
    parser.add_argument(
        "--threads",
        type=_threads,
        default=None if "OMP_NUM_THREADS" in os.environ else "share",
        help="how many threads NumPy, torch and others may use in each process: a number, share "
        "(the processors, divided by the workers) or none (as in this environment); default: "
        "share, if OMP_NUM_THREADS is not set",
    )
    parser.add_argument(
        "--cpus", choices=("spread",), help="spread: each worker has processors of its own"
    )
    parser.add_argument(
        "--log-dir",
        metavar="FOLDER",
        help="append what the processes print to chief.out, chief.err, worker-0.out, ... there",
    )
    parser.add_argument(
        "--no-prefix",
        action="store_true",
        help="put no 'worker 0: ' before what it prints, and leave the processes this terminal",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="tell of each process that is started, with its pid"
    )
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    asked = parser().parse_args(arguments)
    logging.basicConfig(format="shmacc-run: %(message)s")
    if asked.verbose:
        logging.getLogger("shmacc").setLevel(logging.INFO)
    # A launcher may let this process ignore SIGCHLD: then every exit status would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        _run(asked)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ShmaccError, OSError) as error:
        sys.stderr.write(f"shmacc-run: {error}\n")
        cause = error.__cause__
        if isinstance(error, WorkerDiedError) and isinstance(cause, SystemExit):
            return int(cause.code or 1)
        return 128 + (error.signal or 0) if isinstance(error, CancelledError) else 1
    return 0


def _run(asked: argparse.Namespace) -> None:
    program = [*(["-m"] if asked.module else []), asked.program, *asked.args]
    workers = count(asked.workers, "workers")
    if asked.ray is not None:
        _run_over_hosts(asked, program, workers)
        return
    calls = [Call("chief", -1, _become, (program,), answers=False)]
    calls += [Call("worker", rank, _become, (program,), answers=False) for rank in range(workers)]
    environment = dict(variables(asked.threads, workers))
    prefixes = None
    open_standard_streams()
    if workers and not asked.no_prefix and asked.log_dir is None:
        prefixes = Prefixes(calls)
        environment.setdefault("PYTHONUNBUFFERED", "1")  # else a pipe gets the lines late
    shares = processors(asked.cpus, workers)

    def arranged(call: Call, surroundings: Surroundings) -> Surroundings:
        logs = log_files(asked.log_dir, call)
        return surroundings._replace(
            environment=environment | surroundings.environment,
            cpus=shares.get(call.rank),
            output=prefixes.outputs(call) if prefixes is not None else logs,
        )

    def ended(call: Call) -> None:
        if prefixes is not None:
            prefixes.cut(call)

    with closing(prefixes) if prefixes is not None else nullcontext():
        # The program replaces the child (exec), so the child is forked.
        supervise(
            calls,
            "fork",
            limits(asked.restarts, asked.restart_on, asked.grace),
            asked.name,
            arranged,
            ended,
        )


def _run_over_hosts(asked: argparse.Namespace, program: list[str], workers: int) -> None:
    for option, given in ("--cpus", asked.cpus), ("--no-prefix", asked.no_prefix):
        if given:
            raise InvalidArgumentError(f"{option} is not there with --ray")
    try:
        hosts = importlib.import_module("shmacc.ray._run")  # late: that module imports this package
    except ModuleNotFoundError as error:
        raise FailedPreconditionError(f"--ray needs Ray, the extra 'ray': {error}") from error
    call = hosts.pickled("program", _become, (program, os.getcwd()))
    plan = hosts.Plan(
        call,
        call if workers else None,
        workers,
        answers=False,
        context="spawn",
        limits=limits(asked.restarts, asked.restart_on, asked.grace),
        threads=asked.threads,
        output=asked.log_dir and os.path.abspath(asked.log_dir),
        called=Called.here(),
    )
    hosts.over_cluster(plan, asked.name, asked.ray)


def _threads(text: str) -> int | str | None:
    return {"share": "share", "none": None}[text] if text in {"share", "none"} else int(text)


def _become(program: list[str], folder: str = ".") -> None:
    with suppress(OSError):  # another node may lack the folder
        os.chdir(folder)
    os.execv(sys.executable, [sys.executable, *program])  # noqa: S606  what the user asked for
