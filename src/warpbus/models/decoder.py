"""The decoder that every family shares. It does not depend on files, tokenizers, sampling or the KV cache."""

from typing import Any

import torch
from torch import Tensor, nn

from warpbus.dist import Group
from warpbus.models.config import ModelConfig, RopeConfig
from warpbus.models.kv_scales import KVScales
from warpbus.models.latent_spec import LatentAttentionSpec
from warpbus.models.layer_spec import LayerSpec, MoESpec
from warpbus.models.layers import (
    MLP,
    Attention,
    AttentionContext,
    CausalAttention,
    FusedAttention,
    LatentAttention,
    LayerChain,
    MoE,
    Norm,
    QuantizedEmbedding,
    Rotary,
    Routing,
    link_of,
    make_norm,
    may_chain,
    mlp_links,
    project,
    prompt_lengths,
)


class DecoderLayer(nn.Module):
    """One layer: attention, then the MLP or experts, each with a norm before it and, with `output_norms`, one after it.

    Decoding, training and calibration run the same code: `forward` runs both sublayers; calibration runs them stage by
    stage (`warpbus.models.layer_spec`) with `route`, `enter`, and `leave` or `feed_forward`.

    Attributes:
        spec: the table.
    """

    def __init__(self, spec: LayerSpec, rope: RopeConfig) -> None:
        super().__init__()
        self.spec = spec
        self.attention_norm = make_norm(spec.norm, spec.hidden_size)
        latent = isinstance(spec.attention, LatentAttentionSpec)
        self.attention: Attention | LatentAttention = (LatentAttention if latent else Attention)(spec, rope)
        self.attention_output_norm = self._output_norm()
        self.mlp_norm = make_norm(spec.norm, spec.hidden_size)
        self.mlp: MLP | MoE = MoE(spec) if isinstance(spec.mlp, MoESpec) else _dense(spec, gated=spec.mlp.gated)
        self.mlp_output_norm = self._output_norm()

    def _output_norm(self) -> Norm | None:
        return make_norm(self.spec.norm, self.spec.hidden_size) if self.spec.output_norms else None

    def forward(
        self,
        x_btd: Tensor,
        layer: int,
        positions_bt: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        context: AttentionContext | FusedAttention,
    ) -> Tensor:
        x_btd, norm, residual = self._entered(x_btd, self.attention_norm)
        inner = self.attention.inner(x_btd, layer, positions_bt, angles, context, norm=norm)
        return self.feed_forward(_added(self.attention, inner, self.attention_output_norm, residual))

    def feed_forward(self, x_btd: Tensor) -> Tensor:
        """The output of the MLP sublayer from its input, both `[batch, tokens, hidden]`."""
        x_btd, norm, residual = self._entered(x_btd, self.mlp_norm)
        if self.mlp_output_norm is None:
            return self.mlp(x_btd, norm=norm, residual=residual)
        return residual + self.mlp_output_norm(self.mlp(x_btd, norm=norm))

    def route(self, x_btd: Tensor) -> Routing | None:
        """The experts of the tokens of `x_btd`, the input of the MLP sublayer; None if the layer has no experts."""
        return self.mlp.router(self.mlp_norm(x_btd).flatten(0, -2)) if isinstance(self.mlp, MoE) else None

    def enter(
        self,
        stage: str,
        x_btd: Tensor,
        layer: int,
        positions_bt: Tensor,
        angles: tuple[Tensor, Tensor],
        context: AttentionContext,
    ) -> Tensor:
        """The input of the matrices that read a stage, `[batch, tokens, features]`.

        Args:
            stage: one of `LayerSpec.stages`.
            x_btd: the input of the stage's sublayer.
            layer, positions_bt, angles, context: as `forward`.
        """
        if stage == "attention.normed":
            return self.attention_norm(x_btd)
        if stage == "attention.attended":
            return self.attention.inner(x_btd, layer, positions_bt, angles, context, norm=self.attention_norm)
        if stage.startswith("attention."):
            assert isinstance(self.attention, LatentAttention)
            return self.attention.latent(stage, x_btd, self.attention_norm)
        return self.enter_mlp(stage, x_btd)

    def enter_mlp(self, stage: str, x: Tensor) -> Tensor:
        """As `enter`, for a stage of the MLP sublayer: `[..., features]` from its input x `[..., hidden]`."""
        branch, _, what = stage.rpartition(".")
        if what == "normed":
            return self.mlp_norm(x)
        mlp = self.get_submodule(branch)
        assert isinstance(mlp, MLP)
        return mlp.inner(x, norm=self.mlp_norm)

    def leave(self, sublayer: str, x_btd: Tensor, inner: Tensor) -> Tensor:
        """The output of a sublayer without experts.

        Args:
            sublayer: "attention" or "mlp".
            x_btd: its input.
            inner: the result of `enter` for its last stage.
        """
        if sublayer == "attention":
            _, _, residual = self._entered(x_btd, self.attention_norm)
            return _added(self.attention, inner, self.attention_output_norm, residual)
        assert isinstance(self.mlp, MLP)
        _, _, residual = self._entered(x_btd, self.mlp_norm)
        return _added(self.mlp, inner, self.mlp_output_norm, residual)

    def chain(self, x_btd: Tensor) -> LayerChain | None:
        """The products of the layer for one launch, from its input `[batch, tokens, hidden]`; None if they are none."""
        if self.spec.output_norms or self.spec.normed_residual:
            return None
        attention, mlp = self.attention, self.mlp
        rest = [mlp.as_element(self.mlp_norm)] if isinstance(mlp, MoE) else mlp_links(mlp, self.mlp_norm)
        return LayerChain.of(x_btd.flatten(0, -2), attention.as_links(self.attention_norm), link_of(attention.o), rest)

    def _entered(self, x_btd: Tensor, norm: Norm) -> tuple[Tensor, Norm | None, Tensor]:
        """A sublayer's input, the norm still to be applied to it, and the residual that its output is added to."""
        if not self.spec.normed_residual:
            return x_btd, norm, x_btd
        normed = norm(x_btd)
        return normed, None, normed * self.spec.normed_residual


