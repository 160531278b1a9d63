"""gensim's word2vec: word vectors only, all in C, in threads of one process; has its own rates."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from gensim.models import Word2Vec
from gensim.models.callbacks import CallbackAny2Vec

from shmacc_compare.frame import EVERY

if TYPE_CHECKING:
    from shmacc_compare.frame import Judge

TITLE = "gensim's word2vec"
TOGETHER = False
_SENTENCE = 1000  # words
_EPOCHS = 30


def ranks(workers: int) -> range:  # noqa: ARG001
    """Return none: the workers are threads."""
    return range(0)


def share(task: Any, workers: int) -> None:
    """Return nothing: there is nothing to be shared."""


class Look(CallbackAny2Vec):  # type: ignore[misc, unused-ignore]
    """Has the vectors judged after each epoch."""

    def __init__(self, task: Any, judge: Judge) -> None:
        """Have judged nothing."""
        self.model, self.judge, self.epoch, self.is_over = task.model(), judge, 0, False

    def on_epoch_end(self, vectors: Any) -> None:
        """Give the judge a model with these vectors; what comes after it is satisfied is idle."""
        self.epoch += 1
        order = [vectors.wv.key_to_index[word] for word in range(len(vectors.wv))]
        with torch.no_grad():
            self.model.left.weight[:] = torch.from_numpy(vectors.wv.vectors[order])
            self.model.right.weight[:] = torch.from_numpy(vectors.syn1neg[order])
        if self.judge.satisfied(self.model, self.epoch * EVERY):
            raise StopIteration


def lead(shared: None, task: Any, workers: int, judge: Judge) -> None:  # noqa: ARG001
    """Train."""
    words = task.stream.tolist()
    sentences = [words[at : at + _SENTENCE] for at in range(0, len(words), _SENTENCE)]
    with contextlib.suppress(StopIteration):
        Word2Vec(
            sentences,
            vector_size=task.width,
            window=task.window,
            negative=task.negatives,
            ns_exponent=0.75,
            sg=1,
            sample=0,
            min_count=1,
            epochs=_EPOCHS,
            workers=workers,
            callbacks=[Look(task, judge)],
        )
