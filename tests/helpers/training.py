"""Parameters and the group of their gradients, as most tests of updates need them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shmacc import AccumulatorGroup, Parameters


@contextmanager
def training(
    contents: Any,
    optimizer: Any,
    names: tuple[str | None, str | None] = (None, None),
    *,
    sparse: Any = (),
    **of_group: Any,
) -> Iterator[tuple[Parameters, AccumulatorGroup]]:
    """Make parameters and a group under these names; remove both at the end of the block."""
    with (
        Parameters(contents, names[0], optimizer=optimizer, unlink_on_close=True) as params,
        AccumulatorGroup(
            params.member_specs(sparse), names[1], unlink_on_close=True, **of_group
        ) as group,
    ):
        yield params, group
