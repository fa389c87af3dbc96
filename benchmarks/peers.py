r"""Other libraries' own code beside ours: the same model and prompts, as many evaluations, scored
by our metrics.

    python benchmarks/peers.py RESULTS.jsonl run --model FOLDER \
        --python context-cite=VENV/bin/python ...
    python benchmarks/peers.py RESULTS.jsonl table

`run` scores planted facts (`noiser.data`, made by a program): prompts of six sentences, each
sentence a unit, the model's next token the target; those count whose answer the model gives, and
does not give without the gold sentences. Each library works in a process of its own, with the
interpreter that `--python NAME=PATH` gives it, since their requirements clash; `--peers` chooses
among them. For each prompt every library has its turn, then ours, so that a busy machine slows all
alike. Lines that the file has are not computed again. An environment that has everything of ours
and one more:

    python -m venv DIR
    python -c 'import site; print(site.getsitepackages()[0])' \
        > DIR/lib/python3.11/site-packages/ours.pth
    DIR/bin/pip install context-cite

In place of `context-cite`: `flashtrace`, `shapiq`, or LXT, which fails on transformers 5:

    DIR/bin/pip install --no-deps lxt zennit
    DIR/bin/pip install 'transformers<5'

Sampling methods get 32 evaluations of the model, of all 64 masks; what takes gradients or goes one
unit at a time takes what it takes. Token-forwards are counted where the model's `forward` is
called, backward passes not. Seconds are of the processor, one thread; memory is the most that the
process held while it scored, the model included. LDS and recall as in docs/metrics.md: LDS under
the removal of rows (zero) and of text (delete), over 48 masks. An error is stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

BUDGET = 32
MASKS = 48
CATEGORIES = ("once", "twice")
SENTENCES = 6

_OURS = "joint context_cite kernel_shap shapley_sampling occlusion attn_lrp attention_gradient"
WAYS: dict[str, tuple[str, ...]] = {
    "context-cite": ("ContextCite",),
    "shapiq": ("KernelSHAP", "PermutationSamplingSV"),
    "lxt": ("AttnLRP",),
    "flashtrace": ("FlashTrace",),
    "noiser": tuple(_OURS.split()),
}
"""The methods of each library."""


class Question(NamedTuple):
    """A prompt: its sentences with (start, end) in it, and the first token that the model says."""

    prompt: str
    spans: list[list[int]]
    target: str
    seed: int

    @property
    def sentences(self) -> list[str]:
        """Their texts."""
        return [self.prompt[start:end] for start, end in self.spans]

    def per_sentence(
        self, scores: Sequence[float], offsets: Sequence[Sequence[int]]
    ) -> list[float]:
        """Sums over the tokens of each sentence, from scores and characters of the prompt's
        tokens.
        """
        pairs = list(zip(scores, offsets, strict=True))
        return [sum(s for s, (a, b) in pairs if a < end and b > start) for start, end in self.spans]


Scorer = Callable[[Question, str], Sequence[float]]
"""Scores the sentences of a question by the way of that name."""


# ---- the libraries, each imported in a process of its own ----------------------------------------


class Loaded:
    """The model as each library's page loads it, and how many tokens it runs."""

    def __init__(self, folder: str, tokenizer: str = "AutoTokenizer", **options: Any) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        self.tokenizer = getattr(transformers, tokenizer).from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **options
        )
        self.model, forward, self.tokens = model.eval(), model.forward, 0

        @functools.wraps(forward)
        def counted(
            *args: Any, **given: Any
        ) -> Any:  # in its place, since Captum calls it past all hooks
            embeds = given.get("inputs_embeds")
            ids = given.get("input_ids", *args[:1]) if embeds is None else embeds
            self.tokens += ids.shape[0] * ids.shape[1]
            return forward(*args, **given)

        self.model.forward = counted

    def encode(self, question: Question) -> tuple[Any, list[list[int]], int]:
        """Token ids [1, length], the characters of each, and the target's id."""
        encoded = self.tokenizer(question.prompt, return_offsets_mapping=True, return_tensors="pt")
        target = self.tokenizer(question.target, add_special_tokens=False)["input_ids"][0]
        return encoded["input_ids"], encoded["offset_mapping"][0].tolist(), target


