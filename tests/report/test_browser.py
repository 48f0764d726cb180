"""The report in a real headless Chromium: it draws, sorts, filters, prints, and asks for nothing."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.recorded import SHAPES, fill
from tunegemm.measure.replay import open_replay
from tunegemm.report.contents import from_database, from_recording
from tunegemm.report.html import report
from tunegemm.store import Database

pytestmark = pytest.mark.slow

SHOWN = "[...document.querySelectorAll('#records tbody tr')].filter(row => !row.hidden)"

#: What the tip says, or nothing where it is hidden.
TIP = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"

CHOOSE_ALL = """(chooser => {
    chooser.value = ''; chooser.dispatchEvent(new Event('change'));
})(document.getElementById('choose-shape'))"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "report.html").write_text(report(from_recording(open_replay("h200"))))
    with Database.open(fill(folder / "tuning.sqlite", SHAPES[:1]), read_only=True) as database:
        (folder / "stored.html").write_text(report(from_database(database)))
    return folder


@pytest.fixture
def page(browser: Browser, pages: Path) -> Browser:
    browser.see()
    browser.open(pages / "report.html")
    return browser


@pytest.mark.parametrize("name", ["report", "stored"])
def test_it_loads_alone_and_without_an_error(browser: Browser, pages: Path, name: str) -> None:
    path = pages / f"{name}.html"
    browser.see()
    browser.open(path)
    assert [url for url in browser.requests if not url.startswith("data:")] == [path.as_uri()]
    assert browser.errors == []
    # The policy is in force: the page's own script could not reach out either.
    assert (
        browser.evaluate("fetch('https://example.org').then(() => 'reached', () => 'refused')") == "refused"
    )


def test_sorting(page: Browser) -> None:
    first = f"{SHOWN}[0].cells[0].dataset.v"
    assert page.evaluate(first) == "8448x9216x256 bf16 tn"
    click = "document.querySelectorAll('#records thead button')[{}].click()"
    page.evaluate(click.format(2))  # time: the slowest first, then the fastest
    assert page.evaluate(first) == "8192x8192x8192 bf16 tn"
    assert page.evaluate("document.querySelector('[aria-sort]').cellIndex") == 3
    page.evaluate(click.format(2))
    assert page.evaluate("document.querySelector('[aria-sort]').ariaSort") == "ascending"
    times = page.evaluate(f"{SHOWN}.map(row => +row.cells[3].dataset.v)")
    assert times == sorted(times) and times[0] < 100
    page.evaluate(click.format(0))  # numbers within names sort as numbers
    shapes = page.evaluate(f"{SHOWN}.map(row => row.cells[0].dataset.v.split('x').map(parseFloat))")
    assert shapes == sorted(shapes)


def test_filtering(page: Browser) -> None:
    type_words = (
        "(words => {{ const field = document.querySelector('[name=words]'); field.value = words;"
        "field.dispatchEvent(new Event('input', {{bubbles: true}})); }})('{}')"
    )
    page.evaluate(type_words.format("4096 pp128"))
    kept = page.evaluate(f"{SHOWN}.map(row => row.dataset.text)")
    assert 0 < len(kept) < 6
    assert all("4096" in text and "pp128" in text for text in kept)
    assert page.evaluate("document.querySelector('output').value") == f"{len(kept)} of 6 shown"
    marks = "[...document.querySelectorAll('#roofline .mark')]"
    assert page.evaluate(f"{marks}.filter(mark => mark.style.display !== 'none').length") == len(kept)
    page.evaluate(type_words.format("no such kernel"))
    assert page.evaluate(f"{SHOWN}.length") == 0
    page.evaluate("document.querySelector('[type=reset]').click()")
    page.until(f"{SHOWN}.length === 6")
    page.evaluate(
        "(select => { select.value = 'faster'; select.dispatchEvent(new Event('input', {bubbles: true})); })"
        "(document.querySelector('[name=verdict]'))"
    )
    assert set(page.evaluate(f"{SHOWN}.map(row => row.dataset.verdict)")) == {"faster"}


