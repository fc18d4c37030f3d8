"""benchmarks/poet_moe_training.py: the data that it trains on, how many steps it affords, and its records."""

import json
import lzma
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from warpbus.bench.records import read, results_path, write
from warpbus.errors import DataError, UsageError
from warpbus.evaluation import Evaluation
from warpbus.formats import Checkpoint
from warpbus.models import read_config
from warpbus.models.tokenizers import load_tokenizer

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two scripts, of which the second one imports the first."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import poet_moe
    import poet_moe_training

    yield Namespace(measuring=poet_moe, training=poet_moe_training)
    for name in ("poet_moe", "poet_moe_training"):
        del sys.modules[name]


def test_data_and_model_of_few_poems(scripts: Any, tmp_path: Path) -> None:
    poems = tmp_path / "poems.jsonl.xz"
    lines = ["床前明月光，疑是地上霜。", "举头望明月，低头思故乡。"]
    record = {"dynasty": "唐", "author": "李白", "title": "静夜思", "lines": lines}
    with lzma.open(poems, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for _ in range(5))
    scripts.training.prepared(tmp_path / "work", poems, "poet-moe", 3, 4)
    written = (tmp_path / "work" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(written) == 3 * 4
    assert {message["role"] for line in written for message in json.loads(line)["messages"]} == {"user", "assistant"}
    start = tmp_path / "work" / "start"
    config = read_config(Checkpoint(start, weights=False))
    assert 29e6 < config.num_parameters < 30e6
    router = config.layers[-1].mlp.router
    assert (router.experts, router.top_k) == (16, 2)
    assert load_tokenizer(start).encode("明月")
    with lzma.open(poems, "wt") as file:
        file.write("")
    with pytest.raises(DataError, match="holds no usable poem"):
        scripts.training.prepared(tmp_path / "other", poems, "poet-moe", 1, None)


def test_as_many_steps_as_there_is_time_for(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probe").mkdir()
    log = [{"seconds": 60.0}] * 6 + [{"seconds": 0.5}] * 6  # compilation counts among the first ones
    (tmp_path / "probe" / "training-log.json").write_text(json.dumps(log))
    monkeypatch.setattr(scripts.training.time, "monotonic", lambda: 130.0)
    monkeypatch.setattr(scripts.training, "tokenizing", lambda work, workers: 120.0 / workers)
    options = Namespace(minutes=9.0, reserve=200.0, steps=3000, rows=256, workers=4)
    assert scripts.training.affordable(tmp_path, 100.0, options) == (540 - 200 - 30 - 30) / 0.5
    assert scripts.training.affordable(tmp_path, 100.0, Namespace(**vars(options) | {"steps": 50})) == 50
    with pytest.raises(UsageError, match="there is no time to train: give more, or fewer --rows"):
        scripts.training.affordable(tmp_path, 100.0, Namespace(**vars(options) | {"minutes": 4.0}))


def test_records_and_command(scripts: Any, tmp_path: Path) -> None:
    words = ["--train", "/some/where/poems.jsonl.xz", "--work", "/some/work", "--minutes", "8", "--output", "x"]
    command = scripts.training.command_of(words)
    assert command == "python benchmarks/poet_moe_training.py --train poems.jsonl.xz --minutes 8"
    runs = [
        scripts.measuring.Run("w4a16-g128", "rtn", 0, tmp_path, 0.0, 2.0),
        scripts.measuring.Run("w4a16-g128", "gptq", 8, tmp_path, 0.25, 3.0),
    ]
    numbers: dict[str, Any] = dict.fromkeys(Evaluation.__dataclass_fields__)
    numbers |= {"divergence": 0.01, "agreement": 0.9, "accuracy": 0.5}
    found = [Evaluation(**numbers | {"perplexity": value}) for value in (200.0, 220.0, 202.0)]
    made = scripts.measuring.records(runs, found, {"model": "poet-moe", "steps": 3000}, command, "cpu")
    write(made, tmp_path)
    first, second = read(results_path(tmp_path, "poet-moe", "cpu"))
    assert (first.ours, first.peer.value, second.ours) == (220.0, 200.0, 202.0)
    assert (second.case["few_tokens"], second.case["samples"], second.case["steps"]) == (0.25, 8, 3000)
    assert second.ratio == pytest.approx(200 / 202)
    assert second.command == command
