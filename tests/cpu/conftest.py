"""A tiny model like glm-poet, for the rooms that need a whole model directory."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chatglm_files import write_chatglm6b
from hub_standin import StandIn
from huggingface_hub import constants, file_download

import warpbus
from warpbus.cuda.compiled_cache import cache_directory
from warpbus.demo import recipe
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import Decoder, read_config
from warpbus.models.saving import named_tensors
from warpbus.models.tokenizers.training import train_sentencepiece

# These tests are about the CPU, also on a machine that has a GPU; tests/gpu is run by itself.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Ray reads them when it is imported.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

VERSES = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。春夜为题下一句的写首诗《》：“”"
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(scope="session")
def blank_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that training can start from: configuration, vocabulary, template, no weights."""
    directory = tmp_path_factory.mktemp("blank")
    size = train_sentencepiece(
        [VERSES], directory / "tokenizer.model", vocab_size=400, specials=recipe.SPECIALS, required_chars="\n"
    )
    config: dict[str, Any] = {**recipe.config(size), **SMALL, "num_attention_heads": 2}
    files = {
        "config.json": config,
        "tokenizer_config.json": {"chat_template": recipe.CHAT_TEMPLATE, "eos_token": "<|endoftext|>"},
        "generation_config.json": {"eos_token_id": config["eos_token_id"]},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(blank_model: Path) -> MakeModel:
    """`make_model(directory, seed=0, std=0.2, **config)` writes a model with random weights, in float32."""

    def make(directory: Path, *, seed: int = 0, std: float = 0.2, **changes: Any) -> Path:
        blank = directory.with_name(f"{directory.name}-blank")
        shutil.copytree(blank_model, blank)
        config = {**json.loads((blank / "config.json").read_text(encoding="utf-8")), **changes}
        (blank / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return _fill(blank, directory, seed, std)

    return make


def _fill(blank: Path, directory: Path, seed: int, std: float) -> Path:
    """Give a directory without weights random ones, and another name."""
    model = Decoder(read_config(Checkpoint(blank, weights=False)))
    model.initialize(torch.Generator().manual_seed(seed), std=std)
    with CheckpointWriter(directory) as writer:
        for name, tensor in named_tensors(model, torch.float32):
            writer.add(name, tensor)
        for file in blank.iterdir():
            writer.copy_file(file)
        writer.finish()
    shutil.rmtree(blank)
    return directory


@pytest.fixture(scope="session")
def tiny_chatglm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as ChatGLM-6B's, with random weights."""
    root = tmp_path_factory.mktemp("chatglm")
    blank = root / "blank"
    blank.mkdir()
    path = write_chatglm6b(blank, early=False) / "config.json"
    shape = {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "inner_hidden_size": 128}
    shape |= {"layernorm_epsilon": 1e-5, "max_sequence_length": 256}
    path.write_text(json.dumps(json.loads(path.read_text()) | shape))
    return _fill(blank, root / "tiny", 0, 0.2)


@pytest.fixture(scope="session")
def tiny_model(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with random weights."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def write_lines() -> Callable[..., Path]:
    """`write_lines(path, record, ...)` writes a JSONL; texts are written as they are."""

    def write(path: Path, *records: object) -> Path:
        lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def two_nodes(ray_cluster: Any) -> str:
    """The address of a Ray cluster on this machine: two nodes, one core each. They find jobs of dist and engine."""
    return ray_cluster.address


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The cluster of `two_nodes`, for tests that add nodes to it and take them away again."""
    import ray
    from ray.cluster_utils import Cluster

    # Beside other processes a node may answer late, and they may take the memory: no reason to give it up, or to kill
    # what runs on it. A node that has ended refuses connections, which Ray notices as soon as without this.
    settings = {"health_check_timeout_ms": 120_000, "memory_monitor_refresh_ms": 0}
    nodes = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        here = Path(__file__).parent
        sources = Path(warpbus.__file__).parents[1]  # those that are tested, wherever another Warpbus is installed
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here / "dist", here / "engine", sources))))
        for head in ({"_system_config": settings}, {}):
            # Without the processes that collect logs and start machines: they compute until the tests end.
            nodes.add_node(
                num_cpus=1,
                object_store_memory=80 * 2**20,
                include_dashboard=False,
                include_log_monitor=False,
                no_monitor=True,
                **head,
            )
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models and without a token, for this process and for those that it starts.

    Compiled kernels are there: to compile them again takes ten seconds.
    """
    kernels = cache_directory()
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / ".cache" / "warpbus").mkdir(parents=True)
    (tmp_path / ".cache" / "warpbus" / "kernels").symlink_to(kernels)
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "MODELSCOPE_API_TOKEN", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    # The library has read the environment when it was imported.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf/token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Files that are interrupted are smaller here than the library's chunks, and need not rest before they go on.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    return tmp_path


@pytest.fixture
def set_endpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`set_endpoint(address)` does what HF_ENDPOINT does."""

    def set_address(address: str) -> None:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return set_address


@pytest.fixture
def hub(home: Path, set_endpoint: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub that has no models yet, in the place of Hugging Face and of ModelScope."""
    with StandIn() as standin:
        set_endpoint(standin.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", standin.url)
        yield standin
