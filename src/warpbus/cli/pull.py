"""`warpbus pull`: bring a model from its hub to this disk."""

import json
from typing import Annotated

import typer

from warpbus.cli.language import Console
from warpbus.cli.progress import download_bar


def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="such as THUDM/chatglm2-6b or modelscope:ZhipuAI/chatglm2-6b")
    ],
    revision: Annotated[str | None, typer.Option(help="a branch, a tag or a commit; default: the hub's")] = None,
    source: Annotated[str | None, typer.Option(help="huggingface or modelscope")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print what is there now as JSON")] = False,
) -> None:
    """Download or update the model NAME: configuration, vocabulary and weights, never code.

    The same command resumes an interrupted download. The other commands then accept NAME or NAME@REVISION.
    """
    from warpbus.formats.hub import pull as run

    with download_bar(name) as show:
        pulled = run(name, revision=revision, source=source, progress=show)
    if as_json:
        print(json.dumps(pulled.to_json(), ensure_ascii=False))
    else:
        news = f"{pulled.downloaded / 1e6:,.1f} MB downloaded" if pulled.downloaded else "nothing new"
        Console(highlight=False, soft_wrap=True).print(
            f"{pulled.directory}\n{pulled.files} files, {pulled.nbytes / 1e6:,.1f} MB; {news}", markup=False
        )
