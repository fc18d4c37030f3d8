"""No call of a listed operator gets a CPU kernel to read or write outside its tensors.

The whole list takes minutes: `pool_bounds.py` runs it. Here are all valid calls, and a share of the changed ones.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pool_bounds import guard_results
from pool_hand import Hand
from pool_operator_calls import Call, geometry, has_kernel, valid_calls

from warpbus.errors import ProtocolError
from warpbus.pool.protocol.operators import ATEN, operator, overloads
from warpbus.pool.protocol.signature import Input, Number, Signature
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.indices import guarded
from warpbus.pool.tenant.shape_checks import RULES, check_shapes

SEED = os.environ.get("POOL_BOUNDS_SEED", "0")
SHARE = "0.015"
RUNNER = Path(__file__).with_name("pool_bounds.py")
SOURCES = Path(__file__).parents[3] / "src"

# Their kernels need what a machine's CPU may lack.
NOT_RECORDED = {"_scaled_mm", "_scaled_mm_v2"}


def run(folder, *arguments):
    """What the runner reports, results in guarded memory where that can be."""
    environment = guard_results(folder) or dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCES), str(RUNNER.parent)])
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, RUNNER, "--seed", SEED, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_call_leaves_its_tensors(tmp_path):
    report = run(tmp_path, "--share", SHARE)
    assert report["crashes"] == [], f"seed {SEED}"
    assert report["executed"] > 2500
    assert report["refused"] + report["failed"] > 500


def test_the_rules_are_what_keeps_them_inside(tmp_path):
    names = ["aten::_cummax_helper", "aten::native_batch_norm_backward", "aten::_pdist_backward"]
    wanted = [word for name in names for word in ("--operator", name)]
    without = run(tmp_path, "--share", "0.4", "--without-rules", *wanted)
    assert {name.partition(".")[0] for name in without["operators"]} == set(names)
    assert {crash.split()[0] for crash in without["crashes"]} == {signal.SIGSEGV.name}
    assert run(tmp_path, "--share", "0.4", *wanted)["crashes"] == []


def test_every_operator_has_a_valid_call():
    recorded = {call.name.removeprefix("aten::").partition(".")[0] for call in valid_calls()}
    on_cpu = {
        name
        for name in ATEN
        if any(has_kernel(each.name(), "CPU") for each in overloads(name) if not each._schema.is_mutable)
    }
    assert {name for name in on_cpu if recorded.isdisjoint({name, name + "_"})} == NOT_RECORDED


def test_rules_are_of_operators_with_such_arguments():
    assert set(RULES) <= ATEN


def test_valid_calls_meet_the_rules():
    checked = 0
    for call in valid_calls():
        overload = operator(call.name)
        if guarded(overload).__name__ != "refuse":
            check_shapes(overload, call.signature()[0])
            checked += overload._overloadpacket.__name__.removesuffix("_") in RULES
    assert checked > 100


def test_a_refusal_says_what_was_expected():
    hand = Hand(Executor(torch.device("cpu"), Quota(1 << 20, 1.0)))
    x, one = hand.put(torch.randn(2, 300)), hand.put(torch.ones(1))
    hand.call("aten::native_batch_norm", x, one, None, None, None, True, 0.1, 1e-5)
    (failure,) = hand.send()
    assert failure.type == "ProtocolError"
    assert failure.message == "aten::native_batch_norm: weight is (1,): expected (300,)"


def test_a_result_must_not_be_written_into_an_expanded_tensor():
    full = {"dtype": "float32", "shape": [2, 3], "stride": [3, 1]}
    call = Call("aten::_log_softmax.out", [full, 1, False], {"out": {**full, "stride": [0, 0]}})
    with pytest.raises(ProtocolError, match="out has strides"):
        check_shapes(operator(call.name), call.signature()[0])


@pytest.mark.parametrize("argument", [Number("int", 0), (1, Number("int", 0))])
def test_sizes_belong_to_the_definition(argument):
    x = geometry({"dtype": "float32", "shape": [2, 3], "stride": [3, 1]})
    arguments = (Input(0), argument, 0, 0) if isinstance(argument, tuple) else (Input(0), (2, 2, 3), argument, 0)
    with pytest.raises(ProtocolError, match="belongs to the definition"):
        Signature.decode(Signature("aten::select_backward", arguments, (), (x,), ("int",)).encode())
