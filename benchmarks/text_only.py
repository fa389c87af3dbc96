"""Chat models by their text alone: how often the decisive sentence is found, and at how many
requests.

    python benchmarks/text_only.py RESULTS.jsonl run once-12 once-24 twice-12 shared-12 --count 30
    python benchmarks/text_only.py RESULTS.jsonl run once-12 --methods occlusion context_cite
    python benchmarks/text_only.py RESULTS.jsonl run words errors --count 12
    python benchmarks/text_only.py RESULTS.jsonl table
    LLMSHAP=FOLDER python benchmarks/text_only.py RESULTS.jsonl run once-12 --methods llmshap
    MLLM_SHAP=PYTHON python benchmarks/text_only.py RESULTS.jsonl run once-12 --methods mllm_shap

`run` serves the model with `noiser serve`, or asks the endpoint of --base-url, and explains planted
prompts as chats. A prompt counts if the answer has the planted value, and has it no more without
the gold sentences; of copies, also if it has it without either one. `words` compares `joint` on
text with `joint` on the model itself, on chats of KNOWN prompts; answers are compared by their
text, or by the share of the words that they have in common. `errors` explains prompts of three
sentences twenty times at temperature 0.7, with five requests for each input: how often is the mean
of the other runs within 1.96 standard errors? Lines that are there are not run again, and answers
are stored, so an interrupted run goes on.

`last` and `overlap` never ask: they name the last sentences, and those most like the question by
TF-IDF. llmSHAP 1.5.2 is a package, unpacked in a folder; it leaves each sentence out once, which is
the least that it can do. mllm-shap 0.5.0 needs an environment with Python 3.12 of its own, whose
interpreter MLLM_SHAP names; it gets as many requests, drawn by its Monte Carlo estimator.

No question may take more requests than were announced before the first.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

import noiser
from measuring import in_turn, mean_difference, share
from measuring import table as markdown
from noiser.data import load, planted
from noiser.data.dataset import Example
from noiser.engine import prepare, run_one
from noiser.methods.references import word_overlap
from noiser.metrics.correlation import spearman
from noiser.model.same import plain_text
from noiser.types import Question

SEED = 67
LEAD = len("user: ")
TOKENS = 20  # of an answer: a sentence with the value
MODEL = "smollm2-135m-instruct"
METHODS = ("search",)
MOST = 400
RUNS = 20
REPEATS = 5
TEMPERATURE = 0.7


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


class Relay:
    """An endpoint that passes chats on, keeps the answers in a file, and counts different chats.

    All libraries ask it, so they get the same answers, and none is computed twice.
    """

    def __init__(self, upstream: str, path: Path) -> None:
        self.upstream, self.path = upstream, path
        self.kept: dict[str, Any] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self.kept.update(json.loads(line))
        self.asked: set[str] = set()
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/v1"

    def answer(self, body: dict[str, Any]) -> Any:
        """The upstream's answer to a request, which is asked only once unless it is random."""
        for name in ("logprobs", "top_logprobs"):
            body.pop(name, None)
        is_random = body.get("temperature", 1) > 0
        content = json.dumps(body, sort_keys=True).encode()
        key = hashlib.sha256(content).hexdigest()
        with self.lock:
            self.asked.add(key)
            if key in self.kept and not is_random:
                return self.kept[key]
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{self.upstream}/chat/completions", content, headers)
            with urllib.request.urlopen(request, timeout=600) as response:
                found = json.load(response)
            if not is_random:
                self.kept[key] = found
                with self.path.open("a") as out:
                    out.write(json.dumps({key: found}) + "\n")
            return found


def _handler(relay: Relay) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, content = 200, json.dumps(relay.answer(body)).encode()
            except urllib.error.HTTPError as error:  # such as 400 for an empty message
                status, content = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def chat_of(prompt: str) -> list[dict[str, str]]:
    """A planted prompt as a chat, without the beginning of an answer."""
    asked = re.sub(r"\s*Answer:[^?.]*\Z", "", prompt)
    return [{"role": "user", "content": asked}]


