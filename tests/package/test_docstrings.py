"""Every public name has a docstring, and every parameter and attribute is described in one.

Read from the installed files by griffe, not imported: the modules for torch, JAX and Ray are among
them, and `make test` installs none of these.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe

import shmacc

if TYPE_CHECKING:
    from collections.abc import Iterator


def _members(owner: Any) -> Iterator[tuple[str, Any]]:
    """Of a module or class: public names and what they are, as far as the package has it."""
    exported = owner.is_module and owner.exports is not None and set(map(str, owner.exports))
    for name, member in (owner.all_members if owner.is_class else owner.members).items():
        if name.startswith("_"):
            continue
        if member.is_alias and not member.target_path.startswith(f"{owner.package.path}."):
            continue
        target = member.final_target if member.is_alias else member
        is_imported_module = target.is_module and member.is_alias
        if (target.is_module or not exported or name in exported) and not is_imported_module:
            yield name, target


def _text(documented: Any) -> str:
    return documented.docstring.value if documented.docstring else ""


def _described(documented: Any) -> set[str]:
    """What a docstring describes: in a section, or by its name, as code, in a sentence."""
    sections = documented.docstring.parsed if documented.docstring else []
    code = re.findall(r"`+([^`]+)`", _text(documented))
    found = set(re.findall(r"\w+", " ".join(code)))
    for section in sections:
        if section.kind.value in {"parameters", "attributes"}:
            found |= {part.name.lstrip("*") for part in section.value}
    return found


def _named_functions(function: Any, package: Any) -> Iterator[Any]:
    """The functions that a docstring names, of its own class or as `Class.function`."""
    for class_name, name in re.findall(r"`(?:(\w+)\.)?(\w+)`", _text(function)):
        owner = package.all_members.get(class_name) if class_name else function.parent
        if owner is not None and (named := owner.all_members.get(name)) and named.is_function:
            yield named


def _undescribed(function: Any, package: Any) -> Iterator[str]:
    """Parameters that neither its docstring describes, nor one that it refers to."""
    described = {"self", "cls", *_described(function)}
    if function.parent.is_module:  # which may describe what all of them take
        described |= _described(function.parent)
    for named in _named_functions(function, package):
        described |= _described(named)
    for parameter in function.parameters:
        if parameter.name not in described:
            yield parameter.name


def _flaws(package: Any) -> Iterator[str]:
    """What has no docstring, and which parameters and attributes no docstring describes."""
    seen, left = set(), [package]
    while left:
        owner = left.pop()
        if owner.path in seen:
            continue
        seen.add(owner.path)
        if not owner.docstring:
            yield f"{owner.path} has no docstring"
        for name, found in _members(owner):
            path = f"{owner.path}.{name}"
            if found.is_module or found.is_class:
                left.append(found)
            elif found.is_attribute:
                if not found.docstring and name not in _described(owner) | _described(found.parent):
                    yield f"{path} is not described"
            elif not found.docstring:
                yield f"{path} has no docstring"
            else:
                for parameter in _undescribed(found, package):
                    yield f"{path} does not describe {parameter}"


def test_every_public_name_is_described() -> None:
    package = griffe.load(
        "shmacc",
        search_paths=[Path(str(shmacc.__file__)).parents[1]],
        docstring_parser="google",
        docstring_options={"warnings": False},
        resolve_aliases=True,
    )
    assert sorted(_flaws(package)) == []
    public = {name for name, _ in _members(package)}
    assert public >= {*shmacc.__all__, "jax", "ray", "torch"} - {"__version__"}
    assert {name for name, _ in _members(package["ray"])} >= {"AccumulatorGroup"}
    assert {name for name, _ in _members(package["Parameters"])} >= {"update", "close"}
