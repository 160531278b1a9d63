"""Workers and takers that are killed at random and replaced, with accounts outside the library.

Each gradient has a number, which it marks in a row (dense: an element) of its own, in each member
that it touches. So a take shows exactly which gradients are in which of its members, and their
expected sum is known. Workers and takers note in shared arrays what they are about to do, and what
came of it. At the end every accepted gradient must be in one take, once, in all of its members, and
the library's own counters must agree.

A training campaign has rounds that update parameters: ``model`` says what these must be after each
round, ``training`` has the processes.
"""
