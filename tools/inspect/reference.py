"""Generates the commands' reference in docs/inspect from the code of the commands.

schema-N.json     the JSON Schema of every answer, from the types in `shmacc_inspect.output` and
                  `shmacc.inspection`, and from the attributes' descriptions in their docstrings
shmacc-inspect.1  the manual page of `shmacc-inspect`, from its parsers
shmacc-run.1      the manual page of `shmacc-run`, from its parser
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shmacc import inspection
from shmacc._run import command
from shmacc_inspect import PROGRAM, arguments, output, parsers
from shmacc_inspect.output import ANSWERS, descriptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

FOLDER: Final = Path(__file__).parents[2] / "docs" / "inspect"
SCHEMA: Final = FOLDER / f"schema-{output.SCHEMA_VERSION}.json"
PAGE: Final = FOLDER / f"{PROGRAM}.1"
PAGE_OF_RUN: Final = FOLDER / "shmacc-run.1"
_NAMES: Final = {name: getattr(inspection, name) for name in inspection.__all__}
_SIMPLE: Final = {
    int: ["integer"],
    float: ["number", "null"],  # null: infinite
    str: ["string"],
    bool: ["boolean"],
    types.NoneType: ["null"],
}


def schema() -> str:
    """Return the JSON Schema."""
    answers = {
        verb: json.dumps({"anyOf": [_reference(record) for record in records]})
        for verb, records in ANSWERS.items()
    }
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{PROGRAM} --json, version {output.SCHEMA_VERSION}",
        "description": "An answer of any verb; that of VERB is #/$defs/VERB. Fields may be added "
        "within a version.",
        "anyOf": [{"$ref": f"#/$defs/{verb}"} for verb in ANSWERS],
    }
    defined = answers | {record.__name__: _object(record) for record in records()}
    return _lines(head, "$defs", defined) + "\n"


def _lines(head: dict[str, Any], last: str, parts: dict[str, str], margin: str = "\n ") -> str:
    """Return an object as JSON: `head`, then key `last` with the `parts`, one a line."""
    lines = f",{margin}".join(f"{json.dumps(key)}: {part}" for key, part in parts.items())
    return f"{json.dumps(head)[:-1]}, {json.dumps(last)}: {{{margin}{lines}}}}}"


def records() -> list[type]:
    """Return all types of the schema: the answers, and the types of their fields."""
    found = [record for records in ANSWERS.values() for record in records]
    for record in found:
        for hint in hints(record).values():
            for part in _parts(hint):
                is_record = dataclasses.is_dataclass(part) and part is not inspection.SegmentName
                if is_record and part not in found:
                    found.append(part)
    return sorted(found, key=lambda record: record.__name__)


def hints(record: type) -> dict[str, Any]:
    """Return the types of a record's fields."""
    found = typing.get_type_hints(record, localns=vars(output) | _NAMES)
    return {field.name: found[field.name] for field in dataclasses.fields(record)}


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in typing.get_args(hint):
        yield from _parts(part)


def _object(record: type) -> str:
    said, properties = descriptions(record), {}
    if any(record in records for records in ANSWERS.values()):
        properties["schema_version"] = {"const": output.SCHEMA_VERSION}
    if issubclass(record, inspection.Description):
        said = descriptions(inspection.Description) | said
    for name, hint in hints(record).items():
        if hint is inspection.SegmentName:
            for part, what in output.NAME_FIELDS.items():
                nullable = str | None if part == "namespace" else str
                properties[part] = _type(nullable) | {"description": what}
        else:
            kind = _type(str if name == output.TOKEN else hint)
            properties[name] = kind | {"description": said[name].replace("None", "null")}
    head = {
        "description": (record.__doc__ or "").partition("\n")[0],
        "type": "object",
        "required": list(properties),
    }
    fields = {key: json.dumps(of) for key, of in properties.items()}
    return _lines(head, "properties", fields, margin="\n  ")


def _reference(record: type) -> dict[str, str]:
    return {"$ref": f"#/$defs/{record.__name__}"}


