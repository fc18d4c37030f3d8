"""`Module.to(gpu.device)` changes parameters in place, as it does for any GPU: what refers to them goes on working."""

import copy
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from pool_direct import connected
from pool_tied_gpt import TOKENS, TiedGpt, train
from pool_training import assert_equal_weights
from torch import nn

REMOTE = "warpbus"


@pytest.fixture(autouse=True)
def pool() -> Iterator[None]:
    with connected():
        yield


def gpt2() -> nn.Module:
    """transformers' GPT-2, whose output layer is its token embedding."""
    dropout = 0.1
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("optimizer_first", [True, False], ids=["optimizer, then to", "to, then optimizer"])
@pytest.mark.parametrize("make", [lambda: TiedGpt(0.0), lambda: TiedGpt(0.1), gpt2], ids=["gpt", "dropout", "gpt2"])
def test_tied_models_train_as_on_the_cpu(make, optimizer_first: bool) -> None:
    expected_losses, expected = train(make, "cpu", optimizer_first=optimizer_first)
    losses, weights = train(make, REMOTE, optimizer_first=optimizer_first)
    assert losses == expected_losses
    assert len({*losses}) > 1
    assert_equal_weights(weights, expected)


def test_parameters_are_moved_and_not_replaced() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    parameter = model[0].weight
    parameter.mark = "mine"
    calls: list[torch.Tensor] = []
    parameter.register_hook(calls.append)
    model(torch.tensor([1, 2])).sum().backward()
    gradient, before, of_cpu = parameter.grad, parameter.detach().clone(), parameter.grad.clone()

    model.to(REMOTE)
    assert model[0].weight is model[1].weight is parameter
    assert (parameter.device.type, parameter.grad.device.type, parameter.mark) == (REMOTE, REMOTE, "mine")
    assert (parameter.is_leaf, parameter.requires_grad, parameter.grad is gradient) == (True, True, True)
    model(torch.tensor([1, 2]).to(REMOTE)).sum().backward()
    assert len(calls) == 2
    assert torch.equal(parameter.grad.cpu(), 2 * of_cpu)

    model.cpu()
    assert model[0].weight is model[1].weight is parameter
    assert (parameter.device.type, gradient.device.type) == ("cpu", "cpu")
    assert torch.equal(parameter, before)
    assert torch.equal(parameter.grad, 2 * of_cpu)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_an_optimizer_trains_a_model_that_moves_back_and_forth(make) -> None:
    def run(*devices: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = make(model.parameters(), lr=0.1)
        x = torch.randn(5, 4)
        for device in devices:
            model.to(device)
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device)), torch.zeros(5, 3, device=device)).backward()
            if make is torch.optim.Adam:  # as on any GPU, its moments stay where it made them
                for state in optimizer.state.values():
                    state.update({name: value.to(device) for name, value in state.items() if name != "step"})
            optimizer.step()
        return model.cpu().weight.detach()

    assert torch.equal(run("cpu", REMOTE, REMOTE, "cpu"), run("cpu", "cpu", "cpu", "cpu"))


def test_what_is_moved_keeps_its_dtype_strides_and_views_of_it() -> None:
    strided = nn.Parameter(torch.arange(12.0).reshape(3, 4)[::2].t())
    module = nn.Module()
    module.strided = strided
    expected = strided.detach().clone()
    module.to(REMOTE)
    row = strided.detach()[1]
    row.zero_()
    assert not strided[1].any()
    module.to("cpu")
    expected[1] = 0
    assert torch.equal(strided, expected)
    module.to(REMOTE, torch.float64)
    assert (strided.dtype, strided.device.type) == (torch.float64, REMOTE)
    assert torch.equal(strided.cpu(), expected.double())


def test_data_is_set_across_devices() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.data = torch.full((2, 2), 5.0).to(REMOTE)
    assert (parameter.shape, parameter.device.type) == ((2, 2), REMOTE)
    assert torch.equal(parameter.detach().cpu(), torch.full((2, 2), 5.0))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.ones(2, device="meta")


def test_a_moved_lstm_keeps_its_list_of_weights() -> None:
    lstm = nn.LSTM(3, 4)
    listed = lstm._flat_weights[:]
    lstm.to(REMOTE)
    assert all(one is other for one, other in zip(listed, lstm.parameters(), strict=True))
    assert {each.device.type for each in lstm._flat_weights} == {REMOTE}


def test_cpu_modules_are_converted_as_without_a_pool() -> None:
    """Nothing is set for the whole process: a weak reference, which hinders swapping, hinders no conversion."""
    model = nn.Linear(2, 2)
    parameter, seen = model.weight, weakref.ref(model.weight)
    model.double()
    assert model.weight is parameter is seen()
    model.to(REMOTE)
    assert model.weight is parameter is seen()
    assert not torch.__future__.get_swap_module_params_on_conversion()
    copied = copy.deepcopy(model)
    assert copied.weight is not parameter
    assert torch.equal(copied.weight.cpu(), parameter.cpu())
