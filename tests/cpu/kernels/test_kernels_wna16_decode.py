"""The product of a few tokens without a GPU: what fits into shared memory; models of what a block loads and writes."""

import itertools
import random

import pytest
import torch

from warpbus.cuda import driver
from warpbus.kernels.ops import wna16_decode
from warpbus.kernels.ops.packed import PackedWeight, packed_shapes
from warpbus.qtensor import Scheme

HOPPER, GEFORCE = 227 * 1024, 99 * 1024  # bytes of shared memory that a block can ask for
WARPS = wna16_decode._WARPS
SCHEMES = ["w4a16", "w4a16-g128", "w4a16-g64-asym", "w4a16-g32", "w3a16-g32-asym", "w8a16", "w8a16-g32", "w8a16-g128"]
WIDTHS = [1, 64, 96, 1000, 1024, 1088, 3424, 4096, 6848, 13696, 27392]


def weight_of(scheme, n, k):
    scheme = Scheme.parse(scheme)
    none = torch.empty(0)
    return PackedWeight(none, none, None, scheme, (n, k))


@pytest.fixture
def shared_memory(monkeypatch):
    def set_to(size):
        monkeypatch.setattr(driver, "attribute", lambda which, device: size)

    set_to(HOPPER)
    return set_to


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sixteen_rows_of_any_width_fit_hopper(shared_memory, scheme):
    for m, k in itertools.product(range(1, 17), WIDTHS):
        assert wna16_decode.fits(torch.empty(m, k), weight_of(scheme, 64, k))
    assert not wna16_decode.fits(torch.empty(17, 64), weight_of(scheme, 64, 64))


