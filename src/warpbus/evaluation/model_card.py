"""The model card of a model: `README.md` on a hub, made from its config.json and its report."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warpbus.errors import DataError, UsageError
from warpbus.formats import Checkpoint, read_schemes
from warpbus.formats.files import read_json
from warpbus.formats.format import format_of
from warpbus.formats.fp4 import fp4_storage
from warpbus.formats.fp8 import fp8_storage
from warpbus.formats.hub import ModelName, cached_name, parse_name
from warpbus.formats.kv_cache import read_kv_cache_scheme
from warpbus.formats.trellis import detect as is_trellis
from warpbus.models import read_config
from warpbus.models.gguf.export import ARCHITECTURES
from warpbus.quantization.preflight import REPORT_NAME
from warpbus.quantization.report import Report

_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_VLLM_BITS = (4, 8)  # of weights whose activations stay in 16 bits


def model_card(directory: Path, name: ModelName, *, base_model: str | None = None, licence: str | None = None) -> str:
    """The card of a model, in Markdown with metadata in YAML.

    Args:
        directory: of the model.
        name: of the repository on its hub.
        base_model: the name of the original on the hub; by default known only if it came from there.
        licence: the hub's identifier of the licence, such as `apache-2.0`; by default "other" where the directory has a
            licence file.

    Raises:
        UsageError: `base_model` is no name, or `licence` no identifier.
        CheckpointError: the model cannot be read.
        DataError: the report is damaged.
    """
    checkpoint, report = Checkpoint(directory), read_report(directory)
    base = base_of(report, base_model)
    if licence is not None and not _LICENCE.fullmatch(licence):
        raise UsageError(f"--license {licence!a:.80}: expected an identifier such as apache-2.0 or mit")
    files = sorted(file.name for file in directory.iterdir() if file.is_file())
    licences = [name for name in files if "LICENSE" in name]
    ggufs = [file for file in files if file.endswith(".gguf")]
    quantized = bool(ggufs) or _format_name(checkpoint) is not None
    parts = [
        "\n".join(_metadata(base, licence, licences, quantized=quantized)),
        f"# {name.repository.rpartition('/')[2]}",
        _introduction(base, report),
        *_quantization(checkpoint, report),
        *_quality(report),
        "## Use",
        *_usage(checkpoint, name, ggufs),
        "## Licence",
        _licence(base, licence, licences),
    ]
    return "\n\n".join(parts) + "\n"


def read_report(directory: Path) -> dict[str, Any] | None:
    """The report of a quantized model, with the verdict if there is one; None if there is no report.

    Raises:
        DataError: it is damaged.
    """
    file = directory / REPORT_NAME
    if not file.is_file():
        return None
    found = read_json(file)
    if not isinstance(found, dict):
        raise DataError(f"{file}: is not the report of a quantization: remove it, or quantize the model again")
    Report.from_json(found)
    return found


def published_report(report: Mapping[str, Any], repository: str, base: str | None) -> bytes:
    """The report for others to read: without the paths of this machine, only the names of files and directories."""
    found = json.loads(json.dumps(report))
    found["model"], found["output"] = base or Path(found["model"]).name, repository
    if isinstance(found["settings"].get("calibration"), str):
        found["settings"]["calibration"] = Path(found["settings"]["calibration"]).name
    for side, name in (("before", found["model"]), ("after", repository)):
        if "verdict" in found:
            found["verdict"][side]["model"] = name
    return f"{json.dumps(found, indent=2, ensure_ascii=False)}\n".encode()


def base_of(report: Mapping[str, Any] | None, given: str | None) -> str | None:
    """The name of the original on the hub, if it is known."""
    if given is not None:
        name = parse_name(given, source="huggingface")
        if name is None or name.revision is not None:
            raise UsageError(f"--base-model {given!a:.80}: expected OWNER/MODEL")
        return name.repository
    return None if report is None else cached_name(Path(report["model"]))


def _metadata(base: str | None, licence: str | None, licences: list[str], *, quantized: bool) -> Iterator[str]:
    yield "---"
    if base is not None:
        yield f"base_model: {base}"
        yield f"base_model_relation: {'quantized' if quantized else 'finetune'}"
    if licence is not None:
        yield f"license: {licence}"
    elif licences:
        yield from ("license: other", f"license_link: {licences[0]}")
    yield from (
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- warpbus",
        *(["- quantized"] if quantized else []),
        "---",
    )


def _introduction(base: str | None, report: Mapping[str, Any] | None) -> str:
    if report is None:
        return "Written by Warpbus."
    original = f"[{base}](https://huggingface.co/{base})" if base else f"`{Path(report['model']).name}`"
    return f"{original}, quantized by Warpbus {report.get('versions', {}).get('warpbus', '')}.".replace(" .", ".")


def _format_name(checkpoint: Checkpoint) -> str | None:
    """The format of the quantized matrices; None if there are none."""
    format = format_of(checkpoint.config)
    if format is not None:
        return format.name
    if is_trellis(checkpoint.config):
        return "warpbus"
    fp4 = fp4_storage(checkpoint.config)
    if fp4 is not None:
        method = checkpoint.config["quantization_config"].get("quant_method")
        return "compressed-tensors" if method == "compressed-tensors" else "modelopt"
    return None if fp8_storage(checkpoint.config) is None else "fp8"


def _quantization(checkpoint: Checkpoint, report: Mapping[str, Any] | None) -> Iterator[str]:
    if report is None:
        return
    rows = [("scheme", report["scheme"]), ("algorithm", report["algorithm"])]
    if (name := _format_name(checkpoint)) is not None:
        rows.append(("format", name))
    rows += [(what, report[what]["scheme"]) for what in ("head", "embedding") if report.get(what)]
    settings = report["settings"]
    if "kv_cache" in settings:
        rows.append(("scales of the KV cache", settings["kv_cache"]))
    if report["calibration_tokens"]:
        source = Path(str(settings.get("calibration", ""))).name
        rows.append(("calibration", f"{source}: {report['calibration_tokens']:,} tokens"))
        keys = ("samples", "seqlen", "seed", "damping", "effort")
        details = [f"{key} {settings[key]}" for key in keys if key in settings]
        rows.append(("settings", ", ".join(details)))
    kind = "outputs" if report["calibration_tokens"] else "weights"
    errors = [row["error"] for row in report["layers"]]
    rows.append((f"relative error of the {kind}", f"{sum(errors) / len(errors):.2%} mean, {max(errors):.2%} largest"))
    rows.append(("size", f"{report['bytes_after'] / 1e6:,.1f} MB; before {report['bytes_before'] / 1e6:,.1f} MB"))
    yield "## Quantization"
    yield _table(("", ""), rows)


def _quality(report: Mapping[str, Any] | None) -> Iterator[str]:
    if report is None:
        return
    yield "## Quality"
    verdict = report.get("verdict")
    if verdict is None:
        yield "Not measured. `warpbus eval` compares a model with its original on any texts."
        return
    before, after = verdict["before"], verdict["after"]
    rows: list[tuple[str, ...]] = [
        (
            "perplexity",
            f"{before['perplexity']:.3f}",
            f"{after['perplexity']:.3f} ({verdict['perplexity_increase']:+.2%})",
        ),
        ("KL divergence from the original, nats per token", "", f"{after['divergence']:.4f}"),
        ("same most likely token", "", f"{after['agreement']:.1%}"),
    ]
    if before.get("accuracy") is not None and after.get("accuracy") is not None:
        rows.append(("right choices", f"{before['accuracy']:.1%}", f"{after['accuracy']:.1%}"))
    rows.append(("weights in memory", *(f"{side['weight_bytes'] / 1e6:,.1f} MB" for side in (before, after))))
    yield _table(("", "original", "quantized"), rows)
    data = f"`{Path(verdict['data']).name}`, " if verdict.get("data") else ""
    yield f"Measured by Warpbus on {data}{after['tokens']:,} tokens."


def _usage(checkpoint: Checkpoint, name: ModelName, ggufs: list[str]) -> Iterator[str]:
    config, cached = checkpoint.config, read_kv_cache_scheme(checkpoint.config)
    format, schemes = _format_name(checkpoint), read_schemes(config).distinct()
    yield f"**Warpbus**\n\n```sh\nwarpbus chat {name}\nwarpbus serve {name}\n```"
    repository = name.repository
    if name.source == "modelscope":  # other programs look names up on Hugging Face
        yield f"Other programs read a directory: `warpbus pull {name}` downloads the model and prints where it is."
        repository = "DIRECTORY"
    if format == "warpbus":
        yield (
            "Other programs do not read this format. They read the model after "
            f"`warpbus convert {name} OUTPUT --to bfloat16`, at its original size."
        )
        return
    codes = [each for each in schemes if each.activations is None and each.element is None]
    embedded = _has_quantized(checkpoint, "embed_tokens", "word_embeddings")
    shared = embedded and read_config(checkpoint).tie_embeddings
    slow = next((each for each in codes if each.bits not in _VLLM_BITS), None)
    if "auto_map" in config:
        yield (
            "**vLLM, transformers**: this architecture needs Python code of the original in transformers; it is not in "
            "this repository."
        )
    elif shared:
        yield "**vLLM**: cannot load it, because the embedding is quantized, and the head is the same matrix."
    elif cached is not None and cached.dtype == "int8":
        yield "**vLLM**: does not read the scales of the KV cache, which is in int8."
    elif slow is not None:
        yield f"**vLLM**: weights of {slow.bits} bits may not be supported by your version."
    else:
        yield f"**vLLM**\n\n```sh\nvllm serve {repository}\n```"
    if _has_quantized(checkpoint, "lm_head", "output_layer"):
        yield "The head is quantized: versions of vLLM and SGLang before the middle of 2026 cannot load it."
    if embedded and not shared:
        yield "The embedding is quantized: vLLM before 0.26 cannot load it."
    # transformers 5.24 holds no quantized embedding and no zero points, and dequantizes all matrices by one scheme.
    dequantized = embedded or any(not each.symmetric for each in schemes)
    if "auto_map" not in config and format in ("compressed-tensors", None) and not (dequantized and len(schemes) > 1):
        needs = "" if format is None else "\n\n`pip install transformers compressed-tensors accelerate`, then"
        extra = ", quantization_config=CompressedTensorsConfig(dequantize=True)" if dequantized else ""
        names = "AutoModelForCausalLM, AutoTokenizer" + (", CompressedTensorsConfig" if dequantized else "")
        yield (
            f"**transformers**{needs}\n\n```python\nfrom transformers import {names}\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{repository}")\n'
            f'model = AutoModelForCausalLM.from_pretrained("{repository}"{extra})\n```'
        )
    if ggufs:
        file = f"-m {repository}/{ggufs[0]}" if name.source == "modelscope" else f"-hf {repository} -hff {ggufs[0]}"
        yield f"**llama.cpp**\n\n```sh\nllama-server {file}\n```"
    elif codes and len(codes) == len(schemes) and cached is None and read_config(checkpoint).family in ARCHITECTURES:
        yield (
            "**llama.cpp**: convert it to GGUF first\n\n```sh\n"
            f"warpbus convert {name} model.gguf --to gguf\nllama-server -m model.gguf\n```"
        )


def _has_quantized(checkpoint: Checkpoint, *ends: str) -> bool:
    return any(name.endswith(tuple(f"{end}.weight_packed" for end in ends)) for name in checkpoint.names())


def _licence(base: str | None, licence: str | None, licences: list[str]) -> str:
    if licence is not None:
        return f"`{licence}`." + (f" See {', '.join(licences)}." if licences else "")
    if licences:
        return f"See {', '.join(licences)}."
    return f"That of {base}." if base else "That of the original model."


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
