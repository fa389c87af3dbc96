"""Upstream files: fetched from a server of our own, found in a folder, and listed by commands."""

import re
import threading
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import noiser.data
from data_for_tests import KNOWN_RECORDS, as_json, register, upstream
from noiser.cli import app
from noiser.data import DATA_SETS, loading
from noiser.data.known import read_known
from noiser.data.loading import fetch_file, find_file
from noiser.errors import DataError
from server_processes import Handler, served_by

NAME, CONTENT = "known_1000.json", as_json(KNOWN_RECORDS)


@pytest.fixture
def served():
    """A server on this machine that has one file, with a trouble perhaps, and notes the requests
    that came.
    """
    found, finished = SimpleNamespace(content=CONTENT, trouble="", requests=[]), threading.Event()

    class Files(Handler):
        def get(self):
            found.requests.append((self.path, self.headers["User-Agent"]))
            if found.trouble == "hang":
                finished.wait(20)
            elif found.trouble == "404" or self.path[1:] != NAME:
                self.send_error(404)
            else:
                some = found.content[: 50 if found.trouble == "cut" else None]
                self.answer(some, **{"Content-Length": str(len(found.content))})

    with served_by(Files) as found.address:
        yield found
    finished.set()


@pytest.fixture
def file(served):
    return upstream(NAME, CONTENT, served.address)


@pytest.fixture
def catalog(file, served, monkeypatch, tmp_path):
    """Two data sets: "known", of our own records on our own server, and "gone", which is not
    there.
    """
    gone = upstream("gone.json", b"gone", served.address)
    register(monkeypatch, {"gone": (gone, read_known), "known": (file, read_known)})
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))


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
def test_a_failed_fetch_leaves_what_was_there_and_says_what_to_do(
    file, served, tmp_path, monkeypatch, trouble, says
):
    monkeypatch.setattr(loading, "TIMEOUT", 0.3)
    (tmp_path / NAME).write_bytes(b"old")
    served.trouble = trouble
    if trouble == "changed":
        served.content = CONTENT.replace(b"moss", b"mass")
    folder = tmp_path / NAME if trouble == "no folder" else tmp_path
    with pytest.raises(
        DataError, match=rf"Cannot fetch {NAME} from {file.url}.*{says}.*put it there"
    ) as caught:
        fetch_file(file, folder)
    assert file.sha256 in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(NAME, b"old")]


def test_finds_the_right_file_below_a_folder(file, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / NAME).write_bytes(CONTENT.replace(b"\n", b"\r\n"))  # not the right one
    for folder in (tmp_path, tmp_path / "no"):
        with pytest.raises(
            DataError, match=rf"no {NAME} with sha256 {file.sha256}.* noiser data fetch known"
        ):
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
            assert (one.url[:8], one.size > 1000, len(bytes.fromhex(one.sha256))) == (
                "https://",
                True,
                32,
            )


def run(*arguments):
    return CliRunner().invoke(app, ["data", *arguments])


def test_list_fetch_list_and_show(catalog, tmp_path):
    before, fetched, after = run("list"), run("fetch", "known"), run("list")
    assert (before.exit_code, fetched.exit_code, after.exit_code) == (0, 0, 0)
    assert before.stdout.count("  not fetched: http://127.0.0.1:") == 2
    path = tmp_path / "cache" / "data" / "known" / NAME
    assert f"known: {path}" in fetched.stdout
    assert f"  fetched: {path}\n" in after.stdout
    shown = run("show", "known", "--category", "P2", "--limit", "1")
    for said in (
        "known: 1 examples",
        "Took 1 of 3 examples, category P2, in the order of the file.",
        "kettle",
    ):
        assert said in shown.stdout


def test_fetch_all_goes_on_after_a_failure(catalog):
    result = run("fetch", "all")
    assert (result.exit_code, "known: " in result.stdout) == (2, True)
    assert "Cannot fetch gone.json" in " ".join(result.output.split())
