"""Folders of runs that others made: damaged or hostile ones are refused in one sentence, and none
is without end.
"""

import json
import os
import shutil
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noiser.bench import Row, Store
from noiser.bench.run import status
from noiser.bench.store import FILE, RUN
from noiser.errors import NoiserError, StoredFileError
from noiser.report import cells, tables
from report_for_tests import made, plan, write_folder
from saved_for_tests import ODD, changed, places
from soak import times

COLUMNS = Row._fields
CELLS = (
    None,
    -1,
    10**18,
    1e308,
    float("inf"),
    "",
    "x",
    b"\xff",
    "[]",
    "{}",
    "5",
    "null",
    '{"soft_ns": []}',
    '{"soft_ns": "x"}',
    '{"soft_ns": {"a": 1}}',
    "NaN",
    '{"soft_ns": NaN}',
    '{"soft_ns": true}',
    "[" * 100_000,
    "9" * 5000,
    "\x1b[2J<b>",
)
FACTS = ("plan", "selections", "models", "versions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two methods on seven prompts, one of which failed."""
    store = made(plan(), 7)
    return write_folder(tmp_path_factory.mktemp("hostile") / "run", store).path


@pytest.fixture(scope="module")
def copy(folder, tmp_path_factory):
    """A function that makes a fresh copy of the run and changes it by a statement of SQL."""
    place = tmp_path_factory.mktemp("copies") / "run"

    def change(statement, values=()):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        with sqlite3.connect(place / FILE) as database:
            if values:
                database.execute(statement, values)
            else:
                database.executescript(statement)
        database.close()
        return place

    return change


def use(place):
    """Everything that reads a run's folder; errors of the library's own are answers."""
    refusals: list[str] = []
    for read in (status, report, pack):
        try:
            read(place)
        except NoiserError as error:
            refusals.append(str(error))
    assert not any("\n" in refusal for refusal in refusals)


def report(place):
    store = Store(place)
    tables(store, cells(store))


def pack(place):
    Store(place).pack(place / "packed")


@settings(max_examples=times(30, 500))
@given(column=st.sampled_from(COLUMNS), odd=st.sampled_from(CELLS), all_rows=st.booleans())
def test_a_changed_cell(copy, column, odd, all_rows):
    where = "" if all_rows else " WHERE example = 'known-0'"
    use(copy(f'UPDATE OR IGNORE rows SET "{column}" = ?{where}', (odd,)))


@settings(max_examples=times(40, 1000))
@given(st.data())
def test_a_changed_fact(folder, copy, data):
    meta = dict(Store(folder).meta)
    fact = data.draw(st.sampled_from([name for name in FACTS if name in meta]))
    path = data.draw(st.sampled_from([*places(meta[fact])]))
    odd = changed(meta[fact], path, data.draw(st.sampled_from(ODD)))
    use(copy("UPDATE meta SET value = ? WHERE name = ?", (json.dumps(odd), fact)))


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
SCHEMAS = {
    "a view as rows": "ALTER TABLE rows RENAME TO r; CREATE VIEW rows AS SELECT * FROM r;",
    "a view without end": f"DROP TABLE rows; CREATE VIEW rows AS {ENDLESS};",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END;",
    "a table more": "CREATE TABLE more (a);",
    "an index": "CREATE INDEX i ON rows (error);",
    "a virtual table": "DROP TABLE texts; CREATE VIRTUAL TABLE texts USING fts5(value);",
    "a computed column": "DROP TABLE meta; CREATE TABLE meta (name, value AS (name));",
    "other columns": "DROP TABLE rows; CREATE TABLE rows (a, b);",
    "no texts": "DROP TABLE texts;",
    "another version": "PRAGMA user_version = 9;",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_tables_that_no_run_makes_are_refused(copy, name):
    place = copy(SCHEMAS[name])
    with pytest.raises(StoredFileError):
        Store(place)


def test_a_pipe_in_place_of_a_file_is_refused(folder, tmp_path):
    Store(folder).pack(tmp_path)
    (tmp_path / RUN).unlink()
    os.mkfifo(tmp_path / RUN)
    with pytest.raises(StoredFileError, match="is not a file"):
        Store(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    os.mkfifo(other / FILE)
    for create in (False, True):
        with pytest.raises(StoredFileError, match="is not a file"):
            Store(other, create=create)


def test_a_query_has_a_time_limit(folder, monkeypatch):
    store = Store(folder)
    monkeypatch.setattr("noiser.bench.store.QUERY_SECONDS", 0)
    with pytest.raises(StoredFileError, match="took longer than 0 s"):
        store._select(ENDLESS)
    monkeypatch.undo()
    assert list(store.rows())


def test_status_counts_what_the_rows_are(folder):
    store = Store(folder)
    limits = store.plan.limits()
    for kind in store.kinds():
        for limit in (None, 3):
            rows = [row for row in store.rows(kind) if limit is None or row.index < limit]
            failed = [row for row in rows if row.error]
            counts = store.counts(kind, limit)
            seconds = sum(row.seconds or 0 for row in rows)
            assert counts == (len(rows), len(failed), pytest.approx(seconds))
            expected = [(failed[0].error, len(failed), failed[0].example)] if failed else []
            assert store.errors(kind, limit) == expected
    assert {*store.kinds()} == {*limits}
