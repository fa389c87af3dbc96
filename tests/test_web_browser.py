"""The web page in a browser: what a visitor does, with a pointer and with keys, and who is turned
away.
"""

import json
import re
import shutil
import time
from urllib.parse import urlencode

import pytest

import noiser
from noiser.attribution.amounts import amounts_of, without_text
from noiser.attribution.summary import about, as_text
from noiser.server.page import FACT
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
    """Opens the page as a visitor of its own; afterwards checks that nothing was fetched elsewhere
    or failed.
    """
    contexts, requests, errors = [], [], []

    def open_page(query="", answered=True, **options):
        if query and "chat=" not in query:
            query += "&chat=0"  # a text to go on, also for a model that chats
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
    page.get_by_role("button", name=name, exact=True).click()


NOISE = "How much noise does it stand?"


def done(page):
    expect(page.locator("#status")).to_have_text(re.compile(r"Done in [\d.]+ s( by \S+)?\."))
    expect(page.locator("#after")).to_be_visible()


def settings(page):
    page.get_by_text("Settings", exact=True).click()


def ask(page, prompt=PROMPT, method="occlusion"):
    settings(page)
    field(page, "chat").select_option("0")
    field(page, "prompt").fill(prompt)
    field(page, "methods").select_option(method)
    press(page, "Ask")
    done(page)


def ask_by_key(page, prompt):
    field(page, "prompt").fill(prompt)
    field(page, "prompt").press("Shift+Enter")


def shown(att, unit):
    return amounts_of(att, 0).with_unit(float(att.scores[0, unit]))


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
    assert shown(att, 1) in units.nth(1).get_attribute("title")
    units.nth(1).click()
    press(page, NOISE)
    expect(page.locator("#chart svg .point")).not_to_have_count(0)
    expect(page.locator("#chart h3")).to_contain_text(att.units[1].text.strip())


def test_the_sentence_comes_first_and_no_jargon_with_it(visit):
    page = visit()
    att = noiser.attribute(chatty("llama"), FACT)
    expect(page.locator("#answer .says")).to_have_text(as_html_text(att))
    assert (
        page.evaluate("document.querySelector('#answer section').firstElementChild.className")
        == "says"
    )
    text = page.locator("body").inner_text()
    assert not re.search(r"\b(foil|rank|units?|seed|removal|score=root|nats|token)\b", text)


def as_html_text(att):
    return as_text(about([att], 0)).replace("“", "").replace("”", "")


def test_a_word_says_what_stands_without_it_is_struck_out_and_left_out(visit):
    page = visit(f"?prompt={PROMPT}&methods=occlusion")
    att = noiser.attribute(chatty("llama"), PROMPT, method="occlusion")
    units, line = page.locator("#answer .u"), page.locator("#answer .word")
    units.nth(2).hover()
    says = without_text(att.targets[0], att.without[0][2])
    expect(line).to_have_text(f"Without “fox”: {says}")
    units.nth(2).click()
    units.nth(4).click()
    assert field(page, "prompt").input_value() == "The quick sings the river"
    units.nth(4).click()  # once more, and it is back
    assert field(page, "prompt").input_value() == "The quick sings near the river"
    expect(page.locator("#answer .struck")).to_have_text(["fox"])
    press(page, "Ask without it")
    left = ["The", "quick", "sings", "near", "the", "river"]
    expect(page.locator("#answer section.t1 .u")).to_have_text(left)
    done(page)
    page.go_back()
    done(page)
    field(page, "prompt").fill("The visitor's own words")
    units.nth(2).click()  # does not undo what the visitor has typed
    assert field(page, "prompt").input_value() == "The visitor's own words"


def test_a_word_of_a_chat_is_struck_out_of_its_message(visit):
    prompt = "system: Trains are late.\nuser: When do the trains run? trains"
    page = visit(
        "?" + urlencode({"prompt": prompt, "chat": 1, "methods": "occlusion", "max_new_tokens": 1})
    )
    page.locator("#answer .u", has_text="trains").last.click()
    expected = "system: Trains are late.\nuser: When do the trains run?"
    assert field(page, "prompt").input_value() == expected
    page.locator("#answer .u", has_text="Trains").first.click()
    assert field(page, "prompt").input_value() == expected.replace("Trains ", "")[0:7] + expected[
        7:
    ].replace("Trains", "", 1)


def test_what_stands_without_a_word_is_run_on_demand(visit):
    page = visit(f"?prompt={PROMPT}&methods=last_attention")
    page.locator("#answer .u").nth(1).click()
    press(page, "What does the model say without each?")
    expect(page.locator("#answer .u[title^=without]")).to_have_count(7)
    done(page)
    assert field(page, "prompt").input_value() == PROMPT
    page.locator("#answer .u").nth(1).click()
    assert field(page, "prompt").input_value() == PROMPT.replace(" quick", "")
    expect(page.get_by_role("button", name="What does the model say")).to_have_count(0)


