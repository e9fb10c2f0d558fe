"""The page in Chromium: no network requests, no console messages, usable by keyboard, on phones, in dark mode, without scripts.

These tests are skipped if Chromium or playwright is not installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from fqvit.report.frame import About
from fqvit.report.page import render
from tests.report.conftest import DetectorPage, Made
from tests.report.test_embeddings import made as made_embeddings

api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("needs chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with api.sync_playwright() as started:
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        found = started.chromium.launch(executable_path=CHROMIUM, args=options)
        yield found
        found.close()


@dataclass
class Seen:
    messages: list[str] = field(default_factory=list)  # console messages and page errors
    requests: list[str] = field(default_factory=list)


def opened(browser, made: Made, width: int = 1100, **options):  # type: ignore[no-untyped-def]
    context = browser.new_context(viewport={"width": width, "height": 800}, reduced_motion="reduce", **options)
    page, seen = context.new_page(), Seen()
    page.on("console", lambda message: seen.messages.append(message.text))
    page.on("pageerror", lambda error: seen.messages.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(made.path.as_uri())
    return page, seen


def column(page, number: int) -> list[str]:  # type: ignore[no-untyped-def]
    rows = "[...document.querySelectorAll('#site-table tbody tr')].filter(r => !r.hidden)"
    return page.evaluate(f"{rows}.map(r => r.cells[{number}].textContent.trim())")  # type: ignore[no-any-return]


def test_the_page_loads_without_requests_or_console_messages(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, seen = opened(browser, made)
    page.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert seen.messages == []
    assert [url for url in seen.requests if not url.startswith("data:")] == [made.path.as_uri()]
    assert page.evaluate("window.broken") is None  # the hostile class names of conftest.py try to set it
    page.context.close()


def test_tables_can_be_sorted_by_pointer_and_keyboard(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made)
    page.click("#site-table th >> text=Integer dB")
    values = [float(text.replace("−", "-")) for text in column(page, 7) if text != "–"]
    assert values == sorted(values) and len(set(values)) > 3
    head = page.locator("#site-table thead th").nth(7)
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    values = [float(text.replace("−", "-")) for text in column(page, 7) if text != "–"]
    assert values == sorted(values, reverse=True)
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    assert page.locator("#site-table thead th[aria-sort]").count() == 1
    assert page.locator("#site-table thead th").nth(6).get_attribute("aria-sort") == "ascending"
    page.click("#site-table th >> text=Site")
    names = column(page, 1)
    assert names.index("blocks.0.norm1") < names.index("blocks.3.norm1") and names != sorted(names, reverse=True)
    page.context.close()


def test_the_filter_keeps_matching_rows_and_counts_them(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made)
    every = len(column(page, 1))
    page.fill("#filter", "blocks.1 NORM")
    kept = column(page, 1)
    assert kept == ["blocks.1.norm1", "blocks.1.norm2"]
    assert page.text_content("#count") == f"2 of {every} sites"
    page.fill("#filter", "")
    assert len(column(page, 1)) == every
    page.context.close()


def test_each_navigation_link_shows_its_section_and_is_marked(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made)
    for link in page.locator(".nav a").all():
        link.click()
        target = link.get_attribute("href")
        top = page.evaluate("id => document.querySelector(id).getBoundingClientRect().top", target)
        assert -1 <= top < 800
        page.wait_for_function(
            "href => document.querySelector('.nav a[aria-current]')?.getAttribute('href') === href", arg=target
        )
    page.context.close()


def test_the_first_tab_stop_skips_to_the_report(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") == 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.context.close()


def test_the_focus_is_visible(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made)
    for _ in range(14):
        page.keyboard.press("Tab")
        style = page.evaluate("(s => [s.outlineStyle, parseFloat(s.outlineWidth)])(getComputedStyle(document.activeElement))")
        assert style[0] == "solid" and style[1] >= 2
    page.context.close()


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_screens_scroll_only_vertically(browser, made: Made, width: int) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made, width=width)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.context.close()


def test_every_image_and_chart_has_an_accessible_name(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made)
    nameless = page.evaluate(
        """[...document.querySelectorAll('img, svg')].filter(e => e.getAttribute('aria-hidden') !== 'true'
           && !(e.getAttribute('alt') || e.getAttribute('aria-label'))).length"""
    )
    assert nameless == 0
    assert page.locator("main svg[role=img]").count() >= 7
    page.context.close()


CONTRAST = """
() => {
  const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = text => rgb(text).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const ratio = colour => { const [a, b] = [light(colour), ground].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
  const found = {};
  const words = ['body', 'figcaption', '.cards span', '.cards dt', '.nav a', 'thead th button', '.path', '.side li', '.warning',
                 'summary', '#theme', 'input', '.facts th'];
  const least = (name, colour) => { found[name] = Math.min(found[name] ?? 99, ratio(colour)); };
  for (const selector of words)
    for (const e of document.querySelectorAll(selector)) least(selector, getComputedStyle(e).color);
  for (const selector of ['.tick', '.word', '.strong', '.blue', '.loss'])
    for (const e of document.querySelectorAll('svg.chart ' + selector)) least('svg ' + selector, getComputedStyle(e).fill);
  return found;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_themes(browser, made: Made, scheme: str) -> None:  # type: ignore[no-untyped-def]
    page, seen = opened(browser, made, color_scheme=scheme)
    found = page.evaluate(CONTRAST)
    assert len(found) >= 16 and {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, before.strip("rgb()").split(","))) < 200) == (scheme == "dark")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert min(page.evaluate(CONTRAST).values()) >= 4.5
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before  # the chosen theme is kept
    assert seen.messages == []
    page.context.close()


