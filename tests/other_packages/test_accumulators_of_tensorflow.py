"""The accumulators beside TensorFlow's own, op by op.

Random programs, and gradients that are malformed in one way, run in both. Where results differ, a
row of the table in docs/from-tensorflow.md must say so. Each row needs a run that shows it,
so that the page keeps no row that is no longer true.

TensorFlow runs in its own process, because torch's triton crashes beside it. Calls that crash
TensorFlow run in forks of that process.
"""

import functools
import importlib
import logging
import os
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pytest
from helpers.apart import Apart, run_apart
from helpers.pages import ROOT
from helpers.support import LONG

import shmacc
from shmacc import errors
from shmacc._base import dtype_names

tf = cast("Any", None)  # TensorFlow, in its own process

PAGE: Final = ROOT / "docs" / "from-tensorflow.md"
HEADING: Final = "## What differs\n"
PROGRAMS: Final = int(os.environ.get("TENSORFLOW_PROGRAMS", "60"))
SEED: Final = int(os.environ.get("TENSORFLOW_SEED", "1"))
OPS: Final = 40  # ops of a program, without its takes
MOST: Final = 2**63 - 1


def rows_of_the_page() -> list[str]:
    """Return the first cells of the table of differences."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(HEADING)
    lines = [line for line in rest.partition("\n#")[0].splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]]


# --- one accumulator in both ---------------------------------------------------------------------


class Gradient(NamedTuple):
    """The arguments of an apply; a dense gradient has values alone."""

    values: Any
    indices: Any = None
    shape: Any = None
    step: Any = 0


class Outcome(NamedTuple):
    """A result, or the error's class and text."""

    result: Any
    error: str = ""
    said: str = ""

    @property
    def refused(self) -> bool:
        return bool(self.error)


def outcome(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(call())
    except Exception as error:  # noqa: BLE001  whatever it is, it is compared
        return Outcome(None, type(error).__name__, str(error))


def _config() -> Any:
    """Return a session's configuration that is fast to make: no graph optimizer, one thread."""
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1,
        intra_op_parallelism_threads=1,
        use_per_session_threads=False,
    )
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    return config


class Theirs:
    """TensorFlow's accumulator, with its own graph and session."""

    def __init__(self, *, sparse: bool, **made_with: Any) -> None:
        self.graph = tf.Graph()
        self.session = tf.compat.v1.Session(graph=self.graph, config=_config())
        with self.graph.as_default():
            kind = "SparseConditionalAccumulator" if sparse else "ConditionalAccumulator"
            self.acc = getattr(tf.compat.v1, kind)(**made_with)
            self.dtype = tf.as_dtype(made_with["dtype"])
        self.sparse = sparse
        self._built: dict[Any, Any] = {}

    def _placeholder(self, dtype: Any) -> Any:
        return tf.compat.v1.placeholder(dtype)

    def _op(self, what: str, *, shape: bool = False) -> Any:
        """Return an op and its placeholders, made once, so that only running it can raise."""
        if (what, shape) not in self._built:
            with self.graph.as_default():
                long, values = (lambda: self._placeholder(tf.int64)), self._placeholder(self.dtype)
                if what == "take":
                    into = [self._placeholder(tf.int32)]
                    op = self.acc.take_grad(*into)
                elif what == "step":
                    into = [long()]
                    op = self.acc.set_global_step(*into)
                elif what == "count":
                    into, op = [], self.acc.num_accumulated()
                elif self.sparse:
                    into = [long(), long(), values, *([long()] if shape else [])]
                    op = self.acc.apply_grad(into[1], into[2], *into[3:], local_step=into[0])
                else:
                    into = [long(), values]
                    op = self.acc.apply_grad(into[1], into[0])
                self._built[what, shape] = op, into
        return self._built[what, shape]

    def _fed(self, what: str, *values: Any, shape: bool = False) -> Any:
        op, into = self._op(what, shape=shape)
        return self.session.run(op, dict(zip(into, values, strict=True)))

    def apply(self, gradient: Gradient) -> Any:
        if not self.sparse:
            return self._fed("apply", gradient.step, gradient.values)
        shape = [] if gradient.shape is None else [gradient.shape]
        given = gradient.step, gradient.indices, gradient.values, *shape
        return self._fed("apply", *given, shape=bool(shape))

    def run(self, call: Callable[[Any], Any]) -> Any:
        """Let a call make an op of the accumulator, as users do, and run the op."""
        with self.graph.as_default():
            return self.session.run(call(self.acc))

    def take(self, num_required: Any) -> Any:
        return self._fed("take", num_required)

    def set_global_step(self, step: Any) -> None:
        self._fed("step", step)

    def num_accumulated(self) -> int:
        return int(self._fed("count"))

    def close(self) -> None:
        self.session.close()


