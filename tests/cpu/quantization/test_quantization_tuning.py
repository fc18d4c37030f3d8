"""`--effort high`: the scales of a quantized model are trained on the predictions of the original."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_models import MOE, calibration, loaded, write_model
from quantization_runs import Runs, fingerprint

from warpbus.errors import DataError, UsageError
from warpbus.formats import Checkpoint, FinishedParts
from warpbus.qtensor import Scheme
from warpbus.quantization import Calibration, Progress, QuantizationEstimate, Report, quantize
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.tuning import EPOCHS, TunedLinear, split
from warpbus.quantization.tuning_parts import STATE_PART, tuned_part


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    """Also for the fixtures of this module: the order of sums depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(model: Path, output: Path, data: Calibration | None = None, **options: Any) -> Report:
    """Quantize on the CPU, by default to w2a16-g32 with high effort."""
    chosen = {"scheme": "w2a16-g32", "effort": "high", "device": "cpu"} | options
    return quantize(model, output, calibration=data or calibration(), **chosen)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tuning") / "model")


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    output = tmp_path_factory.mktemp("tuned") / "out"
    return output, run(model, output)


@torch.no_grad()
def divergence(model: Path, quantized: Path, data: Calibration) -> float:
    """The mean KL divergence of all tokens' predictions."""
    original, other = loaded(model), loaded(quantized)
    total = 0.0
    for sequence in data.sequences:
        p, q = (each(torch.tensor([sequence])).log_softmax(-1) for each in (original, other))
        total += float((p.exp() * (p - q)).sum())
    return total / data.tokens


def weights(directory: Path, suffix: str) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.tensor(name) for name in checkpoint.names() if name.endswith(suffix)}


def test_the_report_has_the_divergence_of_the_files(model: Path, tuned: tuple[Path, Report]) -> None:
    output, report = tuned
    assert report.tuning is not None
    assert report.settings["effort"] == "high"
    _, held = split(calibration())
    assert divergence(model, output, held) == pytest.approx(report.tuning.after, rel=1e-3)


def test_the_divergence_is_lower_than_with_normal_effort(
    model: Path, tuned: tuple[Path, Report], tmp_path: Path
) -> None:
    output, report = tuned
    trained, held = split(calibration())
    run(model, tmp_path / "normal", trained, effort="normal")
    assert report.tuning is not None
    assert report.tuning.before == pytest.approx(divergence(model, tmp_path / "normal", held), rel=1e-3)
    assert divergence(model, output, trained) < divergence(model, tmp_path / "normal", trained)
    assert report.tuning.after <= report.tuning.before


def test_only_scales_change(model: Path, tuned: tuple[Path, Report], tmp_path: Path) -> None:
    output, _ = tuned
    trained, _ = split(calibration())
    run(model, tmp_path / "normal", trained, effort="normal")
    before, after = weights(tmp_path / "normal", ""), weights(output, "")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("weight_scale") for name in changed)


@pytest.mark.usefixtures("one_thread")
def test_two_processes_give_the_same_files(model: Path, tuned: tuple[Path, Report], tmp_path: Path) -> None:
    run(model, tmp_path / "out", processes=2)
    assert fingerprint(tmp_path / "out") == fingerprint(tuned[0])


