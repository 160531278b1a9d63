"""`shmacc.ray.run` over the nodes of a cluster, and `shmacc-run` with ``--ray``."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from on_ray.nodes import Nodes, wait_for

import shmacc.ray
from shmacc.ray import _parts
from shmacc.ray._head import living_nodes
from shmacc.ray._supervisor import SUPERVISORS

pytestmark = [pytest.mark.timeout(600), pytest.mark.patience(200)]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes cannot import it


@pytest.fixture(autouse=True)
def nobody_dead_counts(request: pytest.FixtureRequest) -> None:
    """Wait until Ray no longer lists nodes that tests have killed: a run uses all nodes."""
    if "nodes" in request.fixturenames:
        cluster = request.getfixturevalue("nodes").cluster
        there = {node.node_id for node in cluster.list_all_nodes()}
        wait_for(lambda: living_nodes(None) == there)


def gradient(update: int, rank: int) -> tuple[Any, Any]:
    """Return a worker's gradient: whole numbers, whose sums have the same bits in any order.

    Row 0 counts the updates, also after a void step.
    """
    random = np.random.default_rng((update, rank))
    rows = np.unique([0, *random.integers(1, 20, size=8)])
    values = random.integers(-8, 8, size=(len(rows), 3))
    values[0] = -(2**6)
    return rows, values.astype(np.float32)


def work(rank: int, workers: int, _: Path) -> None:
    assert len(os.environ["SHMACC_NODE"]) > 8
    params = shmacc.Parameters.attach("params", timeout=200)
    group = shmacc.AccumulatorGroup.attach("model", timeout=200)
    for step in group.steps(timeout=200):
        update = int(params["table"][0, 0]) // workers
        group.apply({"table": gradient(update, rank)}, step, contributor=rank)


def lead(workers: int, over: Path) -> Any:
    """Train until the file `over` exists; return the table."""
    table, sgd = {"table": np.zeros((20, 3), np.float32)}, shmacc.optim.SGD(2**-6)
    with (
        shmacc.ray.Parameters(table, "params", optimizer=sgd) as params,
        shmacc.ray.AccumulatorGroup(
            params.member_specs(sparse=["table"]), "model", reduction_type="SUM"
        ) as group,
    ):
        while not over.exists():
            print("update", int(params["table"][0, 0]) // workers, flush=True)  # noqa: T201
            with group.round(workers, timeout=200) as taken:
                params.update(taken)
        group.finish()
        return np.array(params["table"])


def on_one_host(workers: int, updates: int) -> Any:
    table = np.zeros((20, 3), np.float32)
    for update in range(updates):
        for rank in range(workers):
            rows, values = gradient(update, rank)
            table[rows] -= values * np.float32(2**-6)
    return table


class Seen(logging.Handler):
    """Collects what a run logs about its processes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def pid(self, role: str) -> int:
        """Return the pid of the process that was last started for a role."""
        found = re.findall(rf"{role} has started \(pid (\d+)\)", "\n".join(self.lines))
        return int(found[-1])


@pytest.fixture
def seen() -> Iterator[Seen]:
    handler, logger = Seen(), logging.getLogger("shmacc")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def pids(namespace: str, *ends: str) -> list[int]:
    """Return the pids of the actors in a Ray namespace whose names end with one of `ends`."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].endswith(ends or ("",)):
            handle = ray.get_actor(actor["name"], namespace=namespace)
            found.append(ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=30))
    return found


def is_there(nodes: Nodes, run: str) -> bool:
    """Return whether nodes have a process or actor of a run whose name begins with `run`."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    if {SUPERVISORS} & {each["namespace"] for each in actors}:
        return True
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = environment.read_bytes()
            if f"SHMACC_RAY_RUN={run}".encode() in variables and nodes.run.encode() in variables:
                return True
    return any(each["namespace"].startswith(f"shmacc.{run}") for each in actors)


def nothing_is_left(nodes: Nodes, run: str) -> bool:
    """Return whether no node has a name, actor or process of a run that begins with `run`."""
    names = [name for name in nodes.left() if f".{run}" in name]
    return not is_there(nodes, run) and not names


