"""Reads the litmus tests. Each has a program, a forbidden outcome, and broken variants."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE / "tests.litmus"

_VARIANT = re.compile(r"^// (BROKEN_\w+) \(([^)]+)\): ", re.MULTILINE)
_MARK = re.compile(r"([-+])(BROKEN_\w+)")


@dataclass(frozen=True, slots=True)
class Thread:
    """One process of a test: the words that it uses, and its statements."""

    words: list[str]
    code: list[str]


@dataclass(frozen=True, slots=True)
class Variant:
    """A test as it is, or broken in one way."""

    name: str  # empty for the test as it is
    models: tuple[str, ...]  # the memory models in which the outcome must be possible


@dataclass(frozen=True, slots=True)
class Litmus:
    """A litmus test, as in `tests.litmus`."""

    name: str
    source: str  # its lines after the name

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The test as it is, then its broken variants."""
        broken = (
            Variant(name, tuple(of.split(", "))) for name, of in _VARIANT.findall(self.source)
        )
        return (Variant("", ()), *broken)

    @property
    def streams(self) -> bool:
        """Whether it has non-temporal stores, which only one of the memory models knows."""
        return " streamed" in self.source

    @property
    def initially(self) -> list[str]:
        """The words that are not 0 at the beginning, as `word=value`."""
        return re.findall(r"\w+=\d+", self.source.partition("\nP0")[0].partition("\ninitially ")[2])

    @property
    def outcome(self) -> str:
        """The forbidden outcome."""
        return self.source.partition("\nexists ")[2].strip()

    def programs(self, variant: str) -> Iterator[list[Thread]]:
        """Yield a variant's processes without a kill, then with a kill at each `// death`.

        The killed process skips its statements from `// death` up to `// kernel`.
        """
        lines = [line for line in self.source.splitlines() if _stands_in(variant, line)]
        marks = [line.strip() for line in lines]
        yield _threads(lines)
        for death in (at for at, mark in enumerate(marks) if mark == "// death"):
            yield _threads(lines[:death] + lines[marks.index("// kernel") :])


def read_all() -> list[Litmus]:
    """Return all tests of the file `tests.litmus`."""
    _, *parts = re.split(r"^# (\w+)\n", TESTS.read_text(), flags=re.MULTILINE)
    return [Litmus(*both) for both in zip(parts[::2], parts[1::2], strict=True)]


def digest() -> str:
    """Return a hash of the tests, which shows whether herd7 has checked this version."""
    return hashlib.sha256(TESTS.read_bytes()).hexdigest()[:12]


def _stands_in(variant: str, line: str) -> bool:
    marks = [] if line.startswith("//") else _MARK.findall(line)
    only = [name for sign, name in marks if sign == "+"]
    without = [name for sign, name in marks if sign == "-"]
    return variant not in without and (not only or variant in only)


def _threads(lines: list[str]) -> list[Thread]:
    threads: list[Thread] = []
    for line in lines:
        statement = line.partition("//")[0].strip()
        if re.match(r"P\d ", line):
            threads.append(Thread(statement.split()[1:], []))
        elif line.startswith("  ") and statement:
            threads[-1].code.append(statement)
    return threads
