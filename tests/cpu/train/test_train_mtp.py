"""The layer of multi-token prediction in training: its loss, what is written, and how often its drafts are accepted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from warpbus.demo import recipe
from warpbus.engine import Engine
from warpbus.errors import CheckpointError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, load_model, read_config
from warpbus.models.families import family_of
from warpbus.models.layers import CausalAttention
from warpbus.models.templates import load_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.train import TrainingSettings, train
from warpbus.train.dataset import IGNORED
from warpbus.train.methods import FullMethod, later_targets

WriteLines = Callable[..., Path]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_nextn_predict_layers": 1,
}
FULL = TrainingSettings(
    steps=6, length=24, rows_per_step=2, rows_at_once=1, learning_rate=5e-3, warmup=2, save_every=2, mtp_weight=0.3
)


def method(weight: float) -> FullMethod:
    values = recipe.config(64, "poet-moe-small") | SHAPE
    family = family_of(values)
    assert family is not None
    model = Decoder(family.config(values))
    model.initialize(torch.Generator().manual_seed(0), std=0.2)
    return FullMethod(model, weight)


def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, targets, positions and documents of two rows: one document, and two with padding after them."""
    tokens = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 12, [0] * 5 + [1] * 4 + [-1] * 3])
    positions = torch.tensor([[*range(12)], [*range(5), *range(4), *range(3)]])
    targets = torch.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], IGNORED)
    targets = F.pad(targets, (0, 1), value=IGNORED)
    targets[1, 9:] = IGNORED
    targets[0, :3] = IGNORED  # a question
    return tokens, targets, positions, documents


def test_targets_are_two_tokens_ahead_in_the_same_document() -> None:
    tokens, targets, _, documents = rows()
    later = later_targets(targets, documents)
    expected = torch.full_like(tokens, IGNORED)
    expected[0, 2:10] = tokens[0, 4:]
    expected[1, :3] = tokens[1, 2:5]
    expected[1, 5:7] = tokens[1, 7:9]
    assert torch.equal(later, expected)


def test_the_loss_is_that_of_each_document_alone() -> None:
    """The weighted sum of two losses, and its gradients: as document by document, with torch's loss in float64."""
    made = method(0.3).double().train()
    made(*rows()).backward()
    found = {name: parameter.grad.clone() for name, parameter in made.trained().items() if parameter.grad is not None}
    sums = made.take_predicted()
    assert made.take_predicted() is None
    made.zero_grad()
    tokens, targets, _, documents = rows()
    main, predicted, count = torch.zeros(()), torch.zeros(()), 0
    for row, number in ((0, 0), (1, 0), (1, 1)):
        own = documents[row] == number
        text, wanted = tokens[row, own][None], targets[row, own]
        hidden = made.model.hidden(text, None, CausalAttention())
        main = main + F.cross_entropy(made.model.logits(hidden)[0], wanted, ignore_index=IGNORED, reduction="sum")
        drafts = made.model.logits(made.model.predict(text[:, 1:], hidden[:, :-1]))[0]
        predicted = predicted + F.cross_entropy(drafts, wanted[1:], ignore_index=IGNORED, reduction="sum")
        count += int((wanted[1:] != IGNORED).sum())
    (main + 0.3 * predicted).backward()
    assert sums is not None
    assert sums.tolist() == pytest.approx([predicted.item(), count])
    for name, parameter in made.trained().items():
        if parameter.grad is None:
            assert name not in found or not found[name].any()
            continue
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert found["layers.2.projection.weight"].any()


def test_validation_does_not_count_it() -> None:
    plain, weighted = method(0.0), method(0.3)
    with torch.no_grad():
        assert torch.equal(plain.eval()(*rows()), weighted.eval()(*rows()))
    assert weighted.take_predicted() is None


