"""The compiler's cache: what decides about an entry, damaged entries, many processes at once, machines without one."""

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from warpbus.cuda import compiled_cache, jit
from warpbus.cuda.kernel import Unit
from warpbus.cuda.parameters import Parameters
from warpbus.errors import DeviceError

pytest.importorskip("cuda.core", reason="the compiler comes with the extra cuda")

SOURCE = '#include "add.cuh"\nextern "C" __global__ void add(float* x) { x[threadIdx.x] = plus(x[threadIdx.x]); }\n'
HEADER = "#pragma once\n__device__ float plus(float x) { return x + AMOUNT; }\n"


@pytest.fixture
def unit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "add.cu").write_text(SOURCE)
    (tmp_path / "add.cuh").write_text(HEADER)
    return Unit(tmp_path / "add.cu", tmp_path, (("AMOUNT", "1.0f"),))


def entries():
    return sorted(compiled_cache.cache_directory().glob("*.cubin"))


def test_resources_without_a_gpu(unit):
    taken = unit.kernel("add", Parameters("float* x")).resources("sm_80")
    assert taken.registers > 0
    assert taken.spill_stores == taken.spill_loads == taken.shared == 0


def test_second_compilation_reads_the_cache(unit, monkeypatch):
    first = unit.compile("sm_80")
    monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled again"))
    assert unit.compile("sm_80") == first
    assert len(entries()) == 1
    assert compiled_cache.cache_directory().stat().st_mode & 0o777 == 0o700


def test_what_decides_about_an_entry(unit, tmp_path, monkeypatch):
    unit.compile("sm_80")
    unit.compile("sm_90a")
    assert len(entries()) == 2
    Unit(unit.source, unit.root, (("AMOUNT", "2.0f"),)).compile("sm_80")
    assert len(entries()) == 3
    (tmp_path / "add.cuh").write_text(HEADER.replace("x +", "x -"))
    unit.compile("sm_80")
    assert len(entries()) == 4
    monkeypatch.setattr(jit, "compiler_version", lambda: "another")
    unit.compile("sm_80")
    assert len(entries()) == 5
    monkeypatch.setitem(jit._OPTIONS, "lineinfo", False)
    unit.compile("sm_80")
    assert len(entries()) == 6


def test_what_killed_processes_left_is_removed(unit):
    unit.compile("sm_80")
    (entry,) = entries()
    abandoned = entry.with_name(f"{entry.stem}.abandoned.part")
    elsewhere = entry.with_name(f"{entry.stem[:-1]}{'0' if entry.stem[-1] != '0' else '1'}.current.part")
    for part in (abandoned, elsewhere):
        part.write_bytes(b"half")
    entry.unlink()
    unit.compile("sm_80")
    assert entry.exists()
    assert not abandoned.exists()
    assert elsewhere.exists()  # of another lock: somebody may be writing it


def test_a_toolkit_of_the_system_is_reported_by_its_files(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "_distribution", lambda name: None)
    monkeypatch.setattr(jit, "_headers", lambda: (str(tmp_path),))
    (tmp_path / "cuda_fp16.h").write_text("one")
    versions = [jit.compiler_version.__wrapped__()]
    (tmp_path / "cuda_fp16.h").write_text("two")
    versions.append(jit.compiler_version.__wrapped__())
    assert versions[0] != versions[1]
    assert all("libnvrtc.so" in version for version in versions)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"{}\nELF"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"\x7fELF", b"\x7fELG", 1)),
    ],
    ids=["cut short", "empty", "no facts", "changed"],
)
def test_damaged_entry_is_compiled_again(unit, damage):
    first = unit.compile("sm_80")
    damage(entries()[0])
    assert unit.compile("sm_80") == first
    assert jit._read(entries()[0]) == first


def test_cache_that_cannot_be_written(unit, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="kernel cache .* cannot be used"):
        assert unit.compile("sm_80").code


def test_one_of_many_threads_compiles(unit, monkeypatch):
    compiled = []
    real = jit._compile
    monkeypatch.setattr(jit, "_compile", lambda *arguments: compiled.append(1) or real(*arguments))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: unit.compile("sm_80"), range(8)))
    assert all(result == results[0] for result in results)
    assert len(compiled) == 1


def test_many_processes_at_once(unit, tmp_path):
    program = textwrap.dedent(f"""
        from pathlib import Path
        from warpbus.cuda.kernel import Unit
        unit = Unit(Path({str(unit.source)!r}), Path({str(unit.root)!r}), {unit.macros!r})
        print(len(unit.compile("sm_80").code))
    """)
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)]
    lengths = {process.communicate(timeout=120)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert lengths == {f"{len(unit.compile('sm_80').code)}\n".encode()}
    assert [path.suffix for path in compiled_cache.cache_directory().iterdir() if path.is_file()] == [".cubin"]


def test_source_that_does_not_compile(unit, tmp_path):
    (tmp_path / "add.cuh").write_text(HEADER.replace("AMOUNT", "MISSING"))
    with pytest.raises(
        DeviceError, match=r'add\.cu does not compile for sm_80: .*identifier "MISSING" is undefined'
    ) as error:
        unit.compile("sm_80")
    assert "\n" not in str(error.value)
    assert not entries()


def test_missing_include(unit, tmp_path):
    (tmp_path / "add.cuh").unlink()
    with pytest.raises(DeviceError, match=r"add\.cu includes add\.cuh, which is not below"):
        unit.compile("sm_80")


def test_unit_for_another_architecture(unit):
    hopper = Unit(unit.source, unit.root, unit.macros, needs="sm_90a")
    with pytest.raises(DeviceError, match=r"AMOUNT=1\.0f needs sm_90a, this GPU is sm_80"):
        hopper.compile("sm_80")
    assert [arch for arch in jit.ARCHITECTURES if hopper.runs_on(arch)] == ["sm_90a"]
    assert Unit(unit.source, unit.root, needs="sm_89").runs_on("sm_120a")


def test_without_a_compiler(unit, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(jit.importlib, "import_module", missing)
    with pytest.raises(DeviceError, match=r"cuda-core is missing .*pip install 'warpbus\[cuda\]'"):
        unit.compile("sm_80")


def test_a_warm_cache_needs_no_compiler(unit):
    """The module that compiles is not even imported where the entry is there."""
    unit.compile("sm_80")
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from warpbus.cuda.kernel import Unit
        Unit(Path({str(unit.source)!r}), Path({str(unit.root)!r}), {unit.macros!r}).compile("sm_80")
        assert "cuda.core" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", program], check=True)
