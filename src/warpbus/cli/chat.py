"""`warpbus chat`: a conversation in the terminal, one answer for a script, or an answer a line in a pipe."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from warpbus.cli.adapters import one_adapter
from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.models import DEMO, model_directory
from warpbus.cli.options import FieldOption, options_of
from warpbus.cli.signals import interruptible
from warpbus.cli.tables import memory_table
from warpbus.dist.interpreters import permanent_objects
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import DataError, UsageError, WarpbusError
from warpbus.language import translated

if TYPE_CHECKING:
    from warpbus.engine import LLM, Chunk, Completion, MemoryPlan
    from warpbus.models import Progress as LoadProgress

HISTORY_FILE = ".warpbus_history"
HISTORY_LINES = 1000

COMMANDS = {
    "/help": "show these commands",
    "/retry": "answer the last message again",
    "/clear": "forget the conversation",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/quit": "leave (also Ctrl-D, or Ctrl-C twice); Ctrl-C stops an answer",
}

# Of a model that recommends no sampling parameters.
_DEFAULTS = {"temperature": 0.7, "top_p": 0.9}

DEMO_GREETING = """\
[bold]glm-poet[/] writes classical Chinese poems. Try:
  [bold]写一首题为《春夜》的五言绝句。[/]  [dim]a quatrain titled "Spring Night"[/]
  [bold]续写：床前明月光，疑是地上霜。[/]  [dim]go on with a poem[/]
  [bold]下一句：白日依山尽[/]              [dim]the verse that follows[/]
