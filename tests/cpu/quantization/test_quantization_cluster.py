"""A model quantized by two nodes of a Ray cluster: the same bytes as in one process, also after a node was lost."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from quantization_models import write_model
from quantization_runs import fingerprint

from warpbus.errors import CheckpointError, DeviceError, StorageError, UsageError
from warpbus.formats import Checkpoint, FinishedParts
from warpbus.quantization import Progress, Report, quantize
from warpbus.quantization.estimate import QuantizationEstimate
from warpbus.quantization.report import LayerResult
from warpbus.quantization.survey import check_model, model_hash

SCHEME = "w4a16-g64"
LAYERS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def expected(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The files that one process writes, with as many threads as a process of the cluster has."""
    output, threads = tmp_path_factory.mktemp("expected") / "out", torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # Ray's own is that of its cores, one
    quantize(model, output, scheme=SCHEME, calibration=texts, device="cpu")
    torch.set_num_threads(threads)
    return fingerprint(output)


def run(model: Path, texts: Path, output: Path, address: str, progress: Progress | None = None) -> Report:
    return quantize(
        model,
        output,
        scheme=SCHEME,
        calibration=texts,
        device="cpu",
        processes=2,
        cluster=address,
        progress=progress,
    )


def test_a_lost_rank_and_the_same_command_again(
    model: Path, texts: Path, expected: str, two_nodes: str, tmp_path: Path
) -> None:
    killed: list[int] = []
    before = _actors()  # of a job of another test, which may still be ending

    def kill_after_a_layer(done: int, total: int, result: LayerResult) -> None:
        if not killed and FinishedParts(tmp_path / "out").facts_file("layer-00000").exists():
            victim = min(_actors() - before, key=lambda process: process.pid)
            killed.append(victim.pid)
            victim.kill()

    with pytest.raises(DeviceError, match=r"process \d on node [\d.]+ of cluster .* died, .* and run it again"):
        run(model, texts, tmp_path / "out", two_nodes, Progress(matrix=kill_after_a_layer))
    assert killed
    assert not (tmp_path / "out").exists()
    reported: list[QuantizationEstimate] = []
    report = run(model, texts, tmp_path / "out", two_nodes, Progress(estimated=reported.append))
    assert 1 <= report.resumed_layers < LAYERS
    assert fingerprint(tmp_path / "out") == expected
    assert not FinishedParts(tmp_path / "out").directory.exists()
    assert len(report.devices) == 2
    assert report.estimate == reported[0].figures()


def _actors() -> set[psutil.Process]:
    """The processes of jobs on the cluster, which are children of this one's; Ray titles them by what they do."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::_Actor"):
                found.add(process)
    return found


def test_another_model_on_one_of_the_machines(model: Path, tmp_path: Path) -> None:
    expected = model_hash(Checkpoint(model))
    check_model(Checkpoint(model), expected)
    other = shutil.copytree(model, tmp_path / "other")
    check_model(Checkpoint(other), expected)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    with pytest.raises(CheckpointError, match=r"other: the model on .* is not the one on .* all machines see"):
        check_model(Checkpoint(other), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:1"}, r"device is 'cuda:1': a cluster has GPUs \(auto or cuda\), or CPU cores with cpu"),
        ({"gpus": "0,2"}, r"gpus is '0,2': on a cluster the number of GPUs is that of --processes"),
        ({"processes": 9}, "processes is 9: it has to be from 1 to 8"),
    ],
)
def test_what_a_cluster_cannot_do(model: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        quantize(model, tmp_path / "out", algorithm="rtn", cluster="auto", **options)


def test_an_output_that_does_not_arrive_here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def elsewhere(*_: object, **options: object) -> Iterator[SimpleNamespace]:
        """A cluster that writes to a disk of its own."""
        yield SimpleNamespace(run=lambda job: None)

    monkeypatch.setattr("warpbus.quantization.driver.ClusterProcesses", elsewhere)
    with pytest.raises(StorageError, match=r"out: written on a machine of the cluster, but not seen here: name a dir"):
        quantize(model, tmp_path / "out", scheme="w8a16", algorithm="rtn", cluster="auto")
