import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import typer
from rich.cells import cell_len
from rich.text import Text
from typer.testing import CliRunner

from warpbus.cli.chat import DEMO_GREETING, ChatSession, Terminal, chat
from warpbus.cli.language import Console
from warpbus.engine import LLM, SamplingParams
from warpbus.errors import ContextLengthError, DataError, UsageError
from warpbus.language import in_language

app = typer.Typer()
app.command()(chat)

GREEDY = SamplingParams(temperature=0, max_tokens=12)
FLAGS = ("--device", "cpu", "--temperature", "0", "--max-tokens", "12")
RUN = "from warpbus.cli import main; main()"


@pytest.fixture(scope="module")
def llm(tiny_glm):
    return LLM(tiny_glm, device="cpu")


def invoke(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def expected_turns(llm, texts, system=None, params=GREEDY):
    """The answers to the texts, as one conversation."""
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for text in texts:
        messages.append(user(text))
        answers.append(llm.chat(messages, params).text)
        messages.append(assistant(answers[-1]))
    return answers


class Typed:
    """Stands in for `input`: gives the lines, raises the exceptions, and then ends the input."""

    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self, prompt):
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, type):
            raise line
        return line


def converse(llm, capsys, *lines, params=GREEDY, system=None):
    """What the terminal shows for these lines, without the styles, and the conversation at the end."""
    conversation = ChatSession(llm, params, system)
    console = Console(file=sys.stdout, width=200, highlight=False)
    Terminal(conversation, console, Typed(*lines)).run()
    return capsys.readouterr().out, conversation


def test_one_prompt_prints_the_answer_and_nothing_else(tiny_glm, llm):
    result = invoke(tiny_glm, *FLAGS, "--prompt", "明月")
    assert (result.exit_code, result.stdout) == (0, expected_turns(llm, ["明月"])[0] + "\n")


def test_a_prompt_from_stdin_may_have_several_lines(tiny_glm, llm):
    result = invoke(tiny_glm, *FLAGS, "--prompt", "-", input="明月\n故乡\n")
    assert result.stdout == expected_turns(llm, ["明月\n故乡"])[0] + "\n"


def test_json_holds_the_answer_and_its_measures(tiny_glm, llm):
    result = invoke(tiny_glm, *FLAGS, "--prompt", "明月", "--system", "古诗", "--json")
    found = json.loads(result.stdout)
    assert found["text"] == expected_turns(llm, ["明月"], system="古诗")[0]
    assert (found["tokens"], found["finish_reason"]) == (12, "length")
    assert found["prompt_tokens"] == len(llm.render([{"role": "system", "content": "古诗"}, user("明月")]))
    assert found["seconds"] > 0
    assert found["tokens_per_s"] > 0


def test_each_line_of_a_pipe_is_a_turn(tiny_glm, llm):
    result = invoke(tiny_glm, *FLAGS, input="明月\n\n/help\n")
    assert result.stdout == "".join(answer + "\n" for answer in expected_turns(llm, ["明月", "/help"]))
    assert result.stderr == ""


def test_a_pipe_hears_on_stderr_what_was_forgotten(tiny_glm):
    result = invoke(tiny_glm, *FLAGS, "--max-model-len", "40", input="明月光明月光\n" * 3)
    assert result.stderr.splitlines() == ["the context is full: the oldest turn was forgotten"] * 2
    assert result.exit_code == 0


def test_a_seed_makes_the_conversation_repeatable_and_its_answers_differ(tiny_glm):
    flags = ("--device", "cpu", "--max-tokens", "12", "--seed", "3")
    first, second = (invoke(tiny_glm, *flags, input="1\n2\n").stdout for _ in range(2))
    assert first == second
    assert first != invoke(tiny_glm, *flags[:-1], "4", input="1\n2\n").stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--json",), UsageError, "--json needs --prompt"),
        (("--prompt", " "), UsageError, "--prompt is empty"),
        (("--prompt", "1", "--temperature", "-1"), UsageError, "temperature is -1"),
        (("--prompt", "1", "--top-p", "2"), UsageError, "--top-p is 2"),
        (("--prompt", "1", "--dtype", "int4"), UsageError, "dtype is 'int4'"),
        (("--prompt", "明" * 600), ContextLengthError, "the context holds 512"),
    ],
)
def test_wrong_flags_are_named(tiny_glm, arguments, error, message):
    result = invoke(tiny_glm, "--device", "cpu", *arguments)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)


