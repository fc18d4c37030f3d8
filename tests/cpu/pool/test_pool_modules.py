"""Modules and functions of PyTorch on a CPU pool: what the CPU computes, with their gradients."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool_direct import connected
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

REMOTE = "warpbus"

Program = Callable[[str], Any]


@pytest.fixture
def pool() -> Iterator[None]:
    with connected():
        yield


def results(program: Program, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [each.detach().cpu() for each in tree_leaves(program(device)) if isinstance(each, Tensor)]


def assert_as_on_the_cpu(program: Program, *, exact: bool = True) -> None:
    expected, found = results(program, "cpu"), results(program, REMOTE)
    assert len(expected) == len(found) > 0
    for one, other in zip(expected, found, strict=True):
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(other, one, equal_nan=True, **tolerance)


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def recurrent(kind: Callable[..., nn.Module], **options: Any) -> Program:
    def program(device: str) -> Any:
        module = kind(4, 5, num_layers=2, dropout=0.3, **options).to(device).eval()
        x = torch.randn(3, 2, 4).to(device).requires_grad_()
        output, state = module(x)
        (output.square().sum() + sum(each.sum() for each in tree_leaves(state))).backward()
        return output, state, x.grad, gradients(module)

    return program


def packed(kind: Callable[..., nn.Module]) -> Program:
    def program(device: str) -> Any:
        module = kind(4, 5, bidirectional=True).to(device)
        sequence = nn.utils.rnn.pack_padded_sequence(torch.randn(6, 3, 4).to(device), torch.tensor([6, 4, 2]))
        output, lengths = nn.utils.rnn.pad_packed_sequence(module(sequence)[0])
        output.sum().backward()
        return output, lengths, gradients(module)

    return program


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}, {"batch_first": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(pool: None, kind: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    assert_as_on_the_cpu(recurrent(kind, **options), exact=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(pool: None, kind: Callable[..., nn.Module]) -> None:
    assert_as_on_the_cpu(packed(kind), exact=False)


def test_cells_and_projections(pool: None) -> None:
    assert_as_on_the_cpu(recurrent(nn.LSTM, proj_size=3), exact=False)

    def program(device: str) -> Any:
        lstm, gru = nn.LSTMCell(4, 5).to(device), nn.GRUCell(4, 5).to(device)
        x = torch.randn(2, 4).to(device)
        hidden, cell = lstm(x)
        hidden = gru(x, hidden)
        (hidden * cell).sum().backward()
        return hidden, gradients(lstm), gradients(gru)

    assert_as_on_the_cpu(program, exact=False)


NORMS = [(nn.BatchNorm1d, (4, 3)), (nn.BatchNorm2d, (4, 3, 5, 5)), (nn.BatchNorm3d, (2, 3, 2, 4, 4))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize(("kind", "shape"), NORMS)
def test_batch_norm_in_training_and_evaluation(
    pool: None, kind: Callable[..., nn.Module], shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    def program(device: str) -> Any:
        module = kind(3, **options).to(device, dtype)
        x = torch.randn(shape).to(device, dtype).requires_grad_()
        trained = module(x)
        evaluated = module.eval()(x)
        (trained + evaluated).square().sum().backward()
        return trained, evaluated, x.grad, gradients(module), list(module.buffers())

    assert_as_on_the_cpu(program)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_norms_of_16_bits(pool: None, parameters: torch.dtype) -> None:
    def program(device: str) -> Any:
        weight, bias = (torch.rand(8).to(device, parameters).requires_grad_() for _ in range(2))
        x = torch.randn(4, 8, 8).to(device, torch.bfloat16).requires_grad_()
        y = F.layer_norm(x, (8,), weight, bias) + F.group_norm(x, 4, weight, bias)
        y.square().sum().backward()
        return y, x.grad, weight.grad, bias.grad

    assert_as_on_the_cpu(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norm_keeps_channels_last(pool: None, dtype: torch.dtype) -> None:
    def program(device: str) -> Any:
        x = torch.randn(2, 4, 3, 3).to(device, dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        y = F.group_norm(x, 2)
        y.backward(torch.ones_like(y))
        return y, x.grad

    torch.manual_seed(0)
    expected = program("cpu")
    torch.manual_seed(0)
    for one, other in zip(expected, program(REMOTE), strict=True):
        assert other.stride() == one.stride()
        torch.testing.assert_close(other.cpu(), one, rtol=1e-5, atol=1e-5)


ENCODERS = [
    ({}, ()),
    ({}, ("mask",)),
    ({}, ("src_key_padding_mask",)),
    ({}, ("mask", "src_key_padding_mask")),
    ({"norm_first": True, "activation": "gelu"}, ("src_key_padding_mask",)),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "given"), ENCODERS, ids=str)
def test_transformer_encoders_in_evaluation(pool: None, options: dict[str, Any], given: tuple[str, ...]) -> None:
    """PyTorch takes fused layers here, and nested tensors for padding, whose output is then zero."""

    def program(device: str) -> Any:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
        encoder = nn.TransformerEncoder(layer, 2).to(device).eval()
        masks = {
            "mask": nn.Transformer.generate_square_subsequent_mask(5).to(device),
            "src_key_padding_mask": (torch.arange(5) >= torch.tensor([[5], [3], [2]])).to(device),
        }
        with torch.no_grad():
            return encoder(torch.randn(3, 5, 8).to(device), **{name: masks[name] for name in given})

    assert_as_on_the_cpu(program, exact=False)


def test_padding_that_a_layer_lost_is_an_error(pool: None) -> None:
    kept = torch.tensor([[True, True, False]]).to(REMOTE)
    padded = torch._nested_tensor_from_mask(torch.ones(1, 3, 2, device=REMOTE), kept)
    assert torch.ops.aten.to_padded_tensor(padded, 5.0).tolist() == [[[1, 1], [1, 1], [5, 5]]]
    with pytest.raises(RuntimeError, match="of nested tensors does not run on a remote GPU"):
        torch.ops.aten.to_padded_tensor(padded + 1, 5.0)


@pytest.mark.parametrize("options", [{}, {"average_attn_weights": False}, {"need_weights": False}], ids=str)
@pytest.mark.parametrize("same", [True, False])
def test_multi_head_attention_in_evaluation(pool: None, same: bool, options: dict[str, bool]) -> None:
    def program(device: str) -> Any:
        module = nn.MultiheadAttention(8, 2, batch_first=True).to(device).eval()
        query = torch.randn(3, 5, 8).to(device)
        key = query if same else torch.randn(3, 4, 8).to(device)
        with torch.no_grad():
            return module(query, key, key, **options)

    assert_as_on_the_cpu(program, exact=False)


def test_attention_learns_its_mask(pool: None) -> None:
    def program(device: str) -> Any:
        query, key, value = (torch.randn(2, 2, 4, 8).to(device).requires_grad_() for _ in range(3))
        mask = torch.randn(1, 2, 4, 4).to(device).requires_grad_()
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        found.square().sum().backward()
        return found, query.grad, mask.grad

    assert_as_on_the_cpu(program, exact=False)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 4}, {"include_last_offset": True}], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(pool: None, mode: str, options: dict[str, Any]) -> None:
    def program(device: str) -> Any:
        module = nn.EmbeddingBag(10, 3, mode=mode, **options).to(device)
        ends = torch.tensor([0, 4, 4, 8] if "include_last_offset" in options else [0, 4, 4]).to(device)
        weights = torch.rand(8).to(device).requires_grad_() if mode == "sum" else None
        found = module(torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]).to(device), ends, weights)
        found.square().sum().backward()
        return found, gradients(module), None if weights is None else weights.grad

    assert_as_on_the_cpu(program)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 4}, {"include_last_offset": True}], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bags_with_sparse_gradients(pool: None, mode: str, options: dict[str, Any]) -> None:
    def program(device: str) -> Any:
        module = nn.EmbeddingBag(10, 3, mode=mode, sparse=True, **options).to(device)
        optimizer = torch.optim.SparseAdam(module.parameters())
        ends = torch.tensor([0, 4, 4, 8] if "include_last_offset" in options else [0, 4, 4]).to(device)
        module(torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]).to(device), ends).square().sum().backward()
        optimizer.step()
        return module.weight, module.weight.grad.to_dense()

    assert_as_on_the_cpu(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layouts", ["input", "weight", "both"])
def test_convolutions_keep_channels_last(pool: None, layouts: str, dtype: torch.dtype) -> None:
    def convolved(device: str) -> Tensor:
        x, module = torch.ones(2, 3, 8, 8, dtype=dtype).to(device), nn.Conv2d(3, 4, 3).to(device, dtype)
        x = x if layouts == "weight" else x.to(memory_format=torch.channels_last)
        return F.relu((module if layouts == "input" else module.to(memory_format=torch.channels_last))(x))

    assert convolved(REMOTE).is_contiguous(memory_format=torch.channels_last)
    assert_as_on_the_cpu(convolved)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("targets", [(3, 5), (12,)], ids=str)
@pytest.mark.parametrize("lengths_there", [True, False])
def test_ctc_loss(pool: None, lengths_there: bool, targets: tuple[int, ...], reduction: str) -> None:
    def program(device: str) -> Any:
        scores = torch.randn(12, 3, 6).to(device).requires_grad_()
        labels = torch.randint(1, 6, targets)
        if len(targets) == 2:
            labels[1, 3:] = -1  # padding
        lengths = [torch.tensor(each) for each in ([12, 10, 8], [5, 3, 4])]
        if lengths_there:
            lengths = [each.to(device) for each in lengths]
        loss = F.ctc_loss(scores.log_softmax(-1), labels.to(device), *lengths, reduction=reduction)
        loss.square().sum().backward()
        return loss, scores.grad

    assert_as_on_the_cpu(program)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_fused_optimizers(pool: None, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    def program(device: str) -> Any:
        model = nn.Linear(3, 2).to(device)
        optimizer = kind(model.parameters(), lr=0.1, fused=True, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3).to(device)).square().sum().backward()
            optimizer.step()
        return list(model.parameters())

    assert_as_on_the_cpu(program)


def experts(device: str) -> Any:
    x, weights = torch.randn(8, 8).to(device).requires_grad_(), torch.randn(3, 8, 4).to(device).requires_grad_()
    ends = torch.tensor([2, 5, 8], dtype=torch.int32).to(device)
    found = F.grouped_mm(x, weights, offs=ends)
    found.square().sum().backward()
    return found, x.grad, weights.grad


def shapes_in_place(device: str) -> Any:
    x = torch.arange(6.0).reshape(1, 2, 3).to(device)
    x.squeeze_(0).t_().unsqueeze_(1).transpose_(0, 1).swapaxes_(0, 2).add_(1)
    return x, torch.arange(6.0).to(device).as_strided_((2, 2), (2, 1), 1)


def derivatives(device: str) -> Any:
    def function(x: Tensor) -> Tensor:
        return x.sin() * x.sum()

    x = torch.arange(3.0).to(device)
    return torch.func.jacfwd(function)(x), torch.func.hessian(lambda x: function(x).sum())(x)


def spectrum(device: str) -> Any:
    x, window = torch.arange(200.0).to(device).sin(), torch.hann_window(64, device=device)
    found = torch.stft(x, 64, window=window, return_complex=True)
    return found, torch.istft(found, 64, window=window)


def fake_quantization(device: str) -> Any:
    x, scale = torch.randn(4, 5).to(device).requires_grad_(), torch.full((1,), 0.1).to(device).requires_grad_()
    fixed = torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255)
    zero_point = torch.zeros(1).to(device)
    learned = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, -128, 127, 1.0)
    (fixed + learned).square().sum().backward()
    return fixed, learned, x.grad, scale.grad


def shuffled_channels(device: str) -> Any:
    x = torch.randn(1, 3, 4, 4).to(device).requires_grad_()
    found = F.channel_shuffle(x, 3)  # the gradient of a sum is expanded
    found.sum().backward()
    return found, x.grad


def segments(device: str) -> Any:
    found = []
    for reduction in ("sum", "mean", "max", "min", "prod"):
        x = torch.randn(10, 3).to(device).requires_grad_()
        y = torch.segment_reduce(x, reduction, lengths=torch.tensor([3, 2, 5]).to(device))
        y.square().sum().backward()
        found += [y, x.grad]
    return found


def pinned_batches(device: str) -> Any:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True)
    return [batch.to(device) * 2 for (batch,) in loader]


FUNCTIONS: dict[str, Program] = {
    "a mixture of experts": experts,
    "shapes in place": shapes_in_place,
    "jacobians and hessians": derivatives,
    "spectra": spectrum,
    "fake quantization": fake_quantization,
    "segments": segments,
    "shuffled_channels": shuffled_channels,
    "pinned batches": pinned_batches,
    "quantiles": lambda d: torch.quantile(torch.randn(5, 6).to(d), torch.tensor([0.1, 0.5]).to(d), dim=1),
    "histograms": lambda d: torch.histogramdd(torch.randn(9, 2).to(d), bins=[3, 4]),
    "a geometric distribution": lambda d: torch.empty(20, device=d).geometric_(0.3),
    "a list of one": lambda d: torch.unsafe_split(torch.ones(3, 3).to(d), 5),
    "LDL factors": lambda d: torch.linalg.ldl_solve(
        *torch.linalg.ldl_factor(torch.tensor([[0.0, 1, 2], [1, 0, 3], [2, 3, 0]]).to(d)), torch.ones(3, 1).to(d)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(pool: None, name: str) -> None:
    assert_as_on_the_cpu(FUNCTIONS[name])


def test_integers_are_counted_as_on_a_gpu(pool: None) -> None:
    """PyTorch's kernel for CPUs counts floating-point numbers only; programs give GPUs integers."""
    counts = torch.histc(torch.tensor([1, 2, 2, 7], dtype=torch.int32, device=REMOTE), bins=4, min=0, max=8)
    assert counts.dtype is torch.int32
    assert counts.tolist() == [1, 2, 0, 1]


def test_inductor_leaves_a_remote_graph_to_its_operators(pool: None) -> None:
    model = nn.Linear(3, 2)
    compiled = torch.compile(model.to(REMOTE))
    x = torch.ones(4, 3)
    with pytest.warns(UserWarning, match="inductor generates no code for a remote GPU"):
        found = compiled(x.to(REMOTE))
    found.sum().backward()
    assert torch.equal(found.cpu(), F.linear(x, model.weight.cpu(), model.bias.cpu()))
    assert torch.equal(model.bias.grad.cpu(), torch.full((2,), 4.0))


def test_pinning_without_a_remote_gpu_is_pytorchs() -> None:
    with connected():
        x = torch.ones(2)
        assert x.pin_memory() is not None
        assert torch.equal(x.pin_memory(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.ones(2).pin_memory()
