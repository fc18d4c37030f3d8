"""The GPU pool: shares of GPUs, GPUs of other machines, and running work that moves between them.

    gpu = warpbus.pool.connect("warpbus://localhost:7700", memory="8GB", share=0.25)
    model.to(gpu.device)

Names are loaded when they are first used, so that the pool's command line does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpbus.pool.client.gpu import Gpu, connect

__all__ = ["Gpu", "connect"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'warpbus.pool' has no attribute {name!r}")
    return getattr(importlib.import_module("warpbus.pool.client.gpu"), name)
