"""Records as a table and as a picture."""

import io
from dataclasses import replace

import pytest
from matplotlib.colors import to_rgba
from matplotlib.image import imread
from rich.console import Console

from warpbus.bench.cases import Plot
from warpbus.bench.catalog import BENCHMARKS
from warpbus.bench.plots import draw, figure
from warpbus.bench.records import Peer, Record, ratio
from warpbus.bench.report import number, shared_and_varying, table
from warpbus.errors import StorageError
from warpbus.figures.theme import WARPBUS, color_of, style
from warpbus.language import in_language, translated


def record(case, ours, value, peer="cuBLAS", metric="throughput", unit="TFLOP/s", floor=700.0):
    return Record(
        bench="gemm",
        case={**case, "timed": "graph"},
        metric=metric,
        unit=unit,
        ours=ours,
        peer=Peer(peer, "13.1", value),
        ratio=ratio(metric, ours, value),
        floor=floor,
        samples={"ours": [ours], "peer": [value]},
        device="NVIDIA H100",
        versions={"warpbus": "0.1.0", "torch": "2.11"},
        date="2026-01-31T12:00:00Z",
        command="warpbus bench gemm",
    )


BARS = [record({"shape": name, "m": 1024, "dtype": "float16"}, ours, 600) for name, ours in (("qkv", 660), ("o", 588))]
LINES = [
    record({"n": n, "transfers": moved}, n / 50 + 100 * moved, value, peer, "time", "us", None if moved else n / 100)
    for moved in (False, True)
    for n in (1000, 10_000, 100_000)
    for peer, value in (("torch", n / 40), ("torch, CPU (2 threads)", n / 3))
]


def shown(records, means=None, notes=(), color=False, width=120):
    console = Console(file=io.StringIO(), width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(table(records, "Products [16]", means or {}, notes))
    return console.file.getvalue()


def test_the_table_has_what_differs_in_columns_and_what_does_not_below():
    text = shown(BARS, {"all": 1.0383}, ["Said once."])
    title, _, *headings, _, first, second, _ = text.splitlines()[:8]
    assert title.strip() == "Products [16], NVIDIA H100"
    names = [[cell.strip() for cell in heading.split("┃")[1:-1]] for heading in headings]
    assert [" ".join(cell).strip() for cell in zip(*names, strict=True)] == [
        "shape",
        "ours TFLOP/s",
        "cuBLAS TFLOP/s",
        "ratio",
        "of limit",
    ]
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in (first, second)]
    assert cells == [["qkv", "660", "600", "1.10x", "94 %"], ["o", "588", "600", "0.98x", "84 %"]]
    assert "m: 1,024, dtype: float16" in text
    assert "geometric mean, all: 1.038x" in text
    assert "Said once." in text
    assert "timed" not in text


def test_a_case_is_named_once_for_all_its_peers():
    rows = shown(LINES).splitlines()[5:]
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows[:2]]
    assert cells[0][:4] == ["1,000", "no", "20.0", "torch"]
    assert cells[1][:4] == ["", "", "", "torch, CPU (2 threads)"]


def test_another_unit_is_another_table():
    text = shown([BARS[0], record({"shape": "x", "m": 1024, "dtype": "float16"}, 2000, 1900, unit="GB/s", floor=None)])
    products, bandwidths = text.split("┏")[1:]
    assert "TFLOP/s" in products
    assert "660" in products
    assert "2,000" not in products
    assert "GB/s" in bandwidths
    assert "2,000" in bandwidths
    assert "limit" not in bandwidths


def whole_model(variants, sizes):
    """What `bench decode` measures: memory, which is published, and tokens a second of three peers."""
    shared = {"shape": "chatglm2-6b", "dtype": "float16"}
    taken = [
        record({**shared, "task": task, "tokens": 2048, "memory": limit, "variant": variant}, 4.7, 5.5, unit="GB")
        for variant in variants
        for limit in ("no limit", "planned for 4.8GB")
        for task in ("encode", "generate")
    ]
    speeds = [
        record(
            {**shared, "batch": 1, "prompt": 128, "generated": size, "variant": variant},
            350,
            250,
            peer,
            unit="tokens/s",
        )
        for size in sizes
        for variant in variants
        for peer in ("warpbus, float16", "torch.compile, int4", "transformers")
    ]
    return taken + speeds


