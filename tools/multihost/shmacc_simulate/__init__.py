"""Simulates one group over many hosts: the library's own owner, forwarders and shards decide.

A discrete-event simulation. It adds workers, networks, processors and time to the core; gradients
are numbers, and pieces are their sizes.
"""
