"""What a step is reckoned to take, against the tensors of small models."""

import re
from dataclasses import replace

import pytest
import torch
from dense_configs import dense_config, with_traits

from warpbus.errors import DeviceError
from warpbus.kernels.ops.packed import pack
from warpbus.models import SHAPES, Decoder, ModelConfig, MoESpec
from warpbus.models.config import RopeConfig
from warpbus.models.layer_spec import MLPSpec, RouterSpec
from warpbus.models.layers import CausalAttention
from warpbus.qtensor import QTensor, Scheme
from warpbus.train import memory
from warpbus.train.balance import correction_biases
from warpbus.train.fp8 import use_fp8
from warpbus.train.lora import attach_lora
from warpbus.train.memory import check_main_memory, num_trained, peak, training_memory
from warpbus.train.settings import TrainingSettings

CONFIG = dense_config(
    family="chatglm2",
    vocab_size=96,
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    ffn_size=352,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, rotary_dim=16, interleaved=True),
    max_context=128,
    qkv_bias=True,
)
V1_LIKE = with_traits(CONFIG, gated=False, mlp_bias=True, output_bias=True, layer_norm=True, normed_residual=2.0)
TIED = with_traits(CONFIG, tie_embeddings=True, qk_norm=True, output_norms=True)
EXPERTS = MoESpec(RouterSpec(8, 3, "sigmoid", bias=True), MLPSpec(64), MLPSpec(96))
MOE = replace(CONFIG, layers=(CONFIG.layers[0], *[replace(CONFIG.layers[0], mlp=EXPERTS)] * 2))
SOFTMAX = replace(EXPERTS, router=RouterSpec(8, 3, "softmax"), shared=None)
NO_SHARED = replace(CONFIG, layers=(replace(CONFIG.layers[0], mlp=SOFTMAX),) * 3)
SMALL = {"length": 64, "rows_per_step": 2, "rows_at_once": 2}


def prepared(config: ModelConfig, settings: TrainingSettings) -> Decoder:
    """As the loop makes it, but for the prefix."""
    model = Decoder(config)
    biases = correction_biases(model)
    if settings.method != "full":
        model.to(torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32).requires_grad_(False)
    for bias in biases.values():
        bias.data = bias.data.float()
        bias.requires_grad_(False)
    if settings.method == "lora":
        attach_lora(model, rank=settings.rank, alpha=1.0, targets=settings.targets)
    if settings.fp8:
        use_fp8(model)
    return model.train()


def held_bytes(model: Decoder) -> int:
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(
    "config", [CONFIG, V1_LIKE, TIED, MOE, NO_SHARED], ids=["gated", "v1", "tied", "experts", "softmax"]
)
@pytest.mark.parametrize(
    "chosen",
    [
        {"method": "full", "dtype": "bfloat16"},
        {"method": "lora", "dtype": "bfloat16"},
        {"method": "lora", "dtype": "float32", "rank": 3, "targets": ("attention.qkv", "attention.o")},
        {"method": "lora", "dtype": "bfloat16", "fp8": True},
    ],
    ids=["full", "lora", "some", "fp8"],
)
def test_weights_gradients_and_optimizer_are_exact(config: ModelConfig, chosen: dict[str, object]) -> None:
    settings = TrainingSettings(**SMALL, **chosen)  # type: ignore[arg-type]
    model = prepared(config, settings)
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.grad = torch.zeros_like(each)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    found = training_memory(config, settings)
    assert found.parts["weights"] == held_bytes(model)
    assert num_trained(config, settings) == sum(each.numel() for each in trained)
    assert found.parts["gradients"] == sum(each.grad.nbytes for each in trained if each.grad is not None)
    assert found.parts["optimizer"] == sum(each.nbytes for each in moments)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16"])
def test_quantized_weights_are_exact(scheme: str) -> None:
    """As GPUs hold them, which the CPU's own form is not."""
    parsed = Scheme.parse(scheme)
    settings = TrainingSettings(**SMALL, method="lora", dtype="bfloat16", quantize=scheme)  # type: ignore[arg-type]
    model = prepared(CONFIG, settings)
    expected = held_bytes(model)
    for n, k in (matrix.shape for matrix in CONFIG.layers[0].matrices):
        weight = QTensor.from_codes(
            parsed, torch.zeros(n, k, dtype=torch.uint8), torch.ones(n, parsed.groups(k), dtype=torch.bfloat16)
        )
        expected += CONFIG.num_layers * (pack(weight, torch.bfloat16).nbytes - 2 * n * k)
    assert training_memory(CONFIG, settings).parts["weights"] == expected
    already = replace(settings, quantize=None)
    assert training_memory(CONFIG, already, scheme=parsed) == training_memory(CONFIG, settings)


