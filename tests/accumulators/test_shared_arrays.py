"""Arrays in shared memory, by name: what they contain, who may write, what keeps them."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
import pytest
from helpers import interpreter
from helpers.apart import Apart, Crew, Pipe, every_start_method, run_apart
from helpers.inspect_tool import ask, run
from helpers.support import refused, same_bits

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    Parameters,
    SharedArrays,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
    inspection,
    testing,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.numpy_model import Array

pytestmark = pytest.mark.threads

# What is collected unclosed on purpose.
unclosed = pytest.mark.filterwarnings("ignore:unclosed SharedArrays:ResourceWarning")

NAME: Final = "params"
TABLE: Final = np.arange(12, dtype=np.float32).reshape(4, 3)
PLAIN: Final = (
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool"),
    *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
)
DTYPES: Final[tuple[np.dtype[Any], ...]] = (
    *map(np.dtype, PLAIN),
    np.dtype(ml_dtypes.bfloat16),
    *(np.dtype([(f"q{name}", name)]) for name in ("int8", "uint8", "int16", "uint16", "int32")),
)


def make(**keywords: Any) -> SharedArrays:
    """One table and one bias, under the name of these tests."""
    contents = {"emb": TABLE, "bias": TensorSpec((3,), "float64")}
    return SharedArrays(contents, NAME, **keywords)


def some(dtype: np.dtype[Any]) -> Array:
    """Values of that dtype, no two of the same bytes where it has so many."""
    plain = np.dtype(dtype[0]) if dtype.names else dtype
    values = np.arange(6).reshape(2, 3).astype(plain)
    return values.view(dtype)


def test_signatures() -> None:
    owners = "mode=None, owners='mine', if_exists='attach', unlink_on_close=False"
    for signature, want in {
        inspect.signature(SharedArrays): f"(contents, shared_name=None, *, {owners})",
        inspect.signature(SharedArrays.attach): (
            "(shared_name, *, writable=False, timeout=None, owners='mine')"
        ),
    }.items():
        plain = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ]
        assert str(inspect.Signature(plain)) == want


# -- contents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_the_same_elsewhere(dtype: np.dtype[Any]) -> None:
    given = some(dtype)
    with SharedArrays({"a": given}, NAME) as params:
        same_bits(params["a"], given)
        found = run_apart(lambda: np.array(SharedArrays.attach(NAME)["a"]))
        same_bits(found, given)
        params.unlink()


@pytest.mark.parametrize("dtype", ["half", "float", np.double, ">i4", "<u2", np.longlong, "qint8"])
def test_any_spelling_of_a_dtype(dtype: Any) -> None:
    spec = TensorSpec((2,), dtype)
    with SharedArrays({"a": spec}) as params:
        assert params["a"].dtype == spec.dtype
        assert params["a"].tobytes() == bytes(2 * spec.dtype.itemsize)


def test_contents_of_another_byte_order_or_layout_are_the_same_numbers() -> None:
    given = {
        "swapped": TABLE.astype(">f4"),
        "fortran": np.asfortranarray(TABLE),
        "strided": TABLE[::2, ::-1],
        "list": [[1, 2], [3, 4]],
        "scalar": np.float64(2.5),
    }
    with SharedArrays(given) as params:
        for name, value in given.items():
            want = np.asarray(value)
            same_bits(params[name], want.astype(want.dtype.newbyteorder("=")))
            assert params[name].flags.c_contiguous
            assert params[name].flags.aligned


def test_contents_are_copied() -> None:
    given = TABLE.copy()
    with SharedArrays({"a": given}) as params:
        given[:] = 0
        same_bits(params["a"], TABLE)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,) * 20, (5,)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    with SharedArrays({"zeros": TensorSpec(shape), "given": np.ones(shape)}) as params:
        same_bits(params["zeros"], np.zeros(shape, np.float32))
        same_bits(params["given"], np.ones(shape))


def test_a_sparse_members_spec_is_the_whole_table() -> None:
    with SharedArrays({"emb": IndexedSlicesSpec((4, 3), "float32")}) as params:
        assert params["emb"].shape == (4, 3)


def test_as_many_as_there_may_be() -> None:
    names = [f"layer.{i} ☃" for i in range(4096)]
    with SharedArrays({name: np.full(2, i) for i, name in enumerate(names)}, NAME) as params:
        assert list(params) == names
        with SharedArrays.attach(NAME) as same:
            assert all(same[name][1] == i for i, name in enumerate(names))
        params.unlink()


def test_larger_than_what_is_written_at_once() -> None:
    """Its pieces are in their places."""
    given = np.arange(9 << 20, dtype=np.uint64)  # 72 MiB
    with SharedArrays({"small": TABLE, "large": given, "last": TABLE}) as params:
        assert np.array_equal(params["large"], given)
        same_bits(params["last"], TABLE)


# -- a mapping ------------------------------------------------------------------------------------


def test_it_is_a_mapping() -> None:
    with make() as params:
        assert isinstance(params, Mapping)
        assert len(params) == 2
        assert list(params) == list(params.keys()) == ["emb", "bias"]
        assert "emb" in params
        assert "else" not in params
        assert params.get("else") is None
        with pytest.raises(KeyError, match="else"):
            params["else"]
        same_bits(dict(params.items())["emb"], TABLE)
        assert [value.shape for value in params.values()] == [(4, 3), (3,)]
        assert params.name == params.shared_name == NAME
        assert params.writable
        shown = "emb: float32 (4, 3), bias: float64 (3,)"
        assert repr(params) == f"<SharedArrays {NAME!r} of 2 arrays: {shown}>"
        with SharedArrays.attach(NAME) as same:
            assert same != params
            assert len({same, params}) == 2
            assert repr(same) == f"<SharedArrays {NAME!r} of 2 arrays read-only: {shown}>"
        params.unlink()
    assert repr(params) == f"<SharedArrays {NAME!r} of 2 arrays closed: {shown}>"
    with SharedArrays({str(i): np.zeros(i) for i in range(20)}) as many:
        assert repr(many).endswith("6: float64 (6,), 7: float64 (7,), and 12 more>")


def test_assigning_writes_into_the_array() -> None:
    with make() as params, SharedArrays.attach(NAME) as same:
        bias = params["bias"]
        params["bias"] -= 1
        assert same["bias"].tolist() == bias.tolist() == [-1, -1, -1]
        params["bias"] = [1, 2, 3]
        params["emb"] = 0
        assert bias.tolist() == [1, 2, 3]
        assert not same["emb"].any()
        with pytest.raises(KeyError):
            params["else"] = 1
        with pytest.raises(ValueError, match="broadcast"):
            params["bias"] = np.ones(4)
        for value in (same["bias"], 1):
            with pytest.raises(ValueError, match="read-only"):
                same["bias"] = value
        with pytest.raises(ValueError, match="read-only"):
            same["bias"] -= 1
        assert bias.tolist() == [1, 2, 3]
        params.unlink()


def test_every_access_is_the_same_memory() -> None:
    with make() as params:
        first, second = params["emb"], params["emb"]
        assert np.shares_memory(first, second)
        first[1, 1] = 99
        assert second[1, 1] == 99
        params.unlink()


class MultiDict(dict[str, Any]):
    """A mapping whose items repeat each name."""

    def items(self) -> Any:
        return [*super().items(), *super().items()]


def test_what_it_refuses(namespace: str) -> None:
    unknown = TensorSpec((None, 3))
    too_large = np.broadcast_to(np.zeros(1, np.float64), (1 << 20, 1 << 20))
    wrong: dict[str, Any] = {
        "but were a list": [("a", TABLE)],
        "1 to 4096 shared arrays, but 0": {},
        "1 to 4096 shared arrays, but 4097": {str(i): 0 for i in range(4097)},
        "An array's name is 1 to 200 printable characters, but was 3": {3: TABLE},
        "but was ''": {"": TABLE},
        r"but was 'a\\n'": {"a\n": TABLE},
        "The shape of array 'a' must be known, but is \\[\\?,3\\]": {"a": unknown},
        "must be known, but is <unknown>": {"a": TensorSpec()},
        "Array 'a' has dtype object|must be an array of numbers": {"a": [object()]},
        "Array 'a' has dtype <U1": {"a": np.array(["x"])},
        "Array 'a' has dtype datetime64": {"a": np.zeros(2, "M8[s]")},
        "Array 'a' has dtype float128": {"a": np.zeros(2, np.longdouble)},
        r"an array or a TensorSpec, but was a tuple: TensorSpec\(\(100, 3\)\)": {"a": (100, 3)},
        "masked": {"a": np.ma.masked_equal(TABLE, 3)},
        "at most 2\\*\\*40 bytes, but array 'a'": {"a": too_large},
    }
    for message, contents in wrong.items():
        with pytest.raises(errors.InvalidArgumentError, match=message):
            SharedArrays(contents, NAME)
    for keywords in ({"mode": 0o1777}, {"if_exists": "else"}, {"owners": "else"}):
        with refused():
            make(**keywords)
    with refused():
        SharedArrays({"a": TABLE}, "no/name")
    with pytest.raises(errors.InvalidArgumentError, match="Array 'a' occurs more than once"):
        SharedArrays(MultiDict({"a": TABLE}), NAME)
    assert testing.leaked_names(namespace) == ()


# -- who may write --------------------------------------------------------------------------------


def test_attached_arrays_are_read_only_unless_asked() -> None:
    with make() as params:
        for same in (SharedArrays.attach(NAME), shmacc.attach(NAME)):
            assert isinstance(same, SharedArrays)
            assert not same.writable
            with pytest.raises(ValueError, match="read-only"):
                same["emb"][0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                same["emb"].setflags(write=True)
            same.close()
        with SharedArrays.attach(NAME, writable=True) as writer:
            writer["emb"][2] = 5
        assert params["emb"][2].tolist() == [5, 5, 5]
        params.unlink()


def write_to(address: int) -> None:
    """Write one byte, whatever NumPy says."""
    faulthandler.disable()  # its death is what is asked for
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # a sanitizer would end it otherwise
    ctypes.memset(address, 1, 1)


def test_not_even_the_memory_is_writable() -> None:
    with make() as params:
        with SharedArrays.attach(NAME) as same:
            address = same["emb"].ctypes.data
            emb = same["emb"]
            with Apart(write_to, address) as process:
                assert os.WTERMSIG(process.wait()) == signal.SIGSEGV
            same_bits(emb, TABLE)
        writable = params["emb"]
        run_apart(write_to, writable.ctypes.data)
        assert writable.tobytes()[0] == 1
        params.unlink()


# -- constructing and attaching -------------------------------------------------------------------


def test_a_second_constructor_attaches_and_leaves_the_contents() -> None:
    with make() as params:
        params["bias"][:] = 7
        other = {"bias": np.ones(3), "emb": TensorSpec((4, 3))}  # their order does not matter
        with SharedArrays(other, NAME) as same:
            assert same["bias"].tolist() == [7, 7, 7]
            same_bits(same["emb"], TABLE)
            same["bias"][0] = 8
        assert params["bias"][0] == 8
        params.unlink()


def test_disagreement_names_the_first_array_that_differs() -> None:
    bias = TensorSpec((3,), "float64")
    cases: dict[tuple[str, str, str], Any] = {
        ("dtype of array 'emb'", "float32", "int32"): {"bias": bias, "emb": TABLE.astype("i4")},
        ("shape of array 'bias'", "[3]", "[4]"): {"emb": TABLE, "bias": np.zeros(4)},
        ("shape of array 'emb'", "[4,3]", "[12]"): {"emb": TABLE.reshape(-1), "bias": 1},
        ("array 'more'", "none", "float64 []"): {"emb": TABLE, "more": 1.0, "bias": bias},
        ("array 'bias'", "float64 [3]", "none"): {"emb": TABLE},
    }
    with make() as params:
        for (what, existing, asked), contents in cases.items():
            with pytest.raises(errors.InvalidArgumentError) as caught:
                SharedArrays(contents, NAME)
            error = pickle.loads(pickle.dumps(caught.value))
            assert (error.what, error.existing, error.asked) == (what, existing, asked)
            for part in (what, existing, asked, "shmacc-inspect remove", repr(NAME)):
                assert part in str(error)
        with pytest.raises(errors.InvalidArgumentError, match="mode 0600, but 0666"):
            make(mode=0o666)
        with SharedArrays.attach(NAME) as same:
            assert same["emb"].shape == (4, 3)
        params.unlink()
    gc.collect()


def test_accumulators_and_arrays_are_told_apart() -> None:
    spec = TensorSpec((4, 3))
    opens_arrays: tuple[Callable[[], Any], ...] = (make, lambda: SharedArrays.attach(NAME))
    opens_accumulators: dict[str, Callable[[], Any]] = {
        "dense": lambda: ConditionalAccumulator("f4", None, NAME),
        "sparse": lambda: SparseConditionalAccumulator("f4", None, NAME),
        "group": lambda: AccumulatorGroup({"emb": spec}, NAME),
        "dense attached": lambda: ConditionalAccumulator.attach(NAME),
        "group attached": lambda: AccumulatorGroup.attach(NAME),
    }
    for flag in (np.zeros(2, bool), TABLE):
        with SharedArrays({"emb": flag}, NAME) as params:
            for kind, opener in opens_accumulators.items():
                with pytest.raises(errors.InvalidArgumentError, match="is the name of shared") as e:
                    opener()
                assert (e.value.what, e.value.existing) == ("kind", "arrays")
                assert e.value.asked == kind.split()[0]
            assert inspection.describe(NAME).stats.attached == 1
            params.unlink()
    for make_one in list(opens_accumulators.values())[:3]:
        with make_one() as acc:
            for opener in opens_arrays:
                with pytest.raises(errors.InvalidArgumentError, match="an accumulator") as e:
                    opener()
                assert (e.value.what, e.value.asked) == ("kind", "arrays")
            acc.unlink()


def test_attaching_what_is_another_kind_advises_what_attach_takes() -> None:
    wrong: list[tuple[Any, list[Callable[[str], Any]]]] = [
        (make, [ConditionalAccumulator.attach, AccumulatorGroup.attach, Parameters.attach]),
        (
            lambda: Parameters({"a": TABLE}, NAME),
            [SparseConditionalAccumulator.attach, partial(SharedArrays.attach, writable=True)],
        ),
        (
            lambda: ConditionalAccumulator("f4", None, NAME),
            [SparseConditionalAccumulator.attach, SharedArrays.attach, Parameters.attach],
        ),
    ]
    for make_one, openers in wrong:
        with make_one() as one:
            for opener in openers:
                with pytest.raises(errors.InvalidArgumentError, match="is the name of") as caught:
                    opener(NAME)
                message = str(caught.value)
                assert "if_exists" not in message
                assert "remove" not in message
                assert "shmacc.attach returns whatever has a name" in message
            with shmacc.attach(NAME) as found:
                assert type(found) is type(one)
            one.unlink()


def test_if_exists() -> None:
    with make(), pytest.raises(errors.AlreadyExistsError, match=repr(NAME)):
        make(if_exists="error")
    with (
        SharedArrays.attach(NAME),
        pytest.raises(errors.FailedPreconditionError, match="in use") as caught,
    ):
        make(if_exists="replace")
    assert caught.value.pids
    with SharedArrays({"other": np.ones(2)}, NAME, if_exists="replace") as other:
        assert list(other) == ["other"]
        other.unlink()


def test_unlink_on_close(namespace: str) -> None:
    with make(unlink_on_close=True):
        SharedArrays.attach(NAME).close()
        assert testing.leaked_names(namespace)
    assert testing.leaked_names(namespace) == ()


@unclosed
def test_private_ones_go_with_their_creator(namespace: str) -> None:
    params = SharedArrays({"a": TABLE})
    assert testing.leaked_names(namespace)
    with SharedArrays.attach(params.shared_name) as same:
        same_bits(same["a"], TABLE)
    del params
    gc.collect()
    assert testing.leaked_names(namespace) == ()
    script = """
        private = shmacc.SharedArrays({"a": np.ones(3)})
        array = private["a"]
        print(array.sum())
    """
    assert interpreter.run(script) == (0, "3.0", "")
    assert testing.leaked_names(namespace) == ()


def test_not_found_names_the_namespace(namespace: str) -> None:
    with pytest.raises(errors.NotFoundError, match=f"{NAME!r} in the namespace {namespace!r}") as e:
        SharedArrays.attach(NAME)
    assert (e.value.shared_name, e.value.namespace) == (NAME, namespace)
    with pytest.raises(errors.DeadlineExceededError, match=f"in the namespace {namespace!r}"):
        SharedArrays.attach(NAME, timeout=0.01)


def make_when_told(*, pipe: Pipe) -> None:
    pipe.hear()
    with make():
        pipe.say()
        pipe.hear()


def test_attach_waits_until_they_are_complete() -> None:
    with Apart(make_when_told) as maker:
        maker.say()
        with SharedArrays.attach(NAME, timeout=60) as params:
            same_bits(params["emb"], TABLE)
            maker.hear()  # who has removed it before its maker attaches makes it make another
            params.unlink()
        maker.say()
        maker.result()


# -- processes ------------------------------------------------------------------------------------


def test_processes_of_no_relation() -> None:
    with make() as params:
        script = """
            params = shmacc.SharedArrays.attach("params", writable=True)
            params["emb"][1] *= 10
            reader = shmacc.attach("params")
            print(reader["emb"].sum(), reader["emb"].dtype, reader["bias"].flags.writeable)
        """
        assert interpreter.run(script) == (0, "174.0 float32 False", "")
        assert params["emb"].sum() == 174
        params.unlink()


def add_one(params: SharedArrays) -> bool:
    """Write if it may; whether it might."""
    array = params["bias"]
    if params.writable:
        array += 1
    return array.flags.writeable


@every_start_method
@pytest.mark.parametrize("writable", [True, False])
def test_pickles_with_the_right_to_write(crew: Crew, writable: bool) -> None:
    with make() as params, SharedArrays.attach(NAME, writable=writable) as sent:
        assert crew.start(add_one, sent).result() == writable
        assert params["bias"].tolist() == [float(writable)] * 3
        params.unlink()
        with pytest.raises(errors.NotFoundError):
            pickle.loads(pickle.dumps(sent))
    with pytest.raises(errors.FailedPreconditionError):
        pickle.dumps(sent)


def test_a_forked_child_shares_the_arrays_and_counts_as_a_process() -> None:
    with make() as params:
        emb = params["emb"]

        def child(*, pipe: Pipe) -> None:
            emb[0, 0] = 50  # got before the fork
            params["bias"][0] = 60
            pipe.say()
            pipe.hear()

        with Apart(child) as process:
            process.hear()
            assert emb[0, 0] == 50
            assert params["bias"][0] == 60
            assert inspection.describe(NAME).stats.attached == 2
            process.say()
            process.result()
        params.unlink()


def hold_an_array(*, pipe: Pipe) -> None:
    """Keep nothing but one array."""
    array = SharedArrays.attach(NAME)["emb"]
    pipe.say()
    pipe.hear()
    del array
    pipe.say()
    pipe.hear()


@unclosed
def test_an_array_alone_keeps_the_process_attached(namespace: str) -> None:
    make().close()
    with Apart(hold_an_array) as process:
        process.hear()
        gc.collect()
        assert inspection.describe(NAME).stats.attached == 1
        assert inspection.leftovers(namespace=namespace) == ()
        with pytest.raises(errors.FailedPreconditionError, match=f"pid {process.pid}"):
            inspection.remove(NAME)
        process.say()
        process.hear()
        (leftover,) = inspection.leftovers(namespace=namespace)
        assert inspection.clean(leftover)
        process.say()
        process.result()


# -- what keeps the memory ------------------------------------------------------------------------


def test_views_outlive_everything() -> None:
    params = make()
    view, transposed = params["emb"][1:3], params["emb"].T
    params.unlink()
    params.close()
    del params
    gc.collect()
    same_bits(view, TABLE[1:3])
    view[0, 0] = 77
    assert transposed[0, 1] == 77


def mapped_kib() -> int:
    """How much shared memory of the tests' namespace this process has mapped."""
    kib = 0
    ours = False
    with open("/proc/self/smaps", encoding="utf-8") as smaps:  # noqa: PTH123
        for line in smaps:
            if "-" in line.split(maxsplit=1)[0]:
                ours = "/dev/shm/shmacc." in line  # noqa: S108
            elif ours and line.startswith("Size:"):
                kib += int(line.split()[1])
    return kib


