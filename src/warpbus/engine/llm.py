"""The Python API: loads a model once and answers prompts and conversations in text.

Layers, attention and sampling are in `runner`, `kv_cache` and `sampler`. Calls share no state, so an interrupted call
has no effect on later ones.
"""

import threading
import time
from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeGuard, overload

import torch

from warpbus.cuda.devices import resolve_device
from warpbus.cuda.dtype_names import short_name
from warpbus.engine.adapters import check_adapter
from warpbus.engine.answer_decoder import answer_decoder
from warpbus.engine.grammar import GrammarCompiler
from warpbus.engine.loading import build_engine, open_model
from warpbus.engine.options import ServiceOptions
from warpbus.engine.plan import MemoryPlan
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.sequence import FinishReason, Sequence, TextPiece, TokenLogprob
from warpbus.engine.thinking import matcher_of
from warpbus.errors import ContextLengthError, UsageError
from warpbus.formats import read_schemes
from warpbus.models import Progress
from warpbus.models.templates import Message, load_template
from warpbus.models.templates.tools import find_dialect
from warpbus.models.tokenizers import encode_prompt, load_tokenizer

Adapters = str | abc.Sequence[str | None] | None
Prompts = str | abc.Sequence[str] | abc.Sequence[int] | abc.Sequence[abc.Sequence[int]]


@dataclass(frozen=True)
class Completion:
    """The answer to a prompt.

    Attributes:
        text: the answer, without the stop token or the stop string.
        token_ids: all generated tokens, including the stop token.
        prompt_tokens: length of the prompt.
        finish_reason: "stop" (a stop token or string) or "length" (`max_tokens`, or the end of the context).
        prefill_seconds: time to the first token; of the whole batch, if prompts were answered together.
        decode_seconds: time from the first token to the last.
        logprobs: those of `token_ids`, if they were requested.
        prompt_logprobs: those of the prompt's tokens, None for the first, if they were requested.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    prefill_seconds: float
    decode_seconds: float
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def seconds(self) -> float:
        """Time for the whole answer, in seconds."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, including the time for the prompt."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Chunk:
    """A streamed piece of an answer.

    Attributes:
        index: the index of the prompt.
        text: the new text; the concatenated pieces are the text of the answer.
        completion: the whole answer in its last piece; None in the others.
    """

    index: int
    text: str
    completion: Completion | None = None