def test_a_run_goes_on_through_each_kind_of_death_with_the_bits_of_one_host(
    nodes: Nodes, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, Ray's head takes too long to make the supervisor of a node that joins."""
    out, over = tmp_path / "chief.out", tmp_path / "over"

    def update() -> int:
        found = re.findall(r"^update (\d+)$", out.read_text() if out.exists() else "", re.MULTILINE)
        return int(found[-1]) if found else -1

    def kill(*killed: int) -> None:
        after = update() + 3
        wait_for(lambda: update() >= after, 200)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    start: Any = shmacc.ray.run
    given = {"workers_per_node": 1, "args": (3, over), "name": "chaos", "output": tmp_path}
    with ThreadPoolExecutor(1) as pool:  # Ray starts nodes in the main thread only
        running = pool.submit(start, lead, work, **given)
        try:
            kill()
            kill(seen.pid("chief"))
            kill(seen.pid("worker 1"))
            kill(*pids("shmacc.chaos", "/owner"))
            kill(*pids("shmacc.chaos", f"/host {nodes.id(1)}"))
            for pid in pids(SUPERVISORS):  # one of them watches whether the caller lives
                kill(pid)
            make, late = _parts.make_actor, iter([True])

            def make_actor(*args: Any, until: float, **options: Any) -> Any:
                actor = make(*args, until=until + 60, **options)
                if next(late, False):
                    raise shmacc.errors.DeadlineExceededError("too late")
                return actor

            monkeypatch.setattr("shmacc.ray._run_nodes.make_actor", make_actor)
            with nodes.gone(2):
                told = "gone, and its processes"
                wait_for(lambda: any(line.endswith(told) for line in seen.lines))
            kill()
            assert next(late, False) is False
        finally:
            over.touch()
        table = running.result()
    assert table.tobytes() == on_one_host(3, int(table[0, 0]) // 3).tobytes()
    wait_for(lambda: nothing_is_left(nodes, "chaos"))


@contextlib.contextmanager
def other_node(nodes: Nodes, **variables: str) -> Iterator[str]:
    """Add a node with these variables in the block; yield how messages name it."""
    node = nodes.cluster.add_node(
        num_cpus=1,
        node_ip_address="127.0.0.99",
        object_store_memory=100 << 20,
        env_vars={"SHMACC_NAMESPACE": nodes.namespace(99), **variables},
    )
    try:
        yield rf"\S+ \({node.node_id[:8]}\)"
    finally:
        nodes.cluster.remove_node(node)


def test_the_names_on_a_node_go_if_ray_ends_there(nodes: Nodes, tmp_path: Path) -> None:
    """Nobody is left there that could remove them at the run's end."""
    over = tmp_path / "over"

    def there() -> list[str]:
        return [name for name in nodes.left() if f"{nodes.namespace(99)}.run-" in name]

    start: Any = shmacc.ray.run
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(start, lead, work, workers_per_node=1, args=(3, over))
        try:
            wait_for(lambda: is_there(nodes, "run-"))
            with other_node(nodes):
                wait_for(lambda: any(name.endswith(":model") for name in there()))
            wait_for(lambda: not there())
        finally:
            over.touch()
        running.result()
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def test_a_supervisor_ends_with_the_process_that_has_started_it() -> None:
    child = "from shmacc.ray import _supervisor; print(flush=True); _supervisor._end_with_ray()"
    parent = (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-P', '-c', {child!r}]\n"
        "subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()\n"
        "time.sleep(3)\n"
    )
    command = [sys.executable, "-P", "-c", parent]
    # This waits for the child's end, too, which has the same standard error.
    subprocess.run(command, capture_output=True, timeout=200, check=True)


class UnwellError(Exception):
    """An error of the program."""


def test_a_run_that_a_node_cannot_begin_leaves_nothing(nodes: Nodes) -> None:
    with pytest.raises(FileExistsError):
        shmacc.ray.run(wait_long, output=__file__)
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def test_a_task_that_is_cancelled_in_a_run_leaves_nothing(nodes: Nodes) -> None:
    task = ray.remote(num_cpus=0, max_retries=0)(lambda: shmacc.ray.run(wait_long)).remote()
    wait_for(lambda: is_there(nodes, "run-"))
    ray.cancel(task)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(task, timeout=60)
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def fall_ill(rank: int) -> None:
    if rank == 1:
        raise UnwellError("worker 1 is unwell")
    signal.pause()


def wait_long() -> None:
    time.sleep(100)


def test_what_a_worker_raises_ends_the_run_and_names_its_node(nodes: Nodes) -> None:
    with pytest.raises(UnwellError, match="worker 1 is unwell") as raised:
        shmacc.ray.run(wait_long, fall_ill, workers_per_node=1)
    notes = "\n".join(raised.value.__notes__)
    assert "In worker 1 (pid" in notes
    assert re.search(rf"In a process on node {socket.gethostname()} \(\w{{8}}\)", notes), notes
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def fail_once(rank: int, folder: Path, number: int) -> None:
    """Fail the first time, by the signal `number`, or by an exception if it is 0."""
    mine = folder / str(rank)
    if not mine.exists():
        mine.touch()
        if number:
            os.kill(os.getpid(), number)
        raise UnwellError
    (folder / f"{rank} again").touch()


def lead_again(folder: Path, number: int) -> bytes:
    """Fail once; when all workers have started twice, return the parent's command line."""
    fail_once(-1, folder, number)
    while len(list(folder.glob("[0-2] again"))) < 3:
        time.sleep(0.05)
    return Path(f"/proc/{os.getppid()}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("restart_on", "context", "number", "parent"),
    [("failure", "spawn", 0, b"ray::"), ("killed", "forkserver", signal.SIGKILL, b"forkserver")],
)
def test_a_process_that_fails_once_is_started_again(
    nodes: Nodes, tmp_path: Path, restart_on: Any, context: str, number: int, parent: bytes
) -> None:
    given: Any = {"workers_per_node": 1, "args": (tmp_path, number), "context": context}
    assert parent in shmacc.ray.run(lead_again, fail_once, restart_on=restart_on, **given)
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def test_a_supervisor_that_ends_too_often_ends_the_run(nodes: Nodes, seen: Seen) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(shmacc.ray.run, wait_long, restarts=0)
        wait_for(lambda: any("chief has started" in line for line in seen.lines))
        for pid in pids(SUPERVISORS):
            os.kill(pid, signal.SIGKILL)
        what = r"The supervisor of node \S+ \(\w{8}\) has ended.* 1 times .* restarts=0"
        with pytest.raises(shmacc.errors.WorkerDiedError, match=what):
            running.result()
    wait_for(lambda: nothing_is_left(nodes, "run-"))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"worker": threading.Lock}, "workers_per_node"),
        ({"chief": 3}, "The chief must be a function, but was 3"),
        ({"args": [threading.Lock()]}, "must pickle.*cannot pickle '_thread.lock'"),
        ({"context": "fork"}, "'spawn' or 'forkserver', but was 'fork'"),
        ({"name": "a/b"}, "name must be 1 to 60"),
        ({"restart_on": "always"}, "'killed' or 'failure'"),
        ({"threads": 0}, "threads must be"),
    ],
)
def test_a_bad_argument_is_refused(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(shmacc.errors.InvalidArgumentError, match=what):
        shmacc.ray.run(**{"chief": wait_long, **changed})


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ("sys.modules['shmacc'] = None", "ModuleNotFoundError: No module named 'shmacc"),
        ("shmacc._version.__version__ = '0.1'", "it has shmacc 0.1 with layout version"),
    ],
)
def test_a_node_without_the_library_or_with_another_version_is_named(
    nodes: Nodes, tmp_path: Path, found: str, what: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'default_worker' in str(sys.orig_argv):\n"
        f"    import shmacc._version\n    {found}\n"
    )
    with other_node(nodes, PYTHONPATH=str(tmp_path)) as label:
        with pytest.raises(shmacc.errors.FailedPreconditionError) as raised:
            shmacc.ray.run(wait_long, name="mixed")
        expected = f"Node {label} cannot take part in .*, shmacc .* expected there: .*{what}"
        assert re.search(expected, str(raised.value))
        with pytest.raises(shmacc.errors.FailedPreconditionError) as raised:
            shmacc.ray.AccumulatorGroup({"m": shmacc.TensorSpec((), "float32")}, "mixed")
        assert re.search(f"Node {label} cannot have its segment of .*{what}", str(raised.value))
    wait_for(lambda: nothing_is_left(nodes, "mixed"))