class Ours:
    """shmacc's accumulator, with the same methods."""

    def __init__(self, *, sparse: bool, **made_with: Any) -> None:
        kind: Any = shmacc.SparseConditionalAccumulator if sparse else shmacc.ConditionalAccumulator
        self.acc = kind(**made_with)
        self.sparse = sparse

    def apply(self, gradient: Gradient) -> bool:
        if not self.sparse:
            return bool(self.acc.apply_grad(gradient.values, gradient.step))
        given = gradient.indices, gradient.values, gradient.shape
        return bool(self.acc.apply_grad(*given, local_step=gradient.step))

    def run(self, call: Callable[[Any], Any]) -> Any:
        return call(self.acc)

    def take(self, num_required: Any) -> Any:
        return self.acc.take_grad(num_required, timeout=0)

    def set_global_step(self, step: Any) -> None:
        self.acc.set_global_step(step)

    def num_accumulated(self) -> int:
        return int(self.acc.num_accumulated())

    def close(self) -> None:
        self.acc.close()


class Made(NamedTuple):
    """How an accumulator is made."""

    sparse: bool
    dtype: str
    shape: Any
    reduction_type: str | None


class Both:
    """One accumulator in each library, made alike, and the gradients of their round."""

    def __init__(self, made: Made) -> None:
        self.made = made
        keywords = {"dtype": made.dtype, "shape": made.shape, "reduction_type": made.reduction_type}
        self.theirs = Theirs(sparse=made.sparse, **keywords)
        self.ours = Ours(sparse=made.sparse, **keywords)
        self.step = 0
        self.round: list[Gradient] = []

    def close(self) -> None:
        self.theirs.close()
        self.ours.close()

    def apply(self, gradient: Gradient, report: "Report") -> bool:
        """Apply in both; return whether both changed alike."""
        before = self.ours.num_accumulated()
        own = outcome(lambda: self.ours.apply(gradient))
        their = outcome(lambda: self.theirs.apply(gradient))
        added = [each.num_accumulated() - before for each in (self.ours, self.theirs)]
        report.applies += 1
        if own.refused:
            assert added[0] == 0, own
            assert own.error == "InvalidArgumentError", own
        if (own.refused, added[0]) == (their.refused, added[1]):
            assert own.refused or own.result is (added[0] == 1)
            report.refused_by_both += own.refused
            if own.refused and own.said not in their.said:
                report.differs("words", self, gradient, own, their)
            self.round += [gradient] * added[0]
            return True
        report.differs("apply", self, gradient, own, their)
        return False

    def take(self, num_required: int, report: "Report") -> None:
        own = outcome(lambda: self.ours.take(num_required))
        their = outcome(lambda: self.theirs.take(num_required))
        report.takes += 1
        assert own.refused == their.refused == (num_required < 1), (own, their)
        if own.refused:
            assert own.said in their.said, (own, their)
            return
        if not self.made.sparse:
            own, their = Outcome((own.result,)), Outcome((their.result,))
        if not all(same(*pair) for pair in zip(own.result, their.result, strict=True)):
            report.differs("take", self, Gradient(None), own, their)
        self.round = []
        self.step += 1

    def set_global_step(self, step: int) -> None:
        self.ours.set_global_step(step)
        self.theirs.set_global_step(step)
        self.step = step


