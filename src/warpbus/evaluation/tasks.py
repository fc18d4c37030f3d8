"""Tasks of lm-evaluation-harness (EleutherAI), answered by an engine of this process.

The harness reads the tasks and their data, writes the prompts, and computes the metrics. It asks for the likelihoods of
texts and for generated texts, which `Answers` computes. Prompts are plain text, without a chat template.
"""

import importlib
import math
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpbus.engine import LLM, SamplingParams
from warpbus.errors import DataError, UsageError, WarpbusError
from warpbus.evaluation.task_names import check_task_names, no_such_task
from warpbus.models import ModelConfig

TOGETHER = 256
"""Prompts that the engine gets at once, between two calls of `tell`."""

_MOST_GENERATED = 256  # tokens, if a task says nothing
_IGNORED = frozenset({"do_sample", "max_gen_toks", "num_beams", "until", "use_cache"})
_SAMPLING = frozenset({"min_p", "repetition_penalty", "seed", "temperature", "top_k", "top_p"})


@dataclass(frozen=True)
class TaskScore:
    """A metric of a model on a task.

    Attributes:
        task, metric: names of the harness; a metric behind a filter is "metric,filter".
        value: of the metric.
        error: the standard error; None if the harness computes none.
        higher_is_better: None if the harness does not say.
        questions: number of questions that were asked.
    """

    task: str
    metric: str
    value: float
    error: float | None
    higher_is_better: bool | None
    questions: int


def check_tasks(names: abc.Sequence[str], directory: Path | None = None) -> Any:
    """The harness's `TaskManager`, after a check of the names; patterns such as `mmlu_*` are allowed.

    Args:
        directory: of further tasks, as .yaml files, which may use data of this machine. They can name Python functions.

    Raises:
        UsageError: the harness is not installed, or there is no such task.
        DataError: the directory does not exist.
    """
    check_task_names(names, directory)
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=directory and str(directory))
    for name in names:
        if not manager.match_tasks([name]):
            raise no_such_task(name, manager.all_tasks)
    return manager


def evaluate_tasks(
    llm: LLM,
    names: abc.Sequence[str],
    manager: Any,
    *,
    fewshot: int | None = None,
    limit: int | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[TaskScore]:
    """The metrics of a model on tasks.

    Args:
        llm: the model.
        names: of the tasks.
        manager: see `check_tasks`.
        fewshot: number of examples before each question; None: as the task says.
        limit: number of questions of each task, at most.
        tell: called with the number of prompts done and of all prompts, of each kind of request.

    Raises:
        DataError: the harness could not read a task or its data.
        WarpbusError: as `LLM.generate`.
    """
    evaluator = importlib.import_module("lm_eval.evaluator")
    tasks = manager.match_tasks(list(names))
    try:
        found = evaluator.simple_evaluate(
            _harness_model(Answers(llm, tell)),
            tasks=tasks,
            num_fewshot=fewshot,
            limit=limit,
            log_samples=False,
            bootstrap_iters=1000,
            task_manager=manager,
        )
    except WarpbusError:
        raise
    except Exception as error:  # reading data, the harness raises anything
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"--tasks {','.join(names)}: {why:.300}: the data of tasks comes from a hub (HF_ENDPOINT), "
            "that of --task-path also from files"
        ) from error
    return [score for task in found["results"] for score in _scores(task, found)]


