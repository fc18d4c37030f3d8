"""`warpbus doctor` on machines that are not here: without a GPU, with two, with an old driver."""

import ctypes
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import warpbus
from warpbus.cli import app, doctor
from warpbus.cuda import jit
from warpbus.errors import DeviceError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def machine(monkeypatch):
    """`machine(driver="13.0", build="13.0", gpus=[(name, major, minor), ...], archs=[...])` makes one."""

    def make(driver=None, build=None, gpus=(), archs=("sm_75", "sm_80", "sm_90", "compute_90"), busy=()):
        def memory(index):
            if index in busy:
                raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nfor debugging ...")
            return 70 * 10**9, 80 * 10**9

        def properties(index):
            name, major, minor = gpus[index]
            return SimpleNamespace(
                name=name, major=major, minor=minor, total_memory=80 * 10**9, multi_processor_count=132
            )

        monkeypatch.setattr(doctor, "_driver_version", lambda: driver)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(archs))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: abs(one - other) == 1)
        monkeypatch.setattr(doctor, "_missing", lambda distributions: [])
        monkeypatch.setattr(doctor.sandbox, "missing", list)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
        monkeypatch.setenv("COLUMNS", "160")

    return make


def examined():
    found = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    assert found.exit_code == 0
    return json.loads(found.stdout)


def shown():
    found = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert found.exit_code == 0
    return found.stdout


def test_this_machine():
    found = examined()
    assert list(found) == [
        *("warpbus", "python", "system", "cores", "memory", "disk", "torch", "driver", "compiler"),
        *("host_compiler", "kernel_cache", "sandbox", "gpus", "missing", "runs", "advice"),
    ]
    assert found["warpbus"] == warpbus.__version__
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]
    assert found["cores"] >= 1
    assert found["disk"]["free"] > 0
    assert found["torch"]["version"] == torch.__version__
    assert set(found["runs"]) == {"chat, serve, eval, demo", "quantize", "train"}
    assert all(isinstance(text, str) for text in found["advice"])
    assert found["torch"]["version"] in shown().replace("\n", "")


def test_two_gpus(machine):
    machine("13.0", "13.0", [("NVIDIA H100", 9, 0), ("NVIDIA H100", 9, 0)])
    found = examined()
    assert found["gpus"][1] == {
        "index": 1,
        "name": "NVIDIA H100",
        "capability": "9.0",
        "memory": 80 * 10**9,
        "free": 70 * 10**9,
        "problem": None,
        "compiled": True,
        "multiprocessors": 132,
        "links": [0],
    }
    assert found["driver"] == {"cuda": "13.0"}
    assert found["runs"]["quantize"] == "GPU 0 (NVIDIA H100)"
    assert found["runs"]["train"] == "2 GPUs with --gpus 2"
    assert found["advice"] == []
    text = shown()
    assert "NVIDIA H100, sm_90, 132 multiprocessors, 70.0 of 80.0 GB free, reaches GPU 1 directly" in text
    assert "Nothing is missing." in text
    assert "CUDA 13.0" in text


@pytest.mark.parametrize(
    ("driver", "build", "advice"),
    [
        (None, None, "No NVIDIA driver was found: everything runs on the CPU. With an NVIDIA GPU, install its driver."),
        ("13.0", None, "There is an NVIDIA driver, but this torch is the CPU build: install a CUDA build of torch."),
        ("12.4", "13.0", "The driver supports CUDA 12.4, torch was built for 13.0: update the driver."),
        ("9.2", "12.8", "The driver supports CUDA 9.2, torch was built for 12.8: update the driver."),
        ("12.4", "12.8", "torch sees no GPU although a driver is there: look at nvidia-smi and CUDA_VISIBLE_DEVICES."),
        ("13.0", "13.0", "torch sees no GPU although a driver is there"),
    ],
)
def test_why_there_is_no_gpu(machine, driver, build, advice):
    machine(driver, build)
    found = examined()
    assert found["gpus"] == []
    assert len(found["advice"]) == 1
    assert found["advice"][0].startswith(advice)
    assert found["runs"]["chat, serve, eval, demo"] == f"CPU, {found['cores']} cores, float32"
    assert advice in shown()


