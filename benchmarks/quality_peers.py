"""Quantizes a model with another program, for benchmarks/quality.py, which starts this file as a process of its own.

    python benchmarks/quality_peers.py --peer autoround --scheme w4a16-g128 --samples 128 --output DIR

The peers are optional: `pip install auto-round llmcompressor hqq gptqmodel` in an environment of their own, beside
Warpbus, and `benchmarks/quality.py --peer-python` with the Python of that environment. Each peer is called as its
documentation shows, with its default settings except those in its name, on the conversations that Warpbus draws for the
same number of samples. Weights and activations are in float32, and scales stay in float32, which favours the peers:
Warpbus rounds its scales to bfloat16. The experts of a mixture of experts become one matrix each, as each peer does it.
The output is a float32 checkpoint with the values of the quantized weights, which is evaluated in the same way as all
others.
"""

import argparse
import importlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from warpbus.demo import calibration_path, model_path
from warpbus.formats import Checkpoint
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.qtensor import Scheme
from warpbus.quantization.texts import read_calibration

LENGTH = 512
PAD = 1  # the pad_token_id of glm-poet's tokenizer

Sequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Job:
    """What a peer quantizes: a model's directory, its scheme, the conversations, and the device, "cpu" or "cuda"."""

    model: Path
    scheme: Scheme
    calibration: Sequences
    device: str


def sequences(model: Path, samples: int, seed: int) -> Sequences:
    """The conversations that `warpbus quantize MODEL --samples N --seed SEED` calibrates on."""
    tokenizer = load_tokenizer(model)
    template = find_template(model, Checkpoint(model).config, tokenizer)
    drawn = read_calibration(calibration_path(), tokenizer, template, seqlen=LENGTH, seed=seed, samples=samples)
    return drawn.sequences


def loaded(job: Job) -> nn.Module:
    """The model in transformers, on the CPU, from where a peer moves what it needs."""
    transformers = importlib.import_module("transformers")
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    return model.eval()


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The matrices that are quantized: all but the head."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    }


def autoround(job: Job) -> nn.Module:
    """AutoRound (SignRound), 200 iterations; sequences are cut or padded to 128 tokens, because it needs one length."""
    importlib.import_module("auto_round.modeling.unfused_moe").apply_model_monkey_patches(str(job.model))
    length = 128
    ids = torch.full((len(job.calibration), length), PAD)
    real = torch.zeros_like(ids)
    for row, sequence in enumerate(job.calibration):
        kept = torch.tensor(sequence[:length])
        ids[row, : len(kept)], real[row, : len(kept)] = kept, 1
    batch = 8
    texts = [
        {"input_ids": ids[start : start + batch], "attention_mask": real[start : start + batch]}
        for start in range(0, len(ids), batch)
    ]
    rounding = importlib.import_module("auto_round").AutoRound(
        loaded(job),
        tokenizer=object(),  # required, and not used for texts that are token ids
        bits=job.scheme.bits,
        group_size=job.scheme.group_size,
        sym=job.scheme.symmetric,
        data_type="int",
        dataset=torch.utils.data.DataLoader(texts, batch_size=None),
        iters=200,
        seqlen=length,
        nsamples=len(ids),
        batch_size=batch,
        device_map="cuda:0" if job.device == "cuda" else job.device,
        enable_torch_compile=False,
        amp=False,
        scale_dtype="fp32",
    )
    return rounding.quantize()[0]


def llmcompressor(name: str, observer: str | None) -> Callable[[Job], nn.Module]:
    """GPTQ or AWQ of llm-compressor, with its default observer or the given one; it takes a GPU if there is one."""

    def quantized(job: Job) -> nn.Module:
        package = importlib.import_module("llmcompressor")
        model = loaded(job)
        importlib.import_module("llmcompressor.modeling.moe.linearize").linearize_moe(model)
        arguments: dict[str, Any] = {
            "num_bits": job.scheme.bits,
            "type": "int",
            "symmetric": job.scheme.symmetric,
            "strategy": "group",
            "group_size": job.scheme.group_size,
        }
        if observer is not None:
            arguments["observer"] = observer
        groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
        if name == "GPTQModifier":
            modifiers = importlib.import_module("llmcompressor.modifiers.gptq")
            recipe = [modifiers.GPTQModifier(config_groups=groups, ignore=["lm_head"])]
        else:
            recipe = _awq(groups, joined=any(name.endswith("gate_up_proj") for name in linears(model)))
        data = importlib.import_module("datasets").Dataset.from_dict(
            {
                "input_ids": [list(sequence) for sequence in job.calibration],
                "attention_mask": [[1] * len(sequence) for sequence in job.calibration],
            }
        )
        package.oneshot(
            model=model,
            dataset=data,
            recipe=recipe,
            num_calibration_samples=len(job.calibration),
            max_seq_length=LENGTH,
            batch_size=1,
            shuffle_calibration_samples=False,
        )
        return _fake_quantized(model)

    return quantized


