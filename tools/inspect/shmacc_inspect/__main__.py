"""The command, for an environment whose commands are not on PATH."""

import sys

from shmacc_inspect.start import main

sys.exit(main())