def context_cite(loaded: Loaded) -> Scorer:
    """Deletes sentences; Lasso of log-odds. The chat template is the text itself, so that the
    prompt is ours.
    """
    from context_cite import ContextCiter
    from context_cite.context_partitioner import BaseContextPartitioner

    class Sentences(BaseContextPartitioner):
        def __init__(self, parts: list[str]) -> None:
            super().__init__(" ".join(parts))
            self.parts, self.num_sources = parts, len(parts)

        num_sources = 0  # a property there

        def split_context(self) -> None:
            pass

        def get_source(self, index: int) -> str:
            return self.parts[index]

        def get_context(self, mask: Any = None) -> str:
            return " ".join(self.parts if mask is None else itertools.compress(self.parts, mask))

    loaded.tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    loaded.tokenizer.padding_side = "left"

    def score(question: Question, _way: str) -> Sequence[float]:
        sentences = Sentences(question.sentences)
        citer = ContextCiter(
            loaded.model,
            loaded.tokenizer,
            sentences.context,
            question.prompt[question.spans[-1][1] :],
            partitioner=sentences,
            prompt_template="{context}{query}",
            num_ablations=BUDGET,
            generate_kwargs={"max_new_tokens": 1, "do_sample": False},
        )
        return citer.get_attributions(as_dataframe=False, verbose=False)

    return score


def shapiq(loaded: Loaded) -> Scorer:
    """Zero rows; the game is written as its documentation shows, on the log-odds, in batches."""
    import numpy as np
    import shapiq.approximator
    import torch

    def score(question: Question, way: str) -> Sequence[float]:
        ids, offsets, target = loaded.encode(question)
        rows = loaded.model.get_input_embeddings()(ids)[0].detach()
        owner = [
            next((i for i, (a, b) in enumerate(question.spans) if s < b and e > a), -1)
            for s, e in offsets
        ]

        @torch.no_grad()
        def game(masks: Any) -> Any:
            kept = torch.as_tensor(np.atleast_2d(masks).astype(np.float32))
            kept = torch.cat([kept, torch.ones(len(kept), 1)], 1)[:, owner]
            logits = loaded.model(inputs_embeds=rows * kept[..., None], logits_to_keep=1).logits[
                :, -1
            ]
            log_p = logits.log_softmax(-1)[:, target].double()
            return (log_p - torch.log1p(-log_p.exp())).numpy()

        method = getattr(shapiq.approximator, way)(
            n=len(question.spans), random_state=question.seed
        )
        return method.approximate(budget=BUDGET, game=game).get_n_order_values(1).tolist()

    return score


def lxt(loaded: Loaded) -> Scorer:
    """AttnLRP of the target's logit, one pass forwards and one back, summed over a sentence."""

    def score(question: Question, _way: str) -> Sequence[float]:
        ids, offsets, target = loaded.encode(question)
        rows = loaded.model.get_input_embeddings()(ids).detach().requires_grad_()
        loaded.model(inputs_embeds=rows, use_cache=False).logits[0, -1, target].backward()
        loaded.model.zero_grad()
        return question.per_sentence((rows * rows.grad).sum(-1)[0].tolist(), offsets)

    return score


def flashtrace(loaded: Loaded) -> Scorer:
    """Its own tracing of the target through the attention, summed over a sentence."""
    from flashtrace import FlashTrace

    def score(question: Question, _way: str) -> Sequence[float]:
        result = FlashTrace(loaded.model, loaded.tokenizer).trace(
            prompt=question.prompt, target=question.target
        )
        start, offsets = 0, list[list[int]]()
        for token in result.prompt_tokens:
            start = question.prompt.index(token.strip(), start) if token.strip() else start
            offsets.append([start, start := start + len(token.strip())])
        return question.per_sentence(result.scores, offsets)

    return score


