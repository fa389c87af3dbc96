"""Upstream files: fetched from a server of our own, found in a folder, and listed by commands."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import noiser.data
from data_for_tests import KNOWN_RECORDS, as_json, serving, source, upstream
from noiser.cli import app
from noiser.data import DATA_SETS, Recipe, loading
from noiser.data.loading import fetch_file, find_file
from noiser.data.paper import read_known
from noiser.errors import DataError
from noiser.registry import Registry

NAME, CONTENT = "known_1000.json", as_json(KNOWN_RECORDS)


@pytest.fixture
def served():
    with serving() as server:
        server.files[NAME] = CONTENT
        yield server


@pytest.fixture
def file(served):
    return upstream(NAME, CONTENT, served.address)


@pytest.fixture
def catalog(file, monkeypatch, tmp_path):
    """Two data sets: "known", of our own records on our own server, and "gone", which is not there."""
    registry: Registry[Recipe] = Registry("data set", "noiser.data.none")
    for name, one in (("gone", upstream("gone.json", b"gone", file.url.rpartition("/")[0])), ("known", file)):
        recipe = Recipe(source=source(one), read=read_known)
        registry.register(name, lambda recipe=recipe: recipe, summary=f"facts of {name}")
    for module in (noiser.data, loading):
        monkeypatch.setattr(module, "DATA_SETS", registry)
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NOISER_DATA", raising=False)


def test_fetches_once_and_replaces_a_damaged_copy(file, served, tmp_path):
    path = fetch_file(file, tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    assert fetch_file(file, path.parent) == path
    assert len(served.requests) == 1
    assert re.fullmatch(r"noiser/\d+\.\S+", served.requests[0][1])
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fetch_file(file, path.parent).read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("404", "404"),
        ("cut", "IncompleteRead"),
        ("hang", "timed out"),
        ("changed", rf"got {len(CONTENT)} bytes with sha256 [0-9a-f]{{64}}; the file has changed"),
        ("no folder", "(Not a directory|File exists)"),
    ],
)
def test_a_failed_fetch_leaves_what_was_there_and_says_what_to_do(file, served, tmp_path, monkeypatch, trouble, says):
    monkeypatch.setattr(loading, "TIMEOUT", 0.3)
    (tmp_path / NAME).write_bytes(b"old")
    served.files[NAME] = CONTENT.replace(b"moss", b"mass") if trouble == "changed" else CONTENT
    served.replies[NAME] = trouble
    if trouble == "404":
        del served.files[NAME]
    folder = tmp_path / NAME if trouble == "no folder" else tmp_path
    with pytest.raises(DataError, match=rf"Cannot fetch {NAME} from {file.url}.*{says}.*put it there") as caught:
        fetch_file(file, folder)
    assert file.sha256 in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(NAME, b"old")]


def test_finds_the_right_file_below_a_folder(file, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / NAME).write_bytes(CONTENT.replace(b"\n", b"\r\n"))  # not the right one
    for folder in (tmp_path, tmp_path / "no"):
        with pytest.raises(DataError, match=rf"no {NAME} with sha256 {file.sha256}.* noiser data fetch known"):
            find_file(file, folder, data_set="known")
    (tmp_path / "a" / "b" / NAME).write_bytes(CONTENT)
    assert find_file(file, tmp_path, data_set="known") == tmp_path / "a" / "b" / NAME


def test_load_fetches_into_the_cache_and_never_into_a_folder(catalog, served, tmp_path):
    with pytest.raises(DataError, match=f"There is no {NAME}"):
        noiser.data.load("known", tmp_path)
    assert served.requests == []
    first = noiser.data.load("known")
    assert (tmp_path / "cache" / "data" / "known" / NAME).read_bytes() == CONTENT
    assert noiser.data.load("known").examples == first.examples
    assert len(served.requests) == 1
    (path,) = noiser.data.fetch("known", tmp_path / "mine")
    assert path == tmp_path / "mine" / NAME
    assert noiser.data.load("known", tmp_path / "mine").examples == first.examples


def test_every_source_is_complete():
    for name in DATA_SETS.names():
        found = DATA_SETS.get(name).factory().source
        assert found.licence
        assert found.citation
        for one in found.files:
            assert one.url.startswith("https://")
            assert one.size > 1000
            assert re.fullmatch("[0-9a-f]{64}", one.sha256)


# ---- commands -------------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def test_list_fetch_list(catalog, tmp_path):
    before, fetched, after = run("list"), run("fetch", "known"), run("list")
    assert (before.exit_code, fetched.exit_code, after.exit_code) == (0, 0, 0)
    assert before.stdout.count("  not fetched: http://127.0.0.1:") == 2
    path = tmp_path / "cache" / "data" / "known" / NAME
    assert f"known: {path}" in fetched.stdout
    assert f"  fetched: {path}\n" in after.stdout


def test_show(catalog):
    shown = run("show", "known", "--category", "P2", "--limit", "1")
    assert shown.exit_code == 0, shown.output
    assert "known: 1 examples" in shown.stdout
    assert "Took 1 of 3 examples, category P2, in the order of the file." in shown.stdout
    assert json.dumps(KNOWN_RECORDS[1]["prompt"])[1:-1] in shown.stdout or "Every second baker" in shown.stdout


def test_fetch_all_goes_on_after_a_failure(catalog):
    result = run("fetch", "all")
    assert result.exit_code == 2
    assert "known: " in result.stdout
    assert "Cannot fetch gone.json" in " ".join(result.output.split())
