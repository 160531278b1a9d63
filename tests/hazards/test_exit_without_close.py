"""Processes end without a close, in every way that Python has, and with threads that wait.

Code that runs at the very end of an interpreter may still open, apply, take, wait and close. The
thread that shuts an interpreter down cannot get the GIL back after releasing it, so a call that
released the GIL there, as opening and applying once did, would wait for ever.
"""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.interpreter import run
from helpers.support import LONG, left_behind, until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection
from shmacc.inspection import Severity

ENDS: Final = {
    "": 0, "raise RuntimeError('on purpose')": 1, "os._exit(4)": 4, "os.kill(os.getpid(), 9)": -9,
}  # fmt: skip


@pytest.mark.parametrize("statement", ENDS)
def test_a_named_segment_stays_and_a_private_one_goes_with_its_process(
    acc: ConditionalAccumulator, statement: str
) -> None:
    status, _, complaints = run(
        f"""
        private = shmacc.SparseConditionalAccumulator("f4")
        private.apply_grad([1], [1.0])
        acc = shmacc.attach("acc")
        also = shmacc.attach("acc")
        acc.apply_grad(1.0)
        also.apply_grad(2.0)
        {statement}
        """
    )
    assert status == ENDS[statement]
    assert complaints == "" or "on purpose" in complaints
    until(lambda: acc.stats().attached == 1)
    assert acc.take(2, timeout=0).value == 3.0
    assert all(finding.severity is Severity.NOTE for finding in inspection.check("acc"))
    if statement.startswith("os."):
        # Such a process can run no code at its end; a cleaner finds what it left.
        assert len(left_behind()) == 4
        for leftover in inspection.leftovers(namespace=os.environ["SHMACC_NAMESPACE"]):
            assert inspection.clean(leftover)
    assert len(left_behind()) == 2


@pytest.mark.threads
@pytest.mark.parametrize("ending", ["", "raise RuntimeError('on purpose')"])
def test_a_program_ends_while_daemon_threads_wait(acc: ConditionalAccumulator, ending: str) -> None:
    """The program has its own exit status, and neither crashes nor hangs."""
    status, _, complaints = run(
        f"""
        acc = shmacc.attach("acc")
        for _ in range(2):
            daemon(lambda: acc.take(5))
            daemon(lambda: acc.take(5, timeout=3600))
            daemon(lambda: acc.take_partial(5))
        until(lambda: acc.stats().waiting == 6)
        daemon(lambda: acc.wait_step(5))
        def activities():
            return shmacc.inspection.describe("acc").processes[-1].activity
        until(lambda: activities() == "waits for the step")
        {ending}
        """
    )
    assert status == ENDS[ending], complaints
    # The end is only announced (exits.py): the takes are not woken by an error.
    assert all(word not in complaints for word in ("Fatal", "terminate", "Segmentation"))
    # The waiting takes are gone, and delay no other take.
    until(lambda: acc.stats().waiting == 0 and acc.stats().attached == 1)
    assert acc.apply_grad(1.0)
    assert acc.take_grad(1, timeout=0) == 1.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("acc")
def test_a_collected_handle_is_closed() -> None:
    """A handle in a reference cycle is closed, too. A private segment ends with its handle."""

    def drop() -> None:
        handles: list[Any] = [shmacc.attach("acc") for _ in range(10)]
        handles.append(ConditionalAccumulator("f4"))
        handles.append(handles)

    def attached_after_drops() -> int:
        first = shmacc.attach("acc")
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  descriptors
        drop()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        return first.stats().attached

    assert run_apart(attached_after_drops) == 2
    assert len(left_behind()) == 2


def test_results_are_not_shared_memory() -> None:
    """Arrays outlive the accumulator, its segment and its mapping."""
    with shmacc.SparseConditionalAccumulator("f4", None, "arrays", reduction_type="SUM") as sparse:
        sparse.apply_grad(range(1000), np.ones((1000, 64)))
        taken = sparse.take(1, timeout=0)
        sparse.unlink()
    for array in (taken.indices, taken.values, taken.row_counts, taken.shape):
        assert array.flags.writeable
        np.add(array, 1, out=array)
    assert taken.values.sum() == 2 * 64_000
    with pytest.raises(errors.FailedPreconditionError):
        sparse.num_accumulated()


# --- finalizers -----------------------------------------------------------------------------------


