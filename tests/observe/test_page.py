"""The live page in a real browser, with made-up figures: calm, in trouble, empty, and when the process answers no more."""

import os
import time
import urllib.request
from pathlib import Path

import pytest

import browser
from browser import Browser
from stub import Stub

pytestmark = pytest.mark.skipif(not browser.is_installed(), reason="chromium and chromedriver are not installed")

WIDE, NARROW = (1280, 900), (360, 800)
SECTIONS = [
    "Tiers, from fast",
    "Hit rate over time",
    "What if a tier",
    "Why blocks were not",
    "Flows",
    "Recent faults",
    "Settings",
]


@pytest.fixture(scope="module")
def chromium():
    with Browser() as started:
        yield started


@pytest.fixture
def stub():
    with Stub() as started:
        yield started


@pytest.fixture
def page(chromium, stub):
    chromium.resize(*WIDE)
    chromium.prefer("light")
    chromium.open(stub.url)
    assert chromium.wait(
        "return document.querySelectorAll('#rate path').length > 0 && document.querySelector('#rate-empty').hidden"
    )
    yield chromium
    # What it cannot reach is the test's own doing, and the page says it in words.
    assert [line for line in chromium.errors() if "net::ERR_" not in line] == []
    # It would go on asking a server that is gone.
    chromium.open("about:blank")


def become(stub: Stub, kind: str) -> None:
    urllib.request.urlopen(f"{stub.url}becomes/{kind}").read()


def text(page: Browser, selector: str) -> str:
    return page.run("return document.querySelector(arguments[0]).innerText", selector)


