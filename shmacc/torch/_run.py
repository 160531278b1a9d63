"""What chief and replicas share beside the model: numbers of the run, and who has left.

They stand in the shared arrays, under names that no parameter can have. The chief alone writes
them, in rounds. The end is the group's, which is finished then.
"""

RUN, LEFT = ".run", ".left"
STEP, UPDATING, DONE, ASYNCHRONOUS = range(4)
"""In RUN: how many updates there were; whether one is going on; before which step of the group all
rounds are in the parameters; which kind of training it is. `Parameters` know the two in the middle
by themselves."""

LEAVING = 2**62
"""A contributor from here on is a replica that leaves, not one with a gradient."""

MOST_REPLICAS = 2**20
SERIAL_BITS = 40
"""Of the number of an asynchronous gradient: times MOST_REPLICAS it stays below LEAVING."""


def of_params(shared_name: str) -> str:
    """Return the name of the shared arrays."""
    return f"{shared_name}.params"
