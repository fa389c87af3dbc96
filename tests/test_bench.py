"""Benchmarks: rows, what is repeated and what is not, changed plans, deaths and full disks, and the commands."""

from __future__ import annotations

import contextlib
import gzip
import json
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

import noiser
from bench_for_tests import PROMPTS, Fragile, by_key, check_same_numbers, plan_text, save_models
from chat_server import ChatServer, Step, completion
from noiser.bench import Store, read_plan, run_bench
from noiser.bench.executors import Processes
from noiser.bench.run import status
from noiser.bench.store import FILE, Key, locked, write_files
from noiser.cli import app
from noiser.errors import NoiserError, PlanError, RunError, StoredFileError
from soak import times

pytestmark = pytest.mark.usefixtures("unchecked_module")


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def plan(tmp_path, models) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(models), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The last digits depend on it, and some of these runs are in other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "p.toml").write_text(plan_text(models), encoding="utf-8")
    run_bench(folder / "p.toml", folder / "out", workers=0)
    return folder / "out"


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def llama_only(text) -> str:
    return re.sub(r'\[\[models\]\]\nname = "[^"]*gemma3"\ndtype = "float32"\n', "", text)


def forget(folder, where) -> int:
    """The number of rows, now deleted."""
    with sqlite3.connect(folder / FILE) as database:
        return database.execute(f"DELETE FROM rows WHERE {where}").rowcount


def run_text(tmp_path, text, folder="out", **options):
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    return run_bench(tmp_path / "p.toml", tmp_path / folder, workers=0, **options)


# ---- what is stored --------------------------------------------------------------------------------------------------


def test_rows_are_the_stored_ones(whole):
    """Golden numbers, for every row that the plan asks for."""
    key = itemgetter("model", "data", "method", "metric", "index", "units", "targets", "seed", "example", "category")
    found = sorted(by_key(whole).values(), key=key)
    expected = sorted(json.loads((Path(__file__).parent / "golden" / "rows.json").read_text("utf-8")), key=key)
    for one, other in zip(found, expected, strict=True):
        work = [{name: row["values"].pop(name, 0) for name in ("token_forwards", "passes")} for row in (one, other)]
        assert work[0]["token_forwards"] <= work[1]["token_forwards"], key(one)
        assert (key(one), one["error"] is None) == (key(other), other["error"] is None)
        assert one["values"] == pytest.approx(other["values"], rel=1e-5, abs=1e-5), key(one)
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-5, abs=1e-5), key(one)


def test_attributions_are_stored_and_their_facts_are_rows(whole, models):
    lm = noiser.load_model(models / "gemma3", dtype="float32", device="cpu")
    found = Store(whole).attributions("gemma3", "own", "noiser")
    assert [*found] == [f"own-{index}" for index in range(6)]
    again = noiser.attribute(lm, PROMPTS[4], method=noiser.Noiser(samples=2, steps=3, bounding="k_max"), seed=7)
    torch.testing.assert_close(found["own-4"].scores, again.scores, atol=1e-6, rtol=0)
    facts = by_key(whole)["gemma3", "own", "noiser", "attribution", "own-4"]["values"]
    assert facts["token_forwards"] == again.info["token_forwards"]
    assert facts["rank"] == again.targets[0].rank


def test_what_fails_is_a_row_without_text_and_the_others_go_on(whole):
    rows, key = by_key(whole), Key("llama", "long", "occlusion", "localisation", "long-0")
    assert (rows[key]["error"], rows[key]["values"], rows[key]["targets"]) == ("ParameterError", {}, 3)
    assert "names no spans" in Store(whole).text(key)["error"]


def test_a_prompt_that_cannot_be_attributed(tmp_path, models):
    text = llama_only(plan_text(models, prompts=[PROMPTS[0], "The secret word is swordfish. " * 60], limit=2))
    outcome = run_text(tmp_path, text)
    assert outcome.errors == 8 + 2 * 3  # the long prompt's rows, and localisation without spans
    rows = by_key(tmp_path / "out")
    for metric in ("attribution", "soft_scores", "mass_matched"):
        row = rows["llama", "own", "noiser", metric, "own-1"]
        assert (row["error"], row["units"], row["targets"], row["probability"]) == ("PromptError", 0, 0, None)
        assert rows["llama", "own", "noiser", metric, "own-0"]["error"] is None
    again = run_text(tmp_path, text, retry_errors=True)
    assert (again.rows, again.errors) == (outcome.errors, outcome.errors)


