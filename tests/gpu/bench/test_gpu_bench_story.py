"""`bench story` on a GPU: the CPU and the GPU are measured, with energy where the GPU has sensors."""

from pathlib import Path

import pytest
import torch

from warpbus.demo import calibration_path, data_path, model_path
from warpbus.story.measure import Work, tell
from warpbus.story.options import StoryOptions
from warpbus.story.rows import CPU, GENERATE, GPTQ4, GPU, ORIGINAL, QUANTIZE, TRAIN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_the_packaged_model(tmp_path: Path) -> None:
    options = StoryOptions(counts=(1,), samples=8, documents=5, tokens=8)
    work = Work(
        *("glm-poet", model_path(), tmp_path, data_path("validation.jsonl"), calibration_path()),
        *(torch.device("cuda", 0), options, "warpbus bench story"),
    )
    reported = tell(work)
    assert {(row.task, row.place) for row in reported.rows} == {
        *((GENERATE, CPU), (GENERATE, GPU), (TRAIN, CPU), (TRAIN, GPU), (QUANTIZE, GPU)),
    }
    assert any("The GPU generates" in sentence for sentence in reported.findings())
    assert all(row.memory for row in reported.rows)
    assert {row.joules is None for row in reported.rows if row.place == CPU} == {True}
    assert reported.quality[GPTQ4].perplexity < 1.5 * reported.quality[ORIGINAL].perplexity
