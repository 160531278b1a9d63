import shmacc

with shmacc.SparseConditionalAccumulator("float32", (None, 2), shared_name="emb") as emb:
    mean = emb.take_grad(2, timeout=60)
    print(mean.indices, mean.values.tolist(), "step:", emb.global_step)
    emb.unlink()
