"""Tasks of lm-evaluation-harness: what the engine answers, and a whole run with data of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from warpbus.demo import data_path
from warpbus.engine import LLM, SamplingParams
from warpbus.errors import DataError, UsageError
from warpbus.evaluation import read_questions
from warpbus.evaluation.task_names import check_task_names
from warpbus.evaluation.tasks import Answers, check_tasks, sampling_params

QUESTIONS = 8


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=64)


@pytest.fixture(scope="module")
def answers(llm: LLM) -> Answers:
    return Answers(llm, lambda done, total: None)


@torch.no_grad()
def log_probs(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Float32 `[tokens, vocabulary]`: of what follows each token."""
    return llm.model(torch.tensor([ids]))[0].float().log_softmax(-1)


def expected(llm: LLM, context: list[int], continuation: list[int]) -> float:
    scores = log_probs(llm, context + continuation)[len(context) - 1 :]
    return sum(float(scores[at, token]) for at, token in enumerate(continuation))


def test_likelihoods_are_those_of_the_model(llm: LLM, answers: Answers) -> None:
    context, line, numbers = (answers.encode(text) for text in ("春眠不觉晓，", "处处闻啼鸟。", "一二三四五。"))
    greedy = [int(log_probs(llm, context)[-1].argmax())]
    pairs = [(context, continuation) for continuation in (line, numbers, greedy)]
    found = answers.likelihoods(pairs)
    assert [each for each, _ in found] == pytest.approx([expected(llm, *pair) for pair in pairs], rel=1e-4)
    assert [is_greedy for _, is_greedy in found] == [False, False, True]


def test_long_contexts_lose_tokens_on_the_left(answers: Answers) -> None:
    context, continuation = answers.encode("山" * 100), answers.encode("高水长")
    kept = context[-(answers.window - len(continuation)) :]
    assert len(context) > len(kept)
    assert answers.likelihoods([(context, continuation)]) == answers.likelihoods([(kept, continuation)])


def test_texts_longer_than_the_context_are_added_up(llm: LLM, answers: Answers) -> None:
    text = data_path("validation.jsonl").read_text(encoding="utf-8")[:150]
    ids = [answers.prefix_token, *answers.encode(text)]
    size = answers.window - 1
    assert len(ids) > size
    windows = [ids[start - 1 : start + size] for start in range(1, len(ids), size)]
    wanted = sum(expected(llm, window[:1], window[1:]) for window in windows)
    assert answers.rolling([text, "春"])[0] == pytest.approx(wanted, rel=1e-4)


def test_texts_begin_as_the_models_texts_do(llm: LLM, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = answers.encode("春眠")
    rolled = answers.rolling(["春眠"])[0]
    assert rolled == pytest.approx(expected(llm, [answers.prefix_token], bare), rel=1e-4)
    monkeypatch.setattr(llm.tokenizer, "prompt_prefix", (2, 3))
    assert answers.encode("春眠") == [2, 3, *bare]
    assert answers.encode("春眠", add_special_tokens=False) == bare
    assert answers.prefix_token == 3
    # Once, and it is not scored itself.
    assert answers.rolling(["春眠"])[0] == pytest.approx(expected(llm, [3], bare), rel=1e-4)
    assert answers.generate([("春眠", {"max_gen_toks": 4})]) == [
        llm.generate([2, 3, *bare], SamplingParams(temperature=0.0, max_tokens=4))[0].text
    ]


def test_generation_ends_where_the_task_says(llm: LLM, answers: Answers) -> None:
    prompt = "春眠不觉晓，"
    [whole] = answers.generate([(prompt, {"max_gen_toks": 12})])
    assert whole == llm.generate(prompt, sampling_params({"max_gen_toks": 12}, 63))[0].text
    stop = whole[3]
    assert answers.generate([(prompt, {"max_gen_toks": 12, "until": [stop]})]) == [whole.partition(stop)[0]]


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True, "temperature": 0.3, "top_p": 0.5}, 0.3),
    ],
)
def test_generation_is_greedy_unless_a_task_samples(given: dict[str, object], temperature: float) -> None:
    assert sampling_params(given, 100).temperature == temperature


