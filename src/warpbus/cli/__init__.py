"""The command `warpbus`: one file per verb.

The files import torch and the packages they use inside their functions, so that `warpbus --help` is instant. At their
top they import the dataclasses whose fields become options (`options`), from modules that do not load torch.
"""

import atexit
import gc
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.markup import escape

import warpbus
from warpbus.cli import (
    bench,
    chat,
    convert,
    cuda,
    demo,
    doctor,
    evaluate,
    learn,
    merge,
    plan,
    pool,
    pull,
    push,
    quantize,
    serve,
    train,
)
from warpbus.cli.chinese_help import run
from warpbus.cli.help import PlainGroup
from warpbus.cli.language import Console
from warpbus.cuda.findings import language_of_locale
from warpbus.errors import WarpbusError
from warpbus.language import in_language, translated, use_language

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help: in a table, long names of options would be cut in terminals of 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(pull.pull)
app.command()(plan.plan)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(quantize.quantize)
app.command()(convert.convert)
app.command()(merge.merge)
app.command()(push.push)
app.command("eval")(evaluate.evaluate)
app.command()(train.train)
app.add_typer(pool.pool, name="pool")
app.add_typer(bench.bench, name="bench")
app.add_typer(cuda.cuda, name="cuda")
app.command()(learn.learn)
app.command()(doctor.doctor)


def _version(asked: bool) -> None:
    if asked:
        print(f"warpbus {warpbus.__version__}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    """Quantize, run and serve GLM-family language models on the GPUs you have, or on the CPU.

    Start with: warpbus demo
    """


def _leave_garbage() -> None:
    """Let the end of the process skip the garbage collection, unless Triton is loaded, which prints what is left."""
    if "triton" not in sys.modules:
        gc.freeze()


def _show_warnings(language: str) -> None:
    """Print Warpbus's own warnings as one line on stderr, in the user's language; others as Python prints them."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is not UserWarning or not Path(filename).is_relative_to(Path(warpbus.__file__).parent):
            usual(message, category, filename, lineno, file, line)
            return
        with in_language(language):  # also while the picture of a page is drawn in the other one
            Console(stderr=True, soft_wrap=True).print(f"warning: {message}", highlight=False, markup=False)

    warnings.showwarning = show


def main() -> None:
    """Run the command; a `WarpbusError` becomes one line on stderr and its exit code."""
    # torch's CPU threads spin while they wait for each other. Where anything else runs on the cores, or they are
    # virtual, that makes small operations ten times slower. libgomp reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # When it ends, Python looks for garbage among all that torch has made: half a second for nothing.
    atexit.register(_leave_garbage)
    language = language_of_locale()
    use_language(language)
    _show_warnings(language)
    try:
        if language == "zh":
            run(app, "warpbus")
        else:
            app(prog_name="warpbus")
    except WarpbusError as error:
        message = translated("[bold red]error:[/] ") + escape(translated(str(error)))
        Console(stderr=True, soft_wrap=True).print(message, highlight=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before a command has begun, which handles it from then on
        print(translated("Interrupted."), file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