REMOVAL = """
name = "removal"
seed = 3
[[models]]
name = "{models}/llama"
dtype = "float32"
[[data]]
prompts = {prompts}
[[methods]]
name = "occlusion"
[[metrics]]
name = "lds"
masks = 6
removal = "delete"
[[metrics]]
name = "top_k"
k = [2]
removal = "mean"
[[metrics]]
name = "answerability"
judge = "local"
"""


def test_settings_reach_metrics_and_judged_words_stay_out_of_rows(tmp_path, models):
    text = REMOVAL.format(models=models, prompts=json.dumps(PROMPTS[:2]))
    assert run_text(tmp_path, text).errors == 0
    lm = noiser.load_model(models / "llama", dtype="float32", device="cpu")
    lds = noiser.evaluate(lm, PROMPTS[:2], "occlusion", "lds", seed=3, masks=6, removal="delete")
    top = noiser.evaluate(lm, PROMPTS[:2], "occlusion", "top_k", seed=3, k=[2], removal="mean")
    rows = by_key(tmp_path / "out")
    for metric, column, found in (("lds", "lds", lds), ("top_k", "drop@2", top)):
        for record in found.records:
            values = rows["llama", "own", "occlusion", metric, f"own-{record['index']}"]["values"]
            assert column in values
            assert values == pytest.approx({name: record[name] for name in values}, abs=1e-5)
    key = Key("llama", "own", "occlusion", "answerability", "own-0")
    assert rows[key]["values"]["answerability_status"] in ("correct", "wrong", "unscored")
    assert [name for name, value in rows[key]["values"].items() if isinstance(value, str)] == ["answerability_status"]
    assert "answerability_words" in Store(tmp_path / "out").text(key)


# ---- again, and again with changes -----------------------------------------------------------------------------------


def test_nothing_is_done_twice_and_what_is_missing_comes_out_the_same(copied, plan, whole):
    assert run_bench(plan, copied, workers=0).rows == 0
    gone = forget(copied, "model = 'llama' AND (metric = 'soft_scores' AND method = 'noiser' OR example = 'own-1')")
    assert run_bench(plan, copied, workers=0).rows == gone
    check_same_numbers(copied, whole)


def test_a_plan_may_grow(tmp_path, models, whole):
    small = llama_only(plan_text(models, prompts=PROMPTS[:5], limit=3))
    first = run_text(tmp_path, small.replace('name = "occlusion"', 'name = "occlusion"\nlimit = 1'))
    more = run_text(tmp_path, llama_only(plan_text(models)))
    assert first.rows + more.rows == 57
    check_same_numbers(tmp_path / "out", whole)  # also blocks that were begun


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed = 3", "seed = 4", "seed was 3 and is 4"),
        ("samples = 2", "samples = 3", "methods, 'noiser', parameters: samples was 2 and is 3"),
        ("masks = 2", "masks = 4", "metrics, 'soft_scores', masks was 2 and is 4"),
        ('"   x"', '"   y"', "data, 'long', prompts was"),
        ('name = "random"\nlimit = { own = 3 }', 'name = "random"\nlabel = "chance"', "methods, 'random' is no longer"),
    ],
)
def test_a_plan_may_not_change_what_is_stored(plan, whole, old, new, said):
    before = by_key(whole)
    text = plan.read_text(encoding="utf-8").replace('methods = ["noiser", "random"]', "")
    assert old in text
    plan.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(PlanError) as refused:
        run_bench(plan, whole, workers=0)
    assert said in str(refused.value)
    assert "start another folder" in str(refused.value)
    assert by_key(whole) == before


def other_weights(folder):
    lm = noiser.load_model(folder, dtype="float32", device="cpu")
    with torch.no_grad():
        lm.model.model.norm.weight.mul_(1.5)
    lm.model.save_pretrained(folder)