def _type(hint: Any) -> dict[str, Any]:
    parts, origin = typing.get_args(hint), typing.get_origin(hint)
    union = parts if origin in {types.UnionType, typing.Union} else (hint,)
    if all(part in _SIMPLE for part in union):
        kinds = list(dict.fromkeys(kind for part in union for kind in _SIMPLE[part]))
        return {"type": kinds if len(kinds) > 1 else kinds[0]}
    if len(union) > 1:
        return {"anyOf": [_type(part) for part in union]}
    if origin in {list, tuple}:
        return {"type": "array", "items": _type(parts[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(parts[1])}
    if origin is typing.Literal or issubclass(hint, enum.StrEnum):
        return {"enum": list(parts or hint)}
    return _reference(hint)


def manual() -> str:
    """Return the manual page of `shmacc-inspect`."""
    summary = parsers.DESCRIPTION
    lines = [
        f".TH {PROGRAM.upper()} 1", ".SH NAME",
        f"{PROGRAM} \\- {_text(summary[0].lower() + summary[1:].rstrip('.'))}", ".SH SYNOPSIS",
        f".B {_text(PROGRAM)}", "VERB [NAME ...] [OPTION ...]", ".SH DESCRIPTION",
        "A NAME is an accumulator's shared_name in the namespace that SHMACC_NAMESPACE or",
        "\\-\\-namespace sets, or a segment's whole name in /dev/shm, which starts with",
        "\\(lqshmacc.\\(rq, or a glob in quotes.",
        "Without a NAME, list, watch, check, clean and metrics look at all segments.",
    ]  # fmt: skip
    for verb in parsers.VERBS:
        lines += _section(verb)
    common = parsers.Parser("", "", "")
    arguments.add_common(common)
    status = " ".join(parsers.EXAMPLES.partition("Exit status: ")[2].split())
    lines += [
        ".SH OPTIONS OF EVERY VERB",
        *_options(common.declared()),
        ".SH OPTIONS WITHOUT A VERB",
        *_options(parsers.top_parser().declared()[1:]),
        ".SH EXIT STATUS",
        _text(status),
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


def manual_of_run() -> str:
    """Return the manual page of `shmacc-run`."""
    parser = command.parser()
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    *options, program, arguments = parser._actions  # noqa: SLF001
    lines = [
        f".TH {parser.prog.upper()} 1",
        ".SH NAME",
        f"{_text(parser.prog)} \\- run a chief and workers, and start again what is killed",
        ".SH SYNOPSIS",
        _text(usage),
        ".SH DESCRIPTION",
        _text(" ".join((parser.description or "").split())),
        ".SH ARGUMENTS",
        *(
            line
            for action in (program, arguments)
            for line in (".TP", f".B {action.metavar}", _text(action.help or ""))
        ),
        ".SH OPTIONS",
        *_options(options),
        ".SH SEE ALSO",
        "docs/training.md of shmacc.",
        "",
    ]
    return "\n".join(lines)


def _section(verb: str) -> list[str]:
    found = arguments.VERBS[verb]
    parser = parsers.Parser("", "", "")
    found.declare(parser)
    own = [action for action in parser.declared()[1:] if action.option_strings]  # without --help
    lines = [f".SH {verb.upper()}", *_paragraphs(found.description), *_options(own)]
    return [*lines, ".PP", ".nf", "Examples:", *map(_text, found.examples.splitlines()), ".fi"]


def _paragraphs(text: str) -> list[str]:
    lines = []
    for paragraph in text.split("\n\n"):
        lines += [".PP", _text(" ".join(paragraph.split()))]
    return lines


def _options(actions: list[argparse.Action]) -> list[str]:
    lines = []
    for action in actions:
        names = ", ".join(action.option_strings)
        value = ""
        if action.nargs is None:
            choices = f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper()
            value = f" {action.metavar or choices}"
        said = " ".join((action.help or "").split())
        lines += [".TP", f".B {_text(names)}{_text(value)}", _text(said)]
    return lines


def _text(text: str) -> str:
    """Escape text for troff."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith(".") else text


if __name__ == "__main__":
    for path, written in ((SCHEMA, schema()), (PAGE, manual()), (PAGE_OF_RUN, manual_of_run())):
        path.write_text(written, encoding="utf-8")
        print(path.relative_to(FOLDER.parents[1]))
