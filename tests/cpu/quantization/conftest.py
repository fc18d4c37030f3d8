"""Fixtures of the tests of quantization."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quantization_models import write_model, write_texts
from quantization_runs import FOUR_LAYERS, Runs, Undisturbed, command, fingerprint


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As each of two processes has: the order of sums depends on the number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration data."""
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture(scope="session")
def verses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Less of it, for the tiny model of `make_model`."""
    path = tmp_path_factory.mktemp("verses") / "verses.jsonl"
    path.write_text("\n".join(json.dumps({"text": "床前明月光，疑是地上霜。"}, ensure_ascii=False) for _ in range(4)))
    return path


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """Runs of the command."""
    with Runs() as started:
        yield started


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers take so little time that it can be quantized many times."""
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    return write_model(tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=FOUR_LAYERS, **sizes)


@pytest.fixture(scope="module")
def undisturbed(runs: Runs, four_layers: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A run with the arguments of `command`."""
    output = tmp_path_factory.mktemp("whole") / "out"
    run = runs.start(*command(four_layers, output, texts))
    assert run.code == 0, run.said
    assert not output.with_name("out.quantization").exists()
    return Undisturbed(fingerprint(output), run.seconds)
