"""The page as people use it: in a real browser, on a real campus, from the page alone."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live.campus import LiveCampus
from tests.live.test_gang_live import submit as submit_gang
from tests.live.waiting import until

from reclaimnet.apps.chain_told import ChainTold, LinkTold
from reclaimnet.model.asking import LendRequest, ReclaimRequest
from reclaimnet.model.units import MINUTE, SECOND

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.needs("playwright")]

WAIT_MS = 90_000
PATIENCE_S = 180.0
VIEWS = ("", "reclaims", "jobs", "owner", "operator")
SHOTS = os.environ.get("RN_SCREENSHOTS")
"""A folder to keep pictures in; they are always taken, since taking them is part of the test."""


class Place:
    """A campus, a browser, and what was complained about in it."""

    def __init__(self, campus: LiveCampus, browser: Any, shots: Path) -> None:
        self.campus = campus
        self.browser = browser
        self.shots = shots
        self.link = campus.rn("page").stdout.strip()
        self.url = self.link.partition("#")[0]

    @contextlib.contextmanager
    def page(self, link: str | None = None, **options: Any) -> Iterator[Any]:
        complaints: list[str] = []
        context = self.browser.new_context(viewport={"width": 1200, "height": 800}, **options)
        context.set_default_timeout(WAIT_MS)
        try:
            page = context.new_page()
            page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda asked: _stay_here(asked.url, self.url, complaints))
            page.goto(link or self.link)
            if link is None:
                page.wait_for_selector("h1")
            yield page
        finally:
            context.close()
        assert complaints == []

    def visit(self, page: Any, view: str) -> None:
        page.evaluate("view => { location.hash = '#/' + view }", view)
        page.locator(f"nav [aria-current=page][href='#/{view}']").wait_for()

    def shoot(self, page: Any, name: str) -> None:
        page.screenshot(path=self.shots / f"{name}.png")


def _stay_here(asked: str, home: str, complaints: list[str]) -> None:
    if not asked.startswith((home, "data:", "blob:")):
        complaints.append(f"it asked another server: {asked}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    from playwright.sync_api import sync_playwright

    home = tmp_path_factory.mktemp("page")
    shots = Path(SHOTS) if SHOTS else home / "shots"
    shots.mkdir(exist_ok=True, parents=True)
    campus = LiveCampus(home)
    try:
        campus.start("lab", "office", gpus=2)
        campus.rn(
            "run", "-d", "--name", "vision", "--env", f"LEDGER={home / 'ledger'}", "--", *TRAIN
        )
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            try:
                yield Place(campus, browser, shots)
            finally:
                browser.close()
    finally:
        campus.close()


TRAIN = ("python", "train.py", "1000000", "0.02", "20", "8")


def test_an_owner_takes_a_gpu_back_by_clicking_and_the_job_goes_on(place: Place) -> None:
    campus = place.campus
    record = campus.gateway.find("vision")
    campus.await_saved(record.id, holders=2)
    source = campus.job(record.id).holder
    opened = time.monotonic()
    with place.page() as page:
        page.wait_for_selector(".node")
        print(f"\nfirst view after {time.monotonic() - opened:.2f} s")
        assert "token" not in page.url
        page.get_by_role("link", name="vision").wait_for()
        place.shoot(page, "campus")
        page.get_by_role("link", name="My machines").click()
        machine = page.get_by_role("article", name=source)
        row = machine.locator(".own-gpus li", has=page.get_by_role("link", name="vision"))
        row.get_by_role("button").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_text("vision will move away").wait_for()
        dialog.get_by_label("30 seconds").check()
        dialog.get_by_label("Reason").fill("a deadline of my own")
        dialog.get_by_role("button", name="Take it back").click()
        race = page.get_by_role("article", name=f"{source} takes 1 GPU back")
        race.wait_for()
        race.get_by_text("done", exact=True).wait_for()
        race.get_by_text("no step lost").wait_for()
        place.shoot(page, "reclaims")
        spoken = page.locator("#announcer").text_content()
        assert spoken
        moved = campus.await_running(record.id, epoch=2)
        assert (moved.moves, moved.steps_lost) == (1, 0)
        assert moved.holder != source
        until(lambda: len(campus[source].card().gpus) == 1, "its owner has the GPU")
        # What is over stays: who opens the page later sees it too.
        page.reload()
        race.get_by_text("done", exact=True).wait_for()
        race.get_by_text("no step lost").wait_for()
        # The story of it, the plots across the move, and one log.
        race.get_by_role("link", name="vision").click()
        page.locator(".story").get_by_text("a deadline of my own").first.wait_for()
        page.locator(".log pre", has_text="attempt 2").wait_for()
        page.locator(".timeline .attempt").nth(1).wait_for()
        for plot in ("progress", "memory", "network"):
            page.locator(f"#plot-{record.id}-{plot} .main-svg").first.wait_for()
        both = {source, str(moved.holder)}
        until(
            lambda: both <= set(page.evaluate(NODES_OF_LINE, f"plot-{record.id}-memory")),
            "the plot of its memory goes on where the job went on",
        )
        place.shoot(page, "job")
        # What was taken back can be lent again from the page as well: as it was, and no more.
        home = campus[source]
        assert home.ask(LendRequest(notice=3 * MINUTE, users=("ada",))).ok
        left, terms = home.card().gpus, home.card().terms
        assert len(left) == 1
        place.visit(page, "owner")
        machine.get_by_role("button", name="Take it back").click()
        dialog.get_by_label("Now").check()
        dialog.get_by_role("button", name="Take it back").click()
        page.get_by_role("article", name=f"{source} takes all GPUs back").wait_for()
        place.visit(page, "owner")
        machine.get_by_role("button", name="Lend it again").click()
        machine.locator(".own-gpus .vacant").first.wait_for()
        assert (home.card().gpus, home.card().terms) == (left, terms)
        assert home.ask(LendRequest(gpus=2, users=())).ok
        machine.locator(".own-gpus .vacant").nth(1).wait_for()


NODES_OF_LINE = "id => document.getElementById(id)?.data?.[0]?.text ?? []"


def test_the_campus_so_far_can_be_replayed(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "campus.jsonl"
    file.write_text(_journal_with_a_reclaim(place.campus))
    argv = [sys.executable, "-m", "reclaimnet.apps.cli", "replay", str(file)]
    with subprocess.Popen(argv, env=place.campus.env, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            link = server.stdout.readline().strip()
            context = place.browser.new_context()
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            page.goto(link)
            page.get_by_label("Time").fill("1000")
            page.get_by_role("link", name="Reclaims").click()
            page.get_by_text("done", exact=True).first.wait_for()
            page.get_by_role("link", name="vision").first.click()
            page.locator(".story").get_by_text("a deadline of my own").first.wait_for()
            page.get_by_role("link", name="Campus", exact=True).click()
            page.get_by_label("Time").fill("0")
            page.locator(".guest").first.wait_for(state="detached")
            page.get_by_role("button", name="Play").click()
            page.get_by_role("button", name="Pause").wait_for()
            page.locator(".node").first.wait_for()
            context.close()
        finally:
            server.terminate()


NEVER_SAVED = """async () => {
  const { Campus } = await import("/web/store.js");
  const { reclaimsView } = await import("/web/view_reclaims.js");
  const { jobsView } = await import("/web/view_jobs.js");
  const { patch } = await import("/web/dom.js");
  const campus = new Campus();
  campus.at = 1e18;
  const record = (fields) => campus.apply("record", {
    id: "j-1", spec: { name: "plain", user: "ada", gpus: 1, nodes: 1, saving: "sdk" },
    state: "RUNNING", submitted_at: 1e18, holder: "lab", seats: [], checkpoints: [], epoch: 1,
    step: 0, moves: 0, steps_lost: 0, lost: "0", reason: "", ...fields,
  });
  const node = (leaving, jobs) => campus.apply("node", { age_s: 0, state: "MIXED", card: {
    node: "lab", provider: "ada", gpus: [{ id: "G0", index: 0 }], vacant: [], leaving,
    deadline: leaving.length ? 1e18 + 60e9 : null, jobs,
  } });
  record({});
  node([], [{ job: "j-1", gpus: ["G0"] }]);
  node(["G0"], [{ job: "j-1", gpus: ["G0"] }]);
  record({ state: "PENDING", holder: null, reason: "Resources: none" });
  const shown = document.createElement("div");
  const text = () => { patch(shown, reclaimsView(campus)); return shown.textContent; };
  const waits = text();
  record({ holder: "office", epoch: 2, moves: 1, lost: "all" });
  const seen = text();
  const past = [...shown.querySelectorAll(".stages .past")].map((each) => each.textContent);
  campus.reclaims.clear();
  campus.reclaims.recall([{ node: "lab", at: 1e18, deadline: 1e18 + 60e9, gpus: ["G0"], whole: true,
    withdrawn: false, departures: [{ job: "j-1", to: "office", left: 1e18, done: 1e18,
      steps_lost: 0, saved: false, restored: false }] }]);
  const recalled = text();
  const later = [...shown.querySelectorAll(".stages .past")].map((each) => each.textContent);
  patch(shown, jobsView(campus));
  const row = [...shown.querySelectorAll("tbody td")].map((each) => each.textContent);
  return { waits, seen, past, recalled, later, row };
}"""


def test_a_job_that_was_never_saved_is_not_said_to_have_lost_nothing(place: Place) -> None:
    with place.page() as page:
        told = page.evaluate(NEVER_SAVED)
    assert "not saved, so it begins again; waits for a place" in told["waits"]
    for way in ("seen", "recalled"):
        assert "all it had done is lost, since it was never saved" in told[way]
        assert "no step lost" not in told[way]
    assert told["past"] == told["later"] == ["notice"], "it was neither saved, moved nor restored"
    assert told["row"][6] == "all"


def _journal_with_a_reclaim(campus: LiveCampus) -> str:
    """The test above has left one, if it ran."""
    reason = "a deadline of my own"
    if reason not in campus.rn("journal").stdout:
        job = campus.gateway.find("vision").id
        saved = campus.await_saved(job, holders=2)
        reclaim = ReclaimRequest(grace=20 * SECOND, reason=reason)
        assert campus[str(saved.holder)].ask(reclaim).ok
        campus.await_running(job, epoch=saved.epoch + 1)
        campus[str(saved.holder)].lend()
    return until(
        lambda: text if reason in (text := campus.rn("journal").stdout) else "",
        "the journal tells of it",
    )


def test_the_operator_sees_chains_with_gap_and_overlap(place: Place) -> None:
    hour = 3600 * SECOND
    now = time.time_ns()
    told = ChainTold(
        phase="active",
        up=True,
        user="ada",
        jobs=2,
        gap_s=90.0,
        overlap_s=1800.0,
        next_start=now + 2 * hour,
        next_low=now + hour,
        next_high=now + 3 * hour,
        links=[
            LinkTold(number=1, id="7", state="done", started=now - 3 * hour, ends=now - hour),
            LinkTold(number=2, id="8", state="running", started=now - 2 * hour, ends=now + hour),
        ],
    )
    with place.page() as page:
        place.visit(page, "operator")
        page.get_by_text("No chain runs on a batch cluster").wait_for()
        place.campus.gateway.tell_chain("serve", told)
        row = page.get_by_role("row", name="serve")
        for words in ("ada", "serving", "1m30s", "30m00s", "in 1h"):
            row.get_by_text(words).first.wait_for()
        row.get_by_role("img", name="2 jobs, gap 1m30s, overlap 30m00s so far").wait_for()
        place.shoot(page, "operator")


def test_a_job_over_several_nodes_shows_its_seats(place: Place) -> None:
    campus = place.campus
    for agent in campus.agents.values():
        agent.lend()
    job = submit_gang(campus, nodes=2, steps=1_000_000)
    try:
        seats = campus.await_running(job).seats
        with place.page() as page:
            page.get_by_role("link", name="gang").nth(1).wait_for()
            page.get_by_role("link", name="gang").first.click()
            table = page.get_by_role("region", name="Seats")
            for rank, node in enumerate(seats):
                row = table.get_by_role("row").nth(1 + rank)
                row.get_by_role("rowheader", name=str(node)).wait_for()
            assert len(seats) == 2
    finally:
        campus.gateway.cancel(job)


def test_a_link_tells_whose_traffic_it_carries(place: Place) -> None:
    """Rates as a node would measure them: on one machine there is no network between nodes."""
    with place.page() as page:
        page.wait_for_selector(".node")
        page.evaluate(BUSY_LINK)
        name = (
            "far up of 1 Gbit/s: moving state 400 Mbit/s (40 %), training 200 Mbit/s (20 %), "
            "everybody else 300 Mbit/s (30 %)"
        )
        page.get_by_role("img", name=name).wait_for()


BUSY_LINK = """async () => {
    const { campus } = await import('/web/main.js');
    const link = { link: 'far up', rate: 125e6, carries: null, assumed: false, sending: 1,
        reached: 50e6, shed: 0, round: 1e9, use: 0.2, voices: [], met_before: 0, meets_now: 0 };
    campus.apply('node', { age_s: 0.1, state: 'IDLE', card: { node: 'far', zone: 'elsewhere',
        provider: 'ada', beat: 1, gpus: [], vacant: [], leaving: [], deadline: null, jobs: [],
        terms: { notice: 6e10, users: [], hours: [], maintenance: [] }, memory: null, roles: [],
        links: [link], sending: [], traffic: { sent: 112.5e6, received: 0 } } });
    campus.changed();
}"""


def test_the_page_fits_a_phone_and_the_dark(place: Place) -> None:
    with place.page(color_scheme="dark") as page:
        page.set_viewport_size({"width": 390, "height": 780})
        job = page.evaluate(
            "async () => [...(await import('/web/main.js')).campus.records.keys()][0]"
        )
        for view in VIEWS:
            place.visit(page, view)
            assert _too_wide(page) == [], view
            place.shoot(page, f"phone-{view or 'campus'}")
        page.evaluate("job => { location.hash = '#/job/' + job }", job)
        page.wait_for_selector(".story li")
        assert _too_wide(page) == []
        place.shoot(page, "phone-job")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, background[4:-1].split(","))) < 40


def _too_wide(page: Any) -> list[str]:
    return page.evaluate("""() => document.documentElement.scrollWidth <= innerWidth ? [] :
        [...document.querySelectorAll('main *')]
            .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll'))
            .map(e => e.tagName + '.' + e.className)""")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_and_has_a_name(place: Place, scheme: str) -> None:
    with place.page(color_scheme=scheme) as page:
        page.wait_for_selector(".node")
        for view in VIEWS:
            place.visit(page, view)
            for landmark in ("banner", "navigation", "main"):
                assert page.get_by_role(landmark).count() == 1
            assert page.locator("h1").count() == 1
            assert page.evaluate(NAMELESS) == [], view
            assert page.evaluate(FAINT) == [], view
            assert page.evaluate(SKIPPED_HEADINGS) == [], view


NAMELESS = """() => [...document.querySelectorAll('button, a, input, select, [role=img]')]
    .filter(e => e.checkVisibility() && !(e.ariaLabel || e.textContent.trim() || e.labels?.length
        || (e.title && e.tagName !== 'INPUT')))
    .map(e => e.outerHTML.slice(0, 120))"""

SKIPPED_HEADINGS = """() => { let last = 0; return [...document.querySelectorAll('h1,h2,h3,h4')]
    .filter(e => e.checkVisibility())
    .filter(e => { const level = +e.tagName[1], bad = level > last + 1 && level !== 3; last = level;
        return bad }).map(e => e.outerHTML) }"""

FAINT = """() => {
    const parse = text => { const n = text.match(/[\\d.]+/g).map(Number);
        return text.startsWith('color(srgb') ? [n[0]*255, n[1]*255, n[2]*255, n[3] ?? 1]
            : [n[0], n[1], n[2], n[3] ?? 1] };
    const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
    const behind = e => { const layers = [];
        for (; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
        return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 1]) };
    const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92
        : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    return [...document.querySelectorAll('body *')].filter(e => e.checkVisibility()
        && !e.closest('.unseen, .skip, svg, button:disabled')
        && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
        .map(e => { const under = behind(e), ink = over(parse(getComputedStyle(e).color), under);
            const [a, b] = [light(ink), light(under)].sort((x, y) => y - x);
            return [(a + 0.05) / (b + 0.05), e] })
        .filter(([ratio]) => ratio < 4.5)
        .map(([ratio, e]) => `${ratio.toFixed(2)} ${e.className} ${e.textContent}`) }"""


def test_the_keyboard_is_enough(place: Place) -> None:
    with place.page() as page:
        page.wait_for_selector(".node")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        for _ in range(2 + VIEWS.index("owner")):
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "My machines"
        page.keyboard.press("Enter")
        page.wait_for_selector(".machine")
        # After the click of a link the keyboard goes on where the eyes are.
        page.locator("#main:focus").wait_for()
        page.get_by_role("button", name="Take it back").first.focus()
        page.keyboard.press("Enter")
        page.get_by_role("dialog").wait_for()
        inside = "document.querySelector('dialog').contains(document.activeElement)"
        assert page.evaluate(inside)
        page.keyboard.press("Escape")
        page.locator("dialog[open]").wait_for(state="detached")


def test_who_may_only_look_can_press_nothing(place: Place) -> None:
    with place.page(place.campus.rn("page", "--look").stdout.strip()) as page:
        page.wait_for_selector(".node")
        page.get_by_text("Read-only").wait_for()
        place.visit(page, "owner")
        buttons = page.locator(".machine button")
        assert buttons.count() > 0
        assert all(buttons.nth(i).is_disabled() for i in range(buttons.count()))


def test_without_the_token_nothing_is_shown(place: Place) -> None:
    context = place.browser.new_context()
    context.set_default_timeout(WAIT_MS)
    try:
        page = context.new_page()
        page.goto(place.url)
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Open").click()
        page.get_by_text("not the campus's").wait_for()
        assert page.locator(".node").count() == 0
        page.get_by_label("Token").fill(place.link.partition("token=")[2])
        page.keyboard.press("Enter")
        page.wait_for_selector(".node")
    finally:
        context.close()


def test_five_hundred_nodes_keep_the_browser_calm(place: Place) -> None:
    """Beats as they would come from 500 nodes, each every two seconds; how busy it is is told."""
    with place.page() as page:
        page.wait_for_selector(".node")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def busy() -> float:
            metrics = session.send("Performance.getMetrics")["metrics"]
            return next(each["value"] for each in metrics if each["name"] == "TaskDuration")

        page.evaluate(MANY)
        until(lambda: page.locator(".node").count() >= 500, "all nodes are shown", PATIENCE_S)
        page.evaluate("document.querySelector('.node.mixed, .node.idle').marked = true")
        before, begun = busy(), time.monotonic()
        rounds = page.evaluate("window.rounds")
        until(
            lambda: page.evaluate("window.rounds") >= rounds + 40, "beats are taken in", PATIENCE_S
        )
        share = (busy() - before) / (time.monotonic() - begun)
        print(f"\n500 nodes: the main thread is busy for {share:.0%} of the time")
        place.shoot(page, "campus-500")
        # Elements are kept, not made anew: else focus and selection would be lost with each beat.
        assert page.evaluate("[...document.querySelectorAll('.node')].some(e => e.marked)")


MANY = """async () => {
    const { campus } = await import('/web/main.js');
    const card = (i, round) => JSON.stringify({ age_s: 0.1, state: 'MIXED', card: {
        node: `node-${i}`, zone: `building ${1 + i % 5}`, provider: 'ada', beat: round,
        gpus: [0, 1, 2, 3].map(g => ({ id: `G${i}-${g}`, index: g, model: 'x', memory_bytes: 0 })),
        vacant: [0, 1, 2, 3].filter(g => (i + g + round) % 3).map(g => `G${i}-${g}`), leaving: [],
        deadline: null, terms: { notice: 6e10, users: [], hours: [], maintenance: [] },
        jobs: [], memory: null, roles: [] } });
    window.rounds = 0;
    const beat = () => {
        for (let k = 0; k < 25; k++) {
            campus.apply('node', JSON.parse(card((window.rounds * 25 + k) % 500, window.rounds)));
            campus.changed();
        }
        window.rounds++;
    };
    for (let i = 0; i < 20; i++) beat();
    setInterval(beat, 100);
}"""
