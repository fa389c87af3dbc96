"""Attack and bad luck, by chance: hostile files, prompts and judges, clocks that jump. `scripts/soak` runs all of it.

The normal tests run a small share; docs/reliability.md has the figures of a whole run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import noiser
from app_for_tests import Visitors, served
from bench_for_tests import PROMPTS, Heard, check_same_numbers, plan_text, save_models, stored
from noiser.app.handlers import Answer, result_html
from noiser.app.question import Question
from noiser.bench import Store, run_bench
from noiser.bench.pack import pack
from noiser.bench.plan import read_plan
from noiser.bench.progress import status
from noiser.errors import NoiserError
from noiser.report.heatmaps import heatmaps, own_attributions
from noiser.report.rows import Results
from noiser.text import encode, make_units
from soak_for_tests import SHARE, damaged, hostile_json, share, tell
from test_attribution_store import rich_example
from test_text import check_invariants
from tiny import tiny
from tokenizers_for_tests import CHAT_TEMPLATE, TOKENIZERS

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


def use_folder(path):
    """All that is done with a benchmark's folder: it is shown, packed and continued."""
    folder = next(parent for parent in path.parents if (parent / "plan.toml").exists())
    assert "\x1b" not in str(status(folder))
    list(Store(folder).rows())
    list(Store(folder).costs())
    pack(folder, folder.parent / "packed")
    if "attributions" in path.parts:  # measured once more, and shown
        shutil.rmtree(folder / Path(ROWS).parent)
        prompts = own_attributions(Results.of(Store(folder)))
        if SHARE > 0.1:
            next(heatmaps(prompts), None)
    run_bench(folder.parent / "plan.toml", folder, Heard(), workers=0)


def good_files(whole: Path, folder: Path) -> dict[str, bytes]:
    rich_example().save(folder / "attribution")
    noiser.evaluate(tiny("llama"), PROMPTS[:3], metrics="soft_scores", masks=1, method="occlusion").save(folder / "e")
    return {
        "saved attributions": (folder / "attribution").read_bytes(),
        "saved evaluations": (folder / "e").read_bytes(),
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
    "plans": read_plan,
}


def hostile(name: str, good: bytes, count: int):
    draw = random.Random(1)
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
                outcomes["without a word"] += not str(error)
                outcomes[type(error).__name__] += 1
            except Exception as error:
                problems[f"{name}, file {number}: {error!r:.200}"] = error
                outcomes["a traceback"] += 1
            longest = max(longest, time.process_time() - began)
        assert longest < SECONDS
        assert not outcomes.pop("without a word")
        tell("hostile files", f"{name}: {count}, {dict(outcomes)}, at most {longest:.2f} s")
    if problems:
        raise ExceptionGroup("\n".join(problems), [*problems.values()])


# ---- prompts ---------------------------------------------------------------------------------------------------------

PIECES = [
    *("a", "B", " ", "  ", "\n", "\r\n", "\t", "the", " sport", "naïve", "日本", "हिन्दी", "ﬁ", "ß", "İ"),
    *("\x00", "\x07", "\x1b[31m", "\x7f", "\x85", "\u200b", "\u2028", "\ufeff", "\ufffd", "\U000e0041", "\U0010ffff"),
    *("👋", "👨‍👩‍👧", "🏳️‍🌈", "👍🏽", "🇦🇹", "e" + "\u0301" * 40, "\u0301", "\u200d"),
    *("שלום", "مرحبا", "\u202e", "\u202d", "\u2066", "\u2069", "\u200f"),
    *("<s>", "</s>", "<unk>", "<|assistant|>", "<|im_end|>", "<0x0A>", "▁", "Ġ", "[MASK]", "##ing", "{{ bos_token }}"),
    *("a" * 700, "Donaudampfschiff" * 60, "日" * 300, "-" * 500, "\ud800"),
]


def fuzzed(draw: random.Random):
    """A text, or every fourth time a chat."""

    def text():
        chars = "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0x10000, 0x110000)])) for _ in range(5))
        return "".join(draw.choices([*PIECES, chars], k=draw.randrange(1, 12)))

    if draw.randrange(4):
        return text()
    return [{"role": draw.choice(["user", "assistant"]), "content": text()} for _ in range(draw.randrange(1, 5))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["byte_level", "unigram", "byte_fallback"])
def test_fuzzed_prompts_are_tiled_by_their_tokens_or_refused(name):
    tokenizer, draw, outcomes = TOKENIZERS[name](), random.Random(2), Counter()
    tokenizer.chat_template = CHAT_TEMPLATE
    for _ in range(share(1000)):
        prompt = fuzzed(draw)
        try:
            encoding = encode(tokenizer, prompt)
        except NoiserError as error:
            outcomes[type(error).__name__] += 1
            continue
        check_invariants(encoding)
        for unit in ("token", "word", "sentence"):
            covered = [index for part in make_units(encoding, unit) for index in part.token_indices]
            assert sorted(covered) == [index for index, frozen in enumerate(encoding.frozen) if not frozen]
        outcomes["tiled"] += 1
    slowest = max(
        growth(tokenizer, piece)
        for piece in PIECES[3 :: 1 if SHARE == 1 else 20]
        if piece.strip() and piece != "\ud800"
    )
    assert slowest < 12, "four times the text takes much more than four times as long"
    tell("fuzzed prompts", f"{name}: {dict(outcomes)}; four times the text takes at most {slowest:.1f} times as long")


