"""What is measured, a module for each part: `measure(quick)` yields its tables."""

from __future__ import annotations

from typing import Final

PARTS: Final = (
    "calls",
    "several_processes",
    "waiting",
    "many_tensors",
    "arrays_in",
    "rounds",
    "ids",
    "ddp",
)
"""Those that need torch here come last: until then this process is small."""
