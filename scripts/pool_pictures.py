"""Take the pictures of the pool's dashboard in docs/pictures, of made-up data, in English and in Chinese.

    .venv/bin/python scripts/pool_pictures.py

It needs /usr/bin/chromium and fonts for Chinese.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from fake_pool import GB, FakePool, event, fake_pool, gpu, lease, remembered  # noqa: E402

_MOVES = [
    (3300, "02", "bob", "mill/1", "mill/0", 2.1, 0.012),
    (1900, "04", "dana", "mill/0", "forge/0", 3.4, 0.046),
    (500, "07", "erin", "mill/2", "forge/0", 1.8, 0.009),
]
_BEST = "best fit of 3 GPUs with room: 16.00 GB and share 0.25 stay free"


def main() -> None:
    moves = [
        event(
            ago,
            "moved",
            lease=number + 30 * "9",
            tenant=tenant,
            source=source,
            target=target,
            seconds=took,
            pause=pause,
        )
        for ago, number, tenant, source, target, took, pause in _MOVES
    ]
    hour = [("mill/0", 64 * GB, 0.7), ("mill/1", 60 * GB, 0.9), ("mill/2", 20 * GB, 0.45), ("forge/0", 78 * GB, 0.35)]
    with fake_pool(example(moves), history=remembered(hour, moves)) as pool, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for locale, name in (("en-US", "pool_page.png"), ("zh-CN", "pool_page.zh-CN.png")):
            page = browser.new_page(locale=locale, viewport={"width": 1280, "height": 1160})
            page.goto(pool.url)
            page.wait_for_selector("path.line[d]", state="attached")
            page.wait_for_function("() => document.querySelectorAll('.mark').length >= 6")
            page.screenshot(path=PICTURES / name)
            page.close()


def example(moves: list[dict[str, object]]) -> FakePool:
    """Four GPUs of two hosts, one of which is drained, and seven leases of five tenants."""
    pool = FakePool()
    pool.gpus = {name: gpu(name) for name in ("mill/0", "mill/1", "mill/2")}
    pool.gpus["forge/0"] = gpu("forge/0", "NVIDIA H200", 141 * GB)
    pool.gpus["mill/2"]["state"] = "draining"
    pool.leases = [
        lease(1, "alice", "mill/0", 24, 0.5, memory_used=18 * GB, reason=_BEST),
        lease(2, "bob", "mill/0", 40, 0.25, memory_used=11 * GB, priority=5, idle=42, reason="moved from mill/1"),
        lease(3, "carol", "mill/1", 60, 1.0, memory_used=55 * GB, reason="requested on mill/1, " + _BEST),
        lease(4, "dana", "forge/0", 32, 0.25, memory_used=21 * GB, reason="moved from mill/0"),
        lease(5, "bob", "mill/2", 12, 0.25, memory_used=12 * GB, reason=_BEST),
        lease(6, "dana", "mill/2", 8, 0.25, target="forge/0", state="moving", reason="moves from mill/2 to forge/0"),
        lease(7, "erin", "forge/0", 38, 0.1, memory_used=10.2 * GB, reason="moved from mill/2"),
    ]
    wants = {"id": "a" * 32, "tenant": "carol", "memory": 64 * GB, "share": 0.5, "priority": 0, "waited": 130.0}
    why = "needs 64.00 GB and 0.5 of the GPU; most is free on forge/0 with 63.00 GB and share 0.40"
    pool.queue = [{**wants, "why": why}]
    pool.events = [event(3500, "joined", source="mill", text="mill joined with 3 GPUs"), *moves]
    return pool


if __name__ == "__main__":
    main()
