"""A directory that nobody else may enter."""

import os

import pytest

from warpbus.cuda.runtime_directory import runtime_directory
from warpbus.errors import StorageError


def test_every_level_is_private(tmp_path):
    path = runtime_directory("mps", "GPU-1", place=tmp_path)
    assert path == tmp_path / f"warpbus-{os.getuid()}" / "mps" / "GPU-1"
    for each in (path, path.parent, path.parent.parent):
        assert each.stat().st_mode & 0o777 == 0o700
    assert runtime_directory("mps", "GPU-1", place=tmp_path) == path


def test_a_directory_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / f"warpbus-{os.getuid()}").mkdir(mode=0o700)
    (tmp_path / f"warpbus-{os.getuid()}").chmod(0o755)
    with pytest.raises(StorageError, match="only you may enter"):
        runtime_directory("mps", place=tmp_path)


def test_a_link_is_refused(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / f"warpbus-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="only you may enter"):
        runtime_directory("mps", place=tmp_path)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / f"warpbus-{os.getuid()}").write_text("")
    with pytest.raises(StorageError, match=f"warpbus-{os.getuid()}"):
        runtime_directory("mps", place=tmp_path)
