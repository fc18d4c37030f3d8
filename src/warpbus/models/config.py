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
        two_dimensional: each half of the head is a plane that rotates by a position of its own (ChatGLM-6B), in halves
            within the plane. `rotary_dim` is that of a plane, half of the head.
    """

    theta: float
    rotary_dim: int
    interleaved: bool
    position_scale: float = 1.0
    scaling: RopeScaling | None = None
    two_dimensional: bool = False

    @property
    def planes(self) -> int:
        """The parts of a head that rotate by positions of their own."""
        return 2 if self.two_dimensional else 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: embedding, `num_layers` blocks of attention and MLP, final norm, head.

    Attributes:
        family: the name of the family that declares it (`warpbus.models.families`).
        qkv_bias: the query, key and value projections have a bias.
        qk_norm: queries and keys are normed for each head (Qwen 3).
        output_norms: each sublayer's output is normed before it is added (GLM-4-0414).
        tie_embeddings: the head is the embedding.
        max_context: the longest sequence the positions allow, in tokens.
        stop_ids: generation ends at any of these tokens.
        layer_norm: the norms are LayerNorm, with biases, rather than RMSNorm.
        gated: the MLP is SwiGLU; otherwise GELU of one projection.
        mlp_bias: the projections of the MLP have biases.
        normed_residual: what a sublayer gives is added to its *normed* input times this (ChatGLM-6B); 0 is the usual
            residual, the input as it is.
        prompt_end: the token after which generation begins (<sop> of ChatGLM-6B): those of a sequence before its first
            one see each other in both directions. None where all attention is causal.
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
    layer_norm: bool = False
    gated: bool = True
    mlp_bias: bool = False
    normed_residual: float = 0.0
    prompt_end: int | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of a layer's linear layers, in the order in which activations meet them."""
        return ("attention.qkv", "attention.o", "mlp.gate_up" if self.gated else "mlp.up", "mlp.down")

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
        inner = self.ffn_size * (2 if self.gated else 1)
        mlp = self.hidden_size * (inner + self.ffn_size) + self.mlp_bias * (inner + self.hidden_size)
        norm = self.hidden_size * (2 if self.layer_norm else 1)
        norms = norm * (4 if self.output_norms else 2) + 2 * self.head_dim * self.qk_norm
        return embeddings + self.num_layers * (qkv + output + mlp + norms) + norm
