"""Times variants of the decode kernel: microseconds by shape (temporary)."""
import itertools
from concurrent.futures import ThreadPoolExecutor
import torch
from warpbus.bench.quantized import random_weight
from warpbus.bench.trellis import random_trellis
from warpbus.kernels.ops import trellis_decode as t
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.trellis_linear import trellis_linear
from warpbus.kernels.ops.trellis_dequantize import multiply_dequantized, dequantize_trellis
from warpbus.kernels.ops.trellis_packed import pack_trellis
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.qtensor import Scheme

GPU, D = torch.device("cuda"), torch.bfloat16
SHAPES = [(4608, 4096), (4096, 4096), (27392, 4096), (4096, 13696)]


def timed(calls):
    for c in calls: c()
    torch.cuda.synchronize()
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            for c in calls: c()
    best = 1e9
    for _ in range(12):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); g.replay(); g.replay(); b.record(); torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b) * 500 / len(calls))
    return best


@torch.no_grad()
def main():
    W3 = Scheme.parse("w3a16-trellis"); W4 = Scheme.parse("w4a16-g128")
    held = {}
    for n, k in SHAPES:
        copies = max(4, int(3e8 // (n * k * 3 / 8)))
        copies = min(copies, 24)
        held[n, k] = [pack_trellis(random_trellis(W3, n, k, GPU), D) for _ in range(copies)]
    x = {k: torch.randn(128, k, device=GPU, dtype=D) for k in (4096, 13696)}
    four = {s: [pack(random_weight(W4, *s, GPU), D) for _ in range(len(held[s]))] for s in SHAPES}
    dense = {s: [torch.randn(*s, device=GPU, dtype=D) for _ in range(3)] for s in SHAPES}
    for m in (1, 8, 16):
        print(m, "w4a16 ", *(f"{timed([lambda w=w: wna16_linear(x[s[1]][:m], w) for w in four[s]]):8.2f}" for s in SHAPES))
    print(1, "bf16  ", *(f"{timed([lambda w=w: torch.nn.functional.linear(x[s[1]][:1], w) for w in dense[s]]):8.2f}" for s in SHAPES), flush=True)
    rings = [(1, 6), (2, 3), (2, 4)]
    def variants(m):
        for warps, resident, sep, sh, (span, depth) in itertools.product((16, 8), (1, 2, 3, 4), (0, 1), (1, 2, 3, 4), rings):
            if warps * resident not in (16, 24, 32): continue
            if m == 16 and (sh not in (1, 2, 3) or depth == 4): continue
            yield t.TrellisVariant(3, 8 if m <= 8 else 16, depth, span, sep, sh, warps, resident)
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda v: v.kernel(D).unit.compile("sm_90a"), [v for m in (1, 16) for v in variants(m)]))
    print("compiled", flush=True)
    for m in (1, 16):
        lines = []
        for v in variants(m):
            row = []
            for s in SHAPES:
                found = None
                for slices in (1, 2) if m == 1 else (1, 2, 4):
                    if v.shared(m, s[1], slices) * v.resident > 226 * 1024 - 1024 * v.resident: continue
                    p = t.TrellisPlan(v, slices)
                    out = torch.empty(m, s[0], device=GPU, dtype=D)
                    try:
                        us = timed([lambda w=w: t.multiply(x[s[1]][:m], w, None, None, 0.0, None, False, out, p) for w in held[s]])
                    except Exception as e:
                        print("failed", v, slices, str(e)[:200], flush=True); us = 1e9
                    if found is None or us < found[0]: found = (us, slices)
                row.append(found or (1e9, 0))
            lines.append((sum(r[0] for r in row), f"{m} w{v.warps} r{v.resident} sep{v.separate} sh{v.shifts} span{v.span} depth{v.depth} " + " ".join(f"{us:8.2f}/{sl}" for us, sl in row)))
        for total, line in sorted(lines): print(f"{total:8.2f}", line)
    for m in (17, 32, 48, 64, 128):
        print(m, "dequantized", *(f"{timed([lambda w=w: multiply_dequantized(x[s[1]][:m], w, None) for w in held[s]]):8.2f}" for s in SHAPES))
        print(m, "w4a16      ", *(f"{timed([lambda w=w: wna16_linear(x[s[1]][:m], w) for w in four[s]]):8.2f}" for s in SHAPES))
        print(m, "bf16       ", *(f"{timed([lambda w=w: torch.nn.functional.linear(x[s[1]][:m], w) for w in dense[s]]):8.2f}" for s in SHAPES))
    print("dequantize", *(f"{timed([lambda w=w: dequantize_trellis(w, range(4096), range(w.shape[1])) for w in held[s]]):8.2f}" for s in SHAPES))


main()
