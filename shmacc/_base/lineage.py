"""`Lineage` names the last update in a copy of parameters; `Copy` has facts about a copy."""

from typing import NamedTuple


class Lineage(NamedTuple):
    """The name of a copy's last update. The copy also has all updates before that update.

    Attributes:
        term: The term of the owner that has named the update; 0: the parameters are no copy, or
            something other than an owner's update has changed them.
        number: A number that this owner gave to no other update.
        digest: A digest of all changes by the updates. All NaNs count as the same number.
    """

    term: int
    number: int
    digest: int = 0


class Copy(NamedTuple):
    """The facts about a copy of parameters.

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
"""The facts about a host that has no copy yet."""
