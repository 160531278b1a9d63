"""What `import shmacc` loads where all the packages that users have beside are installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

_PROGRAM: Final = """
import sys

import numpy

import shmacc

group = shmacc.AccumulatorGroup({"rows": shmacc.IndexedSlicesSpec((None, 2), "float32")})
group.apply({"rows": ([1], [[1, 2]])}, 0)
group.take(1)
group.close()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
_OTHERS: Final = "torch jax scipy tensorflow polars pandas pyarrow joblib uvloop anyio optax"


def test_no_package_of_a_user_is_imported_unless_the_user_does() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not set(_OTHERS.split()) & set(ran.stdout.split())
