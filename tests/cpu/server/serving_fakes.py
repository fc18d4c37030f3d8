"""A service without a model, a server around it on a free port of loopback, and clients of that."""

import asyncio
import re
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
from reasoning_model import TEMPLATE

from warpbus.engine import TextPiece, TokenLogprob
from warpbus.engine.moving import Moved
from warpbus.engine.stats import Stats
from warpbus.errors import (
    CheckpointError,
    ConflictError,
    ContextLengthError,
    DeviceError,
    EngineDiedError,
    UsageError,
)
from warpbus.models.templates import JinjaTemplate, RoleTokenTemplate
from warpbus.server.app import create_app
from warpbus.server.listening import make_server

SPECIALS = ["[gMASK]", "sop", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
FIRST_SPECIAL = 256
TAGS = ["<think>", "</think>"]
FIRST_TAG = FIRST_SPECIAL + len(SPECIALS)
STOP = FIRST_SPECIAL + SPECIALS.index("<|user|>")
NEXT_MESSAGE = "\x1e"
"""In a script: the token <|assistant|>, which has no text."""


class ByteTokenizer:
    """One token per byte, behind them the special tokens of a GLM, and the tags of thinking, which have text."""

    vocab_size = FIRST_TAG + len(TAGS)
    special_ids = {text: FIRST_SPECIAL + at for at, text in enumerate(SPECIALS)}  # noqa: RUF012
    drops_first_space = False
    own_spaces = frozenset()
    strips = {}  # noqa: RUF012
    prompt_prefix = prompt_suffix = text_suffix = ()

    def encode(self, text):
        try:
            parts = re.split("(</?think>)", text)
            return [
                token for part in parts for token in ([FIRST_TAG + TAGS.index(part)] if part in TAGS else part.encode())
            ]
        except UnicodeEncodeError:
            raise UsageError("text holds a lone surrogate") from None

    encode_after_special = encode

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token):
        if FIRST_TAG <= token < self.vocab_size:
            return TAGS[token - FIRST_TAG].encode()
        return bytes([token]) if token < FIRST_SPECIAL else b""


class PlainTemplate:
    """`role: content` lines; knows no tools."""

    stop_ids = (STOP,)

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def render(self, messages, *, add_generation_prompt=True, continue_final_message=False, variables=None):
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        if continue_final_message:
            text = text.removesuffix("\n")
        return self._tokenizer.encode(text + "assistant: " * add_generation_prompt)


def qwen_template(tokenizer):
    return JinjaTemplate(TEMPLATE, tokenizer, name="qwen", variables={}, stop_ids=(STOP,), end_id=None)


