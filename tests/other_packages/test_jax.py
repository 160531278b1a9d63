"""Groups and shared arrays take and return JAX's pytrees."""

import re
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shmacc
import shmacc.jax
from shmacc import AccumulatorGroup, SharedArrays, errors
from shmacc.jax import TreeSpec


class Layer(NamedTuple):
    weights: Any
    bias: Any


def _params() -> dict[str, Any]:
    return {
        "layers": [Layer(jnp.ones((2, 3)), jnp.zeros(3)), Layer(jnp.ones((3, 1)), jnp.zeros(1))],
        "half": jnp.ones(2, jnp.bfloat16),
        "scale": 2.0,
        "nothing": None,
    }


NAMES: Final = ["half", *(f"layers/{i}/{name}" for i in (0, 1) for name in Layer._fields), "scale"]


def _equal(tree: Any, other: Any) -> bool:
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    same = jax.tree.map(lambda a, b: (a == b).all() and a.dtype == b.dtype, tree, other)
    return bool(jax.tree.all(same))


def test_leaves_are_named_by_their_key_paths() -> None:
    spec, shapes = TreeSpec(_params()), TreeSpec(jax.eval_shape(_params))
    assert list(map(repr, spec.members.values())) == list(map(repr, shapes.members.values()))
    assert list(spec.members) == NAMES
    assert spec.members["half"].dtype.name == "bfloat16"
    assert spec.members["layers/0/weights"].shape == (2, 3)
    assert spec.members["scale"].shape == ()
    assert {type(member) for member in spec.members.values()} == {shmacc.TensorSpec}
    assert list(TreeSpec(jnp.ones(2)).members) == ["."]
    assert "Layer" in repr(spec)


def test_some_leaves_may_have_sparse_gradients() -> None:
    spec = TreeSpec(
        {"emb": jnp.ones((10, 2)), "w": jnp.ones(2)},
        sparse=lambda name: "emb" in name,
        reduction_type="SUM",
    )
    assert isinstance(spec.members["emb"], shmacc.IndexedSlicesSpec)
    assert not isinstance(spec.members["w"], shmacc.IndexedSlicesSpec)
    assert {member.reduction_type for member in spec.members.values()} == {"SUM"}