def same(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()


# --- the differences -----------------------------------------------------------------------------


def _indices_of(both: Both, gradient: Gradient) -> list[Any]:
    return [each.indices for each in (*both.round, gradient) if each.indices is not None]


def _disordered(both: Both, gradient: Gradient) -> bool:
    return any(np.any(np.diff(indices) <= 0) for indices in _indices_of(both, gradient))


def _negative(_: Both, gradient: Gradient) -> bool:
    return np.ndim(gradient.indices) == 1 and bool(np.any(np.asarray(gradient.indices) < 0))


def _stale(both: Both, gradient: Gradient) -> bool:
    return bool(gradient.step < both.step)


def _more_dimensions(both: Both, gradient: Gradient) -> bool:
    declared = both.made.shape
    known = declared is not None and len(declared) and None not in declared
    return bool(known) and np.ndim(gradient.values) > len(declared)


def _not_given(_: Both, gradient: Gradient) -> bool:
    return gradient.shape is not None and np.size(gradient.shape) == 0


def _unknown(_: Both, gradient: Gradient) -> bool:
    return gradient.shape is not None and -1 in np.ravel(gradient.shape)


def _against_itself(_: Both, gradient: Gradient) -> bool:
    if gradient.shape is None or np.ndim(gradient.indices) != 1 or not np.size(gradient.shape):
        return False
    given, inner = np.ravel(gradient.shape), np.shape(gradient.values)[1:]
    high = max(gradient.indices, default=-1)
    return bool(high >= given[0]) or any(
        a not in {-1, b} for a, b in zip(given[1:], inner, strict=False)
    )


def _empty(_: Both, gradient: Gradient) -> bool:
    return bool(np.shape(gradient.indices) == np.shape(gradient.values) == (0,))


def _both_shapes(both: Both, gradient: Gradient) -> bool:
    return bool(both.round) and np.shape(gradient.values) != np.shape(both.round[0].values)


def _half(both: Both, _: Gradient) -> bool:
    return both.made.dtype == "float16"


class Difference(NamedTuple):
    """A row of the page that a single op can show.

    Attributes:
        of: "apply": only one accepts the gradient; "words": both refuse it; "take": results differ.
        row: The row's first cell.
        holds: Whether the row may explain a difference.
    """

    of: str
    row: str
    holds: Callable[[Both, Gradient], bool]


DIFFERENCES: Final = (
    Difference("apply", "a malformed gradient that is stale is dropped silently", _stale),
    Difference("apply", "negative indices are accepted", _negative),
    Difference(
        "apply", "values of more dimensions than declared fix the round's shape", _more_dimensions
    ),
    Difference("apply", "`grad_shape=[]` fails against a declared shape", _not_given),
    Difference("apply", "-1 in a `grad_shape` must be equal to the declared dimension", _unknown),
    Difference("apply", "a `grad_shape` may contradict its own gradient", _against_itself),
    Difference("apply", "`([], [])` is refused if rows have a shape", _empty),
    Difference("words", "of two shapes that do not fit, the round's is reported", _both_shapes),
    Difference("take", "unsorted or repeated indices give a wrong mean", _disordered),
    Difference("take", "float16 sums in float16", _half),
)


class Report:
    """The results of the programs."""

    def __init__(self) -> None:
        self.programs = self.applies = self.takes = self.refused_by_both = 0
        self.found: Counter[str] = Counter()
        self.unexplained: list[str] = []

    def differs(
        self, of: str, both: Both, gradient: Gradient, own: Outcome, their: Outcome
    ) -> None:
        rows = [each.row for each in DIFFERENCES if each.of == of and each.holds(both, gradient)]
        self.found.update(rows[:1])
        if of == "take" and own.result is not None and not _near(both, own.result, their.result):
            rows = []
        if not rows:
            self.unexplained.append(
                f"{of} {both.made} at step {both.step}, round of {both.round}: {gradient}\n"
                f"  ours   {own}\n  theirs {their.result} {their.said[-300:]}"
            )


def _near(both: Both, own: Any, their: Any) -> bool:
    """Return whether both results are nearly equal; a mean of disordered rows may be any number."""
    if both.made.reduction_type != "SUM" and _disordered(both, Gradient(None)):
        return True
    if both.made.sparse:
        own, their = (_dense(*each) for each in (own, their))
    return np.allclose(own, their, *((0.02, 0.05) if _half(both, Gradient(None)) else (1e-5, 1e-5)))


def _dense(indices: Any, values: Any, shape: Any) -> Any:
    table = np.zeros((12, *shape[1:]))
    np.add.at(table, indices, values)
    return table


# --- random programs -----------------------------------------------------------------------------

SHAPES_OF_TABLES: Final = (
    *(None, (), (None, 2), (8, 2), (8, None), (None, None)),
    *((8,), (None,), (8, 2, 3), (None, 2, None)),
)
SHAPES: Final = (None, (), (3,), (None,), (2, 3), (2, None), (None, None), (0, 2))


def inner_shape(declared: Any, rng: Any) -> tuple[int, ...]:
    if declared is None or declared == ():
        return ((), (2,), (3, 2), (0,))[rng.integers(4)]
    return tuple(int(rng.integers(0, 4)) if size is None else size for size in declared[1:])


def well_formed(both: Both, rng: Any) -> Gradient:
    """Return a gradient that fits the declaration, and the gradients already in the round."""
    made = both.made
    if both.round:
        shape = np.shape(both.round[0].values)[1 if made.sparse else 0 :]
    elif made.sparse:
        shape = inner_shape(made.shape, rng)
    else:
        shape = tuple(
            int(rng.integers(0, 4)) if size is None else size
            for size in (
                made.shape if made.shape is not None else ((), (2,), (3, 1))[rng.integers(3)]
            )
        )
    step = both.step + int(rng.choice([0, 0, 0, 0, 1, 7, -1, -5]))
    if not made.sparse:
        return Gradient(_numbers(shape, made.dtype, rng), step=step)
    count = int(rng.integers(0, 6))
    indices = np.sort(rng.choice(8, count, replace=False)).astype(np.int64)
    if rng.random() < 0.15:
        indices = rng.integers(0, 8, count)
    given = np.array([8, *shape]) if rng.random() < 0.3 else None
    return Gradient(_numbers((count, *shape), made.dtype, rng), indices, given, step)


def _numbers(shape: Any, dtype: str, rng: Any) -> Any:
    values = np.round(rng.standard_normal(shape) * 8, 3)
    return np.asarray(values, dtype)


def _with_shape(change: Callable[[Any], Any]) -> Callable[[Gradient, Any], Gradient]:
    def changed(gradient: Gradient, _: Any) -> Gradient:
        return gradient._replace(shape=change([8, *np.shape(gradient.values)[1:]]))

    return changed


def _of_values(change: Callable[[Any], Any]) -> Callable[[Gradient, Any], Gradient]:
    return lambda gradient, _: gradient._replace(values=change(gradient.values))


def _of_indices(change: Callable[[Any], Any]) -> Callable[[Gradient, Any], Gradient]:
    return lambda gradient, _: gradient._replace(indices=change(gradient.indices))


MISTAKES: Final[tuple[Callable[[Gradient, Any], Gradient], ...]] = (
    _of_values(lambda values: values[..., None]),
    _of_values(lambda values: values[None]),
    _of_values(lambda values: values.reshape(-1)),
    _of_values(lambda values: np.concatenate([values, values], -1) if values.ndim else values),
    _of_values(lambda values: values.sum()),
)
MISTAKES_OF_TABLES: Final = (
    *MISTAKES,
    _of_values(lambda values: values[1:]),
    _of_indices(lambda indices: indices[None]),
    _of_indices(lambda _: np.int64(0)),
    _of_indices(lambda indices: indices + 100),
    _of_indices(lambda indices: -1 - indices),
    _of_indices(lambda indices: indices[::-1]),
    _with_shape(lambda _: []),
    _with_shape(lambda shape: shape[:1]),
    _with_shape(lambda shape: [*shape, 5]),
    _with_shape(lambda shape: [-1] * len(shape)),
    _with_shape(lambda shape: [7, *shape[1:]]),
    _with_shape(lambda shape: [1, *shape[1:]]),
    _with_shape(lambda shape: [shape[0], *(size + 1 for size in shape[1:])]),
    _with_shape(lambda shape: [shape]),
    lambda gradient, _: gradient._replace(
        indices=np.zeros(0, np.int64), values=np.zeros(0, gradient.values.dtype)
    ),
)


def program(rng: Any, report: Report, *, mistakes: bool) -> None:
    """Run a random program; it ends when the states of both differ."""
    sparse = bool(rng.integers(2))
    shapes: Any = SHAPES_OF_TABLES if sparse else SHAPES
    made = Made(
        sparse,
        str(rng.choice(["float16", "float32", "float32", "float64"])),
        shapes[rng.integers(len(shapes))],
        (None, "MEAN", "SUM")[rng.integers(3)],
    )
    both = Both(made)
    report.programs += 1
    for _ in range(OPS):
        what = rng.random()
        if what < 0.8:
            gradient = well_formed(both, rng)
            if mistakes and rng.random() < 0.4:
                kinds = MISTAKES_OF_TABLES if sparse else MISTAKES
                gradient = kinds[rng.integers(len(kinds))](gradient, rng)
            if not both.apply(gradient, report):
                break
        elif what < 0.9:
            both.set_global_step(both.step + int(rng.choice([0, 1, 3, -2])))
        else:
            both.take(int(rng.choice([0, -1])), report)
        if both.round and rng.random() < 0.3:
            both.take(int(rng.integers(1, len(both.round) + 1)), report)
    both.close()


def _programs(seed: int) -> Report | None:
    if not _import():
        return None
    report = Report()
    for number in range(PROGRAMS):
        rng = np.random.default_rng([seed, number])
        program(rng, report, mistakes=number % 2 == 1)
    return report


def _import() -> bool:
    global tf  # noqa: PLW0603  see the head
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        tf = importlib.import_module("tensorflow")
    except ModuleNotFoundError:
        return False
    return True


# --- each row of the page -------------------------------------------------------------------------

TABLE: Final = Made(sparse=True, dtype="float32", shape=(3, 2), reduction_type="MEAN")
DENSE: Final = Made(sparse=False, dtype="float32", shape=(2,), reduction_type="MEAN")
ONE_ROW: Final = np.ones((1, 2), np.float32)
FIRST: Final = Gradient(ONE_ROW, np.array([0]))

# For each row of DIFFERENCES: gradients; at the last one both differ.
APPLIES: Final[dict[str, tuple[Made, list[Gradient]]]] = {
    "a malformed gradient that is stale is dropped silently": (
        TABLE,
        [FIRST._replace(indices=np.array([9]), step=-1)],
    ),
    "negative indices are accepted": (TABLE, [FIRST._replace(indices=np.array([-1]))]),
    "values of more dimensions than declared fix the round's shape": (
        TABLE,
        [FIRST._replace(values=np.ones((1, 2, 2), np.float32))],
    ),
    "`grad_shape=[]` fails against a declared shape": (TABLE, [FIRST._replace(shape=[])]),
    "-1 in a `grad_shape` must be equal to the declared dimension": (
        TABLE,
        [FIRST._replace(shape=[-1, 2])],
    ),
    "a `grad_shape` may contradict its own gradient": (
        TABLE._replace(shape=None),
        [FIRST._replace(shape=[5, 9])],
    ),
    "`([], [])` is refused if rows have a shape": (
        TABLE,
        [Gradient(np.zeros(0, np.float32), np.zeros(0, np.int64))],
    ),
    "of two shapes that do not fit, the round's is reported": (
        DENSE._replace(shape=(None, 2)),
        [Gradient(np.ones((4, 2), np.float32)), Gradient(np.ones((5, 3), np.float32))],
    ),
    "unsorted or repeated indices give a wrong mean": (
        TABLE,
        [
            FIRST._replace(values=np.ones((2, 2), np.float32), indices=np.array([1, 1])),
            FIRST._replace(indices=np.array([1])),
        ],
    ),
    "float16 sums in float16": (
        DENSE._replace(dtype="float16", reduction_type="SUM"),
        [Gradient(np.full(2, number, np.float16)) for number in (2048, 1, 1)],
    ),
}


def _of_gradients(row: str) -> None:
    made, gradients = APPLIES[row]
    both, report = Both(made), Report()
    for gradient in gradients[:-1]:
        assert both.apply(gradient, report)
    assert not report.found
    both.apply(gradients[-1], report)
    if not report.found:
        both.take(1, report)
    assert report.found == {row: 1}
    assert report.unexplained == []
    both.close()


def _call(made: Made, method: str, *args: Any, **keywords: Any) -> tuple[Outcome, Outcome]:
    """Call a method of both accumulators as users do; return our outcome and TensorFlow's."""
    both = Both(made)

    def call(acc: Any) -> Any:
        return getattr(acc, method)(*args, **keywords)

    found = outcome(lambda: both.ours.run(call)), outcome(lambda: both.theirs.run(call))
    both.close()
    return found


def _returns_nothing() -> None:
    for step in (0, -1):
        own, their = _call(DENSE, "apply_grad", [1.0, 2.0], local_step=step)
        assert type(own.result) is bool
        assert their == Outcome(None)


def _casts_silently() -> None:
    for given in (np.array([1, 2j]), np.array([1e300, 0])):
        own, their = _call(DENSE, "apply_grad", given)
        assert (own.error, their.refused) == ("InvalidArgumentError", False)


def _truncates() -> None:
    wrong: tuple[tuple[Made, str, Any, dict[str, Any]], ...] = (
        (DENSE, "apply_grad", ([1.0, 2.0],), {"local_step": 1.9}),
        (DENSE, "apply_grad", ([1.0, 2.0],), {"local_step": True}),
        (DENSE, "set_global_step", (np.uint64(2**63),), {}),
        (DENSE, "set_global_step", (0.5,), {}),
        (TABLE, "apply_grad", ([0.5], ONE_ROW), {}),
        (TABLE, "apply_grad", ([True], ONE_ROW), {}),
        (TABLE, "apply_grad", (np.array([2**64 - 1], np.uint64), ONE_ROW), {}),
        (TABLE, "apply_grad", ([0], ONE_ROW), {"grad_shape": [3.9, 2]}),
    )
    for made, method, args, keywords in wrong:
        own, their = _call(made, method, *args, **keywords)
        assert (own.error, their.refused) == ("InvalidArgumentError", False)


def _step_of_one_element() -> None:
    both = Both(DENSE)
    gradient = Gradient(np.ones(2, np.float32), step=np.array([0]))
    for each in (both.ours, both.theirs):
        refused = outcome(functools.partial(each.apply, gradient))
        assert refused.error == "InvalidArgumentError"
    assert (both.ours.num_accumulated(), both.theirs.num_accumulated()) == (0, 1)
    both.close()


def _subnormals() -> None:
    both = Both(DENSE._replace(reduction_type="SUM"))
    taken = []
    for each in (both.ours, both.theirs):
        for _ in range(2):
            each.apply(Gradient(np.full(2, 1e-40, np.float32)))
        taken.append(each.take(2).tolist())
    assert taken == [[float(np.float32(1e-40)) * 2] * 2, [0.0, 0.0]]
    both.close()


def _last_step() -> None:
    both = Both(DENSE)
    both.set_global_step(MOST)
    gradient = Gradient(np.ones(2, np.float32), step=MOST)
    for each in (both.ours, both.theirs):
        each.apply(gradient)
    assert outcome(lambda: both.ours.take(1)).error == "OutOfRangeError"
    assert not outcome(lambda: both.theirs.take(1)).refused
    both.theirs.apply(gradient._replace(step=-MOST))
    assert both.theirs.num_accumulated() == 1
    both.close()


def _sixteen_dtypes() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="allowed"):
        shmacc.ConditionalAccumulator(tf.resource)
    others = dtype_names.NUMBERS.keys() - {"float16", "float32", "float64"}
    assert len(others) == 16
    for name in others:
        with shmacc.ConditionalAccumulator(name, (1,)) as acc:
            assert acc.num_accumulated() == 0
        theirs = Theirs(sparse=False, dtype=tf.as_dtype(name), shape=(1,))
        failed = outcome(theirs.num_accumulated)
        assert "No OpKernel was registered" in failed.said
        theirs.close()


