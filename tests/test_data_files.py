"""Upstream files: fetched whole or not at all, found in a folder, and the commands. The server is on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

import noiser.data
from data_for_tests import KNOWN_RECORDS, as_json, serving, source, upstream
from noiser import data
from noiser.cli import app
from noiser.data import Recipe, UpstreamFile, loading
from noiser.data.dataset import DATA_SETS
from noiser.data.files import fetch_file, find_file
from noiser.data.known import known
from noiser.errors import DataError, NoiserError
from noiser.registry import Registry
from noiser.version import __version__

CONTENT = as_json(KNOWN_RECORDS)
NAME = "known_1000.json"


@pytest.fixture
def served(monkeypatch):
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with serving() as server:
        server.files[NAME] = CONTENT
        yield server


@pytest.fixture
def file(served) -> UpstreamFile:
    return upstream(NAME, CONTENT, served.address)


@pytest.fixture
def catalog(file, monkeypatch, tmp_path) -> Registry[Recipe]:
    """The registry with our own KNOWN, on our own server, and a cache of its own."""
    registry: Registry[Recipe] = Registry("data set", "noiser.data.none")
    recipe = Recipe(source=source(file), read=known().read, read_as_published=known().read_as_published)
    registry.register("known", lambda: recipe, summary="facts of our own")
    monkeypatch.setattr(loading, "DATA_SETS", registry)
    monkeypatch.setattr(noiser.data, "DATA_SETS", registry)
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NOISER_DATA", raising=False)
    return registry


def left(folder: Path) -> list[str]:
    """What is in a folder, but for locks."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.exists() else []


# ---- fetching --------------------------------------------------------------------------------------------------------


def test_fetches_once(file, served, tmp_path):
    steps: list[tuple[float, float]] = []
    path = fetch_file(file, tmp_path / "new" / "folder", progress=lambda done, total: steps.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert served.requests == [(f"/{NAME}", f"noiser/{__version__}")]
    assert fetch_file(file, path.parent) == path
    assert len(served.requests) == 1
    assert left(path.parent) == [NAME]


def test_a_damaged_copy_is_replaced(file, tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT[:-1] + b"x")
    assert fetch_file(file, tmp_path).read_bytes() == CONTENT


def with_other_checksum(file, served):
    served.files[NAME] = CONTENT.replace(b"moss", b"MOSS")
    return file


def with_too_much(file, served):
    served.files[NAME] = CONTENT + b" " * 100_000
    return file


def cut_short(file, served):
    served.replies[NAME] = "cut"
    return file


def shortened(file, served):
    served.files[NAME] = CONTENT[:100]
    return file


def missing(file, served):
    served.files.clear()
    return file


def hanging(file, served):
    served.replies[NAME] = "hang"
    return file


def refusing(file, served):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return file._replace(url=f"http://127.0.0.1:{free.getsockname()[1]}/{NAME}")


def nowhere(file, served):
    return file._replace(url=f"http://nowhere.invalid/{NAME}")


def local(file, served):
    return file._replace(url="file:///etc/hostname")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (with_other_checksum, r"got sha256 [0-9a-f]{64}; the file has changed"),
        (with_too_much, r"got more than \d+ bytes"),
        (cut_short, r"got \d+ bytes, expected \d+; the file was cut short|IncompleteRead"),
        (shortened, r"got 100 bytes, expected \d+"),
        (missing, r"the server answers 404 Not Found"),
        (hanging, r"timed out"),
        (refusing, r"refused"),
        (nowhere, r"Cannot fetch"),
        (local, r"begins with http:// or https://"),
    ],
)
def test_a_failed_fetch_leaves_nothing_and_says_what_to_do(file, served, tmp_path, spoil, says):
    spoiled = spoil(file, served)
    with pytest.raises(DataError, match=says) as caught:
        fetch_file(spoiled, tmp_path, timeout=1)
    message = str(caught.value)
    for part in (NAME, spoiled.url, str(file.size), file.sha256, str(tmp_path), "--data-dir", "NOISER_DATA"):
        assert part in message
    assert "\n" not in message
    assert left(tmp_path) == []


def test_a_failed_fetch_keeps_what_was_there(file, served, tmp_path):
    (tmp_path / NAME).write_bytes(b"an older file")
    with pytest.raises(DataError):
        fetch_file(missing(file, served), tmp_path)
    assert (tmp_path / NAME).read_bytes() == b"an older file"


def test_the_error_is_caught_as_ours_and_as_an_oserror(file, served, tmp_path):
    for kind in (NoiserError, OSError):
        with pytest.raises(kind):
            fetch_file(missing(file, served), tmp_path)


