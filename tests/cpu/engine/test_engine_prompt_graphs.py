"""Steps with prompts in graphs between the attention of layers: how many rows, and what padding rows do."""

import pytest
import torch
from engine_models import FAMILIES, SMALL

from warpbus.engine import prompt_graphs
from warpbus.engine.attention import PrefillAttention
from warpbus.engine.joined_spans import ChunkSpan
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.positions import RopeAngles
from warpbus.engine.prompt_graphs import _BetweenGraphs, _PaddedAttention, graph_rows, prompt_bucket
from warpbus.models import Decoder, random_model

CPU = torch.device("cpu")
ROWS = 40


def test_buckets():
    assert [prompt_bucket(rows) for rows in (1, 32, 33, 65, 257, 1024, 1025, 2049, 4096)] == [
        *(32, 32, 64, 128, 384, 1024, 1280, 2560, 4096),
    ]
    assert all(rows <= prompt_bucket(rows) <= 1.5 * rows for rows in range(256, 4097))


def test_only_a_gpu_has_them():
    assert graph_rows(random_model(SMALL, None, CPU, torch.float32), CPU) == 0


def context_of(model: Decoder) -> PrefillAttention:
    """For one prompt of `ROWS` tokens, in a cache of its own."""
    cache = KVCache(model.config, 3, device=CPU, dtype=torch.float32)
    cache.commit(3)
    positions = torch.arange(ROWS, dtype=torch.int32)
    angles = RopeAngles(model.rotary.table(64, CPU), positions)
    slots = positions.long() + 32  # block 0 is the null block
    return PrefillAttention(model.config, angles, cache, slots, [ChunkSpan(0, ROWS, 0, None)])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padding_rows_change_nothing(family):
    model = random_model(FAMILIES[family], None, CPU, torch.float32)
    x = torch.randn(1, ROWS + 24, model.config.hidden_size)
    expected = model.transform(x[:, :ROWS], None, context_of(model))
    found = model.transform(x, None, _PaddedAttention(context_of(model), ROWS, model.config))
    torch.testing.assert_close(found[:, :ROWS], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_graph_ends_where_a_layer_attends(family, monkeypatch):
    """The attention of each layer is kept with what it gets, and where its results go."""
    monkeypatch.setattr(prompt_graphs, "alias", lambda tensor: tensor)  # no graphs keep the memory here
    model = random_model(FAMILIES[family], None, CPU, torch.float32)
    made: list[str] = []

    class Pieces:
        def begin(self):
            made.append("begin")

        def end(self):
            made.append("end")

    between = _BetweenGraphs(Pieces(), model.config)
    model.transform(torch.randn(1, ROWS + 7, model.config.hidden_size), None, between)
    layers = model.config.num_layers
    assert made == ["end", "begin"] * layers
    assert [each.layer for each in between.attentions] == list(range(layers))
    context = context_of(model)
    for each in between.attentions:
        for projected in each.projected:
            projected.normal_()  # made of the results of layers below, that nothing had written
        each.results.fill_(float("nan"))
        each.run(context, ROWS)
        assert each.results[:, :ROWS].isfinite().all()
        assert (each.results[:, ROWS:] == 0).all()