@pytest.mark.parametrize("config", [CONFIG, V1_LIKE, MOE, NO_SHARED], ids=["gated", "v1", "experts", "softmax"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_are_what_autograd_keeps(
    config: ModelConfig, method: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two layers, so that neither the embedding nor the last norm counts."""
    monkeypatch.setattr(memory, "_masks", lambda *_: True)  # as it is on a CPU
    settings = TrainingSettings(**SMALL, method=method, dtype=dtype)  # type: ignore[arg-type]
    model = prepared(config, settings)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages: dict[int, int] = {}
    alive: list[torch.Tensor] = []
    sums: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    for layer in model.layers:
        layer.register_forward_hook(lambda *_: sums.append(sum(storages.values())))
    tokens = torch.randint(96, (2, 64))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        model.hidden(tokens, None, CausalAttention(torch.zeros_like(tokens)))
    kept = sums[2] - sums[1]
    longer = replace(config, layers=(*config.layers, config.layers[-1]))
    more = training_memory(longer, settings)
    less = training_memory(config, settings)
    reckoned = more.parts["activations"] - less.parts["activations"] + more.parts["casts"] - less.parts["casts"]
    mlp = config.layers[-1].mlp
    if (isinstance(mlp, MoESpec) or mlp.gated) and dtype == "bfloat16":
        kept -= 2 * tokens.numel() * mlp.inner  # silu(gate), which kernels of GPUs do not keep
    if config.norm.kind != "layer":
        # Two norms, which on a CPU keep their input in float32, and their output but for a weight that is trained.
        full = method == "full"
        kept -= (
            2 * tokens.numel() * config.hidden_size * ((8 if full else 4) - (4 if full or dtype == "float32" else 2))
        )
    assert reckoned == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_does_not_keep_the_whole_projection(grouped: bool) -> None:
    kv = 2 if grouped else 4
    projected = torch.randn(2, 16, (4 + 2 * kv) * 8, requires_grad=True)
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in projected.split([32, kv * 8, kv * 8], dim=-1))
    storages: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        CausalAttention().attend(0, q * 1, k * 1, v, torch.arange(16).expand(2, 16))
    assert storages
    assert projected.untyped_storage().data_ptr() not in storages


def test_the_loss_and_the_layers_are_not_at_their_most_together() -> None:
    parts = {
        "weights": 1,
        "gradients": 1000,
        "optimizer": 2,
        "casts": 400,
        "activations": 800,
        "head": 20,
        "scores": 50,
        "layer": 60,
        "workspaces": 4,
    }
    total = peak(parts, accumulates=False)
    assert total == 1 + 2 + 4 + 400 + 800 + 20 + 60
    assert peak(parts | {"scores": 70}, accumulates=False) == total + 10
    # At the end of the backward pass:
    assert peak(parts | {"activations": 80}, accumulates=False) == 1 + 2 + 4 + 1000 + 60
    assert peak(parts, accumulates=True) == total + 1000


def test_what_the_loss_needs_grows_with_the_tokens_up_to_a_piece() -> None:
    config = SHAPES["chatglm2-6b"]

    def scores(rows: int, method: str) -> int:
        settings = TrainingSettings(method=method, dtype="bfloat16", length=1024, rows_per_step=rows, rows_at_once=rows)
        return training_memory(config, settings).parts["scores"]

    states = 3 * 2 * 4096  # the norm's input, its output and the gradients of this
    assert scores(1, "lora") == 1024 * (2 * 65024 + states)
    assert scores(2, "lora") == 2048 * (2 * 65024 + states)
    assert scores(8, "lora") == 2048 * 2 * 65024 + 8192 * states
    # Input and output of the norm in float32 too, the head in 16 bits, and its gradient by a piece.
    assert scores(8, "full") - scores(8, "lora") == 8192 * (4 + 2) * 4096 + 2 * 2 * 65024 * 4096


def test_what_is_shared_and_what_is_not() -> None:
    config = SHAPES["chatglm2-6b"]
    settings = TrainingSettings(method="full", dtype="bfloat16", length=2048, rows_per_step=8, rows_at_once=1)
    alone, copied = training_memory(config, settings), training_memory(config, settings, 4)
    assert alone.parts["weights"] == 4 * config.num_parameters
    assert (copied.parts["weights"], copied.parts["optimizer"]) == (alone.parts["weights"], alone.parts["optimizer"])
    shared = training_memory(config, replace(settings, sharding="fsdp"), 4)
    for part in ("weights", "gradients", "optimizer"):
        assert 0.25 <= shared.parts[part] / alone.parts[part] < 0.2501
    assert shared.total < alone.total / 2


def test_recomputation_and_pieces_save_memory() -> None:
    config = SHAPES["chatglm2-6b"]
    settings = TrainingSettings(
        method="lora",
        dtype="bfloat16",
        quantize="w4a16-g128",
        length=2048,
        rows_per_step=1,
        rows_at_once=1,
        recompute=1,
    )
    qlora = training_memory(config, settings)
    assert qlora.total < 10e9
    assert training_memory(config, replace(settings, recompute=0)).total > 1.5 * qlora.total
    assert training_memory(config, replace(settings, recompute=2)).total > qlora.total
    # With a second piece of rows there are gradients already during its forward pass.
    pieces = training_memory(config, replace(settings, rows_per_step=2))
    assert pieces.parts == qlora.parts
    assert pieces.total == qlora.total + qlora.parts["gradients"]


def refusal(monkeypatch: pytest.MonkeyPatch, free: int | None, processes: int = 1, **changed: object) -> str | None:
    """The refusal of a run on the CPU with so many bytes of main memory free; None if it may start."""
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    settings = TrainingSettings(**{**SMALL, "rows_per_step": 64, "rows_at_once": 64, "length": 512, **changed})  # type: ignore[arg-type]
    try:
        check_main_memory(CONFIG, settings, processes, processes)
    except DeviceError as error:
        return str(error)
    return None


def test_a_run_that_main_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, the kernel kills the process in its first step, and nothing says why."""
    assert refusal(monkeypatch, 10**10) is None
    assert refusal(monkeypatch, None) is None
    found = refusal(monkeypatch, 10**9)
    assert found is not None
    rows = re.search(r"1\.00 GB are free: give --rows-at-once (\d+), which needs about [\d.]+ MB", found)
    assert rows is not None, found
    assert 1 < int(rows[1]) < 64
    assert refusal(monkeypatch, 10**9, rows_at_once=int(rows[1])) is None
    # What each of several processes needs adds up, although they share the rows.
    assert "main memory" in str(refusal(monkeypatch, 10**9, processes=4, rows_at_once=int(rows[1])))
    assert "train an adapter (--method lora), shorten --length" in str(refusal(monkeypatch, 10**8))