def test_test_it_says_whether_to_believe(visit):
    page = visit(f"?prompt={PROMPT}&methods=occlusion,random")
    press(page, "Test it")
    expect(page.locator("#tested h3")).to_have_text(["occlusion", "random"])
    expect(page.locator("#tested .says").first).to_contain_text("other versions of this prompt")


def test_long_work_is_announced_in_words_and_a_click_takes_a_quicker_way(visit):
    page = visit(f"?prompt={PROMPT}&methods=noiser")
    assert page.evaluate("[12, 80, 200, 7200, 1849860].map(inWords)") == [
        "about 15 s", "about 80 s", "about 3 minutes", "about 2 hours", "about 21 days",
    ]  # fmt: skip
    told = """states => { const left = clock(); return states.map(([share, seconds, expected]) =>
      Math.round(left({ label: "joint", share, seconds, expected }))); }"""
    states = [[None, 1, 61], [1, 2, 61], [0, 3, 61], [0.1, 4, 61], [0.1, 5, 61], [0.5, 13, None]]
    assert page.evaluate(told, states) == [60, 59, 58, 57, 18, 10]  # measured once it can be
    page.evaluate("offerQuicker({ prompt: 'One. Two.', unit: 'word', methods: 'joint' })")
    expect(page.locator("#quicker button:visible")).to_have_text(
        ["larger parts first", "one part at a time", "a single pass"]
    )
    page.evaluate("offerQuicker({ prompt: 'One', unit: 'word', methods: 'occlusion' })")
    expect(page.locator("#quicker button:visible")).to_have_text(["a single pass"])
    page.evaluate("offerQuicker({ prompt: 'One', unit: 'word', methods: 'joint' })")
    press(page, "one part at a time")
    done(page)
    assert page.evaluate("shown.saved[0].method") == "occlusion@1"
    expect(page.locator("#quicker")).to_be_hidden()


def test_warnings_are_shown(visit):
    page = visit(f"?prompt={PROMPT}&methods=random")
    found = {"html": "<p>An answer</p>", "saved": [{}], "warnings": ["One <b>warning</b>."]}
    body = f"event: answer\ndata: {json.dumps(found)}\n\n"
    page.route("**/ask", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    press(page, "Ask")
    expect(page.locator("#warnings li")).to_have_text(["One <b>warning</b>."])
    page.unroute("**/ask")
    press(page, "Ask")
    expect(page.locator("#warnings")).to_be_hidden()


def test_files_are_sources_with_their_names_as_titles(visit, tmp_path):
    first, second = tmp_path / "trains.txt", tmp_path / "dog.md"
    first.write_text("The trains run late.\n---\nAlways.")
    second.write_text("The lazy dog sleeps.")
    page = visit()
    page.get_by_text("Answer from sources").click()
    page.locator("#files").set_input_files([first, second])
    field(page, "prompt").fill("When do the trains run?")
    settings(page)
    page.get_by_label("Answer to explain").fill(" The trains run late.")
    press(page, "Ask")
    expect(page.locator("#answer .source b")).to_contain_text(["[1] trains.txt", "[2] dog.md"])
    expect(page.locator("#answer .source").first).to_contain_text("Always.")
    done(page)


SCRIPTS = (
    "<script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>"
    '</textarea></title></style>" onmouseover="alert(4)" javascript:alert(5) {{7*7}}'
)


def heard_alerts(page):
    """Every dialog that the page opens, which is dismissed."""
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    return alerts


def without_scripts(page, alerts):
    """Whether no text of a stranger became part of the page, wherever the pointer goes."""
    for unit in page.locator("#answer .u, #answer .s, #answer .source").all()[:6]:
        unit.hover(force=True)
    made = "#answer script, #answer img[src=x], #answer svg[onload], #answer [onmouseover]"
    return not alerts and page.locator(made).count() == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": SCRIPTS},
        {"prompt": f"{PROMPT} {SCRIPTS}", "target": SCRIPTS},
        {"prompt": PROMPT, "foil": SCRIPTS, "target": " sings"},
        {"prompt": PROMPT, "before": f"{PROMPT} {SCRIPTS}"},
        {
            "prompt": PROMPT,
            "sources": f"--- {SCRIPTS}\n{SCRIPTS}\n---\nThe dog.",
            "target": SCRIPTS,
        },
        {"prompt": f"user: {SCRIPTS}", "chat": "1"},
        {"prompt": PROMPT, "model": SCRIPTS},
        {"prompt": PROMPT, "methods": SCRIPTS},
    ],
    ids=["prompt", "target", "foil", "before", "sources", "chat", "model", "method"],
)
def test_no_text_of_a_link_becomes_a_script(visit, fields):
    page = visit("", answered=False)
    alerts = heard_alerts(page)
    page.goto(page.url + "?" + urlencode({"methods": "occlusion", "chat": "0"} | fields))
    ended = page.locator("#status", has_text="Done in").or_(page.get_by_role("alert"))
    expect(ended.filter(visible=True).first).to_contain_text(re.compile(r"\w"))
    assert without_scripts(page, alerts)