class Answers:
    """The model interface of the harness, computed by an engine.

    Args:
        llm: the model.
        tell: see `evaluate_tasks`.
    """

    def __init__(self, llm: LLM, tell: Callable[[int, int], None]) -> None:
        self._llm = llm
        self._tell = tell

    @property
    def window(self) -> int:
        """The most tokens that are scored at once: the context, but for the one that an engine has to generate."""
        return self._llm.max_model_len - 1

    @property
    def prefix_token(self) -> int:
        """The token before a text without a context: the one that the tokenizer puts there, or a stop token."""
        prefix = self._llm.tokenizer.prompt_prefix
        return prefix[-1] if prefix else _first_stop(self._llm.config)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts before it, as the harness's own models
        have them."""
        tokens = self._llm.tokenizer.encode(text)
        return [*self._llm.tokenizer.prompt_prefix, *tokens] if add_special_tokens else tokens

    def likelihoods(self, pairs: abc.Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Of each context and continuation, the log-likelihood of the continuation, and whether it is the greedy one.

        Pairs that are longer than `window` lose tokens on the left.
        """
        prompts = [(context + continuation)[-self.window :] for context, continuation in pairs]
        asked = [
            min(len(continuation), len(prompt) - 1) for (_, continuation), prompt in zip(pairs, prompts, strict=True)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        found = []
        for start in range(0, len(prompts), TOGETHER):
            completions = self._llm.generate(prompts[start : start + TOGETHER], params)
            for completion, count in zip(completions, asked[start : start + TOGETHER], strict=True):
                assert completion.prompt_logprobs is not None
                scored = completion.prompt_logprobs[len(completion.prompt_logprobs) - count :]
                tokens = [each for each in scored if each is not None]
                assert len(tokens) == count
                found.append((math.fsum(each.logprob for each in tokens), all(each.rank == 1 for each in tokens)))
            self._tell(len(found), len(prompts))
        return found

    def rolling(self, texts: abc.Sequence[str]) -> list[float]:
        """The log-likelihood of each text. A text longer than `window` is cut into windows, which are added up."""
        pairs, owners = [], []
        for index, text in enumerate(texts):
            ids = [self.prefix_token, *self.encode(text, add_special_tokens=False)]
            for start in range(1, len(ids), self.window - 1):
                pairs.append(([ids[start - 1]], ids[start : start + self.window - 1]))
                owners.append(index)
        sums = [0.0] * len(texts)
        for owner, (likelihood, _) in zip(owners, self.likelihoods(pairs), strict=True):
            sums[owner] += likelihood
        return sums

    def generate(self, requests: abc.Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The continuation of each text, by the generation parameters of the harness.

        Raises:
            UsageError: a parameter is unknown or out of range.
        """
        prompts, params = [], []
        for text, given in requests:
            own = sampling_params(given, self.window)
            prompts.append(self.encode(text)[-(self._llm.max_model_len - own.max_tokens) :])
            params.append(own)
        found: list[str] = []
        for start in range(0, len(prompts), TOGETHER):
            both = slice(start, start + TOGETHER)
            found += [completion.text for completion in self._llm.generate(prompts[both], params[both])]
            self._tell(len(found), len(prompts))
        return found


def sampling_params(given: Mapping[str, Any], most: int) -> SamplingParams:
    """Those of a task's `generation_kwargs`: greedy, unless `do_sample` or a temperature says otherwise.

    Args:
        most: the most tokens that may be generated.

    Raises:
        UsageError: a parameter is unknown or out of range.
    """
    if unknown := sorted(set(given) - _IGNORED - _SAMPLING):
        raise UsageError(f"generation_kwargs of the task: {unknown[0]!a:.60} is not supported")
    if given.get("num_beams", 1) != 1:
        raise UsageError(f"generation_kwargs of the task: num_beams is {given['num_beams']!a:.60}: expected 1")
    until = given.get("until") or ()
    sampling = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    if not given.get("do_sample", "temperature" in given):
        sampling["temperature"] = 0.0
    return SamplingParams(
        **sampling,
        max_tokens=min(int(given.get("max_gen_toks") or _MOST_GENERATED), most),
        stop=(until,) if isinstance(until, str) else tuple(text for text in until if text),
    )


def _harness_model(answers: Answers) -> Any:
    """The harness's model for these answers."""

    class HarnessModel(importlib.import_module("lm_eval.api.model").TemplateLM):  # type: ignore[misc]  # no types
        @property
        def eot_token_id(self) -> int:
            return answers.prefix_token

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return answers.encode(string, add_special_tokens=add_special_tokens is not False)

        def loglikelihood(self, requests: abc.Sequence[Any], disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)  # its bar ignores what disables the others

        def _loglikelihood_tokens(self, requests: abc.Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return answers.likelihoods([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: abc.Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return answers.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: abc.Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return answers.generate([request.args for request in requests])

    return HarnessModel()


def _first_stop(config: ModelConfig) -> int:
    if not config.stop_ids:
        raise UsageError("config.json has no eos_token_id, which --tasks puts before texts without a context")
    return config.stop_ids[0]


def _scores(task: str, found: Mapping[str, Any]) -> list[TaskScore]:
    """Those of the results of the harness, in which "acc,none" stands beside "acc_stderr,none"."""
    results = found["results"][task]
    better = found.get("higher_is_better", {}).get(task, {})
    questions = found.get("n-samples", {}).get(task, {}).get("effective", 0)
    scores = []
    for name, value in results.items():
        metric, _, behind = name.partition(",")
        if metric.endswith("_stderr") or not isinstance(value, float | int) or not behind:
            continue
        error = results.get(f"{metric}_stderr,{behind}")
        scores.append(
            TaskScore(
                task,
                metric if behind == "none" else name,
                float(value),
                float(error) if isinstance(error, float | int) and not math.isnan(error) else None,
                better.get(metric),
                questions,
            )
        )
    return scores
