"""The demo job: real training in processes that share nothing but names. See ``--help``."""

import os
import sys

# The processes are the parallelism: NumPy keeps to one thread in each. It reads this when it is
# first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if __name__ == "__main__":
    from shmacc_demo.main import main

    sys.exit(main())
