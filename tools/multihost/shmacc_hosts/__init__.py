"""A simulated world of hosts, with the library's own owner, forwarders and shards.

The state machines of `shmacc._multihost` do no I/O and read no clock. Here they run in one thread.
Machines, owners and chiefs are the parts of a `World`. Each part says which steps it can take now;
a step, a message and a fault are data. Three modules choose what happens next:

    at random    (walk.py)    Each step takes a random time, messages are lost, doubled and late,
                              and all kinds of faults strike.
    every way    (search.py)  From each state every step is taken, on a copy of the world. States
                              are compared by what they mean (states.py).
    in time      (in_time.py) Each step takes the time that processors and networks need.

Here a copy of the parameters is the list of its updates' names, and a gradient has the copy that it
was computed from: so the world sees and checks the content of each round (world.py, memory.py).

The tests, `make model` and `make simulate` use it. It is here since tools may not import tests.
"""
