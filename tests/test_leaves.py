import io
import math
import os
from pathlib import Path

import pandas as pd
import pytest

from noiser.files import csv_text, parse_json, write_bytes
from noiser.numbers import duration, interval, number

NAN = math.nan


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (-0.12345, "decimal", "−0.123"),
        (-0.0001, "decimal", "0.000"),
        (12345.0, "decimal", "1.23e+04"),
        (math.inf, "decimal", "inf"),
        (NAN, "decimal", "–"),
        (0.0, "quantity", "0"),
        (0.0012345, "quantity", "0.00123"),
        (9.876, "quantity", "9.88"),
        (1234567.0, "quantity", "1\u00a0234\u00a0567"),
    ],
)
def test_numbers(value, form, text):
    assert number(value, form) == text


def test_intervals():
    assert interval(-0.05, 0.21) == "[−0.050, 0.210]"
    assert interval(500, 12345, "quantity") == "[500, 12\u00a0345]"
    assert interval(NAN, 0.5) == interval(0.5, NAN) == ""


def test_durations():
    assert [duration(s) for s in (0.2, 5, 60, 3599, 3600, 7530, 90000)] == [
        "under a second", "5 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 05 min", "25 h 00 min",
    ]  # fmt: skip


def test_a_write_replaces_the_whole_file_and_keeps_its_mode(tmp_path):
    file = tmp_path / "a"
    file.write_text("before")
    file.chmod(0o640)
    (tmp_path / "link").symlink_to(file)
    write_bytes(tmp_path / "link", b"after")
    assert (file.read_bytes(), (tmp_path / "link").is_symlink()) == (b"after", True)
    assert os.name == "nt" or file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_text("before")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        write_bytes(file, b"after")
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(tmp_path / "pipe", b"text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert Path(tmp_path / "pipe").is_fifo()


def test_csv_quotes_every_text():
    frame = pd.DataFrame({"text": ["a;=1+1", "one\rtwo", "- l"], "value": [0.5, NAN, 2.0]})
    text = csv_text(frame, frame)
    assert '"a;=1+1",0.5\n"one\rtwo",""\n' in text
    pd.testing.assert_frame_equal(
        pd.read_csv(io.StringIO(text, newline="")), pd.concat([frame, frame], ignore_index=True)
    )


def test_json_with_a_byte_order_mark():
    assert parse_json('\ufeff{"a": [1.5]}') == parse_json(b'\xef\xbb\xbf{"a": [1.5]}') == {"a": [1.5]}


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", "[NaN]", "[Infinity]", "[1e999]", "[" * 5000])
def test_what_is_not_json(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)
