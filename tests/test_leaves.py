import io
import math
import os
import sys
from pathlib import Path

import jaxtyping
import pandas as pd
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import checking
from noiser.engine.objectives import logprob
from noiser.files import csv_text, parse_json, write_bytes
from noiser.methods import Scores
from noiser.numbers import duration, interval, number
from noiser.tensors import boolean_rows, l2_norms, solve, solve_unit_triangular, true_indices

NAN = math.nan


def test_numbers_intervals_and_durations():
    decimals = {
        -0.12345: "−0.123",
        -0.0001: "0.000",
        12345.0: "1.23e+04",
        math.inf: "inf",
        NAN: "–",
    }
    assert {value: number(value) for value in decimals} == decimals
    quantities = {0.0: "0", 0.0012345: "0.00123", 9.876: "9.88", 1234567.0: "1\u00a0234\u00a0567"}
    assert {value: number(value, "quantity") for value in quantities} == quantities
    assert interval(-0.05, 0.21) == "[−0.050, 0.210]"
    assert interval(500, 12345, "quantity") == "[500, 12\u00a0345]"
    assert interval(NAN, 0.5) == interval(0.5, NAN) == ""
    durations = {
        0.2: "under a second",
        5: "5 s",
        60: "1 min 00 s",
        3599: "59 min 59 s",
        3600: "1 h 00 min",
    }
    durations |= {7530: "2 h 05 min", 90000: "25 h 00 min"}
    assert {seconds: duration(seconds) for seconds in durations} == durations


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
    assert (
        parse_json('\ufeff{"a": [1.5]}') == parse_json(b'\xef\xbb\xbf{"a": [1.5]}') == {"a": [1.5]}
    )


@pytest.mark.parametrize(
    "text", ["", "{", b"\xff\xfe", "[NaN]", "[Infinity]", "[1e999]", "[" * 5000]
)
def test_what_is_not_json(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_sizes_types_and_records_of_the_package_are_checked():
    logits, clean, ids = torch.ones(1, 2, 3), torch.ones(2, 3), torch.tensor([0, 0])
    assert logprob(logits, clean, ids).shape == (1,)
    for wrong in (
        lambda: logprob(logits, torch.ones(2, 4), ids),
        lambda: logprob(logits, clean, [0, 0]),
        lambda: logprob(logits, clean, ids.float()),
        lambda: Scores(scores=torch.ones(2)),
    ):
        with pytest.raises(jaxtyping.TypeCheckError):
            wrong()


def test_results_are_checked():
    @checking.checked
    def wider(row: Float[Tensor, " units"]) -> Float[Tensor, " units"]:
        return row[None]

    with pytest.raises(jaxtyping.TypeCheckError):
        wider(torch.zeros(2))


def test_code_with_checks_is_not_kept_for_others():
    with pytest.raises(OSError, match="neither read from __pycache__ nor kept there"):
        sys.modules["noiser.engine.objectives"].__loader__.path_stats("")


def test_rows_of_a_mask_are_lists_of_booleans():
    mask = torch.tensor([[True, False], [False, False]])
    assert boolean_rows(mask) == [[True, False], [False, False]]
    assert type(boolean_rows(mask)[0][0]) is bool
    assert [true_indices(row) for row in mask] == [[0], []]


def test_a_norm_is_of_the_last_dimension():
    vectors = torch.tensor([[[3.0, 4.0], [0.0, -2.0]]])
    assert l2_norms(vectors).tolist() == [[5.0, 2.0]]


def test_a_linear_system_is_solved():
    matrix = torch.tensor([[2.0, 1.0], [0.0, 4.0]], dtype=torch.float64)
    right = torch.tensor([[4.0], [8.0]], dtype=torch.float64)
    assert solve(matrix, right).tolist() == [[1.0], [2.0]]


def test_a_unit_triangular_system_ignores_the_diagonal_and_what_is_above_it():
    # Read as [[1, 0], [-2, 1]].
    matrix = torch.tensor([[7.0, 9.0], [-2.0, 7.0]], dtype=torch.float64)
    right = torch.tensor([[3.0], [1.0]], dtype=torch.float64)
    assert solve_unit_triangular(matrix, right).tolist() == [[3.0], [7.0]]
