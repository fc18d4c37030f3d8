"""The loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def draw_curve(log: Sequence[dict[str, float]], path: Path) -> None:
    """Draw the training loss (smoothed, and as it was), the validation loss and the learning rate over the steps.

    Args:
        log: an entry a step, with `step`, `loss`, `learning_rate`, and `valid_loss` where there is one.
        path: the PNG to write.
    """
    steps = [entry["step"] for entry in log]
    losses = [entry["loss"] for entry in log]
    validated = [(entry["step"], entry["valid_loss"]) for entry in log if "valid_loss" in entry]
    figure = Figure(figsize=(8, 6))
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    above.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8)
    above.plot(steps, _smoothed(losses), color="C0", label="training")
    if validated:
        above.plot(*zip(*validated, strict=True), color="C1", marker="o", markersize=3, label="validation")
        last = validated[-1][1]
        above.annotate(f"{last:.3f}", (validated[-1][0], last), textcoords="offset points", xytext=(0, 6), ha="right")
    above.set_ylabel("loss (nats a token)")
    above.set_ylim(top=min(max(losses), 1.3 * losses[len(losses) // 20]) if losses else None)
    above.grid(alpha=0.3)
    above.legend()
    below.plot(steps, [entry["learning_rate"] for entry in log], color="C2")
    below.set_ylabel("learning rate")
    below.set_xlabel("step")
    below.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")


def _smoothed(values: Sequence[float], weight: float = 0.97) -> list[float]:
    """An exponential average, corrected for its start."""
    average, total, smoothed = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        smoothed.append(average / total)
    return smoothed
