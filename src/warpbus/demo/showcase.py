"""The demo: quantize glm-poet in several ways, measure what that costs, and let the models write."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from warpbus.demo import calibration_path, data_path, model_path
from warpbus.engine import LLM, SamplingParams
from warpbus.evaluation import Evaluation, evaluate
from warpbus.quantization import LayerResult, quantize
from warpbus.quantization import Progress as Quantizing

RECIPES = (("rtn", "w4a16-g128"), ("gptq", "w4a16-g128"), ("rtn", "w3a16-g128"), ("gptq", "w3a16-g128"))
BEST = "w4a16-g128-gptq"
ORIGINAL = "original"
CALIBRATION_SAMPLES = 256
DOCUMENTS = 100

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Poet:
    """The answer of a model to a request, and its speed."""

    name: str
    text: str
    tokens_per_second: float


def quantize_all(output: Path, device: str, progress: Progress) -> dict[str, Path]:
    """Quantize glm-poet with every recipe into directories below `output`; those of an earlier run are replaced."""
    models = {ORIGINAL: model_path()}
    for algorithm, scheme in RECIPES:
        name = f"{scheme}-{algorithm}"

        def show(done: int, total: int, result: LayerResult, name: str = name) -> None:
            progress(f"quantizing: {name}", done, total)

        quantize(
            model_path(),
            output / name,
            scheme=scheme,
            algorithm=algorithm,
            calibration=None if algorithm == "rtn" else calibration_path(),
            samples=CALIBRATION_SAMPLES,
            device=device,
            overwrite=True,
            progress=Quantizing(matrix=show),
        )
        models[name] = output / name
    return models


def compare(models: dict[str, Path], device: torch.device, progress: Progress) -> list[Evaluation]:
    """Measure all models on poems that none was trained or calibrated on."""
    return evaluate(
        list(models.items()),
        data=data_path("validation.jsonl"),
        questions=data_path("next-verse.jsonl"),
        limit=DOCUMENTS,
        device=device,
        progress=progress,
    )


def write_poems(models: dict[str, Path], request: str, device: str, seed: int) -> list[Poet]:
    """Let the original and the best quantized model answer the same request with the same seed."""
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=120, seed=seed)
    poets = []
    for name in (ORIGINAL, BEST):
        llm = LLM(models[name], device=device)
        answer = llm.chat([{"role": "user", "content": request}], params)
        poets.append(Poet(name, answer.text, answer.tokens_per_second))
    return poets
