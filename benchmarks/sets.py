r"""Do methods find what decides the answer, on planted prompts where word overlap, length and place
do not?

    python benchmarks/sets.py RESULTS.jsonl labels --models gemma-3-270m \
        --wordings 0 1 2 3 4 --seeds 0 1 2
    python benchmarks/sets.py RESULTS.jsonl scores --models gemma-3-270m \
        --wordings 0 1 2 3 4 --seeds 0 1 2
    python benchmarks/sets.py RESULTS.jsonl table --wordings 5 6 7 8 9

`labels` asks a model prompts of six sentences and the same without parts (`labels.py`), and stores
for each prompt why its label is not true of the model, or nothing; it stops where `--most` are
true. `scores` takes these prompts, of all wordings in turn, with every sentence a source; for each
way it stores the score of every source (`--encoder FOLDER` for the encoder). `table` shows the
share of labels that are not true; how often a gold source comes first, and where two are gold,
their share among the first two; what `noiser.cite` cites; and which source it names as taking the
place of those. Equal scores share their places. A line of the file is not computed again.

Wordings 0 to 4 are for development, 5 to 9 for reporting. The encoder is a folder, see
`encoder.py`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import noiser
from encoder import Encoder
from labels import answers, faults
from measuring import in_turn, share
from measuring import table as markdown
from noiser.data import Example
from noiser.data.planted import CATEGORIES, REPEATS, draw
from noiser.engine import Cost, Query, prepare, run_one
from noiser.methods import Method, make_method, run_method
from noiser.model import LanguageModel
from noiser.types import Question
from planted_prompts import places_of, sources_of

SENTENCES = 6
SETS = ("once", "twice", "shared", "contradiction", "two", "none", "irrelevant")
TWO_GOLD = ("twice", "two")
AT_ONCE = 5  # prompts between two writes to the file

WAYS: dict[str, Any] = {
    "cite": None,  # noiser.cite: each source hidden, and what is cited
    "joint, hidden": noiser.Joint(removal="hidden"),
    "context_cite, hidden": noiser.ContextCite(samples=32, removal="hidden"),
    **{
        name: name
        for name in ("attn_lrp", "constant", "position", "length", "overlap", "encoder", "random")
    },
}

Row = dict[str, Any]


def found(scores: Sequence[float], gold: Sequence[int], first: int) -> float:
    """The share of `first` places that gold units take, of the places that they could take; ties
    share places.

    >>> found([3.0, 1.0, 1.0, 0.0], gold=[1], first=2)
    0.5
    """
    last = sorted(scores, reverse=True)[first - 1]
    above = [i for i, score in enumerate(scores) if score > last]
    equal = [i for i, score in enumerate(scores) if score == last]
    hits = len({*above} & {*gold}) + (first - len(above)) * len({*equal} & {*gold}) / len(equal)
    return hits / min(first, len(gold))


# ---- what is stored ------------------------------------------------------------------------------


def drawn(category: str, wording: int, seed: int, repeats: int) -> list[Example]:
    """Prompts of evenly spread repeats, which begin elsewhere in each wording, so that all places
    of gold occur.
    """
    step = REPEATS // repeats
    examples = draw(category, SENTENCES, seed, wording)
    per_repeat = len(examples) // REPEATS
    return [
        example
        for index, example in enumerate(examples)
        if (index // per_repeat - wording) % step == 0
    ]


def cite_rows(lm: LanguageModel, examples: Sequence[Example], targets: Sequence[str]) -> list[Row]:
    """What `noiser.cite` says of each prompt: the scores of its sources, and which are cited."""
    prompts, sources = [e.prompt for e in examples], [sources_of(e) for e in examples]
    options: Any = {"answer": [*targets], "template": None, "unit": "source", "contrast": False}
    return [cited(each) for each in noiser.cite(lm, prompts, sources, **options)]


def method_rows(
    lm: LanguageModel, examples: Sequence[Example], targets: Sequence[str], method: Method
) -> list[Row]:
    """The scores of the sources of each prompt."""
    rows: list[Row] = []
    for seed, (example, target) in enumerate(zip(examples, targets, strict=True)):
        query = replace(query_of(lm, example, target), spent=Cost())
        scores = run_one(lm, run_method(method, query, seed)).scores[0].tolist()
        rows.append({"scores": rounded(scores), "forwards": query.spent.token_forwards})
    return rows


def query_of(lm: LanguageModel, example: Example, target: str) -> Query:
    """The question what each source does to the answer; kept, so that a prompt runs once for all
    methods.
    """
    if (lm, example.id) not in _QUERIES:
        question = Question(
            prompt=example.prompt,
            target=target,
            target_unit="all",
            sources=sources_of(example),
            unit="source",
            continuation_units=False,
        )
        _QUERIES[lm, example.id] = run_one(lm, prepare(lm, question))
    return _QUERIES[lm, example.id]


_QUERIES: dict[tuple[LanguageModel, str], Query] = {}


def score_rows(lm: LanguageModel, examples: Sequence[Example], way: str, encoder: str) -> list[Row]:
    """A row for each prompt, with the scores of its sources in the order of the prompt."""
    written = answers(lm, [example for example in examples if example.target is None])
    targets = [
        example.target or f" {written[example.id].strip().splitlines()[0]}" for example in examples
    ]
    if way == "cite":
        more = cite_rows(lm, examples, targets)
    else:
        method = Encoder(folder=encoder) if way == "encoder" else make_method(WAYS[way])
        more = method_rows(lm, examples, targets, method)
    rows: list[Row] = []
    for example, target, numbers in zip(examples, targets, more, strict=True):
        places = places_of(example)
        sides = {
            name: [places.index(span) for span in example.spans.get(name, ())]
            for name in ("gold", "other_side")
        }
        rows.append({"example": example.id, "answer": target, **sides, **numbers})
    return rows


def cited(citations: noiser.Citations) -> Row:
    """The numbers of the answer's only sentence."""
    sentence, scores = citations.sentences[0], citations.scores[0]
    return {
        "scores": rounded(scores.tolist()),
        "cited": [citation.number - 1 for citation in sentence.citations],
        "alternatives": [alternative.number - 1 for alternative in sentence.alternatives],
        "memory": not citations.needs_sources(0),
        "log_p": round(sentence.log_probability, 4),
        "loss": round(sentence.loss, 4),
        "forwards": citations.attribution.info["token_forwards"],
    }


