"""The ways to train with several processes that are compared: a module each, as short as can be."""
