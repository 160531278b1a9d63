"""What a case is: one model with one set of flags, searched exhaustively."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One search.

    Attributes:
        model: The file, without its suffix.
        name: Unique within the model; a broken variant has the name of its flag.
        flags: What spin's preprocessor defines.
        says: What holds if the search finds nothing; for a broken variant: what is wrong with it.
        cycles: Whether to search for cycles (livelocks) as well as for violated assertions.
        quick: Whether it belongs to the short slice that the tests run.
    """

    model: str
    name: str
    flags: str
    says: str
    cycles: bool = True
    quick: bool = False

    @property
    def broken(self) -> bool:
        """Whether spin must find an error in it."""
        return self.name.startswith("BROKEN_")