def test_a_foreign_file_under_a_runs_name_is_an_error_that_names_its_node(nodes: Nodes) -> None:
    taken = Path(f"/dev/shm/shmacc.{nodes.namespace(1)}.taken:%run")  # noqa: S108
    taken.write_bytes(b"somebody else's")
    try:
        with pytest.raises(shmacc.errors.ShmaccError, match=f"Node {nodes.shown(1)}: "):
            shmacc.ray.run(wait_long, name="taken")
        assert taken.read_bytes() == b"somebody else's"
        assert [name for name in nodes.left() if "taken" in name] == [taken.name]
    finally:
        taken.unlink()


TRAIN = Path(__file__).parents[2] / "docs" / "examples" / "ray" / "train.py"


class Program:
    def __init__(self, nodes: Nodes, *command: str, number: int = 0) -> None:
        own = {"RAY_ADDRESS": nodes.cluster.address, "SHMACC_NODE_ADDRESS": nodes.address(number)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", *command],
            env={**nodes.environment(number), **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # SIGTSTP does not stop an orphaned group, as pytest's may be
        )

    def until(self, pattern: str) -> str:
        """Return the program's output, up to a line that has this pattern."""
        assert self.process.stdout is not None
        read = ""
        for line in self.process.stdout:
            read += line
            if re.search(pattern, line):
                return read
        raise AssertionError(f"no {pattern!r} in {read}")

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=400)
        return self.process.returncode, output


