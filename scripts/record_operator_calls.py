"""Write the valid operator calls that the bounds fuzzer of the pool changes: tests/cpu/pool/operator_calls.jsonl.

    pip install expecttest scipy
    PYTHONPATH=src python scripts/record_operator_calls.py

PyTorch's own samples (OpInfo), optimizers and a few modules run on the CPU, forward and backward, and every call of an
operator of the allow-list is noted. Run it again after a change of the allow-list or of PyTorch's version.

A line is a call: `[operator, arguments, keywords]`. A tensor is `{"dtype", "shape", "stride"}`, with `"values"` where
it holds integers or booleans, because they are indices, lengths or masks; floats are drawn anew at each run.
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from warpbus.pool.protocol.operators import ATEN

TARGET = Path(__file__).parents[1] / "tests" / "cpu" / "pool" / "operator_calls.jsonl"
KINDS_EACH = 5
MOST_ELEMENTS = 2000
MOST_SAMPLES = 30
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)


class Recorder(TorchDispatchMode):
    """Notes calls of listed operators, a few different ones each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, str]] = defaultdict(dict)

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = call._overloadpacket.__name__
        if packet in ATEN or packet.removesuffix("_") in ATEN:
            self.note(call.name(), args, kwargs)
        return call(*args, **kwargs)

    def note(self, name: str, args: Any, kwargs: Any) -> None:
        """Keep a call, unless there are enough of its operator."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = self.calls[name]
        if any(t.numel() > MOST_ELEMENTS or t.layout != torch.strided or not t.numel() for t in tensors):
            return
        try:
            line = json.dumps([name, [plain(a) for a in args], {k: plain(v) for k, v in kwargs.items()}])
        except TypeError:
            return  # a generator, or what else no client sends
        kind = str([(str(t.dtype), t.dim()) for t in tensors[:6]]) + str([type(a).__name__ for a in args])
        if len(known) < KINDS_EACH:
            known.setdefault(kind, line)


def plain(value: Any) -> Any:
    """An argument as JSON."""
    if isinstance(value, Tensor):
        found = {"dtype": str(value.dtype)[6:], "shape": list(value.shape), "stride": list(value.stride())}
        if not (value.is_floating_point() or value.is_complex()):
            found["values"] = value.tolist()
        return found
    if isinstance(value, torch.dtype):
        return {"torch": str(value)[6:]}
    if isinstance(value, torch.layout | torch.memory_format):
        return {"torch": str(value)[6:]}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(type(value).__name__)


def main() -> None:
    """Record, and write."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    recorder = Recorder()
    for op in op_db:
        sample(op, recorder)
    for optimizer in optimizers():
        with recorder:
            optimizer.step()
    with recorder:
        modules()
        direct(recorder)
    lines = [line for _, kinds in sorted(recorder.calls.items()) for line in kinds.values()]
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")
    packets = {name.removeprefix("aten::").partition(".")[0] for name, kinds in recorder.calls.items() if kinds}
    missing = sorted(name for name in ATEN if name not in packets and name + "_" not in packets)
    print(f"{len(lines)} calls of {len(packets)} operators; no call of {len(missing)}: {' '.join(missing)}")


def sample(op: Any, recorder: Recorder) -> None:
    """Run an operator's samples, and their backward."""
    supported = op.supported_dtypes("cpu")
    dtype = next((each for each in DTYPES if each in supported), None)
    if dtype is None:
        return
    gradient = op.supports_autograd and dtype.is_floating_point
    try:
        samples = op.sample_inputs("cpu", dtype, requires_grad=gradient)
        for _, each in zip(range(MOST_SAMPLES), samples, strict=False):
            with recorder:
                result = op.op(each.input, *each.args, **each.kwargs)
                roots = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    except Exception as error:  # some need what is not installed
        print(f"{op.name}: {type(error).__name__}: {str(error)[:80]}")


def optimizers() -> list[torch.optim.Optimizer]:
    """Each optimizer in each of its forms, over three parameters with gradients."""
    found: list[torch.optim.Optimizer] = []
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        found.append(kind(parameters(), lr=0.1, fused=True))
    found.append(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, fused=True))
    found.append(torch.optim.Adam(parameters(), amsgrad=True, fused=True))
    found.append(torch.optim.AdamW(parameters(), amsgrad=True, fused=True))
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"):
        found.append(getattr(torch.optim, name)(parameters(), foreach=True))
    return found