def other_configuration(folder):
    path = folder / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


@pytest.mark.parametrize("change", [other_weights, other_configuration])
def test_another_model_under_the_same_name_is_refused(tmp_path, models, change):
    copy = Path(shutil.copytree(models, tmp_path / "copies"))
    text = llama_only(plan_text(copy, limit=1))
    run_text(tmp_path, text)
    change(copy / "llama")
    forget(tmp_path / "out", "model = 'llama' AND example = 'own-0'")
    with pytest.raises(StoredFileError, match="'llama' is not the one that the stored rows are about"):
        run_text(tmp_path, text)


def judged_by(server, models, prompts):
    """A plan whose one metric asks a judge there; a block is one prompt."""
    text = REMOVAL.format(models=models, prompts=json.dumps(PROMPTS[:prompts]))
    text = "block = 1\n" + text[: text.index("[[metrics]]")] + text[text.rindex("[[metrics]]") :]
    return text.replace('"local"', f'"openai:m"\njudge_args = {{ base_url = "{server.url}", max_retries = 1 }}')


@pytest.fixture
def judge_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))


def test_a_judge_that_cannot_work_ends_the_run_and_what_is_finished_is_kept(tmp_path, models, judge_cache):
    refusing = ChatServer(lambda *_: Step(401, {}) if refusing.total > 2 else None)
    with refusing as server, pytest.raises(RunError, match=r"cannot work: .*401"):
        run_text(tmp_path, judged_by(server, models, prompts=6))
    assert 0 < len(by_key(tmp_path / "out")) < 12


# ---- a disk and a machine that fail ----------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("room", [100_000, *(random.Random(i).randrange(4_000, 500_000) for i in range(times(0, 24)))])
def test_a_full_disk_is_one_clear_error_and_harms_nothing(tmp_path, plan, whole, room):
    plan.write_text(llama_only(plan.read_text(encoding="utf-8")), encoding="utf-8")
    limits, said = resource.getrlimit(resource.RLIMIT_FSIZE), ""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        run_bench(plan, tmp_path / "out", workers=0)
    except RunError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not said or re.search(r"bench\.sqlite: .*What is stored is whole; .*the same command goes on", said)
    expected = {key: row for key, row in by_key(whole).items() if key[0] == "llama"}
    if room == 100_000:
        stored = by_key(tmp_path / "out")
        assert (bool(said), 0 < len(stored) < 57) == (True, True)
        assert stored == {key: expected[key] for key in stored}
    run_bench(plan, tmp_path / "out", workers=0)
    check_same_numbers(tmp_path / "out", whole)