def test_gpus_that_cannot_do_everything(machine):
    gpus = [("NVIDIA RTX", 12, 0), ("Tesla T4", 7, 5), ("NVIDIA B200", 10, 0), ("NVIDIA H100", 9, 0)]
    machine("13.0", "13.0", gpus, archs=["sm_75", "sm_90", "sm_100"], busy=[3])
    found = examined()
    assert [gpu["compiled"] for gpu in found["gpus"]] == [False, True, True, True]
    assert [gpu["free"] for gpu in found["gpus"]] == [70 * 10**9] * 3 + [None]
    assert found["advice"] == [
        "This torch has no code for GPU 0 (NVIDIA RTX, sm_120): install a torch build that has",
        "GPU 1 (Tesla T4) is older than Ampere: Warpbus's kernels do not run there: use --device cpu",
        "GPU 3 (NVIDIA H100) cannot be used (CUDA error: all CUDA-capable devices are busy or unavailable): "
        "see nvidia-smi",
    ]
    assert "unknown of 80.0 GB free" in shown()


@pytest.mark.parametrize(
    ("gpus", "place"),
    [
        ([("Tesla T4", 7, 5)], "CPU, {cores} cores, float32, with --device cpu"),
        # torch may have no code for it either, but another torch would be of no help.
        ([("Tesla V100", 7, 0), ("Tesla T4", 7, 5)], "CPU, {cores} cores, float32, with --device cpu"),
        ([("Tesla T4", 7, 5), ("NVIDIA A100", 8, 0)], "GPU 1 (NVIDIA A100), with --device cuda:1"),
        ([("NVIDIA A100", 8, 0), ("Tesla T4", 7, 5)], "GPU 0 (NVIDIA A100)"),
    ],
)
def test_gpus_that_the_kernels_do_not_run_on(machine, gpus, place):
    machine("13.0", "13.0", gpus)
    found = examined()
    assert found["runs"]["chat, serve, eval, demo"] == found["runs"]["quantize"] == place.format(cores=found["cores"])
    assert found["advice"] == [
        f"GPU {index} ({name}) is older than Ampere: Warpbus's kernels do not run there: use --device cpu"
        for index, (name, major, _) in enumerate(gpus)
        if major < 8
    ]
    assert all(text in shown() for text in found["advice"])


@pytest.mark.parametrize(
    ("arch", "runs"),
    [
        ("sm_86", [(8, 6), (8, 9)]),
        ("sm_80", [(8, 0), (8, 6), (8, 9)]),
        ("sm_90a", [(9, 0)]),
        ("sm_120", [(12, 0)]),
        ("compute_89", [(8, 9), (9, 0), (10, 0), (12, 0)]),
        ("compute_90a", [(9, 0)]),
        ("gfx90a", []),
        ("", []),
    ],
)
def test_what_code_runs_on(arch, runs):
    capabilities = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert [capability for capability in capabilities if doctor._runs_on(arch, capability)] == runs


def test_what_is_not_installed(machine, monkeypatch):
    machine("13.0", "13.0", [("NVIDIA H100", 9, 0)])
    monkeypatch.setattr(doctor, "_missing", lambda distributions: [name for name in distributions if name == "psutil"])
    assert examined()["missing"]["test"] == ["psutil"]
    assert examined()["advice"] == ["For make test: pip install 'warpbus[test]' (missing: psutil)"]
    assert "pip install 'warpbus[test]'" in shown()


def test_only_a_checkout_has_tests_to_run(machine, monkeypatch):
    machine("13.0", "13.0", [("NVIDIA H100", 9, 0)])
    monkeypatch.setattr(doctor, "_missing", lambda distributions: [name for name in distributions if name == "psutil"])
    monkeypatch.setattr(doctor, "IN_CHECKOUT", False)
    assert examined()["advice"] == []


