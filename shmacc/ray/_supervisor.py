"""The supervisor of a run on one node: an actor that starts the run's processes there.

It does what `shmacc.run` does, in a thread of its own. It is a detached actor, which Ray restarts
on its node: so there is always a supervisor to clean up after the caller of `run` has died. But
silence of the caller does not mean its death: it may only be stopped. So the caller also makes the
actor `Life`, which lives as long as the caller. The run ends once both are silent.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import ray

from shmacc._base import names
from shmacc._run import cleaner, run
from shmacc._run.child import Call, Surroundings
from shmacc._run.children import Interrupted, Run
from shmacc._run.namespaces import Surrounded, of_children
from shmacc._run.prefixes import Prefixes
from shmacc._run.record import State
from shmacc._run.spawning import Starter
from shmacc._segment import run_records
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, ShmaccError
from shmacc.ray._exchange import Exchange, Found, Phase, Plan, Wanted
from shmacc.ray._head import answer_of_head, kill, shown
from shmacc.ray._parts import (
    ADDRESS_VARIABLE,
    RUN_VARIABLE,
    check_version,
    find_actor,
    namespace_of,
)

SUPERVISORS = "shmacc supervisors"  # a Ray namespace that no run's actors have
_LOOK = 1.0  # seconds between two checks whether a caller or an earlier run has ended
_LEASE = 5.0  # seconds without a call until a caller whose `Life` has ended counts as dead
_EARLIER = 20.0  # seconds to wait for the end of an earlier run of this name, if its caller died
_ACTORS = 30.0  # seconds for Ray to end the actors that the program has made
_BY_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")  # set by Ray for its actor, not for children


class Life:
    """An actor that lives as long as the process that called `run` and made it."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


