"""Pictures on the command line and in the API."""

from __future__ import annotations

import base64
import io

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
