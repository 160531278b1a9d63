"""Names and contents of shared arrays, permission to write them, and how they end."""

import pickle
from collections.abc import Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.numpy_model import Array
from helpers.support import Repeating, refused, same_bits

import shmacc
from shmacc import IndexedSlicesSpec, SharedArrays, TensorSpec, errors, testing

pytestmark = pytest.mark.threads

NAME: Final = "params"
TABLE: Final = np.arange(12, dtype=np.float32).reshape(4, 3)

PLAIN: Final = (
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool"),
    *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
)
QUANTISED: Final = [(f"q{of}", of) for of in ("int8", "uint8", "int16", "uint16", "int32")]
DTYPES: Final = [*PLAIN, ml_dtypes.bfloat16, *([field] for field in QUANTISED)]


def make(**keywords: Any) -> SharedArrays:
    """Make a table and a bias named NAME; the close removes the name."""
    contents = {"emb": TABLE, "bias": TensorSpec((3,), "float64")}
    return SharedArrays(contents, NAME, unlink_on_close=True, **keywords)


def some(dtype: np.dtype[Any]) -> Array:
    """Return values of a dtype, as different as the dtype allows."""
    plain = np.dtype(dtype[0]) if dtype.names else dtype
    values = np.arange(6).reshape(2, 3).astype(plain)
    return values.view(dtype)


def test_every_dtype_is_the_same_in_another_process() -> None:
    given = {str(dtype): some(np.dtype(dtype)) for dtype in DTYPES}
    with SharedArrays(given, NAME, unlink_on_close=True) as params:
        found = run_apart(lambda: {k: np.array(v) for k, v in SharedArrays.attach(NAME).items()})
        for name, want in given.items():
            same_bits(params[name], want)
            same_bits(found[name], want)
            want[:] = 0  # the constructor made a copy
            assert params[name].tobytes() == found[name].tobytes()
    for spelling in ("half", "float", np.double, ">i4", "<u2", np.longlong, "qint8"):
        spec = TensorSpec((2,), spelling)
        with SharedArrays({"a": spec}) as params:
            assert params["a"].dtype == spec.dtype
            assert params["a"].tobytes() == bytes(2 * spec.dtype.itemsize)


def test_contents_may_have_another_byte_order_or_layout() -> None:
    given = {
        "swapped": TABLE.astype(">f4"), "fortran": np.asfortranarray(TABLE),
        "strided": TABLE[::2, ::-1], "list": [[1, 2], [3, 4]], "scalar": np.float64(2.5),
    }  # fmt: skip
    with SharedArrays(given) as params:
        for name, value in given.items():
            want = np.asarray(value)
            same_bits(params[name], want.astype(want.dtype.newbyteorder("=")))
            assert params[name].flags.c_contiguous
            assert params[name].flags.aligned


def test_shapes_are_accepted_or_refused_as_documented() -> None:
    for shape in (), (0,), (3, 0, 2), (1,) * 20, (5,):
        with SharedArrays({"zeros": TensorSpec(shape), "given": np.ones(shape)}) as params:
            same_bits(params["zeros"], np.zeros(shape, np.float32))
            same_bits(params["given"], np.ones(shape))
    with SharedArrays({"emb": IndexedSlicesSpec((4, 3), "float32")}) as params:
        assert params["emb"].shape == (4, 3)  # the whole table


def test_the_largest_number_of_arrays_is_accepted() -> None:
    names = [f"layer.{i} ☃" for i in range(4096)]
    with SharedArrays({name: np.full(2, i) for i, name in enumerate(names)}, NAME) as params:
        assert list(params) == names
        with SharedArrays.attach(NAME) as same:
            assert all(same[name][1] == i for i, name in enumerate(names))
        params.unlink()


def test_large_contents_are_written_in_pieces_without_gaps() -> None:
    """The constructor writes 72 MiB in several pieces."""
    given = np.arange(9 << 20, dtype=np.uint64)  # 72 MiB
    with SharedArrays({"small": TABLE, "large": given, "last": TABLE}) as params:
        assert np.array_equal(params["large"], given)
        same_bits(params["last"], TABLE)


def test_shared_arrays_are_a_mapping() -> None:
    with make() as params:
        assert isinstance(params, Mapping)
        assert list(params) == list(params.keys()) == ["emb", "bias"]
        assert "else" not in params
        with pytest.raises(KeyError, match="else"):
            params["else"]
        same_bits(dict(params.items())["emb"], TABLE)
        assert params.name == params.shared_name == NAME
        assert params.writable
        with SharedArrays.attach(NAME) as same:
            assert len({same, params}) == 2
            assert repr(same).startswith(f"<SharedArrays {NAME!r} of 2 arrays read-only: ")


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


def test_bad_arguments_are_refused(namespace: str) -> None:
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
    with refused():
        SharedArrays({"a": TABLE}, "no\0name")
    with pytest.raises(errors.InvalidArgumentError, match="Array 'a' occurs more than once"):
        SharedArrays(Repeating({"a": TABLE}), NAME)
    assert testing.leaked_names(namespace) == ()


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


def test_a_second_constructor_attaches_and_leaves_the_contents() -> None:
    with make() as params:
        params["bias"][:] = 7
        other = {"bias": np.ones(3), "emb": TensorSpec((4, 3))}  # members may be in any order
        with SharedArrays(other, NAME) as same:
            assert same["bias"].tolist() == [7, 7, 7]
            same["bias"][0] = 8
        assert params["bias"][0] == 8
        with pytest.raises(errors.InvalidArgumentError, match="mode 0600, but 0666"):
            make(mode=0o666)


@pytest.mark.parametrize("writable", [True, False])
def test_a_pickle_keeps_the_permission_to_write(*, writable: bool) -> None:
    with make() as params, SharedArrays.attach(NAME, writable=writable) as sent:
        with pickle.loads(pickle.dumps(sent)) as got:
            assert got.writable == got["bias"].flags.writeable == writable
        params.unlink()
        with pytest.raises(errors.NotFoundError):
            pickle.loads(pickle.dumps(sent))
    with pytest.raises(errors.FailedPreconditionError):
        pickle.dumps(sent)


def test_closed_arrays_raise() -> None:
    with make() as params:
        for _ in range(2):
            params.unlink()
    params.close()
    params.unlink()
    for call in (lambda: params["emb"], lambda: dict(params.items())):
        with pytest.raises(errors.FailedPreconditionError, match="closed"):
            call()
    assert list(params) == ["emb", "bias"]
