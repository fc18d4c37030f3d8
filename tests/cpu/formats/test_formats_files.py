"""Single files that are there complete or not at all."""

import errno
import os
import re
from pathlib import Path

import pytest

from warpbus.errors import StorageError
from warpbus.formats.files import replace_file


def test_a_file_is_replaced_and_parents_are_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "a.txt"
    for text in ("first", "second"):
        replace_file(path, lambda partial, text=text: partial.write_text(text))
        assert path.read_text() == text
    assert [found.name for found in path.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("PytorchStreamWriter failed\nwriting file")],
)
def test_a_failed_write_leaves_what_was_there(error: Exception, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(partial: Path) -> None:
        partial.write_text("half")
        raise error

    with pytest.raises(StorageError, match=r"a\.txt: cannot be written .*: free some space or") as raised:
        replace_file(path, write)
    assert "\n" not in str(raised.value)
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["a.txt"]


def test_other_errors_pass_and_leave_nothing(tmp_path: Path) -> None:
    def write(partial: Path) -> None:
        partial.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "a.txt", write)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(StorageError, match="cannot be written"):
        replace_file(tmp_path / "a" / "b.txt", lambda partial: partial.write_text("x"))


def test_a_writer_that_says_why_is_not_wrapped(tmp_path: Path) -> None:
    def write(partial: Path) -> None:
        raise StorageError(f"{tmp_path}: disk full")

    with pytest.raises(StorageError, match=rf"^{re.escape(str(tmp_path))}: disk full$"):
        replace_file(tmp_path / "model.gguf", write)
    assert list(tmp_path.iterdir()) == []
