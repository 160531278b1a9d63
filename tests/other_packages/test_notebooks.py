"""In a Jupyter kernel, cells run twice, a take is interrupted, and the kernel is restarted."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from helpers.support import until
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

import shmacc

# Warnings of the kernel's own packages.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::UserWarning",
    "ignore:[Uu]nclosed (socket|context|event loop) <:ResourceWarning",
)

SECONDS: Final = 100
IMPORTS: Final = "import shmacc"


class Notebook:
    """A notebook whose cells are run one by one, in any order, as a user does."""

    def __init__(self, folder: Path) -> None:
        """Start a kernel in `folder`: in the checkout it would import the source tree."""
        self.client = NotebookClient(
            new_notebook(),
            timeout=SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.client.setup_kernel())

    def run(self, code: str) -> str:
        """Run a cell; return what it printed."""
        self.client.nb.cells = [new_code_cell(code)]
        self.client.execute_cell(self.client.nb.cells[0], 0)
        outputs: list[Any] = self.client.nb.cells[0].outputs
        return "".join(output.get("text", "") for output in outputs).strip()

    def fails(self, code: str) -> str:
        """Run a cell that raises; return the error's name and text."""
        with pytest.raises(CellExecutionError) as caught:
            self.run(code)
        return f"{caught.value.ename}: {caught.value.evalue}"


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    with made.stack:
        made.run(IMPORTS)
        yield made


def test_cells_that_make_a_named_accumulator_run_twice(notebook: Notebook) -> None:
    """A cell that runs again attaches to the existing accumulator, and releases the old handle."""
    for make in (
        "ConditionalAccumulator('f8', (), 'run')",
        "AccumulatorGroup({'w': shmacc.TensorSpec((2,), 'f8')}, 'run')",
        "SharedArrays({'w': [1.0, 2.0]}, 'run')",
    ):
        for _ in range(2):
            notebook.run(f"acc = shmacc.{make}")
        notebook.run("acc.unlink(); acc.close()")
    # "replace" refuses and says what to do; after a close it succeeds.
    cell = "acc = shmacc.ConditionalAccumulator('f8', (), 'run', if_exists='replace')"
    notebook.run(f"{cell}; acc.apply_grad(1.0)")
    message = notebook.fails(cell)
    assert message.startswith("FailedPreconditionError")
    assert "one is this process: close() what it has open under the name" in message
    notebook.run(f"acc.close(); {cell}")
    assert notebook.run("print(acc.num_accumulated())") == "0"
    notebook.run("acc.unlink(); acc.close()")
    cell = """
with shmacc.ConditionalAccumulator('f8', (), 'run', if_exists='error', unlink_on_close=True) as acc:
    acc.apply_grad(4.0)
    print(acc.take_grad(1), acc.global_step)
"""
    assert notebook.run(cell) == notebook.run(cell) == "4.0 1"


def test_an_interrupt_ends_a_take_and_nothing_is_consumed(notebook: Notebook) -> None:
    with shmacc.ConditionalAccumulator("f8", (), "run", unlink_on_close=True) as acc:
        acc.apply_grad(2.0)
        pid = int(notebook.run("import os; acc = shmacc.attach('run'); print(os.getpid())"))

        def interrupt() -> None:
            until(lambda: acc.stats().waiting == 1)
            os.kill(pid, signal.SIGINT)  # as the interrupt button does

        pressing = threading.Thread(target=interrupt)
        pressing.start()
        assert notebook.fails("acc.take_grad(2)").startswith("KeyboardInterrupt")
        pressing.join()
        assert (acc.stats().waiting, acc.num_accumulated(), acc.global_step) == (0, 1, 0)
        notebook.run("acc.apply_grad(4.0)")
        assert notebook.run("print(acc.take_grad(2), acc.global_step); acc.close()") == "3.0 1"


def test_a_restarted_kernel_finds_the_name_or_replaces_it(notebook: Notebook) -> None:
    notebook.run("acc = shmacc.ConditionalAccumulator('f8', (), 'run'); acc.apply_grad(2.0)")
    for make in ("", ", if_exists='replace'"):
        run_sync(notebook.client.km.restart_kernel)(now=bool(make))  # killed, or in order
        run_sync(notebook.client.kc.wait_for_ready)(timeout=SECONDS)
        notebook.run(IMPORTS)
        notebook.run(f"acc = shmacc.ConditionalAccumulator('f8', (), 'run'{make})")
        assert notebook.run("print(acc.num_accumulated())") == ("0" if make else "1")
    notebook.run("acc.unlink(); acc.close()")