@pytest.fixture(scope="module")
def blank(blank_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a mixture of experts without weights that announces the layer."""
    directory = tmp_path_factory.mktemp("mtp")
    for file in blank_model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    size = json.loads((blank_model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config = recipe.config(size, "poet-moe-small") | SHAPE
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture
def data(tmp_path: Path, write_lines: WriteLines) -> Path:
    verses = ("床前明月光", "疑是地上霜", "举头望明月", "低头思故乡", "光")

    def conversation(index: int) -> dict[str, object]:
        turns = [{"role": "user", "content": f"写诗{index}"}, {"role": "assistant", "content": verses[index % 5]}]
        return {"messages": turns}

    return write_lines(tmp_path / "data.jsonl", *map(conversation, range(15)))


def run(model: Path, output: Path, data: Path, settings: TrainingSettings = FULL, **given: Any) -> dict[str, Any]:
    return train(model, output, data=data, settings=settings, device="cpu", **given)


def test_the_layer_is_written_and_its_drafts_are_accepted(blank: Path, data: Path, tmp_path: Path) -> None:
    """A model that has learnt 15 poems by heart drafts their tokens."""
    settings = replace(FULL, steps=150, rows_per_step=6, rows_at_once=6, learning_rate=1e-2, save_every=1000)
    summary = run(blank, tmp_path / "model", data, settings)
    log = json.loads((tmp_path / "model" / "training-log.json").read_text(encoding="utf-8"))
    assert log[0]["mtp_loss"] > 4 > 1 > log[-1]["mtp_loss"] > 0
    assert summary["mtp_loss"] == pytest.approx(sum(entry["mtp_loss"] for entry in log[-50:]) / 50)
    checkpoint = Checkpoint(tmp_path / "model")
    assert read_config(checkpoint, mtp="stored").mtp is not None
    model = load_model(checkpoint, device="cpu", dtype=torch.float32, mtp=True)
    template = load_template(checkpoint.directory, checkpoint.config, load_tokenizer(checkpoint.directory))
    prompts = [template.render([{"role": "user", "content": f"写诗{index}"}]) for index in range(3)]
    drafting = Engine(model, speculation="mtp:1")
    assert drafting.decode(prompts, 6) == Engine(model).decode(prompts, 6)
    stats = drafting.stats()
    assert stats.accepted > 0.6 * stats.drafted > 0


def test_resumed_and_shared_runs_have_the_same_weights(blank: Path, data: Path, tmp_path: Path) -> None:
    run(blank, tmp_path / "once", data)
    run(blank, tmp_path / "two", data, processes=2)
    once, two = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "two"))
    assert "model.layers.2.eh_proj.weight" in once
    assert once.keys() == two.keys()
    for name, tensor in once.items():
        torch.testing.assert_close(tensor.float(), two[name].float(), rtol=2e-2, atol=2e-3, msg=name)
    further = run(tmp_path / "once", tmp_path / "further", data, replace(FULL, steps=1))
    assert further["mtp_loss"] > 0


def test_models_that_cannot(blank: Path, data: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in blank.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    (plain / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}), encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"--mtp-weight 0\.3: config\.json of .*plain announces no layer of multi-token"
    ):
        run(plain, tmp_path / "output", data)
    run(blank, tmp_path / "without", data, replace(FULL, steps=1, mtp_weight=0.0))
    written = load_file(tmp_path / "without" / "model.safetensors")
    assert not [name for name in written if name.startswith("model.layers.2.")]
    save_file(written, tmp_path / "without" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..*: missing, although config\.json announces"):
        run(tmp_path / "without", tmp_path / "output", data)
    with pytest.raises(UsageError, match="mtp_weight: the layer of multi-token prediction cannot be sharded by fsdp"):
        replace(FULL, sharding="fsdp")
    with pytest.raises(UsageError, match="mtp_weight: only for method full, not lora"):
        TrainingSettings.of("lora", mtp_weight=0.3)
    with pytest.raises(UsageError, match=r"mtp_weight is -1\.0: expected a number of at least 0"):
        TrainingSettings.of("full", mtp_weight=-1.0)
