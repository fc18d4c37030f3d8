"""Which scheme and algorithm is recommended, given what each was found to cost."""

import json
import math
from dataclasses import replace

import pytest

from warpbus.errors import NumericError, UsageError
from warpbus.qtensor import Scheme
from warpbus.quantization.recommend import Recommendation, Trial, candidates, choose

GB = 10**9
EIGHT = Trial("w8a16", "gptq", 0.004, 7 * GB, 8 * GB, 3e-3, 40.0)
INT8 = Trial("w8a8-int8", "smoothquant", 0.02, 7 * GB, 8 * GB, 3.5e-3, 20.0)
FINE = Trial("w4a16-g32", "gptq", 0.04, 4 * GB, 5 * GB, 1.8e-3, 40.0)
FOUR = Trial("w4a16-g128", "gptq", 0.05, 3_800_000_000, 4_800_000_000, 1.75e-3, 40.0)
PLAIN = Trial("w4a16-g128", "rtn", 0.07, 3_800_000_000, 4_800_000_000, 1.75e-3, 5.0)
THREE = Trial("w3a16-g128", "gptq", 0.11, 3 * GB, 4 * GB, 1.74e-3, 40.0)
TRIALS = (EIGHT, INT8, FINE, FOUR, PLAIN, THREE)


@pytest.mark.parametrize(
    ("goal", "memory", "expected"),
    [
        ("quality", None, EIGHT),
        ("quality", 6 * GB, FINE),
        ("quality", 4_800_000_000, FOUR),
        # As fast as FOUR to within what times differ by, and better.
        ("speed", None, FINE),
        ("speed", 4_900_000_000, FOUR),
        # THREE is smaller and as fast, but worse than plain rounding to 4 bits.
        ("size", None, FOUR),
        # Where nothing else fits, it has to do.
        ("size", 4 * GB, THREE),
        ("speed", 4 * GB, THREE),
    ],
)
def test_the_choice(goal, memory, expected):
    for trials in (TRIALS, TRIALS[::-1]):
        chosen, reason = choose(trials, goal=goal, memory=memory)
        assert chosen == expected
        assert ("within" in reason) == (memory is not None)
    assert ("none there is as good" in reason) == (expected == THREE)


def test_times_that_overlap_leave_a_doubt():
    """FOUR is the fastest by its least time, but most of its samples took longer than those of EIGHT."""
    slow = replace(FOUR, token_spread=2.0)
    chosen, reason = choose([EIGHT, slow], goal="speed")
    assert chosen == slow
    assert "; unsure: its times, 1.75 to 5.25 ms per token, overlap with those of w8a16 (3.00): " in reason
    assert "unsure" not in choose([EIGHT, replace(FOUR, token_spread=0.05)], goal="speed")[1]
    assert "unsure" not in choose([EIGHT, slow], goal="quality")[1]
    assert "unsure" not in choose([slow, replace(PLAIN, token_spread=2.0)], goal="speed")[1]  # of one scheme


def test_equal_errors_go_to_the_smaller_then_to_the_quicker():
    assert choose([EIGHT, replace(FINE, error=0.00403)], goal="quality")[0].scheme == "w4a16-g32"
    assert choose([EIGHT, replace(FINE, error=0.00405)], goal="quality")[0].scheme == "w8a16"
    assert choose([FOUR, replace(PLAIN, error=FOUR.error)], goal="size")[0].algorithm == "rtn"


def test_what_is_usable_where_plain_rounding_was_not_tried():
    assert choose([EIGHT, FOUR, THREE], goal="size")[0] == FOUR
    assert choose([EIGHT, INT8], goal="speed")[0] == EIGHT


def test_what_cannot_be_chosen():
    with pytest.raises(UsageError, match="goal is 'best': choose from quality, speed, size"):
        choose(TRIALS, goal="best")
    with pytest.raises(UsageError, match="nothing to choose from"):
        choose([], goal="quality")
    with pytest.raises(UsageError, match=r"memory is 2\.00 GB: even w3a16-g128 by gptq takes 4\.00 GB"):
        choose(TRIALS, goal="quality", memory=2 * GB)
    for broken in ({"error": math.nan}, {"token_seconds": math.inf}, {"seconds": -1.0}):
        with pytest.raises(NumericError, match="w8a16 by gptq"):
            choose([replace(EIGHT, **broken)], goal="speed")


def test_candidates_fit_the_matrices_and_the_device():
    names = [(str(each.scheme), each.algorithm) for each in candidates([4096, 13696], fp8=True)]
    assert len(names) == len(set(names)) == 16
    assert ("w4a16-g128", "gptq") in names
    assert ("w4a16-g128", "rtn") in names
    assert ("w8a8-int8", "smoothquant") in names
    assert ("w8a8-fp8", "smoothquant") in names
    assert "w8a8-fp8" not in {str(each.scheme) for each in candidates([4096], fp8=False)}
    # 96 columns are three groups of 32, and no group of 128.
    assert {str(each.scheme) for each in candidates([128, 96], fp8=False)} == {"w8a16", "w8a8-int8", "w4a16-g32"}


def test_only_algorithms_that_fit_a_scheme_are_candidates():
    fp4 = candidates([4096], fp8=False, scheme=Scheme.parse("w4a16-nvfp4"))
    assert [each.algorithm for each in fp4] == ["gptq", "rtn"]  # awq scales channels of uniform grids


def test_json():
    found = Recommendation.of(TRIALS, model="m", device="cpu", goal="size", memory=None, layers=[1])
    plain = json.loads(json.dumps(found.to_json()))
    assert Trial(**plain["chosen"]) == FOUR
    assert [Trial(**each) for each in plain["trials"]] == list(TRIALS)
    assert (plain["goal"], plain["memory"], plain["layers"]) == ("size", None, [1])