def parameters() -> list[nn.Parameter]:
    """Three, with gradients."""
    made = [nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,), (2, 3, 4))]
    for each in made:
        each.grad = torch.randn_like(each)
    return made


def modules() -> None:
    """What OpInfo has no samples of."""
    with torch.no_grad():
        encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        encoder(torch.randn(2, 3, 8))
        F.embedding_bag(torch.tensor([0, 1, 2, 1]), torch.randn(3, 4), torch.tensor([0, 2]))
    for kind in (nn.LSTM, nn.GRU):
        recurrent = kind(4, 3)
        recurrent(torch.randn(5, 2, 4))[0].sum().backward()
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    normed(torch.randn(2, 4)).sum().backward()


def direct(recorder: "Recorder") -> None:
    """Calls of operators that nothing above reaches; one that decomposes is noted as it is called."""
    for call, arguments, keywords in by_hand():
        try:
            call(*arguments, **keywords)
            if isinstance(call, OpOverload):
                recorder.note(call.name(), arguments, keywords)
        except (RuntimeError, NotImplementedError) as error:
            print(f"{call}: {str(error)[:100]!r}")


def by_hand() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Direct calls of operators that nothing above reaches."""
    a = torch.ops.aten
    x, y, image, volume = torch.rand(4, 5), torch.rand(4, 5), torch.rand(2, 3, 8, 8), torch.rand(2, 3, 6, 6, 6)
    whole, bag = torch.randint(1, 5, (4, 5)), torch.tensor([0, 1, 2, 1])
    tensors, others = [torch.rand(3, 4), torch.rand(5)], [torch.rand(3, 4), torch.rand(5)]
    half = image[:1, :, :4, :4].contiguous()
    mask = torch.zeros(4, 5, dtype=torch.bool)

    def call(operator: Any, *arguments: Any, **keywords: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return operator, arguments, keywords

    for name in sorted(ATEN):
        if name.startswith("_foreach_"):
            packet = getattr(a, name)
            for overload in packet.overloads():
                if "out" not in overload:
                    yield from _foreach(getattr(packet, overload), tensors, others)
    for operator in (a.__ilshift__, a.__irshift__, a.__lshift__, a.__rshift__):
        yield call(operator, whole.clone(), whole)
        yield call(operator, whole.clone(), 2)
    yield call(a._amp_foreach_non_finite_check_and_unscale_, tensors, torch.zeros(1), torch.full((1,), 0.5))
    yield call(a._amp_update_scale_, torch.ones(1), torch.ones(1, dtype=torch.int32), torch.zeros(1), 2.0, 0.5, 2000)
    yield call(a._add_relu, x, y)
    yield call(a._addmm_activation, torch.rand(3), x, torch.rand(5, 3))
    yield call(a._aminmax, x)
    yield call(a._aminmax, x, 1)
    channels = [torch.rand(3) for _ in range(4)]
    for training in (True, False):
        yield call(a.native_batch_norm, image, *channels, training, 0.1, 1e-5)
        yield call(a._batch_norm_with_update_functional, image, *channels, 0.1, 1e-5)
        yield call(a._native_batch_norm_legit_functional, image, *channels, training, 0.1, 1e-5)
        yield call(a._native_batch_norm_legit, image, *channels, training, 0.1, 1e-5)
        saved = [torch.rand(3) for _ in range(2)]
        masks = [True, True, True]
        yield call(
            a.native_batch_norm_backward, image, image, channels[0], *channels[2:], *saved, training, 1e-5, masks
        )
        reserve = torch.zeros(1, dtype=torch.uint8)
        weights = (channels[0], *channels[2:], *saved)
        yield call(a.batch_norm_backward, image, image, *weights, training, 1e-5, masks, reserve)
        half_image = image.bfloat16()
        yield call(a.native_batch_norm, half_image, *channels, training, 0.1, 1e-5)
        yield call(
            a.native_batch_norm_backward,
            *(half_image, half_image, channels[0], *channels[2:], *saved, training, 1e-5, masks),
        )
    yield call(a._native_batch_norm_legit.no_stats, image, *channels[:2], True, 0.1, 1e-5)
    yield call(a._batch_norm_no_update, image, *channels, 0.1, 1e-5)
    yield call(a._batch_norm_with_update, image, *channels, 0.1, 1e-5)
    yield call(a._native_batch_norm_legit_no_training, image, *channels, 0.1, 1e-5)
    for kind in (torch.float32, torch.bfloat16):
        rows, row = x.to(kind), torch.rand(5)
        for weight in {row.to(kind), row}:
            yield call(a.native_layer_norm, rows, [5], weight, weight, 1e-5)
            _, mean, deviation = torch.native_layer_norm(rows, [5], weight, weight, 1e-5)
            yield call(a.native_layer_norm_backward, rows, rows, [5], mean, deviation, weight, weight, masks)
        for weight in {torch.rand(3).to(kind), torch.rand(3)}:
            yield call(a.native_group_norm, image.to(kind), weight, weight, 2, 3, 64, 3, 1e-5)
            _, mean, deviation = torch.native_group_norm(image.to(kind), weight, weight, 2, 3, 64, 3, 1e-5)
            yield call(
                a.native_group_norm_backward,
                *(image.to(kind), image.to(kind), mean, deviation, weight, 2, 3, 64, 3, masks),
            )
    yield call(
        a._convolution, image, torch.rand(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *[False] * 4
    )
    scores = torch.rand(6, 2, 4).log_softmax(2)
    for targets in (torch.tensor([[1, 2, -1], [3, 1, 3]]), torch.tensor([1, 2, 3, 1, 3], dtype=torch.int32)):
        lengths = ([6, 5], [2, 3])
        yield call(a._ctc_loss, scores, targets, *lengths)
        saved = a._ctc_loss(scores, targets, *lengths)
        yield call(a._ctc_loss_backward, torch.rand(2), scores, targets, *lengths, *saved, 0)
    for operator in (a._cummax_helper, a._cummin_helper):
        yield call(operator, x, torch.empty(4, 5), torch.zeros(4, 5, dtype=torch.long), 1)
        yield call(operator, x, torch.empty(4, 5), torch.zeros(4, 5, dtype=torch.long), 0)
    yield call(a._dirichlet_grad, x, y, x + y)
    yield call(a._embedding_bag_forward_only, torch.rand(3, 4), bag, torch.tensor([0, 2]))
    for mode in range(3):
        yield call(a._embedding_bag, torch.rand(3, 4), bag, torch.tensor([0, 2]), False, mode)
    ids = torch.tensor([0, 0, 1, 1])
    sizes, most = torch.tensor([2, 2]), torch.zeros(2, 4, dtype=torch.long)
    yield call(a._embedding_bag_dense_backward, torch.rand(2, 4), bag, ids, sizes, most, 3, False, 0, None)
    yield call(a._embedding_bag_dense_backward, torch.rand(2, 4), bag, ids, sizes, most, 3, False, 2, None)
    yield call(a._embedding_bag_dense_backward, torch.rand(2, 4), bag, ids, sizes, most, 3, True, 1, None)
    for mode in range(3):
        for given in (ids, torch.zeros(0, dtype=torch.long)):
            weights = (torch.rand(4),) if not mode else (None,)
            arguments = (torch.rand(2, 4), bag, torch.tensor([0, 2]), given, sizes, most, 3, False, mode, False)
            yield call(a._embedding_bag_backward, *arguments, *weights)
    yield call(
        a._embedding_bag_per_sample_weights_backward,
        *(torch.rand(2, 4), torch.rand(3, 4), bag, torch.tensor([0, 2]), ids, 0),
    )
    for bounds in ({"lengths": torch.tensor([3, 1])}, {"offsets": torch.tensor([0, 3, 4])}):
        yield call(a.segment_reduce, x, "sum", **bounds)
        yield call(a._segment_reduce_backward, torch.rand(2, 5), torch.rand(2, 5), x, "max", **bounds)
    bounds = {"lengths": torch.tensor([[3, 2], [1, 4], [5, 0], [0, 5]]), "axis": 1}
    yield call(a.segment_reduce, x, "mean", **bounds)
    yield call(a._segment_reduce_backward, torch.rand(4, 2), torch.rand(4, 2), x, "mean", **bounds)
    scale, zero_point, on = torch.rand(1), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    yield call(a.fake_quantize_per_tensor_affine_cachemask, x, 0.1, 0, -128, 127)
    yield call(a._fake_quantize_per_tensor_affine_cachemask_tensor_qparams, x, scale, zero_point, on, -128, 127)
    yield call(a._fake_quantize_learnable_per_tensor_affine, x, scale, scale, -128, 127)
    yield call(a._fake_quantize_learnable_per_tensor_affine_backward, x, x, scale, scale, -128, 127)
    scales, zero_points = torch.rand(5), torch.zeros(5, dtype=torch.int32)
    yield call(a.fake_quantize_per_channel_affine_cachemask, x, scales, zero_points, 1, -128, 127)
    yield call(a._fake_quantize_learnable_per_channel_affine, x, scales, scales, 1, -128, 127)
    yield call(a._fake_quantize_learnable_per_channel_affine_backward, x, x, scales, scales, 1, -128, 127)
    for per_row in (False, True):
        ranges = (scales[:4].clone(), scales[:4] + 1) if per_row else (scale.clone(), scale + 1)
        quantized = (scales[:4].clone(), zero_points[:4].clone()) if per_row else (scale, zero_point)
        arguments = (x, on, on, *ranges, *quantized, 0.01, -128, 127, 0, per_row, False)
        yield call(a._fused_moving_avg_obs_fq_helper, *arguments)
    yield call(a.linalg_ldl_solve, *torch.linalg.ldl_factor(torch.tensor([[0.0, 1], [1, 0]])), torch.rand(2, 3))
    yield call(a.linalg_ldl_solve, *torch.linalg.ldl_factor(x[:, :4] + x[:, :4].mT), torch.rand(4, 3))
    yield call(a._histogramdd_bin_edges, x[:, :2], [3, 4])
    yield call(a._histogramdd_from_bin_cts, x[:, :2], [3, 4], weight=torch.rand(4))
    edges = [torch.linspace(0, 1, 4), torch.linspace(0, 1, 5)]
    yield call(a._histogramdd_from_bin_tensors, x[:, :2], edges, weight=torch.rand(4))
    yield call(a.hash_tensor, x)
    yield call(a.hash_tensor, whole, [1], keepdim=True)
    yield call(a._euclidean_dist, x, y)
    yield call(a._fused_rms_norm, x, [5], torch.rand(5), 1e-5)
    yield call(a._fused_rms_norm_backward, x, x, [5], torch.rand(4, 1), torch.rand(5), [True, True])
    heads = torch.rand(2, 2, 4, 8)
    yield call(a._fused_sdp_choice, heads, heads, heads)
    for mask_of in (None, torch.rand(4, 4), torch.rand(2, 2, 4, 4)):
        attention = a._scaled_dot_product_flash_attention_for_cpu
        yield call(attention, heads, heads, heads, 0.0, False, attn_mask=mask_of)
        out, logsumexp = attention(heads, heads, heads, 0.0, False, attn_mask=mask_of)
        yield call(
            a._scaled_dot_product_flash_attention_for_cpu_backward,
            *(heads, heads, heads, heads, out, logsumexp, 0.0, False),
            attn_mask=mask_of,
        )
    yield call(
        a._grouped_mm, torch.rand(8, 16).bfloat16(), torch.rand(2, 16, 16).bfloat16(), torch.tensor([4, 8]).int()
    )
    yield call(a._grouped_mm, torch.rand(2, 8, 16).bfloat16(), torch.rand(2, 16, 16).bfloat16())
    yield call(a._grouped_mm, torch.rand(8, 16), torch.rand(2, 16, 16), torch.tensor([4, 8]).int())
    yield call(a._grouped_mm, torch.rand(16, 8), torch.rand(8, 16), torch.tensor([4, 8]).int())
    yield call(a._grouped_mm, torch.rand(2, 8, 16), torch.rand(16, 8), torch.tensor([4, 8]).int())
    yield call(a._index_put_impl_, x.clone(), [torch.tensor([1, 2])], torch.rand(2, 5), True)
    yield call(a._unsafe_index, x, [torch.tensor([1, 2])])
    yield call(a._unsafe_index_put, x, [torch.tensor([1, 2])], torch.rand(2, 5))
    yield call(a._int_mm, torch.ones(17, 8, dtype=torch.int8), torch.ones(8, 16, dtype=torch.int8))
    yield call(a._linalg_eigvals, torch.rand(3, 3))
    yield call(a.linalg_eigvals, torch.rand(3, 3))
    yield call(a._cholesky_solve_helper, torch.rand(3, 2), torch.eye(3), False)
    yield call(a._logcumsumexp, x, 1)
    yield call(a._masked_scale, x, mask, 2.0)
    yield call(a._masked_softmax, x, mask, 1)
    yield call(a._masked_softmax, torch.rand(2, 2, 4, 4), torch.zeros(2, 4, dtype=torch.bool), None, 1)
    yield call(a._masked_softmax, torch.rand(2, 2, 4, 4), torch.zeros(4, 4, dtype=torch.bool), None, 0)
    yield call(a._masked_softmax, torch.rand(2, 2, 4, 4), torch.zeros(2, 2, 4, 4, dtype=torch.bool), None, 2)
    yield call(a._masked_softmax_backward, x, y, mask, 1)
    yield call(a._sample_dirichlet, x)
    yield call(a._standard_gamma, x)
    yield call(a._standard_gamma_grad, x, y)
    yield call(a.binomial, torch.full((4, 5), 3.0), x)
    yield call(a.poisson, x)
    yield call(a._slow_conv2d_forward, half, torch.rand(4, 3, 3, 3), [3, 3], None, [1, 1], [0, 0])
    yield call(
        a._slow_conv2d_backward.output_mask,
        torch.rand(1, 4, 2, 2),
        half,
        torch.rand(4, 3, 3, 3),
        [3, 3],
        [1, 1],
        [0, 0],
        masks,
    )
    gradients = [torch.empty(1, 3, 4, 4), torch.empty(4, 3, 3, 3), torch.empty(4)]
    yield call(
        a._slow_conv2d_backward.grad_input,
        *(torch.rand(1, 4, 2, 2), half, torch.rand(4, 3, 3, 3), [3, 3], [1, 1], [0, 0]),
        **dict(zip(("grad_input", "grad_weight", "grad_bias"), gradients, strict=True)),
    )
    yield call(a.slow_conv3d_forward, volume, torch.rand(4, 3, 3, 3, 3), [3] * 3, None, [1] * 3, [0] * 3)
    yield call(a.slow_conv_dilated2d, image, torch.rand(4, 3, 3, 3), [3, 3])
    yield call(a.slow_conv_dilated3d, volume, torch.rand(4, 3, 3, 3, 3), [3] * 3)
    yield call(a.slow_conv_transpose2d, image, torch.rand(3, 4, 3, 3), [3, 3])
    yield call(a.slow_conv_transpose3d, volume, torch.rand(3, 4, 3, 3, 3), [3] * 3)
    yield call(a.conv_depthwise3d, volume, torch.rand(3, 1, 3, 3, 3), [3] * 3, None, [1] * 3, [0] * 3, [1] * 3)
    yield call(a._stack, [x, y])
    gates, hidden = torch.rand(2, 9), torch.rand(2, 3)
    yield call(a._thnn_fused_gru_cell, gates, gates, hidden)
    yield call(a._thnn_fused_gru_cell_backward, hidden, torch.rand(2, 15), True)
    yield call(a._transform_bias_rescale_qkv, torch.rand(2, 3, 24), torch.rand(24), 2)
    for kind in ("bilinear", "bicubic", "lanczos"):
        yield call(getattr(a, f"_upsample_{kind}2d_aa"), image, [5, 11], False)
        yield call(getattr(a, f"_upsample_{kind}2d_aa_backward"), torch.rand(2, 3, 5, 11), [5, 11], [2, 3, 8, 8], False)
    yield call(
        a._weight_int8pack_mm,
        torch.rand(4, 32).bfloat16(),
        torch.ones(16, 32, dtype=torch.int8),
        torch.rand(16).bfloat16(),
    )
    yield call(a._weight_norm_interface, x, torch.rand(4, 1))
    yield call(a._weight_norm_interface, x, torch.rand(1, 5), 1)
    yield call(a._weight_norm_interface_backward, x, x, torch.rand(4, 1), torch.rand(4, 1), 0)
    yield call(a._weight_norm_interface_backward, x, x, torch.rand(1, 5), torch.rand(1, 5), 1)
    yield call(a.adaptive_avg_pool1d.default, torch.rand(2, 3, 8), [4])
    yield call(a.avg_pool1d.default, torch.rand(2, 3, 8), [2])
    for size in (3, 4):
        yield call(a.adaptive_avg_pool2d.default, image, [size, size])
        yield call(a.adaptive_avg_pool3d.default, volume, [size] * 3)
        yield call(a._adaptive_avg_pool3d_backward, torch.rand(2, 3, size, size, size), volume)
        target = torch.empty_like(volume)
        yield call(
            a.adaptive_avg_pool3d_backward.grad_input, torch.rand(2, 3, size, size, size), volume, grad_input=target
        )
    yield call(a.affine_grid_generator, torch.rand(2, 2, 3), [2, 3, 4, 5], False)
    yield call(a.affine_grid_generator, torch.rand(2, 3, 4), [2, 3, 4, 5, 6], False)
    for name in ("bartlett", "blackman", "hamming", "hann", "kaiser"):
        yield call(getattr(a, f"{name}_window"), 7)
    yield call(a.fft_fftfreq, 7)
    yield call(a.fft_rfftfreq, 7)
    yield call(a.range, 0, 5)
    yield call(a.im2col, image, [3, 3], [1, 1], [0, 0], [1, 1])
    yield call(a.col2im, torch.rand(2, 27, 36), [8, 8], [3, 3], [1, 1], [0, 0], [1, 1])
    yield call(a.conj_physical, torch.rand(4, dtype=torch.complex64))
    yield call(a.embedding_renorm_, torch.rand(5, 3), bag, 1.0, 2.0)
    yield call(a.glu_jvp, x[:, :2], x[:, :4], y[:, :4], 1)
    yield call(a.glu_backward_jvp, x[:, :4], x[:, :2], x[:, :4], x[:, :2], x[:, :4], 1)
    yield call(a.linear.default, x, torch.rand(3, 5), torch.rand(3))
    yield call(a.log_softmax.int, x, 1)
    yield call(a.softmax.int, x, 1)
    yield call(a.linalg_eigvals.default, torch.rand(3, 3))
    yield call(a.conj_physical.default, torch.rand(4, dtype=torch.complex64))
    yield call(a._fused_rms_norm.default, x, [5], torch.rand(5), 1e-5)
    yield call(a.native_norm.default, x)
    yield call(a.native_norm.ScalarOpt_dim_dtype, x, 2.0, [1], False, None)
    yield call(a.native_channel_shuffle, torch.rand(2, 4, 3, 3), 2)
    yield call(a.channel_shuffle, torch.rand(2, 4, 3, 3), 2)
    yield call(a.native_dropout, x, 0.5, True)
    yield call(a.normal_functional, x)
    yield call(a.rand_like, x)
    yield call(a.random, x)
    yield call(a.randperm, 7)
    yield call(a.rrelu_with_noise_functional, x, y, training=True)
    yield call(a.rrelu_with_noise, x, y, 0.125, 0.3, True)
    yield call(a.rrelu_with_noise_backward, x, x, y, 0.125, 0.3, True, False)
    yield call(a.searchsorted, torch.rand(6).sort().values, x)
    yield call(a.searchsorted, x.sort().values, y, sorter=torch.arange(5).expand(4, 5).contiguous())
    yield call(a.bucketize, x, torch.rand(6).sort().values)
    yield call(a.slice_scatter, x, torch.rand(2, 5), 0, 1, 3)
    yield call(a.unique_dim_consecutive, whole, 0)
    yield call(a.unsafe_split_with_sizes, x, [1, 4], 1)
    for backward, size in (("max_pool2d_with_indices_backward", 2), ("max_pool3d_with_indices_backward", 3)):
        pooled, indices = getattr(F, f"max_pool{size}d")(
            volume[..., 0] if size == 2 else volume, 2, return_indices=True
        )
        source = volume[..., 0] if size == 2 else volume
        window = ([2] * size, [2] * size, [0] * size, [1] * size, False)
        yield call(getattr(a, backward), pooled, source.contiguous(), *window, indices)
        yield call(
            getattr(a, f"max_unpool{size}d"),
            pooled,
            indices,
            list(source.shape[2:]),
            *([[2] * 3, [0] * 3] if size == 3 else []),
        )


def _foreach(operator: Any, tensors: list[Tensor], others: list[Tensor]) -> Iterator[tuple[Any, Any, Any]]:
    """A call of an operator over lists, made by the types in its schema."""
    made: list[Any] = []
    for index, argument in enumerate(operator._schema.arguments):
        kind = str(argument.type)
        if argument.has_default_value():
            continue
        if kind == "List[Tensor]":
            made.append([t.clone() for t in (others if index else tensors)])
        elif kind == "List[number]":
            made.append([2.0] * len(tensors))
        elif kind == "Tensor":
            made.append(torch.tensor(2.0) if argument.name in ("other", "scalars") else torch.rand(2))
        else:
            made.append(2.0)
    yield operator, tuple(made), {}


if __name__ == "__main__":
    main()
