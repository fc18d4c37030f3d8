"""LoRAs of requests that are computed together: each gets what the model that its adapter makes would give it alone."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from dense_configs import with_traits
from engine_models import PROMPTS, SMALL, as_on_a_gpu, assert_best, finish, random_lora, with_lora

from warpbus.engine.adapters import adapt, cut, stacked_bytes
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.moving import EngineMigration
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import CheckpointError, UsageError
from warpbus.models import SHAPES, random_model
from warpbus.models.adapters import Lora, LowRank, Prefix
from warpbus.models.layers import Adapted
from warpbus.models.parallel import Part
from warpbus.qtensor import Scheme

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)
FAMILIES = {
    "plain": (SMALL, None),
    "quantized": (SMALL, Scheme.parse("w4a16-g32")),
    "w8a8": (SMALL, Scheme.parse("w8a8-int8")),
    "glm-0414": (with_traits(SMALL, output_norms=True), None),
    "qwen3": (with_traits(SMALL, qk_norm=True, tie_embeddings=True, num_kv_heads=4), Scheme.parse("w4a16-g32")),
}
NAMES = (None, "all", "wide", None, "attention", "all", "down")


@cache
def base(family="plain"):
    config, scheme = FAMILIES[family]
    return random_model(config, scheme, "cpu", torch.float32)


@cache
def loras(family="plain"):
    """Of different ranks, some of them of some linears alone."""
    model = base(family)
    return (
        random_lora(model, "all", 4),
        random_lora(model, "wide", 17),
        random_lora(model, "attention", 3, only="attention.qkv"),
        random_lora(model, "down", 8, only="layers.1.mlp.down"),
    )


@cache
def changed(name, family="plain"):
    """The model that a LoRA makes."""
    if name is None:
        return base(family)
    return with_lora(base(family), next(lora for lora in loras(family) if lora.name == name))


def engine_of(family="plain", **options):
    """An engine of a model of its own: LoRAs are put into it."""
    config, scheme = FAMILIES[family]
    model = random_model(config, scheme, "cpu", torch.float32)
    return Engine(model, adapters=loras(family), **options)


def asked(params=GREEDY, tokens=30, names=NAMES):
    found = []
    for at, name in enumerate(names):
        found.append(request(PROMPTS[at % len(PROMPTS)], tokens=tokens, params=params))
        found[-1].adapter = name
    return found


@cache
def alone(params):
    """What each gets of a model that has its adapter in its weights, with nobody else there."""
    answers = []
    for each in asked(params):
        plain = request(each.prompt, tokens=30, params=params)
        finish(Engine(changed(each.adapter)), [plain])
        answers.append(plain.token_ids)
    return answers


@pytest.mark.parametrize(
    ("params", "kind"), [(GREEDY, lambda engine: engine), (SEEDED, as_on_a_gpu)], ids=["plain", "graphs"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 5},
        {"prefix_caching": False},
        {"speculation": 4},
        {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK},
    ],
    ids=str,
)
def test_each_gets_what_it_would_get_alone_of_a_model_with_its_adapter_merged(params, options, kind):
    requests = asked(params)
    engine = kind(engine_of(**options))
    finish(engine, requests)
    assert [each.token_ids for each in requests] == alone(params)
    assert (engine.stats().preemptions > 0) == ("cache_tokens" in options)
    different = {tuple(answer) for answer in alone(params)}
    assert len(different) == len(NAMES), "the adapters change nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_merged_model_and_of_the_definition_beside_a_quantized_one(family):
    """Of a batch in which every row has another adapter."""
    config, scheme = FAMILIES[family]
    model = random_model(config, scheme, "cpu", torch.float32)
    selection = adapt(model, loras(family))
    tokens = torch.randint(0, 300, (5, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), selection.rows(torch.arange(5).repeat_interleave(40)):
        scores = model(tokens)
    for row, name in enumerate((None, "all", "wide", "attention", "down")):
        with torch.no_grad():
            expected = changed(name, family)(tokens[row : row + 1])[0]
        tolerance = 1e-4 if family != "w8a8" else 0.2  # rounding inputs to 8 bits goes either way
        torch.testing.assert_close(scores[row], expected, atol=tolerance, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), changed(None, family)(tokens), atol=0, rtol=0)


@pytest.mark.parametrize("family", ["quantized", "glm-0414", "qwen3"])
def test_answers_of_every_kind_of_model(family):
    requests = asked(tokens=9)
    finish(engine_of(family, max_num_batched_tokens=48), requests)
    for each in requests:
        assert_best(changed(each.adapter, family), each.prompt, each.token_ids)


def test_chatglm_6b_and_a_prefix_beside_loras():
    """Its linears have other names, and its prompts are read in both directions; rows of all kinds are in one step."""
    end = 290
    config = with_traits(
        SHAPES["chatglm-6b"], vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4
    )
    config = with_traits(config, head_dim=16, ffn_size=128, max_context=256, prompt_end=end, normed_residual=2.0)
    config = replace(config, rope=replace(config.rope, rotary_dim=8), stop_ids=())
    model = random_model(config, Scheme.parse("w4a16-g32"), "cpu", torch.float32)
    own = random_lora(model, "one", 4), random_lora(model, "two", 9, only="mlp.up")
    models = {None: model, "one": with_lora(model, own[0]), "two": with_lora(model, own[1])}
    keys = torch.randn(2, 37, 4, 16, generator=torch.Generator().manual_seed(1))
    other = random_model(config, Scheme.parse("w4a16-g32"), "cpu", torch.float32)
    engine = as_on_a_gpu(Engine(other, adapters=(*own, Prefix("prefix", keys, keys.flip(1)))))
    requests = asked(tokens=12, names=(None, "one", "prefix", "two", "one"))
    for each in requests:
        each.prompt = [*each.prompt[:40], end]
    finish(engine, requests)
    for each in requests:
        if each.adapter != "prefix":
            assert_best(models[each.adapter], each.prompt, each.token_ids)
    [alone] = asked(tokens=12, names=("prefix",))
    alone.prompt = requests[2].prompt
    finish(engine, [alone])
    assert alone.token_ids == requests[2].token_ids


def test_adapters_share_no_blocks():
    engine = engine_of()
    found = []
    for name in (None, "all", "wide", None, "wide", "all"):
        [each] = asked(names=[name])
        each.prompt = PROMPTS[2]  # two blocks and eleven tokens
        finish(engine, [each])
        assert_best(changed(name), each.prompt, each.token_ids)
        found.append(each.cached_tokens)
    assert found == [0, 0, 0, 2 * BLOCK, 2 * BLOCK, 2 * BLOCK]


def test_a_slot_takes_nothing_of_its_last_sequence():
    engine = engine_of(max_num_seqs=1)
    for name in ("all", None, "wide", None):
        [each] = asked(names=[name])
        finish(engine, [each])
        assert each.token_ids == alone(GREEDY)[0] if name is None else each.token_ids != alone(GREEDY)[0]


def test_what_fails_in_a_step_is_computed_again_with_the_same_adapters(monkeypatch):
    engine = engine_of()
    requests = asked()
    for each in requests:
        engine.add(each)
    for _ in range(5):
        engine.step()
    launch = engine._instance.runner.launch
    monkeypatch.setattr(engine._instance.runner, "launch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.setattr(engine._instance.runner, "launch", launch)
    finish(engine)
    assert [each.token_ids for each in requests] == alone(GREEDY)


def test_an_engine_with_adapters_sleeps_and_moves():
    model = random_model(SMALL, None, "cpu", torch.float32)
    adapt(model, loras())
    engine = Engine(model, adapters=loras(), offloadable=OffloadableModel(model))
    engine.sleep()
    engine.wake()
    requests = asked()
    for each in requests:
        engine.add(each)
    for _ in range(4):
        engine.step()
    move = EngineMigration(engine, CPU)
    move.prepare()
    move.finish()
    move.release()
    finish(engine)
    assert [each.token_ids for each in requests] == alone(GREEDY)
    again = asked()
    finish(engine, again)
    assert [each.token_ids for each in again] == alone(GREEDY)


def test_an_engine_that_goes_to_sleep_takes_its_adapters_along():
    model = random_model(SMALL, None, "cpu", torch.float32)
    before = OffloadableModel(model).nbytes
    adapt(model, loras())
    assert OffloadableModel(model).nbytes >= before + stacked_bytes(loras(), torch.float32)


def test_what_adapters_take_is_known_before_they_are_there():
    model = random_model(SMALL, None, "cpu", torch.float32)
    adapt(model, loras())
    kept = [each for name, each in model.named_buffers() if name.endswith((".a", ".b"))]
    assert stacked_bytes(loras(), torch.float32) == sum(each.nbytes for each in kept)
    assert stacked_bytes(loras(), torch.float16) == sum(each.nbytes for each in kept) // 2
    assert stacked_bytes((), torch.float32) == 0


def test_an_adapter_that_is_not_there_is_refused():
    for engine, message in (
        (engine_of(), "there is no adapter 'other': give one of all, wide, attention, down"),
        (Engine(base()), "there is no adapter 'other': the model was loaded without any"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.add(asked(names=["other"])[0])
        assert not engine.has_work


def parts_of(changes):
    low = LowRank(torch.ones(2, 64), torch.ones(64, 2))
    return [Lora("odd", {changes.get("name", "layers.0.attention.o"): changes.get("low", low)})]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "head"}, "adapter odd: it changes head, which is no linear of this model's layers"),
        ({"name": "layers.2.attention.o"}, "it changes layers.2.attention.o, which is no linear"),
        ({"name": "layers.0.mlp_norm"}, "it changes layers.0.mlp_norm, which is no linear"),
        (
            {"low": LowRank(torch.ones(2, 32), torch.ones(64, 2))},
            r"are \[2, 32\] and \[64, 2\], expected \[rank, 64\] and \[64, rank\]: it is another model's",
        ),
        ({"low": LowRank(torch.ones(2, 64), torch.ones(64, 3))}, r"are \[2, 64\] and \[64, 3\], expected"),
        ({"low": LowRank(torch.full((2, 64), torch.inf), torch.ones(64, 2))}, "hold NaN or infinity in torch.float32"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused(changes, message):
    model = random_model(SMALL, None, "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=message):
        Engine(model, adapters=parts_of(changes))


def test_what_overflows_in_one_adapter_does_not_reach_the_others():
    """In float32 it takes inputs of 1e30 and more; in float16 much less."""
    model = random_model(SMALL, None, "cpu", torch.float32)
    huge = Lora("huge", {"layers.0.attention.o": LowRank(torch.full((2, 64), 3e38), torch.ones(64, 2))})
    engine = Engine(model, adapters=[huge, *loras()])
    finish(engine, requests := asked())
    assert [each.token_ids for each in requests] == alone(GREEDY)


def test_a_model_has_the_adapters_of_one_engine():
    model = random_model(SMALL, None, "cpu", torch.float32)
    Engine(model, adapters=loras())
    Engine(model, adapters=loras())
    with pytest.raises(UsageError, match="the model has adapters of another engine"):
        Engine(model, adapters=loras()[:2])
    [plain] = asked(names=[None])
    finish(Engine(model), [plain])
    assert plain.token_ids == alone(GREEDY)[0]


@pytest.mark.parametrize("world", [2, 3])
def test_the_parts_of_a_lora_are_cut_like_the_linears(world):
    """Of inputs that are cut, what the parts give adds up; of outputs, each has its own rows."""
    lora = loras()[0]
    parts = [Part(SMALL, rank, world) for rank in range(world)]
    cuts = [cut(lora, part) for part in parts]
    for name in ("layers.0.attention.o", "layers.1.mlp.down"):
        whole = lora.parts[name].b @ lora.parts[name].a
        together = sum((each.parts[name].b @ each.parts[name].a).sum(1) for each in cuts)
        torch.testing.assert_close(together, whole.sum(1), atol=1e-4, rtol=1e-4)
    for name in ("layers.0.attention.qkv", "layers.1.mlp.gate_up"):
        for part, each in zip(parts, cuts, strict=True):
            rows = part.rows(f"{name}.weight", 0)
            assert len(each.parts[name].b) == sum(span.size for _, lines in rows for span in lines)
            assert torch.equal(each.parts[name].a, lora.parts[name].a)
    own = [each.parts["layers.0.mlp.gate_up"].b.chunk(2) for each in cuts]
    assert torch.equal(
        torch.cat([gate for gate, _ in own] + [up for _, up in own]), lora.parts["layers.0.mlp.gate_up"].b
    )


def test_a_prefix_is_cut_by_heads():
    keys = torch.arange(2 * 3 * 2 * 16.0).view(2, 3, 2, 16)
    cuts = [cut(Prefix("p", keys, -keys), Part(SMALL, rank, 2)) for rank in range(2)]
    for rank, each in enumerate(cuts):
        assert torch.equal(each.keys_lthd, keys[:, :, rank : rank + 1])
        assert torch.equal(each.values_lthd, -keys[:, :, rank : rank + 1])
    # Where there are fewer KV heads than processes, some have the same.
    fourth = cut(Prefix("p", keys, -keys), Part(SMALL, 3, 4))
    assert torch.equal(fourth.keys_lthd, keys[:, :, 1:])


def test_adapters_are_exchanged_between_steps():
    engine = Engine(copy.deepcopy(base()), adapters=loras()[:1], prefix_caching=True)
    first = [request(PROMPTS[2], tokens=30), request(PROMPTS[2], tokens=30)]
    first[1].adapter = "all"
    for each in first:
        engine.add(each)
    for _ in range(3):
        engine.step()
    with pytest.raises(UsageError, match="there is no adapter 'down'"):
        engine.add(named("down"))
    # The one that is used gets another number, and the request goes on with it.
    engine.use_adapters([loras()[3], loras()[1], loras()[0]])
    later = [named("down"), named("wide"), named("all"), named(None)]
    finish(engine, later)
    for each in (*first, *later):
        assert_best(changed(each.adapter), each.prompt, each.token_ids)
    engine.use_adapters([])
    last = named(None)
    finish(engine, [last])
    assert last.token_ids == later[-1].token_ids
    assert not [part for part in engine.model.modules() if isinstance(part, Adapted)]


def named(adapter):
    found = request(PROMPTS[2], tokens=30)
    found.adapter = adapter
    return found


def test_another_adapter_of_the_same_name_gets_no_cached_prefixes_of_the_first():
    engine = Engine(copy.deepcopy(base()), adapters=loras()[:1])
    finish(engine, [named("all")])
    other = Lora("all", loras()[1].parts)
    engine.use_adapters([other])
    again = named("all")
    finish(engine, [again])
    assert again.cached_tokens == 0
    assert_best(changed("wide"), again.prompt, again.token_ids)


def test_an_adapter_that_does_not_fit_changes_nothing():
    engine = Engine(copy.deepcopy(base()), adapters=loras()[:2])
    wrong = Lora("wrong", {**loras()[0].parts, "layers.1.mlp.down": LowRank(torch.ones(1, 3), torch.ones(3, 1))})
    with pytest.raises(CheckpointError, match="it is another model's"):
        engine.use_adapters([*loras()[:2], wrong])
    prefix = Prefix("prefix", torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2, 16))
    with pytest.raises(UsageError, match="prefix can be loaded, or left out, at the start"):
        engine.use_adapters([*loras()[:2], prefix])
    asked = [named("wide"), named("all")]
    finish(engine, asked)
    for each in asked:
        assert_best(changed(each.adapter), each.prompt, each.token_ids)


def test_graphs_of_steps_with_adapters_are_dropped():
    engine = as_on_a_gpu(Engine(copy.deepcopy(base()), adapters=loras()[:1]))
    finish(engine, [named("all")])
    finish(engine, [named(None)])
    engine.use_adapters(loras()[1:2])
    graphs = engine._instance.step._graphs
    assert graphs.dropped == 1
    asked = named("wide")
    finish(engine, [asked])
    assert_best(changed("wide"), asked.prompt, asked.token_ids)
