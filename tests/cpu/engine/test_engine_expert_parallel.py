"""Expert parallelism in an engine and in a service: the tokens of one process."""

import asyncio
from dataclasses import replace

import pytest
import torch
from engine_models import random_lora
from quantized_files import plain_tensors, write_files, write_quantized
from thread_groups import GLM4_MOE, load, together

from warpbus.dist import Group
from warpbus.engine import LLM, SamplingParams
from warpbus.engine.engine import Engine
from warpbus.engine.loading import load_engine
from warpbus.engine.options import ServiceOptions
from warpbus.engine.service import Service
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.adapters import save_lora

PROMPTS = ["床前明月光", "The moon is bright, and I think of home"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHARED = ServiceOptions(device="cpu", tensor_parallel=2, expert_parallel=True, max_num_seqs=4)


@pytest.fixture(scope="module")
def lora(poet_moe, tmp_path_factory):
    """The directory of a LoRA on attention and the shared expert."""
    model = load_model(Checkpoint(poet_moe), device="cpu", dtype=torch.float32)
    made = random_lora(model, "lora", 4, scale=1.0)
    parts = {name: part for name, part in made.parts.items() if ".experts." not in name}
    assert any("attention" in name for name in parts)
    assert any("shared" in name for name in parts)
    directory = tmp_path_factory.mktemp("adapter") / "lora"
    save_lora(directory, replace(made, parts=parts), model.config, base=str(poet_moe), rank=4, alpha=8)
    return directory


def test_a_service_answers_as_one_process(poet_moe, lora):
    """Without an adapter, with one from the start, and with one that is loaded while it runs."""

    async def talk():
        service = await Service.start(poet_moe, replace(SHARED, adapters=(("first", str(lora)),)))
        try:
            await service.load_adapter("second", str(lora))
            return [await answers(service, name) for name in (None, "first", "second")]
        finally:
            await service.close()

    async def answers(service, name):
        async def answer(prompt):
            encoded = service.tokenizer.encode(prompt)
            return [token async for piece in service.generate(encoded, GREEDY, name) for token in piece.token_ids]

        return await asyncio.gather(*map(answer, PROMPTS))

    plain, first, second = asyncio.run(talk())
    llm = LLM(poet_moe, device="cpu", adapters={"lora": lora})
    assert plain == [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    assert first == second == [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY, adapter="lora")]
    assert plain != first


@pytest.mark.parametrize("scheme", [None, "w4a16-g32"])
@pytest.mark.parametrize("world", [2, 3])
def test_drafts_of_multi_token_prediction_change_no_token(tmp_path, scheme, world):
    values = GLM4_MOE | {"num_nextn_predict_layers": 1}
    if scheme is None:
        directory = write_files(tmp_path / "model", values, plain_tensors(values, torch.float32))
    else:
        directory, _ = write_quantized(tmp_path / "model", values, "compressed-tensors", scheme)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13], [30]]
    with torch.no_grad():
        expected = Engine(load(directory), max_num_seqs=4).decode(prompts, 20)

    def decoded(group: Group) -> tuple[list[list[int]], int]:
        model = load(directory, group, mtp=True, expert_parallel=True)
        engine = Engine(model, max_num_seqs=4, speculation="mtp:2")
        return engine.decode(prompts, 20), engine.stats().drafted

    for found, drafted in together(world, decoded):
        assert found == expected
        assert drafted > 0


def test_what_it_needs(poet_moe):
    with pytest.raises(UsageError, match=r"over the GPUs of tensor_parallel, which is 1: give 2 or more, or leave it"):
        ServiceOptions(expert_parallel=True)
    with pytest.raises(UsageError, match=r"^memory is '8GB', which plans one GPU's: leave it out with 2 GPUs$"):
        load_engine(poet_moe, replace(SHARED, memory="8GB"), Group(0, 2, torch.device("cpu")), lambda *_: None)
