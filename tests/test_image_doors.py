"""Pictures on the command line and in the API."""

from __future__ import annotations

import base64
import io
import json

import pytest
import torch
from typer.testing import CliRunner

import noiser
import noiser.model
from noiser.cli import app
from noiser.cli.options import parse_image_unit, with_images
from noiser.errors import ParameterError, PromptError
from noiser.explain import rule_of
from noiser.explain.spot_check import spot_check
from tiny_images import picture, wrapped

pytest.importorskip("PIL")
QUESTION = "What stands near the river?"


@pytest.fixture(scope="module")
def lm():
    return wrapped("llava")


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    picture().save(paths[0])
    picture(90, 120).save(paths[1])
    return [str(path) for path in paths]


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# ---- the command line ---------------------------------------------------------------------------


@pytest.fixture
def command(lm, monkeypatch):
    monkeypatch.setattr(noiser.model, "load_model", lambda name, **options: lm)

    def run(*arguments):
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def test_pictures_from_files(command, lm, files, tmp_path):
    saved = tmp_path / "a.json"
    arguments = ["attribute", QUESTION, "--image", files[0], "--image", files[1]]
    arguments += ["--image-unit", "2x1", "--method", "occlusion", "--target", " fox"]
    assert command(*arguments, "-o", str(saved)).exit_code == 0
    content = [{"type": "image", "path": path} for path in files]
    content.append({"type": "text", "text": QUESTION})
    expected = noiser.attribute(
        lm,
        [{"role": "user", "content": content}],
        method="occlusion",
        image_unit=(2, 1),
        target=" fox",
    )
    found = noiser.Attribution.load(saved)
    assert torch.equal(found.scores, expected.scores)
    shown = command(*arguments).stdout
    assert "[image 2]: each region's score, at its place" in shown
    assert "image 1 row 2 column 1" in shown


def test_methods_side_by_side(command, files):
    arguments = ["compare", QUESTION, "--image", files[0], "--image-unit", "image"]
    result = command(*arguments, "--methods", "occlusion,noiser", "--target", " fox")
    assert result.exit_code == 1
    assert "image" in result.stdout
    assert "noiser: noiser" in result.stderr
    assert "'joint' or 'occlusion'" in result.stderr


def test_a_file_that_is_not_there(command):
    result = command("attribute", QUESTION, "--image", "nowhere.png")
    assert result.exit_code == 2
    assert "'nowhere.png', which cannot be read" in result.stderr


UNITS = {
    "4x4": (4, 4),
    "3×2": (3, 2),
    "image": "image",
    "none": None,
    "0,0,10,20;10,0,20,20": [(0, 0, 10, 20), (10, 0, 20, 20)],
}


@pytest.mark.parametrize(("typed", "unit"), UNITS.items())
def test_a_unit_as_it_is_typed(typed, unit):
    assert parse_image_unit(typed) == unit


def test_a_box_that_is_no_numbers():
    with pytest.raises(ParameterError, match="--image-unit: got '1,a'"):
        parse_image_unit("1,a")


def test_pictures_stand_in_the_last_message_of_the_user():
    chat = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And?"},
    ]
    found = with_images(chat, ["a.png"])
    assert found[:2] == chat[:2]
    text = {"type": "text", "text": "And?"}
    assert found[2]["content"] == [{"type": "image", "path": "a.png"}, text]
    with pytest.raises(PromptError, match="no message of the user's"):
        with_images(chat[1:2], ["a.png"])


# ---- the API ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(lm):
    from web_for_tests import served

    with served(lambda name: lm, named=("llava",)) as server:
        yield server.client


def body_of(image, **options):
    content = [image, {"type": "text", "text": QUESTION}]
    question = {"prompt": [{"role": "user", "content": content}], "target": " fox"}
    return {**question, "method": "occlusion", "image_unit": [1, 2], **options}


