"""Converts JAX's pytrees for groups, parameters and shared arrays, and back.

A group has members by name. JAX has trees: its parameters, gradients and optimizer states are
nested dicts, lists, tuples and dataclasses of arrays. A `TreeSpec` is made from one tree and
translates between names and leaves. Groups and `Parameters` keep all their methods.

Import it as ``import shmacc.jax``: ``import shmacc`` alone imports no JAX. JAX runs threads of its
own, so start processes by spawn or a forkserver, not by fork.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from shmacc._accumulators.taken import GroupTaken, SparseTaken
from shmacc._base.signals import pass_on
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._values import arguments, dtypes
from shmacc._values.arrays import as_array, converted
from shmacc._values.specs import IndexedSlicesSpec, TensorSpec
from shmacc.errors import InvalidArgumentError, ShmaccError

__all__ = ["TreeSpec"]

_ONLY_LEAF = "."  # the leaf's name if the tree is a single array: its key path is empty
_ALIGNMENT = 64  # bytes; JAX on a CPU uses buffers of this alignment without a copy


class TreeSpec:
    """The structure of a pytree, and the names, shapes and dtypes of its leaves.

    The name of a leaf is its key path, with slashes between keys: ``"layer/bias"``, or in a list
    ``"layers/0/bias"``. In a tree that is a single array, the leaf's name is ``"."``.

    Equal trees give equal names, so each process makes its own spec.
    """

    def __init__(
        self,
        tree: Any,
        *,
        sparse: Callable[[str], bool] | None = None,
        reduction_type: str | None = None,
    ) -> None:
        """Describe the leaves of a tree.

        Args:
            tree: A pytree of arrays, or of ``jax.ShapeDtypeStruct`` as ``jax.eval_shape`` returns
                it; the values do not matter. A leaf has the dtype that JAX gives it.
            sparse: A function from the name of a leaf to whether its gradients come as rows:
                ``(indices, values)``, or an object with ``.indices`` and ``.values``. None: all
                gradients are dense.
            reduction_type: The reduction of all members; None: the group's.

        Raises:
            InvalidArgumentError: A leaf is no array of a dtype that accumulators have, a sparse
                leaf has no rows, a name is longer than 200 characters, the tree has no leaf, or
                ``sparse`` is no function, or returned None for each leaf.
        """
        if sparse is not None and not callable(sparse):
            raise InvalidArgumentError(
                "sparse must be a function from the name of a leaf to a bool, such as "
                f"lambda name: 'embedding' in name, but was {sparse!r}"
            )
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
        if not leaves:
            raise InvalidArgumentError(f"The tree has no leaves: {self._treedef}")
        self._members: dict[str, TensorSpec] = {}
        answers = []
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or _ONLY_LEAF
            arguments.check_member_name(name, "A leaf")
            if name in self._members:
                raise InvalidArgumentError(f"Two leaves of the tree have the name {name!r}")
            rows = sparse(name) if sparse is not None else False
            answers.append(rows)
            try:
                self._members[name] = _spec(leaf, reduction_type, sparse=bool(rows))
            except ShmaccError as error:
                pass_on(error)
                raise error.of_member(name) from error.__cause__

        if all(answer is None for answer in answers):
            raise InvalidArgumentError(
                f"sparse returned None for each leaf, {', '.join(map(repr, self._members))}: it "
                "returns whether the gradients are rows, and may lack a `return`"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._treedef})"

    @property
    def members(self) -> dict[str, TensorSpec]:
        """The leaves' specs by name, for `AccumulatorGroup`, or for `Parameters` of zeros."""
        return dict(self._members)

    def flatten(self, tree: Any) -> dict[str, Any]:
        """Return a tree's leaves by name: for ``group.apply``, or as contents of `Parameters`.

        Waits until JAX has computed them. On a CPU nothing is copied.

        Args:
            tree: A tree of this structure. None in place of a leaf leaves that member out. Where
                the gradients of a leaf are rows, the tree has ``(indices, values)``.

        Raises:
            InvalidArgumentError: The tree has another structure; or a leaf has no values, because
                it is traced by ``jax.jit`` or another transformation, or was donated to one.
        """
        try:
            leaves = self._treedef.flatten_up_to(tree)
        except (ValueError, TypeError) as error:
            pass_on(error)
            raise InvalidArgumentError(
                f"The tree does not have the structure of this spec: {error}"
            ) from error
        named = zip(self._members, leaves, strict=True)
        return {
            name: _on_host(name, self._members[name], leaf)
            for name, leaf in named
            if leaf is not None
        }

    def unflatten(self, named: GroupTaken | Mapping[str, Any]) -> Any:
        """Return arrays by name as a tree: the result of a group's take, or parameters.

        Every leaf is a new JAX array of the spec's dtype on the default device: a copy, which is
        complete when this returns. JAX takes for granted that an array never changes, and may
        compute with it after the call that asked for the computation. On a CPU ``jnp.asarray`` of a
        shared array may *be* the shared memory, and would change when another process writes.

        Args:
            named: The result of a group's ``take``, ``round`` or ``snapshot``; or `Parameters`; or
                any mapping from name to array. A member that no gradient of the round had becomes
                zeros; so do the rows of a sparse member that no gradient had. To update only the
                rows that gradients had, use ``named[name].indices`` and ``.values`` instead.

        Raises:
            InvalidArgumentError: An array is missing, does not have the shape of its leaf, or has
                numbers that the leaf's dtype cannot represent; or ``jax.jit`` traces the call.
        """
        if not isinstance(named, GroupTaken):
            missing = [name for name in self._members if named.get(name) is None]
            if missing:
                raise InvalidArgumentError(f"There is no array of leaf {missing[0]!r}")
        leaves = [_on_device(name, spec, named.get(name)) for name, spec in self._members.items()]
        # Under jax.jit, a new array becomes a constant of the trace: each later call of the traced
        # function would see the values of the first call, whatever others have written since.
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise InvalidArgumentError(
                "unflatten was called inside of jax.jit or another tracing function, which would "
                "keep these values for ever: call it outside, and pass the tree as an argument"
            )
        return jax.tree_util.tree_unflatten(self._treedef, leaves)

    def store(self, tree: Any, arrays: SharedArrays) -> None:
        """Write a tree's leaves into shared arrays, as a chief does in the block of a round.

        Waits until JAX has computed the leaves; they are written when this returns.

        Args:
            tree: The same as for `flatten`. Where the tree has None, the array stays as it is.
            arrays: Writable arrays made from a tree of this structure.

        Raises:
            InvalidArgumentError: The tree has another structure, or a leaf has another shape, or
                numbers that its array cannot represent. Nothing was written.
            KeyError: No array has the name of a leaf. Nothing was written.
            ValueError: The arrays are read-only.
        """
        pairs = []
        for name, value in self.flatten(tree).items():
            array = arrays[name]
            if isinstance(value, tuple):
                raise InvalidArgumentError(f"Leaf {name!r} is rows; whole arrays are stored")
            if np.shape(value) != array.shape:
                raise InvalidArgumentError(
                    f"Leaf {name!r} has shape {np.shape(value)}, but the shared array has "
                    f"{array.shape}"
                )
            pairs.append((array, _converted(name, value, array.dtype)))
        # Write after all checks: a leaf that does not fit must leave all arrays as they were.
        for array, value in pairs:
            array[...] = value