这是一个写古诗的小模型：告诉它题目和体裁，或给出诗句让它续写。"""


@options_of(
    {"sampling": SamplingParams, "engine": ServiceOptions},
    prompt=...,
    system=...,
    adapter=...,
    temperature=FieldOption("0 takes the most likely token every time; by default the model's, or 0.7", default=None),
    top_p=FieldOption(
        "draw among the likeliest tokens with this much probability; by default the model's, or 0.9", default=None
    ),
    top_k=FieldOption("draw among this many likeliest tokens; 0: all; by default the model's", default=None),
    repetition_penalty=FieldOption(
        "above 1, tokens that were there are less likely; by default the model's", default=None
    ),
    generation_config="auto: the model's generation_config.json gives default sampling parameters; none: it does not",
    max_tokens=FieldOption("maximum tokens per answer", default=1024),
    seed="random seed of the first answer; each later answer adds 1",
    device="auto, cpu, cuda or cuda:N",
    dtype="dtype of activations: auto, float32, float16 or bfloat16",
    max_model_len="maximum context length of the conversation in tokens",
    memory="GPU memory for weights, cache and workspace: 6GB, 5.5GiB, 50%; prints a plan",
    kv_cache_dtype=FieldOption("dtype of the KV cache: auto, int8, fp8, int4 or unquantized", field="kv_dtype"),
    activation_dtype="activations of prompts: auto (16 bits), fp8 (from Ada on) or int8 (Ampere); weights of 4 bits",
)
def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="model directory, name on a hub, or demo for the packaged poet",
        ),
    ],
    sampling: dict[str, Any],
    engine: dict[str, Any],
    prompt: Annotated[str | None, typer.Option(help="answer this and exit; - reads it from stdin")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    adapter: Annotated[Path | None, typer.Option(help="directory of a LoRA or a prefix to answer with")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="with --prompt: print the answer as JSON")] = False,
) -> None:
    """Talk to MODEL in the terminal.

    When stdin is not a terminal, each line of it is answered in turn, as one conversation.
    """
    if as_json and prompt is None:
        raise UsageError("--json needs --prompt: one question, one JSON object")
    text = None if prompt is None else _read_stdin().rstrip("\n") if prompt == "-" else prompt
    if text is not None and not text.strip():
        raise UsageError("--prompt is empty: give the text to answer")
    ServiceOptions(generation_config=engine["generation_config"])  # refuses other values
    directory = model_directory(model)
    named = None if adapter is None else one_adapter(adapter)
    with permanent_objects():
        from warpbus.models.generation_defaults import read_generation_defaults

    recommended = {} if engine.pop("generation_config") == "none" else read_generation_defaults(directory)
    with interruptible(), _loading(model) as progress:
        with permanent_objects():
            from warpbus.engine import LLM

        params = SamplingParams(**{**_DEFAULTS, **recommended, **sampling})
        llm = LLM(
            directory,
            **engine,
            max_num_seqs=1,
            adapters=None if named is None else dict([named]),
            progress=progress,
            planned=None if as_json else lambda plan: Console(stderr=True).print(memory_table(plan)),
        )
    conversation = ChatSession(llm, params, system, None if named is None else named[0])
    if text is not None:
        _answer_one(conversation, text, as_json, llm.plan)
    elif sys.stdin.isatty():
        # A model without a chat template says so here, before anything is typed.
        llm.render([{"role": "user", "content": "?"}])
        console = Console(highlight=False)
        console.print(f"[dim]{escape(', '.join([llm.describe(), *llm.adapters]))}[/]")
        if model == DEMO:
            console.print(DEMO_GREETING)
        console.print("[dim]/help lists the commands, Ctrl-D leaves[/]")
        with _line_editing(console):
            Terminal(conversation, console).run()
    else:
        for line in _stdin_lines():
            if line.strip():
                for piece in _texts(conversation.ask(line.rstrip("\n"))):
                    _write(piece)
                _write("\n")
                if conversation.dropped:
                    print(translated(_dropped(conversation.dropped)), file=sys.stderr)


class ChatSession:
    """A conversation and the model that answers it, independent of the terminal.

    Attributes:
        messages: without the system message.
        system: the system message, or None.
        dropped: number of turns dropped from the last prompt because the context was full.
        completion: the last answer; None if it was interrupted or there is none.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None, adapter: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self.system = system
        self.dropped = 0
        self.completion: Completion | None = None
        self._llm = llm
        self._params = params
        self._adapter = adapter
        self._answers = 0

    def ask(self, text: str) -> Generator[Chunk, None, None]:
        """Stream the answer to a new message. The text of an interrupted answer stays in the conversation.

        Raises:
            ContextLengthError: the message alone does not fit the context.
        """
        self.messages.append({"role": "user", "content": text})
        self.completion = None
        answer = ""
        try:
            prompt = self._fitting_prompt()
            chunks = self._llm.generate(prompt, self._next_params(), adapter=self._adapter, stream=True)
            for chunk in self._llm.without_first_line(chunks):
                answer += chunk.text
                self.completion = chunk.completion
                yield chunk
        finally:
            if answer or self.completion is not None:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def last_question(self) -> str | None:
        """Remove the last message and its answer; returns the message, or None if there is none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.messages.clear()

    def _fitting_prompt(self) -> list[int]:
        """The conversation as token ids; drops the oldest turns until a quarter of the context is free."""
        self.dropped = 0
        wanted = min(self._params.max_tokens, self._llm.max_model_len // 4)
        head = [{"role": "system", "content": self.system}] if self.system else []
        users = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        for first in users:
            prompt = self._llm.render([*head, *self.messages[first:]])
            if self._llm.room(len(prompt)) >= wanted:
                break
        if self._llm.room(len(prompt)) > 0:
            del self.messages[:first]
            self.dropped = users.index(first)
        return prompt

    def _next_params(self) -> SamplingParams:
        params = self._params
        if params.seed is not None:
            params = replace(params, seed=params.seed + self._answers)
        self._answers += 1
        return params


class Terminal:
    """The interactive loop: reads messages and commands, and streams the answers."""

    def __init__(self, conversation: ChatSession, console: Console, read: Callable[[str], str] = input) -> None:
        self._conversation = conversation
        self._console = console
        self._read = read

    def run(self) -> None:
        """Until /quit or the end of the input."""
        leaving = False
        while True:
            try:
                line = self._read("> ").strip()
                leaving = False
                if line.startswith("/"):
                    if not self._command(line):
                        return
                elif line:
                    self._answer(line)
            except KeyboardInterrupt:
                if leaving:
                    self._console.print()
                    return
                leaving = True
                self._note("\nCtrl-C again, Ctrl-D or /quit leaves")
            except EOFError:
                self._console.print()
                return
            except UnicodeDecodeError:
                self._fail("the input is not UTF-8: set the terminal to UTF-8")

    def _command(self, line: str) -> bool:
        """Carry out a command; False to leave."""
        name, _, rest = line.partition(" ")
        conversation = self._conversation
        if name == "/quit" and not rest:
            return False
        if name == "/help":
            for command, purpose in COMMANDS.items():
                self._note(f"{command:<14} {translated(purpose)}")
        elif name == "/clear":
            conversation.clear()
            self._note("the conversation is forgotten")
        elif name == "/system":
            conversation.system = rest.strip() or None
            self._note("system message set" if conversation.system else "system message removed")
        elif name == "/retry":
            question = conversation.last_question()
            if question is None:
                self._note("there is nothing to answer again")
            else:
                self._answer(question)
        else:
            self._fail(f"{name} is no command: /help lists them")
        return True

    def _answer(self, text: str) -> None:
        conversation = self._conversation
        warned = False
        try:
            with closing(conversation.ask(text)) as chunks:
                for chunk in chunks:
                    if conversation.dropped and not warned:
                        warned = True
                        self._note(_dropped(conversation.dropped))
                    _write(chunk.text)
        except KeyboardInterrupt:
            _write("\n")
            self._note("stopped")
        except WarpbusError as error:
            self._fail(str(error))
        else:
            _write("\n")
            if conversation.completion is not None:
                self._note(_measured(conversation.completion))

    def _note(self, text: str) -> None:
        self._console.print(f"[dim]{escape(translated(text))}[/]")

    def _fail(self, text: str) -> None:
        self._console.print(f"[red]{escape(translated(text))}[/]")


def _answer_one(conversation: ChatSession, text: str, as_json: bool, plan: MemoryPlan | None) -> None:
    pieces = _texts(conversation.ask(text))
    if not as_json:
        for piece in pieces:
            _write(piece)
        _write("\n")
        return
    answer = "".join(pieces)
    completion = conversation.completion
    assert completion is not None  # the stream came to its end
    found: dict[str, Any] = {
        "text": answer,
        "tokens": len(completion.token_ids),
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "seconds": round(completion.seconds, 4),
        "tokens_per_s": round(completion.tokens_per_second, 2),
    }
    if plan is not None:
        found["memory"] = plan.to_json()
    print(json.dumps(found, ensure_ascii=False))


def _texts(chunks: Iterator[Chunk]) -> Iterator[str]:
    return (chunk.text for chunk in chunks)


def _dropped(turns: int) -> str:
    gone = "the oldest turn was" if turns == 1 else f"the oldest {turns} turns were"
    return f"the context is full: {gone} forgotten"


def _measured(completion: Completion) -> str:
    cut = ", cut off at the length limit" if completion.finish_reason == "length" else ""
    tokens = len(completion.token_ids)
    return f"{tokens} token{'s' * (tokens != 1)}, {completion.tokens_per_second:.1f} tokens/s{cut}"


def _write(text: str) -> None:
    """Write to stdout at once. A terminal gets no control characters: a model's text must not steer it."""
    if sys.stdout.isatty():
        text = "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
    sys.stdout.write(text)
    sys.stdout.flush()


def _stdin_lines() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise DataError(f"stdin: not UTF-8 (byte {error.start}): encode the text as UTF-8") from None


def _read_stdin() -> str:
    return "".join(_stdin_lines())


@contextmanager
def _loading(model: str) -> Iterator[LoadProgress]:
    """A bar on stderr while the model loads, if that is a terminal; it goes away when done."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {escape(model)}", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show


@contextmanager
def _line_editing(console: Console) -> Iterator[None]:
    """Enable line editing and a history file in the home directory, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = Path.home() / HISTORY_FILE
    readline.set_history_length(HISTORY_LINES)
    try:
        # Only its owner may read what was typed.
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        readline.read_history_file(file)
    except OSError as error:
        console.print(f"[dim]{escape(str(file))}: the history is not kept: {escape(str(error.strerror))}[/]")
        yield
        return
    try:
        yield
    finally:
        readline.write_history_file(file)
