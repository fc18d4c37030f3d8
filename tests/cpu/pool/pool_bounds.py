"""Runs changed operator calls in an executor whose tensors end at an inaccessible page: leaving one is a SIGSEGV.

    PYTHONPATH=src:tests/cpu/pool python tests/cpu/pool/pool_bounds.py              # everything, some minutes
    ... pool_bounds.py --share 0.1 --seed 7 --operator aten::native_batch_norm
    ... pool_bounds.py --without-rules              # what the operators would do without `shape_checks.RULES`

It prints a JSON object: how many calls were executed and refused, and those that ended the process. Calls run in
forked children; after a crash the next child goes on behind it. Storages of arguments lie in pages that this file maps.
Where a C compiler is there, results and temporary tensors do so, too: see `guarded_allocator.c`.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from pool_operator_calls import changed, contents, valid_calls

from warpbus.pool.protocol.inference import infer
from warpbus.pool.protocol.instructions import Writer, call_prefix
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.shape_checks import RULES
from warpbus.pool.tenant.storages import Storage

PAGE = mmap.PAGESIZE
SLOT = 64 * PAGE
SLOTS = 64
SECONDS_EACH = 10
MEMORY = 4 << 30
MOST_CRASHES = 3
"""Of one operator: what crashes so often is skipped."""


class GuardedPages:
    """Memory in slots; each lies between two pages that must not be touched."""

    def __init__(self):
        self._map = mmap.mmap(-1, SLOTS * (SLOT + PAGE) + PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for slot in range(SLOTS + 1):
            if protect(address + slot * (SLOT + PAGE), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def block(self, slot, nbytes, *, at_end):
        """uint8 `[nbytes]` that ends where its slot ends, or begins where it begins."""
        if slot >= SLOTS or nbytes > SLOT:
            raise MemoryError(f"a block of {nbytes} bytes in slot {slot}")
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        start = PAGE + slot * (SLOT + PAGE)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start + (SLOT - nbytes) * at_end)


def attempt(call, pages, at_end):
    """Send a call to a new executor. Returns "executed", "failed" or "refused": it was not tried."""
    try:
        signature, numbers = call.signature()
        encoded = signature.encode()
        try:
            outputs = infer(signature)
        except NotImplementedError:
            outputs = ()  # nobody knows before; that it is wrong shows after the call
        signature = replace(signature, outputs=outputs)
        encoded = signature.encode()
        handles = signature.results
    except Exception:  # whatever PyTorch raises: an executor raises it, too, and does not call the operator
        return "refused"
    executor = Executor(torch.device("cpu"), Quota(1 << 30, 1.0))
    for slot, (tensor, geometry) in enumerate(zip(call.tensors(), signature.inputs, strict=True)):
        nbytes = geometry.extent
        block = pages.block(slot, nbytes, at_end=at_end)
        block.copy_(contents(tensor, nbytes))
        executor.storages.take(1 + slot, Storage(nbytes, block, {}, 0))
    packed = struct.pack(f"<{len(signature.inputs)}Q", *range(1, 1 + len(signature.inputs)))
    packed += b"".join(struct.pack("<d" if isinstance(n, float) else "<q", n) for n in numbers)
    packed += struct.pack(f"<{handles}Q", *range(1000, 1000 + handles))
    writer = Writer()
    writer.define(0, encoded)
    writer.call(call_prefix(0) + packed)
    return "failed" if executor.execute(1, memoryview(writer.take())) else "executed"


def prepare(calls):
    """Let PyTorch import what its meta functions need: it takes seconds, and would be done in each child."""
    for call in calls:
        if not call.change:
            with contextlib.suppress(Exception):  # some calls have no meta function
                infer(call.signature()[0])


def survey(calls, at_end, most=MOST_CRASHES):
    """Attempt all calls; what became of them, and those that ended their process with the signal that did."""
    prepare(calls)
    progress = mmap.mmap(-1, 8 * 8)
    counts, crashes, per_operator = Counter(), [], Counter()
    position = 0
    while position < len(calls):
        progress[:] = bytes(len(progress))
        child = os.fork()
        if not child:
            work(calls, position, at_end, progress, {name for name, n in per_operator.items() if n >= most})
        _, status = os.waitpid(child, 0)
        done, *outcomes = struct.unpack("<4Q", progress[:32])
        counts.update(dict(zip(("executed", "failed", "refused"), outcomes, strict=True)))
        if os.WIFSIGNALED(status):
            call = calls[done]
            per_operator[call.name] += 1
            crashes.append((call, signal.Signals(os.WTERMSIG(status)).name))
            print(crashes[-1][1], call, file=sys.stderr, flush=True)
            position = done + 1
        elif os.WEXITSTATUS(status):
            raise RuntimeError(f"the child failed at {calls[done]}")
        else:
            break
    return counts, crashes


def work(calls, position, at_end, progress, skipped):
    """The child: attempt calls from `position` on, and say how far it is."""
    try:
        warnings.simplefilter("ignore")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        limit_memory()
        pages = GuardedPages()
        outcomes = Counter()
        for index in range(position, len(calls)):
            progress[:8] = struct.pack("<Q", index)
            if calls[index].name in skipped:
                continue
            signal.alarm(SECONDS_EACH)
            outcomes[attempt(calls[index], pages, at_end)] += 1
            progress[8:32] = struct.pack("<3Q", *(outcomes[each] for each in ("executed", "failed", "refused")))
    except BaseException as error:
        os.write(1, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def limit_memory():
    """An operator that asks for very much gets an error; what is mapped without access does not count."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def chosen(share, seed, names=()):
    """Valid calls and their changes; a random share of the changes."""
    rng = random.Random(seed)
    calls = []
    for call in valid_calls():
        if not names or call.name.partition(".")[0] in names:
            calls.append(call)
            calls.extend(changed(call, lambda: rng.random() < share))
    return calls


def report(counts, crashes):
    return {
        **counts,
        "operators": sorted({call.name for call, _ in crashes}),
        "crashes": [f"{name} {call}" for call, name in crashes],
    }


def guard_results(folder):
    """The environment for a process whose results are guarded, too; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = Path(folder) / "guarded_allocator.so"
    source = Path(__file__).with_name("guarded_allocator.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0, help="of the changed calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operator", action="append", default=[], help="name without overload; may be repeated")
    parser.add_argument("--without-rules", action="store_true", help="of `shape_checks`")
    parser.add_argument("--at", choices=("end", "start"), default="end", help="where tensors lie in their pages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = None if "LD_PRELOAD" in os.environ else guard_results(folder)
        if environment is not None:
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    if options.without_rules:
        RULES.clear()
    torch.set_num_threads(1)
    calls = chosen(options.share, options.seed, options.operator)
    print(json.dumps(report(*survey(calls, options.at == "end")), indent=1))


if __name__ == "__main__":
    main()
