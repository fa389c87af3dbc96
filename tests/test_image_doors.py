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
from tiny_images import build, picture

pytest.importorskip("PIL")
QUESTION = "What stands near the river?"


@pytest.fixture(scope="module")
def lm():
    return noiser.wrap(*build("llava"))


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


def test_a_request_may_be_larger_for_a_model_that_reads_pictures(client):
    image = {"type": "image", "url": data_url(picture())}
    body = body_of(image)
    body["prompt"][0]["content"][1]["text"] = "a" * 2**21
    reply = client.post("v1/attribute", json=body)
    assert reply.status_code == 422  # too many characters, and not too many bytes
