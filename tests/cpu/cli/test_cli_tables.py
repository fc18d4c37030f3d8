"""Plans, estimates and reports as a terminal shows them."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_configs import with_traits
from quantization_reports import LINEARS, gpu_report, make_report, mixed
from rich.console import Console, RenderableType

from warpbus.cli.tables import estimate_table, memory_table, recommendation_table, report_tables, training_table
from warpbus.engine import Stored, plan_memory
from warpbus.language import in_language
from warpbus.models import SHAPES
from warpbus.models.cost import MemoryNeed, TimeRange
from warpbus.qtensor import Scheme
from warpbus.quantization import QuantizationEstimate, estimate
from warpbus.quantization.recommend import GOALS, Recommendation, Trial
from warpbus.train.memory import training_memory
from warpbus.train.plan import TrainingNeed, TrainingPlan
from warpbus.train.settings import TrainingSettings

GB = 10**9
CHATGLM2 = Stored.uniform(SHAPES["chatglm2-6b"], torch.float16, Scheme.parse("w4a16-g128"))
TRIALS = (
    Trial("w8a16", "gptq", 0.004, 7 * GB, 8 * GB, 3e-3, 40.0),
    Trial("w4a16-g32", "gptq", 0.04, 4 * GB, 5 * GB, 1.8e-3, 40.0),
    Trial("w4a16-g128", "rtn", 0.07, 3_800_000_000, 4_800_000_000, 1.75e-3, 5.0),
)


def shown(what: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_a_memory_plan_gave_up_stands_below_its_table_line_by_line() -> None:
    plan = plan_memory(CHATGLM2, int(4.32 * GB))
    assert plan.head is not None
    assert plan.embedding_on_cpu
    table, below = shown(memory_table(plan)).split("┘\n")
    assert "KV cache" in table
    assert "4.32 GB" in table
    assert [line.rstrip() for line in below.splitlines()] == [
        f"context {plan.context:,} tokens, cache for {plan.pool_tokens:,} (kv_dtype int8)",
        "head rounded to w8a16-g128",
        "embedding on the CPU",
        f"prompts read {plan.prefill_tokens:,} tokens at a time",
    ]


def estimated(gpus: list[int], disk: str = "/models", time: TimeRange | None = None) -> QuantizationEstimate:
    """Of GPUs with so many bytes free."""
    parts = dict.fromkeys(("states", "activations", "a batch", "layers", "moments and solve", "libraries"), 10**9)
    return QuantizationEstimate(
        gpus=tuple(
            MemoryNeed(f"cuda:{rank}", parts | ({"finished layers": 10**6} if rank == 0 else {}), free)
            for rank, free in enumerate(gpus)
        ),
        memory=MemoryNeed("main memory", {"processes": 10**9}, None),
        disk=MemoryNeed(disk, {"model": 10**9}, 2 * GB),
        keep=True,
        tokens=80_000,
        columns=4096,
        seconds={"forward": 12.3},
        time=time,
    )


def test_the_estimate_fits_100_columns_and_alike_gpus_share_a_row() -> None:
    text = shown(estimate_table(estimated([80 * GB] * 7 + [GB], time=TimeRange(12.3, 39.01))), width=100)
    assert max(map(len, text.splitlines())) <= 100
    for said in ("cuda:0 ", "cuda:1 to cuda:6", "cuda:7", "main memory", "80.00 GB", "?"):
        assert said in text
    assert "time: about 12 to 40 s, longer on a busy machine" in " ".join(text.split())
    assert "time" not in shown(estimate_table(estimated([])))


def test_the_parts_of_an_estimate_are_named_in_chinese() -> None:
    """Names and sizes are one cell, which the catalogue does not have as a whole."""
    names = re.findall(r'"([a-z]+(?: [a-z]+)+)"[]:]', Path(estimate.__file__).read_text(encoding="utf-8"))
    assert {"a layer of the file", "moments and solve", "finished layers", "a batch"} <= {*names}
    needed = MemoryNeed("main memory", dict.fromkeys(["states", "processes", *names], GB), None)
    with in_language("zh"):
        text = shown(estimate_table(replace(estimated([]), memory=needed)), width=100)
    assert [name for name in needed.parts if name in text] == []
    assert "隐藏状态 1.00 GB，进程 1.00 GB，" in text


def test_all_of_a_directory_is_in_the_estimate_whatever_is_in_its_name(tmp_path: Path) -> None:
    disk = str(tmp_path / ("[bold]" + 30 * "x"))
    lines = shown(estimate_table(estimated([], disk))).splitlines()
    assert disk in "".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))


@pytest.mark.parametrize("goal", GOALS)
def test_the_recommendation_marks_the_choice_and_fits(goal: str) -> None:
    found = Recommendation.of(
        TRIALS, model="/m/[glm]", device="NVIDIA H100", goal=goal, memory=6 * GB, layers=(0, 13, 27)
    )
    lines = shown(recommendation_table(found)).splitlines()
    assert "/m/[glm] on NVIDIA H100" in lines[0]
    assert "layers 0, 13, 27" in lines[0]
    rows = [line.split() for line in lines if "%" in line]
    errors = [next(cell for cell in row if "%" in cell) for row in rows]
    assert len(errors) == len(TRIALS)
    assert errors == sorted(errors, key=lambda text: float(text[:-1]))
    (marked,) = [row for row in rows if row[0] == "→"]
    assert marked[1:3] == [found.chosen.scheme, found.chosen.algorithm]
    assert f"{found.chosen.name}: the " in lines[-1]
    assert all(len(line) <= 80 for line in lines)


def test_a_report_has_a_row_for_each_layer() -> None:
    text = shown(report_tables(make_report()), width=120)
    assert "relative error of the outputs" in text
    for linear in LINEARS:
        assert linear in text
    assert text.count("2.00%") == 4
    assert text.count("2.0 ") == 3  # seconds
    assert "Where the time went" not in text


def test_a_report_says_which_matrices_differ() -> None:
    text = shown(report_tables(mixed()), width=120)
    assert text.count("w8a16 rtn") == 1
    # The algorithm of the whole is not repeated, nor is its scheme, but in the title.
    assert (text.count("gptq"), text.count("w4a16-g128")) == (1, 1)
    assert text.count("3.00%") == 3


def test_a_report_has_the_times_of_its_stages() -> None:
    lines = [line.replace("│", " ").split() for line in shown(report_tables(gpu_report()), width=120).splitlines()]
    assert ["hessians", "5.00", "62%"] in lines
    assert ["reading", "1.00", "12%"] in lines


def test_a_training_plan_says_where_memory_is_too_small() -> None:
    config = with_traits(SHAPES["chatglm2-6b"], num_layers=1)
    settings = TrainingSettings(method="lora", dtype="bfloat16", length=64, rows_per_step=2, rows_at_once=1)
    memory = training_memory(config, settings, available=GB)
    needs = (TrainingNeed(1, memory, TimeRange(31.2, 99.0)), TrainingNeed(2, memory, None))
    plan = TrainingPlan(10, 1280, config.num_parameters, 1000, 10**9, "NVIDIA H100", 6e14, needs)
    rows = [line for line in shown(training_table(plan), width=100).splitlines() if line.startswith("│")]
    assert f"{memory.total / 1e9:.2f}, too much" in rows[0]
    assert "about 31 to 99 s" in rows[0]
    assert rows[1].split("│")[-2].strip() == "-"
    assert "600 TFLOP/s in products of NVIDIA H100" in " ".join(shown(training_table(plan), width=200).split())