def test_input_that_is_not_utf8_is_refused(tiny_glm):
    result = invoke(tiny_glm, *FLAGS, input=b"\xff\xfe\n")
    assert isinstance(result.exception, DataError)
    assert "stdin: not UTF-8" in str(result.exception)


def test_the_terminal_streams_answers_and_measures_them(llm, capsys):
    out, conversation = converse(llm, capsys, "明月", "  ", "故乡")
    answers = expected_turns(llm, ["明月", "故乡"])
    assert conversation.messages == [user("明月"), assistant(answers[0]), user("故乡"), assistant(answers[1])]
    assert all(f"{answer}\n12 tokens, " in out for answer in answers)
    assert out.count("tokens/s, cut off at the length limit") == 2


def test_commands(llm, capsys):
    out, conversation = converse(
        llm, capsys, "/help", "明月", "/clear", "故乡", "/system 古诗", "/nonsense", "/quit", "1"
    )
    assert "/retry" in out
    assert "the conversation is forgotten" in out
    assert "system message set" in out
    assert "/nonsense is no command: /help lists them" in out
    assert conversation.system == "古诗"
    assert conversation.messages == [user("故乡"), assistant(expected_turns(llm, ["故乡"])[0])]


def test_the_system_message_counts_from_the_next_answer_on(llm, capsys):
    _, conversation = converse(llm, capsys, "明月", system="古诗")
    assert conversation.messages[-1]["content"] == expected_turns(llm, ["明月"], system="古诗")[0]
    out, conversation = converse(llm, capsys, "/system", "明月", system="古诗")
    assert "system message removed" in out
    assert conversation.messages[-1]["content"] == expected_turns(llm, ["明月"])[0]


def test_retry_answers_the_last_message_again_with_the_next_seed(llm, capsys):
    params = SamplingParams(seed=5, max_tokens=12)
    out, conversation = converse(llm, capsys, "/retry", "明月", "/retry", params=params)
    assert "there is nothing to answer again" in out
    second = llm.chat([user("明月")], SamplingParams(seed=6, max_tokens=12)).text
    assert conversation.messages == [user("明月"), assistant(second)]


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(llm, capsys, monkeypatch):
    class Interrupted:
        """Passes on to the model and raises after three pieces of the first answer."""

        def __init__(self):
            self.pieces = 0

        def __getattr__(self, name):
            return getattr(llm, name)

        def generate(self, *arguments, **options):
            for chunk in llm.generate(*arguments, **options):
                self.pieces += 1
                if self.pieces == 4:
                    raise KeyboardInterrupt
                yield chunk

    out, conversation = converse(Interrupted(), capsys, "明月", "故乡")
    whole = expected_turns(llm, ["明月"])[0]
    kept = conversation.messages[1]["content"]
    assert kept
    assert whole.startswith(kept)
    assert whole != kept
    assert "stopped" in out
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2


def test_notes_are_chinese(llm, capsys):
    class Interrupting:
        def __getattr__(self, name):
            return getattr(llm, name)

        def generate(self, *arguments, **options):
            raise KeyboardInterrupt

    with in_language("zh"):
        out, _ = converse(Interrupting(), capsys, "明月")
    assert "已停止" in out


def test_the_greeting_fits_a_terminal_of_80_columns():
    assert max(cell_len(line.plain) for line in Text.from_markup(DEMO_GREETING).split()) <= 80


def test_ctrl_c_at_the_prompt_does_not_leave(llm, capsys):
    out, conversation = converse(llm, capsys, KeyboardInterrupt, "明月")
    assert "Ctrl-C again, Ctrl-D or /quit leaves" in out
    assert len(conversation.messages) == 2


