"""Comments name what exists, in C++ and in Python, and sentences have no archaisms."""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
NATIVE: Final = sorted((ROOT / "shmacc" / "native").rglob("*.?pp"))
PYTHON: Final = sorted((ROOT / "shmacc").rglob("*.py"))
STUBS: Final = sorted((ROOT / "shmacc").rglob("*.pyi"))

PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What comments name and is not this project's.
OTHERS: Final = {"fork", "same_kind"}

_CPP_TOKEN: Final = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')""", re.DOTALL
)
_WORD: Final = re.compile(r"\w+")
_FILE: Final = re.compile(r"\b[\w./-]*\w\.(?:hpp|cpp|py|pyi|md|pml)\b")
_CALL: Final = re.compile(r"\b([A-Za-z_]\w*)\(\)")
_CONSTANT: Final = re.compile(r"(?<![\w:])k[A-Z]\w*")
_MEMBER: Final = re.compile(r"\b([A-Za-z_]\w*)::([A-Za-z_~]\w*)")
_IN_BACKTICKS: Final = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_DOTTED: Final = re.compile(r"[A-Za-z_][\w.]*(?:\(\))?")
# Words that sentences do without; "who attaches" as a subject is "a process that attaches", and so
# is "by who attaches".
_ARCHAISM: Final = re.compile(
    r"\b(?:amid|anew|whoever|for want of|(?:by|of) who)\b"
    r"|(?:^|[.;:(|\"])\s*who (?:[a-z]+s|may|can)\b",
    re.IGNORECASE,
)
_SCOPE: Final = re.compile(r"\b(namespace|class|struct|enum)\b[^;{}()]*\{")


class Source:
    """A C++ file, its comments apart from its code."""

    def __init__(self, text: str) -> None:
        """Take it apart; texts in quotes are neither."""
        self.comments = "\n".join(
            match["comment"].lstrip("/ ")
            for match in _CPP_TOKEN.finditer(text)
            if match["comment"] is not None
        )
        self.code = _CPP_TOKEN.sub(" ", text)
        self.words = set(_WORD.findall(self.code))

    @functools.cached_property
    def members(self) -> dict[str, set[str]]:
        """The words in the body of each class, struct and enumeration."""
        found: dict[str, set[str]] = {}
        for match in _SCOPE.finditer(self.code):
            if match[1] != "namespace":
                body = self.code[match.end() : self._end(match.end())]
                head = match[0].partition(":")[0]
                name = [word for word in _WORD.findall(head) if word != "alignas"][-1]
                found.setdefault(name, set()).update(_WORD.findall(body))
        return found

    @functools.cached_property
    def constants(self) -> set[str]:
        """Those that stand in no class, and so need none before them."""
        inner = set().union(
            *(
                words
                for name, words in self.members.items()
                if not re.search(rf"\benum (class )?{name}\b", self.code)
            )
        )
        return {word for word in self.words - inner if re.fullmatch(r"k[A-Z]\w*", word)}

    def _end(self, start: int) -> int:
        depth = 1
        for at in range(start, len(self.code)):
            depth += {"{": 1, "}": -1}.get(self.code[at], 0)
            if depth == 0:
                return at
        raise AssertionError("braces do not match")


@functools.cache
def native() -> dict[str, Source]:
    """All C++ files, by name."""
    return {path.name: Source(path.read_text(encoding="utf-8")) for path in NATIVE}


@functools.cache
def files() -> set[str]:
    """The names of all files that a comment may mean."""
    folders = ("shmacc", "tests", "tools", "docs")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}


@functools.cache
def python_words() -> set[str]:
    """All names in the library's Python code."""
    words: set[str] = set()
    for path in PYTHON:
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NAME:
                    words.add(token.string)
    return words | {path.stem for path in PYTHON} | {path.parent.name for path in PYTHON}


@functools.cache
def all_words() -> set[str]:
    """All names in code, of either language."""
    return python_words().union(*(source.words for source in native().values()))


def unknown_files(text: str) -> Iterator[str]:
    """Files that it names and are not there."""
    for match in _FILE.finditer(text):
        if Path(match[0]).name not in files():
            yield match[0]


