"""What stands in shared memory: who holds it, who waits, is it sound, and what may go.

Everything here looks without attaching and without the segment's lock, so it works on segments whose
processes are stopped or dead in the middle of a commit, and holds nobody up. What is read is the
committed state of one instant; rows are read optimistically (`StillPicture`). Whether a process
lives is the kernel's word (presence.hpp), not a guess from its pid.

Names are given as ``shared_name`` in the current namespace, or as a whole system name
(``shmacc.…``), which `list_segments` reports.
"""

import contextlib
import enum
import os
import pwd
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from shmacc import _core, dtypes, names, segment
from shmacc.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ShmaccError,
)
from shmacc.names import SegmentName
from shmacc.records import IndexArray, ValueArray
