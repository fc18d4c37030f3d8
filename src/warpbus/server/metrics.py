"""The Prometheus metrics of the server; names as in vLLM, with the prefix `warpbus:`."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import abc, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from warpbus.engine.service_model import State
from warpbus.engine.stats import Stats
from warpbus.errors import WarpbusError
from warpbus.server.registry import STATES, Models, ReplicaProtocol

PREFIX = "warpbus:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STATS_SECONDS = 2.0
_FIRST_TOKEN = (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800)
_TOKENS = (1, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True)
class _EngineMetric:
    """A value of the engine's `Stats` and its metric."""

    metric: str
    field: str
    counts: bool
    help: str


_ENGINE_METRICS = (
    _EngineMetric("num_requests_running", "running", False, "requests that the engine computes"),
    _EngineMetric("num_requests_waiting", "waiting", False, "requests that wait for the engine"),
    _EngineMetric("num_preemptions", "preemptions", True, "requests that lost their cache to others for a while"),
    _EngineMetric("prefix_cache_queries", "prefix_queries", True, "tokens of prompts looked up in the prefix cache"),
    _EngineMetric("prefix_cache_hits", "prefix_hits", True, "tokens of prompts found in the prefix cache"),
    _EngineMetric("kv_host_cache_hits", "host_hits", True, "tokens of prompts found in the main memory's KV cache"),
    _EngineMetric("kv_host_cache_bytes", "host_bytes", False, "bytes of KV blocks that main memory has now"),
    _EngineMetric("kv_host_cache_stored_bytes", "host_stored_bytes", True, "bytes of KV blocks copied to main memory"),
    _EngineMetric(
        "kv_host_cache_loaded_bytes", "host_loaded_bytes", True, "bytes of KV blocks copied from main memory"
    ),
    _EngineMetric("kv_disk_cache_hits", "disk_hits", True, "tokens of prompts found in the KV cache on disk"),
    _EngineMetric("kv_disk_cache_bytes", "disk_bytes", False, "bytes of KV blocks that the disk has now"),
    _EngineMetric("kv_disk_cache_stored_bytes", "disk_stored_bytes", True, "bytes of KV blocks written to the disk"),
    _EngineMetric("kv_disk_cache_loaded_bytes", "disk_loaded_bytes", True, "bytes of KV blocks read from the disk"),
    _EngineMetric("kv_cache_bytes_mapped", "cache_bytes", False, "bytes that the KV cache has now"),
    _EngineMetric("spec_decode_num_draft_tokens", "drafted", True, "tokens guessed by speculation"),
    _EngineMetric("spec_decode_num_accepted_tokens", "accepted", True, "guessed tokens that were right"),
    _EngineMetric(
        "spec_decode_draft_acceptance_rate", "acceptance", False, "share of the guessed tokens that were right, 0 to 1"
    ),
    _EngineMetric("experts_exchanged", "experts_exchanged", True, "experts brought from the host's memory to the GPU"),
    _EngineMetric(
        "host_expert_share", "host_expert_share", False, "share of the chosen experts in the host's memory, 0 to 1"
    ),
    _EngineMetric("engine_steps", "steps", True, "steps of the engine"),
)


class TokenCounts:
    """Counts the generated tokens of one model, and the times between two of them.

    `Counter` and `Histogram` lock and search for each token, which takes several times as long.
    """

    def __init__(self) -> None:
        self._buckets = [0] * (len(_BETWEEN_TOKENS) + 1)
        self._seconds = 0.0
        self._tokens = 0

    def record(self, tokens: int, seconds: float | None) -> None:
        """Record tokens that arrived together, in seconds since those before; None for the first of an answer."""
        self._tokens += tokens
        if seconds is not None:
            self._buckets[bisect_left(_BETWEEN_TOKENS, seconds / tokens)] += tokens
            self._seconds += seconds

    def export(self, name: str, tokens: CounterMetricFamily, times: HistogramMetricFamily) -> None:
        """Add the counts of the model `name` to the metrics."""
        tokens.add_metric([name], self._tokens)
        bounds = map(floatToGoString, (*_BETWEEN_TOKENS, math.inf))
        times.add_metric([name], list(zip(bounds, accumulate(self._buckets), strict=True)), self._seconds)