STATUS: Final = 7
CRASHES: Final = ("Fatal", "terminate", "Segmentation")

# Make the first uses, which import modules: imports fail while the interpreter ends.
WARM_UP: Final = """
    import builtins, gc
    with shmacc.ConditionalAccumulator("f8", ()) as private:
        private.apply_grad(1.0)
        private.take(1)
"""
BEGIN: Final = (
    WARM_UP
    + """
    shmacc.inspection.describe("acc")
    kept = shmacc.attach("acc")
    class Late:
        # The finalizer keeps its own references: modules may be gone by then.
        def __init__(self):
            self.acc, self.shmacc, self.print = shmacc.attach("acc"), shmacc, print
        def work(self, never_stale=shmacc.NEVER_STALE, kept=kept, Exception=Exception):
            def attempt(what, call):
                try:
                    call()
                    said.append(what)
                except Exception as error:
                    said.append(f"{what}:{type(error).__name__}")
            said = []
            def use_private():
                # "f8" would not do: NumPy would have to look it up.
                with self.shmacc.ConditionalAccumulator("float64", ()) as private:
                    assert private.apply_grad(1.0)
                    assert private.take(1).count == 1
            def use_another():
                with self.shmacc.attach("acc") as another:
                    assert another.apply_grad(1.0, local_step=never_stale)
            for what, call in (
                ("apply", lambda: kept.apply_grad(1.0, local_step=never_stale)),
                ("apply", lambda: self.acc.apply_grad(1.0, local_step=never_stale)),
                ("take-in-vain", lambda: kept.take(10**9, timeout=0)),
                ("take-all", lambda: kept.take_partial(0, timeout=0)),
                ("wait-in-vain", lambda: kept.wait_step(2**62, timeout=0.01)),
                ("advance", lambda: kept.advance_step(5)),
                ("stats", kept.stats),
                ("cancel", kept.cancel),
                ("make", use_private),
                ("attach", use_another),
                ("describe", lambda: self.shmacc.inspection.describe("acc")),
                ("close", self.acc.close),
                ("close", kept.close),
            ):
                attempt(what, call)
            self.print(*said, flush=True)
"""
)
FINALIZERS: Final = {
    "atexit": "atexit.register(Late().work)",
    "in a cycle": "gc.disable(); late = LateDel(); late.itself = late; del late",
    "in builtins": "builtins.late = LateDel(); builtins.late.itself = builtins.late",
}
DAEMONS: Final = """
    rows = shmacc.attach("rows")
    alone = shmacc.ConditionalAccumulator("f8", ())
    gradient = np.arange(2000), np.ones((2000, 8))
    never_stale = shmacc.NEVER_STALE
    def apply():
        while True:
            rows.apply_grad(*gradient, local_step=never_stale)
            kept.apply_grad(1.0, local_step=never_stale)
    def take():
        while True:
            rows.take_partial(1)
            kept.take_partial(1)
    def wait():
        alone.take(5)
    def open_and_close():
        while True:
            shmacc.attach("rows").close()
    for work in (apply, apply, take, wait, open_and_close):
        daemon(work)
    until(lambda: rows.stats().taken > 20 and alone.stats().waiting == 1)
"""
END: Final = f"""
    sys.exit({STATUS})
"""


def _ending(finalizer: str) -> str:
    """Return the rest of a script whose finalizer calls `Late.work`."""
    return f"""
    class LateDel(Late):
        def __del__(self):
            self.work()
    {FINALIZERS[finalizer]}
{END}"""


@pytest.mark.parametrize("finalizer", FINALIZERS)
def test_finalizers_may_call_everything(acc: ConditionalAccumulator, finalizer: str) -> None:
    status, output, complaints = run(BEGIN + _ending(finalizer))
    assert (status, complaints) == (STATUS, "")
    if finalizer == "atexit":
        # While modules exist, everything works: only calls that cannot succeed raise.
        assert output == (
            "apply apply take-in-vain:DeadlineExceededError take-all "
            "wait-in-vain:DeadlineExceededError advance stats cancel make attach describe close "
            "close"
        )
    else:
        # This late, handles are closed, and not all modules of Python and NumPy work.
        assert output.startswith("apply:FailedPreconditionError apply:FailedPreconditionError")
        assert {"make", "attach"} <= set(output.split())
        assert output.endswith("close close")
    until(lambda: acc.stats().attached == 1)
    assert acc.apply_grad(1.0, local_step=5)
    assert all(finding.severity is Severity.NOTE for finding in inspection.check("acc"))


