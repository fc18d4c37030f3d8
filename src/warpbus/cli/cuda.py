"""`warpbus cuda`: stand-alone CUDA programs, on a GPU or on the CPU."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from warpbus.cli.completion import one_of
from warpbus.cli.help import PlainGroup
from warpbus.cli.language import Console
from warpbus.errors import DataError, UsageError

DEVICES = ("auto", "cpu", "cuda")

cuda = typer.Typer(cls=PlainGroup, no_args_is_help=True, help="Compile and run CUDA programs, also without a GPU.")


@cuda.callback()
def group() -> None:
    """Make a group of a single command."""


@cuda.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a .cu file with a main")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="of the program")] = None,
    device: Annotated[
        str,
        typer.Option(
            help="auto: a GPU if there are one and nvcc, else the CPU; cpu; or cuda", autocompletion=one_of(*DEVICES)
        ),
    ] = "auto",
    check: Annotated[
        bool,
        typer.Option("--check", help="on the CPU: check each access, and compare two orders of threads"),
    ] = False,
) -> None:
    """Compile FILE and run it: by nvcc on a GPU, or by the C++ compiler on the CPU.

    On the CPU mistakes are explained, with --check also races and unwritten elements. Options come before FILE.
    """
    from warpbus.cuda.findings import explain, language_of_locale
    from warpbus.cuda.programs import has_gpu, run_in_orders, run_on_gpu

    if device not in DEVICES:
        raise UsageError(f"--device is {device!r}: choose from {', '.join(DEVICES)}")
    words = arguments or []
    on_gpu = device == "cuda" or (device == "auto" and not check and has_gpu())
    if on_gpu and check:
        raise UsageError("--check compares orders of threads on the CPU: give --device cpu, or drop it")
    if device == "auto" and not on_gpu:
        Console(stderr=True, soft_wrap=True).print("running on the CPU", style="dim")
    orders = ("forward", "reverse") if check else ("forward",)
    found, *others = [run_on_gpu(file, words)] if on_gpu else run_in_orders(file, words, orders=orders, checks=check)
    sys.stdout.write(found.output)
    sys.stdout.flush()
    sys.stderr.write(found.errors)
    if found.mistake:
        raise DataError(f"{file}: {explain(found.mistake, language_of_locale())}")
    if found.code < 0:
        raise DataError(f"{file}: the signal {signal.Signals(-found.code).name} ended the program")
    for again in others:
        if (again.output, again.code) != (found.output, found.code):
            sys.stdout.write(again.output)
            sys.stderr.write(again.errors)
            if again.mistake:
                raise DataError(f"{file}: {explain(again.mistake, language_of_locale())}")
            raise DataError(
                f"{file}: the output depends on the order of the threads (the second one above is that of the reverse "
                "order): a __syncthreads() is missing, or several threads write one element"
            )
        if found.code == 0:
            print("no mistake was found; the same output with the threads in reverse order")
    if found.code:
        raise typer.Exit(found.code)
