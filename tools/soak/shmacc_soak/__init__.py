"""Workers and takers that are killed at random and replaced, with accounts outside the library.

Each gradient has a number, which it marks in a row (dense: an element) of its own, in each member
that it touches. So every take shows exactly which gradients are in which of its members, and what
they add up to is known. Before and after each apply the worker records in shared arrays of its own
what it is about to do, and the result; so does the taker. At the end, every accepted gradient must
be once in one take, in all of its members; and the library's own counters must agree with these
accounts (audit.py).

A training campaign holds the other half of the loop: ``model`` says what the parameters are after
so many rounds, ``training`` has the processes that make the rounds, update, save and load.

``gradients`` says what each number stands for, ``members`` marks it in a tensor and finds it there
again, ``plans`` are the accumulators that are tried, ``books`` the accounts that outlive the
processes, ``crew`` their work, ``campaign`` starts, kills and replaces them (``processes``),
``audit`` compares the accounts.
"""