class _TokenReadings:
    """Exports the `TokenCounts` of all models when Prometheus scrapes."""

    def __init__(self) -> None:
        self.of_models: defaultdict[str, TokenCounts] = defaultdict(TokenCounts)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        labels = ["model_name"]
        tokens = CounterMetricFamily(PREFIX + "generation_tokens", "tokens generated", labels=labels)
        times = HistogramMetricFamily(PREFIX + "inter_token_latency_seconds", "between two tokens", labels=labels)
        for name, counted in self.of_models.items():
            counted.export(name, tokens, times)
        return tokens, times


class Metrics:
    """The counters and histograms of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineReadings()
        self._tokens = _TokenReadings()
        self._registry.register(self._engine)
        self._registry.register(self._tokens)
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.success = self._counter("request_success", "answers that came to their end", "finished_reason")
        self.refused = self._counter("request_errors", "requests that ended with an error", "status")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "from a request to its first token", _FIRST_TOKEN
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "for which a request waited until it was computed", _FIRST_TOKEN
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "of an answer, the mean time of its tokens", _BETWEEN_TOKENS
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "from a request to the end of its answer", _WHOLE)
        self.prompt_sizes = self._histogram("request_prompt_tokens", "tokens of a prompt", _TOKENS)
        self.answer_sizes = self._histogram("request_generation_tokens", "tokens of an answer", _TOKENS)

    def token_counts(self, name: str) -> TokenCounts:
        """The counts of the tokens of a model."""
        return self._tokens.of_models[name]

    async def text(self, models: Models) -> bytes:
        """All metrics in the text format of Prometheus."""
        replicas = [
            (model.name, str(number), replica) for model in models.bases() for number, replica in model.replicas.items()
        ]
        found = await asyncio.gather(*[_stats(replica) for _, _, replica in replicas])
        self._engine.stats = [
            (name, number, stats) for (name, number, _), stats in zip(replicas, found, strict=True) if stats is not None
        ]
        self._engine.states = [(model.name, model.state) for model in models.bases()]
        self._engine.replica_states = [(name, number, replica.health.state) for name, number, replica in replicas]
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: abc.Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets)


async def _stats(replica: ReplicaProtocol) -> Stats | None:
    try:
        async with asyncio.timeout(_STATS_SECONDS):
            return await replica.stats()
    except (WarpbusError, TimeoutError):
        return None


class _EngineReadings:
    """Exports the engines' last stats and the models' states when Prometheus scrapes."""

    def __init__(self) -> None:
        self.stats: abc.Sequence[tuple[str, str, Stats]] = ()
        self.states: abc.Sequence[tuple[str, str]] = ()
        self.replica_states: abc.Sequence[tuple[str, str, str]] = ()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        of_engine = ["model_name", "replica"]
        for reading in _ENGINE_METRICS:
            family = CounterMetricFamily if reading.counts else GaugeMetricFamily
            metric = family(PREFIX + reading.metric, reading.help, labels=of_engine)
            for *labels, stats in self.stats:
                metric.add_metric(labels, getattr(stats, reading.field))
            yield metric
        usage = GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc", "part of the KV cache that requests use, 0 to 1", labels=of_engine
        )
        for *labels, stats in self.stats:
            usage.add_metric(labels, stats.blocks_used / max(1, stats.blocks))
        yield usage
        state = GaugeMetricFamily(
            PREFIX + "replica_state", "1 for the state that the replica is in, else 0", labels=[*of_engine, "state"]
        )
        for *labels, current in self.replica_states:
            for each in get_args(State):
                state.add_metric([*labels, each], float(each == current))
        yield state
        state = GaugeMetricFamily(
            PREFIX + "model_state", "1 for the state that the model is in, else 0", labels=["model_name", "state"]
        )
        for name, current in self.states:
            for each in STATES:
                state.add_metric([name, each], float(each == current))
        yield state