class PredictionLayer(DecoderLayer):
    """The layer of multi-token prediction (MTP): from a token and the hidden state before it to the next hidden state.

    Attributes:
        embedding_norm, hidden_norm: norm the two parts of the input.
        projection: from both parts, the embedding first, to the hidden size.
        output_norm: norms the output, which then enters the model's head.
    """

    def __init__(self, spec: LayerSpec, rope: RopeConfig) -> None:
        super().__init__(spec, rope)
        self.embedding_norm = make_norm(spec.norm, spec.hidden_size)
        self.hidden_norm = make_norm(spec.norm, spec.hidden_size)
        self.projection = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        self.output_norm = make_norm(spec.norm, spec.hidden_size)

    def joined(self, embedded_btd: Tensor, hidden_btd: Tensor) -> Tensor:
        """The input of the layer, `[batch, tokens, hidden]`.

        Args:
            embedded_btd: embeddings of tokens.
            hidden_btd: for each of them, the normed hidden state of the token before it.
        """
        parts = self.embedding_norm(embedded_btd), self.hidden_norm(hidden_btd)
        return project(self.projection, torch.cat(parts, dim=-1))


def make_layer(spec: LayerSpec, rope: RopeConfig) -> DecoderLayer:
    """A layer of a decoder, without weights of its own if the default device is "meta"."""
    return (PredictionLayer if spec.predicts else DecoderLayer)(spec, rope)


def _dense(spec: LayerSpec, *, gated: bool) -> MLP:
    """The MLP of a layer without experts."""
    (widening,), (down,) = spec.reading("mlp.normed"), spec.reading("mlp.inner")
    return MLP(widening, down, gated=gated)


