"""Benchmarks: rows, what is repeated and what is not, changed plans, deaths and full disks, and the
commands.
"""

import contextlib
import gzip
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bench_for_tests
import noiser
from bench_for_tests import PROMPTS, Fragile, by_key, check_same_numbers, plan_text, toml
from chat_server import ChatServer, Step, completion
from noiser.bench import Store, read_plan
from noiser.bench.executors import Inline, Processes
from noiser.bench.rows import RowKey
from noiser.bench.run import keys_sent, run_bench, status
from noiser.bench.store import FILE, locked, write_files
from noiser.cli import app
from noiser.errors import NoiserError, PlanError, RunError, StoredFileError
from soak import times
from tiny import tiny_model

pytestmark = pytest.mark.usefixtures("unchecked_module")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The last digits depend on it, and some of these runs are in other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "p.toml").write_text(plan_text(models), encoding="utf-8")
    run_bench(folder / "p.toml", folder / "out", workers=0)
    return folder / "out"


@pytest.fixture
def copied(whole, tmp_path):
    """The same run where `run_plan` goes on with it, and a test may change it."""
    return Path(shutil.copytree(whole, tmp_path / "out"))


def forget(folder, where):
    """The number of rows, now deleted."""
    with sqlite3.connect(folder / FILE) as database:
        return database.execute(f"DELETE FROM rows WHERE {where}").rowcount


def test_rows_are_the_stored_ones(whole):
    """Golden numbers, for every row that the plan asks for."""
    key = itemgetter(
        "model",
        "data",
        "method",
        "metric",
        "index",
        "units",
        "targets",
        "seed",
        "example",
        "category",
    )
    found = sorted(by_key(whole).values(), key=key)
    expected = sorted(
        json.loads((Path(__file__).parent / "golden" / "rows.json").read_text("utf-8")), key=key
    )
    for one, other in zip(found, expected, strict=True):
        work = [
            {name: row["values"].pop(name, 0) for name in ("token_forwards", "passes")}
            for row in (one, other)
        ]
        assert work[0]["token_forwards"] <= work[1]["token_forwards"], key(one)
        assert (key(one), one["error"] is None) == (key(other), other["error"] is None)
        assert one["values"] == pytest.approx(other["values"], rel=1e-5, abs=1e-5), key(one)
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-5, abs=1e-5), key(
            one
        )


def test_attributions_are_stored_and_their_facts_are_rows(whole, models):
    lm = noiser.load_model(models / "gemma3", dtype="float32", device="cpu")
    found = Store(whole).attributions("gemma3", "own", "noiser")
    assert [*found] == [f"own-{index}" for index in range(6)]
    again = noiser.attribute(
        lm,
        PROMPTS[4],
        method=noiser.Noiser(samples=2, steps=3, bounding="k_max"),
        seed=7,
        unit="token",
    )
    torch.testing.assert_close(found["own-4"].scores, again.scores, atol=1e-6, rtol=0)
    facts = by_key(whole)["gemma3", "own", "noiser", "attribution", "own-4"]["values"]
    assert (facts["token_forwards"], facts["rank"]) == (
        again.info["token_forwards"],
        again.targets[0].rank,
    )


def test_what_fails_is_a_row_without_text_and_the_others_go_on(whole, run_plan, models, tmp_path):
    rows, key = by_key(whole), RowKey("llama", "long", "occlusion", "localisation", "long-0")
    assert (rows[key]["error"], rows[key]["values"], rows[key]["targets"]) == (
        "ParameterError",
        {},
        3,
    )
    assert "names no spans" in Store(whole).text(key)["error"]
    text = plan_text(
        models, "llama", prompts=[PROMPTS[0], "The secret word is swordfish. " * 60], limit=2
    )
    outcome = run_plan(text)
    assert outcome.errors == 8 + 2 * 3  # the long prompt's rows, and localisation without spans
    rows = by_key(tmp_path / "out")
    for metric in ("attribution", "soft_scores", "mass_matched"):
        row = rows["llama", "own", "noiser", metric, "own-1"]
        assert (row["error"], row["units"], row["targets"], row["probability"]) == (
            "PromptError",
            0,
            0,
            None,
        )
        assert rows["llama", "own", "noiser", metric, "own-0"]["error"] is None
    again = run_plan(text, retry_errors=True)
    assert (again.rows, again.errors) == (outcome.errors, outcome.errors)


