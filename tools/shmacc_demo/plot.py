"""The loss curve as a picture; the only module here that needs matplotlib."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


class PlotError(ValueError):
    """No picture can be drawn there."""


def check(path: Path) -> None:
    """Find out before a run whether its picture can be drawn after it.

    Raises:
        PlotError: It cannot.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("a picture needs matplotlib: pip install matplotlib")
    if not path.parent.is_dir():
        raise PlotError(f"there is no folder {path.parent}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow: only where wanted

    kinds = FigureCanvasAgg.filetypes
    if path.suffix[1:].lower() not in kinds:
        raise PlotError(f"{path.name} must end in one of: {', '.join(sorted(kinds))}")


def draw(path: Path, losses: list[float], title: str) -> None:
    """Draw the loss of every step, and its average over some."""
    from matplotlib.figure import Figure  # slow: only where wanted

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="every step")
    span = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.full(span, 1 / span), mode="valid")
    axes.plot(steps[span - 1 :], smooth, color="tab:blue", label=f"mean of {span} steps")
    axes.set(title=title, xlabel="step", ylabel="loss of a pair")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
