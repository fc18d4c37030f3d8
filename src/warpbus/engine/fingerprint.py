"""A fingerprint of everything, besides its key, that the content of a KV cache block depends on.

Blocks on a disk are used by another process only if it has the same fingerprint.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from warpbus import __version__
from warpbus.engine.blocks import BLOCK
from warpbus.engine.options import ServiceOptions
from warpbus.engine.speculation import Speculation
from warpbus.kernels.ops.cpu_library import activations_in_8_bits

if TYPE_CHECKING:
    from warpbus.engine.loading import OpenedModel

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES = 4096
_MOST_SAMPLES = 4096  # per file, spread evenly; files of up to 16 MiB are read whole


def kv_fingerprint(opened: "OpenedModel", options: ServiceOptions) -> str:
    """The fingerprint of an engine's blocks: 32 hexadecimal digits.

    It covers the model's config and weights (with them the quantization and the scales of the cache), whether the
    embedding is rounded at load, the type of the cache, the size of a block, the dtype and the rounding of activations,
    the device and the version of Warpbus. Of weight files, names, sizes and up to 4,096 evenly spaced pieces of 4 KiB
    are read.
    """
    device, plan = opened.device, opened.plan
    depends = {
        "version": __version__,
        "torch": torch.__version__,
        "config": opened.checkpoint.config,
        "block": BLOCK,
        "cache": options.kv_dtype if plan is None else plan.kv_dtype,
        "dtype": str(opened.dtype),
        "embedding": None if plan is None else plan.embedding,
        "activation_dtype": options.activation_dtype,
        "int8_activations": activations_in_8_bits(),
        "mtp": Speculation.parse(options.speculation).mtp,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    digest = hashlib.blake2b(json.dumps(depends, sort_keys=True, default=str).encode(), digest_size=16)
    for path in sorted(opened.checkpoint.directory.iterdir()):
        if path.suffix in _WEIGHTS and path.is_file():
            _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size} ".encode())
    step = max(_SAMPLE_BYTES, -(-size // _MOST_SAMPLES))
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
