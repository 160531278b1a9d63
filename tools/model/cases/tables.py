"""Tables of parameters, read without a lock."""

from cases.case import Case

_SOUND = "a reader finds an id's own row, misses none that stays, and finds none that is not there"

CASES = (
    Case(
        "table",
        "two",
        "TURNS=2 DEATHS=1",
        f"2 updates, a reader, one dies: {_SOUND}",
        quick=True,
    ),
    Case("table", "three", "TURNS=3 DEATHS=1", f"3 updates, one dies: {_SOUND}", cycles=False),
    Case("table", "four", "TURNS=4", f"4 updates: {_SOUND}", cycles=False),
    Case(
        "table",
        "stopped",
        "TURNS=2 DEATHS=1 STOPS=1",
        f"2 updates, one dies, one is stopped: {_SOUND}",
        cycles=False,
    ),
    Case(
        "table",
        "BROKEN_ID_ALONE",
        "BROKEN_ID_ALONE TURNS=4",
        "a reader sleeps in a row while its id goes, another comes and goes, and it comes again",
    ),
    Case(
        "table",
        "BROKEN_PLACE",
        "BROKEN_PLACE TURNS=3",
        "a reader sleeps over two growths, and reads a third index where the first one was",
        quick=True,
    ),
    Case(
        "table",
        "BROKEN_GIVES_FREED",
        "BROKEN_GIVES_FREED TURNS=3 DEATHS=1",
        "a dead update's removal is put back, and another id's row is there",
    ),
    Case(
        "table",
        "BROKEN_BELOW_ROWS",
        "BROKEN_BELOW_ROWS TURNS=3 DEATHS=1",
        "a dead update's new row is found",
    ),
    Case(
        "table",
        "BROKEN_STAMP_LATE",
        "BROKEN_STAMP_LATE TURNS=3",
        "a reader mixes a row with the next one in its slot",
    ),
    Case(
        "table",
        "BROKEN_NO_PUT_BACK",
        "BROKEN_NO_PUT_BACK TURNS=2 DEATHS=1",
        "a row that a dead update removed is missing",
    ),
    Case(
        "table",
        "BROKEN_ROWS",
        "BROKEN_ROWS TURNS=2 DEATHS=1",
        "a dead update's new row is found, beyond the rows",
    ),
)
