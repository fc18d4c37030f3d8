"""What is read ahead is what is in the checkpoint, and is not kept."""

import gc
import weakref

import pytest
import torch
from quantization_models import write_model

from warpbus.formats import Checkpoint
from warpbus.models import load_layer, tensor_map
from warpbus.qtensor import Scheme
from warpbus.quantization.preflight import Plan, prepare
from warpbus.quantization.sources import Reading

CPU = torch.device("cpu")
LAYERS = 3


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    model = write_model(tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=LAYERS)
    return prepare(model, None, Scheme.parse("w4a16-g32"))


def test_the_embedding_and_all_layers_in_their_order(plan: Plan) -> None:
    reading, checkpoint = Reading(plan, CPU), Checkpoint(plan.checkpoint.directory)
    assert torch.equal(reading.table(), checkpoint.tensor(tensor_map(plan.config)["embedding.weight"][0]))
    layers = list(reading.layers())
    assert len(layers) == LAYERS
    for index, layer in enumerate(layers):
        expected = load_layer(checkpoint, plan.config, index, device=CPU, dtype=torch.float32).state_dict()
        found = layer.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_layer_is_gone_once_the_next_one_is_there(plan: Plan) -> None:
    """The first one, too, which was asked for long before."""
    layers = Reading(plan, CPU).layers()
    layer = next(layers)
    before = weakref.ref(layer.attention.qkv.weight)
    layer = next(layers)
    gc.collect()
    assert before() is None
    assert layer is not None
    layers.close()


def test_what_cannot_be_read_is_reported_when_its_turn_comes(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("warpbus.quantization.sources.LayerLoader.load", broken)
    reading = Reading(plan, CPU)
    assert len(reading.table()) == plan.config.vocab_size
    with pytest.raises(OSError, match="the disk is gone"):
        next(reading.layers())


def test_a_table_is_not_kept(plan: Plan) -> None:
    reading = Reading(plan, CPU)
    table = weakref.ref(reading.table())
    gc.collect()
    assert table() is None
    assert sum(1 for _ in reading.layers()) == LAYERS
