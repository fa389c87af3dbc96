"""Chat models by their text alone: how often the decisive sentence is found, and at how many
requests.

    python benchmarks/text_only.py RESULTS.jsonl run once-12 once-24 twice-12 --count 20
    python benchmarks/text_only.py RESULTS.jsonl run once-12 --methods occlusion context_cite
    python benchmarks/text_only.py RESULTS.jsonl run words --count 8
    python benchmarks/text_only.py RESULTS.jsonl table
    LLMSHAP=FOLDER python benchmarks/text_only.py RESULTS.jsonl run once-12 --methods llmshap

`run` serves the model with `noiser serve`, or asks the endpoint of --base-url, and explains planted
prompts as chats. A prompt counts if the answer has the planted value, and has it no more without
the gold sentences; of copies, also if it has it without either one. `words` compares `joint` on
text with `joint` on the model itself, on chats of KNOWN prompts. Lines that are there are not run
again, and answers are stored, so an interrupted run goes on. llmSHAP 1.5.2 is a package, unpacked
in a folder; it leaves each sentence out once, which is the least that it can do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import noiser
from noiser.data import load, planted
from noiser.data.dataset import Example
from noiser.engine import prepare, run_one
from noiser.types import Question

SEED = 67
LEAD = len("user: ")
TOKENS = 8  # of an answer: the prompts end in front of the value
MODEL = "smollm2-135m-instruct"
METHODS = ("search",)


@contextlib.contextmanager
def served(model: str) -> Generator[str]:
    """The address of `noiser serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "noiser", "serve", "-m", model, "--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, start_new_session=True, **quiet)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5),
            ):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def chat_of(prompt: str) -> list[dict[str, str]]:
    """A planted prompt as a chat."""
    return [{"role": "user", "content": prompt}]


class Asker:
    """A chat model, and its answers to prompts."""

    def __init__(self, base_url: str, model: str) -> None:
        options: dict[str, Any] = {"parameters": {"max_tokens": TOKENS}, "same": "contains"}
        self.lm: Any = noiser.load_model(
            f"chat:{model}", base_url=base_url, announce=False, max_calls=400, **options
        )

    def says(self, prompt: str, value: str) -> bool:
        """Whether the answer to a prompt has a value."""
        question = Question(prompt=chat_of(prompt), unit="turn", target_unit="all", target=value)
        query = run_one(self.lm, prepare(self.lm, question))
        return query.targets[0].probability > 0.5

    def counts(self, example: Example) -> bool:
        """Whether the model's answers depend on the gold sentences as the prompt promises."""
        value = str(example.target).strip()
        if not self.says(example.prompt, value):
            return False
        lacking = [self.says(prompt, value) for prompt in example.without]
        enough = [self.says(prompt, value) for prompt in example.enough]
        return not any(lacking) and all(enough)


def explained(asker: Asker, example: Example, method: str) -> dict[str, Any]:
    """Whether a method finds the gold sentences, and at how many requests, with an empty store."""
    spans = sorted([*example.spans["gold"], *example.spans["other"]])
    gold = [spans.index(span) for span in example.spans["gold"]]
    value = str(example.target).strip()
    if method == "llmshap":
        scores, calls = by_llmshap(asker, example.prompt, spans)
        pairs: list[Any] = []
    else:
        shifted = [(start + LEAD, end + LEAD) for start, end in spans]
        att = noiser.attribute(
            asker.lm, chat_of(example.prompt), method=method, unit=shifted, target=value
        )
        scores = att.scores[0].nan_to_num().tolist()
        # Requests, as if nothing had been stored by the test of whether the prompt counts.
        calls = int(att.info.get("calls", 0)) + int(att.info.get("cached", 0))
        pairs = [list(pair.units) for pair in att.pairs if pair.kind == "either"]
    order = sorted(range(len(scores)), key=lambda unit: -scores[unit])
    first = order[: len(gold)]
    return {
        "found": sorted(first) == sorted(gold) and all(scores[unit] > 0 for unit in gold),
        "either": sorted(gold) in [sorted(pair) for pair in pairs],
        "calls": calls,
    }


def by_llmshap(
    asker: Asker, prompt: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[float], int]:
    """The scores of llmSHAP that leave each sentence out, on the same endpoint."""
    sys.path.insert(0, os.environ["LLMSHAP"])
    from llmSHAP.attribution_methods.coalition_sampler import CounterfactualSampler
    from llmSHAP.attribution_methods.shapley_attribution import ShapleyAttribution
    from llmSHAP.data_handler import DataHandler
    from llmSHAP.generation import Generation
    from llmSHAP.llm.llm_interface import LLMInterface
    from llmSHAP.prompt_codec import PromptCodec

    question = prompt[spans[-1][1] :]
    asked: set[str] = set()
    connection = asker.lm._client

    class Codec(PromptCodec):
        def build_prompt(self, handler: Any, indexes: Any) -> Any:
            kept = handler.get_data(indexes, mask=False).values()
            return chat_of(" ".join([text for text in kept if text]) + question)

        def parse_generation(self, output: str) -> Any:
            return Generation(output=output)

    class Model(LLMInterface):
        def generate(self, prompt: Any, **_: Any) -> str:
            asked.add(json.dumps(prompt))
            reply = connection.chat.completions.create(
                model=asker.lm.name, messages=prompt, temperature=0, max_tokens=TOKENS
            )
            return reply.choices[0].message.content or ""

    sentences = {f"s{i}": prompt[start:end] for i, (start, end) in enumerate(spans)}
    found = ShapleyAttribution(
        Model(),
        DataHandler(sentences),
        Codec(),
        sampler=CounterfactualSampler(),
        use_cache=True,
        verbose=False,
    ).attribution()
    return [float(found.attribution[key]["score"]) for key in sentences], len(asked)


def words(asker: Asker, white: Any, prompt: str) -> dict[str, Any]:
    """The rank correlation of `joint` on text with `joint` on the model, over the words of a
    chat.
    """
    chat = [{"role": "user", "content": prompt}]
    att = noiser.attribute(asker.lm, chat, method="joint", unit="word", target_unit="all")
    target = att.targets[0].text
    own = noiser.attribute(white, chat, method="joint", unit="word", target=target)
    ours = att.scores[0].nan_to_num().tolist()
    theirs = own.scores[0].nan_to_num().tolist()
    if len(ours) != len(theirs) or len(set(ours)) == 1:
        return {"rho": None, "calls": att.info.get("calls", 0)}
    rho = statistics.correlation(ours, theirs, method="ranked")
    return {"rho": rho, "calls": att.info.get("calls", 0), "words": len(ours)}


def run(path: Path, args: argparse.Namespace) -> None:
    """Appends a line for each prompt and method that has none yet."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(line["part"], line["id"], line["method"]) for line in lines}
    serving = contextlib.nullcontext(args.base_url) if args.base_url else served(args.model)
    with serving as address, path.open("a") as out:
        asker = Asker(address, args.model)

        def add(part: str, name: str, method: str, **numbers: Any) -> None:
            line = {"part": part, "id": name, "method": method, "model": args.model, **numbers}
            out.write(json.dumps(line) + "\n")
            out.flush()

        for part in args.parts:
            if part == "words":
                white = noiser.load_model(args.model, device="cpu")
                known = load("known", data_dir=args.data_dir, limit=args.count, seed=SEED)
                for record in known.examples:
                    if (part, record.id, "joint") not in done:
                        add(part, record.id, "joint", **words(asker, white, record.prompt))
                continue
            category, _, sentences = part.partition("-")
            for wording in planted.REPORTING:
                examples = planted.draw(category, int(sentences), seed=SEED, wording=wording)
                for example in examples[: max(1, args.count // len(planted.REPORTING))]:
                    missing = [m for m in args.methods if (part, example.id, m) not in done]
                    if not missing or (part, example.id, "refused") in done:
                        continue
                    if not asker.counts(example):
                        add(part, example.id, "refused")
                        continue
                    for method in missing:
                        add(part, example.id, method, **explained(asker, example, method))


def table(path: Path) -> None:
    """Prints the rows of each part and method."""
    from measuring import table as markdown  # it imports much

    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        groups.setdefault((line["model"], line["part"], line["method"]), []).append(line)
    rows: list[dict[str, Any]] = []
    for (model, part, method), lines in sorted(groups.items()):
        row: dict[str, Any] = {"model": model, "part": part, "method": method, "n": len(lines)}
        if method != "refused" and part != "words":
            row["gold found"] = statistics.mean(line["found"] for line in lines)
            row["named or"] = statistics.mean(line["either"] for line in lines)
        rho = [line["rho"] for line in lines if line.get("rho") is not None]
        if rho:
            row["rank correlation"] = statistics.mean(rho)
            row["n"] = len(rho)
        calls = [line["calls"] for line in lines if "calls" in line]
        if calls:
            row["median calls"] = statistics.median(calls)
            row["most calls"] = max(calls)
        rows.append(row)
    print(markdown(rows))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("parts", nargs="+", help="such as once-12, once-24, twice-12, words")
    runs.add_argument("--count", type=int, default=20, help="prompts of each part")
    runs.add_argument("--methods", nargs="+", default=METHODS)
    runs.add_argument("--model", default=MODEL)
    runs.add_argument("--base-url")
    runs.add_argument("--data-dir", type=Path)
    commands.add_parser("table")
    args = parser.parse_args()
    if args.command == "run":
        run(args.results, args)
    else:
        table(args.results)


if __name__ == "__main__":
    main()
