"""`warpbus push`: upload a model to Hugging Face or ModelScope, with a model card."""

import json
from pathlib import Path
from typing import Annotated

import typer

from warpbus.cli.language import Console
from warpbus.errors import CheckpointError

CARD = "README.md"


def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a model directory, such as quantize writes it")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="the repository: OWNER/MODEL, or modelscope:OWNER/MODEL")],
    private: Annotated[
        bool, typer.Option("--private", help="if the repository is created: nobody else sees it")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the card, name the files on stderr, upload nothing")
    ] = False,
    base_model: Annotated[
        str | None, typer.Option(help="the original on the hub, for the card", show_default="if it came from there")
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", help="the hub's identifier of the licence, such as apache-2.0")
    ] = None,
    message: Annotated[str, typer.Option(help="of the commit")] = "Upload by warpbus push",
    as_json: Annotated[
        bool, typer.Option("--json", help="print what was uploaded, or with --dry-run what would be, as JSON")
    ] = False,
) -> None:
    """Upload the model DIR to Hugging Face or ModelScope, with a card that tells how it was made and how to load it.

    The card is README.md of DIR if there is one.

    A token that may write is needed: HF_TOKEN, or hf auth login; MODELSCOPE_API_TOKEN, or ms-hub login.
    """
    from warpbus.evaluation.model_card import base_of, model_card, published_report, read_report
    from warpbus.formats.hub import model_files, push_name
    from warpbus.formats.hub import push as run
    from warpbus.quantization.preflight import REPORT_NAME

    target = push_name(name)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: there is no such directory: expected a model directory")
    files: dict[str, Path | bytes] = {**model_files(directory)}
    own = directory / CARD
    if own.is_file():
        files[CARD] = own.read_bytes()
    else:
        card = model_card(directory, target, base_model=base_model, licence=licence)
        files[CARD] = card.encode()
    report = read_report(directory)
    if report is not None:
        files[REPORT_NAME] = published_report(report, target.repository, base_of(report, base_model))
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if dry_run:
        content = files[CARD]
        assert isinstance(content, bytes)
        text = content.decode(errors="replace")
        if as_json:
            print(json.dumps({"name": str(target), "files": list(files), "card": text}, ensure_ascii=False))
            return
        print(text, end="")
        console.print(f"would be uploaded to {target}: {', '.join(files)}", markup=False)
        return
    done = run(files, target, private=private, message=message, licence=licence)
    if as_json:
        print(json.dumps({"url": done.url, "commit": done.commit, "files": done.files, "bytes": done.nbytes}))
    else:
        Console(highlight=False, soft_wrap=True).print(
            f"{done.url}\n{done.files} files, {done.nbytes / 1e6:,.1f} MB"
            + (f", commit {done.commit}" if done.commit else ""),
            markup=False,
        )
