"""The page's answers about pictures in a browser."""

import json

import pytest

from tiny_images import picture, wrapped

pytest.importorskip("PIL")
from test_web_browser import browser, done, expect, field, press, settings, visit
from web_for_tests import served

pytestmark = pytest.mark.slow
__all__ = ["browser", "visit"]

QUESTION = "What stands near the river?"
EVENTS = "text/event-stream"
# Of the upper corners of the picture that was explained.
COLOURS = """async () => {
  const image = new Image(), canvas = document.createElement("canvas");
  image.src = shown.saved[0].info.images.pictures[0].data;
  await image.decode();
  Object.assign(canvas, { width: image.width, height: image.height });
  const pen = canvas.getContext("2d");
  pen.drawImage(image, 0, 0);
  const colour = (x, y) => [...pen.getImageData(x, y, 1, 1).data].slice(0, 3);
  return [colour(2, 2), colour(image.width - 3, 2)];
}"""


@pytest.fixture(scope="module")
def lm():
    return wrapped("llava")


@pytest.fixture(scope="module")
def web(lm):
    with served(lambda name: lm, named=("llava",)) as found:
        yield found


@pytest.fixture
def page(visit, tmp_path):
    """The page after a question about a picture of two rows and two columns."""
    picture(90, 60).save(tmp_path / "house.png")
    page = visit()
    page.get_by_text("Ask about pictures").click()
    page.locator("#pictures").set_input_files(tmp_path / "house.png")
    expect(page.locator("#added img")).to_have_count(1)
    field(page, "image_unit").select_option("2x2")
    settings(page)
    field(page, "methods").select_option("occlusion")
    page.get_by_label("Target").fill(" fox")
    field(page, "prompt").fill(QUESTION)
    press(page, "Ask")
    expect(page.locator("#answer .spot")).to_have_count(4)
    done(page)
    return page


def titles(page):
    return page.locator("#answer .spot").evaluate_all("all => all.map((one) => one.title)")


def test_an_answer_is_tested_and_a_rule_found(page):
    page.locator("#answer .spot").nth(3).hover()
    expect(page.locator("#answer .word")).to_contain_text("Without “image row 2 column 2”:")
    press(page, "Test it")
    expect(page.locator("#tested .says").first).to_contain_text("half of its words and regions")
    press(page, "Find a rule")
    expect(page.locator("#answer .map ~ .ruled .rule")).to_contain_text("fox")
    done(page)
    line = "<div class=rule>stays if [2] and [6]</div>"  # whatever the rule of a random model is
    found = {"html": line, "rings": {"1": "r r1", "5": "r r1"}, "warnings": []}
    body = f"event: answer\ndata: {json.dumps(found)}\n\n"
    page.route("**/findrule", lambda route: route.fulfill(body=body, content_type=EVENTS))
    press(page, "Find a rule")
    expect(page.locator("#answer .spot.r.numbered")).to_have_attribute("data-number", "2")
    expect(page.locator("#answer .map .u.r.numbered")).to_have_attribute("data-number", "6")
    expect(page.get_by_text("All the numbers")).to_be_hidden()  # metrics read text alone
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_region_is_struck_out_asked_without_and_put_back(page):
    first = titles(page)
    colours = page.evaluate(COLOURS)
    spots = page.locator("#answer .spot")
    spots.nth(1).click()
    expect(spots.nth(1)).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#added i")).to_have_count(1)
    press(page, "Ask with this part grey")
    expect(page.locator("#answer .spot.struck")).to_have_count(1)
    done(page)
    grey = page.evaluate(COLOURS)
    assert grey[1] == pytest.approx([123, 117, 104], abs=2)
    assert grey[0] == pytest.approx(colours[0], abs=2)
    assert titles(page) != first
    press(page, "Test it")  # of what was asked, with the grey part
    expect(page.locator("#tested .says").first).to_contain_text("half of its words and regions")
    done(page)
    spots.nth(1).click()
    expect(page.locator("#added i")).to_have_count(0)
    press(page, "Ask again")
    expect(page.locator("#answer .spot.struck")).to_have_count(0)
    done(page)
    assert titles(page) == first


def test_another_picture_is_not_struck_out(page, tmp_path):
    page.locator("#answer .spot").first.click()
    expect(page.locator("#answer .spot.struck")).to_have_count(1)
    page.locator("#added button").click()
    expect(page.locator("#added img")).to_have_count(0)
    page.locator("#answer .spot").nth(2).click()  # its picture is not in the form any more
    expect(page.locator("#answer .spot.struck")).to_have_count(0)


def test_words_beside_a_picture_are_struck_out_and_arrows_reach_all_parts(page):
    page.locator("#answer .u", has_text="near").click()
    assert field(page, "prompt").input_value() == "What stands the river?"
    press(page, "Ask without it")
    expect(page.locator("#answer .map .u")).to_have_text(["What", "stands", "the", "river?"])
    done(page)
    page.locator("#answer .spot").first.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "What"
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("#answer .spot").first).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_and_it_fits(page, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.locator("#answer .spot").nth(1).click()
    press(page, "Find a rule")
    expect(page.locator("#answer .map ~ .ruled .rule")).to_contain_text("fox")
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.run(page)
    assert [each.generate_report() for each in [found] if each.violations_count] == []
