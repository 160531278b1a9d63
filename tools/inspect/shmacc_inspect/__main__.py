"""The command `python -m shmacc_inspect`, where `shmacc-inspect` is not on PATH."""

import sys

from shmacc_inspect.start import main

sys.exit(main())
