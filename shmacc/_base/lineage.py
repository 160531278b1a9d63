"""The name of the last update that a copy of parameters has, and what is known of a copy."""

from typing import NamedTuple


class Lineage(NamedTuple):
    """The name of the last update in a copy, which also has all earlier updates.

    Attributes:
        term: The term of the owner that has named the update; 0: it is no copy, or was changed by
            something else.
        number: A number that this owner gave to no other update.
        digest: A digest of all that the updates have changed; each NaN counts as the same number.
    """

    term: int
    number: int
    digest: int = 0


class Copy(NamedTuple):
    """What is known of a copy.

    Attributes:
        lineage: Its lineage.
        begun: The step that its last change leads to, even if that change is not complete. A
            gradient of an earlier step may be computed from half a change.
        step: The parameters' step.
    """

    lineage: Lineage
    begun: int
    step: int


NO_COPY = Copy(Lineage(0, 0), 0, 0)
"""What is known of a host that has no copy yet."""
