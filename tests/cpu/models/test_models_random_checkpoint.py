from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits

from warpbus.errors import StorageError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import SHAPES, LatentAttentionSpec, MLPSpec, MoESpec, load_model, read_config, tensor_map
from warpbus.models.layers import RMSNorm
from warpbus.models.random_checkpoint import write_random_checkpoint

SIZES = {"vocab_size": 300, "hidden_size": 128, "num_layers": 2, "num_heads": 4, "head_dim": 32, "ffn_size": 256}


def tiny(name, **changes):
    shape = SHAPES[name]
    rope = replace(shape.rope, rotary_dim=32 // (shape.attention.head_dim // shape.rope.rotary_dim))
    return with_traits(shape, **SIZES, num_kv_heads=2, rope=rope, stop_ids=(2,), **changes)


@pytest.mark.parametrize("name", ["chatglm2-6b", "llama-3-8b"])
@torch.no_grad()
def test_the_shape_is_read_back_and_activations_are_moderate(tmp_path, name):
    shape = tiny(name)
    assert write_random_checkpoint(tmp_path / "model", shape, device="cpu") == shape
    checkpoint = Checkpoint(tmp_path / "model")
    assert read_config(checkpoint) == shape
    assert checkpoint.total_bytes == 2 * shape.num_parameters
    assert set(checkpoint.names()) == {each for names in tensor_map(shape).values() for each in names}
    model = load_model(checkpoint, device="cpu", dtype=torch.float32)
    logits = model(torch.arange(200)[None] % shape.vocab_size)
    assert 0.2 < logits.std() < 5
    assert logits.abs().max() < 100


@pytest.mark.parametrize("name", ["glm-4.5-air", "glm-4.7-flash"])
@torch.no_grad()
def test_layers_of_multi_token_prediction(tmp_path, name):
    shape = narrowed(SHAPES[name]).with_mtp().resized(num_layers=2)
    few = {"experts": 8, "top_k": 2}
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, **few)))
        if isinstance(layer.mlp, MoESpec)
        else layer
        for layer in shape.all_layers
    )
    attention = replace(shape.rope, rotary_dim=4) if name == "glm-4.5-air" else shape.rope
    shape = replace(shape, layers=layers[:-1], mtp=layers[-1], rope=attention)
    assert write_random_checkpoint(tmp_path / "model", shape, device="cpu") == shape
    checkpoint = Checkpoint(tmp_path / "model")
    assert read_config(checkpoint, mtp="required") == shape
    assert read_config(checkpoint) == replace(shape, mtp=None)
    model = load_model(checkpoint, device="cpu", dtype=torch.float32, mtp=True)
    tokens = torch.arange(200)[None] % shape.vocab_size
    drafted = model.logits(model.predict(tokens[:, 1:], model.hidden(tokens)[:, :-1]))
    assert 0.1 < drafted.std() < 5


def narrowed(shape):
    """The same shape with small matrices."""
    if not shape.has_experts:
        return with_traits(shape, hidden_size=8, num_heads=2, num_kv_heads=2, ffn_size=8)
    small = MLPSpec(8)
    shape = replace(shape.resized(hidden_size=8, num_heads=2, ffn_size=8), vocab_size=300, stop_ids=(2,))
    mixtures = {
        layer.mlp: replace(layer.mlp, expert=small, shared=layer.mlp.shared and small)
        for layer in shape.layers
        if isinstance(layer.mlp, MoESpec)
    }
    grouped = {} if isinstance(shape.attention, LatentAttentionSpec) else {"num_kv_heads": 2}
    attention = replace(shape.attention, **grouped)
    layers = (replace(layer, attention=attention, mlp=mixtures.get(layer.mlp, layer.mlp)) for layer in shape.layers)
    return replace(shape, layers=tuple(layers))


@pytest.mark.parametrize("name", SHAPES)
def test_every_known_shape_has_a_config(tmp_path, name, monkeypatch):
    """Its config.json says the shape, whatever number of layers; the sizes are those of a tiny model here."""
    narrow = narrowed(SHAPES[name])
    if narrow.rope.two_dimensional:  # its config.json has no size of a head
        narrow = with_traits(narrow, head_dim=4, rope=replace(narrow.rope, rotary_dim=2))
    monkeypatch.setitem(SHAPES, name, narrow)
    layers = 2 if narrow.has_experts else 1  # a dense one and one of experts, if there are both
    written = write_random_checkpoint(tmp_path / "model", name, torch.bfloat16, layers=layers, device="cpu")
    assert written == narrow.resized(num_layers=layers)
    checkpoint = Checkpoint(tmp_path / "model")
    assert read_config(checkpoint) == written
    assert checkpoint.dtype(checkpoint.names()[0]) == torch.bfloat16


@torch.no_grad()
def test_inputs_of_the_layers_are_correlated_and_their_channels_differ(tmp_path):
    shape = with_traits(tiny("chatglm2-6b"), hidden_size=256)
    write_random_checkpoint(tmp_path / "model", shape, torch.float32, device="cpu")
    model = load_model(Checkpoint(tmp_path / "model"), device="cpu", dtype=torch.float32)
    norms = [module.weight for module in model.modules() if isinstance(module, RMSNorm)]
    low, high = torch.cat(norms).quantile(torch.tensor([0.025, 0.975]))
    assert 7 < high / low < 14
    assert torch.cat(norms).square().mean() == pytest.approx(1, rel=0.2)
    seen = []
    model.layers[1].mlp.gate_up.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for start in range(8):
        model(torch.randint(shape.vocab_size, (1, 256), generator=torch.Generator().manual_seed(start)))
    x = torch.cat([each.flatten(0, 1) for each in seen])
    values = torch.linalg.eigvalsh(x.T @ x / len(x))
    white = torch.linalg.eigvalsh(torch.cov(torch.randn(256, len(x), generator=torch.Generator().manual_seed(0))))
    # The largest quarter of the directions has most of the variance; of white inputs it has little more than a quarter.
    assert values[-64:].sum() / values.sum() > 0.7 > 0.5 > white[-64:].sum() / white.sum()


def test_a_seed_draws_a_checkpoint(tmp_path):
    tensors = []
    for number, seed in enumerate((1, 1, 2)):
        write_random_checkpoint(tmp_path / str(number), tiny("llama-3-8b"), seed=seed, device="cpu")
        tensors.append(Checkpoint(tmp_path / str(number)).tensor("model.layers.1.mlp.down_proj.weight"))
    assert torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[0], tensors[2])


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UsageError, match="choose among chatglm-6b"):
        write_random_checkpoint(tmp_path / "model", "gpt-2")
    with pytest.raises(UsageError, match="layers is 0: it has to be at least 1"):
        write_random_checkpoint(tmp_path / "model", "chatglm2-6b", layers=0)
    with pytest.raises(
        UsageError, match="family glm4: choose among chatglm, chatglm2, glm4_moe, glm4_moe_lite, llama, qwen3"
    ):
        write_random_checkpoint(tmp_path / "model", replace(tiny("chatglm2-6b"), family="glm4"), device="cpu")
    with pytest.raises(UsageError, match=r"config\.json of llama cannot say"):
        write_random_checkpoint(tmp_path / "model", tiny("llama-3-8b", qk_norm=True), device="cpu")
    write_random_checkpoint(tmp_path / "model", tiny("llama-3-8b"), device="cpu")
    with pytest.raises(StorageError):
        write_random_checkpoint(tmp_path / "model", tiny("llama-3-8b"), device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
