"""Workers and takers that are killed at random and replaced, with accounts outside the library.

Each gradient has a number. In each member that it touches, it marks a row (dense: an element) of
its own with this number. So a take shows exactly which gradients are in which members, and their
expected sum is known. Workers and takers note in shared arrays what they are about to do, and how
it ended. At the end every accepted gradient must be in one take, once, in all of its members, and
the library's own counters must agree.

A training campaign has rounds that update parameters: ``model`` says what these must be after each
round, ``training`` has the processes.
"""