@pytest.mark.parametrize("step", [1, -1])
def test_an_interrupted_tuning_goes_on(model: Path, tuned: tuple[Path, Report], tmp_path: Path, step: int) -> None:
    """In the first epoch, and in the last one."""

    def stop(done: int, total: int) -> None:
        if done == step % total + (step < 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", progress=Progress(tuning=stop))
    facts = FinishedParts(tmp_path / "out").facts(STATE_PART)
    assert len(facts["losses"]) == (1 if step == 1 else EPOCHS)
    run(model, tmp_path / "out")
    assert fingerprint(tmp_path / "out") == fingerprint(tuned[0])


def test_a_killed_tuning_goes_on(runs: Runs, model: Path, texts: Path, tmp_path: Path) -> None:
    """Killed in the first epoch, and while the layers are written with their new scales."""
    command = ["--scheme", "w2a16-g32", "--effort", "high", "--device", "cpu", "--calibration", texts]
    assert runs.start("quantize", model, tmp_path / "whole", *command).code == 0
    for part in (STATE_PART, tuned_part(0)):
        when = FinishedParts(tmp_path / "out").facts_file(part)
        killed = runs.start("quantize", model, tmp_path / "out", *command, when=when, after=0.0)
        assert killed.code == -signal.SIGKILL, killed.said
    finished = runs.start("quantize", model, tmp_path / "out", *command)
    assert finished.code == 0, finished.said
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize("options", [{"format": "gptq"}, {"scheme": "w4a16-g32-asym"}, {"algorithm": "awq"}])
def test_other_formats_and_algorithms(model: Path, tmp_path: Path, options: dict[str, str]) -> None:
    report = run(model, tmp_path / "out", **{"scheme": "w4a16-g32"} | options)
    assert report.tuning is not None
    _, held = split(calibration())
    assert divergence(model, tmp_path / "out", held) == pytest.approx(report.tuning.after, rel=1e-3)


LATENT = MOE | {
    "model_type": "glm4_moe_lite",
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "partial_rotary_factor": 1.0,
    "v_head_dim": 40,
}


@pytest.mark.parametrize("changes", [MOE, MOE | {"num_nextn_predict_layers": 1}, LATENT], ids=["moe", "mtp", "latent"])
def test_other_models(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write_model(tmp_path / "model", **changes)
    report = run(model, tmp_path / "out")
    assert report.tuning is not None
    assert report.tuning.epoch > 0
    _, held = split(calibration())
    assert divergence(model, tmp_path / "out", held) == pytest.approx(report.tuning.after, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "extreme"}, "effort is 'extreme': choose from normal, high"),
        ({"algorithm": "rtn"}, "rtn has none: use --algorithm gptq"),
        ({"algorithm": "smoothquant", "scheme": "w8a8-int8"}, "w8a8-int8 cannot be tuned"),
        ({"scheme": "w4a16-nvfp4"}, "w4a16-nvfp4 cannot be tuned"),
        ({"kv_cache": "fp8"}, "not with --kv-cache fp8"),
    ],
)
def test_what_cannot_be_tuned(model: Path, tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(model, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_sparse_attention_cannot_be_tuned(tmp_path: Path) -> None:
    changes = LATENT | {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]}
    changes |= {"index_n_heads": 4, "index_head_dim": 24, "index_topk": 6}
    model = write_model(tmp_path / "model", **changes)
    with pytest.raises(UsageError, match="has sparse attention, which tuning does not support"):
        run(model, tmp_path / "out")


def test_the_estimate_includes_tuning(model: Path, tmp_path: Path) -> None:
    found: list[QuantizationEstimate] = []
    for effort in ("normal", "high"):
        run(model, tmp_path / effort, effort=effort, progress=Progress(estimated=found.append))
    normal, high = found
    assert "tuning" not in normal.seconds
    assert high.seconds["tuning"] > 0
    assert high.disk.parts["tuning"] > 0
    assert high.memory.total >= normal.memory.total


def test_one_sequence_is_too_few(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the calibration data is one sequence"):
        run(model, tmp_path / "out", calibration(1))


def test_effort_is_part_of_the_identity(model: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", progress=Progress(tuning=stop))
    with pytest.raises(UsageError, match="effort"):
        run(model, tmp_path / "out", effort="normal")


def test_what_is_held_back() -> None:
    trained, held = split(calibration(33))
    assert len(held.sequences) == 3
    assert sorted(trained.sequences + held.sequences) == sorted(calibration(33).sequences)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w3a16-g32-asym", "w8a16"])
def test_gradients(scheme: str) -> None:
    """As torch derives them from the formula of a quantized weight."""
    generator = torch.Generator().manual_seed(1)
    weight = rtn(torch.randn(12, 64, generator=generator), Scheme.parse(scheme), scale_dtype=torch.float32, name="w")
    linear = TunedLinear(weight, torch.randn(12, generator=generator))
    x = torch.randn(2, 5, 64, generator=generator, requires_grad=True)
    wanted = torch.randn(2, 5, 12, generator=generator)
    ratio = torch.ones_like(weight.scales, requires_grad=True)
    zeros = weight.scheme.middle_code if weight.zeros is None else weight.zeros.float()[..., None]
    centred = weight.codes().float().unflatten(1, (weight.scales.shape[1], -1)) - zeros
    plain = (centred * (weight.scales * ratio)[..., None]).flatten(1)
    found = torch.autograd.grad((linear(x) * wanted).sum(), (x, linear.ratio))
    expected = torch.autograd.grad((x @ plain.T * wanted).sum(), (x, ratio), retain_graph=True)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    (of_weight,) = torch.autograd.grad((linear.weight * plain.detach()).sum(), linear.ratio)
    (expected_of_weight,) = torch.autograd.grad((plain * plain.detach()).sum(), ratio)
    torch.testing.assert_close(of_weight, expected_of_weight, rtol=1e-4, atol=1e-4)