def _no_cmean() -> None:
    with shmacc.SparseConditionalAccumulator("float32", reduction_type="CMEAN") as acc:
        assert acc.reduction_type == "CMEAN"
    made = {"dtype": "float32", "reduction_type": "CMEAN"}
    assert outcome(lambda: Theirs(sparse=True, **made)).error == "ValueError"


def _disagreement() -> None:
    theirs = Theirs(sparse=False, dtype="float32", shape=(2,), shared_name="w:0/grad")
    theirs.num_accumulated()
    kind = tf.compat.v1.ConditionalAccumulator
    with theirs.graph.as_default():
        other = kind("float64", (3,), shared_name="w:0/grad").num_accumulated()
        assert theirs.session.run(other) == 0
    theirs.close()
    with (
        shmacc.ConditionalAccumulator("float32", (2,), "w:0/grad", unlink_on_close=True),
        pytest.raises(errors.InvalidArgumentError, match="float32, but float64"),
    ):
        shmacc.ConditionalAccumulator("float64", (2,), "w:0/grad")


def _dtype_as_given() -> None:
    both = Both(DENSE)
    assert (both.ours.acc.dtype, both.theirs.acc.dtype) == (np.dtype("float32"), "float32")
    assert type(both.theirs.acc.dtype) is str
    both.close()


