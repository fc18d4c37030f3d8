"""A client by hand: batches of instructions for an executor, written out."""

from dataclasses import replace

import torch

from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.inference import infer
from warpbus.pool.protocol.instructions import MAX_WRITE, Instruction, Writer, layout
from warpbus.pool.protocol.signature import DevicePlaceholder, Input, New, Number, Same, Signature


class Handle(int):
    """Of a storage, with where its tensor lies in it."""

    geometry: Geometry


def handle(number, geometry):
    made = Handle(number)
    made.geometry = geometry
    return made


class Hand:
    """Calls operators on an executor. Tensors are `Handle`s; what a call is given is split as a client would."""

    def __init__(self, executor):
        self.executor = executor
        self.writer = Writer()
        self.next = 100
        self.batch = executor.executed
        self.definitions = {}

    def put(self, tensor):
        """Upload a CPU tensor."""
        made = self.empty(tensor.shape, tensor.dtype)
        data = bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        for start in range(0, len(data), MAX_WRITE):
            self.writer.write(made, start, data[start : start + MAX_WRITE])
        return made

    def empty(self, shape, dtype=torch.float32):
        geometry = contiguous(dtype, tuple(shape))
        made = self._handle(geometry)
        self.writer.new(made, geometry.extent)
        return made

    def call(self, operator, *arguments, **keywords):
        """The results' handles: one, or a list; of a dynamic call all that are reserved."""
        inputs, numbers = [], []

        def named(argument):
            if isinstance(argument, Handle):
                inputs.append(argument)
                return Input(len(inputs) - 1)
            if isinstance(argument, float):
                numbers.append(argument)
                return Number("float", len(numbers) - 1)
            if isinstance(argument, list | tuple):
                return tuple(named(item) for item in argument)
            return DevicePlaceholder() if isinstance(argument, torch.device) else argument

        signature = Signature(
            operator,
            tuple(named(argument) for argument in arguments),
            tuple((name, named(argument)) for name, argument in keywords.items()),
            tuple(each.geometry for each in inputs),
            ("float",) * len(numbers),
        )
        return self.signed(replace(signature, outputs=infer(signature)), inputs, numbers)

    def signed(self, signature, inputs, numbers=()):
        """The same of a signature that is there already."""
        encoded = signature.encode()
        if encoded not in self.definitions:
            self.definitions[encoded] = len(self.definitions)
            self.writer.define(self.definitions[encoded], encoded)
        if signature.outputs is None:
            results = [self._handle(None) for _ in range(signature.results)]
        else:
            results = [self._handle(each.geometry) for each in signature.outputs if isinstance(each, New)]
        form = layout(len(inputs), signature.numbers, len(results))
        number = self.definitions[encoded].to_bytes(4, "little")
        self.writer.buffer += bytes([Instruction.CALL]) + number + form.pack(*inputs, *numbers, *results)
        if signature.outputs is None:
            return results
        new = iter(results)
        given = [inputs[each.index] if isinstance(each, Same) else next(new) for each in signature.outputs if each]
        return given[0] if len(given) == 1 else given

    def view(self, tensor, shape, stride, offset=0):
        """Another tensor of a storage, as a client makes it by itself."""
        return handle(tensor, Geometry(tensor.geometry.dtype, tuple(shape), tuple(stride), offset))

    def send(self):
        """Have the executor execute what was written; its failures."""
        self.batch += 1
        return self.executor.execute(self.batch, memoryview(bytes(self.writer.take())))

    def get(self, tensor):
        """Read a tensor back."""
        if self.writer.buffer:
            failures = self.send()
            assert failures == [], failures
        geometry = tensor.geometry
        data = b"".join(bytes(part) for part in self.executor.answer(["read", int(tensor), 0, geometry.extent]))
        flat = torch.frombuffer(bytearray(data), dtype=geometry.dtype) if data else torch.empty(0, dtype=geometry.dtype)
        return flat.as_strided(geometry.shape, geometry.stride, geometry.offset)

    def _handle(self, geometry):
        self.next += 1
        return handle(self.next, geometry)
