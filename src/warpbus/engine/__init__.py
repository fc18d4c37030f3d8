"""Running a model: prompts in, text out.

The public names are loaded when they are first used: the command line reads `options` without loading torch.
"""

from typing import TYPE_CHECKING

from warpbus.lazy import lazy_names

if TYPE_CHECKING:
    from warpbus.engine.engine import Engine, request
    from warpbus.engine.llm import LLM, Chunk, Completion
    from warpbus.engine.plan import MemoryPlan, Stored, enforce, least_memory, plan_memory
    from warpbus.engine.sampling_params import Grammar, PromptPooling, SamplingParams, Thinking
    from warpbus.engine.sequence import TextPiece, TokenLogprob

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Engine",
    "Grammar",
    "MemoryPlan",
    "PromptPooling",
    "SamplingParams",
    "Stored",
    "TextPiece",
    "Thinking",
    "TokenLogprob",
    "enforce",
    "least_memory",
    "plan_memory",
    "request",
]

__getattr__ = lazy_names(
    __name__,
    llm=("Chunk", "Completion", "LLM"),
    engine=("Engine", "request"),
    sampling_params=("Grammar", "PromptPooling", "SamplingParams", "Thinking"),
    plan=("MemoryPlan", "Stored", "enforce", "least_memory", "plan_memory"),
    sequence=("TextPiece", "TokenLogprob"),
)
