"""Running a model: prompts in, text out."""

from warpbus.engine.engine import Engine, request
from warpbus.engine.llm import LLM, Chunk, Completion
from warpbus.engine.plan import MemoryPlan, Stored, enforce, least_memory, parse_memory, plan_memory
from warpbus.engine.sequence import SamplingParams

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Engine",
    "MemoryPlan",
    "SamplingParams",
    "Stored",
    "enforce",
    "least_memory",
    "parse_memory",
    "plan_memory",
    "request",
]
