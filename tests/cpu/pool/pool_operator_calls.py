"""Operator calls as data: valid ones from a file, and changes of them such as a hostile client may send.

`operator_calls.jsonl` is written by `scripts/record_operator_calls.py`.
"""

import copy
import json
import math
from collections import defaultdict
from pathlib import Path

import torch

from warpbus.pool.client.calls import goes_along, number_positions
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.inference import flat
from warpbus.pool.protocol.operators import ATEN, operator, overloads
from warpbus.pool.protocol.signature import NUMBER_KINDS, DevicePlaceholder, Input, Number, Signature

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
FILE = Path(__file__).with_name("operator_calls.jsonl")
EACH_DERIVED = 2
DTYPES = ("float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool", "complex64")
NUMBERS = (math.nan, -1.0, 1e4, -1e30)
MARKS = ("torch", "complex", "device")
INDICES = (-1, 1 << 20, -(1 << 40), 1 << 62)


class Call:
    """One call.

    Attributes:
        name: of the operator.
        arguments, keywords: as in the file; a tensor is a dictionary with "dtype", "shape" and "stride".
        change: what was changed, or "" if the call is valid.
    """

    def __init__(self, name, arguments, keywords, change=""):
        self.name, self.arguments, self.keywords, self.change = name, arguments, keywords, change

    def __str__(self):
        return f"{self.name} [{self.change}] {json.dumps([self.arguments, self.keywords])[:600]}"

    def tensors(self):
        """All tensors, in order."""
        return [at[key] for at, key in spots([self.arguments, self.keywords]) if is_tensor(at[key])]

    def signature(self):
        """The signature as a client sends it, without outputs; and the numbers that go with the call."""
        overload = operator(self.name)
        positions = number_positions(overload)
        inputs, numbers, values = [], [], []

        def named(value, is_number):
            if is_tensor(value):
                inputs.append(geometry(value))
                return Input(len(inputs) - 1)
            if isinstance(value, list):
                return tuple(named(item, is_number) for item in value)
            if goes_along(value, is_number):
                numbers.append(NUMBER_KINDS[(int, float, bool).index(type(value))])
                values.append(value)
                return Number(numbers[-1], len(numbers) - 1)
            if isinstance(value, dict):
                return DevicePlaceholder() if "device" in value else plain(value)
            return value

        arguments = tuple(named(v, n) for v, n in zip(self.arguments, positions.values(), strict=False))
        keywords = tuple((name, named(value, positions[name])) for name, value in self.keywords.items())
        return Signature(self.name, arguments, keywords, tuple(inputs), tuple(numbers)), values

    def run(self):
        """Execute it here."""

        def made(value):
            if is_tensor(value):
                found = torch.empty(0, dtype=getattr(torch, value["dtype"]))
                data = contents(value, geometry(value).extent)
                return found.set_(data.untyped_storage(), 0, value["shape"], value["stride"])
            if isinstance(value, list):
                return [made(item) for item in value]
            return plain(value) if isinstance(value, dict) else value

        overload = operator(self.name)
        return overload(*map(made, self.arguments), **{name: made(value) for name, value in self.keywords.items()})


def is_tensor(value):
    return isinstance(value, dict) and "shape" in value


def plain(value):
    """An argument that is marked in the file."""
    if "torch" in value:
        return getattr(torch, value["torch"])
    return complex(*value["complex"]) if "complex" in value else torch.device("cpu")


def geometry(tensor):
    return Geometry(getattr(torch, tensor["dtype"]), tuple(tensor["shape"]), tuple(tensor["stride"]))


def outline(tensor):
    """A tensor of the file that is like a result."""
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "stride": list(tensor.stride())}


