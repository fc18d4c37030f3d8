"""The results that a call is announced to give are those of the kind of device that runs it."""

import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from pool_direct import connected
from pool_operator_calls import FILE, Call
from torch import Tensor
from torch._subclasses import FakeTensorMode

from warpbus.errors import DeviceError
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.inference import infer, outputs_of
from warpbus.pool.protocol.operators import operator
from warpbus.pool.protocol.signature import (
    Argument,
    DevicePlaceholder,
    Input,
    New,
    Number,
    Output,
    Signature,
)

_aten = torch.ops.aten


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_call_tells_what_log_sigmoid_keeps_for_its_backward(device: str) -> None:
    """A CPU keeps as many numbers as there are, a GPU none."""
    given = contiguous(torch.float32, (4, 5))
    signature = Signature("aten::log_sigmoid_forward", (Input(0),), (), (given,), (), ())
    with pytest.raises(NotImplementedError, match="only a call can tell"):
        infer(signature, device)


def filled(argument: Argument, tensors: list[Tensor]) -> Any:
    if isinstance(argument, Input):
        return tensors[argument.index]
    if isinstance(argument, Number):
        return {"int": 1, "float": 1.0, "bool": True}[argument.kind]
    if isinstance(argument, DevicePlaceholder):
        return torch.device("cuda")
    if isinstance(argument, tuple):
        return [filled(item, tensors) for item in argument]
    return argument


def on_fake_gpu(signature: Signature) -> tuple[Output, ...]:
    """What PyTorch expects of a call on tensors of a GPU that is not there."""
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty_strided(g.shape, g.stride, dtype=g.dtype, device="cuda") for g in signature.inputs]
        arguments = [filled(argument, tensors) for argument in signature.arguments]
        keywords = {name: filled(argument, tensors) for name, argument in signature.keywords}
        return outputs_of(operator(signature.operator)(*arguments, **keywords), tensors)


def outlines(outputs: Iterable[Output]) -> list[Any]:
    return [(o.geometry.dtype, o.geometry.shape) if isinstance(o, New) else o for o in outputs]


@pytest.mark.filterwarnings("ignore")
def test_results_are_those_that_pytorch_expects_on_a_gpu() -> None:
    """Meta tensors, which stand for those of a GPU, have no device: operators that look at it are found here."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    compared, different = 0, []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        signature, _ = Call(*json.loads(line)).signature()
        try:
            announced, expected = infer(signature, "cuda"), on_fake_gpu(signature)
        except Exception:  # known only after the call, or kernels that look for a real GPU
            continue
        if announced is not None:
            compared += 1
            if outlines(announced) != outlines(expected):
                different.append(f"{signature.operator}: {outlines(announced)}, expected {outlines(expected)}")
    assert not different, "\n".join(different)
    assert compared > 1900


HEADS = (2, 3, 4, 8)
"""Batch, tokens, heads, width."""


def gradients(dropout_p: float, bias_requires_grad: bool, bias: Tensor | None = None) -> Any:
    """Call the derivative of efficient attention."""
    q, k, v, out = (torch.ones(HEADS, device="warpbus") for _ in range(4))
    log, seed = torch.ones(2, 4, 32, device="warpbus"), torch.zeros((), dtype=torch.int64, device="warpbus")
    lengths = (None, None, 3, 3)
    return _aten._efficient_attention_backward(
        out, q, k, v, bias, out, *lengths, log, dropout_p, seed, seed, 0, bias_requires_grad, scale=0.5
    )


@pytest.mark.parametrize("bias_requires_grad", [False, True])
def test_gradients_of_efficient_attention(bias_requires_grad: bool) -> None:
    with connected() as (session, _):
        session.kind = "cuda"
        shape = 2, 4, 3, 3
        *of_inputs, of_bias = gradients(0.0, bias_requires_grad, torch.ones(shape, device="warpbus"))
        assert [each.shape for each in of_inputs] == [HEADS] * 3
        assert of_bias.shape == shape if bias_requires_grad else of_bias is None


def test_efficient_attention_with_dropout_has_no_derivative() -> None:
    """Its kernel would read the seed from the host's memory: the error comes before the call, on both sides."""
    with connected() as (session, _):
        session.kind = "cuda"
        with pytest.raises(DeviceError, match="with dropout is not among the operators that a pool runs"):
            gradients(0.5, False)
    heads, log = contiguous(torch.float32, HEADS), contiguous(torch.float32, (2, 4, 32))
    seed = contiguous(torch.int64, ())
    name = "aten::_scaled_dot_product_efficient_attention_backward"
    inputs = (heads,) * 6 + (log, seed, seed)
    tensors = tuple(Input(index) for index in range(len(inputs)))
    for dropout_p in (0.5, Number("float", 0)):  # a hostile client sends it with each call
        with pytest.raises(DeviceError, match="with dropout is not among the operators that a pool runs"):
            infer(Signature(name, (*tensors, dropout_p, (True,) * 4), (), inputs, ("float",)), "cuda")


def test_results_are_inferred_without_pytorchs_compiler() -> None:
    """Its import would take longer than everything else that a client does when it connects."""
    code = """
        import sys
        import torch
        from warpbus.pool.protocol.geometry import contiguous
        from warpbus.pool.protocol.inference import infer
        from warpbus.pool.protocol.signature import Input, Signature

        x = contiguous(torch.float32, (2, 2))
        for name in ("mul.Tensor", "gelu", "_softmax"):
            arguments = {"mul.Tensor": (Input(0), Input(0)), "gelu": (Input(0),), "_softmax": (Input(0), -1, False)}
            assert infer(Signature(f"aten::{name}", arguments[name], (), (x,), ()))
        assert "torch._dynamo" not in sys.modules
        compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2, backend="aot_eager")
        assert torch.equal(compiled(torch.ones(3)), torch.nn.functional.gelu(torch.ones(3)) * 2)
        print("compiled", "torch._dynamo" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("compiled True\n", 0), done.stderr
