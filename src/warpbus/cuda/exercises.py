"""Exercises of the tutorial: kernels to fill in, and tests that compare them with a reference on the CPU.

`exercise_files/NN_name.cu` is what the reader gets, `NN_name.test.cu` a `main` that prints the first wrong element. No
GPU is needed: `programs` runs both on the CPU.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda.programs import run_in_orders
from warpbus.errors import DataError, UsageError

_FILES = Path(__file__).parent / "exercise_files"
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

LIMIT = 60.0
"""Seconds that a check may take."""


@dataclass(frozen=True)
class Exercise:
    """A kernel to fill in.

    Attributes:
        chapter: of the tutorial: "04".
        file: the name of the file: "04_tiled_product.cu".
        task: what the kernel computes.
        words: what a solution has to contain, so that it practises the chapter's idea.
    """

    chapter: str
    file: str
    task: str
    words: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        """The file as the reader gets it."""
        return (_FILES / self.file).read_text(encoding="utf-8")

    def check(self, solution: Path) -> None:
        """Compile a solution, run its test with both orders of threads, and return if it passes.

        Raises:
            DataError: the solution cannot be read or compiled, does not pass, or lacks what it is to practise: the
                message has the first wrong element, or the access that failed.
            DeviceError: there is no C++ compiler.
        """
        test = (_FILES / self.file).with_suffix(".test.cu").read_text(encoding="utf-8")
        runs = run_in_orders(solution, appended=test, limit=LIMIT)
        for found in runs:
            if found.code:
                lines = (found.errors or found.output).strip().splitlines()
                said = lines[-1].removeprefix("error: ") if lines else f"it ended with status {found.code}"
                reverse = ", when threads run in reverse order: a barrier is missing" if not runs[0].code else ""
                raise DataError(f"{solution}: {said}{reverse}")
        code = _COMMENTS.sub("", solution.read_text(encoding="utf-8"))
        missing = [word for word in self.words if word not in code]
        if missing:
            raise DataError(f"{solution}: the result is right, but the exercise is to use {' and '.join(missing)}")


EXERCISES = (
    Exercise("01", "01_vector_add.cu", "add two vectors, one element per thread"),
    Exercise("02", "02_sigmoid.cu", "the sigmoid of a matrix, with blocks in two dimensions", ("sigmoid(",)),
    Exercise("03", "03_grid_stride.cu", "scale a vector of any length with a grid of fixed size", ("gridDim",)),
    Exercise(
        *("04", "04_tiled_product.cu", "multiply matrices with tiles in shared memory"), ("__shared__", "__syncthreads")
    ),
    Exercise("07", "07_row_sums.cu", "sum rows by shuffles, one warp per row", ("__shfl_down_sync",)),
)


def exercise_of(chapter: str) -> Exercise:
    """The exercise of a chapter, named "4" or "04".

    Raises:
        UsageError: the chapter has none.
    """
    for exercise in EXERCISES:
        if chapter.zfill(2) == exercise.chapter:
            return exercise
    raise UsageError(f"chapter {chapter}: has no exercise: choose from {', '.join(each.chapter for each in EXERCISES)}")