def rounded(scores: Sequence[float]) -> list[float]:
    return [round(score, 5) for score in scores]


def examples_of(options: argparse.Namespace, category: str) -> dict[str, Example]:
    """All prompts by id, of each seed and wording in turn."""
    columns = [
        drawn(category, wording, seed, options.repeats)
        for seed in options.seeds
        for wording in options.wordings
    ]
    return {example.id: example for example in in_turn(columns)}


def new_rows(
    lm: LanguageModel, name: str, options: argparse.Namespace, rows: Sequence[Row]
) -> Iterator[list[Row]]:
    """The rows that the file lacks, as they come."""
    for category in options.categories:
        key = {"model": name, "category": category}
        examples = examples_of(options, category)
        if options.part == "labels":
            yield from new_labels(lm, key | {"part": "label"}, examples, rows, options.most)
            continue
        true = true_labels(rows, key, examples)[: options.most]
        for way in options.ways:
            own = key | {"part": "score", "way": way}
            done = {row["example"] for row in rows if own.items() <= row.items()}
            for some in in_parts([examples[each] for each in true if each not in done]):
                yield [
                    own | {"wording": example.meta["wording"]} | row
                    for example, row in zip(
                        some, score_rows(lm, some, way, options.encoder), strict=True
                    )
                ]
        _QUERIES.clear()


def new_labels(
    lm: LanguageModel, key: Row, examples: Mapping[str, Example], rows: Sequence[Row], most: int
) -> Iterator[list[Row]]:
    """Why labels are not true of the model, until `most` are true; rows that come are seen in
    `rows`.
    """
    done = {row["example"] for row in rows if key.items() <= row.items()}
    for some in in_parts([example for name, example in examples.items() if name not in done]):
        if len(true_labels(rows, key, examples)) >= most:
            return
        yield [
            key | {"wording": example.meta["wording"], "example": example.id, "fault": fault}
            for example, fault in zip(some, faults(lm, some), strict=True)
        ]


def true_labels(rows: Sequence[Row], key: Row, examples: Mapping[str, Example]) -> list[str]:
    """Ids of the prompts whose labels are true, in the order of the examples."""
    own = key | {"part": "label", "fault": ""}
    true = {row["example"] for row in rows if own.items() <= row.items()}
    return [name for name in examples if name in true]


