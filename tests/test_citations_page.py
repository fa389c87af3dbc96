"""The example page and the page about the API in a browser, from another origin than the
server's.
"""

import shutil
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import pytest

from server_processes import served_by
from web_for_tests import held, served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked_module")]
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
expect = sync_api.expect
citing = sys.modules["noiser.explain._cite"]  # the function has the same name

FOLDER = Path(__file__).parents[1] / "examples" / "citations_page"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DOCUMENTS = ["The 🦊 fox sings. 𠮷 dog sleeps.", "It rains 🌧 today. The train is late."]


@pytest.fixture(scope="module")
def browser():
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no chromium could be started: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture(scope="module")
def site():
    """The address of the example's folder, on a server of its own."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with served_by(partial(Quiet, directory=str(FOLDER))) as address:
        yield address


@pytest.fixture
def visit(browser):
    """Opens pages; afterwards checks that nothing failed in them."""
    contexts, errors = [], []

    def open_page(address, **options):
        contexts.append(browser.new_context(**options))
        contexts[-1].set_default_timeout(40_000)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def cites_always(monkeypatch):
    monkeypatch.setitem(citing.MEMORY, "hidden", -1e9)


def ask(page, documents=DOCUMENTS):
    page.get_by_label("Question").fill("Who sings?")
    page.get_by_label("Documents").fill("\n\n".join(documents))
    page.get_by_role("button", name="Ask").click()


def done(page):
    expect(page.get_by_role("status")).to_contain_text("Point at a sentence", timeout=60_000)


@pytest.mark.usefixtures("cites_always")
@pytest.mark.parametrize("by", ["pointer", "keys"])
def test_an_answer_streams_with_marked_sentences_whose_quotes_are_shown(visit, site, by):
    asked = []
    with served(origins=[site], named=("gemma3",)) as web:
        page = visit(f"{site}/?server={quote(web.address.rstrip('/'))}")
        page.on("request", lambda request: asked.append(request))
        ask(page)
        done(page)
        body = next(each.post_data_json for each in asked if each.method == "POST")
        whole = web.client.post("v1/chat/completions", json=body | {"stream": False}).json()
        sentences = page.locator(".sentence")
        expected = [each["text"] for each in whole["citations"]]
        assert sentences.evaluate_all("all => all.map((one) => one.textContent)") == expected
        assert expected
        for row, citation in enumerate(whole["citations"]):
            if by == "pointer":
                sentences.nth(row).hover()
            else:
                sentences.nth(row).focus()
            for source in citation["sources"]:
                quotes = sorted(source["quotes"], key=lambda one: one["start"])
                marked = page.locator(f"#document-{source['number']} mark")
                assert marked.all_inner_texts() == [one["text"] for one in quotes]
                assert f"[{source['number']}]" in page.locator("#answer").inner_text()
        assert any(source["quotes"] for each in whole["citations"] for source in each["sources"])
        texts = page.locator(".document p").evaluate_all("all => all.map((one) => one.textContent)")
        assert texts == DOCUMENTS


def test_a_site_that_is_not_named_is_told_what_to_do(visit, site):
    with served(origins=["https://app.example"]) as web:
        page = visit(f"{site}/?server={quote(web.address.rstrip('/'))}")
        ask(page)
        expect(page.get_by_role("status")).to_contain_text(f"noiser serve --allow-origin {site}")


def test_an_error_of_the_server_is_shown_and_the_next_question_is_answered(visit, site):
    with served(origins=[site]) as web:
        page = visit(f"{site}/?server={quote(web.address.rstrip('/'))}")
        ask(page, ["river " * 3000])
        expect(page.get_by_role("status")).to_contain_text("tokens")
        ask(page)
        done(page)


def test_stop_ends_the_work(visit, site):
    with held("llama") as release, served(origins=[site]) as web:
        page = visit(f"{site}/?server={quote(web.address.rstrip('/'))}")
        ask(page)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("status")).to_have_text("Stopped.")
        release()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_and_it_fits(visit, site, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with served(origins=[site]) as web:
        screen = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
        page = visit(f"{site}/?server={quote(web.address.rstrip('/'))}", **screen)
        ask(page)
        done(page)
        page.locator(".sentence").first.focus()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = [axe.run(page)]
        page.goto(f"{web.address}docs")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found.append(axe.run(page))
    assert [each.generate_report() for each in found if each.violations_count] == []


def test_the_api_can_be_tried_on_its_page(visit, web):
    page = visit(f"{web.address}docs")
    form = page.locator("form[data-path='v1/attribute']")
    form.get_by_role("textbox").fill('{"prompt": "The fox sings", "method": "random"}')
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_have_text("Status 200")
    expect(form.locator("pre")).to_contain_text('"format": "noiser.attribution"')
    form.get_by_role("textbox").fill('{"prompt": 3}')
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_have_text("Status 422")
    models = page.locator("form[data-path='v1/models']")
    models.get_by_role("button", name="Send").click()
    expect(models.locator("pre")).to_contain_text('"gemma3"')
    chat = page.locator("form[data-path='v1/chat/completions']")
    chat.get_by_role("textbox").fill(
        '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": true}'
    )
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator("pre")).to_contain_text("data: [DONE]")