def program_in(folder: Path, loop: str, name: str | None = None) -> str:
    """Write docs' train.py with another loop and fewer processes; return the file's path."""
    text = TRAIN.read_text()
    for before, after in (
        ("while params.step < 300:", f"{loop}:"),
        ("round(4", "round(2"),
        ("workers_per_node=4", f"workers_per_node=1, name={name!r}"),
        ("time.sleep(0.05)", "print('update', params.step, flush=True)"),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    text = text.replace("timeout=60", "timeout=200")  # the machine may be busy
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def test_readmes_program_runs_over_hosts_after_three_names_are_changed(
    nodes: Nodes, tmp_path: Path
) -> None:
    text = (TRAIN.parents[1] / "first" / "train.py").read_text()
    for before, after in (
        ("import shmacc\n", "import shmacc.ray\n"),
        ("with shmacc.Parameters(", "with shmacc.ray.Parameters("),
        ("with shmacc.AccumulatorGroup(", "with shmacc.ray.AccumulatorGroup("),
        ("shmacc.run(lead, work, workers=4)", "shmacc.ray.run(lead, work, workers_per_node=4)"),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    assert TRAIN.read_text() == text
    assert f"```python\n{text}```" in (TRAIN.parents[2] / "many-hosts.md").read_text()
    program = Program(nodes, program_in(tmp_path, "while params.step < 200"))
    status, output = program.end()
    assert status == 0, output
    assert re.search(r"^100% of the table is learnt$", output, re.MULTILINE), output
    assert re.search(r"^chief on \S+ \(\w{8}\): update 199$", output, re.MULTILINE)
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def test_after_the_caller_was_killed_the_same_call_goes_on(nodes: Nodes, tmp_path: Path) -> None:
    program = Program(nodes, program_in(tmp_path, "while True", "again"))
    program.until("update 5")
    with pytest.raises(shmacc.errors.FailedPreconditionError, match="'again' is under way"):
        shmacc.ray.run(wait_long, name="again")
    program.until("update")  # the run goes on
    program.process.kill()
    program.end()
    status, output = Program(nodes, program_in(tmp_path, "for _ in range(9)", "again")).end()
    assert status == 0, output
    first = re.search(r"update (\d+)", output)
    assert first is not None
    assert int(first[1]) > 5
    wait_for(lambda: nothing_is_left(nodes, "again"))


SIGNALLED = """
import os, signal, shmacc.ray

def work(rank):
    signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
    print("pid", os.getpid(), flush=True)
    while True:
        signal.pause()

if __name__ == "__main__":
    shmacc.ray.run(signal.pause, work, workers_per_node=1)
"""


def test_signals_of_the_caller_go_to_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    program = Program(nodes, str(tmp_path / "signalled.py"))
    lines = [program.until("pid") for _ in range(3)]
    there = [program.process.pid, *(int(line.split()[-1]) for line in lines)]
    program.process.send_signal(signal.SIGUSR1)
    for _ in range(3):
        program.until("heard")
    for number, stop in (signal.SIGTSTP, True), (signal.SIGCONT, False):
        program.process.send_signal(number)
        wait_for(lambda stop=stop: all((state(pid) == "T") == stop for pid in there))
    program.process.send_signal(signal.SIGTERM)
    status, _ = program.end()
    assert status == -signal.SIGTERM
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_a_kill_of_the_caller_leaves_nothing(nodes: Nodes, tmp_path: Path) -> None:
    program = Program(nodes, program_in(tmp_path, "while True"))
    program.until("update 5")
    program.process.kill()
    program.end()
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def test_the_chief_goes_on_elsewhere_if_its_node_is_gone(nodes: Nodes, tmp_path: Path) -> None:
    program = Program(nodes, program_in(tmp_path, "while True"), number=1)
    program.until("update 5")
    lost = nodes.id(1)[:8]
    with nodes.gone(1, program.process.pid):
        program.until(rf"chief on \S+ \((?!{lost})\w+\): update (?!0)")
        program.process.send_signal(signal.SIGINT)
        status, _ = program.end()
    assert status == -signal.SIGINT
    wait_for(lambda: nothing_is_left(nodes, "run-"))


def test_the_command_runs_a_program_on_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys\n"
        "role, rank, node = (os.environ[f'SHMACC_{n}'] for n in ('ROLE', 'RANK', 'NODE'))\n"
        "if role == 'chief':\n"
        "    import shmacc.ray\n"
        "    members = {'a': shmacc.TensorSpec((1,), 'float32')}\n"
        "    with shmacc.ray.AccumulatorGroup(members, 'a') as group:\n"
        "        with group.round(3, timeout=100) as taken:\n"
        "            print('sum', 3 * taken['a'].value)\n"
        "    sys.exit()\n"
        "import shmacc\n"
        "shmacc.attach('a', timeout=100).apply({'a': [1.0]}, 0, contributor=int(rank))\n"
        "print('applied on', node)\n"
    )
    command = ["-m", "shmacc._run", "--ray", nodes.cluster.address, "--workers", "1", "--verbose"]
    status, output = Program(nodes, *command, str(tmp_path / "job.py"), "argument").end()
    assert status == 0, output
    assert re.search(r"^chief on \S+ \(\w{8}\): sum \[3\.\]$", output, re.MULTILINE), output
    found = re.findall(
        r"^worker ([012]) on \S+ \((\w{8})\): applied on (\w{8})", output, re.MULTILINE
    )
    assert sorted(rank for rank, _, _ in found) == ["0", "1", "2"], output
    assert all(one == other for _, one, other in found)
    command[command.index("--workers") + 1] = "0"
    status, output = Program(nodes, *command, "-m", "no_such_module").end()
    assert status == 1, output
    assert re.search(r"^shmacc-run: Node .* chief .* exited with status 1$", output, re.MULTILINE)
    command[command.index("--ray") + 1] = "ray://127.0.0.1:10001"
    status, output = Program(nodes, *command, "program.py").end()
    assert status == 1
    assert "this process cannot connect: Ray Client" in output
    wait_for(lambda: nothing_is_left(nodes, "run-"))