def shoot(page: Browser, name: str) -> None:
    """Keeps a picture where `KVBM_SHOTS` says, for people to look at."""
    if kept := os.environ.get("KVBM_SHOTS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        page.screenshot(Path(kept) / f"{name}.png")


def is_within(page: Browser) -> bool:
    """Whether nothing is wider than the window."""
    return page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_a_first_look_claims_no_period(chromium, stub):
    chromium.resize(*WIDE)
    chromium.open(stub.url)
    assert chromium.wait("return document.querySelector('#now-rate-words').textContent.includes('since the start')")
    assert "last 0 seconds" not in text(chromium, "#now-rate-words")
    chromium.open("about:blank")


def test_it_shows_every_section_from_what_the_server_tells(page):
    for title in SECTIONS:
        assert page.run(
            "return [...document.querySelectorAll('h2')].some(h => h.textContent.includes(arguments[0]))", title
        ), title
    assert page.wait("return /%/.test(document.querySelector('#now-rate').textContent)")
    assert page.wait("return /iB.s/.test(document.querySelector('#moving').textContent)")
    bars = page.run("return [...document.querySelectorAll('.bar')].map(b => b.getAttribute('aria-valuetext'))")
    assert bars[:2] == ["23.4 GiB of 23.4 GiB", "62.5 GiB of 62.5 GiB"] and bars[3].endswith("no limit")
    assert page.run("return document.querySelectorAll('#flows g').length") == 6
    assert page.run("return document.querySelectorAll('#routes tbody tr').length") == 6
    assert page.wait("return document.querySelectorAll('#curves figure').length") == 3
    order = page.run("return [...document.querySelectorAll('#curves b')].map(b => b.textContent)")
    assert order == [tier for tier in ("Device", "Host", "Disk", "Object store") if tier in order]
    assert "so far" in text(page, "#rate-span") and "a second are asked for" in text(page, "#now-rate-words")
    assert "made room for others" in text(page, "#misses")
    assert text(page, "#health") == "working"
    shoot(page, "wide")


def test_peers_are_shown_where_there_are_some(page, stub):
    rows = page.run("return [...document.querySelectorAll('#peers tbody tr')].map(row => row.innerText)")
    assert len(rows) == 3 and "prefill-1 at 10.0.0.1:6890" in rows[0]
    assert "2 by shared memory, 1 by tcp" in rows[0] and "384" in rows[0]
    assert "only reads here" in rows[2] and "96" in rows[2]
    assert "knows of 12 peers; 10 more are not shown" in text(page, "#peers-words")
    become(stub, "trouble")
    assert page.wait("return document.querySelector('#peers').innerText.includes('ago: it did not answer in time')")
    become(stub, "empty")
    assert page.wait("return document.querySelector('#peers-section').hidden")


def test_why_blocks_were_not_found_is_of_late(page):
    assert page.wait("return counted.misses.size > 0")
    shown = page.run("""
        const reason = "capacity", before = new Map(counted.misses);
        counted.missed = [{ at: Date.now() - 120_000, misses: before }];
        counted.misses.set(reason, (before.get(reason) ?? 0) + 7);
        showMisses();
        return [document.querySelector("#misses-words").textContent, document.querySelector("#misses").textContent]
    """)
    assert "in the last 2 min" in shown[0] and shown[1] == "there was no room for it100 %"


def test_trouble_is_named_where_it_is(page, stub):
    become(stub, "trouble")
    assert page.wait("return document.querySelector('#health').textContent === 'degraded'")
    assert "disk: writes rest" in text(page, "#trouble")
    assert "a copy took too long (3 times)" in text(page, "#faults") and "host → disk" in text(page, "#faults")
    assert page.wait("return document.querySelector('#faults-now').textContent") == "21"
    assert "900 lost for now" in text(page, "#tiers")
    assert "resting" in text(page, "#routes")
    page.prefer("dark")
    time.sleep(1)
    shoot(page, "trouble-dark")


def test_lines_of_the_flows_and_their_words_are_apart(page, stub):
    become(stub, "trouble")
    assert page.wait(
        "return [...document.querySelectorAll('#flows text')].some(t => t.textContent.includes('resting'))"
    )
    boxes = page.run(
        "return [...document.querySelectorAll('#flows text')].map(t => { const b = t.getBBox(); return [b.x, b.y, b.width, b.height]; })"
    )
    for number, (x, y, width, height) in enumerate(boxes):
        for left, top, wide, high in boxes[number + 1 :]:
            assert x + width <= left or left + wide <= x or y + height <= top + 3 or top + high <= y + 3, boxes


def test_a_process_that_nobody_asks_is_shown_as_that(page, stub):
    become(stub, "empty")
    assert page.wait("return document.querySelector('#now-rate-words').textContent.includes('nothing has been asked')")
    assert (
        "NaN" not in text(page, "body")
        and "undefined" not in text(page, "body")
        and "Infinity" not in text(page, "body")
    )
    assert page.wait("return !document.querySelector('#rate-empty').hidden")
    shoot(page, "empty")


def test_silence_is_said_and_ends(page, stub):
    port = stub.server_address[1]
    stub.__exit__()
    assert page.wait("return document.querySelector('#health').textContent === 'no answer'")
    assert text(page, "#trouble").startswith("No answer for")
    assert "–" not in text(page, "#now-rate"), "what was known stays"
    with Stub(port):
        assert page.wait("return document.querySelector('#health').textContent === 'working'")
        assert page.wait("return document.querySelector('#trouble').hidden")


def test_a_token_is_asked_for_where_the_server_wants_one(chromium, stub):
    stub.token = "0123456789abcdef"
    chromium.open(stub.url)
    assert chromium.wait("return !document.querySelector('#token-form').hidden")
    assert "who have its token" in text(chromium, "#trouble")
    show = (
        "document.querySelector('#token').value = arguments[0]; document.querySelector('#token-form').requestSubmit()"
    )
    chromium.run(show, "wrong")
    assert chromium.wait("return document.querySelector('#trouble').textContent.includes('does not know')")
    chromium.run(show, stub.token)
    assert chromium.wait("return document.querySelector('#health').textContent === 'working'")
    assert chromium.wait(
        "return document.querySelector('#token-form').hidden && /%/.test(document.querySelector('#now-rate').textContent)"
    )
    chromium.open("about:blank")
    chromium.errors()


def test_it_is_used_without_a_mouse(page):
    page.run("document.activeElement.blur()")
    page.press("tab")
    assert page.run("return document.activeElement.className") == "skip"
    page.run("document.querySelector('#rate').focus()")
    # Two samples are needed to step between.
    assert page.wait("return document.querySelector('#rate').chart.points.length > 4")
    page.press("left", "left", "left")
    assert page.wait("return /^\\d+ s ago: \\d+ % found/.test(document.querySelector('#rate-now').textContent)")
    reached = set()
    for _ in range(25):
        page.press("tab")
        reached.add(
            page.run(
                "return document.activeElement.id || document.activeElement.name || document.activeElement.tagName"
            )
        )
    assert {"why-kind", "why-what", "SUMMARY"} <= reached
    page.run("document.activeElement.blur()")
    page.press("p")
    assert page.wait("return document.querySelector('#pause').getAttribute('aria-pressed') === 'true'")
    page.press("p")


def test_themes_are_chosen_and_kept(page, stub):
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.prefer("dark")
    dark = page.run(colour)
    assert light != dark
    page.press("t")
    assert page.run(colour) == light and "light" in text(page, "#theme")
    page.open(stub.url)
    assert page.run(colour) == light, "the choice outlives the page"
    page.run("localStorage.clear()")


@pytest.mark.parametrize("kind", ["calm", "trouble"])
def test_it_fits_a_telephone(page, stub, kind):
    page.resize(*NARROW)
    become(stub, kind)
    time.sleep(2)
    assert is_within(page)
    shoot(page, f"narrow-{kind}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_they_stand_on(page, stub, scheme):
    """WCAG's contrast of 4.5 for all text."""
    page.prefer(scheme)
    become(stub, "trouble")
    assert page.wait("return document.querySelector('#health').textContent === 'degraded'")
    assert page.run(CONTRAST) == []


def test_why_is_answered_in_words(page):
    page.run("const i = document.querySelector('#why-what'); i.value = '42'; i.form.requestSubmit()")
    assert page.wait("return document.querySelector('#why-answer').textContent.includes('Found')")
    assert "12 blocks in device, 40 blocks in disk" in text(page, "#why-answer")
    assert "made room for others (last in host, gone for 42 s, eviction = hazard)" in text(page, "#why-answer")
    taken = "5 of 8 leased blocks came from the peer prefill-1 by tcp: it was cancelled."
    assert taken in text(page, "#why-answer")


def test_settings_are_filtered(page):
    page.run(
        "document.querySelector('details').open = true; const f = document.querySelector('#settings-filter'); f.value = 'object.'; f.dispatchEvent(new Event('input'))"
    )
    shown = page.run(
        "return [...document.querySelectorAll('#settings tbody tr')].filter(r => !r.hidden).map(r => r.textContent)"
    )
    assert "object.secret_key(set)" in shown and len(shown) == 4


# Texts whose contrast with the nearest background that is not transparent is less than 4.5.
CONTRAST = """
const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => { const [r, g, b] = parse(colour).map((c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const found = [];
for (const element of document.querySelectorAll('body *')) {
  if (element.closest('svg') || !element.checkVisibility() || ![...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
  let behind = element;
  while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(behind ?? document.body).backgroundColor)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) found.push(`${element.tagName} ${element.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
}
return found;
"""
