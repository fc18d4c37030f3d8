import pytest
import torch
from engine_models import random_lora

from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.adapters import Prefix, save_lora, save_prefix


@pytest.fixture(scope="session")
def tiny_glm(make_model, tmp_path_factory):
    """A tiny random model whose answers wander: an untied head, and weights large enough to have clear favourites."""
    directory = tmp_path_factory.mktemp("wandering") / "tiny"
    return make_model(
        directory, std=0.3, tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=2, vocab_size=400
    )


@pytest.fixture(scope="session")
def adapters(tiny_glm, tmp_path_factory):
    """Directories of adapters of `tiny_glm`, by their names: LoRAs of ranks 4 and 8, and a prefix of 5 tokens."""
    directory = tmp_path_factory.mktemp("adapters")
    model = load_model(Checkpoint(tiny_glm), device="cpu", dtype=torch.float32)
    config, base = model.config, str(tiny_glm)
    for name, rank in (("four", 4), ("eight", 8)):
        lora = random_lora(model, name, rank, scale=1.0)
        save_lora(directory / name, lora, config, base=base, rank=rank, alpha=2 * rank)
    draw = torch.Generator().manual_seed(7)
    shape = config.num_layers, 5, config.attention.num_kv_heads, config.attention.head_dim
    keys, values = (torch.randn(shape, generator=draw) for _ in range(2))
    save_prefix(directory / "prefix", Prefix("prefix", keys, values), config, base=base)
    return {name: directory / name for name in ("four", "eight", "prefix")}
