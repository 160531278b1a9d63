"""The text: its words, numbered by how often they occur."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WORD = re.compile(r"[^\W\d]+(?:'[^\W\d]+)*")
"""Letters and underscores, so that ``__getitem__`` is one word, and so is ``don't``."""

RAREST = 5
"""A word that occurs less often has too little company to learn from."""

LARGEST = 50_000
"""No more words than this: the commonest ones of a large corpus."""


class CorpusError(ValueError):
    """The text is too poor to learn anything from."""


@dataclass(frozen=True)
class Corpus:
    """A text as the numbers of its words; number 0 is the commonest word."""

    words: tuple[str, ...]
    counts: NDArray[np.int64]
    stream: NDArray[np.int32]

    def number(self, word: str) -> int | None:
        """Give the number of a word, or None if it is not in the vocabulary."""
        try:
            return self.words.index(word)
        except ValueError:
            return None


def read(path: Path | None) -> Corpus:
    """Read a text file; with no path the language reference that every CPython carries."""
    if path is not None:
        return number(path.read_text(encoding="utf-8", errors="replace"))
    from pydoc_data.topics import topics  # half a megabyte: only for those who want it

    return number("\n".join(topics[name] for name in sorted(topics)))


def number(text: str) -> Corpus:
    """Give the words of a text their numbers; rare ones fall out, and neighbours close up."""
    found = WORD.findall(text.lower())
    common = [
        (word, count) for word, count in Counter(found).most_common(LARGEST) if count >= RAREST
    ]
    numbers = {word: index for index, (word, _) in enumerate(common)}
    stream = np.array([numbers[word] for word in found if word in numbers], dtype=np.int32)
    least_words, least_length = 10, 200
    if len(common) < least_words or len(stream) < least_length:
        raise CorpusError(
            f"the corpus has {len(common)} different words that occur {RAREST} times or more and "
            f"{len(stream)} occurrences of them; needed are {least_words} and {least_length}"
        )
    return Corpus(
        words=tuple(word for word, _ in common),
        counts=np.array([count for _, count in common], dtype=np.int64),
        stream=stream,
    )
