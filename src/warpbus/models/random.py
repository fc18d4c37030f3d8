"""Models of a given shape with random weights, made on the device in seconds: for benchmarks and tests.

Activations stay finite: a projection of inputs of variance 1 has outputs of variance 1, roughly, and every sublayer
norms its input first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpbus.cuda.remote import remote_backend
from warpbus.dist import Group
from warpbus.kernels.ops.arguments import HALVES, gpu_has_kernels
from warpbus.kernels.ops.packed import PackedWeight, packed_shapes
from warpbus.kernels.ops.trellis_packed import PackedTrellis, packed_signs, packed_trellis_words
from warpbus.models.config import ModelConfig
from warpbus.models.decoder import Decoder
from warpbus.models.layers import MoE, QuantizedEmbedding, QuantizedLinear, Router
from warpbus.models.parallel import Part
from warpbus.models.placement import round_onto
from warpbus.qtensor import QTensor, Scheme, packed_words
from warpbus.qtensor.qtensor import check_trellis
from warpbus.qtensor.trellis import code_deviation

_WORDS = 2**31


@torch.no_grad()
def random_model(
    config: ModelConfig,
    scheme: Scheme | None,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    head: Scheme | None = None,
    embedding: Scheme | None = None,
    embedding_device: torch.device | str | None = None,
    group: Group | None = None,
    expert_parallel: bool = False,
    offloaded: Sequence[int] = (),
    int8_activations: bool = False,
    stacked: bool = True,
) -> Decoder:
    """A decoder with random weights; nothing is made that it does not keep.

    Args:
        config: its shape; `warpbus.models.SHAPES` has those of well-known models.
        scheme: of the layers' matrices, whose codes are drawn at random, with smaller groups for matrices that its
            groups do not divide; None: they are in `dtype`.
        device, dtype: where it lies, and of what is not quantized.
        seed: the same one draws the same model on the same kind of device. On a remote one it becomes torch's own seed.
        head: the scheme of the head; None: it is in `dtype`. A tied one is then the embedding rounded, as `load_model`
            does it.
        embedding: the scheme that the embedding is rounded to; None: it is in `dtype`. A tied head is the same matrix.
        embedding_device: where the embedding lies, if not on `device`.
        group: the processes that compute it together, each with a part of the shape that it would have of a model
            that is loaded; see `load_model`. The parts are drawn apart: they are none of what one process draws.
        expert_parallel: as `load_model`.
        offloaded: experts in the memory of the host, as `load_model`; the weights are the same as without.
        int8_activations: on a CPU, quantized layers round their inputs to 8 bits; see `QuantizedLinear`.
        stacked: arrange experts for the kernels, where these take them.

    Returns:
        the decoder in eval mode, its parameters without gradients.
    """
    part = None if group is None or group.world == 1 else Part(config, group.rank, group.world, expert_parallel)
    with torch.device("meta"):
        model = Decoder(config if part is None else part.config)
    if part is not None:
        part.narrow(model)
    weights = _RandomWeights(
        model,
        config,
        part,
        scheme,
        torch.device(device),
        dtype,
        seed,
        head=head,
        embedding=embedding,
        embedding_device=torch.device(embedding_device or device),
        offloaded=offloaded,
        int8_activations=int8_activations,
    )
    weights.draw_all(stacked=stacked)
    if part is not None and group is not None:
        part.join(model, group)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # drawn experts, and an embedding that was moved
    return model.eval()


@dataclass
class _RandomWeights:
    """Puts random weights into the modules of a model on the meta device; attributes as of `random_model`."""

    model: Decoder
    config: ModelConfig
    part: Part | None
    scheme: Scheme | None
    device: torch.device
    dtype: torch.dtype
    seed: int
    head: Scheme | None
    embedding: Scheme | None
    embedding_device: torch.device
    offloaded: Sequence[int]
    int8_activations: bool

    def __post_init__(self) -> None:
        self._draw = _RandomTensors(self.device, self.dtype, self.seed)

    def draw_all(self, *, stacked: bool) -> None:
        """Draw the weights of the modules in their order."""
        # Names: a list of modules would keep the experts of a layer beside the stacked ones.
        names = [name for name, _ in self.model.named_modules()]
        last = {name.split(".")[1]: name for name in names if name.startswith("layers.")}  # of each layer
        layer_of = {name: int(index) for index, name in last.items()}
        for name in names:
            self._draw_module(name, self.model.get_submodule(name))
            if stacked and name in layer_of and isinstance(mlp := self.model.layers[layer_of[name]].mlp, MoE):
                mlp.stack(self.offloaded[layer_of[name]] if self.offloaded else 0)
        if self.config.tie_embeddings and isinstance(self.model.embedding, nn.Embedding):
            self._tie_head(self.model.embedding.weight)

    def _draw_module(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            self._draw_linear(name, module)
        elif isinstance(module, nn.Embedding):
            self._draw_embedding(module)
        elif isinstance(module, Router):
            module.weight = _fixed(self._draw.normal(*module.weight.shape, std=module.weight.shape[1] ** -0.5))
            if module.bias is not None:
                module.bias = _fixed(torch.zeros(module.weight.shape[0], device=self.device))
        elif isinstance(weight := getattr(module, "weight", None), Tensor):  # of a norm
            module.weight = _fixed(torch.ones(weight.shape, dtype=self.dtype, device=self.device))
            if getattr(module, "bias", None) is not None:
                module.bias = _fixed(torch.zeros(weight.shape, dtype=self.dtype, device=self.device))

    def _draw_linear(self, name: str, linear: nn.Linear) -> None:
        is_head = linear is self.model.head
        if is_head and self.config.tie_embeddings:
            return
        matrix = self.model.config.matrix(f"{name}.weight")
        of_layers = self.scheme if matrix is not None and not matrix.dequantized else None
        scheme = self.head if is_head else of_layers
        if scheme is None:
            linear.weight = _fixed(self._draw.normal(*linear.weight.shape, std=linear.in_features**-0.5))
            linear.bias = None if linear.bias is None else _fixed(self._draw.bias(linear))
            return
        bias = None if linear.bias is None else self._draw.bias(linear)
        weight = self._draw.weight(scheme.fitting(linear.in_features), linear)
        if self.config.is_offloaded(f"{name}.weight", self.offloaded):
            weight = weight.to("cpu")
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, self._quantized(weight, bias))

    def _draw_embedding(self, embedding: nn.Embedding) -> None:
        # Drawn on the device, for the same numbers wherever it lies; nothing else is there yet.
        embedding.weight = _fixed(self._draw.normal(*embedding.weight.shape, std=0.02).to(self.embedding_device))
        if self.embedding is not None:
            form = round_onto(embedding.weight, self.embedding, self.embedding_device, self.dtype)
            self.model.embedding = QuantizedEmbedding(form, dtype=self.dtype)
            if self.config.tie_embeddings:
                if self.part is not None or self.embedding_device != self.device:
                    form = round_onto(self._head_rows(embedding.weight), self.embedding, self.device, self.dtype)
                self.model.add_module("head", self._quantized(form))
        if self.part is not None:  # the same embedding on every process, and from here on a part of its own
            seed = (self.seed + 1) * self.part.world + self.part.rank
            self._draw = _RandomTensors(self.device, self.dtype, seed)

    def _tie_head(self, embedding: Tensor) -> None:
        """Make the head of an embedding that is not quantized."""
        tied = self._head_rows(embedding)
        if self.head is None:
            self.model.head.weight = tied
        else:
            self.model.add_module("head", self._quantized(round_onto(tied, self.head, self.device, self.dtype)))

    def _head_rows(self, embedding: Tensor) -> Tensor:
        """The rows of the embedding that this process's head has."""
        return embedding if self.part is None else self.part.tied_head(embedding)

    def _quantized(self, weight: QTensor | PackedWeight | PackedTrellis, bias: Tensor | None = None) -> QuantizedLinear:
        return QuantizedLinear(weight, bias, dtype=self.dtype, int8_activations=self.int8_activations)


