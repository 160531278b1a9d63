"""`shmacc.run` calls functions in children, and returns their results or raises their errors."""

import gc
import os
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

import pytest
from helpers import run_roles
from helpers.run_roles import WORKERS
from helpers.support import LONG, START_METHODS, run_to_end, until

import shmacc
from shmacc import errors, testing

fast: Final = pytest.mark.parametrize("context", ["fork", "spawn"])


@pytest.mark.parametrize("context", START_METHODS)
def test_run_returns_the_chiefs_result(context: Any, tmp_path: Path) -> None:
    found = shmacc.run(
        run_roles.collected,
        run_roles.note_surroundings,
        workers=WORKERS,
        args=(str(tmp_path),),
        context=context,
    )
    assert found == {str(rank): f"worker {rank}" for rank in range(WORKERS)}


def test_children_have_a_namespace_of_their_own(namespace: str) -> None:
    first, second = (shmacc.run(run_roles.surroundings, context="fork") for _ in range(2))
    assert first["SHMACC_NAMESPACE"].startswith(f"{namespace}.run-")
    assert first["SHMACC_NAMESPACE"] != second["SHMACC_NAMESPACE"]
    assert (first["SHMACC_ROLE"], first["SHMACC_RANK"], first["SHMACC_WORKERS"]) == (
        "chief",
        "-1",
        "0",
    )
    assert os.environ["SHMACC_NAMESPACE"] == namespace
    named = shmacc.run(run_roles.surroundings, context="fork", name="digits")
    assert named["SHMACC_NAMESPACE"] == f"{namespace}.digits"


def test_in_a_long_namespace_a_run_shortens_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMACC_NAMESPACE", "n" * 60)
    inner = shmacc.run(run_roles.surroundings, context="fork")["SHMACC_NAMESPACE"]
    assert len(inner) == 60
    with pytest.raises(errors.InvalidArgumentError, match="name must be 1 to 60"):
        shmacc.run(run_roles.surroundings, context="fork", name="digits")


def test_a_large_result_and_a_large_argument_arrive() -> None:
    assert shmacc.run(run_roles.large, args=(bytes(10_000_000),)) == bytes(10_000_000)