def contents(tensor, nbytes):
    """What is in a tensor's storage: its values over and over, or random numbers. uint8 `[nbytes]`."""
    dtype = getattr(torch, tensor["dtype"])
    count = nbytes // dtype.itemsize
    if "fill" in tensor:
        return torch.full((count,), tensor["fill"], dtype=dtype).view(torch.uint8)
    if "values" in tensor:
        values = torch.tensor(tensor["values"], dtype=torch.int64).view(-1).to(dtype)
        values = values.repeat(count // max(values.numel(), 1) + 1)[:count]
    elif dtype.is_floating_point or dtype.is_complex:
        made = torch.rand(count, generator=torch.Generator().manual_seed(count))
        values = made.to(dtype)
    else:
        values = torch.arange(count).remainder(2).to(dtype)
    return values.contiguous().view(torch.uint8) if count else torch.empty(0, dtype=torch.uint8)


def valid_calls():
    """Calls of the file, and those in place and with `out=` that follow from them."""
    recorded = [Call(*json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]
    of_packet, names = defaultdict(list), {call.name for call in recorded}
    for call in recorded:
        of_packet[call.name.removeprefix("aten::").partition(".")[0]].append(call)
    derived = []
    for packet in sorted(ATEN):
        for overload in overloads(packet):
            # Without a CPU kernel of its own it is generated: it calls the functional one, and copies the results.
            if overload.name() not in names and has_kernel(overload.name(), "CPU"):
                siblings = of_packet[packet] or of_packet[packet + "_"]
                derived += written_form(overload, siblings)
    return recorded + derived


def written_form(overload, siblings):
    """Calls of an overload that writes, made of calls of one that does not."""
    schema = overload._schema.arguments
    outs = [a.name for a in schema if a.is_out]
    wanted = [(a.name, str(a.type)) for a in schema if not a.is_out]
    found = []
    for call in siblings:
        given = [(a.name, str(a.type)) for a in operator(call.name)._schema.arguments]
        if given != wanted or len(found) == EACH_DERIVED:
            continue
        keywords = copy.deepcopy(call.keywords)
        if outs:
            try:
                results = [each for each in flat(call.run()) if isinstance(each, torch.Tensor)]
            except (RuntimeError, IndexError, NotImplementedError):
                continue
            if len(schema) and str(next(a for a in schema if a.is_out).type) == "List[Tensor]":
                keywords[outs[0]] = [outline(each) for each in results]
            else:
                keywords.update(zip(outs, map(outline, results), strict=False))
        found.append(Call(overload.name(), copy.deepcopy(call.arguments), keywords))
    return found


def spots(value):
    """Every place of a nested argument, as a container and a key; tensors are not entered."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        item = value[key]
        if isinstance(item, list) or (isinstance(item, dict) and not {"shape", *MARKS} & set(item)):
            yield from spots(item)


def changed(call, wanted=lambda: True):
    """The call with one thing changed, over and over, each a `Call` of its own; those that are not wanted left out."""
    others = [tensor["shape"] for tensor in call.tensors()]
    count = sum(1 for _ in spots([call.arguments, call.keywords]))
    for index in range(2, count):
        original = nth(call, index)
        for what, value in replacements(original, others):
            if not wanted():
                continue
            copied = Call(call.name, copy.deepcopy(call.arguments), copy.deepcopy(call.keywords), f"{index}: {what}")
            set_nth(copied, index, value)
            yield copied


def nth(call, index):
    return next(at[key] for i, (at, key) in enumerate(spots([call.arguments, call.keywords])) if i == index)


def set_nth(call, index, value):
    for i, (at, key) in enumerate(spots([call.arguments, call.keywords])):
        if i == index:
            at[key] = value
            return


def replacements(value, shapes):
    """What may stand in place of an argument, each with a word for it."""
    if is_tensor(value):
        yield from tensors_for(value, shapes)
    elif isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, int):
        for other in sorted({-1, 0, 1, value + 1, value * 2 + 1, 1000, 1 << 31, 1 << 62} - {value}):
            yield f"{value} to {other}", other
    elif isinstance(value, float):
        for other in (math.nan, math.inf, -1.0, 0.0, 1e30):
            yield f"{value} to {other}", other
    elif isinstance(value, list) and value:
        yield "the first left out", value[1:]
        yield "the last left out", value[:-1]
        yield "the last twice", [*value, value[-1]]
        yield "emptied", []


def tensors_for(tensor, shapes):
    """Tensors of other sizes, strides, dtypes and values."""
    shape = tensor["shape"]
    wanted = [[1] * len(shape), [1], [], [0], [math.prod(shape)], [1, *shape], [*shape, 1], shape[1:], shape[:-1]]
    for axis, n in enumerate(shape):
        for other in (0, 1, n - 1, n + 1, 2 * n + 1):
            wanted.append([*shape[:axis], other, *shape[axis + 1 :]])
    seen = [shape]
    for other in wanted + shapes:
        if other not in seen and min(other, default=0) >= 0:
            seen.append(other)
            stride = list(contiguous(torch.uint8, tuple(other)).stride)
            yield f"{shape} to {other}", {**tensor, "shape": other, "stride": stride}
    if len(shape) > 1:
        backwards = list(contiguous(torch.uint8, tuple(reversed(shape))).stride)[::-1]
        yield "strides reversed", {**tensor, "stride": backwards}
    if shape:
        yield "strides 0", {**tensor, "stride": [0] * len(shape)}
        yield "strides doubled", {**tensor, "stride": [2 * step for step in tensor["stride"]]}
    for dtype in DTYPES:
        if dtype != tensor["dtype"]:
            yield f"{tensor['dtype']} to {dtype}", {**tensor, "dtype": dtype}
    if "values" in tensor and tensor["dtype"] != "bool":
        for index in INDICES:
            if tensor["dtype"] == "int64" or abs(index) < 1 << 31:
                yield f"values {index}", {**tensor, "values": [index]}
                flat_values = torch.tensor(tensor["values"]).view(-1).tolist()
                if len(flat_values) > 1:
                    flat_values[len(flat_values) // 2] = index
                    yield f"one value {index}", {**tensor, "values": flat_values}
    if tensor["dtype"].startswith(("float", "bfloat")):
        for number in NUMBERS:
            yield f"values {number}", {**tensor, "fill": number}
    yield "None", None
