"""The C++ compiler for the CPU's kernels: what is compiled, cached and refused."""

import ctypes
import os
import subprocess

import pytest

from warpbus.cuda import host_compiler
from warpbus.cuda.cpu import find_compiler
from warpbus.cuda.host_compiler import VARIANTS, kept_object, load_library, own_variant
from warpbus.errors import DeviceError
from warpbus.kernels.units import CSRC

PLAIN = VARIANTS[-1]


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache of the test's own, and nothing that was loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for cached in (find_compiler, load_library, host_compiler.compiler_version):
        cached.cache_clear()
    yield
    for cached in (find_compiler, load_library, host_compiler.compiler_version):
        cached.cache_clear()


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "answer.cpp"
    file.write_text('#include "number.h"\nextern "C" int answer() { return kNumber; }\n', encoding="utf-8")
    (tmp_path / "number.h").write_text("constexpr int kNumber = 42;\n", encoding="utf-8")
    return file


def entries(tmp_path):
    return sorted((tmp_path / "cache" / "warpbus" / "kernels").glob("*.so"))


def test_a_library_is_compiled_once(tmp_path, source, monkeypatch):
    assert load_library(source, tmp_path, PLAIN).answer() == 42
    (entry,) = entries(tmp_path)
    assert entry.name.startswith("answer-plain-")
    load_library.cache_clear()
    monkeypatch.setattr(host_compiler, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert load_library(source, tmp_path, PLAIN).answer() == 42


def test_an_object_file_is_compiled_once(tmp_path, source, monkeypatch):
    with kept_object(source, tmp_path, ["-O1"]) as first:
        made = first.read_bytes()
        assert made.startswith(b"\x7fELF")
    monkeypatch.setattr(host_compiler, "_compile", lambda *arguments: pytest.fail("compiled again"))
    with kept_object(source, tmp_path, ["-O1"]) as second:
        assert (second, second.read_bytes()) == (first, made)


def test_without_a_cache_an_object_file_is_compiled_every_time(tmp_path, source, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    warned = pytest.warns(UserWarning, match="the kernel cache .* cannot be used")
    with warned, kept_object(source, tmp_path, ["-O1"]) as made:
        assert made.read_bytes().startswith(b"\x7fELF")
    assert not made.exists()


def test_another_header_is_another_library(tmp_path, source):
    assert load_library(source, tmp_path, PLAIN).answer() == 42
    (tmp_path / "number.h").write_text("constexpr int kNumber = 43;\n", encoding="utf-8")
    load_library.cache_clear()
    assert load_library(source, tmp_path, PLAIN).answer() == 43
    assert len(entries(tmp_path)) == 2


def test_what_does_not_compile_is_named(tmp_path, source):
    source.write_text("int answer( { }\n", encoding="utf-8")
    with pytest.raises(DeviceError, match=r"answer\.cpp does not compile for plain: .*error"):
        load_library(source, tmp_path, PLAIN)
    assert not list((tmp_path / "cache" / "warpbus" / "kernels").glob("answer*"))


def test_no_compiler(tmp_path, source, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler was found \(c\+\+, g\+\+, clang\+\+\): install g\+\+"):
        load_library(source, tmp_path, PLAIN)


def test_a_compiler_that_does_not_run(tmp_path, source, monkeypatch):
    monkeypatch.setenv("CXX", f"{tmp_path}/missing -O1")
    with pytest.raises(DeviceError, match=r"the C\+\+ compiler .*missing -O1 --version does not run"):
        load_library(source, tmp_path, PLAIN)


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="the kernel cache .* cannot be used"):
        assert load_library(source, tmp_path, PLAIN).answer() == 42


def test_a_library_of_another_user_is_not_loaded(tmp_path, source, monkeypatch):
    load_library(source, tmp_path, PLAIN)
    (entry,) = entries(tmp_path)
    before = entry.stat().st_ino
    load_library.cache_clear()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    monkeypatch.setattr(host_compiler, "_ROOT", 4243)
    assert load_library(source, tmp_path, PLAIN).answer() == 42
    assert entry.stat().st_ino != before


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_kernels_compile_without_warnings_for_every_cpu(tmp_path, variant):
    """Also for instructions that this CPU lacks, if it is of their kind."""
    if variant.flags and not host_compiler.cpu_instructions():
        pytest.skip("instructions of x86")
    command = [*find_compiler(), *host_compiler._FLAGS, *variant.flags, "-Wall", "-Wextra"]
    command += ["-Wno-maybe-uninitialized", "-I", str(CSRC), "-o", str(tmp_path / "library.so")]  # of gcc's own headers
    done = subprocess.run([*command, str(CSRC / "cpu" / "operators.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    if variant.runs_here:
        assert ctypes.CDLL(str(tmp_path / "library.so")).warpbus_linear


def test_the_variant_of_this_cpu_runs_here():
    assert own_variant().runs_here
    assert PLAIN.runs_here
    assert own_variant() == next(variant for variant in VARIANTS if variant.runs_here)
