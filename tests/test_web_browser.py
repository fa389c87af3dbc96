"""The web page in a browser: what a visitor does, with a pointer and with keys, and who is turned away."""

import json
import re
import shutil
import time

import pytest

import noiser
from noiser.numbers import number_format
from web_for_tests import PROMPT, SOURCES, chatty, held, served

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
sync_api.expect.set_options(timeout=40_000)  # two cores may be busy with other tests
expect = sync_api.expect

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NAMES = "--host-resolver-rules=MAP *.example 127.0.0.1"  # names that an attacker lets point here


@pytest.fixture(scope="module")
def browser():
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(
                executable_path=executable, args=["--no-sandbox", NAMES]
            )
        except sync_api.Error as error:
            pytest.skip(f"no chromium could be started: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def visit(web, browser):
    """Opens the page as a visitor of its own; afterwards checks that nothing was fetched elsewhere or failed."""
    contexts, requests, errors = [], [], []

    def open_page(query="", answered=True, **options):
        contexts.append(
            browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        )
        contexts[-1].set_default_timeout(40_000)
        page = contexts[-1].new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.goto(web.address + query)
        if answered:
            done(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [url for url in requests if not url.startswith((web.address, "data:", "blob:"))] == []
    assert [
        error for error in errors if "422" not in error
    ] == []  # the browser reports a refusal, too


def field(page, name):
    return page.locator(f"[name={name}]").first


def press(page, name):
    page.get_by_role("button", name=name).click()


def done(page):
    expect(page.locator("#status")).to_contain_text("Done in")
    expect(page.locator("#after")).to_be_visible()


def settings(page):
    page.get_by_text("Settings", exact=True).click()


def ask(page, prompt=PROMPT, method="occlusion"):
    settings(page)
    field(page, "prompt").fill(prompt)
    field(page, "methods").select_option(method)
    press(page, "Ask")
    done(page)


def ask_by_key(page, prompt):
    field(page, "prompt").fill(prompt)
    field(page, "prompt").press("Shift+Enter")


def shown(score):
    return number_format([float(score)])(float(score))


def titles(page):
    return page.locator("#answer .u").evaluate_all("all => all.map((one) => one.title)")


def test_ask_hover_and_draw_the_tolerance(visit):
    page = visit()
    expect(page.locator("#example")).to_be_visible()
    ask(page)
    expect(page.locator("#example")).to_be_hidden()
    att = noiser.attribute(chatty("llama"), PROMPT, method="occlusion")
    units = page.locator("#answer .map .u")
    assert units.all_inner_texts() == [unit.text.strip() for unit in att.units]
    assert shown(att.scores[0, 1]) in units.nth(1).get_attribute("title")
    units.nth(1).click()
    expect(page.locator("#chart svg .point")).not_to_have_count(0)
    expect(page.locator("#chart h3")).to_contain_text(att.units[1].text.strip())


def test_compare_measure_and_save(visit, tmp_path):
    page = visit()
    settings(page)
    field(page, "methods").select_option("noiser")
    page.get_by_label("Beside it").select_option("random")
    page.get_by_label("Tokens to explain").fill("2")
    page.get_by_label("A score for every").select_option("word")
    press(page, "Ask")
    expect(page.locator("#answer section.t2 .row")).to_have_count(2)
    done(page)
    page.locator("#answer section.t2 .row").nth(1).locator(
        ".u"
    ).first.click()  # the second method's, second token
    expect(page.locator("#chart h3")).to_be_visible()
    field(page, "metrics").select_option("lds")
    press(page, "Measure")
    expect(page.locator("#measured h3").nth(1)).to_contain_text("random@1")
    with page.expect_download() as download:
        page.locator("#save").click()
    records = json.loads(download.value.path().read_text(encoding="utf-8"))
    loaded = [noiser.Attribution.from_dict(record) for record in records]
    assert [(att.method.partition("@")[0], len(att.targets)) for att in loaded] == [
        ("noiser", 2),
        ("random", 2),
    ]


def test_a_rule_stands_under_the_heat_map_and_its_units_are_ringed(visit):
    prompt = "The fox sings. The dog plays. Trains run late. Near"
    page = visit()
    settings(page)
    field(page, "prompt").fill(prompt)
    field(page, "methods").select_option("occlusion")
    field(page, "unit").select_option("sentence")
    press(page, "Ask")
    done(page)
    expected = noiser.rule(chatty("llama"), prompt)
    assert len(expected.terms) == 2
    for _ in range(2):  # once more: the line takes the place of the one before
        press(page, "Find a rule")
        line = page.locator("#answer .map + .ruled .rule")
        expect(line).to_contain_text("stays if")
        expect(line).to_contain_text(expected.facts[0])
        expect(page.locator("#answer .map .r")).to_have_count(4)
        expect(page.locator("#answer .map .r2")).to_have_count(1)


def test_save_as_picture_page_and_markdown(visit):
    page = visit("?prompt=The trains run late.&methods=occlusion,random", color_scheme="dark")
    box = page.locator("#answer").bounding_box()
    kept = {}
    for form in ("png", "html", "markdown"):
        with page.expect_download() as download:
            page.locator(f"#keep [value={form}]").click()
        kept[download.value.suggested_filename] = download.value.path().read_bytes()
    assert [*kept] == ["noiser.png", "noiser.html", "noiser.md"]
    size = [int.from_bytes(kept["noiser.png"][at : at + 4]) for at in (16, 20)]
    assert size == [int(2 * box["width"]), int(2 * box["height"])]
    assert len(kept["noiser.png"]) > 10_000  # an empty one is much smaller
    records = page.evaluate("shown.saved")
    atts = [noiser.Attribution.from_dict(record) for record in records]
    found = noiser.explain.Comparison(tuple(atts))
    assert kept["noiser.html"].decode() == found.to_html()
    assert kept["noiser.md"].decode() == found.to_markdown()
    drawn = """async (bytes) => {
      const image = await createImageBitmap(new Blob([new Uint8Array(bytes)]));
      const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
      const brush = canvas.getContext("2d");
      brush.drawImage(image, 0, 0);
      const data = brush.getImageData(0, 0, image.width, image.height).data, found = { white: 0, orange: 0, blue: 0 };
      for (let i = 0; i < data.length; i += 4) {
        const [red, green, blue] = data.slice(i, i + 3);
        if (red + green + blue === 765) found.white++;
        else if (red > 200 && blue < 120) found.orange++;
        else if (blue > 200 && red < 150) found.blue++;
      }
      return found;
    }"""
    found = page.evaluate(drawn, list(kept["noiser.png"]))
    assert found["white"] > size[0] * size[1] / 2  # on white, in whatever scheme the page is
    assert found["orange"] + found["blue"] > 500


def test_a_foil(visit):
    page = visit("?prompt=The trains run late.&target= rain&foil= river&methods=occlusion")
    att = noiser.attribute(
        chatty("llama"), "The trains run late.", method="occlusion", target=" rain", foil=" river"
    )
    assert shown(att.scores[0, 0]) in page.locator("#answer .u").first.get_attribute("title")
    assert page.get_by_label("Foil").input_value() == " river"


def test_citations(visit):
    page = visit()
    settings(page)
    page.get_by_text("Answer from sources").click()
    field(page, "sources").fill(SOURCES)
    field(page, "prompt").fill("When do the trains run?")
    page.get_by_label("Target").fill(" The trains run late. The dog sleeps.")
    press(page, "Ask")
    expect(page.locator("#answer .source")).to_have_count(2)
    done(page)
    assert page.locator("#answer .s").count() == 2
    expect(page.locator("#probes")).to_be_hidden()
    reference = page.locator("#answer .s a").first
    if reference.count():  # a click leads to the source, on the same page
        reference.click()
        expect(page.locator("#answer .source:target")).to_have_count(1)


def test_stop_and_ask_again(visit):
    page = visit()
    field(page, "prompt").fill("The trains to the coast run late and the children sing. " * 3)
    with held("llama"):
        press(page, "Ask")
        expect(page.locator("#status progress")).to_be_visible()
        press(page, "Stop")
    began = time.monotonic()
    expect(page.locator("#status")).to_have_text(re.compile("^Stopped"))
    assert time.monotonic() - began < 5
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    page.locator(
        "#answer .u"
    ).first.click()  # the answer before is still there, and can be asked about and kept
    expect(page.locator("#chart svg")).to_be_visible()
    expect(page.locator("#save")).to_be_visible()
    ask_by_key(page, "The")
    done(page)
    assert page.locator("#answer .u").all_inner_texts() == ["The"]


def test_ten_tabs_of_one_browser_work(web, browser):
    with browser.new_context() as context:
        first = context.new_page()
        with held("llama"):
            first.goto(f"{web.address}?prompt={PROMPT}&methods=noiser")
            expect(first.locator("#status progress")).to_be_visible()
            tabs = [context.new_page() for _ in range(9)]
            for tab in tabs:  # they are there while the first one's question runs
                tab.goto(f"{web.address}?prompt={PROMPT}&methods=random")
                expect(tab.locator("#status")).to_contain_text("Waiting for another tab")
            press(first, "Stop")
        for tab in tabs:
            done(tab)


def test_a_link_asks_the_same_question_again(visit):
    page = visit()
    ask(page, PROMPT + " & <b>", "random")
    link = page.locator("#link").get_attribute("href")
    assert page.url.endswith(link)
    ask_by_key(page, "The")
    expect(page.locator("#answer .u")).to_have_text(["The"])
    for move in (page.go_back, page.reload):  # the browser's memory of the form changes nothing
        move()
        expect(page.locator("#link")).to_have_attribute("href", link)
        done(page)
    other = visit(link)
    assert titles(other) == titles(page)
    assert field(other, "prompt").input_value() == PROMPT + " & <b>"
    assert field(other, "methods").is_visible()  # the settings are open, as one differs


def test_a_link_of_another_site_asks_for_a_click(visit, web, browser):
    page = browser.new_context().new_page()
    target = f"{web.address}?prompt=The+trains&methods=occlusion"
    for policy in ("no-referrer", "unsafe-url"):
        page.route(
            "http://other.example/",
            lambda route, policy=policy: route.fulfill(
                content_type="text/html",
                body=f'<a href="{target}" referrerpolicy={policy}>a link</a>',
            ),
        )
        page.goto("http://other.example/")
        page.get_by_text("a link").click()
        expect(page.locator("#status")).to_contain_text("Press Ask")
        assert page.locator("#answer .map").count() == 0
    page.get_by_role("button", name="Ask", exact=True).click()
    done(page)
    page.context.close()


def test_a_link_with_three_methods_and_one_that_is_wrong(visit):
    page = visit(f"?prompt={PROMPT}&methods=occlusion,random,position&other=1")
    ask_by_key(page, " ")
    expect(page.get_by_role("alert")).to_contain_text("The prompt is empty")
    expect(page.locator("#answer .row")).to_have_count(3)  # the answer before stays
    wrong = visit(f"?prompt={PROMPT}&max_new_tokens=99", answered=False)
    expect(wrong.get_by_role("alert")).to_contain_text("max_new_tokens")
    ask_again = wrong.get_by_label("Tokens to explain")
    ask_again.fill("1")
    ask_again.press("Enter")
    done(wrong)


def test_all_of_it_with_the_keyboard(visit):
    page = visit()
    field(page, "prompt").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Ask"
    page.keyboard.press("Enter")
    done(page)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.u')"):
            break
    for key in ("ArrowRight", "End", "Home", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    unit = page.evaluate("document.activeElement.textContent")
    assert unit == page.locator("#answer .u").nth(1).inner_text()
    expect(page.locator("#chart h3")).to_contain_text(unit)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_and_it_fits(visit, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = visit(color_scheme=scheme, viewport={"width": width, "height": 900})
    ask(page)
    page.locator("#answer .u").first.click()
    expect(page.locator("#chart svg")).to_be_visible()
    page.get_by_text("Answer from sources").click()
    press(page, "Measure")
    expect(page.locator("#measured table").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = [axe.run(page)]
    field(page, "sources").fill(SOURCES)
    press(page, "Ask")
    expect(page.locator("#answer .source")).to_have_count(2)
    found.append(axe.run(page))
    page.goto(page.url.partition("?")[0] + "docs")
    found.append(axe.run(page))
    assert [each.generate_report() for each in found if each.violations_count] == []


def test_a_name_that_is_made_to_point_here_is_refused(web, browser):
    with browser.new_context() as context:
        page = context.new_page()
        assert page.goto(f"http://evil.example:{web.port}/").status == 400
        assert page.goto(f"http://noiser.example:{web.port}/").status == 200  # an allowed name


def test_a_page_of_another_site_can_neither_ask_read_nor_frame(web, browser):
    page = browser.new_page()
    page.route(
        "http://site.example/",
        lambda route: route.fulfill(body="<h1>Another</h1>", content_type="text/html"),
    )
    page.goto("http://site.example/")
    send = """async ([address, type, mode]) => {
      try {
        const options = { method: "POST", headers: { "Content-Type": type }, body: '{"prompt": "x"}', mode };
        return (await fetch(address, options)).status;
      } catch (error) { return error.name; }
    }"""
    seen = []
    page.on("response", lambda response: seen.append((response.request.method, response.status)))
    assert page.evaluate(send, [f"{web.address}ask", "application/json", "cors"]) == "TypeError"
    assert page.evaluate(send, [f"{web.address}v1/attribute", "text/plain", "no-cors"]) in (
        0,
        "TypeError",
    )
    assert all(status in (403, 405) for _, status in seen), seen
    page.set_content(f'<iframe src="{web.address}" width=500 height=500></iframe>')
    page.wait_for_timeout(1000)
    assert [frame.locator("#question").count() for frame in page.frames] == [0] * len(page.frames)
    page.close()


def test_a_password_is_asked_for(browser):
    with served(auth="me:secret word") as web:
        with pytest.raises(sync_api.Error, match="AUTH"), browser.new_context() as context:
            context.new_page().goto(web.address)
        with browser.new_context(
            http_credentials={"username": "me", "password": "secret word"}
        ) as context:
            page = context.new_page()
            page.goto(web.address)
            done(page)