def removal(models, count, *metrics, block=4):
    """A plan of a model, some prompts and these metrics."""
    named = {
        "name": "removal",
        "seed": 3,
        "block": block,
        "data": [{"prompts": PROMPTS[:count]}],
        "metrics": metrics,
    }
    model = {"name": f"{models}/llama", "dtype": "float32"}
    methods = [{"name": "occlusion", "unit": "token"}]
    return toml(named | {"models": [model], "methods": methods})


def test_settings_reach_metrics_and_judged_words_stay_out_of_rows(tmp_path, run_plan, models):
    settings = {"lds": {"masks": 6, "removal": "delete"}, "top_k": {"k": [2], "removal": "mean"}}
    metrics = settings | {"answerability": {"judge": "local"}}
    assert (
        run_plan(
            removal(models, 2, *({"name": name} | asked for name, asked in metrics.items()))
        ).errors
        == 0
    )
    lm = noiser.load_model(models / "llama", dtype="float32", device="cpu")
    rows = by_key(tmp_path / "out")
    for metric, column in (("lds", "lds"), ("top_k", "drop@2")):
        for record in noiser.evaluate(
            lm, PROMPTS[:2], "occlusion", metric, seed=3, **{"unit": "token"} | settings[metric]
        ).records:
            values = rows["llama", "own", "occlusion", metric, f"own-{record['index']}"]["values"]
            assert column in values
            assert values == pytest.approx({name: record[name] for name in values}, abs=1e-5)
    key = RowKey("llama", "own", "occlusion", "answerability", "own-0")
    assert rows[key]["values"]["answerability_status"] in ("correct", "wrong", "unscored")
    assert [name for name, value in rows[key]["values"].items() if isinstance(value, str)] == [
        "answerability_status"
    ]
    assert "answerability_words" in Store(tmp_path / "out").text(key)


def test_nothing_is_done_twice_and_what_is_missing_comes_out_the_same(copied, run_plan, whole):
    assert run_plan().rows == 0
    gone = forget(
        copied,
        "model = 'llama' AND (metric = 'soft_scores' AND method = 'noiser' OR example = 'own-1')",
    )
    assert run_plan().rows == gone
    check_same_numbers(copied, whole)


def test_a_plan_may_grow(tmp_path, run_plan, models, whole):
    small = plan_text(models, "llama", prompts=PROMPTS[:5], limit=3)
    first = run_plan(small.replace('name = "occlusion"', 'name = "occlusion", limit = 1'))
    assert first.rows + run_plan(plan_text(models, "llama")).rows == 57
    check_same_numbers(tmp_path / "out", whole)  # also blocks that were begun


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed = 3", "seed = 4", "seed was 3 and is 4"),
        ("samples = 2", "samples = 3", "methods, 'noiser', parameters: samples was 2 and is 3"),
        ("masks = 2", "masks = 4", "metrics, 'soft_scores', masks was 2 and is 4"),
        ('"   x"', '"   y"', "data, 'long', prompts was"),
        (
            '"random", limit = { own = 3 }',
            '"random", label = "chance"',
            "methods, 'random' is no longer",
        ),
    ],
)
def test_a_plan_may_not_change_what_is_stored(copied, run_plan, models, whole, old, new, said):
    text = plan_text(models).replace('methods = ["noiser", "random"]', "")
    assert old in text
    with pytest.raises(PlanError, match=re.escape(said)) as refused:
        run_plan(text.replace(old, new))
    assert "start another folder" in str(refused.value)
    assert by_key(copied) == by_key(whole)


def other_weights(folder):
    tiny_model("llama", seed=1).save_pretrained(folder)


def other_configuration(folder):
    text = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(
        text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    )


@pytest.mark.parametrize("change", [other_weights, other_configuration])
def test_another_model_under_the_same_name_is_refused(tmp_path, run_plan, models, change):
    text = plan_text(Path(shutil.copytree(models, tmp_path / "copies")), "llama", limit=1)
    run_plan(text)
    change(tmp_path / "copies" / "llama")
    forget(tmp_path / "out", "model = 'llama' AND example = 'own-0'")
    with pytest.raises(
        StoredFileError, match="'llama' is not the one that the stored rows are about"
    ):
        run_plan(text)


