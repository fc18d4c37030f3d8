"""ChatGLM-6B (v1), ChatGLM2 and THUDM's int4 and int8 by loops over plain tensors, one sequence at a time, in float64.

transformers has no ChatGLM-6B; for ChatGLM2 and later its Glm could be used instead, see test_models_parity.py. These
are written from what is published of the models, by the names in their files, and share no code with the package.
"""

import math
from typing import Any

import torch
from torch import Tensor


def chatglm_logits(config: dict[str, Any], tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """ChatGLM-6B: the logits `[tokens, vocabulary]` of a sequence that has a <sop> (`bos_token_id`)."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    heads, size = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
    alpha, eps = math.sqrt(2 * 28), config["layernorm_epsilon"]
    sop = tokens.index(config["bos_token_id"])
    mask_position = sop - 1  # of [gMASK], the last token of the prompt
    x = weights["transformer.word_embeddings.weight"][torch.tensor(tokens)]
    for layer in range(config["num_layers"]):
        at = f"transformer.layers.{layer}."

        def linear(values: Tensor, name: str, at: str = at) -> Tensor:
            return values @ weights[f"{at}{name}.weight"].T + weights[f"{at}{name}.bias"]

        def norm(values: Tensor, name: str) -> Tensor:
            centred = values - values.mean(-1, keepdim=True)
            scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
            return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

        normed = norm(x, f"{at}input_layernorm")
        mixed = linear(normed, "attention.query_key_value").view(len(tokens), heads, 3 * size)
        attended = torch.zeros(len(tokens), heads, size, dtype=torch.float64)
        for head in range(heads):
            queries, keys, values = mixed[:, head].split(size, dim=-1)
            queries = torch.stack([_two_dimensional(q, i, mask_position, sop) for i, q in enumerate(queries)])
            keys = torch.stack([_two_dimensional(k, i, mask_position, sop) for i, k in enumerate(keys)])
            for index in range(len(tokens)):
                last = max(index, sop - 1)  # the prompt sees itself in both directions
                scores = keys[: last + 1] @ queries[index] / math.sqrt(size)
                attended[index, head] = torch.softmax(scores, 0) @ values[: last + 1]
        x = normed * alpha + linear(attended.flatten(1), "attention.dense")
        normed = norm(x, f"{at}post_attention_layernorm")
        inner = linear(normed, "mlp.dense_h_to_4h")
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = normed * alpha + linear(inner, "mlp.dense_4h_to_h")
    return norm(x, "transformer.final_layernorm") @ weights["transformer.word_embeddings.weight"].T


def _two_dimensional(vector: Tensor, index: int, mask_position: int, sop: int) -> Tensor:
    """Half of a head by the place in the prompt, half by the place in what is generated, which <sop> begins."""
    half = len(vector) // 2
    block_position = 0 if index < sop else index - sop + 1
    return torch.cat((_halves(vector[:half], min(index, mask_position)), _halves(vector[half:], block_position)))


def _halves(vector: Tensor, position: int) -> Tensor:
    """Pairs (i, i + half); the file has the inverse frequencies in float16."""
    half = len(vector) // 2
    turned = torch.empty_like(vector)
    for i in range(half):
        inverse = float(torch.tensor(1 / 10000 ** (2 * i / len(vector))).half())
        cos, sin = math.cos(position * inverse), math.sin(position * inverse)
        turned[i] = vector[i] * cos - vector[i + half] * sin
        turned[i + half] = vector[i + half] * cos + vector[i] * sin
    return turned


def chatglm2_logits(config: dict[str, Any], tensors: dict[str, Tensor], tokens: list[int], start: int = 0) -> Tensor:
    """ChatGLM2: the logits `[tokens, vocabulary]` of a sequence whose first token stands at `start`.

    Positions are divided by `rope_ratio` (chatglm2-6b-32k), and the base stays 10000.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    heads, groups, size = config["num_attention_heads"], config["multi_query_group_num"], config["kv_channels"]
    eps, ratio = config["layernorm_epsilon"], config.get("rope_ratio", 1)

    def norm(values: Tensor, name: str) -> Tensor:
        return values / torch.sqrt((values**2).mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]

    x = weights["transformer.embedding.word_embeddings.weight"][torch.tensor(tokens)]
    for layer in range(config["num_layers"]):
        at = f"transformer.encoder.layers.{layer}."
        name = f"{at}self_attention.query_key_value"
        mixed = norm(x, f"{at}input_layernorm") @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        queries, keys, values = (
            part.view(len(tokens), -1, size)
            for part in mixed.split([heads * size, groups * size, groups * size], dim=-1)
        )
        attended = torch.zeros(len(tokens), heads, size, dtype=torch.float64)
        for head in range(heads):
            group = head // (heads // groups)
            turned = [_pairs(key, (start + i) / ratio) for i, key in enumerate(keys[:, group])]
            for index in range(len(tokens)):
                query = _pairs(queries[index, head], (start + index) / ratio)
                scores = torch.stack(turned[: index + 1]) @ query / math.sqrt(size)
                attended[index, head] = torch.softmax(scores, 0) @ values[: index + 1, group]
        x = x + attended.flatten(1) @ weights[f"{at}self_attention.dense.weight"].T
        inner = norm(x, f"{at}post_attention_layernorm") @ weights[f"{at}mlp.dense_h_to_4h.weight"].T
        gate, up = inner.chunk(2, dim=-1)
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ weights[f"{at}mlp.dense_4h_to_h.weight"].T
    return norm(x, "transformer.encoder.final_layernorm") @ weights["transformer.output_layer.weight"].T


def _pairs(vector: Tensor, position: float) -> Tensor:
    """Half of the head, in pairs (2i, 2i + 1); the other half stays."""
    rotating = len(vector) // 2
    turned = vector.clone()
    for i in range(0, rotating, 2):
        angle = position / 10000 ** (i / rotating)
        turned[i] = vector[i] * math.cos(angle) - vector[i + 1] * math.sin(angle)
        turned[i + 1] = vector[i + 1] * math.cos(angle) + vector[i] * math.sin(angle)
    return turned


def dequantized(tensors: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """THUDM's int4 or int8 as plain matrices; in a byte of int4 the even column is the high nibble, and signed."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(".weight_scale")}
    for name in plain:
        if f"{name}_scale" not in tensors:
            continue
        rows = []
        for row, scale in zip(tensors[name].tolist(), tensors[f"{name}_scale"].tolist(), strict=True):
            numbers = row if bits == 8 else [n for byte in row for n in (byte >> 4, ((byte & 15) ^ 8) - 8)]
            rows.append([number * scale for number in numbers])
        plain[name] = torch.tensor(rows, dtype=torch.float64)
    return plain
