"""Whether vLLM generates the same greedy tokens from quantized mixtures of experts as Warpbus, with the same files.

    python benchmarks/tokens_beside_vllm.py WORK --vllm ~/vllm/bin/python
    python benchmarks/tokens_beside_vllm.py WORK --vllm ~/vllm/bin/python --models flash --dtype bfloat16

Small models with random weights, the layer of multi-token prediction included, are written below WORK, quantized by
`warpbus quantize`'s function in the format compressed-tensors, and answer the same prompts in both engines, each in a
process of its own. Models:

    air         as GLM-4.5-Air: grouped queries; the columns of the dense layer's down_proj divide by 64, not by 128,
                so that two schemes are mixed
    air-even    the same with a dense layer whose columns divide by 128: one scheme
    flash       as GLM-4.7-Flash: multi-head latent attention in its true dimensions

Prints the first difference of each prompt with the margin between the two most likely tokens there: random weights have
near ties, at which rounding decides. Ends with an error if a token differs by more than `--margin`, or if vLLM fails.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PROMPTS = (5, 9, 16, 23, 40, 64, 100, 200)  # tokens of each
CONTEXT = 512
VOCABULARY = ("tokenizer.model", "tokenizer_config.json")
ENGINES = ("warpbus", "vllm")


@dataclass(frozen=True)
class Step:
    """A generated token, and the log probabilities of the two most likely tokens."""

    token: int
    first: float
    second: float

    @property
    def margin(self) -> float:
        return self.first - self.second


Answers = list[list[Step]]


def shape_of(model: str, vocabulary: int) -> Any:
    """The config of one of the models."""
    from warpbus.models import SHAPES
    from warpbus.models.layer_spec import MLPSpec, MoESpec

    flash = model == "flash"
    shape = SHAPES["glm-4.7-flash" if flash else "glm-4.5-air"].resized(num_layers=4, hidden_size=512)
    if not flash:
        shape = shape.resized(num_heads=8, num_kv_heads=2)
    dense, mixture = shape.layers[0], shape.layers[1]
    assert isinstance(mixture.mlp, MoESpec)
    expert = MLPSpec(256)
    router = replace(mixture.mlp.router, experts=16)
    layers = (
        replace(dense, mlp=MLPSpec(704 if model == "air" else 1024)),
        *[replace(mixture, mlp=replace(mixture.mlp, router=router, expert=expert, shared=expert))] * 3,
    )
    return replace(shape, vocab_size=vocabulary, layers=layers, max_context=CONTEXT, stop_ids=(0,)).with_mtp()


def written(work: Path, model: str, options: argparse.Namespace) -> Path:
    """The quantized model, made unless it is there."""
    import torch

    import warpbus
    from warpbus.demo import model_path
    from warpbus.models.random_checkpoint import write_random_checkpoint

    original, output = work / model, work / f"{model}-{options.scheme}"
    if not output.exists():
        vocabulary = json.loads((model_path() / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        shape = shape_of(model, vocabulary)
        shutil.rmtree(original, ignore_errors=True)  # of a run that was cut off
        write_random_checkpoint(original, shape, getattr(torch, options.dtype), device="cpu")
        for name in VOCABULARY:
            shutil.copy(model_path() / name, original)
        warpbus.quantize(original, output, scheme=options.scheme, algorithm="rtn", overwrite=True)
    return output


def prompts_of(vocabulary: int) -> list[list[int]]:
    draw = random.Random(0)
    return [draw.choices(range(8, vocabulary), k=length) for length in PROMPTS]


def warpbus_answers(model: Path, prompts: list[list[int]], options: argparse.Namespace) -> Answers:
    import warpbus
    from warpbus.engine import SamplingParams

    llm = warpbus.LLM(model, dtype=options.dtype, device=options.device, max_num_seqs=8, max_model_len=CONTEXT)
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, logprobs=2)
    answers = []
    for found in llm.generate(prompts, params):
        assert found.logprobs is not None
        answers.append([Step(each.token, each.top[0][1], each.top[1][1]) for each in found.logprobs])
    return answers


def vllm_answers(model: Path, prompts: list[list[int]], options: argparse.Namespace) -> Answers:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, as ours
    import vllm

    llm = vllm.LLM(
        str(model),
        dtype=options.dtype,
        max_num_seqs=8,
        max_model_len=CONTEXT,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
        **json.loads(options.vllm_options),
    )
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=options.tokens, ignore_eos=True, detokenize=False, logprobs=2
    )
    asked = [{"prompt_token_ids": each} for each in prompts]
    answers = []
    for found in llm.generate(asked, params, use_tqdm=False):
        output = found.outputs[0]
        best = [sorted((each.logprob for each in step.values()), reverse=True) for step in output.logprobs]
        answers.append(
            [Step(token, first, second) for token, (first, second, *_) in zip(output.token_ids, best, strict=True)]
        )
    return answers


def answer(engine: str, model: Path, file: Path, options: argparse.Namespace) -> None:
    """Write the answers of one engine: in a process of its own."""
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    answers = {"warpbus": warpbus_answers, "vllm": vllm_answers}[engine](model, prompts_of(vocabulary), options)
    file.write_text(json.dumps([[vars(step) for step in each] for each in answers]) + "\n", encoding="utf-8")


def asked(engine: str, model: Path, options: argparse.Namespace) -> Answers | None:
    """The answers of an engine; None if it failed, after the end of its output was printed."""
    file = model.with_name(f"{model.name}-{engine}.json")
    program = options.vllm if engine == "vllm" else sys.executable
    command = [program, "-P", str(Path(__file__).resolve()), str(options.work), "--vllm", options.vllm]
    command += ["--tokens", str(options.tokens), "--dtype", options.dtype, "--device", options.device]
    command += ["--vllm-options", options.vllm_options, "--answer", engine, str(model), str(file)]
    log = file.with_suffix(".log")
    with log.open("w") as output:
        finished = subprocess.run(command, stdout=output, stderr=output)
    if finished.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        print(f"{model.name}: {engine} failed, the end of {log}:", *lines[-40:], sep="\n    ", flush=True)
        return None
    return [[Step(**step) for step in each] for each in json.loads(file.read_text(encoding="utf-8"))]


def compared(ours: Answers, theirs: Answers) -> tuple[int, float, list[str]]:
    """How many answers are the same, the largest margin at a first difference, and a line per answer that differs."""
    same, largest, lines = 0, 0.0, []
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        at = next((at for at, (a, b) in enumerate(zip(own, other, strict=True)) if a.token != b.token), None)
        if at is None:
            same += 1
            continue
        margin = min(own[at].margin, other[at].margin)
        largest = max(largest, margin)
        lines.append(
            f"prompt of {PROMPTS[number]} tokens: token {at + 1} is {own[at].token}, vLLM {other[at].token}; margin "
            f"{own[at].margin:.4f}, vLLM {other[at].margin:.4f}"
        )
    return same, largest, lines


def apart(ours: Answers, theirs: Answers) -> float:
    """The largest difference of the best log probability, at tokens whose predecessors are the same."""
    largest = 0.0
    for own, other in zip(ours, theirs, strict=True):
        for a, b in zip(own, other, strict=True):
            largest = max(largest, abs(a.first - b.first))
            if a.token != b.token:
                break
    return largest


def verdict(model: Path, answers: Mapping[str, Answers | None], margin: float) -> bool:
    """Print how two engines compare; whether they agree up to ties."""
    ours, theirs = answers["warpbus"], answers["vllm"]
    if ours is None or theirs is None:
        return False
    same, largest, lines = compared(ours, theirs)
    tokens = len(ours[0])
    print(
        f"{model.name}: {same} of {len(ours)} answers of {tokens} tokens are the same as vLLM's; log probabilities "
        f"differ by at most {apart(ours, theirs):.4f}",
        *lines,
        sep="\n    ",
        flush=True,
    )
    return largest <= margin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a directory for models and answers, which stay there")
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="the Python of an environment with vLLM")
    parser.add_argument(
        "--models", nargs="+", choices=("air", "air-even", "flash"), default=["air-even", "flash", "air"]
    )
    parser.add_argument("--scheme", default="w4a16-g128")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--tokens", type=int, default=20, help="of an answer; 20 by default")
    parser.add_argument("--margin", type=float, default=0.05, help="a smaller difference of two tokens is a tie")
    parser.add_argument("--device", default="auto", help="of Warpbus")
    parser.add_argument("--vllm-options", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--only", choices=ENGINES, help="run one engine, and compare nothing")
    parser.add_argument("--answer", nargs=3, metavar=("ENGINE", "MODEL", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        engine, directory, file = options.answer
        answer(engine, Path(directory), Path(file), options)
        return
    agreed = []
    for name in options.models:
        model = written(options.work, name, options)
        engines = [options.only] if options.only else ENGINES
        answers = {engine: asked(engine, model, options) for engine in engines}
        if options.only:
            agreed.append(answers[options.only] is not None)
            print(f"{model.name}: {options.only} {'answered' if agreed[-1] else 'failed'}", flush=True)
        else:
            agreed.append(verdict(model, answers, options.margin))
    if not all(agreed):
        sys.exit(f"error: {agreed.count(False)} of {len(agreed)} models: answers differ by more than ties, see above")


if __name__ == "__main__":
    main()
