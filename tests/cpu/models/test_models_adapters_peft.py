"""Against the PEFT library, where it is installed: each reads what the other saves, to the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import distance, loaded

from warpbus.formats import Checkpoint
from warpbus.models import Decoder, read_config
from warpbus.models.adapters import Lora, load_adapter, merge_lora, save_lora

peft = pytest.importorskip("peft", reason="PEFT is not installed")
transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "all": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3, r"model\.layers\.1\.self_attn\.k_proj": 6},
        "alpha_pattern": {"o_proj": 2, "layers.0.mlp.down_proj": 11},
    },
    "pattern": {"target_modules": r".*layers\.\d+\.self_attn\.(q|k|v|o)_proj", "layers_to_transform": None},
    "one layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
}
TOKENS = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(0))


def base(kind: str, directory: Path) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**CONFIG)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    model.save_pretrained(directory)
    return model


def merged(model: Decoder, lora: Lora) -> Decoder:
    for name, part in lora.parts.items():
        model.get_submodule(name).weight += part.b @ part.a
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["Glm", "Llama", "Qwen3"])
@torch.no_grad()
def test_both_ways(kind: str, settings: str, tmp_path: Path) -> None:
    chosen = peft.LoraConfig(r=4, lora_alpha=7, init_lora_weights=False, task_type="CAUSAL_LM", **SETTINGS[settings])
    theirs = peft.get_peft_model(base(kind, tmp_path / "base"), chosen).eval()
    theirs.save_pretrained(tmp_path / "lora")
    expected = theirs(TOKENS).logits
    config = read_config(Checkpoint(tmp_path / "base"))
    lora = load_adapter(tmp_path / "lora", config)
    assert isinstance(lora, Lora)
    plain = loaded(tmp_path / "base")
    assert distance(plain(TOKENS), expected) > 0.1
    assert distance(merged(plain, lora)(TOKENS), expected) < 1e-5
    merge_lora(tmp_path / "base", tmp_path / "lora", tmp_path / "merged")
    assert distance(loaded(tmp_path / "merged")(TOKENS), expected) < 1e-5
    save_lora(tmp_path / "again", lora, config, base=str(tmp_path / "base"), rank=4, alpha=7.0)
    again = peft.PeftModel.from_pretrained(base(kind, tmp_path / "base"), tmp_path / "again").eval()
    assert distance(again(TOKENS).logits, expected) < 1e-5
