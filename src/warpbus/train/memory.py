"""The memory of each GPU for a training step, computed before anything is allocated."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from warpbus.cuda.devices import free_memory
from warpbus.cuda.memory_size import short_size
from warpbus.errors import DeviceError
from warpbus.kernels.ops.wna16_frozen import BUFFER_BYTES
from warpbus.models.config import ModelConfig
from warpbus.models.cost import MemoryNeed, packed_bytes
from warpbus.models.layer_spec import FLOAT32_PARAMETERS, AttentionSpec, LayerSpec, MatrixSpec, MoESpec
from warpbus.qtensor import Scheme
from warpbus.train.fp8 import fits
from warpbus.train.lora import adapted_matrices, check_lora
from warpbus.train.loss import piece_rows
from warpbus.train.recompute import SMALL
from warpbus.train.settings import TrainingSettings

_FLOAT, _HALF, _BYTE = 4, 2, 1

_PROCESS = 250_000_000
"""A process with torch and its libraries on the CPU, at least; measured with torch 2.13."""

_WORKSPACES = 2 * 2**25
"""cuBLAS's on Hopper, one for each thread that calls it: autograd has a thread of its own. Older GPUs need less."""


def training_memory(
    config: ModelConfig,
    settings: TrainingSettings,
    world: int = 1,
    *,
    scheme: Scheme | None = None,
    available: int | None = None,
) -> MemoryNeed:
    """The memory of each of `world` GPUs for a step of packed rows, without `torch.compile`, which needs less.

    Each part is given at its most, and not all parts are there at once (see `peak`). All experts of a layer are assumed
    to get the same number of tokens.

    - weights: of the model, and of what is trained beside it.
    - gradients: of everything that is trained.
    - optimizer: AdamW's two moments.
    - casts: weights in the dtype of the products, from the forward to the backward pass; with FSDP2 those that are
      gathered at a time.
    - activations: what is kept of the layers' forward pass for the backward pass.
    - head: the gradient of the head, which is there before the backward pass begins.
    - scores: what is there only while the loss is computed: the last norm's input, hidden states and their gradients,
      scores of a piece of tokens.
    - layer: what the backward pass needs besides for a layer, with `recompute` all of its activations.
    - workspaces: of libraries.

    Args:
        config: the model's shape.
        settings: how it is trained.
        world: GPUs that train together. With FSDP2 they share everything but quantized weights, with DDP nothing.
        scheme: of the layers' matrices, where the model is quantized already.
        available: bytes of a GPU.
    """
    if settings.quantize is not None:
        scheme = Scheme.parse(settings.quantize)
    half = _HALF if settings.dtype == "bfloat16" else _FLOAT
    rows = -(-settings.rows_per_step // world)
    tokens = min(rows, settings.rows_at_once) * settings.length
    share = world if settings.sharding == "fsdp" else 1
    of_spec = {spec: _LayerActivations(spec, config, settings, half, shared=share > 1) for spec in config.all_layers}
    layers = [of_spec[spec] for spec in config.all_layers]
    recomputed = settings.recompute or 0
    activations = sum(
        tokens * (layer.inputs if recomputed and index % recomputed == 0 else layer.kept)
        for index, layer in enumerate(layers)
    )
    if settings.method != "full" and not recomputed:
        activations -= tokens * layers[0].norm  # the first: nothing before it is trained
    held = _held(config, settings, scheme)
    trained = sum(_part(shape, share) for shape in held.trained)
    parts = {
        "weights": held.fixed + half * sum(_part(shape, share) for shape in held.frozen) + _FLOAT * trained,
        "gradients": _FLOAT * trained,
        "optimizer": 2 * _FLOAT * trained,
        "casts": _casts(config, settings, half, share, trained),
        "activations": activations,
        "head": _FLOAT * config.vocab_size * config.hidden_size if settings.method == "full" else 0,
        "scores": _scores(config, settings, tokens, half, layers[0].stream),
        "layer": max(
            _work(settings, scheme, tokens, half, layer) + (tokens * (layer.kept - layer.inputs) if recomputed else 0)
            for layer in of_spec.values()
        ),
        "workspaces": _WORKSPACES,
    }
    return MemoryNeed("each GPU", parts, available, peak=peak(parts, accumulates=rows > settings.rows_at_once))


def peak(parts: Mapping[str, int], *, accumulates: bool) -> int:
    """The most bytes at one time: when the loss is computed, or at one end of the backward pass.

    Args:
        parts: as of `training_memory`.
        accumulates: there are gradients already while the forward pass runs.
    """
    before = parts["gradients"] if accumulates else 0
    beginning = before + parts["casts"] + parts["activations"] + parts["head"] + max(parts["scores"], parts["layer"])
    always = parts["weights"] + parts["optimizer"] + parts["workspaces"]
    return always + max(beginning, parts["gradients"] + parts["layer"])


def check_main_memory(
    config: ModelConfig, settings: TrainingSettings, world: int, processes: int, *, scheme: Scheme | None = None
) -> None:
    """Refuse a run on the CPU that this machine has too little memory for: the kernel would kill it in its first step.

    Args:
        config, settings, world, scheme: as of `training_memory`.
        processes: how many of the run's processes this machine has.

    Raises:
        DeviceError: the least that the run needs is more than what is free; the message names a `rows_at_once` that
            fits, if there is one.
    """
    free = free_memory(torch.device("cpu"))
    if free is None:
        return

    def needed(rows: int) -> int:
        need = training_memory(config, replace(settings, rows_at_once=rows), world, scheme=scheme)
        return processes * (need.total - need.parts["workspaces"] + _PROCESS)

    if needed(settings.rows_at_once) <= free:
        return
    rows = min(settings.rows_at_once, settings.rows_per_step // world)
    while rows > 1 and needed(rows) > free // 2:  # the estimate is the least, and other programs need memory too
        rows //= 2
    rather = (
        f"give --rows-at-once {rows}, which needs about {short_size(needed(rows))} and gives the same result"
        if needed(rows) <= free
        else "train an adapter (--method lora), shorten --length, or use a machine with more memory"
    )
    raise DeviceError(
        f"--rows-at-once {settings.rows_at_once}: training needs at least {short_size(needed(settings.rows_at_once))} "
        f"of main memory, {short_size(free)} are free: {rather}"
    )


def num_trained(config: ModelConfig, settings: TrainingSettings) -> int:
    """How many numbers are trained."""
    return sum(map(math.prod, _held(config, settings, None).trained))


_Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Held:
    """The parts of the model that a process holds.

    Attributes:
        trained: shapes of float32 parameters.
        frozen: shapes of parameters in the dtype of the products.
        fixed: bytes of rounded matrices and of the routers' correction biases.
    """

    trained: list[_Shape]
    frozen: list[_Shape]
    fixed: int


def _held(config: ModelConfig, settings: TrainingSettings, scheme: Scheme | None) -> _Held:
    biases = {name: shape for name, shape in config.parameters.items() if name.endswith(FLOAT32_PARAMETERS)}
    others = {name: shape for name, shape in config.parameters.items() if name not in biases}
    fixed = _FLOAT * sum(map(math.prod, biases.values()))
    if settings.method == "full":
        return _Held(list(others.values()), [], fixed)
    trained: list[_Shape] = []
    frozen: list[_Shape] = []
    if settings.method == "lora":
        check_lora(config, settings.rank, settings.targets)
        for layer in config.layers:
            for n, k in (matrix.shape for matrix in adapted_matrices(layer, settings.targets)):
                trained += [(settings.rank, k), (n, settings.rank)]
    else:
        prefix = config.num_layers, settings.prefix_tokens, config.attention.num_kv_heads, config.attention.head_dim
        trained = [prefix, prefix]
    for name, shape in others.items():
        matrix = config.matrix(name) if name.endswith(".weight") else None
        if matrix is not None and scheme is not None:
            fixed += packed_bytes(scheme, *matrix.shape)
        elif matrix is not None and settings.fp8 and fits(*matrix.shape):
            fixed += 2 * _BYTE * matrix.num_weights + _FLOAT
        else:
            frozen.append(shape)
    return _Held(trained, frozen, fixed)


def _part(shape: _Shape, share: int) -> int:
    """Elements of a tensor that each of so many processes has: FSDP2 deals out its first axis."""
    return -(-shape[0] // share) * math.prod(shape[1:])


def _casts(config: ModelConfig, settings: TrainingSettings, half: int, share: int, trained: int) -> int:
    """Weights as the products take them, where they are not held like that; `trained` is their number."""
    of_layer = [layer.num_weights for layer in config.all_layers]
    layer = max(of_layer)
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    per_weight = _BYTE if settings.fp8 else half
    if share > 1:
        # The embedding and the head are whole all the time, and two layers: one that computes, and the one ahead.
        frozen = settings.method != "full"
        return half * (ends + 2 * layer) + (0 if frozen else _FLOAT * layer)
    if settings.method == "lora" and not settings.recompute:
        return half * trained if half == _HALF else 0
    if settings.method != "full" or (half == _FLOAT and not settings.fp8):
        return 0
    return sum(of_layer) * per_weight


def _scores(config: ModelConfig, settings: TrainingSettings, tokens: int, half: int, stream: int) -> int:
    """The memory of the last norm and `summed_cross_entropy`, but for the head's gradient."""
    piece = min(tokens, piece_rows(config.vocab_size, half)) * config.vocab_size * half
    # The head in the dtype of the products, and the part of its gradient that a piece gives.
    trained = 2 * half * config.vocab_size * config.hidden_size if settings.method == "full" else 0
    # The norm keeps its input, and its output where the products take another dtype; hidden states as these
    # take them, and their gradients.
    norm = (_FLOAT if config.norm.kind == "layer" else stream) + (stream if stream != half else 0)
    return piece + trained + tokens * config.hidden_size * (norm + 2 * half)


def _work(settings: TrainingSettings, scheme: Scheme | None, tokens: int, half: int, layer: "_LayerActivations") -> int:
    """Memory of the backward pass of a layer's MLP, less what it has freed: at the activation, or the product before.

    With the latter there are columns of a dequantized matrix, or a gradient of the matrix in both dtypes.
    """
    matrix = layer.widening.num_weights
    beside = 0
    if settings.method == "full":
        beside = matrix * (_FLOAT + (half if half == _HALF else 0))
    elif scheme is not None:
        beside = min(half * matrix, BUFFER_BYTES)
    return max(tokens * layer.activation_work, tokens * layer.widening_work + beside)


def _masks(config: ModelConfig, settings: TrainingSettings) -> bool:
    """Whether packed rows are attended to by a mask: not where torch's kernel for documents takes them."""
    return settings.dtype == "float32" or config.prompt_end is not None


class _LayerActivations:
    """Bytes of a layer's activations for each token.

    Attributes:
        stream: of a number of the residual stream, which is in float32 where the embedding is; FSDP2 gathers that in 16
            bits.
        norm: the bytes of its input that the first norm keeps.
        kept: from the forward to the backward pass.
        inputs: the bytes that recomputation keeps: the layer's input, and small tensors.
        widening: the product before the MLP's activation; of several branches the largest.
        activation_work, widening_work: bytes that the backward pass has made, less those that it has freed, at the
            MLP's activation and at the product before it.
    """

    def __init__(
        self, spec: LayerSpec, config: ModelConfig, settings: TrainingSettings, half: int, *, shared: bool
    ) -> None:
        full = settings.method == "full"
        assert isinstance(spec.attention, AttentionSpec)  # latent attention is refused when the inputs are read
        self.stream = _FLOAT if full and not shared else half
        branches = _branches(spec)
        self.widening = max((branch.widening for branch in branches), key=lambda matrix: matrix.num_weights)
        adapted = () if settings.method == "ptuning" else adapted_matrices(spec, settings.targets)
        learning = {matrix.name for matrix in (spec.matrices if full else adapted)}
        taken = _BYTE if full and settings.fp8 else half  # what a product keeps of its input
        hidden = spec.hidden_size
        # RMSNorm keeps its input; LayerNorm, and what meets weights of another dtype, a copy of it in float32.
        self.norm = hidden * (_FLOAT if spec.norm.kind == "layer" else self.stream)
        norms = self.norm * (4 if spec.output_norms else 2) + _query_norms(spec.attention, half, self.stream)
        attention = _attention(spec.attention, config, settings, half)
        # Gate and up, where no kernel knows the gradient of their product silu(gate) too; or what goes through GELU.
        gated = isinstance(spec.mlp, MoESpec) or spec.mlp.gated
        parts = 1 if not gated else 2 if half == _HALF else 3
        mlp = half * sum(branch.ffn * branch.passes for branch in branches) * parts
        if isinstance(spec.mlp, MoESpec):
            mlp += _routing(spec.mlp, hidden, half, self.stream, full=full)
        unrouted = sum(matrix.expert is None for matrix in spec.matrices)
        ranks = unrouted * settings.rank * half if settings.method == "lora" else 0
        inputs = _product_inputs(spec, branches, learning, taken)
        self.kept = norms + inputs + attention + mlp + ranks
        most = self.stream * hidden // SMALL
        each_rank = settings.rank * half if ranks else 0
        small = sum(each for each in (_FLOAT * spec.attention.num_heads, *[each_rank] * unrouted) if each <= most)
        self.inputs = hidden * self.stream + small
        # The gradients of the residual stream and of what goes into and comes out of the activation; the input of the
        # product after it is free.
        most_work = max(branches, key=lambda branch: branch.ffn * branch.share)
        ffn = math.ceil(most_work.ffn * most_work.share)
        freed = ffn * taken * (most_work.down.name in learning)
        # Each expert's gradient of the tokens is added to that of all experts.
        summed = 2 * self.stream * hidden if len(branches) > 1 else 0
        self.activation_work = self.stream * hidden + half * ffn * (3 if gated else 2) - freed + summed
        # The output is free too; the gradient of the product's input, and its part by LoRA.
        self.widening_work = hidden * (self.stream + 2 * half) - freed + summed


def _query_norms(attention: AttentionSpec, half: int, stream: int) -> int:
    """Bytes per token that the norms of queries and keys keep."""
    if not attention.qk_norm:
        return 0
    return (attention.width + attention.kv_width) * (half if stream == half else _FLOAT + half)


def _product_inputs(spec: LayerSpec, branches: Sequence["_Branch"], learning: Collection[str], taken: int) -> int:
    """Bytes per token of the inputs that the products keep for the gradients of their weights.

    Args:
        learning: the names of the matrices that are trained.
        taken: bytes of a number.
    """
    qkv, o, *_ = spec.matrices
    reading = [(qkv, 1), *((matrix, branch.passes) for branch in branches for matrix in branch.matrices)]
    inputs = sum(matrix.columns.length * taken * passes for matrix, passes in reading if matrix.name in learning)
    if o.name in learning and taken == _BYTE:  # otherwise its input is the output that attention keeps
        inputs += spec.attention.width * taken
    return inputs


def _attention(attention: AttentionSpec, config: ModelConfig, settings: TrainingSettings, half: int) -> int:
    """Bytes per token of queries, keys and values as attention takes them, its output, and a sum for each head."""
    heads, kv = attention.width, attention.kv_width
    kept = half * (2 * heads + 2 * kv) + _FLOAT * attention.num_heads
    if settings.method == "ptuning":
        # The prefix stands in front of every document, of which there is one in a row at least.
        kept += half * 2 * kv * settings.prefix_tokens // settings.length
    if _masks(config, settings):
        # The mask as numbers that are added, keys and values repeated for every head.
        kept += half * (settings.length + 2 * heads - 2 * kv)
    return kept


@dataclass(frozen=True)
class _Branch:
    """MLPs of a layer of one shape: the dense one, the shared expert, or all routed experts.

    Attributes:
        widening, down: the matrices of the first of them.
        passes: how many of them a token passes through.
        share: the share of the tokens that one of them computes at a time.
    """

    widening: MatrixSpec
    down: MatrixSpec
    passes: int = 1
    share: float = 1.0

    @property
    def matrices(self) -> tuple[MatrixSpec, MatrixSpec]:
        return self.widening, self.down

    @property
    def ffn(self) -> int:
        """Inner features."""
        return self.down.columns.length


def _branches(spec: LayerSpec) -> list[_Branch]:
    def branch(prefix: str, passes: int = 1, share: float = 1.0) -> _Branch:
        (widening,), (down,) = spec.reading(f"{prefix}.normed"), spec.reading(f"{prefix}.inner")
        return _Branch(widening, down, passes, share)

    if not isinstance(spec.mlp, MoESpec):
        return [branch("mlp")]
    router = spec.mlp.router
    routed = branch("mlp.experts.0", router.top_k, router.top_k / router.experts)
    return [routed] if spec.mlp.shared is None else [routed, branch("mlp.shared")]


def _routing(moe: MoESpec, hidden: int, half: int, stream: int, *, full: bool) -> int:
    """Bytes per token that the router and the weighted sum of the experts keep."""
    router = moe.router
    # The scores of all experts; of those chosen three float32 weights and three int64 indices.
    routing = _FLOAT * router.experts + router.top_k * (3 * _FLOAT + 3 * 8)
    # A trained router keeps its float32 input, unless the shared expert keeps the same.
    entered = _FLOAT * hidden if full and (half != _FLOAT or moe.shared is None) else 0
    # The outputs of the experts, before and after they are multiplied by their weights.
    return routing + entered + router.top_k * (half + stream) * hidden
