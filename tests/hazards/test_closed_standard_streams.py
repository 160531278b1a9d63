"""A process whose standard streams are closed keeps nothing under their numbers.

What a C library prints goes to descriptor 1 or 2, whatever that leads to. Were it a segment, its
first bytes would be overwritten, and every other process would find it damaged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers.interpreter import run

import shmacc
from shmacc import AccumulatorGroup, Parameters, SharedArrays, TensorSpec, inspection, optim

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMS: Final = [(0,), (1,), (2,), (0, 1, 2)]

BEGIN: Final = """
    import ctypes, traceback
    closed = [int(number) for number in sys.argv[1]]
    c = ctypes.CDLL(None)
    def shout():
        # All that is printed lands in what these numbers lead to.
        for number in (1, 2):
            c.dprintf(number, b"%s", b"A" * 256)
        c.perror(b"a library")
    def check():
        shout()
        for number in closed:
            try:
                leads_to = os.readlink(f"/proc/self/fd/{number}")
            except FileNotFoundError:
                continue
            raise AssertionError(f"{number} leads to {leads_to}")
    def report(call):
        # There is nothing to print on.
        try:
            call()
        except BaseException:
            with open(sys.argv[2], "w") as file:
                traceback.print_exc(file=file)
    for number in closed:
        os.close(number)
    check()
"""

WAYS: Final = {
    "attached": """
    def call():
        with shmacc.attach("g") as group, shmacc.Parameters.attach("p") as params:
            check()
            group.apply({"a": np.ones(3)}, 0)
            with group.round(1) as taken:
                check()
                params.update(taken)
            check()
        with shmacc.SharedArrays.attach("s", writable=True) as arrays:
            arrays["a"] += 1
            check()
    """,
    "made": """
    def call():
        with shmacc.AccumulatorGroup({"a": shmacc.TensorSpec((3,), "f8")}) as group:
            check()
            group.apply({"a": np.ones(3)}, 0)
            check()
            assert group.take(1)["a"].value.tolist() == [1] * 3
        for make in (shmacc.Parameters, shmacc.SharedArrays):
            with make({"a": np.ones(3)}) as made:
                check()
                assert made["a"].tolist() == [1] * 3
        with shmacc.SparseConditionalAccumulator("f4", (None,), "new") as rows:
            check()
            rows.unlink()
        shmacc.raw_ops.ConditionalAccumulator("f4", (), shared_name="raw")
        check()
        with shmacc.attach("raw") as raw:
            raw.unlink()
    """,
    "inspected": """
    def call():
        for name in ("g", "p", "s"):
            seen = shmacc.inspection.describe(name)
            check()
            findings = shmacc.inspection.check(name)
            assert all(finding.severity == "note" for finding in findings), findings
        check()
    """,
    "inherited": """
    def call():
        group = shmacc.attach("g")
        pid = os.fork()
        if pid == 0:
            try:
                check()
                group.apply({"a": np.ones(3)}, 0)
                check()
                with shmacc.Parameters.attach("p"):
                    check()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        group.close()
    """,
    "opened again": """
    def call():
        group = shmacc.attach("g")
        os.closerange(0, 65536)
        shout()
        with shmacc.attach("g") as again, shmacc.Parameters.attach("p"):
            check()
            again.apply({"a": np.ones(3)}, 0)
        check()
    """,
    "saved": """
    def call():
        with shmacc.attach("g") as group, shmacc.Parameters.attach("p") as params:
            path = sys.argv[2] + ".npz"
            write = np.savez
            def write_and_check(file, **arrays):
                assert file.fileno() > 2
                write(file, **arrays)
                check()
            np.savez = write_and_check
            shmacc.save(path, {"g": group, "p": params})
            check()
            shmacc.load(path, {"g": group, "p": params})
            check()
    """,
}


@pytest.fixture(autouse=True)
def segments() -> Iterator[None]:
    """A segment of each kind. This process keeps them open during the test."""
    with (
        AccumulatorGroup({"a": TensorSpec((3,), "f8")}, "g") as group,
        Parameters({"a": np.zeros(3)}, "p", optimizer=optim.SGD(1.0)) as params,
        SharedArrays({"a": np.zeros(3)}, "s") as arrays,
    ):
        yield
        for made in (group, params, arrays):
            made.unlink()


@pytest.mark.parametrize("closed", STREAMS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_kept_under_the_numbers_of_the_standard_streams(
    way: str, closed: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    said = tmp_path_factory.mktemp("said") / "error"
    # Python's own words, on what is left unclosed for instance, could not be written: status 120.
    status, _, _ = run(
        BEGIN + WAYS[way] + "\n    report(call)\n",
        "".join(map(str, closed)),
        str(said),
        warnings="ignore",
    )
    assert not said.exists(), said.read_text()
    assert status == 0
    for name in ("g", "p", "s"):
        assert all(finding.severity == "note" for finding in inspection.check(name))
    with shmacc.attach("g") as group:
        group.stats()
