"""`make compare`: one model, trained by each way that one chooses between."""