@pytest.fixture
def judged(monkeypatch, tmp_path, models):
    """Makes a plan whose one metric asks a judge at a server; a block is one prompt."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))
    judge = {"name": "answerability", "judge": "openai:m"}

    def plan(server, count):
        args = {"judge_args": {"base_url": server.url, "max_retries": 1}}
        return removal(models, count, judge | args, block=1)

    return plan


def test_a_judge_that_cannot_work_ends_the_run_and_what_is_finished_is_kept(
    tmp_path, run_plan, judged
):
    refusing = ChatServer(lambda *_: Step(401, {}) if refusing.total > 2 else None)
    with refusing as server, pytest.raises(RunError, match=r"cannot work: .*401"):
        run_plan(judged(server, 6))
    assert 0 < len(by_key(tmp_path / "out")) < 12


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("number", range(times(2, 20)))
def test_a_judge_that_fails_leaves_a_run_that_goes_on(tmp_path, run_plan, judged, number):
    chance, nothing = random.Random(number), Step(body={"choices": []})
    faults = [Step(503, {}), Step(429, {}), nothing, Step(body=completion("")), Step(400, {}), None]
    with ChatServer(lambda *_: chance.choice(faults)) as server:
        with contextlib.suppress(RunError):
            run_plan(judged(server, 1))
        server.script = lambda *_: None
        run_plan(judged(server, 1), retry_errors=True)
    assert not any(row["error"] for row in by_key(tmp_path / "out").values())


@pytest.mark.soak
@pytest.mark.parametrize(
    "room", [100_000, *(random.Random(i).randrange(4_000, 500_000) for i in range(times(0, 24)))]
)
def test_a_full_disk_is_one_clear_error_and_harms_nothing(tmp_path, run_plan, models, whole, room):
    text, limits, said = plan_text(models, "llama"), resource.getrlimit(resource.RLIMIT_FSIZE), ""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        run_plan(text)
    except RunError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not said or re.search(
        r"bench\.sqlite: .*What is stored is whole; .*the same command goes on", said
    )
    if room == 100_000:
        stored, expected = by_key(tmp_path / "out"), by_key(whole)
        assert (bool(said), 0 < len(stored) < 57) == (True, True)
        assert stored == {key: expected[key] for key in stored}
    run_plan(text)
    check_same_numbers(tmp_path / "out", whole)


def test_folders_that_cannot_be_used(tmp_path, run_plan, copied):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="Cannot write"):
        run_plan(folder="file/out")
    with locked(copied), pytest.raises(RunError, match="Another run is at work"):
        run_plan()
    (copied / FILE).write_bytes(b"not a database" * 100)
    for folder, said in ((tmp_path, "There is no benchmark"), (copied, "is damaged")):
        with pytest.raises(StoredFileError, match=said):
            Store(folder)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("number", range(times(1, 10)))
def test_five_kills_lose_and_repeat_nothing(tmp_path, models, whole, number):
    (tmp_path / "p.toml").write_text(plan_text(models), encoding="utf-8")
    arguments = [tmp_path / "p.toml", tmp_path / "out", "5", models / "llama", str(number)]
    command = [sys.executable, bench_for_tests.__file__, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_same_numbers(tmp_path / "out", whole)


@pytest.mark.slow
@pytest.mark.soak
def test_damaged_files_are_read_or_refused(tmp_path, models, copied):
    chance, pack = random.Random(0), tmp_path / "pack"
    Store(copied).pack(pack)
    (tmp_path / "p.toml").write_text(plan_text(models), encoding="utf-8")
    next(iter(Store(copied).attributions("llama", "own", "noiser").values())).save(
        tmp_path / "att.json"
    )
    readers = {tmp_path / "p.toml": read_plan, tmp_path / "att.json": noiser.Attribution.load}
    for path in (copied / FILE, pack / "run.json", pack / "rows.jsonl.gz"):
        readers[path] = lambda path: status(path.parent)
    for path, read in readers.items():
        good = path.read_bytes()
        for _ in range(times(10, 200)):
            start = chance.randrange(len(good))
            stop = min(len(good), start + chance.randrange(1, 200))
            cuts = [b"", good[start:stop] * 2, chance.randbytes(stop - start), b"[" * 1000, b"null"]
            path.write_bytes(good[:start] + chance.choice(cuts) + good[stop:])
            with contextlib.suppress(NoiserError):
                read(path)
        path.write_bytes(good)


@pytest.mark.slow
def test_two_workers_one_of_which_is_killed(tmp_path, run_plan, whole, monkeypatch):
    """Processes of a real run are killed from outside; the run goes on with new ones."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    killed = []

    def kills(done, total, job):
        if done > 30 and not killed:
            killed.append(multiprocessing.active_children()[0])
            os.kill(killed[0].pid, signal.SIGKILL)

    outcome = run_plan(workers=2, progress=kills)
    assert (outcome.rows, outcome.lost, len(killed)) == (114, (), 1)
    check_same_numbers(
        tmp_path / "out", whole
    )  # a new worker has nothing cached, so that its passes are others
    assert not multiprocessing.active_children()


