"""A server with fakes of a model without tools, of GLM-4 and ChatGLM3, and of one that thinks, as Qwen3."""

import contextlib

import pytest
from serving_fakes import FakeService, Running, qwen_template, until

from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models


@pytest.fixture(scope="module")
def served():
    """`served.service` is the fake of the model "parrot", `served.glm4` that of "glm-4", with tools."""
    with contextlib.ExitStack() as stack:
        parrot, glm4, glm3 = FakeService(), FakeService("<sop>"), FakeService("sop")
        qwen = FakeService(make_template=qwen_template)
        models = Models()
        for name, service in (("parrot", parrot), ("glm-4", glm4), ("chatglm3", glm3), ("qwen3", qwen)):
            models.add(name, service)
        running = stack.enter_context(Running(models, ServerOptions(heartbeat=0.2)))
        running.service, running.glm4, running.glm3, running.models = parrot, glm4, glm3, models
        running.qwen = qwen
        yield running


@pytest.fixture(autouse=True)
def fresh(request):
    """The fakes of `served` are as new for each test."""
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        for service in (served.service, served.glm4, served.glm3, served.qwen):
            until(lambda service=service: service.running == 0)
            service.script, service.pause, service.fails, service.state = None, 0.0, None, "ready"
            service.asked.clear()
            service.ended.clear()
