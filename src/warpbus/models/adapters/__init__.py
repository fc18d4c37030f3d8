"""Adapters: LoRA and P-Tuning v2 prefixes, as files and as objects. See docs/adapters.md."""

from warpbus.models.adapters.adapter import Lora, LowRank, Prefix
from warpbus.models.adapters.loading import load_adapter
from warpbus.models.adapters.merging import Merge, merge_lora
from warpbus.models.adapters.saving import save_lora, save_prefix

__all__ = ["Lora", "LowRank", "Merge", "Prefix", "load_adapter", "merge_lora", "save_lora", "save_prefix"]
