"""Simulates one group over many hosts. The library's own owner and forwarders decide.

A discrete-event simulation. It adds workers, copies of parameters, networks, processors and time to
the core. Gradients are numbers, copies are the names of their updates, and rows are their sizes.
"""