def test_the_memory_goes_with_the_last_array() -> None:
    before = mapped_kib()
    with SharedArrays({"large": TensorSpec((1 << 20,)), "small": TensorSpec((1,))}) as params:
        large, small = params["large"], params["small"]
        assert mapped_kib() - before >= 4 << 10
    assert mapped_kib() - before == (4 << 10) + 4  # closed: nothing but the arrays' memory
    view = large[5:6]
    del large
    assert mapped_kib() - before == (4 << 10) + 4
    del view
    assert mapped_kib() - before == 4
    small += 1
    assert small.tolist() == [1]
    del small
    assert mapped_kib() == before


def test_closed_while_other_threads_get_arrays() -> None:
    """They get the array, which is whole for as long as they have it, or the error."""
    for _ in range(50):
        params = SharedArrays({"a": TensorSpec((1 << 16,), "uint8")})
        params["a"][:] = 1
        ends: list[str] = []

        def get(params: SharedArrays = params, ends: list[str] = ends) -> None:
            try:
                while int(params["a"].sum()) == 1 << 16:
                    pass
                ends.append("wrong contents")
            except errors.FailedPreconditionError:
                ends.append("closed")

        threads = [threading.Thread(target=get) for _ in range(3)]
        for thread in threads:
            thread.start()
        params.close()
        for thread in threads:
            thread.join()
        assert ends == ["closed"] * 3


