"""Updates of parameters in rounds."""

from cases.case import Case

_SOUND = "gradients that count are of whole parameters; a consumed round is in them once or skipped"

CASES = (
    Case(
        "update",
        "once",
        "DEATHS=1 TURNS=1",
        f"2 chiefs, once each, a worker, one dies: {_SOUND}",
        quick=True,
    ),
    Case("update", "two", "DEATHS=1", f"2 chiefs, a worker, one dies: {_SOUND}", cycles=False),
    Case(
        "update",
        "deaths",
        "DEATHS=2 GRADIENTS=1",
        f"2 chiefs, a worker, two die: {_SOUND}",
        cycles=False,
    ),
    Case(
        "update",
        "advanced",
        "DEATHS=1 TURNS=1 ADVANCER",
        f"and somebody who advances the step: {_SOUND}",
        cycles=False,
    ),
    Case(
        "update",
        "stopped",
        "DEATHS=1 STOPS=1 TURNS=1",
        f"2 chiefs, once each, a worker, one dies, one is stopped: {_SOUND}",
        cycles=False,
    ),
    Case(
        "update",
        "loaded",
        "DEATHS=1 TURNS=1 LOADERS=1",
        f"2 chiefs, once each, a worker, a load at any time, one dies: {_SOUND}",
        cycles=False,
    ),
    Case(
        "update",
        "reloaded",
        "DEATHS=1 CHIEFS=1 LOADERS=2",
        f"a chief, a worker, two loads at any time, one dies: {_SOUND}",
        cycles=False,
    ),
    Case(
        "update",
        "BROKEN_NOT_FINAL",
        "BROKEN_NOT_FINAL DEATHS=1",
        "a dead chief's step is open again, with half an update in the parameters",
        quick=True,
    ),
    Case(
        "update",
        "BROKEN_MARK_LATE",
        "BROKEN_MARK_LATE DEATHS=1",
        "the same: the mark comes when the update is in",
    ),
    Case(
        "update",
        "BROKEN_NO_ROLLBACK",
        "BROKEN_NO_ROLLBACK DEATHS=1",
        "half an update stays, and the next chief adds a whole one",
    ),
    Case(
        "update",
        "BROKEN_NOT_ONCE",
        "BROKEN_NOT_ONCE DEATHS=1",
        "a chief died between update and end: the next one makes it again",
    ),
    Case(
        "update",
        "BROKEN_ENDS",
        "BROKEN_ENDS DEATHS=1",
        "a block without an update consumes a round of which half is in the parameters",
    ),
    Case(
        "update",
        "BROKEN_ADVANCES",
        "BROKEN_ADVANCES ADVANCER DEATHS=1",
        "the same by advance_step",
    ),
    Case(
        "update",
        "BROKEN_SAVE_LATE",
        "BROKEN_SAVE_LATE DEATHS=1",
        "a word was changed and not counted: it is not put back",
    ),
    Case(
        "update",
        "BROKEN_STAMP_LATE",
        "BROKEN_STAMP_LATE DEATHS=1",
        "a word was changed before the stamp: nobody puts it back",
    ),
    Case(
        "update",
        "BROKEN_STEP_EARLY",
        "BROKEN_STEP_EARLY DEATHS=1",
        "the step says that the round is in, and then it is put back",
    ),
    Case(
        "update",
        "BROKEN_EXCEPTION",
        "BROKEN_EXCEPTION",
        "the step is open again although its update is in",
    ),
    Case(
        "update",
        "BROKEN_LOAD",
        "BROKEN_LOAD DEATHS=1 TURNS=1 LOADERS=1",
        "older parameters take the update of a newer round, since steps may be skipped",
    ),
    Case(
        "update",
        "BROKEN_LOAD_ENDS",
        "BROKEN_LOAD_ENDS DEATHS=1 TURNS=1 LOADERS=1",
        "the same, after a death between the mark's end and the accumulator",
    ),
    Case(
        "update",
        "BROKEN_LOAD_DEATH",
        "BROKEN_LOAD_DEATH DEATHS=1 TURNS=1 LOADERS=1",
        "the same, with the mark of a dead process",
    ),
)