def unknown_in_backticks(text: str) -> Iterator[str]:
    """Names in backticks that no code has."""
    for match in _IN_BACKTICKS.finditer(text):
        named = match[1]
        if named in files() | OTHERS or not _DOTTED.fullmatch(named):
            continue
        if not set(_WORD.findall(named)) <= all_words():
            yield named


def unknown_in_cpp(source: Source) -> list[str]:
    """What its comments name, and is not there."""
    text = source.comments
    unknown = [*unknown_files(text), *unknown_in_backticks(text)]
    for match in _MEMBER.finditer(text):
        holder, member = match.groups()
        bodies = [other.members[holder] for other in native().values() if holder in other.members]
        if holder != "std" and not any(member in body for body in bodies):
            unknown.append(match[0])
    unknown += [
        name
        for name in _CONSTANT.findall(text)
        if name not in source.words
        and not any(name in other.constants for other in native().values())
    ]
    unknown += [
        f"{name}()"
        for name in _CALL.findall(text)
        if name not in all_words() and name not in OTHERS
    ]
    return unknown


def texts_of(path: Path) -> str:
    """A Python file's docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, documented)]
    with path.open("rb") as file:
        tokens = tokenize.tokenize(file.readline)
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(docstrings + comments)


def archaisms(text: str) -> list[str]:
    """Those in a text, whose lines may be comments and whose strings may be in pieces."""
    flowing = re.sub(r"^\s*#+ ", "", text, flags=re.MULTILINE)
    flowing = re.sub(r'"\s+f?"', "", " ".join(flowing.split()))
    return [match[0] for match in _ARCHAISM.finditer(flowing)]


def sentences_of(path: Path) -> str:
    """A file's text; of C++ the comments and the texts in quotes."""
    text = path.read_text(encoding="utf-8")
    if path not in NATIVE:
        return text
    quoted = (match["text"] for match in _CPP_TOKEN.finditer(text) if match["text"] is not None)
    return "\n".join([native()[path.name].comments, *quoted])


@pytest.mark.parametrize(
    "path", [*NATIVE, *PYTHON, *STUBS, *PAGES], ids=lambda path: str(path.relative_to(ROOT))
)
def test_sentences_have_no_archaisms(path: Path) -> None:
    assert archaisms(sentences_of(path)) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "written anew by the next commit",
        "put back by whoever comes next",
        "a call that fails for\n    # want of memory",
        "never below an entry in use: who has it holds the byte",
        "changed by who has its lock",
        "in the namespace\n    # of who asks",
        'remedy = "nothing: "\n    "who attaches next makes another"',
    ],
)
def test_an_archaism_is_seen(sentence: str) -> None:
    assert len(archaisms(sentence)) == 1


def test_a_relative_clause_is_none() -> None:
    assert not archaisms("users\n# who may read the segment, and a user, who reads it")


@pytest.mark.parametrize("name", [path.name for path in NATIVE])
def test_what_a_comment_in_cpp_names_exists(name: str) -> None:
    assert unknown_in_cpp(native()[name]) == []


@pytest.mark.parametrize("path", [*PYTHON, *STUBS], ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_docstring_or_comment_in_python_names_exists(path: Path) -> None:
    text = texts_of(path)
    assert [*unknown_files(text), *unknown_in_backticks(text)] == []


@pytest.mark.parametrize(
    "comment",
    [
        "checked at every entry (`still_whole`)",
        "such a gradient waits for it (Core::apply)",
        "looks around at least every kSlice",  # it is Lock's
        "for inspection.py: everything is read",
        "what gone() says",
    ],
)
def test_a_name_of_nothing_is_seen(comment: str) -> None:
    assert len(unknown_in_cpp(Source(f"// {comment}\nint unrelated;"))) == 1


def test_what_exists_may_be_named() -> None:
    comment = (
        "`checksum_of` in layout.hpp, LaneState::count, Header::config, kMaxRows, kSparse, fork()"
    )
    assert unknown_in_cpp(Source(f"// {comment}\n")) == []
