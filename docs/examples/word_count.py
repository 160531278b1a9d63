"""Counting words, as map and reduce: a word is a row, its count is the row's sum.

Each piece of the text is a contributor. So a piece that is counted again, because the process that
had it may have died before or after its apply, is in the sum once all the same.
"""

import collections
import functools
import hashlib
import multiprocessing
import re
from pydoc_data.topics import topics

import numpy as np
import shmacc

PIECES = 40


@functools.cache
def all_words():
    return re.findall(r"[a-z_]+", " ".join(topics.values()).lower())


def words_of(piece):
    words = all_words()
    return words[len(words) * piece // PIECES : len(words) * (piece + 1) // PIECES]


def row_of(word):
    """Return a word's row: 63 bits of a hash. Rows need no table as long as their numbers."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest()) >> 1


def count(piece):
    counts = collections.Counter(words_of(piece))
    with shmacc.SparseConditionalAccumulator.attach("words") as acc:
        acc.apply_grad([*map(row_of, counts)], [*counts.values()], local_step=0, contributor=piece)


if __name__ == "__main__":
    with (
        shmacc.SparseConditionalAccumulator(
            "int64",
            (None,),
            "words",
            reduction_type="SUM",
            if_exists="replace",
            unlink_on_close=True,
        ) as acc,
        multiprocessing.get_context("spawn").Pool(4) as pool,
    ):
        pool.map(count, [*range(PIECES), 3, 1, 4, 1, 5])  # some of them twice
        taken = acc.take(PIECES, timeout=60)
        assert taken.contributors.tolist() == [*range(PIECES)]
        expected = collections.Counter(all_words())
        assert len(taken.indices) == len(expected)
        for word, times in expected.items():
            assert taken.values[np.searchsorted(taken.indices, row_of(word))] == times
        print(*(f"{word}: {times}" for word, times in expected.most_common(5)), sep=", ")
