"""What a decoder looks like, in one vocabulary for every family."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: the base of the frequencies.
        rotary_dim: how many of the head's first dimensions rotate.
        interleaved: rotate the pairs (2i, 2i+1), as GLM does, rather than (i, i + rotary_dim / 2), as Llama does.
        position_scale: positions are divided by this first (chatglm2-6b-32k, `rope_type: linear`).
        scaling: Llama 3's change of the frequencies.
    """

    theta: float
    rotary_dim: int
    interleaved: bool
    position_scale: float = 1.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: embedding, `num_layers` blocks of attention and gated MLP, final norm, head.

    Attributes:
        family: the name of the family that declares it (`warpbus.models.families`).
        qkv_bias: the query, key and value projections have a bias.
        qk_norm: queries and keys are normed for each head (Qwen 3).
        output_norms: each sublayer's output is normed before it is added (GLM-4-0414).
        tie_embeddings: the head is the embedding.
        max_context: the longest sequence the positions allow, in tokens.
        stop_ids: generation ends at any of these tokens.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope: RopeConfig
    max_context: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_norms: bool = False
    tie_embeddings: bool = False
    stop_ids: tuple[int, ...] = ()

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the query, key and value parts of the fused projection."""
        return (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, the tied head counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        qkv = sum(self.qkv_rows) * (self.hidden_size + self.qkv_bias)
        output = self.hidden_size * (self.num_heads * self.head_dim + self.output_bias)
        mlp = 3 * self.hidden_size * self.ffn_size
        norms = self.hidden_size * (4 if self.output_norms else 2) + 2 * self.head_dim * self.qk_norm
        return embeddings + self.num_layers * (qkv + output + mlp + norms) + self.hidden_size