class LLM:
    """A loaded language model.

    Args:
        model: a model directory (Hugging Face layout), quantized by Warpbus or not, a name on a hub, or "demo" for the
            packaged model; see `formats.hub.find_model`.
        device: "auto" (a GPU if PyTorch sees one), "cpu", "cuda" or "cuda:N", or the device of a remote GPU that is
            connected (`warpbus.pool.connect(...).device`).
        dtype: the dtype of activations and of unquantized weights: "float32", "float16", "bfloat16", or "auto", which
            is float32 on the CPU and the checkpoint's own on a GPU.
        max_model_len: maximum tokens of a prompt and its answer; by default the model's context.
        max_num_seqs: maximum number of prompts that run at once; further ones wait.
        memory: limit of the GPU memory of the whole process: "6GB", "5.5GiB", "50%" of the card, or bytes. The context
            (unless `max_model_len` is given), the cache, the head and the embedding are planned to fit (`plan`). None:
            weights are loaded unchanged, and the cache grows as needed.
        kv_dtype: the dtype of the KV cache: "auto" (that of the checkpoint's scales, else the dtype of the activations,
            or the one that `memory` requires); "int8" or "fp8", with the checkpoint's scales for this dtype, else with
            one scale per token and head; "int4", rounded after a Hadamard rotation, with one scale per token and head;
            or "unquantized", the dtype of the activations.
        activation_dtype: "fp8" or "int8": on a GPU, round the activations of prefill to 8 bits, which is faster;
            "auto": they keep their 16 bits. See `ServiceOptions`.
        adapters: directories of LoRAs (PEFT's format) or prefixes (P-Tuning v2), by the names for `generate` and
            `chat`; see `warpbus.models.adapters.load_adapter`.
        progress: called while weights are downloaded and read; see `warpbus.models.Progress`.
        planned: called with the plan before anything is loaded, if `memory` is given.

    Attributes:
        config: the model's `ModelConfig`.
        model: the `Decoder`, in eval mode.
        tokenizer, template: convert text and conversations to tokens.
        device: the `torch.device` of the model.
        dtype: the `torch.dtype` of the activations.
        schemes: the quantization `Schemes` of the matrices.
        engine: the `Engine` that generates.
        plan: the `MemoryPlan`, or None without `memory`.
        adapters: the names of the adapters.

    Raises:
        UsageError: an argument is invalid, or the model does not fit `memory`.
        DeviceError: the device does not exist, its memory is full, or other programs use the planned memory.
        CheckpointError: the directory of the model or of an adapter is missing, damaged or not supported.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        memory: str | int | None = None,
        kv_dtype: str = "auto",
        activation_dtype: str = "auto",
        adapters: Mapping[str, str | Path] | None = None,
        progress: Progress | None = None,
        planned: Callable[[MemoryPlan], None] | None = None,
    ) -> None:
        self.device = resolve_device(device)
        options = ServiceOptions(
            dtype=dtype if isinstance(dtype, str) else short_name(dtype),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            memory=memory,
            kv_dtype=kv_dtype,
            activation_dtype=activation_dtype,
            adapters=tuple((name, str(directory)) for name, directory in (adapters or {}).items()),
        )
        opened = open_model(model, self.device, options, progress)
        self.path = opened.checkpoint.directory
        self.config, self.dtype, self.plan = opened.config, opened.dtype, opened.plan
        self.schemes = read_schemes(opened.checkpoint.config)
        if opened.plan is not None and planned is not None:
            planned(opened.plan)
        self.adapters = tuple(adapter.name for adapter in opened.adapters)
        self.tokenizer = load_tokenizer(self.path)
        self.template = load_template(self.path, opened.checkpoint.config, self.tokenizer)
        self.stop_ids = frozenset(self.config.stop_ids) | frozenset(self.template.stop_ids)
        self.engine = build_engine(opened, options, progress=progress)
        self.model = self.engine.model
        # The memory may limit the context further than the model.
        self.max_model_len, self.max_num_seqs = self.engine.max_model_len, max_num_seqs
        self.engine.warm()
        self._lock = threading.Lock()
        self._inboxes: dict[Sequence, deque[TextPiece]] = {}

    def describe(self) -> str:
        """The model in one line: family, size, number formats, device, context."""
        numbers = short_name(self.dtype)
        if self.schemes.distinct():
            numbers = f"{self.schemes}, {numbers}"
        if self.engine.kv_kind is not None:
            numbers += f", KV cache {self.engine.kv_kind}"
        size = _count(self.config.num_parameters)
        return f"{self.config.family}, {size} parameters, {numbers}, {self.device}, context {self.max_model_len:,}"

    def render(self, messages: abc.Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to the beginning of the model's answer.

        Raises:
            UsageError: a message is malformed, or the model has no chat template.
        """
        return self.template.render(messages)

    def room(self, prompt_tokens: int) -> int:
        """The maximum number of tokens of an answer after a prompt of this length; 0 or less if it does not fit."""
        return self.max_model_len - prompt_tokens

    @overload
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapters = None,
        stream: Literal[False] = False,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapters = None,
        stream: Literal[True],
    ) -> Iterator[Chunk]: ...

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapters = None,
        stream: bool = False,
    ) -> list[Completion] | Iterator[Chunk]:
        """Continue prompts. Each answer is the same as for its prompt alone, except for ties (see docs/scheduling.md).

        Args:
            prompts: a text, token ids, or a list of texts or of lists of token ids. Texts get the special tokens that
                the model's tokenizer puts before texts, such as `<|begin_of_text|>` of Llama 3, and behind prompts
                (`[gMASK] <sop>` of ChatGLM-6B); `llm.tokenizer.encode(text)` gives the ids without them.
            params: the parameters of all prompts, or a list with those of each prompt.
            adapter: the name of an adapter for all prompts, or a list of names; None uses no adapter.
            stream: return the pieces of the answers as they are generated.

        Returns:
            One `Completion` per prompt, in order; with `stream` an iterator of `Chunk`.

        Raises:
            UsageError: a prompt is empty, an id is not in the vocabulary, a grammar is invalid, or an adapter does not
                exist.
            ContextLengthError: a prompt leaves no room for an answer.
            DeviceError: the device's memory is full.
            NumericError: the model's scores for a prompt are NaN or infinite.
            UnavailableError: there is no memory for the cache of a single prompt.
            WarpbusError: another error of one prompt. The other prompts of this call end too, those of calls in other
                threads do not.
        """
        sequences = self._sequences(self._listed(prompts), params, adapter)
        if stream:
            return self._stream(sequences)
        answers = {chunk.index: chunk.completion for chunk in self._stream(sequences) if chunk.completion is not None}
        return [answers[index] for index in range(len(sequences))]

    @overload
    def chat(
        self,
        messages: abc.Sequence[Message],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        stream: Literal[False] = False,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: abc.Sequence[Message],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        stream: Literal[True],
    ) -> Iterator[str]: ...

    def chat(
        self,
        messages: abc.Sequence[Message],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        stream: bool = False,
    ) -> Completion | Iterator[str]:
        """Answer a conversation.

        Args:
            messages: such as `[{"role": "user", "content": "你好"}]`.
            adapter: see `generate`.
            stream: return the answer's text in pieces as it is generated.

        Raises: as `generate` and `render`.
        """
        prompt = self.render(messages)
        if stream:
            chunks = self.generate(prompt, params, adapter=adapter, stream=True)
            return (chunk.text for chunk in self.without_first_line(chunks) if chunk.text)
        [completion] = self.generate(prompt, params, adapter=adapter)
        [chunk] = self.without_first_line([Chunk(0, completion.text, completion)])
        return replace(completion, text=chunk.text)

    def without_first_line(self, chunks: abc.Iterable[Chunk]) -> Iterator[Chunk]:
        """The pieces of one answer to a conversation, without the empty first line of ChatGLM3 and GLM-4.

        These models name a tool in that line. The answers of other models are not changed.
        """
        dialect = find_dialect(self.template)
        if dialect is None:
            yield from chunks
            return
        stream = dialect.stream(())
        for chunk in chunks:
            text, _ = stream.push(chunk.text)
            if chunk.completion is not None:
                text += stream.flush()[0]
            yield replace(chunk, text=text)

    def _listed(self, prompts: Prompts) -> list[str] | list[list[int]]:
        if not isinstance(prompts, str) and not _is_list(prompts):
            raise UsageError(
                f"prompts: expected a text, token ids or a list of them, got {type(prompts).__name__}; an array or a "
                "tensor becomes a list by tolist()"
            )
        alone = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
        many: list[Any] = [prompts] if alone else list(prompts)
        if not many:
            raise UsageError("prompts: the list is empty; give at least one")
        return many

    def _ids(self, index: int, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            ids = encode_prompt(self.tokenizer, prompt)
        elif _is_list(prompt) and all(isinstance(token, int) for token in prompt):
            ids = list(prompt)
        else:
            raise UsageError(f"prompt {index}: expected a text or a list of token ids, got {type(prompt).__name__}")
        if not ids:
            raise UsageError(f"prompt {index} is empty: give at least one token")
        strange = [token for token in ids if not 0 <= token < self.config.vocab_size]
        if strange:
            raise UsageError(
                f"prompt {index}: the token id {strange[0]} is not in the vocabulary of {self.config.vocab_size:,}"
            )
        return ids

    def _sequences(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | abc.Sequence[SamplingParams] | None,
        adapter: Adapters,
    ) -> list[Sequence]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
        strange = next((one for one in each if not isinstance(one, SamplingParams)), None)
        if strange is not None:
            raise UsageError(f"params: expected SamplingParams, got {type(strange).__name__}")
        if len(each) != len(prompts):
            raise UsageError(f"params: {len(each)} for {len(prompts)} prompts; give one for all or one for each")
        names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != len(prompts):
            raise UsageError(f"adapter: {len(names)} for {len(prompts)} prompts; give one for all or one for each")
        sequences = []
        for index, (given, own, name) in enumerate(zip(prompts, each, names, strict=True)):
            prompt = self._ids(index, given)
            if isinstance(given, str):
                own = replace(own, continues_text=True)
            check_adapter(name, self.adapters)
            room = self.room(len(prompt))
            if room < 1:
                raisable = self.max_model_len < self.config.max_context
                raise ContextLengthError(
                    f"prompt {index} has {len(prompt):,} tokens, the context holds {self.max_model_len:,} with the "
                    f"answer: shorten it{' or raise max_model_len' if raisable else ''}"
                )
            sequences.append(
                Sequence(
                    index,
                    prompt,
                    own,
                    limit=min(own.max_tokens, room),
                    stop_ids=self.stop_ids,
                    stream=answer_decoder(self.tokenizer, prompt, own),
                    matcher=matcher_of(own, self.stop_ids, lambda grammar: self._grammars.compile(grammar)),
                    adapter=name,
                )
            )
        return sequences

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, vocab_size=self.config.vocab_size, stop_ids=self.stop_ids)

    def _stream(self, sequences: list[Sequence]) -> Iterator[Chunk]:
        """Answer all sequences; closing the iterator aborts those that still run."""
        seconds = 0.0  # without the time that the caller spends between pieces
        running = set(sequences)
        try:
            with self._lock:
                for sequence in sequences:
                    self.engine.add(sequence)
                    self._inboxes[sequence] = deque()
            while running:
                started = time.perf_counter()
                found = self._pieces(running)
                seconds += time.perf_counter() - started
                for sequence, piece in found:
                    if not sequence.prefill_seconds:
                        sequence.prefill_seconds = seconds
                    sequence.decode_seconds = seconds - sequence.prefill_seconds
                    completion = None
                    if piece.finish_reason is not None:
                        running.remove(sequence)
                        completion = _completion(sequence)
                    if piece.text or completion:
                        yield Chunk(sequence.index, piece.text, completion)
                for sequence in sequences:
                    if sequence.error is not None and not self._inboxes[sequence]:
                        raise type(sequence.error)(f"prompt {sequence.index}: {sequence.error}")
        finally:
            with self._lock:
                for sequence in sequences:
                    self.engine.abort(sequence)
                    self._inboxes.pop(sequence, None)

    def _pieces(self, sequences: abc.Set[Sequence]) -> list[tuple[Sequence, TextPiece]]:
        """The pieces of some sequences; runs a step if there are none. Pieces of other sequences go to their
        inboxes."""
        with self._lock:
            if not any(self._inboxes[sequence] for sequence in sequences):
                for sequence, piece in self.engine.step():
                    self._inboxes[sequence].append(piece)
            found = []
            for sequence, inbox in self._inboxes.items():  # in the order of the prompts, unlike the set
                if sequence in sequences:
                    found += [(sequence, inbox.popleft()) for _ in range(len(inbox))]
            return found


def _completion(sequence: Sequence) -> Completion:
    assert sequence.finish_reason is not None
    return Completion(
        text=sequence.text,
        token_ids=sequence.token_ids,
        prompt_tokens=len(sequence.prompt),
        finish_reason=sequence.finish_reason,
        prefill_seconds=sequence.prefill_seconds,
        decode_seconds=sequence.decode_seconds,
        logprobs=sequence.logprobs,
        prompt_logprobs=sequence.prompt_logprobs,
    )


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


def _is_list(value: object) -> TypeGuard[abc.Sequence[Any]]:
    # Bytes are a sequence of integers, too.
    return isinstance(value, abc.Sequence) and not isinstance(value, (str, bytes))
