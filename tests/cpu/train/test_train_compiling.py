"""Compiled layers: they share one graph, however many they are, and learn what they learn without."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dense_configs import dense_config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from warpbus.dist import Group, Send, launch
from warpbus.kernels.ops.packed import pack
from warpbus.models import ModelConfig, MoESpec, random_model
from warpbus.models.config import RopeConfig
from warpbus.models.layer_spec import MLPSpec, RouterSpec
from warpbus.models.layers import QuantizedLinear
from warpbus.qtensor import Scheme
from warpbus.train import TrainingSettings
from warpbus.train.compiling import compile_layers
from warpbus.train.fp8 import use_fp8
from warpbus.train.lora import LoraLinear, attach_lora
from warpbus.train.methods import FullMethod, LoraMethod, PrefixMethod, TrainingMethod
from warpbus.train.ptuning import TrainedPrefix
from warpbus.train.recompute import recompute_layers
from warpbus.train.sharding import distribute, whole

CONFIG = dense_config(
    family="chatglm2",
    vocab_size=64,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=64,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, rotary_dim=8, interleaved=True),
    max_context=64,
    qkv_bias=True,
)
ROWS = torch.randint(4, 64, (4, 13), generator=torch.Generator().manual_seed(5))
SETTINGS = TrainingSettings.of("full", steps=2, length=12, rows_per_step=4, rows_at_once=4)
DOCUMENTS = torch.tensor([0] * 5 + [1] * 7).expand(4, -1)


def made(kind: str, recompute: int = 0, config: ModelConfig = CONFIG) -> TrainingMethod:
    """A method as `warpbus.train.methods.prepare` makes it: the same each time."""
    torch.manual_seed(0)
    scheme = Scheme.parse("w4a16-g64") if kind == "qlora" else None
    model = random_model(config, scheme, "cpu", torch.bfloat16 if kind == "qlora" else torch.float32)
    for linear in model.modules():
        if isinstance(linear, QuantizedLinear):
            linear._hold(pack(linear.weight, torch.bfloat16))  # as a GPU holds it
    method: TrainingMethod
    if kind == "ptuning":
        method = PrefixMethod(model, TrainedPrefix.beginning(model, np.arange(6, dtype=np.int32), 6))
    elif kind in ("lora", "dropout", "qlora", "fp8 lora"):
        attach_lora(model, rank=2, alpha=4.0, dropout=0.5 if kind == "dropout" else 0.0)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                torch.nn.init.normal_(module.b, std=0.1)
        method = LoraMethod(model)
    else:
        method = FullMethod(model)
    if kind.startswith("fp8"):
        use_fp8(model)
    if recompute:
        recompute_layers(model, recompute)
    return method.train()


def step(
    method: TrainingMethod,
    documents: Tensor | None = None,
    rows: Tensor = ROWS,
    *,
    call: Callable[..., Tensor] | None = None,
    autocast: bool = False,
) -> list[Tensor]:
    """The loss, and the gradients of what is trained."""
    method.zero_grad()
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    torch.manual_seed(3)  # of dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = (call or method)(tokens, targets, positions, documents)
    loss.backward()
    gradients = [each.grad for each in method.trained().values()]
    return [loss.detach(), *(whole(each).clone() for each in gradients if each is not None)]


def check_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for gradient, other in zip(found, expected, strict=True):
        assert float((gradient - other).norm()) <= 0.03 * float(other.norm())  # a code may be rounded the other way


def counting() -> CompileCounterWithBackend:
    """Compiles quickly, and counts graphs."""
    torch.compiler.reset()  # it counts how often these functions were compiled
    counters.clear()
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        ("full", 0),
        ("lora", 1),
        ("dropout", 1),
        ("qlora", 2),
        ("ptuning", 0),
        ("ptuning", 1),
        ("fp8", 1),
        ("fp8 lora", 0),
    ],
)
def test_all_layers_are_one_graph(kind: str, recompute: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = counting()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    plain, method = made(kind, recompute), made(kind, recompute)
    compile_layers(method.model.layers)
    kinds = 2 if recompute == 2 else 1  # every second layer is recomputed
    autocast = not kind.startswith("fp8")  # where codes are rounded the other way too often
    for count, documents in enumerate((None, DOCUMENTS), 1):
        for _ in range(2):
            found = step(method, documents, autocast=autocast)
        assert backend.frame_count == count * kinds
        check_near(found, step(plain, documents, autocast=autocast))
    with torch.no_grad():  # a validation is not compiled
        torch.testing.assert_close(method.eval().model.hidden(ROWS[:3]), plain.eval().model.hidden(ROWS[:3]))
    for rows in (3, 2):  # the last rows of a step may be fewer: a graph for any number
        step(method.train(), None, ROWS[:rows], autocast=autocast)
    assert backend.frame_count == 3 * kinds
    assert not counters["graph_break"]


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_layers_with_experts_are_compiled_around_the_experts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers and tokens per expert, there are as many graphs."""
    experts = MoESpec(RouterSpec(6, 2, "sigmoid", bias=True), MLPSpec(64), MLPSpec(64))
    graphs = []
    for layers in (2, 5):
        config = replace(CONFIG, layers=(replace(CONFIG.layers[0], mlp=experts),) * layers)
        backend = counting()
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        plain, method = made(kind, config=config), made(kind, config=config)
        compile_layers(method.model.layers)
        monkeypatch.undo()
        for seed in range(3):
            rows = torch.randint(4, 64, (4, 13), generator=torch.Generator().manual_seed(seed))
            check_near(step(method, rows=rows), step(plain, rows=rows))
        graphs.append(backend.frame_count)
        assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])
    assert graphs[0] == graphs[1] > 0


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_shared_by_processes(sharding: str) -> None:
    got: list[Any] = []
    launch(shared_step, (sharding,), devices=[torch.device("cpu")] * 2, receive=got.append)
    expected = step(made("full"))
    for graphs, breaks, gradients in got:
        assert (graphs, breaks) == (2, {})
        check_near([gradient * 2 for gradient in gradients], expected[1:])  # the mean of both


def shared_step(group: Group, send: Send, sharding: str) -> None:
    """Each process takes half of the rows."""
    backend = counting()
    torch.compile = functools.partial(torch.compile, backend=backend)
    method = made("full", recompute=2)
    parallel = distribute(method, method.model.layers, replace(SETTINGS, sharding=sharding, compile=True), group)
    compile_layers(method.model.layers)
    for _ in range(2):
        found = step(method, None, ROWS[group.rank :: 2].contiguous(), call=parallel)
    send((backend.frame_count, dict(counters["graph_break"]), found[1:]))