def test_a_cuda_build_without_a_driver_is_a_download_for_nothing(machine, monkeypatch):
    machine(None, "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    (advice,) = [text for text in examined()["advice"] if "3 GB" in text]
    assert "pip install torch==2.13.0 --force-reinstall --index-url https://download.pytorch.org/whl/cpu" in advice
    machine(None, None)
    assert not [text for text in examined()["advice"] if "3 GB" in text]


def test_a_second_line_of_an_advice_is_indented(machine, monkeypatch):
    machine(None, None)
    monkeypatch.setenv("COLUMNS", "60")
    lines = shown().split("What would help\n")[1].splitlines()
    assert lines[0].startswith(" • No NVIDIA driver")
    assert lines[1].startswith("   ")


def test_the_cuda_extra_is_for_those_who_have_a_gpu(machine, monkeypatch):
    def without_nvrtc(distributions):
        return [name for name in distributions if name == "nvidia-cuda-nvrtc"]

    machine()
    monkeypatch.setattr(doctor, "_missing", without_nvrtc)
    assert examined()["missing"]["cuda"] == ["nvidia-cuda-nvrtc"]
    assert len(examined()["advice"]) == 1
    machine("13.0", "13.0", [("NVIDIA H100", 9, 0)])
    monkeypatch.setattr(doctor, "_missing", without_nvrtc)
    assert examined()["advice"] == [
        "For kernels on a GPU: pip install 'warpbus[cuda]' (missing: nvidia-cuda-nvrtc)",
    ]


def test_the_compiler_and_its_cache(machine, monkeypatch, tmp_path):
    machine()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit, "compiler_version", lambda: "13.0.88, headers 13.0.96")
    place = tmp_path / "warpbus" / "kernels"
    assert examined()["kernel_cache"] == {"path": str(place), "entries": 0, "bytes": 0}
    place.mkdir(parents=True)
    (place / "a-sm_90a-0.cubin").write_bytes(b"x" * 300_000)
    assert examined()["kernel_cache"] == {"path": str(place), "entries": 1, "bytes": 300_000}
    assert examined()["compiler"] == "13.0.88, headers 13.0.96"
    assert "NVRTC 13.0.88" in shown()
    assert "1 entries, 0.3 MB" in shown()

    def missing():
        raise DeviceError("no CUDA compiler")

    monkeypatch.setattr(jit, "compiler_version", missing)
    assert examined()["compiler"] is None
    assert re.search(r"compiler +none", shown())


def test_missing_distributions():
    assert doctor._missing(("pytest", "no-such-thing-at-all")) == ["no-such-thing-at-all"]


def test_a_full_disk(machine, monkeypatch, tmp_path):
    machine("13.0", "13.0", [("NVIDIA H100", 9, 0)])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 10**9))
    place = tmp_path / "[red]disk"
    place.mkdir()
    monkeypatch.chdir(place)
    assert examined()["advice"] == [f"{place} has 5 GB free: a 6 B model in 16 bits is 13 GB."]
    assert "[red]disk" in shown()


def test_what_a_sandbox_of_tenants_lacks(machine, monkeypatch):
    machine("13.0", "13.0", [("NVIDIA H100", 9, 0)])
    assert examined()["sandbox"] == {"missing": []}
    monkeypatch.setattr(doctor.sandbox, "missing", lambda: ["files can be read: this kernel has no Landlock"])
    assert examined()["advice"] == [
        "Tenants of a pool (warpbus pool serve): files can be read: this kernel has no Landlock."
    ]
    assert "pool sandbox" in shown()
    assert "incomplete, see below" in shown()


def test_the_driver_is_asked_for_its_version(monkeypatch):
    class Library:
        def cuDriverGetVersion(self, pointer):  # noqa: N802
            pointer._obj.value = 12040
            return self.result

    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    library.result = 0
    assert doctor._driver_version() == "12.4"
    library.result = 3
    assert doctor._driver_version() is None

    def missing(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert doctor._driver_version() is None


def test_extras_are_those_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name, (_, distributions) in doctor.EXTRAS.items():
        names = [re.split(r"[\[<>=!~; ]", line)[0] for line in declared[name]]
        assert [found for found in names if found != "warpbus"] == list(distributions)
