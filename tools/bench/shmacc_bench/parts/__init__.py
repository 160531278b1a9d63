"""What is measured, a module for each part: `measure(quick)` yields its tables."""

from __future__ import annotations

from typing import Final

PARTS: Final = ("calls", "several_processes", "small_gradients", "rounds", "ids", "ddp")
"""Parts that need torch in this process come last: until then the process is small."""
