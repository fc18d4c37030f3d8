"""`warpbus serve demo` as a user has it: a poem on the chat page, of a real model, on the CPU."""

import os
import re
import signal
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the server says that it is."""
    command = [sys.executable, "-m", "warpbus", "serve", "demo", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command,
        cwd=tmp_path_factory.mktemp("serve"),
        env={**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"http://[\w.]+:\d+", line):
                yield found.group()
                break
        else:
            pytest.fail(f"the server ended: {said}")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode in (0, 130, -signal.SIGINT)


def test_a_poem_is_written_and_kept(address, chromium):
    page = chromium.new_page(locale="zh-CN")
    page.set_default_timeout(90_000)
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    page.wait_for_function("() => document.querySelector('#model').value === 'glm-poet'")
    page.click("#settings-open")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "24")
    page.keyboard.press("Escape")
    page.fill("#question", "以《春夜》为题写一首诗")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .stats:has-text('输出')")  # also where the model still loads: the page asks again
    assert re.search("[\u4e00-\u9fff]{5}", page.inner_text(".markdown"))
    assert re.match(
        r"输入 \d+ 个 token.* · 输出 \d+ 个 · 每秒 [\d.,]+ 个 · 首个 token [\d.]+ 秒", page.inner_text(".stats")
    )
    page.wait_for_selector("#context:has-text('上下文')")
    page.reload()
    page.wait_for_selector(".answer .stats:has-text('输出')")
    assert problems == []
    page.context.close()
