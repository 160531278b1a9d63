"""Reads litmus tests from their files: a program, its forbidden outcome, its broken variants."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

_VARIANT = re.compile(r"^// (BROKEN_\w+) \(([^)]+)\): ")
_MARK = re.compile(r"([-+])(BROKEN_\w+)")


@dataclass(frozen=True, slots=True)
class Thread:
    """One process of a test: the words that it uses, and its statements."""

    words: tuple[str, ...]
    code: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A test as it is, or broken in one way."""

    name: str  # empty for the test as it is
    models: tuple[str, ...]  # the memory models in which the outcome must be possible


@dataclass(frozen=True, slots=True)
class Litmus:
    """A test."""

    name: str  # the file's, without the suffix
    source: str  # the file's text

    @property
    def digest(self) -> str:
        """A hash that tells whether results belong to this text of the file."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:12]

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The test as it is, then each way in which it is broken."""
        broken = (_VARIANT.match(line) for line in self.source.splitlines())
        return (
            Variant("", ()),
            *(Variant(is_[1], tuple(is_[2].split(", "))) for is_ in broken if is_),
        )

    @property
    def streams(self) -> bool:
        """Whether it has stores past the caches; only one model knows these."""
        return "memory_order_streamed" in self.source

    @property
    def initially(self) -> dict[str, str]:
        """Words that are not 0 at first."""
        found = re.search(r"^\{(.*)\}$", self.source, re.MULTILINE)
        return dict(re.findall(r"(\w+)=(\d+);", found[1] if found else ""))

    @property
    def outcome(self) -> str:
        """The forbidden outcome."""
        return self.source.partition("\nexists ")[2].strip()

    def programs(self, variant: str) -> Iterator[list[Thread]]:
        """Yield a variant's processes: as they are, then with a kill at each `// death`.

        The killed process skips its statements from there up to `// kernel`.
        """
        lines = [line for line in self.source.splitlines() if _stands_in(variant, line)]
        marks = [line.strip() for line in lines]
        yield _threads(lines)
        for death in (at for at, mark in enumerate(marks) if mark == "// death"):
            yield _threads(lines[:death] + lines[marks.index("// kernel") :])


def read_all() -> list[Litmus]:
    """All tests, by name."""
    return [Litmus(path.stem, path.read_text()) for path in sorted(HERE.glob("*.litmus"))]


def _stands_in(variant: str, line: str) -> bool:
    marks = [] if line.startswith("//") else _MARK.findall(line)
    only = [name for sign, name in marks if sign == "+"]
    without = [name for sign, name in marks if sign == "-"]
    return variant not in without and (not only or variant in only)


def _threads(lines: list[str]) -> list[Thread]:
    text = "\n".join(line.partition("//")[0].rstrip() for line in lines)
    processes = re.findall(r"^P\d \(([^)]*)\) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return [
        Thread(
            tuple(re.findall(r"atomic_int\* (\w+)", words)),
            tuple(line.strip() for line in body.splitlines() if line.strip()),
        )
        for words, body in processes
    ]
