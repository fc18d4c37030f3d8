"""Uploading a model to Hugging Face, through `huggingface_hub`, in one commit with all files; or to ModelScope."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from warpbus.errors import CheckpointError, UploadError, UsageError, WarpbusError
from warpbus.formats.companions import ADDITIONAL_TEMPLATES
from warpbus.formats.hub.huggingface import TRANSPORT_ERROR, check_endpoint, hub_host, one_line
from warpbus.formats.hub.modelscope import upload
from warpbus.formats.hub.names import ModelName, parse_name
from warpbus.formats.hub.needed import CONFIG, is_complete, is_index, shards, small_files, weights_file


@dataclass(frozen=True)
class Pushed:
    """A model that was uploaded.

    Attributes:
        url: of its page.
        commit: that has the files; None where the hub does not tell it, as ModelScope.
        files: how many there are.
        nbytes: of all of them.
    """

    url: str
    commit: str | None
    files: int
    nbytes: int


def push_name(text: str) -> ModelName:
    """The repository that a text names. Raises UsageError if it is none, or not one to upload to."""
    name = parse_name(text, source=None if ":" in text else "huggingface")
    if name is None:
        raise UsageError(f"{text}: expected OWNER/MODEL, or modelscope:OWNER/MODEL")
    if name.revision is not None:
        raise UsageError(f"{text}: expected a name without a revision: the files become a commit of the main branch")
    return name


def model_files(directory: Path) -> dict[str, Path]:
    """The files of a model that are uploaded, by name: config.json, tokenizer, templates, licence, weights, GGUF.

    Code, hidden files and directories are not among them, except that of additional chat templates.

    Raises:
        CheckpointError: the directory has no configuration or not all of its weights.
    """
    if not is_complete(directory):
        raise CheckpointError(f"{directory}: expected {CONFIG} and all weights in safetensors: name a model directory")
    names = [file.name for file in directory.iterdir() if file.is_file()]
    weights = weights_file(names)
    assert weights is not None
    templates = [f"{ADDITIONAL_TEMPLATES}/{file.name}" for file in (directory / ADDITIONAL_TEMPLATES).glob("*.jinja")]
    chosen = [*small_files([*names, *templates]), weights, *(shards(directory / weights) if is_index(weights) else [])]
    chosen += [name for name in names if name.endswith(".gguf")]
    return {name: directory / name for name in sorted(set(chosen))}


def push(
    files: Mapping[str, Path | bytes], name: ModelName, *, private: bool, message: str, licence: str | None = None
) -> Pushed:
    """Create the repository if there is none, and commit the files to its main branch. Other files there stay.

    Args:
        files: the files to upload, by name.
        private: whether a repository that is created is private.
        message: of the commit.
        licence: of a repository that is created on ModelScope, which asks for one.

    Raises:
        UsageError: there is no token, or HF_ENDPOINT is not an address to send it to; or see `modelscope.upload`.
        UploadError: the hub refuses, or cannot be reached; then nothing of the commit is there.
    """
    sizes = [len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values()]
    if name.source == "modelscope":
        url = upload(files, name, private=private, message=message, licence=licence)
        return Pushed(url, None, len(files), sum(sizes))
    check_endpoint()
    if huggingface_hub.get_token() is None:
        raise UsageError(
            "no Hugging Face token was found: set HF_TOKEN to one with write permission, or run `hf auth login`"
        )
    api = huggingface_hub.HfApi()
    with _translated(name):
        api.create_repo(name.repository, private=private, exist_ok=True)
        done = api.create_commit(
            name.repository,
            [
                huggingface_hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=content)
                for file, content in files.items()
            ],
            commit_message=message,
        )
    return Pushed(f"{constants.ENDPOINT}/{name.repository}", done.oid, len(files), sum(sizes))


@contextmanager
def _translated(name: ModelName) -> Iterator[None]:
    """Let errors of the library and the network become ours."""
    try:
        yield
    except WarpbusError:
        raise
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            raise UploadError(
                f"{name}: {hub_host()} answers {status}: the token's account may not write there: check the name, "
                "and that the token may write"
            ) from error
        raise UploadError(f"{name}: {hub_host()} answers {status} ({one_line(error)}): try again later") from error
    except (TRANSPORT_ERROR, OSError, ValueError, RuntimeError) as error:
        raise UploadError(
            f"{name}: the upload to {hub_host()} failed ({one_line(error)}): run the same command again; nothing of "
            "the commit is there, but files that arrived are not sent again"
        ) from error
