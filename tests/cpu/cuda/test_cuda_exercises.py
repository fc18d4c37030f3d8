"""The exercises: templates do not pass, solutions do, and typical mistakes get an answer that helps."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.cuda import exercises
from warpbus.cuda.exercises import EXERCISES, exercise_of
from warpbus.errors import DataError, StorageError, UsageError

ROOT = Path(__file__).resolve().parents[3]
SOLUTIONS = Path(__file__).parent / "solutions"


def solution(chapter: str) -> str:
    return (SOLUTIONS / exercise_of(chapter).file).read_text(encoding="utf-8")


@pytest.fixture
def answer(tmp_path):
    """The message for a solution: of a chapter, with a change of one place."""

    def check(chapter: str, old: str, new: str) -> str:
        text = solution(chapter)
        assert old in text
        path = tmp_path / exercise_of(chapter).file
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(DataError) as caught:
            exercise_of(chapter).check(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return check


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.chapter)
def test_a_solution_passes_and_the_template_does_not(exercise, tmp_path):
    exercise.check(SOLUTIONS / exercise.file)
    template = tmp_path / exercise.file
    template.write_text(exercise.template, encoding="utf-8")
    with pytest.raises(DataError, match=r"is (-?nan|1), expected|no thread took it"):
        exercise.check(template)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.chapter)
def test_an_exercise_belongs_to_a_chapter_in_both_languages(exercise):
    assert exercise.file.startswith(exercise.chapter)
    assert f"warpbus learn {exercise.chapter} --check" in exercise.template
    assert len(re.findall(r"[\u4e00-\u9fff]", exercise.template)) > 20
    pages = list((ROOT / "docs" / "tutorial").glob(f"{exercise.chapter}_*.md"))
    assert len(pages) == 2
    assert all(f"`warpbus learn {exercise.chapter}`" in page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize(
    ("chapter", "old", "new", "said"),
    [
        ("01", "if (i < n) ", "", "behind the end of 4 bytes of cudaMalloc: compare the index"),
        ("01", "a[i] + b[i]", "a[i] - b[i]", "n = 1: c[0] is -1, expected 1 (block 0, thread 0)"),
        ("01", "blockIdx.x * blockDim.x + ", "", "n = 1000: c[256] is"),
        ("01", "a[i] +", "a[j] +", "01_vector_add.cu:3:"),
        ("02", "row * columns + column] = ", "column * rows + row] = ", "row"),
        ("03", "gridDim.x * blockDim.x", "blockDim.x * 2", "two threads took it"),
        ("03", "i += gridDim.x * blockDim.x", "i += 0 * gridDim.x", "did not end within"),
        ("04", "__syncthreads();  // loaded", "", "row"),
        ("04", "__syncthreads();  // used", "", "n = "),
        ("04", "    float sum = 0;", "    if (row >= n) return;\n    float sum = 0;", "wait at __syncthreads(), but"),
        ("07", "step = 16", "step = 8", "31 columns: the sum of row 0"),
    ],
)
def test_mistakes(chapter, old, new, said, answer, monkeypatch):
    monkeypatch.setattr(exercises, "LIMIT", 5.0)
    assert said in answer(chapter, old, new)


def test_a_right_result_by_other_means_is_told(tmp_path):
    path = tmp_path / "04_tiled_product.cu"
    path.write_text(
        "// __shared__ and __syncthreads are not used\n"
        "__global__ void product(const float *a, const float *b, float *c, int n) {\n"
        "    const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;\n"
        "    if (row >= n || column >= n) return;\n"
        "    float sum = 0;\n"
        "    for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];\n"
        "    c[row * n + column] = sum;\n}\n"
    )
    with pytest.raises(DataError, match="the result is right, but the exercise is to use __shared__ and __syncthreads"):
        exercise_of("4").check(path)


def invoke(*words: str):
    return CliRunner().invoke(app, ["learn", *words], catch_exceptions=False)


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "04  multiply matrices with tiles in shared memory" in invoke().stdout
    with pytest.raises(DataError, match="run `warpbus learn 01` first"):
        invoke("1", "--check")
    assert "Fill in the kernel, then: warpbus learn 01 --check" in invoke("1").stdout
    path = tmp_path / "01_vector_add.cu"
    assert path.read_text(encoding="utf-8") == exercise_of("01").template
    with pytest.raises(StorageError, match="exists already"):
        invoke("01")
    path.write_text(solution("01"), encoding="utf-8")
    assert invoke("01", "--check").stdout.startswith("passed: add two vectors")
    with pytest.raises(UsageError, match="chapter 12: has no exercise: choose from 01, 02, 03, 04, 07"):
        invoke("12")
