"""Which experts are kept on the GPU: by the tokens that chose them, while a model answers."""

import pytest
import torch
from stacked_models import config_of, experts_of, model_of

from warpbus.engine import Engine, expert_placement
from warpbus.engine.expert_placement import ExpertPlacement, choose_exchanges
from warpbus.engine.moving import EngineMigration
from warpbus.errors import UsageError


def test_the_experts_with_the_most_tokens_come_to_the_gpu():
    tokens = [[10, 0, 90, 50, 20], [5, 5, 5, 5, 5]]
    assert choose_exchanges(tokens, [{0, 1}, {0, 1}]) == [(0, 2, 1), (0, 3, 0)]
    assert choose_exchanges(tokens, [{2, 3}, {3, 4}]) == []


def test_little_is_not_worth_the_copies():
    assert choose_exchanges([[0, 7]], [{0}]) == []
    assert choose_exchanges([[0, 8]], [{0}]) == [(0, 1, 0)]
    assert choose_exchanges([[100, 120]], [{0}]) == []
    assert choose_exchanges([[100, 125]], [{0}]) == [(0, 1, 0)]


def test_a_window_has_a_limit_of_exchanges():
    tokens = [[0.0] * 60 + [100.0 + at for at in range(60)] for _ in range(2)]
    found = choose_exchanges(tokens, [set(range(60))] * 2)
    assert len(found) == 64
    assert {far for _, far, _ in found} == set(range(88, 120))


def test_counts_become_exchanges_a_few_per_step():
    model = model_of(config_of(16, layers=2), offloaded=8)
    placement = ExpertPlacement(model)
    first, second = experts_of(model)
    first.counts[8:14] += 100
    second.counts[15] += 100
    for _ in range(expert_placement.WINDOW - 1):
        placement.step()
    assert (placement.exchanged, int(first.counts.sum())) == (0, 600)
    placement.step()  # the counts are on their way
    assert int(first.counts.sum()) == 0
    placement.step()  # they have arrived
    assert placement.exchanged == 0
    placement.step()
    assert placement.exchanged == 4
    placement.step()
    assert placement.exchanged == 7
    assert all(first.order[expert] < first.resident for expert in range(8, 14))
    assert second.order[15] < second.resident
    # Half of what was counted remains, so that what is chosen for a while replaces only what was never chosen.
    first.counts[:4] += 40
    for _ in range(expert_placement.WINDOW + 4):
        placement.step()
    assert placement.exchanged == 9
    assert [first.order[expert] < first.resident for expert in range(16)] == [True] * 2 + [False] * 6 + [True] * 6 + [
        False
    ] * 2


def test_it_counts_what_was_read_from_the_host():
    model = model_of(config_of(4), offloaded=2)
    placement = ExpertPlacement(model)
    first, second = experts_of(model)
    first.counts += torch.tensor([30, 0, 0, 10], dtype=torch.int32)
    second.counts += torch.tensor([5, 0, 7, 0], dtype=torch.int32)
    for _ in range(expert_placement.WINDOW):
        placement.step()
    assert (placement.choices, placement.host_choices) == (0, 0)
    placement.step()
    assert (placement.choices, placement.host_choices) == (52, 17)


def test_restart_forgets_what_was_counted():
    model = model_of(config_of(4), offloaded=2)
    placement = ExpertPlacement(model)
    (experts, _) = experts_of(model)
    experts.counts[3] += 50
    placement.restart()
    for _ in range(expert_placement.WINDOW + 4):
        placement.step()
    assert placement.exchanged == 0


def test_a_model_without_offloaded_experts_has_nothing_to_place():
    engine = Engine(model_of(config_of(4)))
    assert len(engine.decode([[1, 2, 3]], 4)[0]) == 4
    assert engine._instance.runner.experts is None
    assert engine.stats().experts_exchanged == 0


def test_the_engine_takes_a_step_of_it(monkeypatch: pytest.MonkeyPatch):
    """Answers stay the same while experts change places."""
    monkeypatch.setattr(expert_placement, "WINDOW", 2)
    config = config_of(4)
    prompts = [[1, 2, 3], list(range(40))]
    expected = Engine(model_of(config)).decode(prompts, 12)
    model = model_of(config, offloaded=2)
    engine = Engine(model)
    # The router's kernel counts; without it, somebody else has to.
    experts_of(model)[0].counts[3] += 100
    assert engine.decode(prompts, 12) == expected
    stats = engine.stats()
    assert (stats.experts_exchanged, stats.expert_choices, stats.host_expert_choices) == (1, 100, 100)
    assert stats.host_expert_share == 1.0
    assert experts_of(model)[0].order[3] < experts_of(model)[0].resident


def test_an_engine_with_offloaded_experts_does_not_move():
    engine = Engine(model_of(config_of(4), offloaded=1))
    with pytest.raises(UsageError, match="whose experts are partly offloaded cannot move: give it more memory"):
        EngineMigration(engine, torch.device("cpu"))