def _awq(groups: Mapping[str, Any], joined: bool) -> list[Any]:
    """AWQ's scales, then rounding; if gate and up are joined, only the norms' scales, because no others fit."""
    awq = importlib.import_module("llmcompressor.modifiers.transform.awq")
    mapping = awq.AWQMapping
    mappings = [
        mapping("re:.*input_layernorm$", ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"]),
        mapping("re:.*post_attention_layernorm$", ["re:.*gate_up_proj$"]),
    ]
    # Without an accelerator there is no memory to pin, and the call raises.
    cache = importlib.import_module("llmcompressor.pipelines.cache").IntermediatesCache
    if not torch.accelerator.is_available():
        cache.pin_memory = lambda self, *given: None
    rounding = importlib.import_module("llmcompressor.modifiers.quantization").QuantizationModifier
    return [awq.AWQModifier(mappings=mappings if joined else None), rounding(config_groups=groups, ignore=["lm_head"])]


def _fake_quantized(model: nn.Module) -> nn.Module:
    """The values that the codes and scales of compressed-tensors stand for."""
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    # Else the parameters are copies on the GPU of those that a layer keeps.
    model = importlib.import_module("compressed_tensors.offload").remove_dispatch(model).cpu()
    for module in linears(model).values():
        module.weight.data = forward.fake_quantize(
            x=module.weight.data,
            scale=module.weight_scale.data,
            zero_point=module.weight_zero_point.data,
            args=module.quantization_scheme.weights,
        )
    return model


def hqq(job: Job) -> nn.Module:
    """HQQ, which needs no data and has zero points in floating point."""
    quantizer = importlib.import_module("hqq.core.quantize").Quantizer
    # The experts as matrices: HQQ takes any matrix, and has no way of its own to take them apart.
    importlib.import_module("auto_round.modeling.unfused_moe").apply_model_monkey_patches(str(job.model))
    model = loaded(job)
    for module in linears(model).values():
        found = quantizer.quantize(
            module.weight.data,
            nbits=job.scheme.bits,
            channel_wise=True,
            group_size=job.scheme.group_size,
            axis=1,
            optimize=True,
            compute_dtype=torch.float32,
            device=job.device,
        )
        module.weight.data = quantizer.dequantize(*found).float().cpu()
    return model


def gptqmodel(job: Job) -> nn.Module:
    """GPTQModel, which quantizes the two halves of gate_up as two matrices."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with fewer, it fails when it is imported
    package = importlib.import_module("gptqmodel")
    settings = package.QuantizeConfig(
        bits=job.scheme.bits,
        group_size=job.scheme.group_size,
        sym=job.scheme.symmetric,
        format="gptq_v2",  # whose zero points in memory are the true ones, not one less
        offload_to_disk=False,
    )
    wrapped = package.GPTQModel.load(str(job.model), settings, device=job.device, dtype=torch.float32)
    texts = [{"input_ids": list(each), "attention_mask": [1] * len(each)} for each in job.calibration]
    wrapped.quantize(texts, batch_size=1)
    found = {
        name: module.dequantize_weight().T.float().contiguous()
        for name, module in wrapped.model.named_modules()
        if hasattr(module, "dequantize_weight")
    }
    model = loaded(job)
    for name, module in linears(model).items():
        halves = [name.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")]
        weight = torch.cat([found[half] for half in halves]) if name.endswith("gate_up_proj") else found[name]
        module.weight = nn.Parameter(weight, requires_grad=False)
    return model


PEERS: Mapping[str, tuple[str, Callable[[Job], nn.Module]]] = {
    "autoround": ("auto-round", autoround),
    "llmcompressor-gptq": ("llmcompressor", llmcompressor("GPTQModifier", None)),
    "llmcompressor-gptq-mse": ("llmcompressor", llmcompressor("GPTQModifier", "mse")),
    "llmcompressor-awq": ("llmcompressor", llmcompressor("AWQModifier", None)),
    "llmcompressor-awq-mse": ("llmcompressor", llmcompressor("AWQModifier", "mse")),
    "hqq": ("hqq", hqq),
    "gptqmodel": ("gptqmodel", gptqmodel),
}
"""The package of each peer, and what quantizes a model with it."""


def save(model: nn.Module, original: Path, output: Path, made_by: str) -> None:
    """Write a float32 checkpoint in the layout of the original."""
    names = Checkpoint(original).names()
    state: dict[str, Tensor] = model.state_dict()
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(original, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.png", "README.md"))
    save_file({name: state[name].detach().float().cpu().contiguous() for name in names}, partial / "model.safetensors")
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    (partial / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
    (partial / "made_by.txt").write_text(made_by, encoding="utf-8")
    partial.rename(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--scheme", required=True)
    parser.add_argument("--model", type=Path, default=model_path(), help="directory; without it, glm-poet")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--samples", type=int, default=128, help="conversations")
    parser.add_argument("--seed", type=int, default=0, help="of their draw")
    parser.add_argument("--output", type=Path, required=True, help="the directory of the checkpoint")
    options = parser.parse_args()
    package, quantized = PEERS[options.peer]
    calibration = sequences(options.model, options.samples, options.seed) if options.samples else ()
    model = quantized(Job(options.model, Scheme.parse(options.scheme), calibration, options.device))
    save(model, options.model, options.output, f"{package} {version(package)}")


if __name__ == "__main__":
    main()
