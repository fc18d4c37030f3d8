"""The states that a run on the CPU saves: the same files with them and without, whatever becomes of them."""

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantization_runs import FOUR_LAYERS, Runs, Undisturbed, command, fingerprint
from quantization_threads import together

from warpbus.dist import SHARES, Group
from warpbus.formats import Checkpoint, FinishedParts
from warpbus.models import ModelConfig, read_config
from warpbus.models.latent_spec import IndexerSpec, LatentAttentionSpec
from warpbus.models.layer_spec import LayerSpec, MLPSpec, NormSpec
from warpbus.quantization import saved_states
from warpbus.quantization.saved_states import SavedStates, saved_layer
from warpbus.quantization.states import States


def saved(output: Path) -> FinishedParts:
    return FinishedParts(FinishedParts(output).directory / "states")


def killed(runs: Runs, four_layers: Path, texts: Path, folder: Path) -> Path:
    """The output of a run that was killed when states were saved, whole, and a layer was missing."""
    for attempt in range(30):
        output = folder / str(attempt) / "out"
        output.parent.mkdir()
        when = saved(output).facts_file(f"states-00001-{SHARES - 1}")
        run = runs.start(*command(four_layers, output, texts), when=when)
        layers = [part for part in FinishedParts(output).parts() if part.startswith("layer-")]
        parts = saved(output).parts()
        if run.code == -signal.SIGKILL and len(layers) < FOUR_LAYERS and len(parts) == SHARES:
            return output
    raise AssertionError("every run was over before it was killed, or was killed while it saved states")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x40
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [None, cut, flip, Path.unlink], ids=["none", "cut", "flipped", "missing"])
def test_damaged_states_are_computed_again(
    runs: Runs,
    four_layers: Path,
    texts: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    damage: Callable[[Path], None] | None,
) -> None:
    output = killed(runs, four_layers, texts, tmp_path)
    if damage is not None:
        parts = saved(output)
        damage(parts.tensors_file(parts.parts()[3]))
    run = runs.start(*command(four_layers, output, texts))
    assert run.code == 0, run.said
    assert fingerprint(output) == undisturbed.fingerprint
    assert not output.with_name("out.quantization").exists()


