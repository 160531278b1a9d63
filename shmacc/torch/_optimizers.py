"""Each parameter's optimizer: chosen by patterns of names, or translated from torch's."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shmacc import optim
from shmacc._base.shown import shown
from shmacc._parameters import patterns
from shmacc._parameters.new_arrays import Optimizers
from shmacc._parameters.patterns import LearningRate
from shmacc.errors import InvalidArgumentError
from shmacc.torch import _model as on_model


class Part(NamedTuple):
    """A parameter of one of torch's optimizers.

    Attributes:
        kind: The name of torch's class.
        parameter: The parameter.
        optimizer: The optimizer of `shmacc.optim` that computes the same.
    """

    kind: str
    parameter: nn.Parameter
    optimizer: optim.Optimizer


class OptimizerOfTorch(NamedTuple):
    """The result of `optimizer_of`, for the argument ``optimizer=`` of replicas.

    Attributes:
        parts: One `Part` for each parameter.
    """

    parts: tuple[Part, ...]


OfModel = Optimizers | OptimizerOfTorch | Mapping[str, optim.Optimizer | OptimizerOfTorch]
"""What a chief accepts as ``optimizer=``: one for all, or a mapping from patterns of names."""

Schedule = Callable[[int], LearningRate]
"""A function from the number of an update to its learning rate."""


def optimizer_of(
    *optimizers: torch.optim.Optimizer, constraint: optim.Constraint | None = None
) -> OptimizerOfTorch:
    """Return optimizers that compute as torch's do, but survive a chief's death in an update.

    They have torch's hyperparameters; each group of parameters keeps its own::

        adam = torch.optim.AdamW(model.parameters(), 1e-3)
        SyncReplicas(model, name, optimizer=optimizer_of(adam), ...)
        SyncReplicas(model, name, optimizer={"emb*": Adagrad(0.05), "*": optimizer_of(adam)}, ...)

    The given optimizers are not used any more: rounds make the updates.

    Args:
        optimizers: SGD, Adagrad, Adam, AdamW, RMSprop or SparseAdam, before their first step.
            Several must not share parameters: SparseAdam and Adam, for instance.
        constraint: The limit for rows after each update, which torch does not have. A dense
            gradient changes all rows.

    Raises:
        InvalidArgumentError: An optimizer is of another class, has made steps, or has an option
            that is not supported (the message names it); or `constraint` is not of `shmacc.optim`.
    """
    parts = []
    for optimizer in optimizers:
        if type(optimizer) not in _CONVERTERS:
            allowed = ", ".join(kind.__name__ for kind in _CONVERTERS)
            raise InvalidArgumentError(
                f"An optimizer must be of torch.optim's {allowed}, but was a "
                f"{type(optimizer).__name__}"
            )
        name = type(optimizer).__name__
        # Adagrad always has a state, which begins with step 0.
        if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
            raise InvalidArgumentError(
                f"This {name} has made steps, of which it keeps what would be lost: make a new one"
            )
        for group in optimizer.param_groups:
            made = replace(_convert(type(optimizer), dict(group)), constraint=constraint)
            parts += [Part(name, parameter, made) for parameter in group["params"]]
    return OptimizerOfTorch(tuple(parts))


def by_name(given: OfModel, model: nn.Module) -> dict[str, optim.Optimizer] | None:
    """Return the optimizer of each parameter that requires grad, and of each table.

    Args:
        given: One optimizer for all; a mapping from patterns of names; or None, which is returned.
            A result of `optimizer_of` is only for those of its parameters that match its pattern.
        model: The model.

    Raises:
        InvalidArgumentError: A parameter or a table has no optimizer, or an optimizer of torch that
            does not accept its gradients; or an optimizer's parameter is not the model's.
    """
    parameters, tables = on_model.parameters(model), on_model.tables(model)
    if given is None:
        _check_not_of_torch(tables)
        return None
    by_pattern: Mapping[str, Any] = given if isinstance(given, Mapping) else {"*": given}
    for chosen in by_pattern.values():
        if isinstance(chosen, torch.optim.Optimizer):
            raise InvalidArgumentError(
                "optimizer= must be one of shmacc.optim's, or a mapping from patterns to such, but "
                f"was torch's {type(chosen).__name__}: optimizer_of(it) makes one"
            )
    found = patterns.by_name(by_pattern, [*parameters, *tables], "an optimizer")
    # Compare by identity: `==` would compare the parameters in these tuples by element.
    for chosen in {id(one): one for one in found.values()}.values():
        if isinstance(chosen, OptimizerOfTorch):
            names = {name for name, one in found.items() if one is chosen}
            _check_not_of_torch([name for name in tables if name in names])
            ours = _of_torch(chosen, parameters, names, on_model.rows_alone(model))
            found |= {name: ours.get(name) for name in names}
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    trained += tables
    for name in trained:
        if found.get(name) is None:
            why = "" if name in found else f": it matches none of {list(by_pattern)}"
            raise InvalidArgumentError(
                f"{name!r} requires grad, but there is no optimizer for it{why}"
            )
    return {name: found[name] for name in trained}


def _check_not_of_torch(tables: Iterable[str]) -> None:
    for table in tables:
        raise InvalidArgumentError(
            f"{table!r} is the table of a TableEmbedding, which optimizers of torch do not know: "
            f'give it one of shmacc.optim, by a pattern before theirs: optimizer={{"{table}": '
            'shmacc.optim.Adagrad(0.05), "*": optimizer_of(torch.optim.AdamW(model.parameters()))}'
        )


def _of_torch(
    given: OptimizerOfTorch,
    parameters: Mapping[str, nn.Parameter],
    wanted: Collection[str],
    sparse: Collection[str],
) -> dict[str, optim.Optimizer]:
    """Return the translated optimizer of each parameter of torch's optimizers.

    Raises:
        InvalidArgumentError: A parameter is not the model's, or occurs twice; or the optimizer of a
            `wanted` parameter cannot accept its gradients.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, optim.Optimizer] = {}
    for kind, parameter, optimizer in given.parts:
        name = names.get(id(parameter))
        if name is None:
            raise InvalidArgumentError(
                f"torch's {kind} has a parameter of shape {tuple(parameter.shape)} that is not the "
                "model's"
            )
        if name in found:
            raise InvalidArgumentError(f"{name!r} is a parameter of torch's optimizers twice")
        found[name] = optimizer
        if name in wanted and parameter.requires_grad:
            _check_rows(name, kind, optimizer, by_rows=name in sparse)
    return found


