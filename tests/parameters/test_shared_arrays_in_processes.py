"""Processes share arrays by name, and memory stays mapped as long as an array uses it."""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import pytest
from helpers import interpreter
from helpers.apart import Apart, Pipe, run_apart
from helpers.support import LONG

from shmacc import ConditionalAccumulator, SharedArrays, TensorSpec, errors, inspection, testing

pytestmark = pytest.mark.threads

# Some tests leave arrays unclosed on purpose.
unclosed = pytest.mark.filterwarnings("ignore:unclosed SharedArrays:ResourceWarning")

NAME: Final = "params"
TABLE: Final = np.arange(12, dtype=np.float32).reshape(4, 3)


def make() -> SharedArrays:
    """Make a table and a bias named NAME."""
    return SharedArrays({"emb": TABLE, "bias": TensorSpec((3,), "float64")}, NAME)


def test_unrelated_processes_share_arrays(namespace: str) -> None:
    with make() as params:
        script = """
            params = shmacc.SharedArrays.attach("params", writable=True)
            params["emb"][1] *= 10
            reader = shmacc.attach("params")
            print(reader["emb"].sum(), reader["emb"].dtype, reader["bias"].flags.writeable)
            private = shmacc.SharedArrays({"a": np.ones(3)})
            array = private["a"]  # goes with its creator all the same
        """
        assert interpreter.run(script) == (0, "174.0 float32 False", "")
        assert params["emb"].sum() == 174
        params.unlink()
    assert testing.leaked_names(namespace) == ()


def test_a_forked_child_shares_the_arrays_and_counts_as_a_process() -> None:
    with make() as params:
        emb = params["emb"]

        def child() -> int:
            emb[0, 0] = 50  # the view was made before the fork
            params["bias"][0] = 60
            return inspection.describe(NAME).stats.attached

        assert run_apart(child) == 2
        assert (emb[0, 0], params["bias"][0]) == (50, 60)
        params.unlink()


def hold_an_array(*, pipe: Pipe) -> None:
    """Keep one array but not its SharedArrays; at a message, drop the array."""
    array = SharedArrays.attach(NAME)["emb"]
    pipe.turn()
    del array
    pipe.turn()


@unclosed
def test_an_array_alone_keeps_the_process_attached(namespace: str) -> None:
    make().close()
    with Apart(hold_an_array).ready() as process:
        gc.collect()
        assert inspection.describe(NAME).stats.attached == 1
        assert inspection.leftovers(namespace=namespace) == ()
        with pytest.raises(errors.FailedPreconditionError, match=f"pid {process.pid}"):
            inspection.remove(NAME)
        process.turn()
        (leftover,) = inspection.leftovers(namespace=namespace)
        assert inspection.clean(leftover)
        process.finish()


def mapped_kib() -> int:
    """Return how many KiB of segments this process has mapped."""
    kib = 0
    ours = False
    with open("/proc/self/smaps", encoding="utf-8") as smaps:  # noqa: PTH123
        for line in smaps:
            if "-" in line.split(maxsplit=1)[0]:
                ours = "/dev/shm/shmacc." in line  # noqa: S108
            elif ours and line.startswith("Size:"):
                kib += int(line.split()[1])
    return kib


def test_the_memory_is_freed_with_the_last_array() -> None:
    before = mapped_kib()
    with SharedArrays({"large": TensorSpec((1 << 20,)), "small": TensorSpec((1,))}) as params:
        large, small = params["large"], params["small"]
        assert mapped_kib() - before >= 4 << 10
    view = large[5:6]
    del large
    assert mapped_kib() - before == (4 << 10) + 4  # after the close, only the arrays' memory
    del view
    assert mapped_kib() - before == 4
    small += 1
    assert small.tolist() == [1]
    del small
    assert mapped_kib() == before


def test_a_close_gives_other_threads_a_valid_array_or_an_error() -> None:
    """An array that a thread got before the close stays valid."""

    def get(params: SharedArrays) -> None:
        while int(params["a"].sum()) == 1 << 16:
            pass
        raise AssertionError

    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            params = SharedArrays({"a": np.ones(1 << 16, np.uint8)})
            getting = [pool.submit(get, params) for _ in range(3)]
            params.close()
            for thread in getting:
                with pytest.raises(errors.FailedPreconditionError, match="closed"):
                    thread.result()


def test_arrays_stay_valid_when_all_descriptors_are_closed() -> None:
    """A process that becomes a daemon closes all its descriptors."""
    script = """
        params = shmacc.SharedArrays({"a": np.ones(3)})
        same = shmacc.attach(params.shared_name)
        kept = params["a"]
        os.closerange(3, 1000)
        kept += 1
        for one in (params, same):
            try:
                one["a"]
            except shmacc.errors.FailedPreconditionError as error:
                assert "has closed the segment's descriptor" in str(error)
            one.close()
        print(kept.sum())
    """
    assert interpreter.run(script) == (0, "6.0", "")


def work(steps: int) -> list[float]:
    """Apply the read parameters as gradients; return the parameters of accepted gradients."""
    read = []
    with SharedArrays.attach(NAME) as params, ConditionalAccumulator.attach("gradients") as acc:
        for step in range(steps):
            acc.wait_step(step - 1)
            seen = params["w"].copy()
            if acc.apply_grad(seen, step):
                read.append(float(seen[0]))
    return read


def test_parameters_are_read_and_written_in_rounds_without_a_lock() -> None:
    steps = 20
    with (
        SharedArrays({"w": np.ones(1000)}, NAME, unlink_on_close=True) as params,
        ConditionalAccumulator(
            "float64", (1000,), "gradients", reduction_type="SUM", unlink_on_close=True
        ) as acc,
        Apart(work, steps) as one,
        Apart(work, steps) as other,
    ):
        for step in range(steps):
            with acc.round(2, timeout=LONG) as taken:
                # Both gradients were computed from the parameters as they were before this block.
                assert np.all(taken.value == 2 * params["w"])
                params["w"][:] = step + 2
        assert one.result() == other.result() == [float(step + 1) for step in range(steps)]
