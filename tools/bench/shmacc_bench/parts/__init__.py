"""The parts of the benchmark, a module each: `measure(quick)` yields the part's tables."""

from typing import Final

PARTS: Final = ("calls", "several_processes", "small_gradients", "rounds", "ids", "ddp")
"""Parts that need torch in this process come last: until then the process is small."""