def test_no_name_or_text_of_a_file_becomes_a_script(visit, tmp_path):
    file = tmp_path / "<img src=x onerror=alert(6)>.txt"
    file.write_text(f"The trains run late. {SCRIPTS}")
    page = visit()
    alerts = heard_alerts(page)
    page.get_by_text("Answer from sources").click()
    page.locator("#files").set_input_files([file])
    field(page, "prompt").fill("When do the trains run?")
    settings(page)
    page.get_by_label("Answer to explain").fill(" The trains run late.")
    press(page, "Ask")
    expect(page.locator("#answer .source b")).to_contain_text(["onerror"])
    done(page)
    assert without_scripts(page, alerts)


def test_compare_measure_and_save(visit, tmp_path):
    page = visit()
    settings(page)
    field(page, "prompt").fill(PROMPT)
    field(page, "chat").select_option("0")
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
    press(page, NOISE)
    expect(page.locator("#chart h3")).to_be_visible()
    page.get_by_text("All the numbers").click()
    field(page, "metrics").select_option("lds")
    press(page, "Measure")
    expect(page.locator("#measured h3").nth(1)).to_contain_text("random")
    with page.expect_download() as download:
        page.locator("#save").click()
    records = json.loads(download.value.path().read_text(encoding="utf-8"))
    loaded = [noiser.Attribution.from_dict(record) for record in records]
    words = noiser.attribute(chatty("llama"), PROMPT, method="random", max_new_tokens=2).targets
    assert [att.method.partition("@")[0] for att in loaded] == ["noiser", "random"]
    assert [len(att.targets) for att in loaded] == [len(words)] * 2


def test_a_rule_stands_under_the_heat_map_and_its_units_are_ringed(visit):
    prompt = "The fox sings. The dog plays. Trains run late. Near"
    page = visit()
    settings(page)
    field(page, "chat").select_option("0")
    field(page, "prompt").fill(prompt)
    field(page, "methods").select_option("occlusion")
    field(page, "unit").select_option("sentence")
    press(page, "Ask")
    done(page)
    expected = noiser.rule(chatty("llama"), prompt)
    assert len(expected.terms) == 2
    for _ in range(2):  # once more: the line takes the place of the one before
        press(page, "Find a rule")
        line = page.locator("#answer .map ~ .ruled .rule")
        expect(line).to_contain_text("stays if")
        expect(line).to_contain_text(expected.facts[0])
        expect(page.locator("#answer .map .r")).to_have_count(4)
        expect(page.locator("#answer .map .r2")).to_have_count(1)
        page.locator("#answer .map .u").first.hover()
        expect(line).to_contain_text("stays if")  # the line of the word takes another place


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
      const canvas = Object.assign(document.createElement("canvas"), {
        width: image.width, height: image.height });
      const brush = canvas.getContext("2d");
      brush.drawImage(image, 0, 0);
      const data = brush.getImageData(0, 0, image.width, image.height).data;
      const found = { white: 0, orange: 0, blue: 0 };
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
    assert shown(att, 0) in page.locator("#answer .u").first.get_attribute("title")
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
    page = visit("?prompt=The trains")
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
    press(page, NOISE)
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
            for place, tab in zip(("second", "third", "fourth"), tabs, strict=False):
                expect(tab.locator("#status")).to_contain_text(f"{place} in line")
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
    page = visit("?prompt=The")
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
    second = page.locator("#answer .u").nth(1)
    assert unit == second.inner_text()
    expect(second).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#answer .word")).to_contain_text(f"Without “{unit}”:")
    assert field(page, "prompt").input_value() == PROMPT.replace(f" {unit}", "")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_and_it_fits(visit, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = visit(color_scheme=scheme, viewport={"width": width, "height": 900})
    ask(page)
    page.locator("#answer .u").first.click()
    press(page, NOISE)
    expect(page.locator("#chart svg")).to_be_visible()
    press(page, "Test it")
    expect(page.locator("#tested .says").first).to_be_visible()
    page.get_by_text("Answer from sources").click()
    page.get_by_text("All the numbers").click()
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
        const headers = { "Content-Type": type };
        const options = { method: "POST", headers, body: '{"prompt": "x"}', mode };
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