@pytest.mark.parametrize("variants", [("w4a16-g128",), ("w4a16-g128", "w4a16-g32-asym")])
@pytest.mark.parametrize("sizes", [(256,), (256, 1024)])
def test_a_whole_model_fits_80_columns(variants, sizes):
    text = shown(whole_model(variants, sizes), width=80)
    assert "…" not in text
    for word in ("generate ", "planned for 4.8GB", "torch.compile, int4 ", "transformers ", "1.40x", " tokens/s ┃"):
        assert word in text
    assert {line[-1] for line in text.splitlines() if line[:1] in set("┃│")} == set("┃│")
    # What a table's rows have in common is said below that table, and what all have, once.
    *_, speeds = text.split("┏")
    assert ("batch: 1, prompt: 128" in speeds, "generated: 256" in speeds) == (True, len(sizes) == 1)
    assert text.count("shape: chatglm2-6b, dtype: float16") == 1
    assert all(f"variant: {variant}" in text for variant in variants)


def test_what_a_shape_stands_for_is_said_once():
    layers = {"gate_up": (27392, 4096), "down": (4096, 13696)}
    records = [
        record({"shape": shape, "m": m, "n": n, "k": k, "variant": "fp8"}, 1250, 1200, peer)
        for shape, (n, k) in layers.items()
        for m in (16, 4096)
        for peer in ("cuBLAS", "torch._scaled_mm")
    ]
    text = shown(records, width=80)
    assert "gate_up: n 27,392, k 4,096; down: n 4,096, k 13,696" in text
    assert text.count("27,392") == 1
    assert text.count(" torch._scaled_mm ") == 4
    # Where each shape has but one case, its numbers stand beside it.
    once = shown(records[:1] + records[4:5], width=80)
    assert "27,392 │" in once
    assert "gate_up:" not in once


def test_words_wrap_where_there_is_no_room():
    text = shown(
        [record({"shape": "a", "m": m}, 2, 1, peer) for m in (1, 2) for peer in ("a peer", "x" * 30)], width=60
    )
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if line.startswith("│")]
    assert "".join(row[3] for row in rows).replace("a peer", "") == "x" * 60
    assert rows[0][1:-1] == ["1", "2.00", "a peer", "1.00", "2.00x", "0 %"]


@pytest.mark.parametrize(("ours", "code"), [(660, "32"), (598, "32"), (571, "33"), (500, "31")])
def test_colours(ours, code):
    text = shown([record({"n": 1}, ours, 600)], color=True)
    assert f"\x1b[{code}m" in text
    assert not any(f"\x1b[{other}m" in text for other in {"31", "32", "33"} - {code})


