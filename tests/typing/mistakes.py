"""Each line that ends in ``# wrong`` is an error to type checkers, and no other line is."""

from __future__ import annotations

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, inspection

shmacc.SparseCondtionalAccumulator("float32")  # wrong
shmacc.Statistics  # wrong
shmacc.segment  # wrong
inspection.descrbe("name")  # wrong
shmacc.errors.DeadlineExceeded  # wrong
shmacc.raw_ops.AccumulatorTakeGradients  # wrong

acc = SparseConditionalAccumulator("float32", shared_name=7)  # wrong
acc.take(1).value  # wrong
acc.take("1")  # wrong
acc.take_grad(1, 2)  # wrong
dense = ConditionalAccumulator("float32", owners="everybody")  # wrong
ConditionalAccumulator("float32", if_exists="ignore")  # wrong
dense.take_partial(1).row_counts  # wrong
dense.stats().aplied  # wrong
fine = dense.take(1).value