def test_folders_that_cannot_be_used(tmp_path, plan, copied):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="Cannot write"):
        run_bench(plan, tmp_path / "file" / "out", workers=0)
    with locked(copied), pytest.raises(RunError, match="Another run is at work"):
        run_bench(plan, copied, workers=0)
    with pytest.raises(StoredFileError, match="There is no benchmark"):
        Store(tmp_path)
    (copied / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(StoredFileError, match="is damaged"):
        Store(copied)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("number", range(times(1, 10)))
def test_five_kills_lose_and_repeat_nothing(tmp_path, models, plan, whole, number):
    script = Path(__file__).parent / "bench_for_tests.py"
    arguments = [sys.executable, script, plan, tmp_path / "out", "5", models / "llama", str(number)]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_same_numbers(tmp_path / "out", whole)


@pytest.mark.slow
@pytest.mark.soak
def test_damaged_files_are_read_or_refused(tmp_path, plan, copied):
    chance = random.Random(0)
    Store(copied).pack(tmp_path / "pack")
    next(iter(Store(copied).attributions("llama", "own", "noiser").values())).save(tmp_path / "att.json")
    readers = {plan: read_plan, tmp_path / "att.json": noiser.Attribution.load}
    for path in (copied / FILE, tmp_path / "pack" / "run.json", tmp_path / "pack" / "rows.jsonl.gz"):
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
@pytest.mark.soak
@pytest.mark.parametrize("number", range(times(2, 20)))
def test_a_judge_that_fails_leaves_a_run_that_goes_on(tmp_path, models, judge_cache, number):
    chance, nothing = random.Random(number), Step(body={"choices": []})
    faults = [Step(503, {}), Step(429, {}), nothing, Step(body=completion("")), Step(400, {}), None]
    with ChatServer(lambda *_: chance.choice(faults)) as server:
        text = judged_by(server, models, prompts=1)
        with contextlib.suppress(RunError):
            run_text(tmp_path, text)
        server.script = lambda *_: None
        run_text(tmp_path, text, retry_errors=True)
    assert not any(row["error"] for row in by_key(tmp_path / "out").values())


@pytest.mark.slow
def test_two_workers_one_of_which_is_killed(tmp_path, plan, whole, monkeypatch):
    """Processes of a real run are killed from outside; the run goes on with new ones."""
    import multiprocessing

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    killed = []

    def kills(done, total, job):
        if done > 30 and not killed:
            killed.append(multiprocessing.active_children()[0])
            os.kill(killed[0].pid, signal.SIGKILL)

    outcome = run_bench(plan, tmp_path / "out", workers=2, progress=kills)
    assert (outcome.rows, outcome.lost) == (114, ())
    assert killed
    check_same_numbers(tmp_path / "out", whole)  # a new worker has nothing cached, so that its passes are others
    assert not multiprocessing.active_children()


def test_a_job_whose_workers_die_is_tried_three_times_and_the_others_go_on(tmp_path):
    deaths = {"a": 0, "b": 2, "c": 9, "d": 0, "e": 1}
    executor = Processes(Fragile, 2)
    try:
        found = {job[0]: result for job, result in executor.run((name, str(tmp_path), n) for name, n in deaths.items())}
        assert isinstance(found.pop("c"), RunError)
        assert found == {"a": "A", "b": "B", "d": "D", "e": "E"}
        with pytest.raises(RunError, match="memory is short"):
            list(executor.run([("f", str(tmp_path), 9)]))
    finally:
        executor.close()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_workers_end_with_a_killed_parent(tmp_path):
    code = (
        "import time; from functools import partial; from noiser.bench.executors import Processes\n"
        "from bench_for_tests import Fragile\n"
        "if __name__ == '__main__':\n"
        f"    executor = Processes(Fragile, 1); print(list(executor.run([('a', {str(tmp_path)!r}, 0)])), flush=True)\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    command, env = [sys.executable, tmp_path / "script.py"], {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as running:
        assert "'A'" in running.stdout.readline()
        running.send_signal(signal.SIGKILL)
        running.wait()
        started = time.monotonic()
        running.stdout.read()  # ends when the worker, which has the other end of it, is gone too
        assert time.monotonic() - started < 60


# ---- commands and packs ----------------------------------------------------------------------------------------------


def test_status_and_pack(tmp_path, whole):
    run = CliRunner().invoke
    shown = run(app, ["bench", "status", str(whole)])
    assert "tiny: complete, 114 rows" in shown.output
    assert "12 × ParameterError: " in shown.output
    for folder in ("one", "two"):
        packed = run(app, ["bench", "pack", str(whole), "-o", str(tmp_path / folder)])
        assert packed.exit_code == 0, packed.output
    one = Store(tmp_path / "one")
    assert list(one.rows()) == list(Store(whole).rows())
    assert one.plan.methods == Store(whole).plan.methods
    assert one.attributions("llama", "own", "noiser") == {}
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("one", "two")]
    assert files[0] == files[1] == ["plan.toml", "rows.jsonl.gz", "run.json"]
    for name in files[0]:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert "complete" in run(app, ["bench", "status", str(tmp_path / "one")]).output
    assert run(app, ["bench", "status", str(tmp_path)]).exit_code == 2
    assert {"noiser", "torch", "transformers"} <= one.meta["versions"].keys()
    texts = [(tmp_path / "one" / name).read_text(encoding="utf-8") for name in ("plan.toml", "run.json")]
    assert not any(str(whole.parents[1]) in text for text in texts), "models are named by their last part"
    assert one.plan.models[0].name == "llama"


def test_a_run_goes_on_from_a_pack(tmp_path, models, copied, monkeypatch):
    Store(copied).pack(tmp_path / "packed")
    monkeypatch.chdir(models)  # a pack has the models' names, not their places
    text = (tmp_path / "packed" / "plan.toml").read_text(encoding="utf-8")
    assert run_text(tmp_path, text, "packed").rows == 0
    more = '[[metrics]]\nname = "erasure"\ndata = "own"\nmethods = "occlusion"\nmodels = "llama"\n'
    assert run_text(tmp_path, text + more, "packed").rows == 6
    found = Store(tmp_path / "packed")
    assert len(list(found.rows())) == 120
    assert len(found.attributions("llama", "own", "occlusion")) == 6  # made again for the new metric
    assert found.attributions("llama", "own", "noiser") == {}


def test_a_damaged_pack(tmp_path, whole):
    Store(whole).pack(tmp_path)
    line = json.dumps(next(iter(Store(whole).rows()))._asdict()).encode() + b"\n"
    packed = [gzip.compress(content) for content in (line * 20_000, line[:-2] + b" " * 2_000_000, b"[" * 900_000)]
    damages = [("rows.jsonl.gz", damage) for damage in (b"no gzip", *packed)]
    for name, damage in (*damages, ("run.json", b"[1]"), ("run.json", b'{"schema": 9}')):
        good = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(StoredFileError):
            Store(tmp_path)
        (tmp_path / name).write_bytes(good)


def test_links_do_not_lead_out_of_a_folder(tmp_path, copied, plan):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine", encoding="utf-8")
    (copied / "report").mkdir()
    (copied / "report" / "figures").symlink_to(elsewhere)
    (copied / "report" / "report.md").symlink_to(elsewhere / "mine")
    for names in (["figures/a.svg"], ["report.md"]):
        with pytest.raises(RunError, match="Remove the link"):
            write_files(copied / "report", dict.fromkeys(names, b"ours"))
    (copied / FILE).rename(elsewhere / FILE)
    (copied / FILE).symlink_to(elsewhere / FILE)
    with pytest.raises(RunError, match="Remove the link"):
        run_bench(plan, copied, workers=0)
    assert {path.name for path in elsewhere.iterdir()} == {"mine", FILE}
    assert (elsewhere / "mine").read_text(encoding="utf-8") == "mine"


def test_the_command(tmp_path, models):
    run, plan = CliRunner().invoke, tmp_path / "p.toml"
    plan.write_text(llama_only(plan_text(models, limit=1)), encoding="utf-8")
    said = run(app, ["bench", "run", str(plan), "-o", str(tmp_path / "out"), "--dry-run"])
    assert "At most 26 rows" in said.output
    assert not (tmp_path / "out").exists()
    done = run(app, ["bench", "run", str(plan), "-o", str(tmp_path / "out"), "--workers", "0"])
    assert done.exit_code == 0, done.output
    assert "Stored 26 rows" in done.output


def test_code_and_keys_of_a_plan(tmp_path, plan):
    from noiser.bench.run import keys_sent

    text = plan.read_text(encoding="utf-8")
    for trusting in ("trust_remote_code = true", "engine_args = { trust_remote_code = true }"):
        plan.write_text(text.replace('dtype = "float32"', trusting, 1), encoding="utf-8")
        with pytest.raises(PlanError, match="Add --trust-remote-code"):
            run_bench(plan, tmp_path / "out", workers=0)
    judged = '[[metrics]]\nname = "answerability"\njudge = "openai:m"\njudge_args = {{ {} }}\n'
    plan.write_text(text + judged.format('base_url = "https://x/v1", api_key_env = "MY_KEY"'), encoding="utf-8")
    assert list(keys_sent(plan)) == ["The key in MY_KEY goes to https://x/v1."]
    plan.write_text(text + judged.format('api_key = "secret"'), encoding="utf-8")
    with pytest.raises(PlanError, match="OPENAI_API_KEY"):
        list(keys_sent(plan))