def test_ctrl_c_twice_at_the_prompt_leaves(llm, capsys):
    _, conversation = converse(llm, capsys, KeyboardInterrupt, KeyboardInterrupt, "明月")
    assert conversation.messages == []
    _, conversation = converse(llm, capsys, KeyboardInterrupt, "明月", KeyboardInterrupt, "明月")
    assert len(conversation.messages) == 4


def test_the_oldest_turns_give_way_when_the_context_is_full(tiny_glm, capsys):
    short = LLM(tiny_glm, device="cpu", max_model_len=64)
    out, conversation = converse(short, capsys, *["明月光明月光"] * 6)
    assert "the context is full: the oldest turn was forgotten" in out
    assert conversation.messages[0]["role"] == "user"
    assert 2 < len(conversation.messages) < 12
    assert len(short.render(conversation.messages)) < 64 + 12


def test_a_message_that_cannot_fit_is_reported_and_leaves_the_conversation_as_it_was(tiny_glm, capsys):
    short = LLM(tiny_glm, device="cpu", max_model_len=64)
    out, conversation = converse(short, capsys, "明月", "明" * 100)
    assert "shorten it" in out
    assert conversation.messages == [user("明月"), assistant(expected_turns(short, ["明月"])[0])]


def test_a_terminal_gets_no_control_characters(monkeypatch):
    from warpbus.cli import chat as module

    class Screen(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Screen())
    module._write("月\x1b[2J\n\tx\x08\x9b")
    assert sys.stdout.getvalue() == "月[2J\n\tx"


def read_until(terminal, text, seconds=60):
    """What the program writes to the terminal, up to `text`."""
    seen = b""
    end = time.monotonic() + seconds
    while text.encode() not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{text!r} did not come within {seconds} s; so far: {seen.decode(errors='replace')}"
        seen += os.read(terminal, 1)  # no more than what is waited for
    return seen.decode(errors="replace")


def test_in_a_real_terminal(tiny_glm, tmp_path):
    ours, theirs = pty.openpty()
    environment = os.environ | {"HOME": str(tmp_path), "LANG": "C.UTF-8", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "chat", str(tiny_glm), *FLAGS],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore SIGINT, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    try:
        assert "glm, 113,216 parameters, float32, cpu, context 512" in read_until(ours, "> ")
        os.write(ours, "明月\n".encode())
        assert "12 tokens, " in read_until(ours, "limit")
        read_until(ours, "> ")
        time.sleep(1)  # the prompt is written before readline waits, and only what waits is interrupted
        process.send_signal(signal.SIGINT)
        read_until(ours, "/quit leaves")
        os.write(ours, b"/quit\n")
        assert process.wait(timeout=90) == 0
    finally:
        process.kill()
        os.close(ours)
    history = tmp_path / ".warpbus_history"
    assert history.read_text(encoding="utf-8").split() == ["明月", "/quit"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_an_error_is_one_line_and_an_exit_code(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", RUN, "chat", str(tmp_path / "nowhere"), "--prompt", "1"], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert "nowhere" in result.stderr


def test_memory_is_planned_on_a_gpu_alone(tiny_glm):
    result = subprocess.run(
        [sys.executable, "-c", RUN, "chat", str(tiny_glm), "--prompt", "1", "--device", "cpu", "--memory", "6GB"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "--memory 6GB limits GPU memory, but this run is on the CPU: leave it out" in result.stderr


def test_chatglm6b_talks_in_its_own_rounds(tiny_chatglm):
    llm = LLM(tiny_chatglm, device="cpu")
    expected = expected_turns(llm, ["明月", "<eop>"])
    result = invoke(tiny_chatglm, *FLAGS, input="明月\n<eop>\n")
    assert (result.exit_code, result.stdout) == (0, "".join(f"{answer}\n" for answer in expected))
    written = f"[Round 0]\n问：明月\n答：{expected[0]}\n[Round 1]\n问：<eop>\n答："
    assert expected[1] == llm.generate(written, GREEDY)[0].text
