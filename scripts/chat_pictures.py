"""Take the pictures of the chat page in docs/pictures: glm-poet answers two questions, in English and in Chinese.

    .venv/bin/python scripts/chat_pictures.py

It needs /usr/bin/chromium and fonts for Chinese.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
QUESTIONS = {"写一首题为《春夜》的五言绝句。": 16, "仿李白，写一首题为《江上送客》的七言绝句。": 9}
"""Each with the seed of its answer: sampling is the model's own, and the seed makes the picture reproducible."""


def main() -> None:
    command = [sys.executable, "-m", "warpbus", "serve", "demo", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            address = next(
                found.group() for line in server.stdout or () if (found := re.search(r"http://\S+:\d+", line))
            )
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
                take(browser, address, "en-US", PICTURES / "chat_page.png")
                take(browser, address, "zh-CN", PICTURES / "chat_page.zh-CN.png")
        finally:
            server.send_signal(signal.SIGINT)


def take(browser: Browser, address: str, locale: str, file: Path) -> None:
    """Write a picture of the page after all questions are answered."""
    page = browser.new_page(locale=locale, viewport={"width": 1100, "height": 620})
    page.goto(address)
    for count, (question, seed) in enumerate(QUESTIONS.items(), 1):
        page.evaluate("settings => localStorage.setItem('warpbus.settings', settings)", json.dumps({"seed": seed}))
        page.reload()
        page.wait_for_function("() => document.querySelector('#model').value === 'glm-poet'")
        page.fill("#question", question)
        page.keyboard.press("Enter")
        page.wait_for_function("n => document.querySelectorAll('.answer .stats').length === n", arg=count)
    page.screenshot(path=file)
    page.close()


if __name__ == "__main__":
    main()
