"""Steps that write files, killed at random moments, at the same moment in two processes, or on a disk that is full.

    python tests/steps_for_tests.py kill|two|full STEP FOLDER TIMES

Each step runs in a child of this process, which has imported all that it needs. Prints what it counted; fails where a
step leaves something half-written, where it ends in a traceback, or where the next try does not give the same files.
Every second kill comes at a random moment, and the others before a random one of the operations that write files, which
are over too quickly to be met by chance.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from bench_for_tests import PROMPTS, Heard, contents, plan_text, save_models
from noiser.errors import NoiserError
from noiser.files import DRAFTS

QUIZ = """
name = "quiz"
seed = 1
[[models]]
name = "{models}/llama"
[[data]]
name = "quiz"
only_correct = true
[[methods]]
name = "random"
"""
DONE, REFUSED, BROKEN = 0, 3, 1


def prepare(folder: Path) -> None:
    """What the steps read: a GGUF file, a data set, a finished benchmark."""
    import noiser
    from gguf_for_tests import write_gguf
    from noiser.bench import run_bench
    from noiser.data import DATA_SETS, Example, Reading, Recipe, Source
    from tiny import tiny, tiny_model, tiny_tokenizer

    write_gguf(folder / "tiny.gguf", tiny_model("llama").eval(), tiny_tokenizer(bos=False))
    models = save_models(folder / "models")
    (folder / "plan.toml").write_text(plan_text(models), encoding="utf-8")
    (folder / "quiz.toml").write_text(QUIZ.format(models=models), encoding="utf-8")
    said = {p: noiser.attribute(tiny("llama"), p, method="random").targets[0].text for p in PROMPTS}
    examples = [
        Example(id=f"quiz-{i}", prompt=prompt, target=said[prompt] if i % 3 else "Zq", dataset="quiz")
        for i, prompt in enumerate(PROMPTS)
    ]
    source = Source(files=(), licence="ours", citation="")
    DATA_SETS.register("quiz", lambda: Recipe(source=source, read=lambda paths: Reading(examples, ())), summary="quiz")
    run_bench(folder / "plan.toml", folder / "whole", Heard(), workers=0)


def convert(folder: Path, out: Path) -> None:
    import noiser

    os.environ["NOISER_CACHE"] = str(out)
    noiser.load_model(folder / "tiny.gguf")


def choose(folder: Path, out: Path) -> None:
    from noiser.bench import run_bench

    run_bench(folder / "quiz.toml", out, Heard(), workers=0)


def pack(folder: Path, out: Path) -> None:
    from noiser.bench.pack import pack

    pack(folder / "whole", out)


def report(folder: Path, out: Path) -> None:
    from noiser.bench import Store
    from noiser.report.rows import Results
    from noiser.report.write import write_report

    try:
        write_report(Results.of(Store(folder / "whole")), out, ("md", "latex", "csv"), html=True)
    except OSError as error:  # which the command explains
        raise NoiserError(str(error)) from error


STEPS = {"convert": convert, "choose": choose, "pack": pack, "report": report}


def files(step: str, out: Path) -> dict[str, bytes]:
    """What a step published: not its drafts, locks and notes of the time."""
    if step == "choose":
        return contents(out)
    published = [
        path
        for path in out.rglob("*")
        if path.is_file() and not any(part.startswith(".") or part == "hashes" for part in path.relative_to(out).parts)
    ]
    return {str(path.relative_to(out)): path.read_bytes() for path in published if path.suffix != ".lock"}


def watch_writing(out: Path, last: int) -> Counter[str]:
    """Counts the operations of this process that change the folder, and kills it before the one of that number."""
    counted, prefix = Counter[str](), os.fspath(out)

    def on_event(event: str, arguments: tuple) -> None:
        writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or (
            event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes and str(arguments[0]).startswith(prefix):
            counted["operations"] += 1
            if counted["operations"] == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    return counted


def child(step: str, folder: Path, out: Path, last: int = 0) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = BROKEN
    try:
        sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        counted = watch_writing(out, last)
        STEPS[step](folder, out)
        code = DONE
        (folder / f"operations-{step}").write_text(str(counted["operations"]))
    except NoiserError as error:
        code = REFUSED if str(error) else BROKEN
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(code)


def finish(step: str, folder: Path, out: Path) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child(step, folder, out), 0)[1])


def check_whole(step: str, out: Path, expected: dict[str, bytes]) -> None:
    """Nothing is half there: what is published is what a whole run publishes; rows grow line by line.

    The draft of a file may be left; the next run removes it, as the comparison after that run shows.
    """
    for name, content in files(step, out).items():
        if Path(name).match(DRAFTS):
            continue
        whole = expected[name]
        assert content == whole or (step == "choose" and len(content) < len(whole)), f"{step}: {name} is half-written"


def kill(step: str, folder: Path, times: int, expected: dict[str, bytes], seconds: float) -> Counter[str]:
    draw, counted, out = random.Random(5), Counter[str](), folder / f"killed-{step}"
    operations = int((folder / f"operations-{step}").read_text())
    for number in range(times):
        last = draw.randrange(operations) + 1 if number % 2 else 0
        pid = child(step, folder, out, last)
        if not last:
            time.sleep(draw.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (DONE, -signal.SIGKILL), code
        counted[("killed while it wrote" if last else "killed") if code else "over before the kill"] += 1
        check_whole(step, out, expected)
        counted["found something to go on with"] += bool(code and files(step, out))
        if draw.random() < 0.3 or not code:
            assert finish(step, folder, out) == DONE
            assert files(step, out) == expected
            counted["finished, the same files"] += 1
            shutil.rmtree(out)
    return counted


def two(step: str, folder: Path, times: int, expected: dict[str, bytes], seconds: float) -> Counter[str]:
    counted = Counter[str]()
    for number in range(times):
        out = folder / f"two-{number}"
        pids = [child(step, folder, out) for _ in range(2)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [DONE, DONE], codes
        assert files(step, out) == expected
        counted["both done, the same files"] += 1
    return counted


def full(step: str, folder: Path, times: int, expected: dict[str, bytes], seconds: float) -> Counter[str]:
    counted, disk = Counter[str](), folder / "disk"
    disk.mkdir()
    most = 1.3 * sum(4096 * -(-len(content) // 4096) for content in expected.values())
    for number in range(times):
        size = max(4096, int(most * (number + 1) / times) // 4096 * 4096)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
        try:
            code = finish(step, folder, disk / "out")
            counted["refused" if code else "had room"] += 1
            assert code in (DONE, REFUSED), code
            check_whole(step, disk / "out", expected)
            subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
            assert finish(step, folder, disk / "out") == DONE
            assert files(step, disk / "out") == expected
        finally:
            subprocess.run(["umount", disk], check=True)
    return counted


if __name__ == "__main__":
    import torch

    import noiser.bench.run
    import noiser.bench.worker
    import noiser.report.page
    import noiser.report.write  # noqa: F401 - so that children start at once

    torch.set_num_threads(1)
    how, steps, place, count = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    prepare(place)
    for step in steps.split(","):
        began = time.monotonic()
        assert finish(step, place, place / f"reference-{step}") == DONE
        taken = time.monotonic() - began
        expected = files(step, place / f"reference-{step}")
        counted = {"kill": kill, "two": two, "full": full}[how](step, place, count, expected, taken)
        shutil.rmtree(place / "disk", ignore_errors=True)
        print(f"{step}: {count}, {dict(counted)}", flush=True)
