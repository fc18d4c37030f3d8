"""The share of titles for which a model keeps to the form, and what the package ships."""

from types import SimpleNamespace
from typing import Any

import pytest

from warpbus import demo
from warpbus.demo.quatrains import quatrain_share
from warpbus.engine import SamplingParams
from warpbus.errors import CheckpointError

GOOD = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。"


class Poet:
    """Answers with the given texts, in turn."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.asked = texts, list[str]()

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        assert [message["role"] for message in messages] == ["user"]
        self.asked.append(messages[0]["content"])
        return [len(self.asked)]

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        assert prompts == [[number + 1] for number in range(len(self.texts))]
        assert params.max_tokens == 60
        return [SimpleNamespace(text=text) for text in self.texts]


def test_the_share_of_quatrains() -> None:
    poet = Poet([GOOD, GOOD[:-3], GOOD + "\n" + GOOD, ""])
    params = SamplingParams(max_tokens=60)
    share = quatrain_share(poet, ["春夜", "江雪", "月", "山"], "五言绝句", params)  # type: ignore[arg-type]
    assert share == 0.25
    assert poet.asked[0] == "写一首题为《春夜》的五言绝句。"


def test_what_is_missing_from_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(demo, "_HERE", tmp_path)
    for path in (demo.model_path, demo.calibration_path, lambda: demo.data_path("validation.jsonl")):
        with pytest.raises(CheckpointError, match="the packaged demo is incomplete: install warpbus again"):
            path()
    (tmp_path / "glm-poet").mkdir()
    assert demo.model_path() == tmp_path / "glm-poet"