def test_a_job_whose_workers_die_is_tried_three_times_and_the_others_go_on(tmp_path):
    deaths = {"a": 0, "b": 2, "c": 9, "d": 0, "e": 1}
    with contextlib.closing(Processes(Fragile, 2)) as executor:
        found = {
            job[0]: result
            for job, result in executor.run((name, str(tmp_path), n) for name, n in deaths.items())
        }
        assert re.search("died of it 3 times.*memory is short", str(found.pop("c")))
        assert found == {"a": "A", "b": "B", "d": "D", "e": "E"}


@pytest.mark.parametrize("number", [0, 2], ids=["the first", "a later one"])
def test_a_job_that_is_given_up(tmp_path, run_plan, models, monkeypatch, number):
    """The run ends where nothing is finished; else the job is named and the others go on."""

    class Losing(Inline):
        def run(self, jobs):
            for done, (job, result) in enumerate(super().run(jobs)):
                yield job, (RunError("workers died") if done == number else result)

    monkeypatch.setattr(noiser.bench.run, "Inline", Losing)
    if not number:
        with pytest.raises(RunError, match=r"^llama, own, noiser: workers died\.$"):
            run_plan(plan_text(models, "llama"))
    else:
        assert run_plan(plan_text(models, "llama")).lost == ("llama, own, random: workers died",)
    monkeypatch.undo()
    run_plan(plan_text(models, "llama"))
    assert len(by_key(tmp_path / "out")) == 57


