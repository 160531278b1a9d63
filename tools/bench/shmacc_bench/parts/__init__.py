"""What is measured, a module for each part: `measure(quick)` yields its tables."""

from typing import Final

PARTS: Final = ("calls", "several_processes", "small_gradients", "rounds", "ids", "ddp")
"""Parts that need torch in this process come last: until then the process is small."""
