"""Workers and takers that are killed at random and replaced, with accounts outside the library.

Each gradient has a number, which it marks in a row (dense: an element) of its own; so every take
shows exactly which gradients are in it, and their sum is known. Before and after each apply the
worker records in shared arrays of its own what it is about to do, and the result; so does the
taker. At the end, every accepted gradient must be entirely in one take or still there; and the
library's own counters must agree with these accounts (audit.py).

``plans`` defines the gradients, ``books`` the accounts that outlive the processes, ``crew`` their
work, ``campaign`` starts, kills and replaces them, ``audit`` compares the accounts.
"""
