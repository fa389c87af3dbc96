"""The same model as a judge in this process and behind an endpoint: seconds a reply, with one prompt and many replies.

    python benchmarks/judge_speed.py local qwen2.5-coder-1.5b-instruct.gguf
    python benchmarks/judge_speed.py http://127.0.0.1:8000/v1 MODEL      # vLLM, llama.cpp's server, ...

Every request is the paper's instruction and half of a prompt's words, so that all begin with the same 80 tokens or so.
Requests go out by ones and by eights; the first is not timed.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import noiser
from many_prompts import PROMPTS
from measuring import table
from noiser.judges import JudgeRequest, make_judge
from noiser.judges.protocol import Judge

SIDE_BY_SIDE = (1, 8)


def requests(count: int) -> list[JudgeRequest]:
    """Every second word of so many prompts, from the first or the second on."""
    words = [prompt.split()[start::2] for start in (0, 1) for prompt in PROMPTS]
    return [JudgeRequest(tuple(some)) for some in words[:count]]


def judge_of(where: str, model: str, concurrency: int, folder: str) -> Judge:
    """A judge that has no answer stored."""
    if where == "local":
        return make_judge("local", lm=noiser.load_model(model, dtype="bfloat16"), style="chat")
    return make_judge(f"openai:{model}", base_url=where, concurrency=concurrency, cache_dir=folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", help='"local" or the address of an endpoint')
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=24)
    chosen = parser.parse_args()
    rows = []
    for concurrency in SIDE_BY_SIDE if chosen.where != "local" else (1,):
        with tempfile.TemporaryDirectory() as folder:
            judge = judge_of(chosen.where, chosen.model, concurrency, folder)
            first, *others = requests(chosen.requests + 1)
            judge.judge([first])
            begin = time.perf_counter()
            verdicts = judge.judge(others)
            seconds = time.perf_counter() - begin
        answers = [verdict.answers[0] if verdict.answers else "-" for verdict in verdicts]
        rows.append({"side by side": concurrency, "seconds a reply": seconds / len(others), "replies": len(others)})
        print(", ".join(answers))
    print(table(rows))
