"""Workers and takers that are killed at random and replaced, with books kept outside the library.

Each gradient has a number, and says it in a row (dense: an element) of its own; so whatever a take
hands out says exactly which gradients are in it, and their sum is known. Before and after each
apply the worker notes in shared arrays of its own what it is about to do, and what came of it; so
does the taker. When all is quiet, every accepted gradient must be in one take or still there,
wholly; and the library's own counters must agree with the books (audit.py).

``plans`` says what the gradients are, ``books`` is what outlives the processes, ``crew`` is what
they do, ``campaign`` starts, kills and replaces them, ``audit`` reckons up.
"""
