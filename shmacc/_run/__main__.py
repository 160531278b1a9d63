"""The command ``shmacc-run``, for an environment whose commands are not on PATH."""

import sys

from shmacc._run import command

sys.exit(command.main())
