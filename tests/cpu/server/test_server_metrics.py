"""The counts of tokens: what a histogram and a counter of the Prometheus client would say."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from warpbus.server.metrics import _BETWEEN_TOKENS, Metrics
from warpbus.server.registry import Models


def samples(text: str) -> dict[object, float]:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for sample in found
        if sample.name.startswith(("warpbus:generation_tokens", "warpbus:inter_token"))
        and not sample.name.endswith("_created")
    }


@pytest.mark.parametrize(
    "pieces", [[], [(1, None)], [(2, None), (1, 0.0), (1, 0.002), (4, 0.2), (1, 0.0201), (3, 99.0)]]
)
def test_tokens_are_counted_as_a_histogram_does(pieces: list[tuple[int, float | None]]) -> None:
    registry = CollectorRegistry()
    label = ("model_name",)
    times = Histogram("warpbus:inter_token_latency_seconds", "x", label, registry=registry, buckets=_BETWEEN_TOKENS)
    tokens = Counter("warpbus:generation_tokens", "x", label, registry=registry)
    metrics = Metrics()
    for name in ("one", "two"):
        metrics.token_counts(name)
        times.labels(name)
        tokens.labels(name)
    for count, seconds in pieces:
        metrics.token_counts("one").record(count, seconds)
        tokens.labels("one").inc(count)
        for _ in range(0 if seconds is None else count):
            times.labels("one").observe((seconds or 0.0) / count)
    shown = samples(asyncio.run(metrics.text(Models())).decode())
    assert shown == pytest.approx(samples(generate_latest(registry).decode()))
    assert len(shown) == 2 * (len(_BETWEEN_TOKENS) + 4)