class Supervisor:
    """Starts the run's processes on its node, and restarts killed ones."""

    def __init__(self, version: tuple[str, int], named: bool) -> None:
        """Check that the node can take part.

        Args:
            version: The caller's version of the library.
            named: Whether the caller gave the run a name.

        Raises:
            FailedPreconditionError: The node has another version of the library, or no namespace.
            InvalidArgumentError: The names would be too long.
        """
        check_version(version)
        self._life, self._named = os.environ[RUN_VARIABLE], named
        self._name, self._namespace = self._life.partition("/")[0], names.current_namespace() or ""
        own = {names.NAMESPACE_VARIABLE: self._namespace, RUN_VARIABLE: self._life}
        self._variables = tuple(f"{variable}={value}" for variable, value in own.items())
        outer = self._namespace.removesuffix(self._name)
        if outer == ".":
            raise FailedPreconditionError(
                f"Ray's processes there have no {names.NAMESPACE_VARIABLE}, and those on the "
                "caller's node have one"
            )
        # Remove the run's name: `of_children` will add it to this process's namespace again.
        os.environ[names.NAMESPACE_VARIABLE] = outer.removesuffix(".")
        given = Path("/proc/self/environ").read_bytes()
        for variable in _BY_RAY:
            if f"\0{variable}=".encode() not in b"\0" + given:
                os.environ.pop(variable, None)
        self._node = ray.get_runtime_context().get_node_id()
        self._label = shown(self._node)
        self._fresh = not names.files_in(self._namespace)
        self._heard, self._exchange = time.monotonic(), Exchange()
        log = logging.getLogger("shmacc")
        log.setLevel(logging.INFO)
        log.addFilter(self._exchange.log)
        self._thread = threading.Thread(target=self._run, name="shmacc run")
        self._thread.start()
        for look in self._look_after, _end_with_ray:
            threading.Thread(target=look, daemon=True).start()

    def exchange(self, wanted: Wanted, seen: int, plan: Plan | None = None) -> Found:
        """Accept what the caller wants, and the plan; return the node's state and new output."""
        self._heard = time.monotonic()
        return self._exchange.exchange(wanted, seen, plan)

    def signal(self, number: int) -> bool:
        """Pass a signal on to the processes; return whether any of them handles it."""
        return self._exchange.signal(number)

    def _run(self) -> None:
        """Run the plan; once the caller wants it, let go of the run's names."""
        exchange, started = self._exchange, None
        exchange.wait_until(lambda: exchange.plan or exchange.wanted.leaves)
        try:
            with contextlib.ExitStack() as stack:
                if exchange.plan is not None:
                    try:
                        started = self._prepared(stack, exchange.plan)
                        exchange.note(phase=Phase.READY)
                        exchange.tell_result(started.result())
                    except BaseException as error:  # noqa: BLE001  the caller's
                        self._tell(error, started)
                    if started is not None:
                        exchange.note(phase=Phase.IDLE)
                    exchange.wait_until(lambda: exchange.wanted.leaves)
                # If this node has not begun a named run, the actors may belong to an earlier run.
                if exchange.wanted.turn == sys.maxsize and (started or not self._named):
                    end_actors(self._name)
                # Their actors were killed, but the processes may live for a moment, and make names.
                for pid in cleaner.executed_with(self._variables):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                removes = exchange.wanted.removes
                if not (self._fresh if removes is None else removes):
                    raise Interrupted  # noqa: TRY301  then the names stay
                if exchange.plan is None:  # an earlier supervisor began the run, and was killed
                    run_records.remove_namespace(self._namespace)
        except BaseException as error:  # noqa: BLE001  the caller's
            self._tell(error, started)
        exchange.note(phase=Phase.GONE)

    def _prepared(self, stack: contextlib.ExitStack, plan: Plan) -> Run:
        """Take the run's namespace; return the run, ready to start."""
        exchange = self._exchange
        calls, context = plan.calls(exchange.wanted.first), ray.get_runtime_context()
        starter = Starter(plan.context, calls, imports=False)
        before, prefixes = run.variables(plan.threads, plan.workers), None
        if plan.output is None:
            prefixes = Prefixes(calls, exchange.write, lambda call: f"{call} on {self._label}")
            stack.callback(prefixes.close)
            before["PYTHONUNBUFFERED"] = "1"  # else a pipe gets the lines late
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        of_node = {
            RUN_VARIABLE: self._life,
            ADDRESS_VARIABLE: addresses[self._node],
            "SHMACC_NODE": self._node,
            "RAY_ADDRESS": context.gcs_address,
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": dict(context.runtime_env)}),
        }

        def arranged(call: Call, surroundings: Surroundings) -> Surroundings:
            return surroundings._replace(
                environment=of_node | surroundings.environment,
                before=before,
                output=prefixes.paths(call) if prefixes else run.log_files(plan.output, call),
            )

        surrounded = self._surrounded(stack, plan, calls)
        for place, call in enumerate(calls):
            if call.rank in {-1, *exchange.wanted.finished}:  # the chief, unless it is to run here
                surrounded.record.note(place, State.FINISHED)
        ended = prefixes.cut if prefixes else lambda _: None
        return run.prepared(calls, starter, plan.limits, exchange, surrounded, arranged, ended)

    def _surrounded(self, stack: contextlib.ExitStack, plan: Plan, calls: list[Call]) -> Surrounded:
        """Take the namespace; if a run without a caller still has it, wait a while for its end."""
        # Once Ray has ended here, nobody can go on with the names of a run without a name.
        starter = 0 if self._named else os.getppid()
        of_run = plan.limits.restarts, plan.called, starter, self._variables
        given = self._name, list(map(str, calls)), *of_run
        until = time.monotonic() + _EARLIER
        while True:
            try:
                return stack.enter_context(of_children(*given))
            except FailedPreconditionError as error:
                if not error.pids or self._exchange.over:
                    raise
                if time.monotonic() > until:
                    raise FailedPreconditionError(
                        f"{error}. If that is another Ray node's on this machine, start each with "
                        f"a {names.NAMESPACE_VARIABLE} of its own, and this program with its node's"
                    ).with_fields(pids=error.pids) from None
                time.sleep(_LOOK)

    def _tell(self, error: BaseException, started: Run | None) -> None:
        if isinstance(error, Interrupted):
            return
        if isinstance(error, ShmaccError) and (started is None or error is not started.raised):
            error.args = (f"Node {self._label}: {error}",)
        status = error.__cause__.code if isinstance(error.__cause__, SystemExit) else None
        try:
            pickled = ray.cloudpickle.dumps(error)
        except Exception:  # noqa: BLE001  whatever its class does
            pickled = b""
        self._exchange.note(raised=(f"{type(error).__name__}: {error}", pickled, status))

    def _look_after(self) -> None:
        """Wait until the caller has died, then end the run and this actor."""
        while _may_live(self._life):
            time.sleep(_LOOK)
        while (left := self._heard + _LEASE - time.monotonic()) > 0:
            time.sleep(left)
        end, removes = signal.SIGTERM, not self._named
        self._exchange.want(Wanted(sys.maxsize, ended_by=end, leaves=True, removes=removes))
        self._thread.join()
        ray.kill(ray.get_runtime_context().current_actor)


def _end_with_ray() -> None:
    """End this process once the node's Ray, which started it, has ended; its cleaner does the rest.

    Ray itself ends its processes then, but not if its head was started again without its state.
    """
    ray_here = os.getppid()
    while os.getppid() == ray_here:
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGKILL)


def _may_live(life: str) -> bool:
    """Wait for the end of a `Life`; return whether Ray may restart it, or its fate is unknown."""
    try:
        actor = find_actor(life, namespace=SUPERVISORS)
        if actor is not None:
            ray.get(actor.wait.remote())
    except (ray.exceptions.RayError, DeadlineExceededError):
        return True
    return actor is not None


def end_actors(run_name: str) -> None:
    """Kill the actors that a run's program has left. Kill owners first, since they make others."""
    namespace, until = namespace_of(run_name), time.monotonic() + _ACTORS

    def ask() -> list[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if actor["namespace"] == namespace]

    with contextlib.suppress(DeadlineExceededError):
        while found := answer_of_head(f"actors of {run_name}", ask, until):
            for name in sorted(found, key=lambda name: not name.endswith("/owner")):
                actor = find_actor(name, until, namespace=namespace)
                if actor is not None:
                    kill(actor)
