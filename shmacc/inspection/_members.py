"""Describes the members of a segment: tensors, arrays, tables of parameters."""

import math
import sys
from importlib import import_module
from typing import Any

from shmacc._base import dtype_names, layout
from shmacc._base.names import SegmentName
from shmacc._base.reports import Config, LaneMember, MemberConfig
from shmacc._base.signals import pass_on
from shmacc.errors import DataLossError, InvalidArgumentError
from shmacc.inspection._observation import Observation
from shmacc.inspection._records import MemberDescription, SlotDescription


def tables_of(seen: Observation, member: int) -> list[LaneMember]:
    """Return a member's table in each lane; the number after the last member means contributors."""
    stride = len(seen.config["members"]) + 1
    return seen.tables[member::stride]


def members_of(name: SegmentName, seen: Observation) -> tuple[MemberDescription, ...]:
    found = []
    for number, member in enumerate(seen.config["members"]):
        dtype = dtype_names.NAMES.get(member["dtype"])
        if dtype is None:
            raise dtype_names.unknown(member["dtype"]).about(name.system_name)
        declared = member["declared"]
        states, optimizer = tables_of(seen, number), _optimizer_of(seen.config, member)
        by_id = rows_by_id(states[0])
        found.append(
            MemberDescription(
                name=member["name"],
                kind=layout.KIND_NAMES[member["kind"]],
                dtype=dtype,
                shape=None if declared is None else tuple(None if d < 0 else d for d in declared),
                reduction_type=layout.REDUCTION_NAMES[member["reduction"]],
                count=sum(state["member_count"] for state in states),
                weight=sum(state["member_weight"] for state in states),
                rows=sum(state["rows"] for state in states) if by_id is None else by_id,
                bytes_used=sum(bytes_of(seen.config, member, state) for state in states),
                value=_integer(seen, number, dtype) if declared == [] else None,
                optimizer=repr(optimizer) if optimizer else None,
                slots=slots_of(seen.config, member, by_id),
                **_of_table(member, states),
            )
        )
    return tuple(found)


def rows_by_id(state: LaneMember) -> int | None:
    """Return how many rows a table of parameters has; None for other tables."""
    return None if state["by_id"] is None else state["by_id"]["rows"]


def _of_table(member: MemberConfig, states: list[LaneMember]) -> dict[str, Any]:
    """Return the part of the description that only tables of parameters have."""
    by_id = states[0]["by_id"]
    if by_id is None or member["table"] is None:
        return {}
    number, numbers, seed, max_rows = member["table"]
    return {
        "max_rows": max_rows,
        "rows_added": by_id["rows"] + by_id["removed"],
        "rows_removed": by_id["removed"],
        "initial": repr(_of_config("init", number, numbers, seed)),
    }


def _optimizer_of(config: Config, member: MemberConfig) -> Any:
    if layout.KIND_NAMES.get(config["kind"]) != "parameters":
        return None
    return _of_config("optim", member["optimizer"])


def _of_config(module: str, *config: Any) -> Any:
    """Return the optimizer or initializer that `optim` or `init` makes of a segment's numbers.

    The module is imported late, since most segments have no parameters. Return None if there is no
    such module (`make floors` removes it): parameters are then shown without optimizers.

    Raises:
        DataLossError: The numbers are out of range.
    """
    try:
        return import_module(f"shmacc.{module}").of_config(*config)
    except ModuleNotFoundError:
        return None
    except InvalidArgumentError as error:
        pass_on(error)
        raise DataLossError(f"The segment is damaged: {error}") from None


def slots_of(config: Config, member: MemberConfig, rows: int | None) -> tuple[SlotDescription, ...]:
    """Return the slots that an optimizer keeps beside an array, or a table of `rows` rows."""
    optimizer, shape = _optimizer_of(config, member), member["declared"] or []
    item_bytes = dtype_names.ITEM_BYTES[member["dtype"]] * (1 if rows is None else rows)
    return tuple(
        SlotDescription(slot.name, math.prod(shape[:-1] if slot.rowwise else shape) * item_bytes)
        for slot in (optimizer.slots() if optimizer else ())
    )


def _integer(seen: Observation, number: int, dtype: str) -> int | None:
    """Return a shared array's value, in one read, if it is a single integer; else None."""
    if seen.config["kind"] not in layout.ARRAYS or "int" not in dtype:
        return None
    size = int(dtype.partition("int")[2]) // 8
    raw = seen.view.table(0, number).read(layout.REGIONS["rows 0"], 0, size)
    return int.from_bytes(raw, sys.byteorder, signed="uint" not in dtype)


def bytes_of(config: Config, member: MemberConfig, state: LaneMember) -> int:
    """Return the bytes of a member's sums in a lane, or of a shared array's or table's contents."""
    if config["kind"] in layout.ARRAYS:
        rows = rows_by_id(state)
        numbers = math.prod(member["declared"] or ()) * (1 if rows is None else rows)
        return numbers * dtype_names.ITEM_BYTES[member["dtype"]]
    sparse = member["kind"] == layout.KINDS["sparse"]
    rows = state["rows"] if sparse else min(state["member_count"], 1)
    row_bytes = state["row_elements"] * layout.SUM_BYTES[member["sum"]]
    return rows * row_bytes