def growth(tokenizer, piece: str) -> float:
    """How many times as long the fourfold text takes."""

    def seconds(characters):
        text, taken = "so " + piece * (characters // len(piece)), []
        for _ in range(3):
            began = time.process_time()
            with contextlib.suppress(NoiserError):
                make_units(encode(tokenizer, text), "word")
            taken.append(time.process_time() - began)
        return min(taken)

    length = 3_000 if SHARE == 1 else 1_000
    return seconds(4 * length) / max(seconds(length), 0.004)


# ---- kills, two at once, a full disk ---------------------------------------------------------------------------------

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def run_steps(how: str, steps: str, folder: Path, times: int) -> None:
    script = Path(__file__).parent / "steps_for_tests.py"
    command = [sys.executable, script, how, steps, folder, str(times)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for line in ran.stdout.splitlines():
        tell({"kill": "kills", "two": "two at once", "full": "full disk"}[how], line)


@pytest.mark.slow
@needs_fork
def test_kills_leave_nothing_half_written(tmp_path):
    run_steps("kill", "convert,choose,pack,report", tmp_path, share(50, least=2))


@pytest.mark.slow
@needs_fork
def test_two_processes_convert_one_model_at_the_same_moment(tmp_path):
    run_steps("two", "convert", tmp_path, share(50, least=2))


@pytest.mark.slow
@needs_fork
def test_a_full_disk_is_an_error_and_room_is_all_that_it_takes(tmp_path):
    """Really full: a file system in memory, as small as it takes for every place at which it can run out."""
    (tmp_path / "try").mkdir()
    tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "try"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("only root may mount a small file system")
    subprocess.run(["umount", tmp_path / "try"], check=True)
    run_steps("full", "convert,choose,pack,report", tmp_path, share(25, least=2))


@pytest.mark.slow
@needs_fork
def test_kills_of_a_benchmark_lose_and_repeat_nothing(tmp_path, whole):
    plan = tmp_path / "plan.toml"
    text = (whole / "plan.toml").read_text(encoding="utf-8").replace("block = 2", "block = 1")
    plan.write_text(text, encoding="utf-8")
    run_bench(plan, tmp_path / "whole", Heard(), workers=0)
    script, kills = Path(__file__).parent / "bench_for_tests.py", share(50, least=2)
    command = [sys.executable, script, plan, tmp_path / "out", str(kills), "0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_same_numbers(tmp_path / "out", tmp_path / "whole")
    tell("kills", f"a benchmark: {kills}, nothing lost or done again, {len(stored(tmp_path / 'out'))} files")


# ---- visitors --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed")
def test_visitors_at_once_each_get_their_own_answer_or_are_told_to_wait():
    """Over HTTP; some stop, some go away, some ask nothing. Who is told that too many wait asks again."""
    count, busy = share(100, least=6), Counter()
    questions = [
        Question(
            prompt=f"{PROMPTS[i % 6]} {'the fox ' * (i % 5)}".strip(),
            methods=("noiser" if i % 10 in (4, 5) else "occlusion",),
            seed=i,
            all_thresholds=False,
        )
        for i in range(count)
    ]

    def visit(visitors, number):
        """What is shown in the end; None to who went away."""
        question, kind = questions[number], number % 10
        fields = {"Methods": [*question.methods], "Seed": number, "Thresholds of all units": False}
        fields["Prompt"] = " " if kind == 9 else question.prompt
        while True:
            messages = visitors.ask(f"visitor{number}", fields)
            if kind in (4, 5):
                next(messages)
            if kind == 4:
                messages.close()
                return None
            if kind == 5:
                visitors.stop(f"visitor{number}")
            *_, data = messages
            if "others are waiting" not in data[0]:
                return data
            busy["told to wait"] += 1
            time.sleep(2)

    def outcome(number, data):
        if data is None:
            return "left"
        if number % 10 == 9:
            return "refused" if "The prompt is empty" in data[0] else "wrong"
        if number % 10 == 5 and "Stopped." in data[0]:
            return "stopped"
        question = questions[number]
        att = noiser.attribute(tiny("llama"), method=question.methods[0], **question.asked)
        return "right" if data[1] == result_html(Answer(question, "llama", (att,), (), 0.0)) else "wrong"

    with served() as address, ThreadPoolExecutor(count) as pool:
        visitors = Visitors(address)
        began = time.monotonic()
        visits = [pool.submit(visit, visitors, number) for number in range(count)]
        shown = [visit.result() for visit in visits]
        seconds = time.monotonic() - began
        *_, last = visitors.ask("last", {"Prompt": PROMPTS[0]})
    assert "Done" in last[0]
    outcomes = Counter(outcome(number, data) for number, data in enumerate(shown))
    assert outcomes["wrong"] == 0, outcomes
    told = f"told to wait {busy['told to wait']} times, {seconds:.0f} s"
    tell("visitors", f"{count} at once over HTTP: {dict(outcomes)}, {told}")