class FakeService:
    """Says the given text, or by default what it was asked, a character at a time.

    Attributes:
        script: the answer to give; None gives the last line of the prompt, and the seed if there is one.
        pause: seconds before each character; an Event instead is waited for before the second one.
        asked: the prompts and parameters of all requests.
        adapters: that they named.
        cache_salts: that they had.
        resets: how often its prefix cache was emptied.
        loaded: adapters loaded while it runs, and their directories.
        running: requests that have begun and not ended.
        ended: how they ended, counted: "done" or "aborted".
        fails: raised by `generate`; or after so many characters: (count, error).
    """

    model = Path("/nothing/is/here")  # no files beside the weights

    def __init__(self, sop=None, max_model_len=2048, make_template=PlainTemplate):
        self.tokenizer = ByteTokenizer()
        self.template = (
            make_template(self.tokenizer)
            if sop is None
            else RoleTokenTemplate(self.tokenizer, sop=sop, stop_ids=(STOP,))
        )
        self.max_model_len = max_model_len
        self.generation_defaults = {}
        self.script = None
        self.pause = 0.0
        self.asked = []
        self.adapters = []
        self.cache_salts = []
        self.running = 0
        self.ended = Counter()
        self.fails = None
        self.state = "ready"
        self.reason = ""
        self.closed = False
        self.loaded = {}
        self.resets = 0

    @property
    def replicas(self):
        return {0: self}

    @property
    def health(self):
        return SimpleNamespace(state=self.state, reason=self.reason)

    @property
    def alive(self):
        return self.state in ("ready", "unresponsive", "asleep")

    def generate(self, prompt, params, adapter=None, *, cache_salt=b""):
        if isinstance(self.fails, Exception):
            raise self.fails
        if len(prompt) >= self.max_model_len:
            raise ContextLengthError("too long")
        self.asked.append((prompt, params))
        self.adapters.append(adapter)
        self.cache_salts.append(cache_salt)
        return self._pieces(prompt, params)

    async def _pieces(self, prompt, params):
        self.running += 1
        how = "aborted"
        try:
            for said, (text, finish, stopped) in enumerate(self._said(prompt, params)):
                if isinstance(self.pause, asyncio.Event):
                    if said:
                        await self.pause.wait()
                else:
                    await asyncio.sleep(self.pause)
                if isinstance(self.fails, tuple) and said >= self.fails[0]:
                    raise self.fails[1]
                tokens = tuple(self.tokenizer.encode(text)) + ((STOP,) if finish == "stop" else ())
                if text == NEXT_MESSAGE:
                    text, tokens = "", (FIRST_SPECIAL + SPECIALS.index("<|assistant|>"),)
                logprobs = None
                asked = tuple((token, -3.5) for token in params.logprob_tokens)
                if params.logprobs is not None:
                    logprobs = tuple(
                        TokenLogprob(token, -0.5, ((token, -0.5), (65, -1.5))[: params.logprobs], asked=asked)
                        for token in tokens
                    )
                if finish:
                    how = "done"
                yield TextPiece(
                    text,
                    tokens,
                    logprobs,
                    finish,
                    3,
                    stop_string=stopped,
                    prompt_logprobs=None if said else self._prompt_logprobs(prompt, params),
                )
        finally:
            self.running -= 1
            self.ended[how] += 1

    def _prompt_logprobs(self, prompt, params):
        if params.prompt_logprobs is None:
            return None
        likely = ((65, -1.0), (66, -1.5))[: params.prompt_logprobs]
        asked = tuple((token, -3.5) for token in params.logprob_tokens)
        return (None, *(TokenLogprob(token, -2.5, likely, rank=7, asked=asked) for token in prompt[1:]))

    def _said(self, prompt, params):
        text = self.script
        if text is None:
            lines = self.tokenizer.decode(prompt).removesuffix("assistant: ").split("\n")
            text = ([line for line in lines if line] or [""])[-1].removeprefix("user: ")
            text += "" if params.seed is None else f" {params.seed}"
        stopped = next((stop for stop in params.stop if stop in text), None)
        text = text if stopped is None else text.split(stopped)[0]
        budget = params.max_tokens
        for char in re.findall("</?think>|(?s:.)", text):
            budget -= len(self.tokenizer.encode(char))
            if budget <= 0:
                yield char, "length", None
                return
            yield char, None, None
        yield "", "stop", stopped

    async def stats(self):
        if not self.alive:
            raise EngineDiedError("it died")
        return Stats(
            running=self.running,
            waiting=2,
            steps=7,
            preemptions=5,
            prefix_queries=100,
            prefix_hits=40,
            blocks=100,
            blocks_used=30,
            blocks_idle=10,
            cache_bytes=1 << 20,
            drafted=40,
            accepted=30,
            host_hits=32,
            host_bytes=4096,
            host_stored_bytes=8192,
            host_loaded_bytes=2048,
            disk_hits=64,
            disk_bytes=3000,
            disk_stored_bytes=5000,
            disk_loaded_bytes=1000,
            experts_exchanged=6,
            expert_choices=800,
            host_expert_choices=200,
        )

    async def sleep(self):
        if self.running:
            raise ConflictError("requests run: wait for them")
        self.state = "asleep"

    async def wake(self):
        self.state = "ready"

    async def reset_prefix_cache(self):
        if self.running:
            raise ConflictError("requests run: wait for them")
        self.resets += 1

    async def move(self, device):
        if device == "cuda:9":
            raise DeviceError("device cuda:9: there are 2 GPUs")
        if device != "cuda:1":
            raise UsageError(f"device is {device!r}: give auto, cpu, cuda or cuda:N")
        return Moved(weights=1000, ahead=200, paused=10, preparing=3.5, pause=0.02)

    async def load_adapter(self, name, directory):
        if "damaged" in directory:
            raise CheckpointError(f"{directory}: adapter_config.json is damaged")
        self.loaded[name] = directory

    async def unload_adapter(self, name):
        if self.running:
            raise ConflictError(f"requests use the adapter {name!r}: try again when they have ended")
        del self.loaded[name]

    async def close(self, *, drain=0.0):
        self.closed = True


class FakeReplicas(FakeService):
    """The same with several replicas, which are fakes; those that are asked for stats answer, or fail."""

    def __init__(self, *replicas):
        super().__init__()
        self._replicas = dict(enumerate(replicas))

    @property
    def replicas(self):
        return self._replicas


class Running:
    """A server in a thread, and clients for it."""

    def __init__(self, models, options, tracer=None):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = create_app(models, options, tracer)
        self._server = make_server(app, options, app.state.running)
        self.connections = self._server.server_state.connections
        self._thread = threading.Thread(target=self._server.run, args=([self.socket],), daemon=True)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_):
        self.stop()
        self._thread.join(90)

    def stop(self):
        """Begin to shut down."""
        self._server.should_exit = True

    def openai(self, key="none", **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def http(self, **options):
        return httpx.Client(base_url=self.url, timeout=90, **options)


def until(condition, seconds=60.0):
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