def test_the_api_reads_data_urls(client, lm):
    image = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    reply = client.post("v1/attribute", json=body_of(image))
    assert reply.status_code == 200, reply.text
    chat = [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]
    expected = noiser.attribute(lm, chat, method="occlusion", image_unit=(1, 2), target=" fox")
    found = noiser.Attribution.from_dict(reply.json())
    torch.testing.assert_close(found.scores, expected.scores)
    boxes = {"image_unit": [[0, 0, 112, 168]]}
    named = client.post("v1/attribute", json=body_of(image, **boxes)).json()["units"]
    assert named[0]["text"] == "image box 1"


FORMS = {
    "path": lambda path: {"type": "image", "path": path},
    "image": lambda path: {"type": "image", "image": path},
    "address": lambda path: {"type": "image_url", "image_url": {"url": f"file://{path}"}},
    "both": lambda path: {"type": "image", "url": data_url(picture()), "path": path},
    "base64 that is a path": lambda path: {"type": "image", "base64": path},
    "nothing": lambda path: {"type": "image"},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_api_opens_no_file(client, files, form):
    reply = client.post("v1/attribute", json=body_of(form(files[0])))
    assert reply.status_code == 422
    assert "not a data URL" in reply.text


def test_the_page_opens_no_file(client, files):
    prompt = [{"role": "user", "content": [{"type": "image", "path": files[0]}]}]
    reply = client.post("ask", json={"prompt": json.dumps(prompt), "chat": "1"})
    assert "not a data URL" in reply.text


def test_the_page_asks_about_pictures(client):
    asked = {"prompt": QUESTION, "pictures": [data_url(picture(90, 60))], "methods": "occlusion"}
    asked["image_unit"] = "2x2"
    reply = client.post("ask", json={**asked, "target": " fox", "unit": "turn"})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["html"].count('class="spot') == 4
    assert answer["saved"][0]["prompt"][0]["content"][0] == {"type": "image"}
    both = client.post("ask", json={**asked, "sources": "The river is wide."})
    assert "without sources" in both.text
    many = client.post("ask", json={**asked, "pictures": asked["pictures"] * 5})
    assert many.status_code == 422


@pytest.fixture(scope="module")
def answered(client):
    """A question to the page, its answer, and what further questions have of it."""
    asked = {"prompt": QUESTION, "pictures": [data_url(picture(90, 60))]}
    form = {**asked, "methods": "occlusion", "image_unit": "2x2", "target": " fox", "unit": "word"}
    answer = client.post("ask", json=form).json()
    return form, answer, {**asked, "answer": answer["saved"][0], "answers": answer["saved"]}


def chat_of(image):
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def posted(client, path, body):
    """What the server answers; it must not refuse."""
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_page_tests_an_answer_with_pictures(client, lm, answered):
    _, answer, again = answered
    reply = posted(client, "test", again)
    att = noiser.Attribution.from_dict(answer["saved"][0])
    expected = spot_check(lm, att, prompt=chat_of(picture(90, 60)))
    assert expected.verdict in reply["html"]
    assert "words and regions" in expected.verdict


def test_the_page_finds_a_rule_over_regions_and_words(client, lm, answered):
    _, answer, again = answered
    reply = posted(client, "findrule", again)
    att = noiser.Attribution.from_dict(answer["saved"][0])
    expected = rule_of(lm, att, prompt=chat_of(picture(90, 60)))
    assert expected.line() in reply["html"]
    assert reply["rings"] == {str(unit): ring for unit, ring in expected.rings.items()}


def test_the_page_says_what_stands_without_each_part_where_it_is_missing(client, answered):
    _, answer, again = answered
    bare = {**answer["saved"][0], "without": None}
    (found,) = posted(client, "without", {**again, "answers": [bare]})["saved"]
    for entry, expected in zip(found["without"][0], answer["saved"][0]["without"][0], strict=True):
        assert entry["probability"] == pytest.approx(expected["probability"], rel=1e-5)
    assert found["prompt"] == answer["saved"][0]["prompt"]  # without the pictures


def test_regions_that_are_struck_out_are_grey_in_the_next_question(client, lm, answered):
    form, _, again = answered
    greyed = [[0, 45, 0, 90, 30]]
    answer = client.post("ask", json={**form, "greyed": greyed}).json()
    image = picture(90, 60)
    image.paste((123, 117, 104), (45, 0, 90, 30))  # the mean colour of CLIP
    options = {"image_unit": (2, 2), "unit": "word", "target": " fox"}
    expected = noiser.attribute(lm, chat_of(image), method="occlusion", **options)
    found = noiser.Attribution.from_dict(answer["saved"][0])
    torch.testing.assert_close(found.scores, expected.scores)
    further = {**again, "answer": answer["saved"][0], "greyed": greyed}
    assert client.post("findrule", json=further).status_code == 200
    assert "other pixels" in client.post("findrule", json={**further, "greyed": []}).text


GREYED = {
    "beyond its picture": ([[0, 0, 0, 91, 60]], 400, "leaves the picture"),
    "without a pixel": ([[0, 4, 0, 4, 60]], 400, "has no pixel"),
    "of no picture": ([[1, 0, 0, 9, 9]], 400, "a box of picture 1"),
    "too many": ([[0, 0, 0, 9, 9]] * 401, 422, "at most 400"),
    "three numbers": ([[0, 0, 9]], 422, "greyed"),
}


@pytest.mark.parametrize(("greyed", "status", "says"), GREYED.values(), ids=GREYED)
def test_a_region_to_strike_out_must_be_there(client, answered, greyed, status, says):
    reply = client.post("ask", json={**answered[0], "greyed": greyed})
    assert reply.status_code == status
    assert says in reply.text


@pytest.mark.parametrize("path", ["test", "findrule", "without"])
def test_further_questions_open_no_file(client, answered, files, path):
    again = answered[2]
    part = {"type": "image", "path": files[0]}
    content = [part, {"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": content}]
    record = {**again["answer"], "without": None}
    asked = {**again, "answers": [record], "pictures": [], "prompt": json.dumps(chat)}
    assert "not a data URL" in client.post(path, json=asked).text
    assert client.post(path, json={**again, "pictures": [files[0]]}).status_code == 422
    record = {**record, "prompt": chat, "info": {}}
    asked = {"answer": record, "answers": [record]}
    assert "has a picture" in client.post(path, json=asked).text


def test_pictures_that_stand_in_the_chat_itself_can_be_asked_about(client):
    content = [{"type": "image", "url": data_url(picture(40, 30))}]
    content.append({"type": "text", "text": QUESTION})
    prompt = json.dumps([{"role": "user", "content": content}])
    form = {"prompt": prompt, "methods": "occlusion", "image_unit": "2x2", "target": " fox"}
    answer = client.post("ask", json={**form, "chat": "1"}).json()
    again = {"prompt": prompt, "answer": answer["saved"][0], "answers": answer["saved"]}
    assert "words and regions" in client.post("test", json=again).json()["html"]


def test_the_api_finds_a_rule_and_checks_scores_of_pictures(client, lm):
    image = {"type": "image", "url": data_url(picture())}
    body = body_of(image, check=True, image_unit=[2, 2])
    checked = client.post("v1/attribute", json=body).json()["info"]["check"]
    assert checked["units"] == "words and regions"
    body = {name: body[name] for name in ("prompt", "target", "image_unit")}
    reply = client.post("v1/rule", json={**body, "same": "logprob"})
    assert reply.status_code == 200, reply.text
    expected = noiser.rule(lm, chat_of(picture()), target=" fox", same="logprob")
    assert reply.json()["best"] == [list(term) for term in expected.best]
    assert reply.json()["tries"] == expected.tries == 32


def test_spans_in_utf16_may_stand_beside_a_picture(client):
    image = {"type": "image", "url": data_url(picture())}
    plain = client.post("v1/attribute", json=body_of(image)).json()
    start = plain["text"].index("What")
    body = body_of(image, unit=[[start, start + 4]], offsets="utf16")
    reply = client.post("v1/attribute", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["units"][-1]["text"] == "What"


def test_a_request_may_be_larger_for_a_model_that_reads_pictures(client):
    image = {"type": "image", "url": data_url(picture())}
    body = body_of(image)
    body["prompt"][0]["content"][1]["text"] = "a" * 2**21
    reply = client.post("v1/attribute", json=body)
    assert reply.status_code == 422  # too many characters, and not too many bytes
