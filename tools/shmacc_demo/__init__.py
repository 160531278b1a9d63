"""A demonstration of shmacc: word vectors trained by processes that share nothing but names."""