def _unique_name() -> None:
    with tf.Graph().as_default():
        names = [tf.compat.v1.ConditionalAccumulator("float32", name="Q").name for _ in range(2)]
    assert names == ["Q", "Q_1"]
    for _ in range(2):
        with shmacc.ConditionalAccumulator("float32", name="Q") as acc:
            assert acc.name == "Q"


def _fatal_values() -> None:
    ones = np.ones((1, 2))
    ours = Ours(sparse=True, dtype="float32", shape=(3, 2))
    assert ours.apply(Gradient(ones.tolist(), [0]))
    assert outcome(lambda: ours.apply(Gradient(ones * 1j, [0]))).error == "InvalidArgumentError"
    ours.close()


def _fatal_take() -> None:
    with shmacc.ConditionalAccumulator("float32", (2,)) as acc:
        acc.apply_grad([1.0, 2.0])
        taken = outcome(lambda: shmacc.raw_ops.AccumulatorTakeGradient(acc, 1, "float64"))
        assert taken.error == "InvalidArgumentError"


def _wrong_values() -> None:
    theirs = Theirs(sparse=True, dtype="float32", shape=(3, 2))
    theirs.run(lambda acc: acc.apply_grad([0], np.ones((1, 2)) * 1j))


def _wrong_take() -> None:
    theirs = Theirs(sparse=False, dtype="float32", shape=(2,))
    theirs.run(lambda acc: acc.apply_grad([1.0, 2.0]))
    take = tf.raw_ops.ResourceAccumulatorTakeGradient
    theirs.run(lambda acc: take(handle=acc.accumulator_ref, num_required=1, dtype=tf.float64))