def test_the_page_is_readable_without_scripts(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made, java_script_enabled=False)
    assert page.locator("#theme").is_hidden() and page.locator(".tools").is_hidden()
    assert page.locator("#site-table tbody tr").count() == len(made.report.inspection.sites)
    assert page.locator("#pictures svg").first.is_visible()
    page.context.close()


def test_the_page_prints_black_on_white_without_navigation(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert page.locator(".nav").is_hidden()
    page.context.close()


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("embeddings")
    report = made_embeddings(folder, ("embedding", "tokens"))
    page = render(report, About("fqvit report", "model.fqvit", "photos", "today", []))
    (folder / "report.html").write_text(page, encoding="utf-8")
    return Made(report, page, folder / "report.html")


def test_wide_figures_show_a_hint_until_they_are_scrolled(browser, made: Made) -> None:  # type: ignore[no-untyped-def]
    page, _ = opened(browser, made, width=360)
    scrolls = "[...document.querySelectorAll('figure .scroll')]"
    hidden = f"{scrolls}.filter(part => part.scrollWidth > part.clientWidth + 1)"
    assert page.evaluate(f"{hidden}.length") > 0
    assert page.evaluate(f"{hidden}.every(part => part.hasAttribute('data-more'))")
    assert "Scroll sideways" in page.evaluate(f"getComputedStyle({hidden}[0], '::before').content")
    page.evaluate(f"{hidden}[0].scrollLeft = 10000")
    page.wait_for_function(f"!{hidden}[0].hasAttribute('data-more')")
    page.set_viewport_size({"width": 1100, "height": 800})
    page.wait_for_function(f"!{scrolls}.some(part => part.hasAttribute('data-more') && part.scrollWidth <= part.clientWidth)")
    page.context.close()


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_embeddings_fits_and_is_legible(browser, embeddings: Made, width: int, scheme: str) -> None:  # type: ignore[no-untyped-def]
    page, seen = opened(browser, embeddings, width=width, color_scheme=scheme)
    page.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert seen.messages == [] and page.evaluate("window.broken") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert min(page.evaluate(CONTRAST.replace("'.path'", "'.path', '.worst li', '#output-table td'")).values()) >= 4.5
    assert page.locator("#embeddings svg[role=img]").count() == 3 and page.locator(".worst > li").count() == 12
    page.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1100, "dark")])
def test_the_page_of_a_detector_fits_and_is_legible(browser, detector: DetectorPage, width: int, scheme: str) -> None:  # type: ignore[no-untyped-def]
    page, seen = opened(browser, detector, width=width, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    page.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert seen.messages == [] and page.evaluate("window.broken") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert min(page.evaluate(CONTRAST.replace("'.path'", "'.path', '#detection-table td'")).values()) >= 4.5
    sides = [box["x"] for box in (page.locator(".pair img").nth(i).bounding_box() for i in (0, 1))]
    assert (sides[0] == sides[1]) == (width == 360), "float above integer on a phone, side by side on a screen"
    page.context.close()
