"""Attack and bad luck, by chance: hostile files, prompts and judges, clocks that jump. `scripts/soak` runs all of it.

The normal tests run a small share; docs/reliability.md has the figures of a whole run.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

import noiser
from bench_for_tests import PROMPTS, Heard, contents, plan_text, save_models
from gguf_for_tests import write_gguf
from noiser.bench import Store, run_bench
from noiser.bench.pack import pack
from noiser.bench.plan import read_plan
from noiser.bench.progress import status
from noiser.errors import NoiserError
from noiser.model.conversion import read_head
from soak_for_tests import damaged, hostile_json, share, tell
from test_attribution_store import rich_example
from test_inseq_format import SCORES, content
from tiny import tiny, tiny_model, tiny_tokenizer

SECONDS = 5.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A plan that ran without being disturbed: plan.toml, and the folder `out`."""
    folder = tmp_path_factory.mktemp("soak")
    (folder / "plan.toml").write_text(plan_text(save_models(folder)), encoding="utf-8")
    run_bench(folder / "plan.toml", folder / "out", Heard(), workers=0)
    return folder


# ---- hostile files ---------------------------------------------------------------------------------------------------


def show_attribution(path):
    att = noiser.Attribution.load(path)
    assert "\x1b" not in str(att) + repr(att) + att.to_html()
    att.save(path)


def show_evaluation(path):
    evaluation = noiser.Evaluation.load(path)
    assert "\x1b" not in str(evaluation) + repr(evaluation.rows.shape)
    evaluation.save(path)


def show_inseq(path):
    att = noiser.Attribution.from_inseq(path)
    assert "\x1b" not in str(att) + att.to_html()


def use_folder(path):
    """All that is done with a benchmark's folder: it is shown, packed and gone on with."""
    folder = next(parent for parent in path.parents if (parent / "plan.toml").exists())
    assert "\x1b" not in str(status(folder))
    list(Store(folder).rows())
    list(Store(folder).costs())
    pack(folder, folder.parent / "packed")
    run_bench(folder.parent / "plan.toml", folder, Heard(), workers=0)


def good_files(whole: Path, folder: Path) -> dict[str, bytes]:
    rich_example().save(folder / "attribution")
    noiser.evaluate(tiny("llama"), PROMPTS[:3], metrics="soft_scores", masks=1, method="occlusion").save(folder / "e")
    write_gguf(folder / "gguf", tiny_model("llama").eval(), tiny_tokenizer(bos=False))
    return {
        "saved attributions": (folder / "attribution").read_bytes(),
        "saved evaluations": (folder / "e").read_bytes(),
        "Inseq's files": json.dumps(content(SCORES)).encode(),
        "GGUF heads": (folder / "gguf").read_bytes(),
        "plans": (whole / "plan.toml").read_bytes(),
        **{
            name: (whole / "out" / name).read_bytes()
            for name in ("run.json", ROWS, ROWS.replace("rows", "attributions").replace("soft_scores/", ""), SELECTION)
        },
    }


ROWS = "rows/llama/own/occlusion/soft_scores/00000.jsonl"
SELECTION = "selections/llama/own.json"
READERS = {
    "saved attributions": show_attribution,
    "saved evaluations": show_evaluation,
    "Inseq's files": show_inseq,
    "GGUF heads": read_head,
    "plans": read_plan,
}


def hostile(name: str, good: bytes, count: int):
    draw = random.Random(1)
    if name == "GGUF heads":  # the first 20,000 bytes of the file: all that comes before the weights
        return (damaged(good[:20_000], draw) + good[20_000:] for _ in range(count))
    if name == "plans":
        return (damaged(good, draw) for _ in range(count))
    return hostile_json(good, count, lines=name.endswith("jsonl"))


@pytest.mark.filterwarnings("ignore")
def test_hostile_files_are_refused_or_can_be_used(tmp_path, whole):
    """Nothing but a NoiserError, and within seconds."""
    problems = dict[str, Exception]()
    for name, good in good_files(whole, tmp_path).items():
        outcomes, longest, count = Counter(), 0.0, share(200, least=4)
        for number, bad in enumerate(hostile(name, good, count)):
            if name in READERS:
                path, use = tmp_path / "hostile", READERS[name]
            else:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
                shutil.copytree(whole / "out", tmp_path / "run/out")
                shutil.copy(whole / "plan.toml", tmp_path / "run")
                path, use = tmp_path / "run/out" / name, use_folder
            path.write_bytes(bad)
            began = time.process_time()
            try:
                use(path)
                outcomes["loaded"] += 1
            except NoiserError as error:
                assert str(error)
                outcomes[type(error).__name__] += 1
            except Exception as error:
                problems[f"{name}, file {number}: {error!r:.200}"] = error
                outcomes["a traceback"] += 1
            longest = max(longest, time.process_time() - began)
        assert longest < SECONDS
        tell("hostile files", f"{name}: {count}, {dict(outcomes)}, at most {longest:.2f} s")
    if problems:
        raise ExceptionGroup("\n".join(problems), [*problems.values()])
