"""Expert parallelism: processes with whole experts of their own compute what one process does."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import plain_tensors, write_files, write_quantized
from thread_groups import CPU, GLM, GLM4_MOE, GLM4_MOE_LITE, QWEN3_MOE, TOKENS, load, same_logits, together
from torch import Tensor

from warpbus.dist import Group, Send, launch
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.models import SHAPES, Decoder, load_model, random_model, read_config
from warpbus.models.layer_spec import LayerSpec
from warpbus.models.layers import MoE, QuantizedLinear
from warpbus.models.layers.cpu_experts import CpuStackedExperts
from warpbus.models.layers.parallel import Parallel
from warpbus.models.parallel import Part
from warpbus.qtensor import Scheme

W4 = Scheme.parse("w4a16-g32")
NARROW = QWEN3_MOE | {"moe_intermediate_size": 64, "decoder_sparse_step": 1}  # too narrow to be sharded three times


def experts_of(models: list[Decoder]) -> list[MoE]:
    """The experts of the last layer of each part."""
    return [model.layers[-1].mlp for model in models]


@pytest.mark.parametrize(
    ("values", "form", "scheme", "world"),
    [
        (GLM4_MOE, "compressed-tensors", "w4a16-g32", 2),
        (GLM4_MOE, "compressed-tensors", "w3a16-g128", 4),
        (GLM4_MOE, "awq", "w4a16-g64-asym", 3),
        (GLM4_MOE_LITE, "compressed-tensors", "w2a16-g32-asym", 4),
        (QWEN3_MOE, "gptq", "w8a16-g128", 3),
        (NARROW, "gptq", "w4a16-g32", 4),
    ],
)
def test_logits_of_quantized_models(tmp_path: Path, values: dict[str, Any], form: str, scheme: str, world: int) -> None:
    directory, _ = write_quantized(tmp_path / "model", values, form, scheme)
    models = same_logits(directory, world, expert_parallel=True)
    assert all(isinstance(part.output, Parallel) for part in experts_of(models))
    numbers = [number for part in experts_of(models) for number in part.numbers]
    assert numbers == list(range(values.get("n_routed_experts", 4)))
    sizes = {len(part.numbers) for part in experts_of(models)}
    assert max(sizes) - min(sizes) <= 1
    for part in experts_of(models):
        assert list(part.experts) == [str(number) for number in part.numbers]
        expert = part.experts[str(part.numbers[0])]
        assert isinstance(expert.down, QuantizedLinear)
        assert expert.down.weight.shape[1] == values["moe_intermediate_size"]


@pytest.mark.parametrize("values", [GLM4_MOE, QWEN3_MOE, GLM4_MOE_LITE], ids=lambda values: values["model_type"])
def test_logits_of_plain_models(tmp_path: Path, values: dict[str, Any]) -> None:
    directory = write_files(tmp_path / "model", values, plain_tensors(values, torch.float32))
    for model in same_logits(directory, 3, expert_parallel=True):
        assert model.config.expert_parallel
        assert not read_config(Checkpoint(directory)).expert_parallel


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8"])
def test_experts_keep_their_activation_scales(tmp_path: Path, scheme: str) -> None:
    """Those of whole experts are the same as in one process; only those of the sharded layers differ."""
    directory, _ = write_quantized(tmp_path / "model", GLM4_MOE, "compressed-tensors", scheme)
    x = torch.randn(7, 128)
    whole = load(directory).layers[-1].mlp
    for part in experts_of(together(2, lambda group: load(directory, group, expert_parallel=True))):
        for number in part.numbers:
            assert torch.equal(part.experts[str(number)](x), whole.experts[str(number)](x))
    same_logits(directory, 2, 0.2, expert_parallel=True)


def test_experts_of_different_schemes(tmp_path: Path) -> None:
    schemes = {"experts.0.": "w8a16-g32", "experts.3.": "w4a16-g64-asym", "": "w4a16-g32"}
    directory, _ = write_quantized(tmp_path / "model", GLM4_MOE, "compressed-tensors", schemes)
    first, second = experts_of(same_logits(directory, 2, expert_parallel=True))
    assert str(first.experts["0"].down.weight.scheme) == "w8a16-g32"
    assert str(second.experts["3"].down.weight.scheme) == "w4a16-g64-asym"


@pytest.mark.parametrize("values", [GLM4_MOE, GLM4_MOE_LITE], ids=lambda values: values["model_type"])
@torch.no_grad()
def test_multi_token_prediction(tmp_path: Path, values: dict[str, Any]) -> None:
    values = values | {"num_nextn_predict_layers": 1}
    directory = write_files(tmp_path / "model", values, plain_tensors(values, torch.float32))
    whole = load(directory, mtp=True)
    expected = whole.logits(whole.predict(TOKENS[:, 1:], whole.hidden(TOKENS)[:, :-1]))

    def predicted(group: Group) -> tuple[Decoder, Tensor]:
        part = load(directory, group, mtp=True, expert_parallel=True)
        return part, part.logits(part.predict(TOKENS[:, 1:], part.hidden(TOKENS)[:, :-1]))

    found = together(2, predicted)
    assert [len(part.numbers) for part in experts_of([model for model, _ in found])] == [2, 3]
    for _, logits in found:
        assert torch.allclose(logits, expected, rtol=0, atol=1e-5)


def test_each_process_reads_only_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = write_quantized(tmp_path / "model", GLM4_MOE, "compressed-tensors", "w4a16-g32")
    read: Counter[str] = Counter()
    tensor = Checkpoint.tensor

    def noting(checkpoint: Checkpoint, name: str, **options: Any) -> Tensor:
        read[name] += 1
        return tensor(checkpoint, name, **options)

    monkeypatch.setattr(Checkpoint, "tensor", noting)
    for rank, own in ((0, {"0", "1"}), (1, {"2", "3", "4"})):
        read.clear()
        load(directory, Group(rank, 2, CPU), expert_parallel=True)
        assert {name.split(".experts.")[1].split(".")[0] for name in read if ".experts." in name} == own


def test_experts_that_the_cpu_computes_together(tmp_path: Path) -> None:
    """The kernel of a CPU skips the experts of other processes, and the sum is that of one process."""
    config = read_config(Checkpoint(write_files(tmp_path / "m", GLM4_MOE, plain_tensors(GLM4_MOE))))
    whole = random_model(config, W4, "cpu", torch.float32, int8_activations=True).layers[-1].mlp
    x = torch.randn(2, 11, 128)
    with torch.inference_mode():
        expected = whole(x, residual=x)
        total = x + whole.shared(x)
    for rank in range(2):
        part = Part(config, rank, 2, expert_parallel=True)
        mine = MoE(part.config.layers[-1])
        mine.router, mine.shared = whole.router, None
        for number in mine.numbers:
            one = whole.experts
            assert isinstance(one, CpuStackedExperts)
            for name in ("gate_up", "down"):
                linear = QuantizedLinear(
                    one.matrices(name).expert(number).unpack(), dtype=torch.float32, int8_activations=True
                )
                mine.experts[str(number)].add_module(name, linear)
        one_by_one = mine(x)
        mine.stack()
        assert isinstance(mine.experts, CpuStackedExperts)
        with torch.inference_mode():
            together_ = mine(x)
        torch.testing.assert_close(together_, one_by_one.detach(), rtol=1e-4, atol=1e-4)
        total = total + together_
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_experts_as_the_kernels_of_a_gpu_compute_them(tmp_path: Path) -> None:
    """By the references of the kernels: experts of other processes have no slot, and the sum is that of one process."""
    config = read_config(Checkpoint(write_files(tmp_path / "m", GLM4_MOE, plain_tensors(GLM4_MOE))))
    spec, draw = config.layers[-1], torch.Generator().manual_seed(3)
    names = [matrix.name for matrix in spec.matrices if matrix.name.startswith("mlp.")]
    drawn = {}
    for name in names:
        weight = 0.1 * torch.randn(spec.matrix(name).shape, generator=draw)
        drawn[name] = round_to_nearest(weight, W4, scale_dtype=torch.float16)

    def layer(part: LayerSpec) -> MoE:
        made = MoE(part)
        made.router.weight.copy_(torch.randn(5, 128, generator=torch.Generator().manual_seed(4)))
        made.router.bias.zero_()
        for matrix in part.matrices:
            if matrix.name.startswith("mlp.") and matrix.shape == spec.matrix(matrix.name).shape:
                parent, _, name = matrix.name.removeprefix("mlp.").rpartition(".")
                weight = pack(drawn[matrix.name], torch.float16)
                made.get_submodule(parent).add_module(name, QuantizedLinear(weight, dtype=torch.float16))
        made.stack()
        assert made.stacked
        made.router.weight.data = made.router.weight.half()
        return made

    whole = layer(spec)
    parts = [layer(replace(spec, mlp=replace(spec.mlp, own=own, shared=None))) for own in (range(2), range(2, 5))]
    assert [part.experts.slots.tolist() for part in parts] == [[0, 1, -1, -1, -1], [-1, -1, 0, 1, 2]]
    assert all(part.experts.counts is None for part in parts)
    x = torch.randn(1, 7, 128, generator=draw).half()
    total = whole.shared(x).float() + sum(part._by_kernels(part.experts, x, None, None).float() for part in parts)
    expected = whole._by_kernels(whole.experts, x, None, None).float()
    assert (total - expected).norm() <= 4 * torch.finfo(torch.float16).eps * expected.norm()
    # Expert 3 is the second one of its process.
    torch.testing.assert_close(parts[1]._expert(3, x[0]), whole._expert(3, x[0]), rtol=0, atol=0)


def test_how_known_models_are_shared_out() -> None:
    def sizes(shape: str, world: int) -> list[tuple[int, int]]:
        parts = [Part(SHAPES[shape], rank, world, expert_parallel=True).config.layers[-1].mlp for rank in range(world)]
        return [(len(part.numbers), part.expert.ffn_size) for part in parts]

    assert sizes("glm-4.5-air", 4) == [(32, 1408)] * 4
    assert sizes("glm-4.7-flash", 3) == [(21, 1536), (21, 1536), (22, 1536)]
    whole, part = SHAPES["glm-4.5-air"], Part(SHAPES["glm-4.5-air"], 1, 2, expert_parallel=True)
    assert not part.has("layers.1.mlp.experts.63.down.weight")
    assert part.has("layers.1.mlp.experts.64.down.weight")
    assert part.rows("layers.1.mlp.experts.64.gate_up.weight", 2816) == whole_rows(1408)
    assert part.config.num_parameters < 0.51 * whole.num_parameters + part.config.vocab_size * 4096 * 2
    # A token uses as many of this process's weights as are its share of the experts.
    used = whole.layers[-1].active_weights
    assert 0.49 * used < part.config.layers[-1].active_weights < 0.51 * used


def whole_rows(ffn: int) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """Gate and up, both whole."""
    config = SHAPES["glm-4.5-air"]
    rows = Part(config, 0, 1).rows("layers.1.mlp.experts.64.gate_up.weight", 2 * ffn)
    assert [count for count, _ in rows] == [ffn, ffn]
    return rows


def test_what_cannot_be_shared_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"and this model has none: leave it out$"):
        Part(SHAPES["glm-4-9b"], 0, 2, expert_parallel=True)
    with pytest.raises(UsageError, match=r"^65 GPUs: the model has 64 experts per layer, .* use at most 64 GPUs$"):
        Part(SHAPES["glm-4.7-flash"], 0, 65, expert_parallel=True)
    with pytest.raises(UsageError, match=r"^33 GPUs: the model has 32 heads: use at most 32 GPUs$"):
        Part(SHAPES["qwen3-30b-a3b"], 0, 33, expert_parallel=True)
    directory = write_files(tmp_path / "dense", GLM, plain_tensors(GLM))
    with pytest.raises(UsageError, match="this model has none"):
        load(directory, Group(0, 2, CPU), expert_parallel=True)
    narrow = write_files(tmp_path / "narrow", NARROW, plain_tensors(NARROW))
    with pytest.raises(UsageError, match=r"an FFN of 64, sharded in multiples of 32: use at most 2 GPUs"):
        load(narrow, Group(0, 3, CPU))


def test_random_models() -> None:
    config = SHAPES["glm-4.5-air"].resized(num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, ffn_size=256)

    def work(group: Group) -> tuple[Decoder, Tensor]:
        model = random_model(config, W4, "cpu", torch.float32, group=group, expert_parallel=True)
        return model, model(TOKENS)

    (first, logits), (second, others) = together(2, work)
    assert torch.equal(logits, others)
    assert bool(logits.isfinite().all())
    assert (first.layers[1].mlp.numbers, second.layers[1].mlp.numbers) == (range(64), range(64, 128))
    assert not any(tensor.is_meta for model in (first, second) for tensor in model.state_dict().values())


def job(group: Group, send: Send, directory: Path) -> None:
    model = load_model(Checkpoint(directory), device=CPU, dtype=torch.float32, group=group, expert_parallel=True)
    with torch.no_grad():
        send((group.rank, model(TOKENS)))


def test_processes(tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "model", GLM4_MOE, "compressed-tensors", "w4a16-g32")
    with torch.no_grad():
        expected = load(directory)(TOKENS)
    said: dict[int, Tensor] = {}
    launch(job, (directory,), devices=[CPU, CPU], receive=lambda message: said.update([message]))
    torch.testing.assert_close(said[0], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(said[0], said[1])