def test_a_folder_that_cannot_be_made(file, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(DataError, match=r"Cannot write .*taken.*--data-dir or NOISER_CACHE"):
        fetch_file(file, tmp_path / "taken")


def test_a_disk_that_is_full(file, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"Cannot write .*No space left on device"):
        fetch_file(file, tmp_path)
    assert left(tmp_path) == []


def test_an_interruption_leaves_nothing(file, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_file(file, tmp_path, progress=interrupt)
    assert left(tmp_path) == []
    assert fetch_file(file, tmp_path).read_bytes() == CONTENT, "the lock is free again"


def test_who_comes_second_waits_and_fetches_nothing(file, served, tmp_path, capsys):
    with FileLock(tmp_path / f".{NAME}.lock"):
        thread = threading.Thread(target=fetch_file, args=(file, tmp_path))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert served.requests == []
        (tmp_path / NAME).write_bytes(CONTENT)  # by whoever holds the lock
    thread.join(10)
    assert not thread.is_alive()
    assert served.requests == []
    assert f"another process is preparing {NAME}" in capsys.readouterr().err


# ---- finding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [NAME, f"a/b/{NAME}", "copies/known (2).json"])
def test_finds_by_name_or_content_in_any_folder(file, tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / NAME).write_bytes(b"another file of that name")
    (tmp_path / place).write_bytes(CONTENT)
    assert find_file(file, tmp_path, data_set="known") == tmp_path / place


def test_a_folder_without_the_file(file, tmp_path):
    with pytest.raises(DataError, match=rf"There is no {NAME} in .* noiser data fetch known --data-dir") as caught:
        find_file(file, tmp_path, data_set="known")
    assert file.url in str(caught.value)
    assert file.sha256 in str(caught.value)


def test_no_folder(file, tmp_path):
    with pytest.raises(DataError, match=r"folder .*none is not a folder"):
        find_file(file, tmp_path / "none", data_set="known")


def test_a_copy_with_other_line_ends_is_refused(file, tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT.replace(b"\n", b"\r\n"))
    with pytest.raises(
        DataError, match=r"is not the expected .*Only its line ends differ \(CRLF\); convert them to LF"
    ):
        find_file(file, tmp_path, data_set="known")


def test_a_changed_copy_is_refused(file, tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT.replace(b"moss", b"MOSS"))
    with pytest.raises(DataError, match=r"got \d+ bytes with sha256 [0-9a-f]{64}, expected") as caught:
        find_file(file, tmp_path, data_set="known")
    assert "CRLF" not in str(caught.value)


# ---- load and fetch --------------------------------------------------------------------------------------------------


def test_load_fetches_into_the_cache_once(catalog, served, tmp_path):
    assert len(data.load("known")) == 3
    assert left(tmp_path / "cache" / "data" / "known") == [NAME]
    assert len(data.load("known", limit=1)) == 1
    assert len(served.requests) == 1


def test_load_from_a_folder_never_fetches(catalog, served, tmp_path):
    with pytest.raises(DataError, match="There is no"):
        data.load("known", tmp_path)
    assert served.requests == []


def test_fetch_into_a_folder_of_the_users(catalog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data.fetch("known", "mine") == [Path("mine") / NAME]
    assert len(data.load("known", "mine")) == 3
    assert not (tmp_path / "cache").exists()


def test_every_source_is_complete():
    for name in DATA_SETS.names():
        made = DATA_SETS.get(name).factory()
        assert made.source.licence
        assert made.source.citation
        for upstream_file in made.source.files:
            assert upstream_file.url.startswith("https://")
            assert len(bytes.fromhex(upstream_file.sha256)) == 32
            assert upstream_file.size > 0


def test_the_data_room_is_light():
    code = "import sys, noiser.data; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "pandas", "numpy", "rich"} & set(ran.stdout.split()) == set()


# ---- commands --------------------------------------------------------------------------------------------------------


def run(*arguments: str):
    result = CliRunner().invoke(app, ["data", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_list_fetch_list(catalog, tmp_path):
    assert f"not fetched: {catalog.get('known').factory().source.files[0].url}" in run("list").stdout
    fetched = run("fetch", "known")
    path = tmp_path / "cache" / "data" / "known" / NAME
    assert fetched.exit_code == 0
    assert f"known: {path} (0.9 kB, checksum right)" in fetched.stdout
    assert f"fetched: {path}" in run("list").stdout


def test_show(catalog):
    result = run("show", "known", "--limit", "2")
    assert result.exit_code == 0
    assert result.stdout == (
        "known: 3 examples\n"
        "  Removed 1 of 4 records: known-2 repeats the prompt of known-0.\n"
        "  Took 2 of 3 examples, in the order of the file.\n"
        "  licence: ours\n"
        "  cite: nobody\n"
        "\n"
        "known-0  P1\n  The moss on our roof is\n  target: green\n  subject: The moss\n"
        "\n"
        "known-1  P2\n  Grandfather's kettle sings in the key of\n  target: C\n  subject: Grandfather's kettle\n"
    )


def test_show_with_options(catalog, tmp_path):
    run("fetch", "known", "--data-dir", str(tmp_path / "mine"))
    result = run("show", "known", "--as-published", "--category", "P1", "--data-dir", str(tmp_path / "mine"))
    assert [line for line in result.stdout.splitlines() if line.startswith("known-")] == ["known-0  P1", "known-2  P1"]
    assert "at random with seed 4" in run("show", "known", "--limit", "1", "--seed", "4").stdout


def test_fetch_all_goes_on_after_a_failure(catalog, served):
    gone = Recipe(source=source(upstream("gone.json", b"{}", served.address)), read=known().read)
    catalog._newest.clear()
    catalog.register("gone", lambda: gone, summary="")
    catalog.register("known", catalog._entries["known@1"].factory, summary="")
    result = run("fetch", "all")
    assert result.exit_code == 2
    assert "known: " in result.stdout
    assert "404" in result.stderr
    assert "gone.json" in result.stderr


@pytest.mark.parametrize("arguments", [("fetch", "nown"), ("show", "nown"), ("show", "known", "--category", "P9")])
def test_errors_are_one_line(catalog, arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("noiser: error: Unknown ")
    assert len(result.stderr.splitlines()) == 1
