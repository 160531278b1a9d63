"""Simulates one group over many hosts: the library's own owner, forwarders and shards decide.

A discrete-event simulation. What it adds to the core are workers, networks, processors and time;
gradients are numbers, and pieces are their sizes.
"""
