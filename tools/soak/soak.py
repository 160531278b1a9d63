"""Kills workers and takers at random, for long, and keeps the books. See ``--help``."""

import os
import sys

# The processes are the parallelism: NumPy is to keep to one thread in each, this one included.
# NumPy reads this at its first import, which the next line causes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from shmacc_soak.main import main

if __name__ == "__main__":
    sys.exit(main())