@pytest.mark.parametrize(
    ("value", "text"),
    [(123456.7, "123,457"), (100, "100"), (99.94, "99.9"), (9.994, "9.99"), (0.5, "0.50"), (0.0123, "0.012")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_what_cases_share():
    shared, varying = shared_and_varying(BARS)
    assert shared == {"m": 1024, "dtype": "float16", "timed": "graph"}
    assert varying == ["shape"]


def test_bars_are_as_long_as_the_values():
    drawn = figure(BARS, "Products", Plot(x=None))
    (axis,) = drawn.axes
    assert sorted(bar.get_width() for bar in axis.patches) == [588, 600, 600, 660]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["qkv", "o"]
    assert axis.get_xlabel() == "throughput (TFLOP/s), more is better"
    assert {text.get_text() for text in axis.get_legend().get_texts()} == {"Warpbus", "cuBLAS", "limit"}
    assert [text.get_text() for text in drawn.texts] == [
        "Warpbus runs at 1.04 times the speed of cuBLAS (from 0.98 to 1.10)",
        "Products",
        "NVIDIA H100   2026-01-31   warpbus 0.1.0, torch 2.11",
    ]


def test_lines_in_a_panel_for_each_kind():
    drawn = figure(LINES, "Sums", BENCHMARKS["vector-add"].plot)
    without, moved = drawn.axes
    assert (without.get_title(loc="left"), moved.get_title(loc="left")) == ("data on the GPU", "transfers included")
    assert without.get_xscale() == without.get_yscale() == "log"
    curves = {line.get_label(): list(line.get_ydata()) for line in without.get_lines()}
    assert curves == {
        "Warpbus": [20, 200, 2000],
        "torch": [25, 250, 2500],
        "torch, CPU (2 threads)": [n / 3 for n in (1000, 10_000, 100_000)],
        "limit": [10, 100, 1000],
    }
    assert without.get_ylabel() == "time, less is better"
    assert without.get_xlabel() == "elements"
    assert "limit" not in {line.get_label() for line in moved.get_lines()}


def test_the_picture_is_a_png_with_something_on_it(tmp_path):
    for name, records, plot in (("a", BARS, Plot(None)), ("b", LINES, Plot("n", "n", ("transfers",)))):
        path = tmp_path / "new" / f"{name}.png"
        draw(records, "Title", plot, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        pixels = imread(path)[..., :3]
        assert pixels.shape[0] > 200
        assert pixels.shape[1] > 600
        assert 0.005 < (pixels.min(axis=2) < 0.9).mean() < 0.5


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match="cannot be written"):
        draw(BARS, "Title", Plot(None), tmp_path / "file" / "a.png")


def test_names_with_signs_of_formulas(tmp_path):
    path = tmp_path / "a.png"
    draw([replace(BARS[0], case={"shape": "$x$ [b]"}), BARS[1]], "Cost $", Plot(None), path)
    assert path.stat().st_size > 5000


def test_many_panels_stand_in_two_rows():
    lines = [record({"n": n, "shape": shape}, n, 2 * n, "torch", "time", "us", n) for n in (1, 2) for shape in "abcde"]
    drawn = figure(lines, "Sums", Plot("n", "elements", ("shape",)))
    assert [axis.get_title(loc="left") for axis in drawn.axes] == list("abcde")
    assert len({round(axis.get_position().y0, 3) for axis in drawn.axes}) == 2


def test_variants_with_limits_of_their_own():
    lines = [
        record({"n": n, "variant": variant}, 3 * n, 9 * n, "torch", "time", "us", limit * n)
        for n in (1, 2)
        for variant, limit in (("wide", 2), ("narrow", 1))
    ]
    drawn = figure(lines, "Sums", Plot("n", "elements"))
    curves = {line.get_label(): list(line.get_ydata()) for line in drawn.axes[0].get_lines()}
    assert curves["limit, wide"] == [2, 4]
    assert curves["limit, narrow"] == [1, 2]
    assert curves["torch"] == [9, 18]


def test_each_limit_has_dashes_of_its_own():
    lines = [
        record({"n": n, "variant": variant}, 3 * n, 9 * n, "torch", "time", "us", limit * n)
        for n in (1, 32)
        for limit, variant in enumerate("abcd", 1)
    ]
    (axis,) = figure(lines, "Sums", Plot("n", "elements")).axes
    limits = [line for line in axis.get_lines() if line.get_label().startswith("limit")]
    assert len({str(line._unscaled_dash_pattern) for line in limits}) == len(limits) == 4


@pytest.mark.parametrize(("most", "written"), [(32, "32"), (1 << 20, "1,048,576")])
def test_ticks_are_numbers_and_not_powers(most, written):
    lines = [record({"n": n}, 3 * n, 9 * n, "torch", "time", "us", None) for n in (1, most)]
    (axis,) = figure(lines, "Sums", Plot("n", "elements")).axes
    assert axis.xaxis.get_major_formatter()(most) == written


def ladder(rung, ours, peer, n=4096, operator="matmul", floor=None):
    return record({"operator": operator, "n": n, "rung": rung, "dtype": "float16"}, ours, peer, floor=floor)


def test_a_peer_of_all_rungs_is_drawn_once():
    records = [ladder("naive", 4, 760, floor=660), ladder("wgmma", 700, 680, floor=660)]
    with style():
        drawn = figure(records, "Rungs", BENCHMARKS["ladder"].plot)
    (axis,) = drawn.axes
    assert [bar.get_width() for bar in axis.patches] == [4, 700, 720]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["naive", "wgmma", "cuBLAS"]
    assert "720  (680 – 760)" in {text.get_text() for text in axis.texts}
    assert "limit as measured, can be exceeded" in {text.get_text() for text in axis.get_legend().get_texts()}
    assert axis.get_title(loc="left") == "matrix product, 4,096 wide"
    title = drawn.texts[0].get_text().replace("\n", " ")
    assert title == "Matrix product: from 4.00 to 700 TFLOP/s, 1.03 times as fast as cuBLAS"


def test_a_limit_that_was_exceeded_has_a_note():
    assert "above 100 %" not in shown(BARS)
    assert "Above 100 % of the limit" in shown([record({"n": 1}, 710, 600), BARS[0]])


def test_the_finding_on_a_gpu_says_from_where_on_it_is_faster_than_the_cpu():
    with style():
        drawn = figure(LINES, "Sums", BENCHMARKS["vector-add"].plot)
    first, second = drawn.texts[0].get_text().split("\n")
    assert first == "Data on the GPU: 16.7 times the CPU's speed at 100,000, faster from 1,000 on"
    assert second == "Transfers included: 15.9 times the CPU's speed at 100,000, faster from 1,000 on"


def test_the_finding_compares_with_the_cpu_in_its_own_dtype():
    def of(dtype, ours):
        case = {"n": 1024, "rung": dtype, "dtype": dtype, "transfers": False}
        return record(case, ours, 100, "torch, CPU (2 threads)", "time", "us", None)

    finding = BENCHMARKS["matmul"].plot.finding
    both = "Data on the GPU, float32: 2.00 times the CPU's speed at 1,024, faster from 1,024 on; float16: 10.0 times"
    assert finding([of("float16", 10), of("float32", 50)]) == both
    alone = "Data on the GPU, float16 (CPU float32): 10.0 times the CPU's speed at 1,024, faster from 1,024 on"
    assert finding([of("float16", 10)]) == alone
    without = replace(record({"n": 1024}, 200, 100, "numpy", "time", "us", None), device="cpu")
    assert BENCHMARKS["linear"].plot.finding([without]) == finding([without])
    assert finding([without]) == "On a CPU, the PyTorch reference of the kernels runs at 0.50 times the speed of numpy"
    with in_language("zh"):
        assert translated(both).endswith("从 1,024 起更快；float16 为 10.0 倍")
        assert translated(alone).startswith("数据已在 GPU 上，float16 (CPU float32)：规模 1,024 时")


def test_bars_relative_to_ours_show_small_differences():
    records = [
        record({"m": m, "n": 1024}, m, 1.1 * m, peer, "time", "us", None)
        for m in (1, 1000)
        for peer in ("torch", "torch.compile")
    ]
    (axis,) = figure(records, "Layer", BENCHMARKS["linear"].plot).axes
    assert [round(bar.get_width(), 3) for bar in axis.patches] == [1, 1.1, 1.1] * 2
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1 row", "1,000 rows"]
    assert {"1.1 µs", "1.1 ms"} <= {text.get_text() for text in axis.texts}


def test_a_contender_has_one_colour_in_lines_and_bars():
    (axis, _) = figure(LINES, "Sums", BENCHMARKS["vector-add"].plot).axes
    colors = {line.get_label(): line.get_color() for line in axis.get_lines()}
    assert colors["torch"] == color_of("torch")
    assert colors["torch, CPU (2 threads)"] == color_of("torch CPU")
    (axis,) = figure(BARS, "Products", Plot(x=None)).axes
    bars = {each.get_label(): each.patches[0].get_facecolor() for each in axis.containers}
    assert bars["cuBLAS"] == to_rgba(color_of("cuBLAS"))
    assert bars["Warpbus"] == to_rgba(WARPBUS)
    assert len({color_of(name) for name in ("Warpbus", "cuBLAS", "torch", "vLLM", "transformers", "llama.cpp")}) == 6


def test_pictures_and_tables_in_chinese():
    with in_language("zh"), style():
        drawn = figure(LINES, "Vector addition, float32", BENCHMARKS["vector-add"].plot)
    texts = [text.get_text() for text in drawn.texts]
    if any(character >= "\u4e00" for character in texts[1]):  # there is a font that has Chinese
        assert texts[0].startswith("数据已在 GPU 上：规模 100,000 时为 CPU 的 16.7 倍，从 1,000 起更快\n含传输：")
        assert texts[1] == "向量加法，float32"
        assert drawn.axes[1].get_title(loc="left") == "含传输"
    else:
        assert texts[1] == "Vector addition, float32"
