"""Writes what `shmacc-inspect` accepts and answers, from the command itself, into docs/inspect.

schema-N.json     the JSON Schema of every answer, from the types in `shmacc_inspect.output` and
                  what their docstrings say of each attribute
shmacc-inspect.1  the manual page, from the parsers
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shmacc_inspect import PROGRAM, output, parsers
from shmacc_inspect.output import details, findings, intervals, metrics, removals, segments, waiting

if TYPE_CHECKING:
    import argparse

FOLDER: Final = Path(__file__).parents[2] / "docs" / "inspect"
SCHEMA: Final = FOLDER / f"schema-{output.SCHEMA_VERSION}.json"
PAGE: Final = FOLDER / f"{PROGRAM}.1"
ANSWERS: Final = {
    "list": segments.SegmentList,
    "show": details.Details,
    "watch": intervals.Interval,
    "check": findings.Findings,
    "clean": removals.Cleaning,
    "remove": removals.Removal,
    "cancel": removals.Cancelling,
    "wait": waiting.Waiting,
    "metrics": metrics.Metrics,
}
_WIDTH: Final = 118
_SIMPLE: Final = {int: "integer", float: "number", str: "string", bool: "boolean"}
_STATUS: Final = {
    0: "fine",
    1: "found something wrong (check), or failed",
    2: "usage",
    3: "no such name",
    124: "timed out (wait)",
    130: "ended by Ctrl-C",
}


def schema() -> str:
    """Return the JSON Schema."""
    found = records()
    answers = {verb: {"$ref": f"#/$defs/{answer.__name__}"} for verb, answer in ANSWERS.items()}
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{PROGRAM} --json, version {output.SCHEMA_VERSION}",
        "description": "An answer of any verb; that of VERB is #/$defs/VERB. Fields may be added "
        "within a version.",
        "anyOf": list(answers.values()),
        "$defs": answers | {name: _object(record, found) for name, record in found.items()},
    }
    return _lines(whole) + "\n"


def _lines(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each object that fits in one."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(line) + depth <= _WIDTH:
        return line
    parts = [_lines(of, depth + 1) for of in (value.values() if isinstance(value, dict) else value)]
    begin, end = "[]"
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {part}" for key, part in zip(value, parts, strict=True)]
        begin, end = "{}"
    margin = "\n" + " " * depth
    return f"{begin}{margin} {f',{margin} '.join(parts)}{margin}{end}"


def records() -> dict[str, type]:
    """Return all types of the schema by name."""
    modules = pkgutil.iter_modules(output.__path__, f"{output.__name__}.")
    found = {
        name: value
        for module in modules
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    }
    return dict(sorted(found.items()))


def _object(record: type, records: dict[str, type]) -> dict[str, Any]:
    hints = typing.get_type_hints(record, localns=records)
    said = descriptions(record)
    properties = {
        name: _type(hint) | ({"description": said[name]} if name in said else {})
        for name, hint in hints.items()
    }
    if "schema_version" in properties:
        properties["schema_version"] = {"const": output.SCHEMA_VERSION}
    return {
        "description": (record.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


def descriptions(record: type) -> dict[str, str]:
    """Return what the docstring of a type says of its attributes, by name."""
    _, _, listed = inspect.cleandoc(record.__doc__ or "").partition("\nAttributes:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _type(hint: Any) -> dict[str, Any]:
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is types.NoneType:
        return {"type": "null"}
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return {"anyOf": [_type(part) for part in parts]}
    if typing.get_origin(hint) is list:
        return {"type": "array", "items": _type(parts[0])}
    if typing.get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _type(parts[1])}
    return {"$ref": f"#/$defs/{hint.__name__}"}


def manual() -> str:
    """Return the manual page."""
    summary = parsers.DESCRIPTION
    lines = [
        f".TH {PROGRAM.upper()} 1",
        ".SH NAME",
        f"{PROGRAM} \\- {_text(summary[0].lower() + summary[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(PROGRAM)}",
        "VERB [NAME ...] [OPTION ...]",
        ".SH DESCRIPTION",
        "A NAME is an accumulator's shared_name in the namespace that SHMACC_NAMESPACE or",
        "\\-\\-namespace sets, or a segment's whole name in /dev/shm, which starts with",
        "\\(lqshmacc.\\(rq.",
        "Where several names can be given, globs can, too.",
    ]
    for verb in parsers.VERBS:
        lines += _section(verb)
    lines += [".SH OPTIONS WITHOUT A VERB", *_options(parsers.top_parser())]
    lines += [".SH EXIT STATUS"]
    for status, meaning in _STATUS.items():
        lines += [".TP", f".B {status}", _text(meaning)]
    lines += [
        ".SH ENVIRONMENT",
        ".TP",
        ".B SHMACC_NAMESPACE",
        "The namespace of names that are given without one.",
        ".TP",
        ".B NO_COLOR",
        "If it is set, there are no colours.",
        ".SH SEE ALSO",
        "docs/standing-still.md, docs/inspect.md and docs/inspect-json.md of shmacc.",
        "",
    ]
    return "\n".join(lines)


def _section(verb: str) -> list[str]:
    parser = parsers.parser_of(verb)
    lines = [f".SH {verb.upper()}", *_paragraphs(parser.description or ""), *_options(parser)]
    return [*lines, ".PP", ".nf", *map(_text, (parser.epilog or "").splitlines()), ".fi"]


def _paragraphs(text: str) -> list[str]:
    lines = []
    for paragraph in text.split("\n\n"):
        lines += [".PP", _text(" ".join(paragraph.split()))]
    return lines


def _options(parser: parsers.Parser) -> list[str]:
    lines = []
    for action in parser.declared():
        names = ", ".join(action.option_strings) or str(action.metavar)
        value = ""
        if action.option_strings and action.nargs is None:
            value = f" {action.metavar or '{' + ','.join(action.choices or ()) + '}'}"
        lines += [".TP", f".B {_text(names)}{_text(value)}", _text(_help(action))]
    return lines


def _help(action: argparse.Action) -> str:
    return " ".join((action.help or "").split())


def _text(text: str) -> str:
    """Return text so that troff prints it as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith(".") else text


if __name__ == "__main__":
    for path, written in ((SCHEMA, schema()), (PAGE, manual())):
        path.write_text(written, encoding="utf-8")
        print(path.relative_to(FOLDER.parents[1]))