class _RandomTensors:
    """Random tensors on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device = device
        self._dtype = dtype
        # A remote device has one generator, which the seed of all of this process's sets.
        self._generator = None if remote_backend(device) else torch.Generator(device).manual_seed(seed)
        if self._generator is None:
            torch.manual_seed(seed)

    def normal(self, *shape: int, std: float) -> Tensor:
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.normal_(0.0, std, generator=self._generator)

    def bias(self, linear: nn.Linear) -> Tensor:
        return self.normal(linear.out_features, std=0.1)

    def weight(self, scheme: Scheme, linear: nn.Linear) -> QTensor | PackedWeight | PackedTrellis:
        """Uniform codes, and scales whose magnitudes vary by a factor of 3."""
        n, k = linear.out_features, linear.in_features
        # Codes that are equally likely spread by (levels / sqrt(12)) scales.
        scale = (1 / code_deviation() if scheme.is_trellis else 12**0.5 / 2**scheme.bits) * k**-0.5
        if scheme.activations is not None:
            return self._values(scheme, n, k, scale)
        if self._dtype not in HALVES or not gpu_has_kernels(self._device):
            return self._plain(scheme, n, k, scale)
        if scheme.is_trellis:
            check_trellis((n, k), "matrix", scheme)
            words, scales = self._words(packed_trellis_words(scheme, n, k)), self._scales((n,), scale).float()
            return PackedTrellis(words, scales, packed_signs(k, self._device), scheme, (n, k), self._dtype)
        count, shape = packed_shapes(scheme, n, k)
        codes = self._words(count)
        if 4 < scheme.bits < 8:
            codes &= 0x01010101 * scheme.max_code
        scales = self._scales(shape, scale)
        scales[:, scheme.groups(k) :] = 0
        zeros = None if scheme.symmetric else torch.full_like(scales, scheme.middle_code)
        return PackedWeight(codes, scales, zeros, scheme, (n, k))

    def _plain(self, scheme: Scheme, n: int, k: int, scale: float) -> QTensor:
        shape = n, scheme.groups(k)
        zeros = None
        if not scheme.symmetric:
            zeros = torch.full(shape, scheme.middle_code, dtype=torch.uint8, device=self._device)
        words = self._words(n, packed_words(k, scheme.bits))
        if spare := -k * scheme.bits % 32:  # bits of a row's last word that hold no code
            words[:, -1] &= (1 << (32 - spare)) - 1
        scales = self._scales(shape, scale)
        # In 16 bits, as files have them: on a CPU the bytes of scales count, too.
        scales = scales if self._dtype in HALVES else scales.to(torch.bfloat16)
        return QTensor(scheme, words, scales, zeros, (n, k))

    def _values(self, scheme: Scheme, n: int, k: int, scale: float) -> QTensor:
        drawn = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=self._device, generator=self._generator)
        return QTensor.from_values(scheme, drawn.to(scheme.dtype), self._scales((n,), scale))

    def _words(self, *shape: int) -> Tensor:
        return torch.randint(-_WORDS, _WORDS, shape, dtype=torch.int32, device=self._device, generator=self._generator)

    def _scales(self, shape: tuple[int, ...], scale: float) -> Tensor:
        """Positive and negative ones, so that weights have a mean of 0: that of symmetric codes is -1/2.

        With a mean of -1/2 scale, each layer amplifies the mean of the hidden state, until that is a constant vector.
        Such activations change few bits in the tensor cores, and a GPU at its power limit runs faster than with a
        trained model: an H200 at 1.84 GHz instead of 1.63.
        """
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device).uniform_(
            -scale, scale, generator=self._generator
        )
        return drawn + torch.copysign(torch.full_like(drawn, 0.5 * scale), drawn)


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