@pytest.mark.parametrize(("tree", "options", "words"), [
    ({}, {}, "no leaves"), ({"a": "text"}, {}, r"'a'.*no array"),
    ({"a": jax.random.key(0)}, {}, r"'a'.*key<fry>.*jax.random.key_data"),
    ({"a": jnp.ones(2) > 0}, {}, r"'a'.*bool"),
    ({"a": 1.0}, {"sparse": lambda _: True}, r"'a'.*no rows"),
    ({"a": jnp.ones((2, 2))}, {"sparse": ["a"]}, "sparse must be a function"),
    ({"a": 2**40}, {}, rf"'a'.*{2**40}"), ({"a" * 201: 1.0}, {}, "200"),
    ({"a": 1.0}, {"reduction_type": "MAX"}, "MAX"),
    ({"a/b": 1.0, "a": {"b": 1.0}}, {}, "Two leaves.*'a/b'"),
])  # fmt: skip
def test_a_tree_that_cannot_be_accumulated_is_refused(tree: Any, options: Any, words: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        TreeSpec(tree, **options)


def test_gradients_go_in_and_come_back_as_trees() -> None:
    spec = TreeSpec(_params())
    with AccumulatorGroup(spec.members) as group:
        for times in (1.0, 3.0):
            gradient = jax.tree.map(lambda leaf, times=times: jnp.full_like(leaf, times), _params())
            assert group.apply(spec.flatten(gradient), 0)
        with group.round(2, timeout=0) as taken:
            mean = spec.unflatten(taken)
    assert _equal(mean, jax.tree.map(lambda leaf: jnp.full_like(leaf, 2.0), _params()))


def test_a_leaf_without_a_gradient_contributes_nothing_and_comes_back_as_zeros() -> None:
    spec = TreeSpec({"a": jnp.ones(2), "b": jnp.ones(3)})
    with AccumulatorGroup(spec.members) as group:
        group.apply(spec.flatten({"a": jnp.full(2, 4.0), "b": None}), 0)
        taken = group.take(1)
        assert list(taken) == ["a"]
        assert _equal(spec.unflatten(taken), {"a": jnp.full(2, 4.0), "b": jnp.zeros(3)})


def test_a_function_that_chooses_rows_must_return_something() -> None:
    """A function that returns None for some leaves, as `re.match` does, chooses the others."""
    with pytest.raises(errors.InvalidArgumentError, match="None for each leaf, 'a', 'emb': "):
        TreeSpec({"emb": jnp.ones((5, 2)), "a": jnp.ones(2)}, sparse=lambda _: None)  # type: ignore[arg-type,return-value]
    spec = TreeSpec({"emb": jnp.ones((5, 2)), "a": jnp.ones(2)}, sparse=re.compile("e").match)  # type: ignore[arg-type]
    assert [type(member).__name__ for member in spec.members.values()] == [
        "TensorSpec",
        "IndexedSlicesSpec",
    ]


def test_rows_go_in_as_pairs_and_come_back_in_a_whole_array() -> None:
    spec = TreeSpec({"emb": jnp.ones((5, 2)), "w": jnp.ones(2)}, sparse="emb".__eq__)

    def loss(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return (rows @ weights).sum()

    ids, params = jnp.array([3, 1, 3]), {"emb": jnp.ones((5, 2)), "w": jnp.array([1.0, 2.0])}
    rows, weights = jax.grad(loss, argnums=(0, 1))(params["emb"][ids], params["w"])
    with AccumulatorGroup(spec.members) as group:
        group.apply(spec.flatten({"emb": (ids, rows), "w": weights}), 0)
        group.apply(spec.flatten({"emb": shmacc.IndexedSlices(rows[:1], ids[:1]), "w": None}), 0)
        taken = group.take(2)
    assert taken["emb"].indices.tolist() == [1, 3]
    came = spec.unflatten(taken)
    assert came["emb"].tolist() == [[0, 0], [1, 2], [0, 0], [1.5, 3], [0, 0]]
    assert came["w"].tolist() == [3, 3]


def test_flattening_copies_nothing_on_a_cpu() -> None:
    params = {"w": jnp.arange(1000.0)}
    (leaf,) = TreeSpec(params).flatten(params).values()
    assert leaf.ctypes.data == params["w"].unsafe_buffer_pointer()


def test_a_tree_of_another_structure_is_refused() -> None:
    spec = TreeSpec({"a": jnp.ones(2), "b": jnp.ones(3)})
    words = "structure of this spec"
    with SharedArrays(spec.members) as shared:
        for other in ({"a": jnp.ones(2)}, [jnp.ones(2), jnp.ones(3)], jnp.ones(2)):
            with pytest.raises(errors.InvalidArgumentError, match=words):
                spec.flatten(other)
            with pytest.raises(errors.InvalidArgumentError, match=words):
                spec.store(other, shared)


def test_a_traced_function_cannot_read_shared_arrays() -> None:
    """The traced function would keep the values of the trace, and train with old parameters."""
    tree = {"a": jnp.zeros(2)}
    spec = TreeSpec(tree)
    with SharedArrays(spec.flatten(tree)) as shared:
        for trace in (jax.jit, jax.make_jaxpr):
            with pytest.raises(errors.InvalidArgumentError, match=r"inside of jax.jit.*outside"):
                trace(lambda: spec.unflatten(shared)["a"] + 1)()
        assert jax.grad(lambda x: x * spec.unflatten(shared)["a"].sum())(1.0) == 0


def test_a_gradient_that_does_not_fit_names_its_leaf() -> None:
    spec = TreeSpec({"a": jnp.ones(2), "b": jnp.ones(3)})
    with AccumulatorGroup(spec.members) as group:
        with pytest.raises(errors.InvalidArgumentError, match=r"'b'"):
            group.apply(spec.flatten({"a": jnp.ones(2), "b": jnp.ones(4)}), 0)
        assert group.num_accumulated() == 0


def test_a_tree_is_stored_in_shared_arrays_and_read_from_them() -> None:
    params = _params()
    spec = TreeSpec(params)
    with SharedArrays(spec.flatten(params), "params") as shared:
        assert shared["layers/0/weights"].tolist() == [[1, 1, 1], [1, 1, 1]]
        with SharedArrays.attach("params") as others:
            doubled = jax.tree.map(lambda leaf: jnp.asarray(leaf) * 2, params)
            spec.store(doubled, shared)
            came = spec.unflatten(others)
            del doubled["scale"], came["scale"]  # a Python number is float64 to NumPy
            assert _equal(came, doubled)
            with pytest.raises(ValueError, match="read-only"):
                spec.store(params, others)
        shared.unlink()


def test_overwritten_arrays_do_not_change_a_tree_that_was_read() -> None:
    # Pages are aligned as JAX wants its buffers: without a copy it would use the shared memory.
    spec = TreeSpec({"w": jnp.zeros(100_000)})
    with SharedArrays(spec.members) as shared, AccumulatorGroup(spec.members) as group:
        read = spec.unflatten(shared)
        shared["w"][...] = 1
        assert not read["w"].any()
        group.apply(spec.flatten({"w": jnp.ones(100_000)}), 0)
        taken = group.take(1)
        tree = spec.unflatten(taken)
        taken["w"].value[...] = 5
        assert (tree["w"] == 1).all()


def test_nothing_is_stored_if_a_leaf_does_not_fit() -> None:
    spec = TreeSpec({"a": jnp.ones(2), "b": jnp.ones(3)})
    with SharedArrays(spec.members) as shared:
        with pytest.raises(errors.InvalidArgumentError, match=r"'b'.*\(4,\).*\(3,\)"):
            spec.store({"a": jnp.ones(2), "b": jnp.ones(4)}, shared)
        assert not shared["a"].any()
        spec.store({"a": None, "b": jnp.ones(3)}, shared)
        assert (shared["a"].sum(), shared["b"].sum()) == (0, 3)


def test_numbers_that_an_array_or_a_leaf_cannot_have_are_refused() -> None:
    spec = TreeSpec({"a": jnp.ones(2), "i": jnp.arange(2)})
    with SharedArrays(spec.members) as shared:
        for leaf, words in (
            (jnp.array([1.5, 2.0]), "float32 do not convert to int32"),
            (jnp.array([1.0, 2.0]) * 1j, "complex64 do not convert to int32"),
            (np.array([2**40, 1]), "1099511627776, which does not fit int32"),
        ):
            with pytest.raises(errors.InvalidArgumentError, match=rf"'i'.*{words}"):
                spec.store({"a": jnp.ones(2), "i": leaf}, shared)
        assert not shared["a"].any()
    spec = TreeSpec({"seen": np.int64(0)})
    with SharedArrays({"seen": np.array(2**31)}) as shared:
        with pytest.raises(errors.InvalidArgumentError, match=r"'seen'.*2147483648.*int32"):
            spec.unflatten(shared)
        shared["seen"] -= 1
        assert spec.unflatten(shared)["seen"] == 2**31 - 1


def test_rows_that_a_leaf_cannot_have_are_refused() -> None:
    spec = TreeSpec({"a": jnp.ones((4, 2), jnp.int8)})
    members = {"a": shmacc.IndexedSlicesSpec((8, None), "int64")}
    for row, numbers, words in (
        (1, [1], r"shape \(4, 2\), but rows of shape \(1,\)"),
        (4, [1, 2], r"rows of shape \(2,\) below 5"),
        (1, [1, 300], "300, which does not fit int8"),
    ):
        with AccumulatorGroup(members) as group:
            group.apply({"a": ([row], [numbers])}, 0)
            with pytest.raises(errors.InvalidArgumentError, match=f"'a'.*{words}"):
                spec.unflatten(group.take(1))
    with pytest.raises(errors.InvalidArgumentError, match="no array of leaf 'a'"):
        spec.unflatten({"a": None})
    spec = TreeSpec({"a": jnp.ones((4, 2))}, sparse="a".__eq__)
    with SharedArrays(spec.members) as shared:
        with pytest.raises(errors.InvalidArgumentError, match="'a' is rows"):
            spec.store({"a": (jnp.array([1]), jnp.ones((1, 2)))}, shared)
        assert not shared["a"].any()


def test_a_leaf_has_the_dtype_of_the_spec() -> None:
    spec = TreeSpec({"scale": 2.0, "half": jnp.ones(2, jnp.bfloat16)})
    with SharedArrays({"scale": np.array(2), "half": np.ones(2, np.float32)}) as shared:
        tree = spec.unflatten(shared)
    assert (tree["scale"].dtype, tree["half"].dtype) == (jnp.float32, jnp.bfloat16)


def test_leaves_that_cannot_be_read_are_named() -> None:
    spec = TreeSpec({"a": jnp.ones((4, 2))})
    donated = jnp.ones((4, 2))
    donated.delete()
    for leaf, words in (
        (donated, "deleted"),
        (jax.random.key(0), "PRNGKey"),
        ((jnp.array([1]), jnp.ones((1, 2))), "not one that `sparse` chose"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=rf"'a'.*{words}"):
            spec.flatten({"a": leaf})
    with pytest.raises(errors.InvalidArgumentError, match=r"'a'.* is traced.*outside of it"):
        jax.jit(lambda tree: spec.flatten(tree)["a"])({"a": jnp.ones((4, 2))})


def test_arrays_of_another_model_are_refused() -> None:
    spec = TreeSpec({"a": jnp.ones(2), "b": jnp.ones(3)})
    with SharedArrays({"a": np.ones(2)}) as shared:
        with pytest.raises(errors.InvalidArgumentError, match=r"no array of leaf.*'b'"):
            spec.unflatten(shared)
        with pytest.raises(KeyError):
            spec.store({"a": jnp.zeros(2), "b": jnp.zeros(3)}, shared)
        assert shared["a"].all()
    with pytest.raises(errors.InvalidArgumentError, match=r"'a'.*\(2,\).*\(1,\)"):
        spec.unflatten({"a": np.ones(1), "b": np.ones(3)})


def test_a_tree_of_parameters_and_an_optimizers_state_survives_its_chief() -> None:
    """The next chief goes on from the first chief's update as if nobody had died."""
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    tree = {"params": params, "state": optimizer.init(params)}
    whole, spec = TreeSpec(tree), TreeSpec({"params": params})
    mean = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.5), params)

    def lead(group: AccumulatorGroup, shared: shmacc.Parameters) -> bool:
        with group.round(1, timeout=0) as taken:
            now, got = whole.unflatten(shared), spec.unflatten(taken)["params"]
            updates, state = optimizer.update(got, now["state"], now["params"])
            after = {"params": optax.apply_updates(now["params"], updates), "state": state}
            updated = shared.update(taken, whole.flatten(after))
            if taken.step == 1 and updated:
                raise ZeroDivisionError
        return updated

    with (
        AccumulatorGroup(spec.members) as group,
        shmacc.Parameters(whole.flatten(tree), "tree", unlink_on_close=True) as shared,
        shmacc.Parameters.attach("tree") as other,
    ):
        for step in range(3):
            assert group.apply(spec.flatten({"params": mean}), step)
            if step == 1:
                with pytest.raises(ZeroDivisionError):
                    lead(group, shared)
                assert not lead(group, other)  # the update is in already
            else:
                assert lead(group, other)
        expected, state = params, optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(mean, state, expected)
            expected = optax.apply_updates(expected, updates)
        assert _equal(whole.unflatten(shared), {"params": expected, "state": state})
        assert shared.step == 3


def test_an_optimizer_of_shmacc_updates_a_tree_in_place() -> None:
    params = {"emb": jnp.ones((5, 2)), "w": jnp.ones(2)}
    spec = TreeSpec(params, sparse=lambda name: "emb" in name)
    with (
        AccumulatorGroup(spec.members) as group,
        shmacc.Parameters(spec.flatten(params), optimizer=shmacc.optim.SGD(0.5)) as shared,
    ):
        group.apply(spec.flatten({"emb": (jnp.array([3]), jnp.ones((1, 2))), "w": None}), 0)
        with group.round(1, timeout=0) as taken:
            shared.update(taken)
        after = {"emb": params["emb"].at[3].set(0.5), "w": params["w"]}
        assert _equal(spec.unflatten(shared), after)
