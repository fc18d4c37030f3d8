"""examples/cuda/hopper.cu on the CPU with all checks, and what is found where a line of it is wrong."""

from pathlib import Path

import pytest

from warpbus.cuda import programs
from warpbus.cuda.findings import explain

SOURCE = Path(__file__).parents[3] / "examples" / "cuda" / "hopper.cu"


def test_the_program_passes_all_checks() -> None:
    for found in programs.run_in_orders(SOURCE, checks=True):
        assert (found.mistake, found.output) == (None, "TMA, wgmma, n = 384, wrong: 0\n")


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("wait(&full[stage], round & 1);", "", "the product of thread (0, 0, 0)"),
        ("wait(&empty[stage], (round & 1) ^ 1);", "",
         "mbarrier.arrive (line 36) on full[0]: more than the 1 arrivals of mbarrier.init in one phase"),
        ("if (step > 0 && lane == 0) arrive(&empty[(step - 1) % kStages])", "if (lane == 0) arrive(&empty[stage])",
         "may still read: let that thread execute wgmma.wait_group first"),
        ("if (step > 0 && lane == 0) arrive(&empty[(step - 1) % kStages]);", "",
         "waits at mbarrier.try_wait (line 41) for the mbarrier full[0], phase of parity 1, which can never end: 1"),
        ("if (step > 0 && lane == 0)", "if (lane == 0)",
         "mbarrier.arrive (line 33) on empty[-1]: there is no mbarrier"),
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.commit_group.sync.aligned;", "reads an accumulator of wgmma"),
        ("arrive_and_expect(&full[stage], kStageBytes)", "arrive_and_expect(&full[stage], kBytesA)",
         "nothing orders that behind the copy of thread (256, 0, 0)"),
        ("init(&empty[stage], kConsumers * 4)", "init(&empty[stage], kConsumers * 128)", "248 of 256 arrivals"),
        ('asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', "", "execute wgmma.fence before the first product"),
        ("kStages * kStageBytes>>>", "kStages * kStageBytes - 16>>>", "but stages has 131056 elements"),
    ],
)  # fmt: skip
def test_mistakes_are_found(written: str, instead: str, said: str, tmp_path) -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(written) == 1
    (tmp_path / "check.h").write_text((SOURCE.parent / "check.h").read_text(encoding="utf-8"), encoding="utf-8")
    program = tmp_path / "program.cu"
    program.write_text(text.replace(written, instead), encoding="utf-8")
    mistake = programs.run_in_orders(program, checks=True)[-1].mistake
    assert mistake is not None
    assert said in explain(mistake)
    assert explain(mistake, "zh") != explain(mistake)