FATAL: Final = {
    "values of another dtype end the process": (_fatal_values, _wrong_values),
    "a raw take with another `dtype` ends the process": (_fatal_take, _wrong_take),
}
OTHERS: Final[dict[str, Callable[[], None]]] = {
    "`apply_grad` returns nothing, whether it dropped the gradient or not": _returns_nothing,
    "a dense array of any dtype is cast silently": _casts_silently,
    "floats as steps, indices and shapes are truncated, large ones wrap": _truncates,
    "a `local_step` of shape `[1]` raises and is applied": _step_of_one_element,
    "subnormals are flushed to zero": _subnormals,
    "after step 2\\*\\*63 - 1 comes the lowest": _last_step,
    "16 of the 19 advertised dtypes fail at the first run": _sixteen_dtypes,
    "MEAN, SUM": _no_cmean,
    "a `shared_name` with another kind, dtype, shape or reduction is accepted": _disagreement,
    "`dtype` is what was passed": _dtype_as_given,
    "`name` is made unique in its graph": _unique_name,
}


def _ended_by(call: Callable[[], None]) -> int:
    """Call in a fork; return the signal that ends it. No session has made threads yet."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        outcome(call)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _each_row() -> dict[str, str] | None:
    """Return each row's traceback, or "" if the row is true; None: there is no TensorFlow."""
    if not _import():
        return None
    shown: dict[str, Callable[[], None]] = {}
    for row, (own, their) in FATAL.items():
        assert _ended_by(their) in {signal.SIGABRT, signal.SIGSEGV}, row
        shown[row] = own
    shown |= OTHERS
    shown |= {row: functools.partial(_of_gradients, row) for row in APPLIES}
    found = {}
    for row, show in shown.items():
        try:
            show()
            found[row] = ""
        except Exception:  # noqa: BLE001  all rows are shown
            found[row] = traceback.format_exc()
    return found


def test_each_row_of_the_page_is_true() -> None:
    found: dict[str, str] | None = run_apart(_each_row, method="spawn")
    if found is None:
        pytest.skip("No module named 'tensorflow'")
    assert not any(found.values()), "\n".join(found.values())
    assert sorted(found) == sorted(rows_of_the_page())
    assert APPLIES.keys() == {each.row for each in DIFFERENCES}


def test_random_programs_differ_only_as_the_page_says() -> None:
    with Apart(_programs, SEED, method="spawn") as process:
        report: Report | None = process.result(max(LONG, PROGRAMS * LONG / 10))
    if report is None:
        pytest.skip("No module named 'tensorflow'")
    logging.getLogger(__name__).info(
        "%d programs, %d applies, of which both refused %d, %d takes; differences: %s",
        *(report.programs, report.applies, report.refused_by_both, report.takes, report.found),
    )
    assert report.unexplained == [], "\n".join(report.unexplained[:5])