PARENT = """
import sys, time
from bench_for_tests import Fragile
from noiser.bench.executors import Processes
if __name__ == "__main__":
    executor = Processes(Fragile, 1)
    print(list(executor.run([("a", sys.argv[1], 0)])), flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_workers_end_with_a_killed_parent(tmp_path):
    (tmp_path / "script.py").write_text(PARENT, encoding="utf-8")
    command, env = (
        [sys.executable, tmp_path / "script.py", tmp_path],
        {"PYTHONPATH": str(Path(__file__).parent)},
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | env
    ) as running:
        assert "'A'" in running.stdout.readline()
        running.send_signal(signal.SIGKILL)
        running.wait()
        started = time.monotonic()
        running.stdout.read()  # ends when the worker, which has the other end of it, is gone too
        assert time.monotonic() - started < 60


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_status_and_pack(tmp_path, whole):
    shown = bench("status", whole).output
    assert "tiny: complete, 114 rows" in shown
    assert "12 × ParameterError: " in shown
    packs = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        packed = bench("pack", whole, "-o", folder)
        assert packed.exit_code == 0, packed.output
        packs.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert packs[0] == packs[1]
    assert packs[0].keys() == {"plan.toml", "rows.jsonl.gz", "run.json"}
    one = Store(tmp_path / "one")
    assert list(one.rows()) == list(Store(whole).rows())
    assert one.plan.methods == Store(whole).plan.methods
    assert one.attributions("llama", "own", "noiser") == {}
    assert "complete" in bench("status", tmp_path / "one").output
    assert bench("status", tmp_path).exit_code == 2
    assert {"noiser", "torch", "transformers"} <= one.meta["versions"].keys()
    assert one.plan.models[0].name == "llama", "models are named by their last part"
    assert str(whole.parents[1]).encode() not in packs[0]["plan.toml"] + packs[0]["run.json"]


def test_a_run_goes_on_from_a_pack(tmp_path, run_plan, models, whole, monkeypatch):
    Store(whole).pack(tmp_path / "packed")
    monkeypatch.chdir(models)  # a pack has the models' names, not their places
    text = (tmp_path / "packed" / "plan.toml").read_text(encoding="utf-8")
    assert run_plan(text, "packed").rows == 0
    more = '[[metrics]]\nname = "erasure"\ndata = "own"\nmethods = "occlusion"\nmodels = "llama"\n'
    assert run_plan(text + more, "packed").rows == 6
    found = Store(tmp_path / "packed")
    assert len(list(found.rows())) == 120
    assert (
        len(found.attributions("llama", "own", "occlusion")) == 6
    )  # made again for the new metric
    assert found.attributions("llama", "own", "noiser") == {}


def test_a_damaged_pack(tmp_path, whole):
    Store(whole).pack(tmp_path)
    line = json.dumps(next(iter(Store(whole).rows()))._asdict()).encode() + b"\n"
    packed = [
        gzip.compress(content)
        for content in (line * 20_000, line[:-2] + b" " * 2_000_000, b"[" * 900_000)
    ]
    damages = [("rows.jsonl.gz", damage) for damage in (b"no gzip", *packed)]
    for name, damage in (*damages, ("run.json", b"[1]"), ("run.json", b'{"schema": 9}')):
        good = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(StoredFileError):
            Store(tmp_path)
        (tmp_path / name).write_bytes(good)


def test_a_store_of_another_schema_is_refused(copied):
    with sqlite3.connect(copied / FILE) as store:
        store.execute("PRAGMA user_version = 99")
    with pytest.raises(StoredFileError, match="has schema 99; this version of noiser reads"):
        Store(copied)


def test_links_do_not_lead_out_of_a_folder(tmp_path, copied, run_plan):
    elsewhere, report = tmp_path / "elsewhere", copied / "report"
    elsewhere.mkdir()
    report.mkdir()
    (elsewhere / "mine").write_text("mine", encoding="utf-8")
    (report / "figures").symlink_to(elsewhere)
    (report / "report.md").symlink_to(elsewhere / "mine")
    (copied / FILE).rename(elsewhere / FILE)
    (copied / FILE).symlink_to(elsewhere / FILE)
    writes = [
        lambda name=name: write_files(report, {name: b"ours"})
        for name in ("figures/a.svg", "report.md")
    ]
    for write in (*writes, run_plan):
        with pytest.raises(RunError, match="Remove the link"):
            write()
    assert {path.name for path in elsewhere.iterdir()} == {"mine", FILE}
    assert (elsewhere / "mine").read_text(encoding="utf-8") == "mine"


def test_the_command(tmp_path, models):
    plan, out = tmp_path / "p.toml", tmp_path / "out"
    plan.write_text(plan_text(models, "llama", limit=1), encoding="utf-8")
    assert "At most 26 rows" in bench("run", plan, "-o", out, "--dry-run").output
    assert not out.exists()
    done = bench("run", plan, "-o", out, "--workers", "0")
    assert (done.exit_code, "Stored 26 rows" in done.output) == (0, True), done.output


def test_code_and_keys_of_a_plan(tmp_path, run_plan, models):
    text, plan = plan_text(models), tmp_path / "plan.toml"
    for trusting in ("trust_remote_code = true", "engine_args = { trust_remote_code = true }"):
        with pytest.raises(PlanError, match="Add --trust-remote-code"):
            run_plan(text.replace('dtype = "float32"', trusting, 1))
    judged = '[[metrics]]\nname = "answerability"\njudge = "openai:m"\njudge_args = {{ {} }}\n'
    plan.write_text(
        text + judged.format('base_url = "https://x/v1", api_key_env = "MY_KEY"'), encoding="utf-8"
    )
    assert list(keys_sent(plan)) == ["The key in MY_KEY goes to https://x/v1."]
    plan.write_text(text + judged.format('api_key = "secret"'), encoding="utf-8")
    with pytest.raises(PlanError, match="OPENAI_API_KEY"):
        list(keys_sent(plan))