def test_parameters_of_generation() -> None:
    params = sampling_params({"until": "\n", "max_gen_toks": 500, "top_k": 3, "do_sample": True}, 100)
    assert (params.stop, params.max_tokens, params.top_k) == (("\n",), 100, 3)
    with pytest.raises(UsageError, match="'penalty_alpha' is not supported"):
        sampling_params({"penalty_alpha": 0.5}, 100)
    with pytest.raises(UsageError, match="num_beams is 4: expected 1"):
        sampling_params({"num_beams": 4}, 100)


def test_the_harness_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match=r"pip install 'warpbus\[tasks\]'"):
        check_tasks(["hellaswag"])


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        check_tasks(["hellaswag"], tmp_path / "none")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of each kind of request about the packaged questions."""
    directory = tmp_path_factory.mktemp("tasks")
    data = directory / "verse.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for each in read_questions(data_path("next-verse.jsonl"), QUESTIONS):
            row = {"text": each.messages[0]["content"], "choices": each.choices, "answer": each.answer}
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    kinds = {
        "verse_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "verse_perplexity": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        },
        "verse_generation": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, kind in kinds.items():
        # JSON is YAML.
        (directory / f"{name}.yaml").write_text(json.dumps({"task": name} | shared | kind), encoding="utf-8")
    return directory


def run(tasks: Path, home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "warpbus",
        "eval",
        "demo",
        "--device",
        "cpu",
        "--task-path",
        str(tasks),
        *arguments,
    ]
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_command(answers: Answers, tasks: Path, tmp_path: Path) -> None:
    names = "verse_choice,verse_perplexity,verse_generation"
    done = run(tasks, tmp_path, "--tasks", names, "--json")
    assert done.returncode == 0, done.stderr
    found = {each["task"]: each for each in json.loads(done.stdout)["glm-poet"]}
    assert {name: each["metric"] for name, each in found.items()} == {
        "verse_choice": "acc",
        "verse_perplexity": "byte_perplexity",
        "verse_generation": "exact_match",
    }
    assert {each["questions"] for each in found.values()} == {QUESTIONS}

    rows = [json.loads(line) for line in (tasks / "verse.jsonl").read_text(encoding="utf-8").splitlines()]
    right = 0
    for row in rows:
        pairs = [(answers.encode(row["text"]), answers.encode(row["text"] + choice)) for choice in row["choices"]]
        scores = answers.likelihoods([(context, whole[len(context) :]) for context, whole in pairs])
        right += max(range(len(scores)), key=lambda at: scores[at][0]) == row["answer"]
    assert found["verse_choice"]["value"] == pytest.approx(right / len(rows))
    assert found["verse_choice"]["higher_is_better"] is True

    texts = [row["text"] for row in rows]
    nats, size = -sum(answers.rolling(texts)), sum(len(text.encode()) for text in texts)
    assert found["verse_perplexity"]["value"] == pytest.approx(2.718281828459045 ** (nats / size), rel=1e-3)


def test_an_unknown_task(tasks: Path, tmp_path: Path) -> None:
    done = run(tasks, tmp_path, "--tasks", "verse_choise")
    assert done.returncode == 2
    assert "--tasks 'verse_choise': no such task: did you mean verse_choice?" in done.stderr.replace("\n", " ")


def test_names_are_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from warpbus.__main__ import main\n"
        "sys.argv = ['warpbus', 'eval', 'missing-model', '--tasks', 'gsm8k,helaswag']\n"
        "try: main()\n"
        "finally: print({'torch', 'datasets', 'lm_eval'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "--tasks 'helaswag': no such task: did you mean hellaswag, " in " ".join(done.stderr.split())
    assert (done.returncode, done.stdout.strip()) == (2, "set()")


def test_no_name_of_the_harness_is_refused() -> None:
    check_task_names(check_tasks(["hellaswag"]).all_tasks)
    check_task_names(["mmlu_*"])


def test_names_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text('{"tag": ["verses"], "task": "verse"}\n', encoding="utf-8")
    (tmp_path / "b.yaml").write_text("tag:\n  - 'poems'\n  - songs\ngroup: all_verses\n", encoding="utf-8")
    check_task_names(["verse", "verses", "poems", "songs", "all_*"], tmp_path)
    with pytest.raises(UsageError, match=r"no such task: did you mean verse\?"):
        check_task_names(["verrse"], tmp_path)