def test_one_shape_at_a_time(page: Browser) -> None:
    visible = "[...document.querySelectorAll('.shape')].filter(shape => !shape.hidden).map(shape => shape.id)"
    assert page.evaluate(visible) == ["shape-8448x9216x256-bf16-tn"]
    page.evaluate("location.hash = 'shape-4096x4096x4096-bf16-tn'")
    page.until(f"{visible}.join() === 'shape-4096x4096x4096-bf16-tn'")
    page.evaluate(CHOOSE_ALL)
    assert len(page.evaluate(visible)) == 6


def test_marks_explain_themselves_to_keyboard_and_mouse(page: Browser) -> None:
    page.evaluate("document.querySelector('#roofline .mark').focus()")
    first = page.until(TIP)
    assert first.startswith("8448x9216x256 bf16 tn") and "torch.mm" in first
    page.press("ArrowRight")
    page.until(f"({TIP}).startsWith('128x7168x16384 bf16 tn')")
    page.press("Escape")
    page.until(f"({TIP}) === ''")
    # One stop of the Tab key per figure.
    assert page.evaluate("document.querySelectorAll('#roofline .mark[tabindex=\"0\"]').length") == 1
    spot = (
        "(cell => { cell.scrollIntoView({behavior: 'instant', block: 'center'});"
        "const at = cell.getBoundingClientRect(); return [at.x + 5, at.y + 5]; })"
        "(document.querySelector('.heat td.top'))"
    )
    assert "\u00d7 torch.mm" in page.point(spot, TIP)


def test_labels_of_kernels_are_on_one_line_and_a_tip_has_several(page: Browser) -> None:
    page.evaluate("document.querySelector('.shape:not([hidden]) details').open = true")
    heights = page.evaluate("[...document.querySelectorAll('td .mono')].map(e => e.getClientRects().length)")
    assert set(heights) - {0} == {1}
    tips = page.evaluate("[...document.querySelectorAll('.heat [data-tip]')].map(e => e.dataset.tip)")
    assert tips and all("\n" in tip and "\\n" not in tip for tip in tips)


def test_everything_has_a_name_for_those_who_do_not_see_it(page: Browser) -> None:
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, select, a, [role=region], [role=img], [role=group]')]"
        ".filter(e => !(e.ariaLabel || e.innerText || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.evaluate(
        "new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size"
    ) == page.evaluate("document.querySelectorAll('[id]').length")
    # The verdict is told by words and by the mark's shape, never by colour alone.
    said = page.evaluate(f"{SHOWN}.map(row => row.cells[1].textContent)")
    assert all("faster than" in text or "equal within" in text or "slower than" in text for text in said)


def test_what_is_wider_than_a_phone_says_that_it_scrolls(page: Browser) -> None:
    page.see(width=375)
    cut = (
        "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 4)"
        ".map(box => [box.ariaLabel, getComputedStyle(box.nextElementSibling).display])"
    )
    page.until(f"{cut}.some(([name]) => name === 'Roofline')")
    page.until(f"{cut}.every(([, display]) => display === 'block')")
    page.see(width=1280)


@pytest.mark.parametrize("width", [360, 768, 1200, 1800])
def test_no_width_scrolls_the_page_sideways(page: Browser, width: int) -> None:
    page.see(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("getComputedStyle(document.querySelector('#records .wide')).display") == (
        "none" if width <= 720 else "table-cell"
    )


@pytest.mark.parametrize("name", ["report", "stored"])
def test_light_and_dark_look_as_they_should(browser: Browser, pages: Path, name: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    seen = {}
    for scheme in ("light", "dark"):
        browser.see(scheme=scheme)
        browser.open(pages / f"{name}.html")
        picture = image.open(io.BytesIO(browser.screenshot())).convert("L")
        picture.save(tmp_path / f"{scheme}.png")
        counts = picture.histogram()
        seen[scheme] = (max(range(256), key=counts.__getitem__), sum(c > 20 for c in counts))
    assert seen["light"][0] > 240 and seen["dark"][0] < 40
    assert min(shades for _, shades in seen.values()) > 60  # text and figures, not an empty ground


def test_it_prints_with_every_shape_and_on_white(browser: Browser, pages: Path) -> None:
    browser.see(scheme="dark")
    browser.open(pages / "report.html")
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        browser.until("matchMedia('print').matches")
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.evaluate(
            "[...document.querySelectorAll('.shape')].every(s => getComputedStyle(s).display === 'block')"
        )
        assert browser.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF-")
    assert 8 <= pdf.count(b"/Type /Page\n") <= 24
