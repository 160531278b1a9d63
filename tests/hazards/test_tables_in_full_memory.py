"""A table grows into a full /dev/shm, at every size: an error, and nothing has changed."""

from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import apart, needs_own_shm
from helpers.full_memory import PAGE, SIZE, free_bytes, leave, make_room, says_it_all
from helpers.own_shm import MIB
from helpers.support import state_of

from shmacc import AccumulatorGroup, Parameters, TableSpec, errors, init, inspection, optim, testing

pytestmark = [needs_own_shm]

SPEC: Final = TableSpec((4,), initial=init.Uniform(-1, 1))


def _train(params: Parameters, group: AccumulatorGroup, ids: Any, **update: Any) -> None:
    group.apply({"t": (ids, np.ones((len(ids), 4), np.float32))}, group.global_step)
    with group.round(1) as taken:
        try:
            params.update(taken, **update)
        except errors.ResourceExhaustedError:
            assert group.stats().update is None  # not final
            raise


@pytest.mark.parametrize("there", [0, 5000])
@apart(shm=SIZE)
def test_growth_into_full_memory_changes_nothing(there: int) -> None:
    failed = succeeded = 0
    for room in range(0, 700 * 1024, 12 * PAGE):
        params = Parameters({"t": SPEC}, "full", optimizer=optim.Adagrad(0.1))
        group = AccumulatorGroup(params.member_specs(), "group")
        if there:
            _train(params, group, np.arange(there), remove={"t": [3, 4, 5]})
        # What the accumulator needs for the gradient is there.
        new = np.arange(3, there + 4000)
        group.apply({"t": (new, np.ones((len(new), 4), np.float32))}, group.global_step)
        group.advance_step(group.global_step + 1)
        group.apply({"t": (new, np.ones((len(new), 4), np.float32))}, group.global_step)
        before = state_of(params)
        leave(room)
        try:
            with group.round(1) as taken:
                params.update(taken, remove={"t": new[:100]})
            succeeded += 1
            make_room()
        except errors.ResourceExhaustedError as error:
            failed += 1
            says_it_all(error)
            assert group.stats().update is None  # not final
            # Readers go on, and the old rows are whole.
            assert params["t"].ids().size == len(params["t"])
            make_room()
            assert state_of(params) == before
            with group.round(1) as taken:
                params.update(taken, remove={"t": new[:100]})
        assert (
            len(params["t"])
            == len(np.union1d(np.setdiff1d(np.arange(there), [3, 4, 5]), new)) - 100
        )
        for one in (params, group):
            one.unlink()
            one.close()
        assert testing.leaked_names() == ()
    assert failed > 3
    assert succeeded > 1


@apart(shm=SIZE)
def test_growth_that_fails_gives_its_memory_back() -> None:
    with (
        Parameters({"t": SPEC}, "full", optimizer=optim.SGD(0.1), unlink_on_close=True) as params,
        AccumulatorGroup(params.member_specs(), "group", unlink_on_close=True) as group,
    ):
        _train(params, group, np.arange(10))
        ids = np.arange(100_000)
        group.apply({"t": (ids, np.ones((len(ids), 4), np.float32))}, 1)
        leave(MIB)
        with group.round(1) as taken:
            with pytest.raises(errors.ResourceExhaustedError):
                params.update(taken)
            assert free_bytes() == MIB
            assert params.skip(taken)
        make_room()


@apart(shm=SIZE)
def test_a_restore_into_full_memory_changes_nothing() -> None:
    """It gives its memory back."""
    failed = succeeded = 0
    with Parameters({"t": SPEC}, optimizer=optim.Adagrad(0.1)) as larger:
        with AccumulatorGroup(larger.member_specs()) as group:
            _train(larger, group, np.arange(7000))
        saved = larger.state()
    for room in range(0, 1000 * 1024, 24 * PAGE):
        with (
            Parameters({"t": SPEC}, "full", optimizer=optim.Adagrad(0.1)) as params,
            AccumulatorGroup(params.member_specs(), "group") as group,
        ):
            _train(params, group, np.arange(50) * 2**40, remove={"t": [0]})
            before = state_of(params)
            leave(room)
            try:
                params.restore(saved)
                succeeded += 1
                make_room()
            except errors.ResourceExhaustedError as error:
                failed += 1
                says_it_all(error)
                assert free_bytes() >= room
                make_room()
                assert state_of(params) == before
                params.restore(saved)
            assert state_of(params) == {name: array.tobytes() for name, array in saved.items()}
            group.set_global_step(params.step)
            _train(params, group, np.arange(8000))
            assert len(params["t"]) == 8000
            assert inspection.check("full") == ()
            group.unlink()
            params.unlink()
    assert failed > 3
    assert succeeded > 1
