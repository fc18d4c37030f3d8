"""Training methods: all weights of a decoder, low-rank adapters (LoRA), or a prefix (P-Tuning).

Each method is a module whose forward pass computes the loss, and which returns its trained parameters for writing.
"""

import torch
from torch import Tensor, nn

from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, ModelConfig, load_model
from warpbus.models.adapters import Lora, Prefix
from warpbus.models.layers import CausalAttention
from warpbus.qtensor import Scheme
from warpbus.train.balance import correction_biases
from warpbus.train.dataset import IGNORED, Documents
from warpbus.train.fp8 import use_fp8
from warpbus.train.lora import attach_lora, lora_of
from warpbus.train.loss import summed_cross_entropy
from warpbus.train.ptuning import TrainedPrefix
from warpbus.train.recompute import recompute_layers
from warpbus.train.settings import TrainingSettings
from warpbus.train.sharding import whole


class TrainingMethod(nn.Module):
    """A decoder in training; called with packed rows, it returns their loss.

    Attributes:
        model: the decoder.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        """The cross-entropy summed over the targets of rows `[rows, length]` (see `warpbus.train.dataset`), in nats.

        `documents` may be None if each row is one document.
        """
        return summed_cross_entropy(self.hidden(tokens, positions, documents), self.model.head, targets)

    def hidden(self, tokens: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        """The hidden states of packed rows, `[rows, length, hidden_size]`."""
        return self.model.hidden(tokens, positions, self.context(documents))

    def context(self, documents: Tensor | None) -> CausalAttention:
        """The context that the tokens of packed rows attend to."""
        return CausalAttention(documents)

    def take_predicted(self) -> Tensor | None:
        """The loss of multi-token prediction, summed over its targets since the last call, and their number.

        Float32 `[2]`; None if it is not trained.
        """
        return None

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}


class FullMethod(TrainingMethod):
    """Trains all weights, in float32, but for the correction biases of experts (`warpbus.train.balance`).

    Args:
        mtp_weight: of the loss of multi-token prediction; above 0 the model has a layer for it.
    """

    def __init__(self, model: Decoder, mtp_weight: float = 0.0) -> None:
        super().__init__(model.requires_grad_(True))
        for bias in correction_biases(model).values():
            bias.requires_grad_(False)
        self.mtp_weight = mtp_weight
        self._predicted: Tensor | None = None

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        if not (self.mtp_weight and self.training):
            return super().forward(tokens, targets, positions, documents)
        hidden = self.hidden(tokens, positions, documents)
        loss = summed_cross_entropy(hidden, self.model.head, targets)
        later = later_targets(targets, documents)
        # The last column has no token after it and no target; its token is any.
        states = self.model.predict(tokens.roll(-1, 1), hidden, positions, self.context(documents))
        predicted = summed_cross_entropy(states, self.model.head, later)
        sums = torch.stack((predicted.detach().float(), (later != IGNORED).sum().float()))
        self._predicted = sums if self._predicted is None else self._predicted + sums
        return loss + self.mtp_weight * predicted

    def take_predicted(self) -> Tensor | None:
        taken, self._predicted = self._predicted, None
        return taken


class LoraMethod(TrainingMethod):
    """Trains LoRA adapters (`LoraLinear`)."""

    def lora(self, name: str) -> Lora:
        """The trained adapter; every process calls it."""
        return lora_of(self.model, name)


class PrefixMethod(TrainingMethod):
    """Trains the keys and values of a prefix (P-Tuning v2)."""

    def __init__(self, model: Decoder, prefix: TrainedPrefix) -> None:
        super().__init__(model)
        self.learnt = prefix

    def context(self, documents: Tensor | None) -> CausalAttention:
        return self.learnt.context(documents)

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.learnt.named_parameters())

    def prefix(self, name: str) -> Prefix:
        """The trained prefix, on the CPU; every process calls it."""
        return Prefix(name, whole(self.learnt.keys).cpu(), whole(self.learnt.values).cpu())


def later_targets(targets: Tensor, documents: Tensor | None) -> Tensor:
    """The targets of multi-token prediction: of each token, the target of the token after it in the same document.

    Args:
        targets, documents: `[rows, length]`, see `warpbus.train.dataset`.
    """
    later = torch.full_like(targets, IGNORED)
    later[:, :-1] = targets[:, 1:]
    if documents is not None:
        later[:, :-1].masked_fill_(documents[:, 1:] != documents[:, :-1], IGNORED)
    return later


def prepare(
    checkpoint: Checkpoint, config: ModelConfig, settings: TrainingSettings, data: Documents, device: torch.device
) -> TrainingMethod:
    """Load the model of a checkpoint for training on a device; it is the same in every process.

    Args:
        checkpoint: with weights; without any, method "full" starts from random weights.
        data: the training data.

    Raises:
        UsageError: the settings do not fit the model.
        CheckpointError: the model is not supported.
        DeviceError: the GPU has no FP8.
    """
    if settings.method == "full":
        decoder = _whole_model(checkpoint, config, settings.seed, device)
        made: TrainingMethod = FullMethod(decoder, settings.mtp_weight)
        model = made.model
    else:
        model = _frozen_model(checkpoint, settings, device)
        if settings.method == "lora":
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(settings.seed)
                attach_lora(
                    model,
                    rank=settings.rank,
                    alpha=settings.alpha,
                    dropout=settings.dropout,
                    targets=settings.targets,
                )
            made = LoraMethod(model)
        else:
            made = PrefixMethod(model, TrainedPrefix.beginning(model, data.tokens, settings.prefix_tokens))
    if settings.fp8:
        use_fp8(model)
    if settings.recompute:
        recompute_layers(model, settings.recompute)
    return made.train()


def _whole_model(checkpoint: Checkpoint, config: ModelConfig, seed: int, device: torch.device) -> Decoder:
    """The decoder with the weights of the checkpoint, or random weights if it has none."""
    if checkpoint.names():
        return load_model(checkpoint, device=device, dtype=torch.float32, mtp=config.mtp is not None)
    model = Decoder(config)
    # Drawn on the CPU, so that every device and every process starts with the same weights.
    model.initialize(torch.Generator().manual_seed(seed))
    return model.to(device)


def _frozen_model(checkpoint: Checkpoint, settings: TrainingSettings, device: torch.device) -> Decoder:
    """The model that an adapter is trained for."""
    if not checkpoint.names():
        raise UsageError(
            f"{checkpoint.directory}: has no weights to train {settings.method} for: add them, or use method full"
        )
    layer_scheme = None if settings.quantize is None else Scheme.parse(settings.quantize)
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    return load_model(checkpoint, device=device, dtype=dtype, layer_scheme=layer_scheme).requires_grad_(False)
