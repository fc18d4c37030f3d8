"""Continuous batching of the library transformers, under the same loads as ours."""

import gc
import importlib
import time
from typing import Any

import torch

from warpbus.bench.decoders import transformers_model
from warpbus.bench.serving_load import Figures, Load, RequestSource, Trace
from warpbus.errors import DeviceError
from warpbus.models import ModelConfig

_WARM_REQUESTS, _WARM_TOKENS = 4, 8
_POLL = 0.05  # seconds
_PATIENCE = 300.0  # seconds without any answer


def transformers_figures(config: ModelConfig, device: torch.device, load: Load) -> tuple[Figures, str]:
    """The results of a load with a model of random weights in bfloat16, and the attention that transformers has chosen.

    Everything else is left to transformers, too: CUDA graphs, asynchronous batching, and the size of the cache. It
    warms up by itself, and with a few requests, before the clock starts. The times of tokens are those that it records.
    The GPU's memory is free again afterwards.

    Raises:
        ImportError: transformers is not installed; and whatever it raises.
        DeviceError: it gave up, or answered with another number of tokens.
    """
    model = transformers_model(config, device)
    try:
        library = importlib.import_module("transformers")
        library.logging.set_verbosity_error()
        # Greedy, as ours, and with no token that ends an answer.
        settings = library.GenerationConfig(
            do_sample=False, max_new_tokens=load.tokens, eos_token_id=-1, pad_token_id=0
        )
        # As `generate_batch` tells it, which would count its own start, too.
        hints = importlib.import_module("transformers.generation.continuous_batching.utils").WorkloadHints(
            max_prompt_length=max(map(len, load.prompts)),
            max_generated_length=load.tokens,
            num_requests=len(load.prompts),
        )
        batching = model.continuous_batching_context_manager(
            generation_config=settings, block=True, timeout=30, workload_hints=hints
        )
        with torch.no_grad(), batching as manager:
            # Backwards, lest they be found in the cache later.
            warm = [prompt[::-1] for prompt in load.prompts[:_WARM_REQUESTS]]
            _send(manager, Load(warm, _WARM_TOKENS, concurrency=_WARM_REQUESTS))
            traces = _send(manager, load)
            attention = str(getattr(model.config, "_attn_implementation", "unknown"))
        return Figures.of(traces), attention
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _send(manager: Any, load: Load) -> list[Trace]:
    source, start = RequestSource(load), time.perf_counter()
    now = heard = 0.0
    pending: dict[str, Trace] = {}
    traces: list[Trace] = []
    while pending or not source.exhausted:
        for prompt, trace in source.due(now, len(pending)):
            name = manager.add_request(list(prompt), max_new_tokens=load.tokens, record_timestamps=True)
            pending[name] = trace
            traces.append(trace)
        result = manager.get_result(timeout=min(_POLL, source.wait(now)))
        now = time.perf_counter() - start
        if result is None:
            if not manager.is_running():
                raise DeviceError("transformers has stopped while requests were under way")
            if now - heard > _PATIENCE:
                raise DeviceError(f"transformers has answered nothing for {_PATIENCE:.0f} s")
        elif result.is_finished():
            trace = pending.pop(result.request_id)
            count = len(result.generated_tokens)
            if result.error is not None or count != load.tokens:
                raise DeviceError(f"transformers gave {count} tokens of {load.tokens}: {result.error or 'no error'}")
            # It also notes the moments of tokens that it computed ahead and dropped.
            trace.times = [when - start for when in result.timestamps[:count]]
            trace.tokens, heard = count, now
    return traces