@pytest.mark.parametrize("what", ["of value", "status", "kill"])
def test_a_process_that_failed_is_started_again_if_asked(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = shmacc.run(
        run_roles.fail_until_third_time,
        args=(str(tmp_path / "calls"), what),
        restart_on="failure",
        context="fork",
    )
    assert times == 3
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("chief (pid ")
    assert first.endswith(", and is started again (1 of 3)")
    assert second.endswith(", and is started again (2 of 3)")


@pytest.mark.parametrize(("arguments", "text"), [
    ({"workers": -1}, "workers must not be negative"),
    ({"workers": True}, "workers must be an integer"),
    ({"worker": None, "workers": 2}, "belong together"), ({"workers": 0}, "belong together"),
    ({"restarts": -1}, "restarts must not be negative"),
    ({"restart_on": "never"}, "restart_on must be 'killed' or 'failure', but was 'never'"),
    ({"context": "thread"}, "context must be one of .*, but was 'thread'"),
    ({"grace": -1}, "grace must not be negative"),
    ({"grace": "long"}, "grace must be a number of seconds"),
    ({"name": "a/b"}, "name must be 1 to 60 of"), ({"name": ""}, "name must be 1 to 60 of"),
    ({"chief": 3}, "The chief must be a function"),
    ({"worker": lambda rank: rank}, "The worker must be a function that a child can import"),
    ({"threads": 2, "context": "fork"}, "threads.*fork"),
    ({"threads": "share", "context": "fork"}, "threads.*fork"), ({"threads": 0}, "threads"),
    ({"threads": -1}, "threads"), ({"threads": True}, "threads"), ({"threads": 1.5}, "threads"),
    ({"threads": "many"}, "threads must be .*share.*'many'"),
    ({"cpus": "all"}, "cpus must be .*spread.*'all'"), ({"cpus": 2}, "cpus must be"),
    ({"log_dir": 3}, "log_dir"),
])  # fmt: skip
def test_bad_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    calls: dict[str, Any] = {"chief": run_roles.nothing, "worker": run_roles.nothing, "workers": 1}
    calls |= arguments
    with pytest.raises(errors.InvalidArgumentError, match=text):
        shmacc.run(calls.pop("chief"), calls.pop("worker"), **calls)


def _program(text: str, folder: Path, *, by_file: bool = True) -> tuple[int, str]:
    path, code = folder / "program.py", textwrap.dedent(text)
    path.write_text(code)
    ran = run_to_end(
        [sys.executable, "-P", *([str(path)] if by_file else ["-c", code])], status=None
    )
    return ran.returncode, ran.stderr


def test_a_program_without_main_guard_gets_an_error_that_says_so(tmp_path: Path) -> None:
    status, told = _program(
        """
        import shmacc
        def lead(): pass
        shmacc.run(lead)
        """,
        tmp_path,
    )
    assert status == 1
    assert "call it under `if __name__ == '__main__':`" in told


def test_functions_of_a_notebook_are_refused_except_with_fork(tmp_path: Path) -> None:
    cell = """
        import shmacc
        def lead(): return "done"
        assert shmacc.run(lead, context="fork") == "done"
        import functools
        class Chief:
            def __call__(self): pass
            def lead(self): pass
        for function in lead, functools.partial(lead), Chief(), Chief().lead:
            try:
                shmacc.run(function)
            except shmacc.errors.InvalidArgumentError as error:
                assert "put it into a module, or use context='fork'" in str(error)
            else:
                raise AssertionError(function)
        """
    assert _program(cell, tmp_path, by_file=False) == (0, "")


@fast
def test_a_worker_that_fails_after_the_chief_is_not_started_again(
    context: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shmacc.run(
        _note_pid,
        _fail_after_chief,
        workers=1,
        args=(tmp_path / "chief",),
        restart_on="failure",
        context=context,
        grace=LONG,
    )
    assert caplog.records == []


def _note_pid(path: Path) -> None:
    path.write_text(str(os.getpid()))


def _fail_after_chief(_: int, path: Path) -> None:
    until(lambda: path.exists() and path.read_text() != "")
    until(lambda: not Path("/proc", path.read_text()).exists())  # the chief has been reaped
    raise ValueError("late")


@fast
def test_runs_leave_no_descriptors(context: str) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = None
    for _ in range(3):
        shmacc.run(run_roles.nothing, run_roles.sleep, workers=2, context=context, grace=0)
        with pytest.raises(ValueError, match="of value"):
            shmacc.run(
                run_roles.sleep,
                run_roles.fail_in_worker,
                workers=2,
                args=("of value",),
                context=context,
            )
        with pytest.raises((TypeError, AttributeError)):
            shmacc.run(run_roles.nothing, args=(lambda: 0,), context="spawn")
        before = before or descriptors()
    assert descriptors() == before


def test_names_of_a_run_that_failed_stay_if_it_has_a_name(namespace: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="half way"):
            shmacc.run(_make_and_fail, context="fork", name="digits")
        assert f"shmacc.{namespace}.digits:kept" in testing.leaked_names(f"{namespace}.digits")
    assert shmacc.run(_read, context="fork", name="digits") == 2.0
    assert testing.leaked_names(f"{namespace}.digits") == ()
    with pytest.raises(ValueError, match="half way"):
        shmacc.run(_make_and_fail, context="fork")
    assert namespace not in str(testing.leaked_names())


def _make_and_fail() -> None:
    acc = shmacc.ConditionalAccumulator("f4", (), "kept")
    acc.apply_grad(1.0)
    raise ValueError("half way")


def _read() -> Any:
    with shmacc.ConditionalAccumulator("f4", (), "kept", reduction_type="MEAN") as acc:
        return float(acc.num_accumulated())


def test_a_named_run_cannot_be_started_twice_at_once() -> None:
    with pytest.raises(errors.FailedPreconditionError, match="'digits' is under way") as refused:
        shmacc.run(_run_same, context="fork", name="digits", args=(os.environ["SHMACC_NAMESPACE"],))
    assert refused.value.pids == (os.getpid(),)
    shmacc.run(run_roles.nothing, context="fork", name="digits")  # removes what the failed one left


def _run_same(namespace: str) -> None:
    os.environ["SHMACC_NAMESPACE"] = namespace
    shmacc.run(run_roles.nothing, context="fork", name="digits")
