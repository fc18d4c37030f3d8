"""The exercises: solutions pass, and typical mistakes get an answer that helps, in both languages."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.cuda import exercises
from warpbus.cuda.exercises import EXERCISES, ExerciseCheck, exercises_of
from warpbus.errors import StorageError, UsageError

ROOT = Path(__file__).resolve().parents[3]
SOLUTIONS = Path(__file__).parent / "solutions"
NAMES = [exercise.name for exercise in EXERCISES]


def solution(name: str) -> str:
    return (SOLUTIONS / exercises_of(name)[0].file).read_text(encoding="utf-8")


@pytest.fixture
def checked(tmp_path):
    """What a check says about a text, or about a solution in which one place is changed."""

    def check(name: str, text: str, language: str = "en") -> ExerciseCheck:
        path = tmp_path / exercises_of(name)[0].file
        path.write_text(text, encoding="utf-8")
        return exercises_of(name)[0].check(path, language)

    return check


@pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
def test_a_solution_passes_with_little_traffic(exercise):
    found = exercise.check(SOLUTIONS / exercise.file)
    assert found.problem is None
    for each in found.traffic:
        if each.array in exercise.coalesced or (each.shared and exercise.conflict_free):
            assert each.moved == each.least > 0
    assert set(exercise.coalesced) <= {each.array for each in found.traffic}


def test_macros_of_a_solution_do_not_reach_the_test(checked):
    assert checked("01.1", "#define T 16\n  # define same (1)\n" + solution("01.1")).problem is None


@pytest.mark.parametrize("exercise", EXERCISES, ids=NAMES)
def test_an_exercise_belongs_to_a_chapter_in_both_languages(exercise):
    assert exercise.file.startswith(exercise.name.replace(".", "_"))
    assert f"warpbus learn {exercise.name} --check" in exercise.template
    assert len(re.findall(r"[\u4e00-\u9fff]", exercise.template)) > 20
    pages = list((ROOT / "docs" / "tutorial").glob(f"{exercise.chapter}_*.md"))
    assert len(pages) == 2
    assert all(f"`warpbus learn {exercise.chapter}`" in page.read_text(encoding="utf-8") for page in pages)
    assert not list((ROOT / "src").rglob(f"*solution*{exercise.file}"))


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (
            "01.1",
            "if (i < n) ",
            "",
            "block (0, 0, 0), thread (1, 0, 0): reads a[1] (line 3), but a has 1 element of 4 bytes: the last "
            "valid index is 0. Is a bounds check",
        ),
        ("01.1", "a[i] + b[i]", "a[i] - b[i]", "n = 1: c[0] is 0, expected 5.5 (wrong elements: 1 of 1)"),
        (
            "01.1",
            "blockIdx.x * blockDim.x + ",
            "",
            "of block (0, 0, 0) writes c[0] (line 3) and thread",
        ),
        ("01.1", "a[i] +", "a[j] +", "(line 3): 'j' was not declared in this scope. The compiler does not know"),
        ("01.1", "void add", "void sum", "the test cannot call the functions of this file: 'add' was not declared"),
        ("01.1", "int n)", "int n, int m)", "too few arguments to function"),
        (
            "01.1",
            "    if (i < n) c[i]",
            "    c = nullptr; c[i]",
            "thread (0, 0, 0): access through a null pointer (line 3):",
        ),
        ("01.1", "__global__ ", "", "add is launched with <<<...>>>, but is not a kernel (line 1)"),
        ("01.1", "c[i] =", "c[0] =", "give each element to one thread (does the index use threadIdx?)"),
        (
            "01.2",
            "(n + threads - 1) / threads",
            "n / threads",
            "configuration argument: a launch needs at least 1 block",
        ),
        ("01.2", "n + threads - 1", "n + threads", "n = 256, threads = 128: 3 blocks were launched, 2 are needed"),
        (
            "02.1",
            "[row * columns + column] = ",
            "[column * rows + row] = ",
            "y[0][1] is 0.731059, expected",
        ),
        ("03.1", "i += gridDim.x * blockDim.x", "i += 0 * gridDim.x", "does not end (line 2): look for a loop"),
        (
            "03.2",
            "k * gridDim.x * blockDim.x + thread",
            "thread * run + k",
            "the warps read 8192 sectors of 32 bytes where 1024 are enough, 8.0 times as many (line 5)",
        ),
        (
            "04.1",
            "__syncthreads();  // loaded",
            "",
            "race on shared memory: thread (0, 0, 0) reads tile_a[1] (line 11) and thread (1, 0, 0) writes it (line 8)",
        ),
        ("04.1", "__syncthreads();  // used", "", "a race on shared memory: thread"),
        (
            "04.1",
            "    float sum = 0;",
            "    if (row >= n) return;\n    float sum = 0;",
            "16 threads wait at",
        ),
        (
            "04.2",
            "tile[32][33]",
            "tile[32][32]",
            "6144 passes where 192 are enough, 32.0 times as many",
        ),
        ("04.3", "__syncthreads();  // added", "", "neither __syncthreads() nor __syncwarp() is between them"),
        ("04.3", "i < n ? x[i] : 0", "0; partial[threadIdx.x] += x[n - 1] * tail[threadIdx.x]", "to which nothing was"),
        ("04.3", "atomicAdd(sum, partial[0])", "*sum += partial[0]", "(does the index use blockIdx?)"),
        ("04.3", "step = 128", "step = 256", "partial[256] (line 7), but partial has 256 elements"),
        ("04.4", "__syncthreads();  // read by all", "", "a race on shared memory: thread"),
        ("04.4", "-INFINITY", "0", "rows = 2, columns = 300: y[0][0] is"),
        (
            "05.1",
            "i % 2 * 8) * n + k + 2 * t + i / 2 * 8",
            "i / 2 * 8) * n + k + 2 * t + i % 2 * 8",
            "n = 16: c[0][0] is",
        ),
        ("05.1", "pair(at[0], at[n])", "pair(at[n], at[0])", "n = 16: c[0][0] is"),
        ("05.2", "chunk ^ row / 2 % 4", "chunk", "2048 passes where 512 are enough, 4.0 times as many (line 8): let"),
        ("05.2", "k / 8 + lane / 8 % 2", "k / 8", "n = 32: c[0][0] is"),
        ("05.3", "wait<1>();", "wait<2>();", "reads tile[0] (line 26), to which nothing was written: shared memory"),
        ("05.3", "        __syncthreads();\n    }", "    }", "a race on shared memory: thread"),
        ("07.1", "step = 16", "step = 8", "sums[0] is"),
        ("07.2", "    for (int step", "    if (threadIdx.x < 16) for (int step", "thread (16, 0, 0) has returned"),
        ("09.1", "__syncthreads();  // read by all", "", "a race on shared memory: thread"),
        ("09.2", "sum * expf(largest - larger) + ", "sum + ", "columns = 304: sums[0] is"),
        ("10.1", "tile_a[8][36]", "tile_a[8][32]", "the accesses to tile_a have bank conflicts"),
        ("11.1", "step = 16", "step = 8", "n = 160: codes["),
        ("11.1", "rintf(weights[i] / scale)", "weights[i] / scale", "codes["),
        ("12.1", "page < 0 ? 0 : ", "", "reads memory[-64] (line 6), which is before the begin of memory"),
        ("13.1", "column >= 0 && ", "", "reads image[-1] (line 6), which is before the begin"),
        ("14.1", "expf(m[s] - largest)", "1", "heads = 3, splits = 5: out[0][0] is"),
        ("15.1", "__syncthreads();  // read by all", "", "a race on shared memory: thread"),
        ("15.1", "    if (threadIdx.x == 0) atomicSub(next, 1);", "", "tiles = 1: y[0] was never written"),
        ("16.1", "cudaStreamSynchronize(streams[i]);", "{}", "pieces = 1: out[0] was never written"),
        ("16.1", "device + piece % 2 * n", "device", "(found with the threads in reverse order"),
        (
            "16.2",
            "256, 0, stream>>>(x, n);\n    cudaStreamEnd",
            "256>>>(x, n);\n    cudaStreamEnd",
            "into the default stream while",
        ),
        ("18.1", "table[position / 16] * 16 + position % 16", "position", "tokens = 20: scales[0] is"),
        ("19.1", "parts[r][i]", "parts[(rank + r) % ranks][i]", "sum[1]["),
    ],
)
def test_mistakes(name, old, new, said, checked, monkeypatch):
    monkeypatch.setattr(exercises, "LIMIT", 2)
    text = solution(name)
    assert old in text
    if "tail" in new:
        text = text.replace("partial[256];", "partial[256], tail[256];")
    found = checked(name, text.replace(old, new, 1))
    assert found.problem is not None
    assert said in found.problem


@pytest.mark.parametrize("name", ["01.1", "03.2", "04.1"])
def test_a_template_does_not_pass_in_chinese(name, checked):
    found = checked(name, exercises_of(name)[0].template, "zh")
    assert found.problem is not None
    assert re.search(r"没有被写过|没有合并", found.problem)


def test_bytes_that_need_not_move_are_reported(checked):
    found = checked("17.1", exercises_of("17.1")[0].template)
    assert found.problem == (
        "the result is right, but t is read: 250 sectors of 32 bytes that the exercise does without (line 21): "
        "keep these values in registers"
    )


def test_a_right_result_by_other_means_is_reported(checked):
    text = (
        "// __shared__ and __syncthreads are not used\n"
        "__global__ void product(const float *a, const float *b, float *c, int n) {\n"
        "    const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;\n"
        "    if (row >= n || column >= n) return;\n"
        "    float sum = 0;\n"
        "    for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];\n"
        "    c[row * n + column] = sum;\n}\n"
    )
    assert checked("04.1", text).problem == (
        "the result is right, but the exercise is to use __shared__ and __syncthreads"
    )


def invoke(*words: str):
    return CliRunner().invoke(app, ["learn", *words], catch_exceptions=False)


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert "04.1  multiply matrices with tiles in shared memory" in invoke().stdout
    with pytest.raises(StorageError, match="run `warpbus learn 1` first"):
        invoke("1", "--check")
    assert "wrote 01_1_vector_add.cu: add two vectors" in invoke("1").stdout
    assert "01_1_vector_add.cu is there already" in invoke("01.1").stdout
    path = tmp_path / "01_1_vector_add.cu"
    assert path.read_text(encoding="utf-8") == exercises_of("01.1")[0].template
    path.write_text(solution("01.1"), encoding="utf-8")
    assert re.search(r"01\.1 .* not checked *\n", invoke().stdout)
    found = invoke("1", "--check")
    assert found.exit_code == 1  # 01.2 is still to do
    assert "✔ 01.1 add two vectors" in found.stdout
    assert "read a: 128 sectors of 32 bytes, 128 needed" in found.stdout
    listed = invoke().stdout
    assert re.search(r"01\.1 .* passed *\n", listed)
    assert re.search(r"01\.2 .* not begun *\n", listed)
    assert f"1 of {len(EXERCISES)} passed" in listed
    assert json.loads((tmp_path / ".warpbus-learn.json").read_text())["01.1"]["passed"] is True
    path.write_text("__global__ void add(const float *a, const float *b, float *c, int n) { c[n] = 1; }\n")
    wrong = invoke("01.1", "--check", "--lang", "zh")
    assert (wrong.exit_code, "1 │ __global__ void add" in wrong.stdout) == (1, True)
    assert "线程 (0, 0, 0)：写了 c[1]（第 1 行），但 c 只有 1 个元素" in wrong.stdout
    assert re.search(r"01\.1 .* 未通过 *\n", invoke("--lang", "zh").stdout)
    with pytest.raises(UsageError, match="chapter 08: has no exercise that is checked: chapters 01, 02"):
        invoke("8")
    with pytest.raises(UsageError, match=r"01\.9: there is no such exercise: `warpbus learn` lists them"):
        invoke("01.9")
    with pytest.raises(UsageError, match="--lang is 'fr': choose from en, zh"):
        invoke("--lang", "fr")
