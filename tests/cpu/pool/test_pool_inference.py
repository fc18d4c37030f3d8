"""The results that a call is announced to give are those of the kind of device that runs it."""

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