def _spec(leaf: Any, reduction_type: str | None, *, sparse: bool) -> TensorSpec:
    try:
        # JAX itself says which shape and dtype it gives the leaf, without computing it.
        shaped = jax.eval_shape(lambda array: array, leaf)
    except (TypeError, OverflowError) as error:
        pass_on(error)
        raise InvalidArgumentError(f"This is no array: {leaf!r}") from error
    if jax.dtypes.issubdtype(shaped.dtype, jax.dtypes.prng_key):
        raise InvalidArgumentError(
            f"Random keys, {shaped.dtype}, cannot be shared: jax.random.key_data makes integers of "
            "them, and jax.random.wrap_key_data keys again"
        )
    dtype = dtypes.resolve(shaped.dtype).numpy
    if not sparse:
        return TensorSpec(shaped.shape, dtype, reduction_type=reduction_type)
    if not shaped.shape:
        raise InvalidArgumentError("A scalar has no rows, and cannot be sparse")
    return IndexedSlicesSpec(shaped.shape, dtype, reduction_type=reduction_type)


def _on_host(name: str, spec: TensorSpec, leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidArgumentError(
            f"Leaf {name!r} is traced and has no values: use the results of a function under "
            "jax.jit or jax.grad, outside of it"
        )
    if type(leaf) is tuple:  # rows of a sparse member
        if not isinstance(spec, IndexedSlicesSpec):
            raise InvalidArgumentError(
                f"Leaf {name!r} is a tuple, as rows of a sparse leaf are, but is not one that "
                "`sparse` chose; it is called with this name"
            )
        return tuple(_on_host(name, spec, part) for part in leaf)
    return as_array(leaf, f"Leaf {name!r}") if isinstance(leaf, jax.Array) else leaf


def _converted(name: str, value: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    try:
        return converted(value, dtypes.resolve(dtype), "values")
    except ShmaccError as error:
        pass_on(error)
        raise error.of_member(name) from error.__cause__


def _on_device(name: str, spec: TensorSpec, found: Any) -> jax.Array:
    shape = tuple(dim or 0 for dim in spec.shape or ())
    # JAX may go on using this memory. So it must be new, and nobody else may have it.
    own = _empty(shape, spec.dtype)
    if found is None or isinstance(found, SparseTaken):
        own[...] = 0
        if found is not None:
            rows = _converted(name, found.values, spec.dtype)
            end = int(found.indices[-1]) + 1 if len(found.indices) else 0
            if not shape or rows.shape[1:] != shape[1:] or end > shape[0]:
                raise InvalidArgumentError(
                    f"Leaf {name!r} has shape {shape}, but rows of shape {rows.shape[1:]} below "
                    f"{end} were given"
                )
            own[found.indices] = rows
        return jax.device_put(own)
    values = _converted(name, getattr(found, "value", found), spec.dtype)
    if values.shape != shape:
        raise InvalidArgumentError(
            f"Leaf {name!r} has shape {shape}, but an array of shape {values.shape} was given"
        )
    own[...] = values
    return jax.device_put(own)


def _empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a new array, aligned so that JAX on a CPU uses it without another copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
