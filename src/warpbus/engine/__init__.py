"""Running a model: prompts in, text out."""

from warpbus.engine.engine import Engine, request
from warpbus.engine.llm import LLM, Chunk, Completion
from warpbus.engine.plan import MemoryPlan, Stored, enforce, least_memory, plan_memory
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import TextPiece, TokenLogprob

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Engine",
    "Grammar",
    "MemoryPlan",
    "SamplingParams",
    "Stored",
    "TextPiece",
    "TokenLogprob",
    "enforce",
    "least_memory",
    "plan_memory",
    "request",
]