def _check_rows(name: str, kind: str, optimizer: optim.Optimizer, *, by_rows: bool) -> None:
    # With sparse gradients, torch's momentum also changes rows without a gradient.
    takes_rows = kind == "SparseAdam" or (
        kind in {"SGD", "Adagrad"}
        and not getattr(optimizer, "momentum", 0)
        and not getattr(optimizer, "weight_decay", 0)
    )
    if by_rows and not takes_rows:
        raise InvalidArgumentError(
            f"{name!r} has sparse gradients, of whose rows alone torch makes an update by "
            "SparseAdam, Adagrad and SGD, without momentum and weight_decay; not by this "
            f"{kind}. Give it one of these, as in optimizer_of(one, other), or of shmacc.optim: "
            f'optimizer={{"{name}": shmacc.optim.Adam(1e-3), "*": optimizer_of(...)}}'
        )
    if kind == "SparseAdam" and not by_rows:
        raise InvalidArgumentError(
            f"{name!r} has dense gradients, which torch's SparseAdam does not take: its module "
            "must have sparse=True"
        )


def _convert(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> optim.Optimizer:
    """Translate the optimizer of a parameter group. The converter removes options that it uses."""
    made = _CONVERTERS[kind](group)
    # Each option that the converter left in the group must have its default.
    default = kind([nn.Parameter(torch.zeros(1, device="cpu"))]).param_groups[0]
    for option, value in group.items():
        if option == "initial_lr":
            raise InvalidArgumentError(
                f"This {kind.__name__} has a scheduler of torch, which rounds do not follow: give "
                "schedule=, a function of the step"
            )
        if option not in {"params", "param_names"} and value != default.get(option):
            raise InvalidArgumentError(
                f"torch's {kind.__name__} with {option}={shown(value)} is not honoured: its "
                f"updates are made with {option}={default.get(option)!r} only"
            )
    return made


def _sgd(group: dict[str, Any]) -> optim.Optimizer:
    return optim.SGD(*_taken(group, "lr", "momentum", "nesterov", "weight_decay"))


def _adagrad(group: dict[str, Any]) -> optim.Optimizer:
    rate, initial, epsilon, decay = _taken(
        group, "lr", "initial_accumulator_value", "eps", "weight_decay"
    )
    return optim.Adagrad(rate, initial, epsilon, weight_decay=decay)


def _adam(group: dict[str, Any]) -> optim.Optimizer:
    decoupled = group.pop("decoupled_weight_decay", False)
    rate, (one, two), epsilon, decay = _taken(group, "lr", "betas", "eps", "weight_decay")
    both = [
        kind(rate, one, two, epsilon, decay, as_torch=True) for kind in (optim.Adam, optim.AdamW)
    ]
    return next(made for made in both if made.decoupled == decoupled)


def _adamw(group: dict[str, Any]) -> optim.Optimizer:
    group.setdefault("decoupled_weight_decay", True)  # torch before 2.7 does not set it
    return _adam(group)


def _rmsprop(group: dict[str, Any]) -> optim.Optimizer:
    rate, rho, momentum, epsilon, decay = _taken(
        group, "lr", "alpha", "momentum", "eps", "weight_decay"
    )
    return optim.RMSprop(rate, rho, momentum, epsilon, decay, as_torch=True)


def _sparse_adam(group: dict[str, Any]) -> optim.Optimizer:
    rate, (one, two), epsilon = _taken(group, "lr", "betas", "eps")
    return optim.Adam(rate, one, two, epsilon, as_torch=True)


def _taken(group: dict[str, Any], *options: str) -> list[Any]:
    return [group.pop(option) for option in options]


_CONVERTERS: dict[type[torch.optim.Optimizer], Callable[[dict[str, Any]], optim.Optimizer]] = {
    torch.optim.SGD: _sgd, torch.optim.Adagrad: _adagrad, torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw, torch.optim.RMSprop: _rmsprop, torch.optim.SparseAdam: _sparse_adam,
}  # fmt: skip


def check_schedule(schedule: object, chosen: object) -> None:
    """Refuse a schedule that is no function, or comes without an optimizer of `shmacc.optim`."""
    if chosen is None:
        raise InvalidArgumentError(
            "A schedule is for optimizer=...; one of torch in the block has torch's schedulers"
        )
    if not callable(schedule):
        raise InvalidArgumentError(
            "schedule must be a function from an update's number to its learning rate, but was a "
            f"{type(schedule).__name__}"
        )


def scheduled(schedule: Schedule, step: int) -> LearningRate:
    """Return the schedule's rate for an update; InvalidArgumentError if it returns None."""
    rate = schedule(step)
    if rate is None:
        raise InvalidArgumentError(
            f"schedule({step}) returned None, which is no learning rate: its function may lack "
            "a `return` ({} leaves all rates to the optimizers)"
        )
    return rate
