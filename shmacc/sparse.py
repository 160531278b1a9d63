"""``shmacc.sparse.SparseConditionalAccumulator``, as in ``tf.sparse``."""

from shmacc._accumulators.sparse import SparseConditionalAccumulator

__all__ = ["SparseConditionalAccumulator"]