def in_parts(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """As many examples as are computed between two writes to the file."""
    for begin in range(0, len(examples), AT_ONCE):
        yield examples[begin : begin + AT_ONCE]


# ---- tables --------------------------------------------------------------------------------------


def grouped(rows: Sequence[Row], *names: str) -> Mapping[tuple[Any, ...], list[Row]]:
    """Rows by the values of some fields."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def labels_table(rows: Sequence[Row]) -> list[Row]:
    """For each model and category, how many labels are true, and why others are not."""
    lines: list[Row] = []
    for (model, category), some in grouped(rows, "model", "category").items():
        counts = Counter(row["fault"] for row in some)
        answered = len(some) - counts["answer"]
        false = answered - counts[""]
        reasons = {name: counts[name] for name in ("without", "enough", "moved", "said")}
        dropped = share([True] * false + [False] * counts[""]) if answered else ""
        head = {"model": model, "category": category, "prompts": len(some), "answered": answered}
        lines.append(head | {"label true": counts[""], "dropped of answered": dropped} | reasons)
    return lines


def scores_table(rows: Sequence[Row]) -> list[Row]:
    """For each way, how often a gold source comes first in each set; and of two, their share among
    the first two.
    """
    sets = [
        (model, category)
        for model, category in grouped(rows, "model", "category")
        if category not in ("none", "irrelevant")
    ]
    lines: list[Row] = []
    for (way,), some in grouped(rows, "way").items():
        line: Row = {"way": way}
        own = grouped(some, "model", "category")
        for model, category in sets:
            here = own.get((model, category), [])
            for first in (1, 2) if category in TWO_GOLD else (1,):
                head = f"{model}: {category}{', first two' * (first == 2)}"
                shares = [found(row["scores"], row["gold"], first) for row in here]
                line[head] = f"{sum(shares) / len(shares):.2f} (n = {len(shares)})" if here else ""
        forwards = [row["forwards"] for row in some]
        lines.append(line | {"forward tokens": sum(forwards) / len(forwards)})
    return lines


def citations_table(rows: Sequence[Row]) -> list[Row]:
    """What `noiser.cite` cites in each set."""
    lines: list[Row] = []
    some = [row for row in rows if row["way"] == "cite"]
    for (model, category), here in grouped(some, "model", "category").items():
        golds = [({*row["gold"]}, {*row["cited"]}) for row in here]
        one = share([bool(gold & cited) for gold, cited in golds]) if golds[0][0] else ""
        whole = share([gold <= cited for gold, cited in golds]) if golds[0][0] else ""
        lines.append(
            {
                "model": model,
                "category": category,
                "n": len(here),
                "needs no source": share([row["memory"] for row in here]),
                "a gold source cited": one,
                "all gold sources cited": whole,
                "another cited": share([bool(cited - gold) for gold, cited in golds]),
            }
        )
    return lines


def alternatives_table(rows: Sequence[Row]) -> list[Row]:
    """How often the other side of a contradiction takes the place of the cited source, and any
    other source does; of prompts on which something is cited.
    """
    lines: list[Row] = []
    some = [row for row in rows if row["way"] == "cite" and row["cited"]]
    for (model, category), here in grouped(some, "model", "category").items():
        named = [{*row["alternatives"]} for row in here]
        sides = [{*row["other_side"]} for row in here]
        right = [bool(side & found) for side, found in zip(sides, named, strict=True) if side]
        other = [bool(found - side) for side, found in zip(sides, named, strict=True)]
        lines.append(
            {
                "model": model,
                "category": category,
                "n": len(here),
                "the other side named": share(right) if right else "",
                "another source named": share(other),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("part", choices=["labels", "scores", "table"])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", "gemma-3-270m"])
    parser.add_argument("--categories", nargs="+", choices=list(CATEGORIES), default=list(SETS))
    parser.add_argument("--wordings", nargs="+", type=int, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--most", type=int, default=60, help="prompts of a model and category")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each wording")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--encoder", default="", help="the encoder's folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored = options.results.read_text(encoding="utf-8") if options.results.exists() else ""
    rows = [json.loads(line) for line in stored.splitlines()]
    for model in options.models if options.part != "table" else ():
        name = Path(model).stem
        lm = noiser.load_model(model, dtype=options.dtype, device="cpu")
        for some in new_rows(lm, name, options, rows):
            rows += some
            with options.results.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in some))
    shown = [row for row in rows if row["wording"] in options.wordings]
    labels, scores = ([row for row in shown if row["part"] == part] for part in ("label", "score"))
    tables = [labels_table(labels)]
    tables += [table(scores) for table in (scores_table, citations_table, alternatives_table)]
    print(*(markdown(lines) for lines in tables if lines), sep="\n\n")


if __name__ == "__main__":
    main()