class Asker:
    """A chat model, and its answers to prompts."""

    def __init__(self, relay: Relay, model: str) -> None:
        self.relay = relay
        self.name = model
        self.lm = self.model()

    def model(self, **options: Any) -> Any:
        """The chat model, which compares answers by whether they have the planted value."""
        settings: dict[str, Any] = {"max_calls": MOST, "same": "contains", "timeout": 600}
        parameters = {"max_tokens": TOKENS} | options.pop("parameters", {})
        settings |= {"parameters": parameters, **options}
        return noiser.load_model(f"chat:{self.name}", base_url=self.relay.address, **settings)

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

    def attribute(self, lm: Any, chat: Any, **options: Any) -> tuple[Any, dict[str, int]]:
        """The attribution, and its requests as if nothing had been stored.

        Raises AssertionError where these are more than were announced.
        """
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            att = noiser.attribute(lm, chat, **options)
        about, most = map(int, re.findall(r"(?:about|at most) (\d+)", said.getvalue()))
        calls = int(att.info.get("calls", 0)) + int(att.info.get("cached", 0))
        assert calls <= most, f"{calls} requests, {said.getvalue()}"
        return att, {"calls": calls, "about": about, "most": most}


def explained(asker: Asker, example: Example, method: str) -> dict[str, Any]:
    """Whether a method finds the gold sentences, and at how many requests."""
    spans = sorted([*example.spans["gold"], *example.spans["other"]])
    gold = [spans.index(span) for span in example.spans["gold"]]
    value = str(example.target).strip()
    chat = chat_of(example.prompt)
    prompt = chat[0]["content"]
    pairs: list[Any] = []
    calls: dict[str, int] = {}
    if method == "last":
        scores = [float(place + 1) for place in range(len(spans))]
    elif method == "overlap":
        sentences = [prompt[start:end] for start, end in spans]
        scores = word_overlap(sentences, prompt[spans[-1][1] :]).tolist()
    elif method in ("llmshap", "mllm_shap"):
        asker.relay.asked.clear()
        by = by_llmshap if method == "llmshap" else by_mllm_shap
        scores = by(asker, prompt, spans)
        calls["calls"] = len(asker.relay.asked)
    else:
        shifted = [(start + LEAD, end + LEAD) for start, end in spans]
        att, calls = asker.attribute(asker.lm, chat, method=method, unit=shifted, target=value)
        scores = att.scores[0].nan_to_num().tolist()
        pairs = [list(pair.units) for pair in att.pairs if pair.kind == "either"]
    order = sorted(range(len(scores)), key=lambda unit: -scores[unit])
    first = order[: len(gold)]
    return {
        "found": sorted(first) == sorted(gold) and all(scores[unit] > 0 for unit in gold),
        "either": sorted(gold) in [sorted(pair) for pair in pairs],
        "chance": 1 / math.comb(len(spans), len(gold)),
        **calls,
    }


