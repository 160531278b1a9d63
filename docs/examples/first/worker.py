import shmacc

with shmacc.SparseConditionalAccumulator("float32", (None, 2), shared_name="emb") as emb:
    emb.apply_grad([3, 7], [[1.0, 2.0], [3.0, 4.0]], local_step=emb.global_step)
    print("gradients:", emb.num_accumulated())
