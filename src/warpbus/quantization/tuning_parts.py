"""The parts of a run that tunes, on the disk: the state after each epoch, and the layers with their new scales.

The layers as the algorithm quantized them stay until the model is complete, so that an interrupted run can go on after
the last whole epoch, or with the layers that are not written yet.
"""

from collections.abc import Callable

import torch

from warpbus.errors import UsageError
from warpbus.formats import ResumableCheckpoint
from warpbus.models.latent_spec import LatentAttentionSpec
from warpbus.qtensor import Schemes
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.output_parts import is_readable, layer_part, stored_tensors
from warpbus.quantization.preflight import Plan
from warpbus.quantization.report import TuningResult
from warpbus.quantization.tuning import Tuning, TuningState, TuningStep

STATE_BYTES = 16
"""Bytes of the state per group: four numbers in float32."""

STATE_PART = "tuning"
"""The name of the part that holds the `TuningState`."""


def tuned_part(index: int) -> str:
    """The name of the part that holds a decoder layer with tuned scales."""
    return f"tuned-{index:05}"


def tune_parts(
    plan: Plan,
    data: Calibration,
    held: Calibration,
    writer: ResumableCheckpoint,
    device: torch.device,
    tell: Callable[[TuningStep], None],
) -> TuningResult:
    """Tune the finished layers, and commit each with its new scales. It goes on where an earlier run stopped.

    Args:
        plan: of the run.
        data, held: see `tuning.split`.
        writer: has all layers.
        device: where to compute.
        tell: see `Tuning.run`.
    """
    writer.drain()
    layers = range(len(plan.config.all_layers))
    missing = [index for index in layers if not is_readable(writer, tuned_part(index))]
    state = _stored_state(writer)
    if missing or state is None or not state.is_complete:
        tuning = Tuning(plan, data, held, writer, device)

        def save(found: TuningState) -> None:
            tensors = {name: tensor.cpu() for name, tensor in found.tensors.items()}
            writer.commit(STATE_PART, tensors, {"losses": found.losses})
            writer.drain()  # a tuning goes on from what is on the disk

        state = tuning.run(state, save=save, tell=tell)
        for index in missing:
            tensors = {name: entry.read() for name, entry in writer.read(layer_part(index)).items()}
            for linear, weight in tuning.scaled(state, index).items():
                tensors |= stored_tensors(plan, plan.layer(index)[linear], weight.to("cpu"))
            writer.commit(tuned_part(index), tensors, {})
        writer.drain()
    best = min(range(len(state.losses)), key=lambda epoch: state.losses[epoch])
    return TuningResult(state.losses[0], state.losses[best], best)


def _stored_state(writer: ResumableCheckpoint) -> TuningState | None:
    """The last state that an interrupted run saved; None if it saved nothing, or that is damaged."""
    facts = writer.facts(STATE_PART)
    if facts is None:
        return None
    tensors = {name: entry.read() for name, entry in writer.read(STATE_PART).items()}
    return TuningState(tensors, tuple(facts["losses"]))


def check_tuning(schemes: Schemes, *, calibrated: bool, kv_cache: str | None) -> None:
    """Refuse what cannot be tuned.

    Raises:
        UsageError: the message names the flag.
    """
    if not calibrated:
        raise UsageError("--effort high: trains on calibration data, and rtn has none: use --algorithm gptq")
    for scheme in schemes.distinct():
        if scheme.activations is not None or scheme.element is not None or scheme.is_trellis:
            raise UsageError(
                f"--effort high: {scheme} cannot be tuned: expected integer weights and 16-bit activations, such as "
                "w4a16-g128"
            )
    if kv_cache is not None:
        raise UsageError(
            f"--effort high: not with --kv-cache {kv_cache}, whose scales are calibrated before tuning: drop one of "
            "the two"
        )


def check_tunable(plan: Plan) -> None:
    """Refuse a model with sparse attention: its layers are computed again in another order for the gradients.

    Raises:
        UsageError: as said.
    """
    attention = plan.config.attention
    if isinstance(attention, LatentAttentionSpec) and attention.indexer is not None:
        raise UsageError(
            f"--effort high: {plan.checkpoint.directory} has sparse attention, which tuning does not support: use "
            "--effort normal"
        )


def tuning_bytes(plan: Plan) -> int:
    """The bytes on the disk that tuning needs besides the model: the layers before it, and the state."""
    kept = sum(plan.checkpoint.nbytes(name) for names in plan.kept for name in names)
    return plan.bytes_quantized + kept + STATE_BYTES * groups_of(plan)


def groups_of(plan: Plan) -> int:
    """The number of groups of all matrices."""
    return sum(sum(matrix.rows) * matrix.scheme.groups(matrix.columns) for matrix in plan.matrices)
