"""Reports of quantizations that were never run."""

from dataclasses import replace

from warpbus.quantization import LayerResult, Report

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")


def make_report(algorithm="gptq", **changes):
    report = Report(
        model="models/poet",
        output="models/poet-w4",
        scheme="w4a16-g128",
        algorithm=algorithm,
        settings={"samples": 128},
        calibration_tokens=0 if algorithm == "rtn" else 4096,
        device="cpu",
        layers=tuple(
            LayerResult(layer, linear, "w4a16-g128", 0.01 * (layer + 1), 0.5)
            for layer in range(3)
            for linear in LINEARS
        ),
        bytes_before=40_000_000,
        bytes_after=12_000_000,
        resumed_layers=0,
        seconds=6.5,
        peak_memory=500_000_000,
        peak_gpu_memory=None,
        versions={"warpbus": "0.1.0"},
    )
    return replace(report, **changes)


def gpu_report(**changes):
    """Four GPUs for half an hour, 3 kWh."""
    facts = {
        "device": "cuda:0",
        "devices": ("NVIDIA H200",) * 4,
        "stages": {"reading": 1.0, "forward": 2.0, "hessians": 5.0},
        "estimate": {"seconds": 7.0},
        "gpu_seconds": 7200.0,
        "energy_joules": 3 * 3.6e6,
        "peak_gpu_memory": 7_000_000_000,
    }
    return make_report(**facts | changes)


def mixed():
    """Some matrices got another scheme or algorithm; one was left as it was."""
    layers = list(make_report().layers[:-1])
    layers[0] = replace(layers[0], scheme="w8a16", algorithm="rtn")
    layers[1] = replace(layers[1], algorithm="gptq")
    return make_report(layers=tuple(layers))
