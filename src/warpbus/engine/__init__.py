"""Running a model: prompts in, text out."""

from warpbus.engine.llm import LLM, Chunk, Completion
from warpbus.engine.sequence import SamplingParams

__all__ = ["LLM", "Chunk", "Completion", "SamplingParams"]