def _added(
    sublayer: Attention | LatentAttention | MLP, inner: Tensor, output_norm: Norm | None, residual: Tensor
) -> Tensor:
    """`residual + output_norm(output(inner))`; without an output norm the residual is fused into the projection."""
    if output_norm is None:
        return project(sublayer.output, inner, residual=residual)
    return residual + output_norm(project(sublayer.output, inner))


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Draw the weights, except of a model without memory: torch would import its compiler for that, a second."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Decoder(nn.Module):
    """Computes logits from tokens; `hidden` and `logits` are separate so that a caller computes only those it needs.

    Attributes:
        config: the shape of this decoder, which may be one part of a sharded model.
        layers: those of `ModelConfig.all_layers`.
        group: the processes that share the model (`warpbus.models.parallel`); None if it is not sharded.
        kv_scales: those that the checkpoint has for an 8-bit KV cache. A forward pass does not use them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.group: Group | None = None
        self.kv_scales: KVScales | None = None
        self.rotary = Rotary(config.rope)
        self.embedding: nn.Embedding | QuantizedEmbedding = _Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_layer(spec, config.rope) for spec in config.all_layers)
        self.final_norm = make_norm(config.norm, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.get_parameter("weight")

    @property
    def embedding_device(self) -> torch.device:
        """Where tokens are looked up."""
        if isinstance(self.embedding, QuantizedEmbedding):
            return self.embedding.device
        return self.embedding.weight.device

    @property
    def waits_for_gpu(self) -> bool:
        """Whether a forward pass on a GPU reads results back, so that no CUDA graph can capture it."""
        return any(isinstance(layer.mlp, MoE) and not layer.mlp.stacked for layer in self.layers)

    def hidden(
        self,
        tokens_bt: Tensor,
        positions_bt: Tensor | None = None,
        context: AttentionContext | FusedAttention | None = None,
        prompts_bt: Tensor | None = None,
    ) -> Tensor:
        """The normed output of the last layer.

        Args:
            tokens_bt: token ids `[batch, tokens]`.
            positions_bt: integer positions of the same shape; 0, 1, 2, ... by default.
            context: the context to attend to; by default each row attends causally to itself. If the model has a
                `prompt_end` and a `CausalAttention` has no prompt lengths, they are computed from the tokens.
            prompts_bt: as `transform`, for other contexts; by default computed from the tokens, which then have to be
                whole sequences.

        Returns:
            `[batch, tokens, hidden]`.
        """
        if positions_bt is None:
            positions_bt = torch.arange(tokens_bt.shape[1], device=tokens_bt.device).expand_as(tokens_bt)
        context = context or CausalAttention()
        if self.config.prompt_end is not None and not isinstance(context, FusedAttention):
            context, prompts_bt = self._prompted(tokens_bt, context, prompts_bt, self.config.prompt_end)
        return self.final_norm(self.transform(self.embed(tokens_bt), positions_bt, context, prompts_bt))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, `[..., vocabulary]`, for the output of `hidden`."""
        return project(self.head, hidden)

    def embed(self, tokens_bt: Tensor) -> Tensor:
        """The input of the first layer, `[batch, tokens, hidden]`, on the device of the tokens.

        The embedding may be on the CPU while the rest of the model is on a GPU; then only the needed rows are copied.
        """
        rows: Tensor = self.embedding(tokens_bt.to(self.embedding_device))
        return rows.to(tokens_bt.device)

    def transform(
        self,
        x_btd: Tensor,
        positions_bt: Tensor | None,
        context: AttentionContext | FusedAttention,
        prompts_bt: Tensor | None = None,
    ) -> Tensor:
        """The output of the last layer, before the final norm.

        Args:
            x_btd: from `embed`.
            positions_bt: as `hidden`; may be omitted for a `FusedAttention`.
            context: the context to attend to.
            prompts_bt: for two-dimensional positions, the prompt length of each sequence (see `prompt_lengths`); by
                default that of the context, if it is a `CausalAttention`.
        """
        angles = None
        if not isinstance(context, FusedAttention):
            assert positions_bt is not None
            if prompts_bt is None and isinstance(context, CausalAttention):
                prompts_bt = context.prompts_bt
            angles = self.rotary(positions_bt, x_btd.dtype, prompts_bt)
        elif may_chain(x_btd):
            return self._transform_chained(x_btd, context)
        for index, layer in zip(range(self.config.num_layers), self.layers, strict=False):
            x_btd = layer(x_btd, index, positions_bt, angles, context)
        return x_btd

    def _transform_chained(self, x_btd: Tensor, context: FusedAttention) -> Tensor:
        """As `transform`, with the products of a layer in one launch where that can be done."""
        layers: list[Any] = list(self.layers)[: self.config.num_layers]
        chains = [layer.chain(x_btd) for layer in layers]
        projected: list[Tensor] | None = None  # for the next layer, where a chain has computed it
        for index, (layer, chain, following) in enumerate(zip(layers, chains, [*chains[1:], None], strict=True)):
            if chain is None:
                x_btd = layer(x_btd, index, None, None, context)
                continue
            norm = layer.attention_norm
            inner = layer.attention.inner(x_btd, index, None, None, context, norm=norm, projected=projected)
            x_btd, projected = chain.leave_attention(inner, x_btd, following)
        return x_btd

    def predict(
        self,
        tokens_bt: Tensor,
        hidden_btd: Tensor,
        positions_bt: Tensor | None = None,
        context: AttentionContext | FusedAttention | None = None,
    ) -> Tensor:
        """Multi-token prediction: the hidden states of tokens, for `logits`, without the decoder layers.

        Args:
            tokens_bt: token ids `[batch, tokens]`.
            hidden_btd: for each of them, the hidden state of the token before it: the output of `hidden`, or of this
                method, `[batch, tokens, hidden]`.
            positions_bt: of the tokens before them, as `hidden`.
            context: the context to attend to, as for `hidden`.

        Returns:
            `[batch, tokens, hidden]`.
        """
        layer = self.layers[self.config.num_layers]
        assert isinstance(layer, PredictionLayer)
        context, angles = context or CausalAttention(), None
        if not isinstance(context, FusedAttention):
            if positions_bt is None:
                positions_bt = torch.arange(tokens_bt.shape[1], device=tokens_bt.device).expand_as(tokens_bt)
            angles = self.rotary(positions_bt, hidden_btd.dtype)
        x_btd = layer.joined(self.embed(tokens_bt), hidden_btd)
        return layer.output_norm(layer(x_btd, self.config.num_layers, positions_bt, angles, context))

    def scores(self, x: Tensor) -> Tensor:
        """Logits of the next token, `[..., vocabulary]`, for the output of `transform`."""
        return project(self.head, x, norm=self.final_norm)

    def forward(
        self,
        tokens_bt: Tensor,
        positions_bt: Tensor | None = None,
        context: AttentionContext | FusedAttention | None = None,
        prompts_bt: Tensor | None = None,
    ) -> Tensor:
        """Logits `[batch, tokens, vocabulary]`; arguments as `hidden`."""
        return self.logits(self.hidden(tokens_bt, positions_bt, context, prompts_bt))

    def _prompted(
        self, tokens_bt: Tensor, context: AttentionContext, prompts_bt: Tensor | None, prompt_end: int
    ) -> tuple[AttentionContext, Tensor]:
        """The context, with prompt lengths if it is a `CausalAttention`, and the prompt lengths."""
        documents = None
        if isinstance(context, CausalAttention):
            documents, prompts_bt = context.documents_bt, context.prompts_bt if prompts_bt is None else prompts_bt
        if prompts_bt is None:
            prompts_bt = prompt_lengths(tokens_bt, prompt_end, documents)
        return context.with_prompts(prompts_bt) if isinstance(context, CausalAttention) else context, prompts_bt

    @torch.no_grad()
    def initialize(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Draw fresh weights for training: normal, those that write to the residual stream smaller (GPT-2)."""
        writing = {
            f"layers.{index}.{matrix.name}.weight" for index, matrix in self.config.matrices if matrix.is_row_parallel
        }
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                scale = std / (2 * self.config.num_layers) ** 0.5 if name in writing else std
                parameter.normal_(0.0, scale, generator=generator)
