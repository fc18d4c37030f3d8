"""The loss curve of a training run as a picture."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from warpbus.cuda.cpu import cpu_model
from warpbus.figures.theme import QUIET, SERIES, caption, footer, paper, said, save, style
from warpbus.train.results import CURVE, LOG, SUMMARY

_SMOOTHED_FROM = 30  # steps; fewer are drawn as they are
_SMOOTHED_PART = 1 / 40  # of a run: the steps that an average of the loss covers; more would lag behind it


def draw_training(output: Path) -> Path:
    """Draw the log of the training run that wrote `output`.

    Returns:
        The PNG, `training.png` in that directory.

    Raises:
        StorageError: if it cannot be written.
    """
    log = json.loads((output / LOG).read_text(encoding="utf-8"))
    summary = output / SUMMARY
    found = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    draw_curve(log, output / CURVE, name=output.name, summary=found)
    return output / CURVE


def draw_curve(
    log: Sequence[dict[str, float]], path: Path, *, name: str = "", summary: Mapping[str, Any] | None = None
) -> None:
    """Draw the losses, the gradient norm, the load of experts if there are any, and the learning rate.

    Args:
        log: one entry per step with `step`, `loss` and `learning_rate`; some with `valid_loss`, `gradient_norm` and
            `expert_load`.
        path: the PNG to write.
        name: of the trained model.
        summary: the content of `training.json`: method, tokens, seconds, device, torch.

    Raises:
        StorageError: if it cannot be written.
    """
    with style():
        steps = [entry["step"] for entry in log]
        losses = [entry["loss"] for entry in log]
        panels: list[tuple[str, list[tuple[float, float]]]] = [
            ("gradient norm", _of(log, "gradient_norm")),
            ("busiest expert / mean", _of(log, "expert_load")),
            ("learning rate", _of(log, "learning_rate")),
        ]
        panels = [(label, points) for label, points in panels if points]
        drawn = paper(8, 3.2 + 1.35 * len(panels))
        above, *others = drawn.subplots(
            1 + len(panels), 1, height_ratios=(3, *[1] * len(panels)), sharex=True, squeeze=False
        )[:, 0]
        _losses(above, steps, losses, _of(log, "valid_loss"))
        for axis, (label, points), color in zip(others, panels, SERIES[2:], strict=False):
            axis.plot(*zip(*points, strict=True), color=color, linewidth=1.0)
            axis.set_title(said(label))
            axis.set_ylim(bottom=0)
        last = drawn.axes[-1]
        last.set_xlabel(said("step"))
        last.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in drawn.axes:
            axis.grid()
        known = summary or {}
        device = cpu_model() if known.get("device") == "cpu" else str(known.get("device", ""))
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        versions = [f"torch {known['torch']}"] if "torch" in known else []
        caption(drawn, _finding(log), _what(name, known), footer(device, date, versions))
        save(drawn, path)


def _losses(axis: Axes, steps: list[float], losses: list[float], validated: list[tuple[float, float]]) -> None:
    if len(losses) >= _SMOOTHED_FROM:
        axis.plot(steps, losses, color=SERIES[0], alpha=0.25, linewidth=0.8)
        axis.plot(steps, _smoothed(losses), color=SERIES[0], label=said("training, smoothed"))
    else:
        axis.plot(steps, losses, color=SERIES[0], marker="o", ms=3.5, label=said("training"))
    if validated:
        axis.plot(*zip(*validated, strict=True), color=SERIES[1], marker="o", ms=4, label=said("validation"), zorder=3)
        # The best one: after it the model only memorizes the data.
        step, best = min(validated, key=lambda entry: entry[1])
        axis.axhline(best, color=QUIET, lw=0.8, ls=":")
        right = step > (steps[0] + steps[-1]) / 2
        axis.annotate(
            f"{best:.3f}", (step, best), textcoords="offset points", xytext=(0, 8), ha="right" if right else "left"
        )
    axis.set_title(said("loss (nats per token)"))
    if losses:
        # A run from scratch begins far above all the rest; validations are always in the picture.
        shown = [loss for _, loss in validated] + [min(max(losses), 1.3 * losses[len(losses) // 20])]
        low, high = min(losses + shown), max(shown)
        margin = 0.07 * (high - low) or 0.01
        axis.set_ylim(low - margin, high + margin)
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1)


def _finding(log: Sequence[dict[str, float]]) -> str:
    first, last = log[0]["loss"], log[-1]["loss"]
    if validated := _of(log, "valid_loss"):
        step, best = min(validated, key=lambda entry: entry[1])
        return f"Validation loss {best:.3f} at step {int(step):,}, training loss {first:.2f} → {last:.2f}"
    return f"Training loss {first:.2f} → {last:.2f} in {len(log):,} steps"


def _what(name: str, summary: Mapping[str, Any]) -> str:
    parts = [name, str(summary.get("settings", {}).get("method", ""))]
    if "tokens" in summary and "seconds" in summary:
        parts.append(f"{summary['tokens']:,} tokens in {summary['seconds']:,.0f} s")
    return ", ".join(filter(None, parts))


def _of(log: Sequence[dict[str, float]], name: str) -> list[tuple[float, float]]:
    return [(entry["step"], entry[name]) for entry in log if name in entry]


def _smoothed(values: Sequence[float]) -> list[float]:
    """An exponential average, corrected for its start."""
    average, total, smoothed = 0.0, 0.0, []
    weight = 1 / max(5.0, _SMOOTHED_PART * len(values))  # of the newest
    for value in values:
        average = (1 - weight) * average + weight * value
        total = (1 - weight) * total + weight
        smoothed.append(average / total)
    return smoothed
