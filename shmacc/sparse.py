"""``shmacc.sparse.SparseConditionalAccumulator``, as in ``tf.sparse``."""

from shmacc._sparse import SparseConditionalAccumulator

__all__ = ["SparseConditionalAccumulator"]