def test_arrays_outlive_the_descriptor() -> None:
    """A daemon closes all it finds."""
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


@unclosed
def test_nothing_is_kept_in_a_cycle() -> None:
    params = SharedArrays({"a": TABLE})
    gone = weakref.ref(params)
    array = params["a"]
    del params
    assert gone() is not None
    gc.disable()
    try:
        del array
        assert gone() is None
    finally:
        gc.enable()


def test_closed_is_closed() -> None:
    with make() as params:
        params.unlink()
        params.unlink()
    params.close()
    params.unlink()
    for call in (lambda: params["emb"], lambda: dict(params.items())):
        with pytest.raises(errors.FailedPreconditionError, match="closed"):
            call()
    assert list(params) == ["emb", "bias"]
    assert "emb" in params


# -- looking on -----------------------------------------------------------------------------------


def test_inspection_sees_them() -> None:
    with make():
        listed = {found["name"]: found for found in ask("list")["segments"]}
        assert listed[NAME]["kind"] == "arrays"
        assert listed[NAME]["attached_alive"] == 1
        assert listed[NAME]["bytes_reserved"] >= TABLE.nbytes
        shown = run("show", NAME)
        assert shown.returncode == 0, shown.stderr
        assert "arrays" in shown.stdout
        checked = run("check", NAME)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert inspection.check(NAME) == ()
        assert run("clean", "--yes").returncode == 0
        for refusal in (inspection.cancel, inspection.summarise_values):
            with pytest.raises(errors.InvalidArgumentError, match="shared arrays"):
                refusal(NAME)
        with SharedArrays.attach(NAME) as same:
            same_bits(same["emb"], TABLE)
    assert run("clean", "--yes").returncode == 0
    with pytest.raises(errors.NotFoundError):
        shmacc.attach(NAME)


