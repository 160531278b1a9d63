"""The command ``python -m shmacc._run``, where ``shmacc-run`` is not on PATH."""

import sys

from shmacc._run import command

sys.exit(command.main())
