"""Tiny random models with tokenizer and template, runs of them, and what they lose."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.formats import Checkpoint, CheckpointWriter, FinishedParts
from warpbus.models import Decoder, load_model, read_config
from warpbus.models.saving import named_tensors
from warpbus.models.tokenizers.training import train_sentencepiece
from warpbus.quantization import Calibration, Report, quantize
from warpbus.quantization.report import LayerResult

SPECIALS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
VERSE = "床前明月光，疑是地上霜。举头望明月，低头思故乡。"
TEMPLATE = (
    "[gMASK]<sop>{%- for message in messages -%}<|{{ message['role'] }}|>{{ '\\n' }}{{ message['content'] }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{{ '\\n' }}{%- endif -%}"
)
TINY = {
    "model_type": "glm",
    "architectures": ["GlmForCausalLM"],
    "vocab_size": 400,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": [0],
}
MOE: dict[str, Any] = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
"""Changes to `TINY`: a layer with routed experts behind a dense one."""

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def write_model(directory: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Path:
    """A random model; biases and norms differ from 0 and 1, so that a test notices if one is lost."""
    settings = TINY | {"dtype": DTYPES[dtype]} | changes
    directory.mkdir(parents=True)
    train_sentencepiece(
        [VERSE, " The moon is bright: 1 2 3!"],
        directory / "tokenizer.model",
        vocab_size=380,
        specials=SPECIALS,
        required_chars="\n",
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (directory / "config.json").write_text(json.dumps(settings))
    config = read_config(Checkpoint(directory, weights=False))
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    model.initialize(generator, std=0.08)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    companions = [directory / "tokenizer.model", directory / "tokenizer_config.json"]
    with CheckpointWriter(directory, overwrite=True) as writer:
        for file in companions:
            writer.copy_file(file)
        writer.write_json("config.json", settings)
        writer.write_json("generation_config.json", {"eos_token_id": [0]})
        for name, tensor in named_tensors(model, dtype):
            writer.add(name, tensor)
        writer.finish()
    return directory


def write_texts(path: Path, count: int = 24) -> Path:
    """Conversations and texts of different lengths."""
    lines: list[dict[str, object]] = []
    for index in range(count):
        part = VERSE[index % 7 : 9 + index % 13]
        if index % 3:
            lines.append({"text": part})
        else:
            answer = {"role": "assistant", "content": VERSE[: 3 + index % 11]}
            lines.append({"messages": [{"role": "user", "content": part}, answer]})
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


LENGTH, SAMPLES = 48, 40


def calibration(samples: int = SAMPLES) -> Calibration:
    """Random tokens of the tiny models' vocabulary."""
    drawn = torch.randint(10, 380, (samples, LENGTH), generator=torch.Generator().manual_seed(4))
    return Calibration(tuple(map(tuple, drawn.tolist())))


def run(model: Path, output: Path, algorithm: str = "gptq", *, samples: int = SAMPLES, **options: Any) -> Report:
    """Quantize on the CPU, by default to w4a16-g32 in one process."""
    data = None if algorithm == "rtn" else calibration(samples)
    chosen = {"scheme": "w4a16-g32", "device": "cpu", "processes": 1} | options
    return quantize(model, output, algorithm=algorithm, calibration=data, **chosen)


def stop_after_layer(output: Path, layer: int) -> Callable[[int, int, LayerResult], None]:
    """For `Progress.matrix`: interrupts the run at the next layer, when the files of this one are complete."""

    def stop(done: int, total: int, result: LayerResult) -> None:
        end = time.monotonic() + 60
        while result.layer == layer + 1:
            if FinishedParts(output).facts(f"layer-{layer:05}") is not None:
                raise KeyboardInterrupt
            assert time.monotonic() < end
            time.sleep(0.01)

    return stop


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a model with `change` applied to its dictionary of tensors."""
    checkpoint = Checkpoint(source)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    change(tensors)
    with CheckpointWriter(target) as writer:
        for file in source.iterdir():
            if not file.name.startswith("model"):
                writer.copy_file(file)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish()
    return target


def loaded(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=dtype, **options)


@torch.no_grad()
def logits(directory: Path, **options: Any) -> Tensor:
    """Of tokens 0 to 39, `[1, 40, vocabulary]`; arguments as `loaded`."""
    found: Tensor = loaded(directory, **options)(torch.arange(40)[None])
    return found


@torch.no_grad()
def divergence(model: Path, quantized: Path) -> float:
    """The mean KL divergence of the next token's distribution, in nats, on tokens that nothing was calibrated on."""
    tokens = torch.randint(10, 380, (8, LENGTH), generator=torch.Generator().manual_seed(9))
    p, q = (loaded(each)(tokens).log_softmax(-1) for each in (model, quantized))
    return float((p.exp() * (p - q)).sum(-1).mean())
