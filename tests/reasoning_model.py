"""A chat template that thinks and calls tools in the syntax of Qwen3, and a small random model that has it."""

import json
from pathlib import Path

import torch
from tokenizer_files import write_byte_level

from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import Decoder, read_config
from warpbus.models.saving import named_tensors

TEMPLATE = (
    "{%- for tool in tools or [] %}<|system|><tool_call>{{ tool | tojson }}{%- endfor %}"
    "{%- for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>"
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{%- endif %}{{ message.content }}"
    '{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{%- endfor %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{%- elif always_think %}<think>{{ '\n' }}{%- endif %}{%- endif %}"
)
"""With `always_think` the prompt opens the thinking."""

_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "architectures": ["Qwen3ForCausalLM"],
}


def write_reasoning_model(directory: Path) -> Path:
    """Write the files of the model, whose vocabulary is bytes, roles, `<think>` and `</think>`."""
    blank = directory / "blank"
    blank.mkdir(parents=True)
    write_byte_level(blank, added=("<think>", "</think>"))
    vocabulary = json.loads((blank / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {**vocabulary["model"]["vocab"], **{each["content"]: each["id"] for each in vocabulary["added_tokens"]}}
    config = {**_CONFIG, "vocab_size": max(tokens.values()) + 1, "eos_token_id": tokens["<|user|>"]}
    (blank / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (blank / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    model = Decoder(read_config(Checkpoint(blank, weights=False)))
    model.initialize(torch.Generator().manual_seed(0), std=0.2)
    with CheckpointWriter(directory / "model") as writer:
        for name, tensor in named_tensors(model, torch.float32):
            writer.add(name, tensor)
        for file in blank.iterdir():
            writer.copy_file(file)
        writer.finish()
    return directory / "model"
