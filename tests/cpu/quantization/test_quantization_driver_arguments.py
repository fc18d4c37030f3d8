"""What `quantize` refuses before it begins, and the devices that it chooses."""

import shutil
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_models import rewrite, write_model
from torch import Tensor

from warpbus.errors import (
    CheckpointError,
    DataError,
    DeviceError,
    SchemeError,
    StorageError,
    TensorError,
    UsageError,
    WarpbusError,
)
from warpbus.qtensor import Scheme, Schemes
from warpbus.quantization import Calibration, driver, job, quantize

SMALL = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "tiny", **SMALL)


def refused(kind: type[WarpbusError], tmp_path: Path, model: Path, match: str, **options: Any) -> str:
    """The call fails with one line, and leaves nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind, match=match) as caught:
        quantize(model, **{"output": tmp_path / "out", "scheme": "w8a16", **options})
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (UsageError, {"algorithm": "obq"}, r"algorithm is 'obq': choose from gptq, awq, smoothquant, rtn"),
        (UsageError, {"format": "gguf"}, r"format 'gguf': expected one of compressed-tensors, gptq, gptq-v2, awq"),
        (SchemeError, {"scheme": "w7a16"}, r"7 bits"),
        (SchemeError, {"scheme": "w4a16-g48"}, r"groups of 48"),
        (UsageError, {"scheme": "w8a8-int8"}, r"gptq cannot quantize to w8a8-int8: choose from smoothquant, rtn"),
        (UsageError, {"algorithm": "awq", "scheme": "w8a8-fp8"}, r"awq cannot .* choose from smoothquant, rtn"),
        (UsageError, {"algorithm": "smoothquant"}, r"smoothquant cannot quantize to w8a16: choose from gptq, awq, rtn"),
        (SchemeError, {"format": "awq"}, r"model\.layers\.0\.self_attn\.q_proj\.weight.*4"),
        (UsageError, {"samples": 0}, r"samples is 0: it has to be at least 1"),
        (UsageError, {"tokens": 0}, r"tokens is 0: it has to be at least 1"),
        (UsageError, {"seqlen": -3}, r"seqlen is -3: it has to be at least 1"),
        (UsageError, {"damping": -1.0}, r"damping is -1"),
        (UsageError, {"damping": float("nan")}, r"damping is nan"),
        (UsageError, {"damping": float("inf")}, r"damping is inf"),
        (UsageError, {"device": "tpu"}, r"device is 'tpu'"),
        (UsageError, {"processes": 0}, r"processes is 0: it has to be from 1 to 8"),
        (UsageError, {"processes": 9}, r"processes is 9: it has to be from 1 to 8"),
        (DataError, {"calibration": Path("none.txt")}, r"none\.txt: no such calibration file"),
        (DataError, {"calibration": Calibration(())}, r"calibration: .* at least one token"),
        (DataError, {"calibration": Calibration(((1, 2), ()))}, r"calibration: .* at least one token"),
        (DataError, {"calibration": Calibration(((1, 2), (3, -1)))}, r"calibration: token -1"),
        (DataError, {"calibration": Calibration(((400,),))}, r"calibration: token 400: the model has tokens 0 to 399"),
    ],
)
def test_arguments_that_are_wrong(
    tmp_path: Path, model: Path, texts: Path, kind: type[WarpbusError], options: dict[str, Any], match: str
) -> None:
    refused(kind, tmp_path, model, match, **{"calibration": texts, "device": "cpu", **options})


def test_schemes_that_do_not_fit(tmp_path: Path, model: Path, texts: Path) -> None:
    four, eight = Scheme.parse("w4a16"), Scheme.parse("w8a8-int8")
    mixed = Schemes(four, {"model.layers.1.self_attn.k_proj": Scheme.parse("w8a16")})
    found = refused(SchemeError, tmp_path, model, "expected one scheme", scheme=mixed, calibration=texts)
    assert "model.layers.1.self_attn.q_proj.weight w4a16, model.layers.1.self_attn.k_proj.weight w8a16" in found
    none = Schemes(four, {"model.layers.0.mlp.down_proj": None})
    refused(SchemeError, tmp_path, model, r"down_proj\.weight None", scheme=none, algorithm="rtn")
    both = Schemes(four, {"model.layers.0.mlp.down_proj": eight})
    refused(UsageError, tmp_path, model, "gptq cannot quantize to w8a8-int8", scheme=both, calibration=texts)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there(tmp_path: Path, model: Path, device: str) -> None:
    refused(DeviceError, tmp_path, model, "no GPU", algorithm="rtn", device=device)


@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("auto", "--gpus 2: no GPU was found on this machine: leave it out"),
        ("cpu", "--gpus 2: --device cpu means the CPU: leave one of the two out"),
    ],
)
def test_gpus_where_the_cpu_computes(tmp_path: Path, model: Path, texts: Path, device: str, match: str) -> None:
    refused(UsageError, tmp_path, model, match, calibration=texts, device=device, gpus=2)


class _ChosenError(Exception):
    """The devices of the processes that were about to start."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """The devices that a call chooses on a machine with so many GPUs."""

    def stop(job: object, *, devices: Sequence[torch.device], **_: object) -> None:
        raise _ChosenError(*map(str, devices))

    def choose(there: int, **options: Any) -> list[str]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
        monkeypatch.setattr(driver, "Processes", stop)
        with pytest.raises((_ChosenError, UsageError, DeviceError)) as caught:
            quantize(tmp_path, tmp_path / "out", scheme="w4a16", calibration="texts.txt", **options)
        if not isinstance(caught.value, _ChosenError):
            raise caught.value
        return list(map(str, caught.value.args))

    return choose


@pytest.mark.parametrize(
    ("there", "options", "expected"),
    [
        (0, {}, ["cpu"]),
        (0, {"processes": 3}, ["cpu"] * 3),
        (4, {"device": "cpu", "processes": 2}, ["cpu"] * 2),
        (0, {"processes": 3, "algorithm": "rtn"}, ["cpu"]),
        (1, {}, ["cuda:0"]),
        (4, {}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, {"device": "cuda"}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, {"device": torch.device("cuda")}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, {"device": "cuda:2"}, ["cuda:2"]),
        (4, {"device": torch.device("cuda", 2)}, ["cuda:2"]),
        (4, {"gpus": 2}, ["cuda:0", "cuda:1"]),
        (4, {"gpus": "2"}, ["cuda:0", "cuda:1"]),
        (4, {"gpus": "0,2"}, ["cuda:0", "cuda:2"]),
        (4, {"gpus": "3,1"}, ["cuda:3", "cuda:1"]),
        (4, {"gpus": "3,1", "algorithm": "rtn"}, ["cuda:3"]),
        (9, {}, [f"cuda:{number}" for number in range(8)]),
    ],
)
def test_devices(chosen: Callable[..., list[str]], there: int, options: dict[str, Any], expected: list[str]) -> None:
    assert chosen(there, **options) == expected


@pytest.mark.parametrize(
    "gpus",
    [
        "",
        "x",
        "-1",
        "0,",
        ",0",
        "0,,1",
        "0, 1",
        "²",
        "1e0",
        "0x1",
        "all,0",
        "0,0",
        "1,2,1",
        "9" * 5000,
        "1," + "9" * 5000,
    ],
)
def test_gpus_that_are_no_list(chosen: Callable[..., list[str]], gpus: str) -> None:
    with pytest.raises(UsageError, match=r"^gpus is '.*: expected all, a number of GPUs, or their numbers") as caught:
        chosen(4, gpus=gpus)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("gpus", ["0", "5", 5, 0, "0005", "0,4", "0,256", "3,1,9999"])
def test_gpus_that_are_not_there(chosen: Callable[..., list[str]], gpus: str | int) -> None:
    with pytest.raises(UsageError, match=r"there are 4 here") as caught:
        chosen(4, gpus=gpus)
    assert len(str(caught.value)) < 300


def test_gpus_beside_one_gpu(chosen: Callable[..., list[str]]) -> None:
    with pytest.raises(UsageError, match=r"--gpus 2: --device cuda:1 means one GPU: leave"):
        chosen(4, gpus=2, device="cuda:1")


def test_processes_on_gpus(chosen: Callable[..., list[str]]) -> None:
    with pytest.raises(UsageError, match=r"processes is 2: that is for the CPU"):
        chosen(4, processes=2)


def test_a_gpu_beyond_those_there_are(chosen: Callable[..., list[str]]) -> None:
    with pytest.raises(DeviceError, match=r"cuda:4: this machine has 4"):
        chosen(4, device="cuda:4")


def test_models_that_cannot_be_quantized(tmp_path: Path, model: Path) -> None:
    refused(CheckpointError, tmp_path, tmp_path / "none", "none", algorithm="rtn")
    refused(UsageError, tmp_path, model, "replacing it would delete", algorithm="rtn", output=model)
    within = Path(shutil.copytree(model, write_model(tmp_path / "around", **SMALL) / "within"))
    refused(UsageError, tmp_path, within, "replacing it would delete", algorithm="rtn", output=within.parent)
    texts = within.parent / "texts.txt"
    texts.write_text("text")
    refused(UsageError, tmp_path, model, "texts.txt, which is read", calibration=texts, output=within.parent)
    odd = write_model(tmp_path / "odd", **SMALL | {"intermediate_size": 144})
    found = refused(SchemeError, tmp_path, odd, "144 columns", algorithm="rtn", scheme="w4a16-g64")
    assert "model.layers.0.mlp.down_proj.weight: 144 columns" in found
    quantize(model, tmp_path / "done", algorithm="rtn", scheme="w8a16")
    refused(CheckpointError, tmp_path, tmp_path / "done", "quantized already", algorithm="rtn")


def test_weights_that_do_not_fit_the_config(tmp_path: Path, model: Path) -> None:
    def lose(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.down_proj.weight"]

    def cut(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.self_attn.k_proj.weight"
        tensors[name] = tensors[name][:-1].contiguous()

    def round_off(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.self_attn.o_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    for number, (change, message) in enumerate(
        ((lose, "down_proj.weight is missing"), (cut, "k_proj.weight"), (round_off, "expected floating point"))
    ):
        broken = rewrite(model, tmp_path / f"broken{number}", change)
        refused(TensorError, tmp_path, broken, message, algorithm="rtn")


def test_an_output_that_is_there(tmp_path: Path, model: Path) -> None:
    quantize(model, tmp_path / "out", algorithm="rtn", scheme="w8a16")
    refused(StorageError, tmp_path, model, "not empty", algorithm="rtn", scheme="w4a16")
    (tmp_path / "file").write_text("mine")
    refused(StorageError, tmp_path, model, "file", algorithm="rtn", output=tmp_path / "file")
    (tmp_path / "other.quantization").mkdir()
    (tmp_path / "other.quantization" / "notes.txt").write_text("mine")
    refused(StorageError, tmp_path, model, r"other\.quantization", algorithm="rtn", output=tmp_path / "other")
    assert (tmp_path / "other.quantization" / "notes.txt").read_text() == "mine"


def test_a_disk_that_is_too_small(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    refused(StorageError, tmp_path, model, "make room or name a directory on another disk", algorithm="rtn")


def test_a_tokenizer_of_another_model(tmp_path: Path, texts: Path) -> None:
    source = write_model(tmp_path / "model", **SMALL | {"vocab_size": 20})
    refused(CheckpointError, tmp_path, source, "its tokenizer gives token", calibration=texts)


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "gpu_has_kernels", lambda device: device.index == 1)
    job.check_gpu(torch.device("cuda", 1))
    with pytest.raises(DeviceError, match=r"^cuda:0: .* Ampere .* --device cpu$"):
        job.check_gpu(torch.device("cuda", 0))
