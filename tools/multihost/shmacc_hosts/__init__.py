"""One world of hosts: the library's own owner, forwarders and shards, and what may happen to them.

The state machines of `shmacc._multihost` do no I/O and read no clock. Here they run in one thread.
Machines, owners and chiefs are the parts of a `World`. Each part says which steps it can take now;
a step, a message and a fault are data. Three walkers choose what happens next:

    at random    (walk.py)    Each step takes a random time, messages are lost, doubled and late,
                              and all kinds of faults strike.
    every way    (search.py)  From each state every step is taken, on a copy of the world. States
                              are compared by what they mean (states.py).
    in time      (in_time.py) Each step takes the time that processors and networks need.

Copies of the parameters are the names of their updates, and gradients say what they were computed
from: so the world sees exactly what is in a round, and checks it (world.py, memory.py).

The world is a package of tools, since `make model` and `make simulate` walk it as the tests do, and
tools may not import tests.
"""
