"""The loss curve of a training run as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from warpbus.formats.files import replace_file
from warpbus.train.results import CURVE, LOG


def draw_training(output: Path) -> Path:
    """Draw the log of the training run that wrote `output`.

    Returns:
        The PNG, `training.png` in that directory.

    Raises:
        StorageError: if it cannot be written.
    """
    log = json.loads((output / LOG).read_text(encoding="utf-8"))
    replace_file(output / CURVE, lambda path: draw_curve(log, path))
    return output / CURVE


def draw_curve(log: Sequence[dict[str, float]], path: Path) -> None:
    """Draw the losses, the gradient norm, the load of experts if there are any, and the learning rate.

    Args:
        log: one entry per step with `step`, `loss` and `learning_rate`; some with `valid_loss`, `gradient_norm` and
            `expert_load`.
        path: the PNG to write.
    """
    steps = [entry["step"] for entry in log]
    losses = [entry["loss"] for entry in log]
    loads = _of(log, "expert_load")
    ratios = (3, 1, 1, 1) if loads else (3, 1, 1)
    figure = Figure(figsize=(8, 7 + 1.4 * bool(loads)))
    above, middle, *others, below = rows = figure.subplots(len(ratios), 1, height_ratios=ratios, sharex=True)
    above.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8)
    above.plot(steps, _smoothed(losses), color="C0", label="training")
    if validated := _of(log, "valid_loss"):
        above.plot(*zip(*validated, strict=True), color="C1", marker="o", markersize=3, label="validation")
        # The best one: what comes after it only learns the data by heart.
        step, best = min(validated, key=lambda entry: entry[1])
        above.annotate(f"{best:.3f}", (step, best), textcoords="offset points", xytext=(0, 6), ha="right")
    above.set_ylabel("loss (nats a token)")
    if losses:
        # A run from scratch begins far above all the rest; what was validated is always in the picture.
        shown = [loss for _, loss in validated] + [min(max(losses), 1.3 * losses[len(losses) // 20])]
        low, high = min(losses + shown), max(shown)
        margin = 0.05 * (high - low) or 0.01
        above.set_ylim(low - margin, high + margin)
    above.legend()
    if norms := _of(log, "gradient_norm"):
        middle.plot(*zip(*norms, strict=True), color="C3", linewidth=0.8)
    middle.set_ylabel("gradient's norm")
    for axes in others:
        axes.plot(*zip(*loads, strict=True), color="C4", linewidth=0.8)
        axes.set_ylabel("busiest expert\n/ mean")
    below.plot(steps, [entry["learning_rate"] for entry in log], color="C2")
    below.set_ylabel("learning rate")
    below.set_xlabel("step")
    for axes in rows:
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")


def _of(log: Sequence[dict[str, float]], name: str) -> list[tuple[float, float]]:
    return [(entry["step"], entry[name]) for entry in log if name in entry]


def _smoothed(values: Sequence[float], weight: float = 0.97) -> list[float]:
    """An exponential average, corrected for its start."""
    average, total, smoothed = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        smoothed.append(average / total)
    return smoothed