class Ours:
    """Our methods: zero rows, unless a method has none."""

    def __init__(self, folder: str) -> None:
        import torch

        import noiser as library

        torch.set_num_threads(1)
        self.tokens, lm = 0, library.load_model(folder, device="cpu", dtype="float32")
        methods = {
            "joint": library.Joint(samples=BUDGET),
            "context_cite": library.ContextCite(samples=BUDGET, removal="delete"),
            "kernel_shap": library.KernelShap(samples=BUDGET, objective="logit"),
            "shapley_sampling": library.ShapleySampling(
                permutations=BUDGET // (2 * SENTENCES), objective="logprob"
            ),
            "occlusion": library.Occlusion(objective="logprob"),
            "attn_lrp": library.AttnLrp(),
            "attention_gradient": library.AttentionGradient(),
        }

        def score(question: Question, way: str) -> Sequence[float]:
            spans = [tuple(span) for span in question.spans]
            att = library.attribute(
                lm, question.prompt, method=methods[way], unit=spans, seed=question.seed
            )
            self.tokens += len(lm.encode(question.prompt).token_ids) + att.info["token_forwards"]
            return att.scores[0].tolist()

        self.score: Scorer = score


# ---- one library's process -----------------------------------------------------------------------


def work(peer: str, folder: str) -> None:
    """Answers lines of stdin, [question, way], by lines of stdout that begin with "= "."""
    options: dict[str, Any] = {"attn_implementation": "eager"} if peer == "flashtrace" else {}
    if peer == "lxt":  # before the model is made
        from lxt.efficient import monkey_patch
        from transformers import AutoConfig
        from transformers.models.llama import modeling_llama

        monkey_patch(modeling_llama)
        config = AutoConfig.from_pretrained(folder)
        config.rope_theta = config.rope_parameters[
            "rope_theta"
        ]  # transformers 4 reads what 5 wrote
        options = {"config": config, "tokenizer": "PreTrainedTokenizerFast"}
    loaded: Any = Ours(folder) if peer == "noiser" else Loaded(folder, **options)
    score: Scorer = loaded.score if peer == "noiser" else globals()[peer.replace("-", "_")](loaded)
    for line in sys.stdin:
        question, way = json.loads(line)
        loaded.tokens = 0
        Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the most memory that was held
        began = time.process_time()
        try:
            answer: dict[str, Any] = {
                "scores": [float(one) for one in score(Question(**question), way)]
            }
        except Exception as error:  # it is the peer's answer
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        seconds, status = time.process_time() - began, Path("/proc/self/status").read_text()
        answer |= {
            "seconds": round(seconds, 3),
            "token_forwards": loaded.tokens,
            "version": version(peer),
        }
        answer["memory_mb"] = int(status.partition("VmHWM:")[2].split()[0]) // 1024
        print("=", json.dumps(answer), flush=True)


