"""Adapters: LoRA and P-Tuning v2 prefixes, as files and as objects. See docs/adapters.md."""

from warpbus.models.adapters.adapter import Lora, LowRank, Prefix

__all__ = ["Lora", "LowRank", "Prefix"]