def test_what_is_normed_on_the_way(shared_memory):
    def norms(m, k, scheme="w4a16-g128"):
        return wna16_decode.norms(torch.empty(m, k), weight_of(scheme, 64, k))

    assert norms(16, 4096)
    assert norms(8, 4096, "w8a16")
    assert norms(1, 13696)
    assert not norms(16, 13696)
    assert not norms(1, 4100)  # no whole number of 16 bytes
    shared_memory(GEFORCE)
    assert norms(4, 4096)
    assert not norms(16, 4096)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [HOPPER, GEFORCE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_taken_is_what_is_there(shared_memory, scheme, size, streamed):
    """The layout of decode.cu: x of all steps or of a stage, `Stage`, sums, barriers and squares."""
    shared_memory(size)
    for m, k in itertools.product((1, 7, 8, 9, 16), WIDTHS):
        weight, tokens = weight_of(scheme, 64, k), 8 if m <= 8 else 16
        groups = 2 if weight.scheme.group_size == 32 else 1
        stage = 2 * WARPS * weight.bits // 4 * 32 * 16 + 2 * (2 * (WARPS * groups + 1) * 8 * 4)
        stage = -(-stage // 128) * 128
        rest = WARPS * 2 * (tokens // 8) * 32 * 16 + (3 * 8 + 1) * 8 + tokens * WARPS * 4
        if streamed:
            stage += WARPS * m * 128
        else:
            rest += -(-k // (WARPS * 64)) * WARPS * m * 128
        of_stage, others = wna16_decode._shared(m, k, weight, streamed=streamed)
        assert (of_stage, others) == (stage, rest)
        stages = wna16_decode._stages(torch.empty(m, k), weight, streamed=streamed)
        assert stages * of_stage + others <= size < (stages + 1) * of_stage + others


@pytest.mark.parametrize("grid", [1, 78, 132])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [32, 64, 96, 4608, 27392])
def test_every_tile_has_its_block(n, gated, grid):
    """`Step`, `tile_of` and what is written of a pair of tiles."""
    tiles, gate_tiles = -(-n // 16), n // 32 if gated else 0
    pairs = gate_tiles if gated else (tiles + 1) // 2
    written = []
    for block in range(grid):
        for pair in range(block, pairs, grid):
            found = [pair + r * gate_tiles if gated else min(2 * pair + r, tiles - 1) for r in range(2)]
            assert all(tile < tiles for tile in found)
            rows = [16 * (pair + r * gate_tiles if gated else 2 * pair + r) for r in range(2)]
            written += [row // 16 for row in rows if row < n]
            assert all(row >= n or row == 16 * tile for row, tile in zip(rows, found, strict=True))
    assert sorted(written) == list(range(tiles))


@pytest.mark.parametrize("n", [1, 15, 17, 33, 47, 100])
def test_odd_numbers_of_rows(n):
    tiles = -(-n // 16)
    rows = [16 * (2 * pair + r) + within for pair in range((tiles + 1) // 2) for r in range(2) for within in range(16)]
    assert [row for row in rows if row < n] == list(range(n))


@pytest.mark.parametrize(
    ("scheme", "k"), [(s, k) for s in SCHEMES for k in WIDTHS if k % (Scheme.parse(s).group_size or 1) == 0]
)
def test_loads_stay_inside_the_weight_and_its_stage(scheme, k):
    """`load_weights`: the chunks and the groups of a step, and the group that each warp looks for in the stage."""
    scheme = Scheme.parse(scheme)
    chunks, (words, shape) = -(-k // 64), packed_shapes(scheme, 16, k)
    assert words == chunks * 128 * (8 if scheme.bits == 8 else 4) // 4
    two = 2 if scheme.group_size == 32 else 1
    shift = 31 if scheme.group_size is None else max(scheme.group_size // 64, 1).bit_length() - 1

    def group_of(chunk):
        return 2 * chunk if two == 2 else chunk >> shift

    for first in range(0, chunks, WARPS):
        count = min(WARPS, chunks - first)
        groups = group_of(first + count - 1) + two - group_of(first)
        assert groups <= WARPS * two + 1
        assert group_of(first) + groups <= shape[1]
        for warp in range(count):
            chunk = first + warp
            place = group_of(chunk) - group_of(first)
            assert 0 <= place <= groups - two
            of_columns = [column // (scheme.group_size or k) for column in (64 * chunk, min(64 * chunk + 32, k - 1))]
            assert group_of(chunk) == of_columns[0]
            assert two == 1 or 64 * chunk + 32 >= k or group_of(chunk) + 1 == of_columns[1]


@pytest.mark.parametrize("m", range(1, 17))
def test_fragments_of_x_are_read_from_where_the_copy_engine_puts_them(m):
    """`mine` and `multiply` beside TMA's 128-byte swizzle: a line's 16 bytes lie at their place xor the line mod 8."""
    step = WARPS * m * 128
    assert step % 1024 == 0  # so that the swizzle, which goes by address, begins anew with each step
    for warp, half, tile in itertools.product(range(WARPS), range(2), range(-(-m // 8))):
        for matrix in range(4):
            addresses = []
            for lane in range(8 * matrix, 8 * matrix + 8):
                token = min(8 * tile + lane % 8, m - 1)
                line, column = warp * m + token, 32 * half + 8 * matrix
                address = (line * 128 + (lane // 8 ^ line % 8) * 16) ^ 64 * half
                assert address == line * 128 + (column // 8 ^ line % 8) * 16
                addresses.append(address)
            rows = set(addresses)
            assert len({address // 16 % 8 for address in rows}) == len(rows)  # eight rows from eight groups of banks


@pytest.mark.parametrize("tokens", [8, 16])
def test_a_thread_finishes_the_sums_of_its_row_and_token(tokens):
    """Where accumulators of mma.m16n8k16 lie (PTX ISA), and where `finish` looks for them."""
    where = {}
    for which, lane, tile, register in itertools.product(range(2), range(32), range(tokens // 8), range(4)):
        row, token = lane // 4 + register // 2 * 8, 8 * tile + 2 * (lane % 4) + register % 2
        place = (which * tokens // 8 + tile) * 128 + (lane ^ lane >> 3) * 4
        where[which, row, token] = place + [own ^ which for own in range(4)].index(register)
    for token in range(tokens):
        read = []
        for which, within in itertools.product(range(2), range(16)):  # the threads of a warp
            holder, element = within % 8 * 4 + token % 8 // 2, within // 8 * 2 + token % 2
            place = (which * tokens // 8 + token // 8) * 128 + (holder ^ holder >> 3) * 4 + (element ^ which)
            assert where[which, within, token] == place
            read.append(place % 32)
        assert sorted(read) == list(range(32))  # each from a bank of its own


class Shared:
    """What the warps of a block share at the end of a pair of tiles, and the two barriers between them."""

    def __init__(self, warps, finishers):
        self.sums = [None] * warps  # the round that each warp's are of
        self.arrived = [0, 0]  # at kSummed: warps that multiply, and those that finish
        self.summed = 0  # rounds in which all have arrived
        self.phase, self.pending = 0, finishers  # of the mbarrier `finished`

    def arrive(self, which, warps, finishers):
        self.arrived[which] += 1
        assert self.arrived[which] <= (warps, finishers)[which]  # nobody is a round ahead
        if self.arrived == [warps, finishers]:
            self.arrived, self.summed = [0, 0], self.summed + 1

    def finish(self, finishers):
        self.pending -= 1
        if not self.pending:
            self.phase, self.pending = self.phase + 1, finishers


def multiplying(shared, warp, rounds, sizes):
    for number in range(rounds):
        parity = number % 2
        while shared.phase % 2 == parity ^ 1:  # mbarrier_wait(finished, parity ^ 1): until that phase has ended
            yield
        shared.sums[warp] = number
        yield
        shared.arrive(0, *sizes)
        yield


def finishing(shared, rounds, sizes):
    for number in range(rounds):
        shared.arrive(1, *sizes)
        while shared.summed <= number:
            yield
        for warp in range(sizes[0]):
            assert shared.sums[warp] == number
            yield
        shared.finish(sizes[1])
        yield


@pytest.mark.parametrize("seed", range(200))
def test_sums_are_read_when_all_are_there_and_overwritten_when_all_are_read(seed):
    """The barriers of the loop over pairs and of `finish`, in a random order of events."""
    chance, sizes, rounds = random.Random(seed), (4, wna16_decode._FINISHERS), 5
    shared = Shared(*sizes)
    warps = [multiplying(shared, warp, rounds, sizes) for warp in range(sizes[0])]
    warps += [finishing(shared, rounds, sizes) for _ in range(sizes[1])]
    weights = [chance.uniform(0.02, 1) for _ in warps]  # some are slow
    for _ in range(100_000):
        index = chance.choices(range(len(warps)), weights)[0]
        if next(warps[index], "ended") == "ended":
            del warps[index], weights[index]
        if not warps:
            break
    assert not warps  # nobody waits forever
    assert shared.summed == shared.phase == rounds
