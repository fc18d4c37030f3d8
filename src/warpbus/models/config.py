"""The shape of a decoder, in one vocabulary for every family."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from warpbus.models.latent_spec import LatentAttentionSpec
from warpbus.models.layer_spec import AttentionSpec, LayerSpec, MatrixSpec, MLPSpec, MoESpec, NormSpec


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the low rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: the base of the frequencies.
        rotary_dim: number of leading dimensions of each head that rotate.
        interleaved: rotate the pairs (2i, 2i+1), as GLM does, rather than (i, i + rotary_dim / 2), as Llama does.
        position_scale: positions are divided by this first (chatglm2-6b-32k, `rope_type: linear`).
        scaling: Llama 3's frequency scaling.
        two_dimensional: each half of the head, a plane, rotates by its own position (ChatGLM-6B), with pairs
            (i, i + rotary_dim / 2) in the plane. `rotary_dim` is that of a plane, half of the head.
    """

    theta: float
    rotary_dim: int
    interleaved: bool
    position_scale: float = 1.0
    scaling: RopeScaling | None = None
    two_dimensional: bool = False

    @property
    def planes(self) -> int:
        """Number of parts of a head that have separate positions."""
        return 2 if self.two_dimensional else 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: embedding, layers, final norm, head.

    Attributes:
        family: the name of the family that declares it (`warpbus.models.families`).
        vocab_size: tokens of the embedding and of the head.
        layers: the table of each layer. Layers may differ in their MLPs, and in whether they have an indexer;
            everything else is the same in all.
        rope: the rotary position embedding.
        max_context: the longest sequence that the positions allow, in tokens.
        tie_embeddings: the head shares the weight of the embedding.
        stop_ids: generation ends at any of these tokens.
        mtp: the layer of multi-token prediction, number `num_layers`; None if there is none, or it is not used.
        prompt_end: the token after which generation begins (<sop> of ChatGLM-6B). Tokens before the first one in a
            sequence attend to each other in both directions. None if all attention is causal.
    """

    family: str
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rope: RopeConfig
    max_context: int
    tie_embeddings: bool = False
    stop_ids: tuple[int, ...] = ()
    prompt_end: int | None = None
    mtp: LayerSpec | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers, that of multi-token prediction excluded."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The decoder layers and, if there is one, the layer of multi-token prediction."""
        return self.layers if self.mtp is None else (*self.layers, self.mtp)

    @property
    def hidden_size(self) -> int:
        """Features of the residual stream."""
        return self.layers[0].hidden_size

    @property
    def attention(self) -> AttentionSpec | LatentAttentionSpec:
        """The attention of the first layer; that of others may differ in the indexer only."""
        return self.layers[0].attention

    @property
    def grouped_attention(self) -> AttentionSpec:
        """The attention of a model with grouped queries, not MLA."""
        assert isinstance(self.attention, AttentionSpec)
        return self.attention

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(isinstance(layer.mlp, MoESpec) for layer in self.layers)

    @property
    def expert_parallel(self) -> bool:
        """Whether these are the layers of one process of several that share out the routed experts."""
        return any(isinstance(layer.mlp, MoESpec) and layer.mlp.own is not None for layer in self.all_layers)

    @property
    def dense_mlp(self) -> MLPSpec:
        """The MLP of the first layer of a model without experts."""
        mlp = self.layers[0].mlp
        assert isinstance(mlp, MLPSpec)
        return mlp

    @property
    def norm(self) -> NormSpec:
        """The norms of the layers and the final norm."""
        return self.layers[0].norm

    @property
    def matrices(self) -> Iterator[tuple[int, MatrixSpec]]:
        """All matrices of the layers, each with the index of its layer."""
        return ((index, matrix) for index, layer in enumerate(self.all_layers) for matrix in layer.matrices)

    def matrix(self, parameter: str) -> MatrixSpec | None:
        """The matrix whose weight or bias is `parameter`, such as `layers.0.mlp.down.weight`; None if there is none."""
        if not parameter.startswith("layers."):
            return None
        _, index, name = parameter.split(".", 2)
        return self.all_layers[int(index)].by_name.get(name.rpartition(".")[0])

    def is_offloaded(self, parameter: str, offloaded: Sequence[int]) -> bool:
        """Whether a parameter is a matrix of an offloaded expert.

        Args:
            offloaded: for each layer, how many of its experts are, the last ones; empty: none.
        """
        matrix = self.matrix(parameter) if offloaded else None
        if matrix is None or matrix.expert is None:
            return False
        index = int(parameter.split(".")[1])
        mlp = self.all_layers[index].mlp
        return isinstance(mlp, MoESpec) and matrix.expert >= mlp.router.experts - offloaded[index]

    @cached_property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters of the model by their names; a tied head has none."""
        ends = (self.vocab_size, self.hidden_size)
        found: dict[str, tuple[int, ...]] = {"embedding.weight": ends}
        for index, layer in enumerate(self.all_layers):
            found |= {f"layers.{index}.{name}": shape for name, shape in layer.parameters.items()}
        found |= self.norm.parameters("final_norm", self.hidden_size)
        return found if self.tie_embeddings else found | {"head.weight": ends}

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied head is counted once."""
        return sum(map(math.prod, self.parameters.values()))

    def resized(
        self,
        *,
        num_layers: int | None = None,
        hidden_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_size: int | None = None,
    ) -> Self:
        """The same model with the given sizes replaced; `ffn_size` is that of the layers without experts.

        With fewer layers the first ones are kept; with more layers the last one is repeated. MLA has no
        `num_kv_heads` and `head_dim` to replace.
        """
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        given: Any = {name: size for name, size in sizes.items() if size}

        def layer_resized(layer: LayerSpec) -> LayerSpec:
            return replace(
                layer,
                hidden_size=hidden_size or layer.hidden_size,
                attention=replace(layer.attention, **given),
                mlp=replace(layer.mlp, ffn_size=ffn_size) if ffn_size and isinstance(layer.mlp, MLPSpec) else layer.mlp,
            )

        layers = tuple(map(layer_resized, self.layers))
        count = num_layers or self.num_layers
        mtp = None if self.mtp is None else layer_resized(self.mtp)
        return replace(self, layers=(layers + layers[-1:] * count)[:count], mtp=mtp)

    def with_mtp(self) -> Self:
        """The same model with a layer of multi-token prediction that is otherwise like its last layer."""
        return replace(self, mtp=replace(self.layers[-1], predicts=True))
