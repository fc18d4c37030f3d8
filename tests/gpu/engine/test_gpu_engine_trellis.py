"""Models of trellises on a GPU, in their codes: against the dequantized ones, in the engine, by graphs and without."""

import pytest
import torch
from gpu_engine_models import GPU, PROMPTS, SMALL, assert_best, model_of, with_experts

from warpbus.demo import data_path, model_path
from warpbus.engine.engine import Engine
from warpbus.engine.plan import Stored, enforce, plan_memory
from warpbus.formats import Checkpoint
from warpbus.kernels.ops.trellis_packed import PackedTrellis
from warpbus.models import SHAPES, Decoder, load_model, random_model
from warpbus.models.cost import parameter_bytes
from warpbus.models.layer_spec import RouterSpec
from warpbus.models.layers import QuantizedLinear
from warpbus.qtensor import Scheme
from warpbus.quantization import quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

W3 = Scheme.parse("w3a16-trellis")


@pytest.fixture(scope="module", params=["w3a16-trellis", "w2a16-trellis"])
def quantized(request, tmp_path_factory):
    """glm-poet."""
    output = tmp_path_factory.mktemp("trellis") / request.param
    data = data_path("validation.jsonl")
    quantize(
        model_path(),
        output,
        algorithm="gptq",
        scheme=request.param,
        format="warpbus",
        calibration=data,
        samples=32,
        seqlen=128,
        device="cuda:0",
    )
    return Checkpoint(output)


def linears(model):
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_logits_are_those_of_the_dequantized_model(quantized, dtype):
    model = load_model(quantized, device=GPU, dtype=dtype)
    assert len(linears(model)) == 4 * 8
    assert all(isinstance(linear.form, PackedTrellis) for linear in linears(model))
    exact = load_model(quantized, device=GPU, dtype=torch.float32)
    assert not linears(exact)
    rounded = load_model(quantized, device="cpu", dtype=dtype).to(GPU)  # what is held without the kernels
    assert not linears(rounded)
    for rows in (1, 9, 100):
        tokens = torch.randint(10, 8000, (1, rows), generator=torch.Generator().manual_seed(rows)).to(GPU)
        expected = exact(tokens)
        error, usual = ((each(tokens).float() - expected).norm() / expected.norm() for each in (model, rounded))
        assert error <= 1.5 * usual + torch.finfo(dtype).eps


def test_the_engine_says_the_same_by_graphs_and_without(quantized, monkeypatch):
    model = load_model(quantized, device=GPU, dtype=torch.float16)
    prompts = [list(range(20, 50)), [100, 200, 300], list(range(1000, 1140))]
    assert not model.waits_for_gpu
    answers = Engine(model, max_model_len=300).decode(prompts, 40)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_best(model, prompt, answer, 0.1)  # of scores that spread by 3
    monkeypatch.setattr(Decoder, "waits_for_gpu", True)
    assert Engine(model, max_model_len=300).decode(prompts, 40) == answers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_random_model(dtype):
    model = model_of(SMALL, W3, dtype)
    assert all(isinstance(linear.form, PackedTrellis) for linear in linears(model))
    for prompt, answer in zip(PROMPTS, Engine(model, max_model_len=300).decode(PROMPTS, 24), strict=True):
        assert_best(model, prompt, answer, 0.05 if dtype == torch.float16 else 0.3)


def test_experts_run_one_after_another():
    """Each token has all experts: where there is a choice, rounding changes that of 1 in 300 tokens of such a model,
    and its scores by up to 0.9."""
    model = model_of(with_experts(RouterSpec(4, 4, "softmax")), W3)
    assert model.waits_for_gpu
    for prompt, answer in zip(PROMPTS, Engine(model).decode(PROMPTS, 5), strict=True):
        assert_best(model, prompt, answer, 0.1)


def test_the_plan_of_a_large_model_holds():
    """torch refuses what exceeds the plan."""
    config = SHAPES["glm-4-9b"]
    stored = Stored.uniform(config, torch.float16, W3)
    plan = plan_memory(stored, 9_000_000_000, max_model_len=4096, max_num_seqs=4)
    enforce(plan, GPU)
    try:
        where = "cpu" if plan.embedding_on_cpu else None
        model = random_model(
            config, W3, GPU, torch.float16, head=plan.head, embedding=plan.embedding, embedding_device=where
        )
        layers = {name: size for name, size in stored.sizes.items() if name.startswith("layers.")}
        held = sum(each.nbytes for each in [*model.layers.parameters(), *model.layers.buffers()])
        assert held == sum(layers.values())
        assert held < 0.2 * sum(parameter_bytes(config, torch.float16, {})[name] for name in layers)
        engine = Engine.planned(model, plan, max_num_seqs=4)
        answers = engine.decode([[7 + at] * 3000 for at in range(4)], 8)
        assert [len(answer) for answer in answers] == [8] * 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