def by_llmshap(asker: Asker, prompt: str, spans: Sequence[tuple[int, int]]) -> list[float]:
    """The scores of llmSHAP that leave each sentence out."""
    sys.path.insert(0, os.environ["LLMSHAP"])
    from llmSHAP.attribution_methods.coalition_sampler import CounterfactualSampler
    from llmSHAP.attribution_methods.shapley_attribution import ShapleyAttribution
    from llmSHAP.data_handler import DataHandler
    from llmSHAP.generation import Generation
    from llmSHAP.llm.llm_interface import LLMInterface
    from llmSHAP.prompt_codec import PromptCodec

    question = prompt[spans[-1][1] :]
    connection = asker.lm._client

    class Codec(PromptCodec):
        def build_prompt(self, handler: Any, indexes: Any) -> Any:
            kept = handler.get_data(indexes, mask=False).values()
            return chat_of((" ".join([text for text in kept if text]) + question).strip())

        def parse_generation(self, output: str) -> Any:
            return Generation(output=output)

    class Model(LLMInterface):
        def generate(self, prompt: Any, **_: Any) -> str:
            reply = connection.chat.completions.create(
                model=asker.name, messages=prompt, temperature=0, max_tokens=TOKENS
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
    return [float(found.attribution[key]["score"]) for key in sentences]


BY_MLLM_SHAP = """
import json, sys
from mllm_shap import (
    ConversationSnapshot, ExplainConfig, ExplainRunner, Message, PlayerSet, PlayerSpan, Role, Turn,
    default_registry,
)

asked = json.load(sys.stdin)

class Sentences:
    name = "sentences"

    def __init__(self, context):
        pass

    def partition(self, snapshot):
        text = asked["prompt"]
        spans = [
            PlayerSpan(message_index=0, start=start, end=end, text=text[start:end])
            for start, end in asked["spans"]
        ]
        return PlayerSet(player_ids=tuple(map(str, range(len(spans)))), spans=tuple(spans))

registry = default_registry()
registry.register("mllm_shap.partitions", "sentences", Sentences)
snapshot = ConversationSnapshot.from_turns(
    (Turn(messages=(Message(role=Role.USER, text=asked["prompt"]),)),)
)
config = ExplainConfig.model_validate({
    "backend": {"kind": "api", "model_id": asked["model"], "api_host": asked["address"]},
    "generation": {"max_new_tokens": asked["tokens"], "temperature": 0.0},
    "explanation": {
        "estimator": "mc",
        "players": "sentences",
        "max_players": 30,
        "budget": {"evaluations": len(asked["spans"]) + 1},
        "archive": {"path": ""},
    },
})
values = ExplainRunner(config, registry).explain_sync(snapshot).result.values
print(json.dumps([float(value) for value in values]))
"""


def by_mllm_shap(asker: Asker, prompt: str, spans: Sequence[tuple[int, int]]) -> list[float]:
    """The scores of mllm-shap, with as many requests as leave each sentence out."""
    asked = {
        "prompt": prompt,
        "spans": spans,
        "model": asker.name,
        "address": asker.relay.address,
        "tokens": TOKENS,
    }
    found = subprocess.run(
        [os.environ["MLLM_SHAP"], "-c", BY_MLLM_SHAP],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(found.stdout.splitlines()[-1])


def shared_words(explained: str, answer: str) -> float:
    """The F1 score of the words of two answers, 1 where both have the same ones."""
    ours, theirs = (Counter(plain_text(text).split()) for text in (explained, answer))
    return 2 * (ours & theirs).total() / max((ours + theirs).total(), 1)


SAMES: dict[str, Any] = {"joint, text": "text", "joint, shared words": shared_words}
"""How `words` compares answers, by the method's name in the results."""


def words(asker: Asker, white: Any, prompt: str, method: str) -> dict[str, Any]:
    """The rank correlation of `joint` on text with `joint` on the model, over the words of a
    chat; beside it that of the words' lengths and places, which ask no model.
    """
    chat = chat_of(prompt)
    lm = asker.model(same=SAMES[method], max_calls=1000)
    att, calls = asker.attribute(lm, chat, method="joint", unit="word", target_unit="all")
    target = att.targets[0].text
    own = noiser.attribute(white, chat, method="joint", unit="word", target=target)
    texts = [unit.text.strip() for unit in att.units]
    assert texts == [unit.text.strip() for unit in own.units]
    ways = {
        "rho": att.scores[0],
        "rho of length": torch.tensor([float(len(text)) for text in texts]),
        "rho of position": torch.arange(len(texts), dtype=torch.float32),
    }
    rhos = spearman(torch.stack([*ways.values()]), own.scores[0])
    # Equal scores everywhere have no rank, and none is what they are worth.
    found = dict(zip(ways, rhos.nan_to_num().tolist(), strict=True))
    return {**found, "defined": bool(rhos[0].isfinite()), "words": len(texts), **calls}


def errors(asker: Asker, example: Example) -> dict[str, Any] | None:
    """How often scores are within 1.96 of their standard errors of the mean of all other runs."""
    spans = sorted([*example.spans["gold"], *example.spans["other"]])
    shifted = [(start + LEAD, end + LEAD) for start, end in spans]
    value = str(example.target).strip()
    method = noiser.Occlusion(removal="delete", objective="prob")
    scores: list[list[float]] = []
    stderr: list[list[float]] = []
    for run in range(RUNS):
        # Another store for each run: its answers must be drawn anew.
        lm = asker.model(
            temperature=TEMPERATURE, repeats=REPEATS, cache_dir=f"{asker.relay.path}.runs/{run}"
        )
        att, _ = asker.attribute(
            lm, chat_of(example.prompt), method=method, unit=shifted, target=value
        )
        scores.append(att.scores[0].tolist())
        stderr.append(att.stderr[0].tolist())
    covered: list[bool] = []
    varied: list[bool] = []
    for unit in range(len(spans)):
        column = [row[unit] for row in scores]
        for run, (score, error) in enumerate(zip(column, stderr, strict=True)):
            others = statistics.mean([*column[:run], *column[run + 1 :]])
            covered.append(abs(score - others) <= 1.96 * error[unit])
            varied.append(len(set(column)) > 1)
    return {"covered": covered, "varied": varied}


def run(path: Path, args: argparse.Namespace) -> None:
    """Appends a line for each prompt and method that has none yet."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(line["part"], line["id"], line["method"]) for line in lines}
    end = time.monotonic() + 60 * args.minutes
    serving = contextlib.nullcontext(args.base_url) if args.base_url else served(args.model)
    with serving as address, path.open("a") as out:
        asker = Asker(Relay(address, path.with_suffix(".answers")), args.model)

        def add(part: str, name: str, method: str, **numbers: Any) -> None:
            line = {"part": part, "id": name, "method": method, "model": args.model, **numbers}
            out.write(json.dumps(line) + "\n")
            out.flush()

        white = None
        for part, example in in_turn([[*prompts_of(part, args)] for part in args.parts]):
            if time.monotonic() > end:
                break
            if part == "words":
                for method in SAMES:
                    if (part, example.id, method) not in done:
                        white = white or noiser.load_model(args.model, device="cpu")
                        found = words(asker, white, example.prompt, method)
                        add(part, example.id, method, **found)
                continue
            methods = ["occlusion"] if part == "errors" else args.methods
            missing = [m for m in methods if (part, example.id, m) not in done]
            if not missing or (part, example.id, "refused") in done:
                continue
            if not asker.counts(example):
                add(part, example.id, "refused")
                continue
            for method in missing:
                found = errors(asker, example) if part == "errors" else None
                add(part, example.id, method, **(found or explained(asker, example, method)))


def prompts_of(part: str, args: argparse.Namespace) -> Iterator[tuple[str, Example]]:
    """The prompts of a part, whose wordings and places of the gold sentence follow in turn."""
    if part == "words":
        known = load("known", data_dir=args.data_dir, limit=args.count, seed=args.seed)
        yield from ((part, example) for example in known.examples)
        return
    category, _, sentences = ("once-3" if part == "errors" else part).partition("-")
    draws = []
    for number, wording in enumerate(planted.REPORTING):
        drawn = planted.draw(category, int(sentences), seed=args.seed, wording=wording)
        # 7 and 20 have no common divisor: each place comes once, and soon all parts of a prompt.
        draws.append([drawn[(7 * i + 3 * number) % len(drawn)] for i in range(len(drawn))])
    mixed = [example for of_all in zip(*draws, strict=True) for example in of_all]
    yield from ((part, example) for example in mixed[: args.count])


def table(path: Path) -> None:
    """Prints the rows of each part and method."""
    found: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        found[line["model"], line["part"], line["method"], line["id"]] = line
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for (model, part, method, _), line in found.items():
        groups.setdefault((model, part, method), []).append(line)
    rows: list[dict[str, Any]] = []
    for (model, part, method), lines in sorted(groups.items()):
        row: dict[str, Any] = {"model": model, "part": part, "method": method, "n": len(lines)}
        if "found" in lines[0]:
            row["gold found"] = share([line["found"] for line in lines])
            if part.startswith("twice"):
                row["named or"] = share([line["either"] for line in lines])
            row["chance"] = statistics.mean(line["chance"] for line in lines)
        if part == "errors" and method != "refused":
            covered = [hit for line in lines for hit in line["covered"]]
            varied = [hit for line in lines for hit in line["varied"]]
            row["covered"] = statistics.mean(covered)
            of_varied = [hit for hit, varies in zip(covered, varied, strict=True) if varies]
            row["covered where answers vary"] = share(of_varied, len(of_varied))
        for name in ("rho", "rho of length", "rho of position"):
            if name in lines[0]:
                row[name] = mean_difference(np.array([line[name] for line in lines]))
        if "defined" in lines[0]:
            row["defined"] = sum(line["defined"] for line in lines)
        calls = [line["calls"] for line in lines if "calls" in line]
        if calls:
            row["median calls"] = statistics.median(calls)
            row["most calls"] = max(calls)
        if "about" in lines[0]:
            row["announced"] = statistics.median(line["about"] for line in lines)
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
    runs.add_argument("parts", nargs="+", help="such as once-12, twice-12, words, errors")
    runs.add_argument("--count", type=int, default=20, help="prompts of each part")
    runs.add_argument("--seed", type=int, default=SEED, help="of the prompts")
    runs.add_argument("--minutes", type=float, default=math.inf, help="no prompt begins later")
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