def test_flags_can_be_shown(namespace: str) -> None:
    """The first one's dtype is one that accumulators do not have."""
    with SharedArrays({"flags": np.ones(3, bool)}, NAME) as params:
        (summary,) = inspection.list_segments(namespace=namespace)
        assert (summary.kind, summary.dtype, summary.shape) == ("arrays", "bool", (3,))
        assert inspection.check(NAME) == ()
        params.unlink()


# -- with rounds ----------------------------------------------------------------------------------


def work(name: str, steps: int) -> list[float]:
    """Send the parameters that were read, as gradients."""
    read = []
    with (
        SharedArrays.attach(name) as params,
        ConditionalAccumulator.attach("gradients") as acc,
    ):
        for step in range(steps):
            acc.wait_step(step - 1)
            seen = params["w"].copy()
            if acc.apply_grad(seen, step):
                read.append(float(seen[0]))
    return read


def test_a_round_needs_no_lock() -> None:
    steps = 20
    with (
        SharedArrays({"w": np.ones(1000)}, NAME, unlink_on_close=True) as params,
        ConditionalAccumulator(
            "float64", (1000,), "gradients", reduction_type="SUM", unlink_on_close=True
        ) as acc,
        multiprocessing.get_context("spawn").Pool(2) as pool,
    ):
        sent = [pool.apply_async(work, (NAME, steps)) for _ in range(2)]
        for step in range(steps):
            with acc.round(2, timeout=60) as taken:
                # Both were computed from all of what there was before this block, and the same.
                assert np.all(taken.value == 2 * params["w"])
                params["w"][:] = step + 2
        for got in sent:
            assert got.get(60) == [float(step + 1) for step in range(steps)]