def test_a_resumed_run_goes_on_from_the_states(
    runs: Runs, four_layers: Path, texts: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Others, with their checksum, give another model."""
    output = killed(runs, four_layers, texts, tmp_path)
    parts = saved(output)
    for part in parts.parts():
        parts.write(part, {name: entry.read() * 3 for name, entry in parts.read(part).items()})
    run = runs.start(*command(four_layers, output, texts))
    assert run.code == 0, run.said
    assert fingerprint(output) != undisturbed


def test_a_disk_without_room_for_the_states(
    runs: Runs, four_layers: Path, texts: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """They are larger than the parts of the model: the run ends without them."""
    output = killed(runs, four_layers, texts, tmp_path)
    states = max(file.stat().st_size for file in saved(output).directory.glob("*.safetensors"))
    parts = max(file.stat().st_size for file in FinishedParts(output).directory.glob("*.safetensors"))
    assert parts < states - 1000
    fresh = tmp_path / "fresh"
    run = runs.start(*command(four_layers, fresh, texts), largest_file=states - 1000)
    assert run.code == 0, run.said
    assert fingerprint(fresh) == undisturbed.fingerprint


def states(group: Group, seed: int) -> list[States]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(2 * SHARES):
        x, original = torch.randn(2, 1, 3, 8, generator=generator)
        share = number // 2
        if share in group.shares():
            ids, zeros = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3)
            made.append(States(share, ids, x, original if number % 2 else None, None, ids, (zeros, zeros)))
    return made


def values(found: list[States]) -> list[tuple[list[float], list[float] | None]]:
    return [(each.x.tolist(), None if each.original is None else each.original.tolist()) for each in found]


def loaded(output: Path, config: ModelConfig, group: Group, finished: int) -> tuple[int, list[States]]:
    mine = states(group, 0)
    return SavedStates(FinishedParts(output), mine, config, group, reserved=0).load(finished), mine


@pytest.fixture
def config(four_layers: Path) -> ModelConfig:
    return read_config(Checkpoint(four_layers))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 3), (8, 2)])
def test_any_number_of_processes_reads_what_any_number_has_saved(
    tmp_path: Path, config: ModelConfig, before: int, after: int
) -> None:
    def save(group: Group) -> None:
        kept = SavedStates(FinishedParts(tmp_path / "out"), states(group, 5), config, group, reserved=0)
        kept.save(2)
        kept.save(3)

    together(before, save)
    assert [part[:12] for part in saved(tmp_path / "out").parts()] == ["states-00003"] * SHARES  # those before are gone
    found = together(after, lambda group: loaded(tmp_path / "out", config, group, 4))
    assert [index for index, _ in found] == [3] * after
    assert values([each for _, own in found for each in own]) == values(states(Group(0, 1, torch.device("cpu")), 5))
    assert [saved_layer(FinishedParts(tmp_path / "out"), finished) for finished in (4, 3, 2)] == [3, 3, 0]
    # A layer before them has to be made again: from the beginning.
    assert {index for index, _ in together(after, lambda group: loaded(tmp_path / "out", config, group, 2))} == {0}
    # One process cannot read its own: none uses them.
    cut(saved(tmp_path / "out").tensors_file("states-00003-7"))
    found = together(after, lambda group: loaded(tmp_path / "out", config, group, 4))
    assert [index for index, _ in found] == [0] * after
    assert values([each for _, own in found for each in own]) == values(states(Group(0, 1, torch.device("cpu")), 0))


def test_states_of_another_shape_are_not_read(tmp_path: Path, config: ModelConfig) -> None:
    alone, parts = Group(0, 1, torch.device("cpu")), saved(tmp_path / "out")
    SavedStates(FinishedParts(tmp_path / "out"), states(alone, 5), config, alone, reserved=0).save(1)
    assert loaded(tmp_path / "out", config, alone, 1)[0] == 1
    parts.write(
        "states-00001-0", {name: entry.read()[:, 1:].clone() for name, entry in parts.read("states-00001-0").items()}
    )
    assert loaded(tmp_path / "out", config, alone, 1)[0] == 0


def test_when_states_are_saved(tmp_path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where they cost much of the time, where another layer's selection is needed too, and where no room is."""
    alone = Group(0, 1, torch.device("cpu"))
    parts = FinishedParts(tmp_path / "out")
    attention = LatentAttentionSpec(3, query_rank=16, kv_rank=20, nope_dim=8, rope_dim=4, value_dim=8, norm_eps=1e-6)
    sparse = replace(
        config,
        layers=tuple(
            LayerSpec(32, replace(attention, indexer=IndexerSpec(4, 8, 3, shared)), MLPSpec(48), NormSpec(1e-5))
            for shared in (False, True)
        ),
    )

    def due(index: int = 1, *, of: ModelConfig = config, reserved: int = 0, waited: float = 1e6) -> bool:
        kept = SavedStates(parts, states(alone, 1), of, alone, reserved=reserved)
        now = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(saved_states.time, "monotonic", lambda: now + waited)
            return kept.is_due(index)

    assert due()
    assert not due(waited=0)
    assert not due(reserved=2**60)
    assert due(0, of=sparse)
    assert not due(1, of=sparse)
    monkeypatch.setattr(saved_states, "MOST_BYTES", 100)
    assert not due()


def test_nothing_is_saved_from_a_gpu_and_nobody_waits_for_it(tmp_path: Path, config: ModelConfig) -> None:
    """The processes of this group are not there: an exchange would fail."""
    kept = SavedStates(FinishedParts(tmp_path / "out"), [], config, Group(0, 2, torch.device("cuda")), reserved=0)
    assert kept.load(3) == 0
    assert not kept.is_due(1)
    kept.remove()
    assert list(tmp_path.iterdir()) == []
