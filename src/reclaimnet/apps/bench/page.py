"""`rn bench page`: how soon the page is there, and how calm it stays while a whole campus beats.

The gateway and the browser are real; in NATS's place stands a crowd of nodes that beat as agents
do, each every two seconds, with GPUs that change hands.
"""

import asyncio
import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

from playwright.sync_api import sync_playwright
from rich.table import Table

from reclaimnet.adapters.nats.campus import Campus, Heard
from reclaimnet.apps import gateway, gateway_page, printing
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import Card, Gpu, GpuId, NodeId, Traffic
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord

SIZES: Final = (20, 500)
GPUS: Final = 4
BEAT_S: Final = 2.0
ROUND_S: Final = 0.1
WATCHED_S: Final = 20.0
WATCHED_QUICK_S: Final = 6.0
OPENED: Final = 5
"""How often the page is opened anew; the middle one counts."""
PATIENCE_MS: Final = 120_000
READY_S: Final = 30.0
PICTURE: Final = Path("out/page.png")


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    """`seed` changes nothing here: beats are what they are."""
    watched_s = WATCHED_QUICK_S if quick else WATCHED_S
    results = {f"nodes_{size}": _measure(size, watched_s) for size in SIZES}
    return {
        "bench": "page",
        "seed": seed,
        "params": {"gpus": GPUS, "beat_s": BEAT_S, "watched_s": watched_s, "opened": OPENED},
        "results": results,
    }


def render(result: dict[str, Any]) -> None:
    table = Table(title="the page, on loopback", box=None)
    for title in (
        "nodes",
        "first paint",
        "all nodes there",
        "main thread busy",
        "frames/s",
        "longest",
    ):
        table.add_column(title, justify="right")
    for name, row in result["results"].items():
        table.add_row(
            name.removeprefix("nodes_"),
            f"{row['first_paint_ms']:.0f} ms",
            f"{row['first_view_ms']:.0f} ms",
            f"{row['busy_share']:.0%}",
            f"{row['frames_per_s']:.0f}",
            f"{row['longest_frame_ms']:.0f} ms",
        )
    console = printing.console()
    console.print(table)
    console.print(f"to reach: first view < 1000 ms, busy < 30 % with 500 nodes; picture: {PICTURE}")


def _measure(size: int, watched_s: float) -> dict[str, float]:
    with _served(size) as link, _browser() as browser:
        paints, views = [], []
        for _ in range(OPENED - 1):
            page, paint, view = _opened(browser, link, size)
            page.context.close()
            paints.append(paint)
            views.append(view)
        page, paint, view = _opened(browser, link, size)
        session = page.context.new_cdp_session(page)
        # By the thread's own clock, which stands while others have the processor.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.evaluate(COUNT_FRAMES)
        before, began = _busy(session), time.monotonic()
        page.wait_for_timeout(watched_s * 1000)
        took = time.monotonic() - began
        busy = _busy(session) - before
        frames = page.evaluate("window.frames_seen")
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=PICTURE)
    return {
        "first_paint_ms": round(median([*paints, paint]), 1),
        "first_view_ms": round(median([*views, view]), 1),
        "busy_share": round(busy / took, 4),
        "frames_per_s": round(frames["count"] / took, 1),
        "longest_frame_ms": round(frames["longest"], 1),
    }


def _opened(browser: Any, link: str, size: int) -> tuple[Any, float, float]:
    """A page in a browser that knows nothing yet; ms until it was painted, until all is there."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    began = time.monotonic()
    page.goto(link)
    page.locator(".node").nth(size - 1).wait_for(state="attached")
    return page, page.evaluate(FIRST_PAINT), 1000 * (time.monotonic() - began)


FIRST_PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN"
COUNT_FRAMES: Final = """() => {
    const seen = (window.frames_seen = { count: 0, longest: 0 });
    let last = performance.now();
    const frame = (now) => {
        seen.count++;
        seen.longest = Math.max(seen.longest, now - last);
        last = now;
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
}"""


def _busy(session: Any) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


@contextlib.contextmanager
def _browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise Unavailable("this bench needs a browser; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def _served(size: int) -> Iterator[str]:
    """A gateway in a thread of its own; its link."""
    token = secrets.token_hex(8)
    ready: list[int] = []
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        stops.append((loop, stop))
        crowd = cast(Campus, _Crowd(size))
        handlers = gateway_page.handlers()
        await gateway.serve(
            "127.0.0.1", 0, crowd, token, stop, on_ready=ready.append, more=handlers
        )

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        give_up = time.monotonic() + READY_S
        while not ready:
            if time.monotonic() > give_up or not thread.is_alive():
                raise Unavailable("the gateway of this bench did not start; its log says why")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{ready[0]}/#token={token}"
    finally:
        for loop, stop in stops:
            loop.call_soon_threadsafe(stop.set)
        thread.join()


class _Crowd:
    """A campus of nodes that beat and nothing else, as far as a gateway looks at it."""

    is_up = True
    bad_messages = 0

    def __init__(self, size: int) -> None:
        self._size = size
        self.records = self.store = self

    async def watch(self, known: Callable[[], None]) -> AsyncGenerator[JobRecord, None]:
        known()
        await asyncio.Event().wait()
        yield cast(JobRecord, None)

    async def watch_cards(self, known: Callable[[], None]) -> AsyncIterator[Heard]:
        for number in range(self._size):
            yield Heard(card=_card(number, 0), age=0)
        known()
        share = self._size * ROUND_S / BEAT_S
        begun = 0
        while True:
            await asyncio.sleep(ROUND_S)
            ended = begun + max(1, round(share))
            for count in range(begun, ended):
                yield Heard(card=_card(count % self._size, 1 + count // self._size), age=0)
            begun = ended

    async def read_common_journal(self) -> list[dict[str, Any]]:
        return []


def _card(number: int, beat: int) -> Card:
    gpus = tuple(Gpu(id=GpuId(f"GPU-{number}-{i}"), index=i) for i in range(GPUS))
    return Card(
        node=NodeId(f"node-{number}"),
        beat=beat * SECOND,
        provider="ada",
        zone=f"building {1 + number % 5}",
        gpus=gpus,
        vacant=tuple(gpu.id for gpu in gpus if (number + gpu.index + beat) % 3),
        traffic=Traffic(sent=1_000_000 * (number % 50), received=0),
    )