@pytest.mark.parametrize("finalizer", ["atexit", "in builtins"])
def test_finalizers_may_call_everything_beside_busy_daemon_threads(
    acc: ConditionalAccumulator, finalizer: str
) -> None:
    """The threads stay in the extension until they need Python; nobody waits for them."""
    with SparseConditionalAccumulator("f8", None, "rows", unlink_on_close=True) as rows:
        status, _, complaints = run(BEGIN + DAEMONS + _ending(finalizer))
        # A take in a thread may raise that its handle is closed, which the thread prints.
        assert status == STATUS, complaints
        assert all(word not in complaints for word in CRASHES), complaints
        until(lambda: acc.stats().attached == 1 and rows.stats().attached == 1)
        taken = rows.take_partial(0, timeout=0)
        assert (taken.row_counts == taken.count).all()
    assert acc.apply_grad(1.0, local_step=5)


LINGERS: Final = """
    class Lingers:
        def __del__(self, sleep=time.sleep):
            sleep(0.3)
    import builtins
    builtins.lingers = Lingers()
    begun = []
    def work(*_):
        begun.append(True)
        while True:
            time.sleep(0.001)
"""
# At the end, Python exits a thread that asks for the GIL; in these cases, in the extension.
LETS_GO: Final = {
    "the text of an exception": """
    class Slow(Exception):
        __str__ = work
    acc = shmacc.attach("acc")
    daemon(lambda: acc.__exit__(Slow, Slow(), None))
""",
    "the copy of an array": """
    acc = shmacc.SparseConditionalAccumulator("f8", (None, 1))
    gradient = np.full(10**6, -1), np.ones((10**6, 1))
    def apply():
        while True:
            try:
                acc.apply_grad(*gradient)
            except shmacc.errors.InvalidArgumentError:
                begun.append(True)
    daemon(apply)
""",
    "a coroutine of a round": """
    async def coroutine():
        work()
    block = shmacc._core.RoundBlock(shmacc.attach("acc")._handle, work, 1, 1, None, True)
    daemon(shmacc._core.Guarded(coroutine(), block).__next__)
""",
    "a generator that is a block": """
    def generate():
        work()
        yield
    daemon(shmacc._core.GeneratorBlock(generate()).__enter__)
""",
    "a first read of the step": """
    import contextvars
    acc = shmacc.attach("acc")
    contextvars.ContextVar = work
    daemon(lambda: acc.global_step)
""",
    "an attribute of an exception": """
    class Slow(Exception):
        __getattr__ = work
    acc = shmacc.attach("acc")
    daemon(lambda: acc.__exit__(Slow, Slow(), None))
""",
}


@pytest.mark.usefixtures("acc")
@pytest.mark.parametrize("call", LETS_GO)
def test_a_program_ends_while_a_daemon_thread_is_in_python_code(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python then sees that memory is freed without the GIL, and aborts.
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    script = LINGERS + LETS_GO[call] + "\n    until(lambda: begun)\n" + END
    status, _, complaints = run(script)
    assert status == STATUS, complaints


MEETS_OTHERS: Final = (
    WARM_UP
    + """
    class Late:
        def __init__(self):
            self.attach = shmacc.attach
        def work(self):
            with self.attach("asks") as asks, self.attach("answers") as answers:
                assert answers.apply_grad(asks.take(1).value)
"""
)


@pytest.mark.parametrize("finalizer", ["atexit", "in builtins"])
def test_finalizers_may_wait_for_other_processes_and_wake_them(finalizer: str) -> None:
    with (
        ConditionalAccumulator("f8", (), "asks") as asks,
        ConditionalAccumulator("f8", (), "answers") as answers,
        ThreadPoolExecutor(2) as pool,
    ):
        answer = pool.submit(answers.take, 1, timeout=LONG)
        ends = pool.submit(run, MEETS_OTHERS + _ending(finalizer))
        try:
            until(lambda: asks.stats().waiting == 1 or ends.done())
            assert asks.apply_grad(3.0)
            assert ends.result() == (STATUS, "", "")
            assert answer.result().value == 3.0
        finally:
            answers.cancel()
            for each in (asks, answers):
                each.unlink()
