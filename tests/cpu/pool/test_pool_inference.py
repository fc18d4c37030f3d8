"""The results that a call is announced to give are those of the kind of device that runs it."""

import subprocess
import sys
import textwrap

import pytest
import torch

from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.inference import infer
from warpbus.pool.protocol.signature import Input, New, Signature


@pytest.mark.parametrize(("device", "kept"), [("cpu", (4, 5)), ("cuda", (0,))])
def test_a_gpu_keeps_nothing_for_the_backward_of_log_sigmoid(device: str, kept: tuple[int, ...]) -> None:
    given = contiguous(torch.float32, (4, 5))
    signature = Signature("aten::log_sigmoid_forward", (Input(0),), (), (given,), (), ())
    outputs = infer(signature, device)
    assert outputs is not None
    shapes = [each.geometry.shape for each in outputs if isinstance(each, New)]
    assert shapes == [(4, 5), kept]


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