class Worker:
    """A process that scores for one library."""

    def __init__(self, peer: str, python: str, folder: str) -> None:
        command = [python, __file__, "-", "work", "--peer", peer, "--model", folder]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: Question, way: str) -> dict[str, Any]:
        """Scores, or an error, with the cost; what libraries print besides is passed over."""
        print(json.dumps([question._asdict(), way]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("= "):
                return json.loads(line[2:])
        raise RuntimeError(
            f"{self.process.args} ended with {self.process.wait()}; its error is above."
        )


# ---- all of them ---------------------------------------------------------------------------------


def questions(
    lm: Any, count: int, seeds: Sequence[int]
) -> Iterator[tuple[str, Question, list[int]]]:
    """So many prompts that count of each category, in turn, each with the numbers of its gold
    sentences.
    """
    import noiser as library
    from noiser.data.planted import draw
    from planted_prompts import places_of

    def says(prompt: str) -> str:
        return library.attribute(lm, prompt, method="position").targets[0].text

    def of(category: str) -> Iterator[tuple[str, Question, list[int]]]:
        for number, example in enumerate(
            each for seed in seeds for each in draw(category, SENTENCES, seed)
        ):
            said, alone = says(example.prompt), says(example.without[0])
            right, known = (
                s.strip() and example.target.startswith(s.strip()) for s in (said, alone)
            )
            if right and not known:
                spans = places_of(example)
                gold = [i for i, span in enumerate(spans) if span in example.spans["gold"]]
                yield (
                    example.id,
                    Question(
                        example.prompt, [list(span) for span in spans], said, number, unit="token"
                    ),
                    gold,
                )

    turns = [of(category) for category in CATEGORIES]
    for _ in range(count):
        yield from (found for turn in turns if (found := next(turn, None)))


def judged(
    lm: Any, question: Question, scores: Sequence[float], gold: list[int]
) -> dict[str, float]:
    """LDS under two removals, and whether the gold sentences are first (equal scores share their
    places).
    """
    import torch

    import noiser as library

    spans = [tuple(span) for span in question.spans]
    att = library.attribute(lm, question.prompt, method="position", unit=spans)
    att = dataclasses.replace(att, scores=torch.tensor([list(scores)], dtype=torch.float32))
    columns = {"gold": [spans[i] for i in gold]}
    found = library.measure(lm, att, "gold_spans", spans=columns, k=(len(gold),))
    numbers = {"recall": round(found[f"recall@{len(gold)}"], 4)}
    for removal in ("zero", "delete"):
        numbers[f"lds_{removal}"] = round(
            library.measure(lm, att, "lds", masks=MASKS, removal=removal)["lds"], 4
        )
    return numbers


def run(chosen: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Adds a line for each prompt, library and way."""
    import noiser as library

    pythons = dict(one.split("=", 1) for one in chosen.python)
    done = {(row["peer"], row["way"], row["prompt"]) for row in rows}
    workers = {
        peer: Worker(peer, pythons.get(peer, sys.executable), chosen.model) for peer in chosen.peers
    }
    lm = library.load_model(chosen.model, device="cpu", dtype="float32")
    for prompt, question, gold in questions(lm, chosen.prompts, chosen.seeds):
        for peer, worker in workers.items():
            for way in WAYS[peer]:
                if (peer, way, prompt) in done:
                    continue
                row: dict[str, Any] = {"peer": peer, "way": way, "prompt": prompt, "budget": BUDGET}
                row |= worker.ask(question, way)
                if "scores" in row:
                    row |= judged(lm, question, row["scores"], gold)
                    row["scores"] = [float(f"{score:.5g}") for score in row["scores"]]
                with chosen.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    for worker in workers.values():
        worker.process.communicate()  # ends it


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: means over prompts, medians of seconds and memory."""
    prompts = dict.fromkeys(row["prompt"] for row in rows)
    counts = [
        f"{name}, n = {sum(f'-{name}-' in prompt for prompt in prompts)}" for name in CATEGORIES
    ]
    heads = (
        "library",
        "way",
        "token-forwards",
        "seconds",
        "MB",
        "LDS, rows zero",
        "LDS, text deleted",
        *counts,
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for peer, way in dict.fromkeys((row["peer"], row["way"]) for row in rows):
        some = [row for row in rows if (row["peer"], row["way"]) == (peer, way)]
        good = [row for row in some if "scores" in row]
        name = f"{peer} {some[0]['version']}"
        if not good:
            lines.append(f"| {name} | {way} | {some[0]['error']} |" + " |" * (len(heads) - 3))
            continue
        forwards = statistics.mean(row["token_forwards"] for row in good)
        seconds, memory = (
            statistics.median(row[key] for row in good) for key in ("seconds", "memory_mb")
        )
        lds = [statistics.mean(row[key] for row in good) for key in ("lds_zero", "lds_delete")]
        by_category = [
            [row["recall"] for row in good if f"-{category}-" in row["prompt"]]
            for category in CATEGORIES
        ]
        recalls = [statistics.mean(some) if some else None for some in by_category]
        numbers = " | ".join("–" if value is None else f"{value:.2f}" for value in (*lds, *recalls))
        lines.append(
            f"| {name} | `{way}` | {forwards:,.0f} | {seconds:.2f} | {memory:,.0f} | {numbers} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a JSONL file, which is added to")
    parser.add_argument("action", choices=("run", "table", "work"))
    parser.add_argument("--model", help="a folder in Hugging Face's layout")
    parser.add_argument("--peers", nargs="*", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--prompts", type=int, default=6, help="of each category")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0], help="of planted prompts; 0: the data set's"
    )
    parser.add_argument("--peer", help="work: which library this process is")
    chosen = parser.parse_args()
    stored = chosen.results.read_text(encoding="utf-8") if chosen.results.exists() else ""
    rows = [json.loads(line) for line in stored.replace("noiser_joint", "joint").splitlines()]
    if chosen.action == "work":
        work(chosen.peer, chosen.model)
    elif chosen.action == "run":
        run(chosen, rows)
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
