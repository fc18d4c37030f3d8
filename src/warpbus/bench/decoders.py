"""Whole decoders that generate one sequence: ours, and what others would use. Each says how long its tokens took."""

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warpbus.bench.plain import Int4Linear, PlainDecoder
from warpbus.cuda.capture import Graph, GraphMemory, capture
from warpbus.cuda.devices import running_on
from warpbus.engine.engine import Engine, request
from warpbus.errors import UsageError
from warpbus.models import Decoder, ModelConfig

Generate = Callable[[int, int], float]
"""From the lengths of a prompt and of what follows to the seconds from the first token to the last, the choice of the
likeliest and its way to the host included."""

_WARM_STEPS = 3


def ours(model: Decoder, length: int) -> Generate:
    """Our engine, for a prompt and answer of `length` tokens together."""
    engine = Engine(model, max_model_len=length, max_num_seqs=1)
    engine.warm()
    return partial(decode_once, engine)


def decode_once(engine: Engine, prompt: int, tokens: int) -> float:
    """Seconds from the first token to the last of `tokens` after a random prompt; see `Generate`."""
    engine.add(request(random_prompt(engine.model.config, prompt), tokens=tokens))
    while not engine.step():  # until the first token is there
        pass
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


class Plain:
    """`PlainDecoder` compiled by torch, its step in a CUDA graph. Random keys and values stand for the prompt's.

    Its tokens are read at the very end: it never waits for the host. A graph keeps neither the memory that it reads nor
    the kernels that it launches: torch frees a model, and unloads what was compiled for it, with the last reference. So
    all that a step uses is kept here, for as long as the graph.
    """

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        _check_peer(config, "the plain decoder")
        # Else functions compiled before this count towards torch's limit.
        torch.compiler.reset()
        with torch.device(device), torch.no_grad():
            model = PlainDecoder(config, length, Int4Linear)
            if device.type == "cuda":
                model = model.to(torch.bfloat16)
            self._token, self._position = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        self._model = model.requires_grad_(False)
        self._graph: Graph | None = None
        self._forward: Callable[[Tensor, Tensor], Tensor] = self._model
        if device.type == "cuda":
            self._forward = torch.compile(self._model, dynamic=False, fullgraph=True)
            self._graph = self._captured()

    def __call__(self, prompt: int, tokens: int) -> float:
        """See `Generate`."""
        self._token.zero_()
        self._position.fill_(prompt)
        step = self._step if self._graph is None else self._graph.replay
        int(self._token)
        started = time.perf_counter()
        for _ in range(tokens - 1):
            step()
        int(self._token)
        return time.perf_counter() - started

    @torch.no_grad()
    def _step(self) -> None:
        self._token.copy_(self._forward(self._token, self._position).argmax(-1))
        self._position.add_(1)

    def _captured(self) -> Graph:
        memory = GraphMemory(self._token.device)
        with running_on(memory.stream):
            for _ in range(_WARM_STEPS):
                self._step()
        with capture(memory) as graph:
            self._step()
        return graph


def transformers_model(config: ModelConfig, device: torch.device) -> Any:
    """A model of the library transformers that has a shape, in bfloat16.

    Raises:
        UsageError: transformers has no model of the family.
        ImportError: transformers is not installed; and whatever it raises where it knows no such model.
    """
    _check_peer(config, "transformers")
    library = importlib.import_module("transformers")
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope.theta,
        "partial_rotary_factor": config.rope.rotary_dim / config.grouped_attention.head_dim,
    }
    name = "Llama" if config.family == "llama" else "Glm"
    settings = getattr(library, f"{name}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.dense_mlp.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.grouped_attention.num_heads,
        num_key_value_heads=config.grouped_attention.num_kv_heads,
        head_dim=config.grouped_attention.head_dim,
        rms_norm_eps=config.norm.eps,
        max_position_embeddings=config.max_context,
        attention_bias=config.grouped_attention.qkv_bias,
        rope_parameters=rope,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        return library.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()


def transformers(config: ModelConfig, device: torch.device) -> Generate:
    """`generate` of the library transformers with a static cache, for which it compiles the step itself, in bfloat16.

    Raises:
        ImportError: as `transformers_model`.
    """
    model = transformers_model(config, device)

    def generate(prompt: int, tokens: int) -> float:
        watch = _TokenTimes()
        model.generate(
            torch.tensor([random_prompt(config, prompt)], device=device),
            attention_mask=torch.ones(1, prompt, dtype=torch.long, device=device),
            max_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            streamer=watch,
        )
        return watch.seconds

    return generate


class _TokenTimes:
    """The model that transformers calls with the prompt, and then with every chosen token."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        del tokens
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing follows."""

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self._times[-1] - self._times[1]


def _check_peer(config: ModelConfig, name: str) -> None:
    if config.family == "chatglm":
        raise UsageError(f"{name} has no ChatGLM-6B: choose the shape of a later model to compare with it")


def random_prompt(config: ModelConfig, length: int) -> list[int]:
    """Token ids, the same ones each time; where the model's prompts end in a special token, it is the last."""
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
    if config.prompt_end is not None:
        tokens[-1] = config.prompt_end
    return tokens
