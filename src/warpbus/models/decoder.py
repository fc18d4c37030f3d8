"""The decoder that every family shares. Knows nothing of files, tokens' meaning, sampling or caches."""

import torch
from torch import Tensor, nn

from warpbus.dist import Group
from warpbus.models.config import ModelConfig
from warpbus.models.layers import (
    Attention,
    AttentionContext,
    CausalAttention,
    FusedAttention,
    GatedMLP,
    RMSNorm,
    Rotary,
    project,
)


class DecoderLayer(nn.Module):
    """One block: attention, then MLP, each normed before, and with `output_norms` also after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps)

        self.has_output_norms = config.output_norms
        self.attention_norm = norm()
        self.attention = Attention(config)
        self.attention_output_norm = norm() if config.output_norms else nn.Identity()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config.hidden_size, config.ffn_size)
        self.mlp_output_norm = norm() if config.output_norms else nn.Identity()

    def forward(
        self,
        x_btd: Tensor,
        layer: int,
        positions_bt: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        context: AttentionContext | FusedAttention,
    ) -> Tensor:
        place = layer, positions_bt, angles, context
        if self.has_output_norms:
            x_btd = x_btd + self.attention_output_norm(self.attention(x_btd, *place, norm=self.attention_norm))
            return x_btd + self.mlp_output_norm(self.mlp(x_btd, norm=self.mlp_norm))
        x_btd = self.attention(x_btd, *place, norm=self.attention_norm, residual=x_btd)
        return self.mlp(x_btd, norm=self.mlp_norm, residual=x_btd)


class Decoder(nn.Module):
    """Tokens to logits. `hidden` and `logits` are apart, so that a caller computes the logits it needs.

    Attributes:
        config: its own shape.
        group: the processes of which each has a part like this one (`warpbus.models.parallel`); None where it is whole.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.group: Group | None = None
        self.rotary = Rotary(config.rope)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def hidden(
        self,
        tokens_bt: Tensor,
        positions_bt: Tensor | None = None,
        context: AttentionContext | FusedAttention | None = None,
    ) -> Tensor:
        """The normed output of the last layer.

        Args:
            tokens_bt: token ids `[batch, tokens]`.
            positions_bt: integer positions of the same shape; 0, 1, 2, ... by default.
            context: what to attend to; the row itself, causally, by default.

        Returns:
            `[batch, tokens, hidden]`.
        """
        if positions_bt is None:
            positions_bt = torch.arange(tokens_bt.shape[1], device=tokens_bt.device).expand_as(tokens_bt)
        return self.final_norm(self.transform(self.embed(tokens_bt), positions_bt, context or CausalAttention()))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, `[..., vocabulary]`, for the output of `hidden`."""
        return project(self.head, hidden)

    def embed(self, tokens_bt: Tensor) -> Tensor:
        """What enters the first layer, `[batch, tokens, hidden]`, on the device of the tokens.

        The embedding may lie on the CPU while all else is on a GPU: then only the rows that are needed go there.
        """
        rows = self.embedding(tokens_bt.to(self.embedding.weight.device))
        return rows.to(tokens_bt.device)

    def transform(
        self, x_btd: Tensor, positions_bt: Tensor | None, context: AttentionContext | FusedAttention
    ) -> Tensor:
        """What leaves the last layer, not normed; `positions_bt` may be left out for a `FusedAttention`."""
        angles = None
        if not isinstance(context, FusedAttention):
            assert positions_bt is not None
            angles = self.rotary(positions_bt, x_btd.dtype)
        for index, layer in enumerate(self.layers):
            x_btd = layer(x_btd, index, positions_bt, angles, context)
        return x_btd

    def scores(self, x: Tensor) -> Tensor:
        """Scores of the next token, `[..., vocabulary]`, for the output of `transform`."""
        return project(self.head, x, norm=self.final_norm)

    def forward(
        self,
        tokens_bt: Tensor,
        positions_bt: Tensor | None = None,
        context: AttentionContext | FusedAttention | None = None,
    ) -> Tensor:
        """Logits `[batch, tokens, vocabulary]`; arguments as in `hidden`."""
        return self.logits(self.hidden(tokens_bt, positions_bt, context))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Draw fresh weights for training: normal, those that write to the residual stream smaller (GPT-2)."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
                scale = std / (2 * self.config.num_layers) ** 0.5 if residual else std
                parameter.normal_(0.0, scale, generator=generator)
