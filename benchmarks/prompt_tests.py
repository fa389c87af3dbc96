r"""Are `noiser test` and `noiser slim` right? Planted prompts, of which it is known what decides.

    python benchmarks/prompt_tests.py RESULTS.jsonl expect --seconds 240
    python benchmarks/prompt_tests.py RESULTS.jsonl slim --seconds 240
    python benchmarks/prompt_tests.py RESULTS.jsonl table

`expect` takes prompts that no other benchmark has used: a fact that stands there "once", or in
"two" sentences that are both needed (`noiser.data.planted`, wordings of the report), in two
wordings of which "either" is enough, examples ("few-shot"), and a chat whose "system" message has
the fact (`wordings.py`, those of the report). A prompt counts if the model's answer begins with the
planted one, or in a chat holds it; nothing else is asked of the model. So a true clause also fails
the test where the model would give the answer without it. "confident" are those that count where
the answer has a probability of at least one half: with less the model hardly knows it. Each
gold sentence, and one other sentence, the "padding", is expected once in `depends_on`, and once in
`not_on` with the other gold sentences in `depends_on`. `--batch` runs the same prompts with another
size of batch, and `--dtype` with other weights, each under a name of its own; only prompts that
count for the model as it is are run.

`slim` makes system messages of two to four facts that cases ask for, among sentences that no case
asks for: rules of style and other facts. Cases that the model does not answer with the planted
value are left out, and so are facts with fewer than `FEWEST` cases: these become padding. Half of
the cases are held out. Beside `noiser.slim`, prompts of as many sentences are made by what the
cases that took part lose without each sentence, by TF-IDF of sentences and these cases, by
perplexity (the sentences that the same model finds least predictable stay, as LLMLingua's), and at
random.

Rows of other models are kept apart. Every step can be repeated: what has a row is skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import noiser
from measuring import share
from measuring import table as markdown
from noiser.data import Example
from noiser.data.planted import CATEGORIES, REPEATS, draw
from noiser.data.wordings import REPORTING
from noiser.engine import prepare, run_one
from noiser.errors import ExpectationError
from noiser.explain import Expectations
from noiser.explain._slim import _SlimTrial
from noiser.explain.clauses import Clauses
from noiser.model import LanguageModel
from noiser.types import STAYS, Question
from planted_prompts import places_of, sources_of
from wordings import REPORT, Planted, kinds_of

FIRST = 600
"""The number of the first prompt of `wordings.py`: `one_pass.py` has taken those below."""

SEED = 6968
"""Of prompts of `noiser.data.planted`, which has taken no such number."""

LENGTHS = (3, 4)
"""Sentences of these prompts, in turn."""

CONFIDENT = 0.5
"""An answer of this probability (the geometric mean of its tokens') is no lucky guess."""

ANSWER = 4
"""Tokens of an answer to a text; of a chat three times as many."""

KINDS = ("once", "two", "system", "either", "few-shot")

FEWEST = 2
"""Cases of each fact that the model must answer."""

Row = dict[str, Any]


# ---- expect --------------------------------------------------------------------------------------


def prompts_in_turn() -> Iterator[tuple[str, Planted]]:
    """Kinds and prompts, one of each kind and wording after the other."""
    for number in itertools.count():
        for kind in KINDS:
            if kind in CATEGORIES:
                for wording in REPORTING:
                    length = LENGTHS[number % len(LENGTHS)]
                    seed = SEED + number // REPEATS
                    yield kind, as_planted(draw(kind, length, seed, wording)[number % REPEATS])
                continue
            for wording in REPORT:
                own = "once" if kind == "system" else kind
                if own in kinds_of(wording):
                    yield kind, wording.draw(own, FIRST + number)


def as_planted(example: Example) -> Planted:
    """A prompt of the data set, in the form of `wordings.py`."""
    assert example.target is not None
    spans = places_of(example)
    gold = tuple(sorted(spans.index(span) for span in example.spans["gold"]))
    sentences = tuple(sources_of(example))
    question = example.prompt[spans[-1][1] :].strip()
    return Planted(example.id, example.category, sentences, gold, " ", question, example.target)


def prompt_of(kind: str, planted: Planted) -> Any:
    """The text, or the chat whose system message has the sentences."""
    if kind != "system":
        return planted.prompt()
    question = planted.question.removeprefix("Question: ").partition(" Answer:")[0]
    return [
        {"role": "system", "content": planted.between.join(planted.sentences)},
        {"role": "user", "content": f"{question} Answer in one word."},
    ]


def tried(lm: LanguageModel, kind: str, planted: Planted) -> Row:
    """The verdicts of each clause, or that the model does not give the answer."""
    prompt = prompt_of(kind, planted)
    most = 3 * ANSWER if kind == "system" else ANSWER
    stop = None if kind == "system" else "\n"
    question = Question(prompt=prompt, target_unit="all", max_new_tokens=most, stop=stop)
    target = run_one(lm, prepare(lm, question)).targets[0]
    answer = target.text
    is_right = planted.answer in answer if kind == "system" else begins(answer, planted.answer)
    if not is_right:
        return {"answer": answer}
    others = [i for i in range(len(planted.sentences)) if i not in planted.gold]
    padding = random.Random(planted.id).choice(others)
    roles = {planted.sentences[i]: f"gold {n}" for n, i in enumerate(planted.gold)}
    roles[planted.sentences[padding]] = "padding"
    begun = time.process_time()
    tested = list(expected(lm, prompt, most, depends_on=[*roles]))
    gold = [planted.sentences[i] for i in planted.gold]
    for clause in roles:
        needed = [other for other in gold if other != clause]
        found = expected(lm, prompt, most, depends_on=needed, not_on=[clause])
        tested += [finding for finding in found if finding.kind == "not_on"]
    second = gold[-1]
    findings: Row = {}
    for finding in tested:
        name = f"{finding.kind} {roles[finding.about]}"
        findings[name] = [finding.verdict, round(finding.nats, 2)]
        if finding.kind == "depends_on" and roles[finding.about] == "gold 0":
            findings["names the other"] = f"also follows from {second!r}" in finding.reason
    seconds = round(time.process_time() - begun, 1)
    probability = round(target.probability, 4)
    return {
        "answer": answer,
        "probability": probability,
        "findings": findings,
        "seconds": seconds,
    }


def expected(lm: LanguageModel, prompt: Any, most: int, **clauses: Any) -> Sequence[Any]:
    """What becomes of the expectations."""
    try:
        found = noiser.expect(lm, prompt, max_new_tokens=most, **clauses)
    except ExpectationError as error:
        found: Expectations = error.result
    return found.findings


def begins(answer: str, planted: str) -> bool:
    """Whether an answer begins with the planted one."""
    return answer.strip().startswith(planted)


def expect(path: Path, lm: LanguageModel, name: str, seconds: float, most: int) -> None:
    """Adds rows of up to so many prompts that count."""
    begun = time.monotonic()
    done = {(row["model"], row["id"]): row for row in rows_of(path) if row["part"] == "expect"}
    as_it_is = name.partition(",")[0]
    counting = 0
    for kind, planted in prompts_in_turn():
        identity = f"{kind}/{planted.id}"
        if name != as_it_is:
            first_run = done.get((as_it_is, identity))
            if first_run is None:
                return
            if "findings" not in first_run:
                continue
        row = done.get((name, identity))
        if row is None:
            if counting >= most or time.monotonic() - begun > seconds:
                return
            row = {"part": "expect", "model": name, "id": identity, "kind": kind}
            row |= tried(lm, kind, planted)
            add(path, row)
        counting += "findings" in row


# ---- slim ----------------------------------------------------------------------------------------

STYLE = (
    "You are a friendly assistant.",
    "Be polite and patient.",
    "Our shop was founded by two sisters.",
    "Always stay calm.",
    "We value every guest.",
    "Do not use bad language.",
    "Good service matters to us.",
    "Think carefully before you answer.",
    "Never be rude to anybody.",
    "Our office has large windows.",
    "We work with care.",
    "Help whenever you can.",
)

FACT = "The {thing} is in the {value}."
THINGS = "ladder kettle trumpet lantern saddle puzzle carpet hammer"
VALUES = "attic garage cellar kitchen library barn office garden"
ASKED = (
    "Where is the {thing}?",
    "Where can I find the {thing}?",
    "In which room is the {thing}?",
    "Please tell me where the {thing} is.",
    "I need the {thing}. Where is it?",
    "Do you know where the {thing} is?",
)


def system_of(number: int) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Sentences of a system message, and cases: what is asked, the answer, the fact's number.

    Two, three or four facts are asked for, among 10 to 12 sentences.
    """
    rng = random.Random(f"slim/{number}")
    count = 2 + number % 3
    things = rng.sample(THINGS.split(), count + 2)
    values = rng.sample(VALUES.split(), count + 2)
    told = [
        FACT.format(thing=thing, value=value) for thing, value in zip(things, values, strict=True)
    ]
    sentences = [*told, *rng.sample(STYLE, rng.randint(8, 10) - count)]
    rng.shuffle(sentences)
    gold = [sentences.index(text) for text in told[:count]]
    cases: list[tuple[str, str, int]] = []
    for thing, value, place in zip(things, values, gold, strict=False):
        cases += [(asked.format(thing=thing), value, place) for asked in ASKED]
    return sentences, cases


def slimmed(lm: LanguageModel, number: int) -> Row:
    """What is left of a system message, and answers under prompts of other ways."""
    sentences, drawn = system_of(number)
    text = " ".join(sentences)
    clauses = Clauses(text)
    trial = _SlimTrial(lm, clauses, clauses.sentences(), STAYS, 2 * ANSWER)
    right: list[tuple[str, str, int]] = []
    answers = trial.answers([{"user": asked} for asked, _, _ in drawn])
    for case, answer in zip(drawn, answers, strict=True):
        if case[1] in lm.tokenizer.decode(answer.ids).lower():
            right.append(case)
    counted = Counter(place for _, _, place in right)
    right = [case for case in right if counted[case[2]] >= FEWEST]
    row: Row = {"sentences": len(sentences), "right": len(right)}
    if len(right) < 4:  # the fewest that `noiser.slim` takes
        return row
    begun = time.process_time()
    cases = [{"user": asked} for asked, _, _ in right]
    found = noiser.slim(lm, text, cases, hold_out=0.5, max_new_tokens=2 * ANSWER, progress=False)
    row["seconds"] = round(time.process_time() - begun, 1)
    kept = {place for place, part in enumerate(found.parts) if part.kept}
    row |= {"kept": sorted(kept), "tokens": [found.tokens_before, found.tokens_after]}
    row |= {"fitted": [found.fitted_same, found.fitted]}
    row |= {"held_out": {"slim": [found.held_out_same, found.held_out]}}
    # Facts that a case asks for which took part; of others slim cannot know.
    order = random.Random(0).sample(range(len(cases)), len(cases))
    held = order[: found.held_out]
    took_part = [index for index in range(len(cases)) if index not in held]
    row["asked"] = sorted({place for _, _, place in right})
    row["needed"] = sorted({right[index][2] for index in took_part})
    held_answers = trial.answers([cases[index] for index in held])
    whole = frozenset(range(len(sentences)))
    fitted_answers = trial.answers([cases[index] for index in took_part])
    losses: dict[int, float] = {}
    for place in whole:
        effects = trial.effects(whole - {place}, fitted_answers)
        losses[place] = sum(effect.loss for effect in effects)
    scores = {
        "leave one out": losses,
        "TF-IDF": tf_idf(sentences, [cases[index]["user"] for index in took_part]),
        "perplexity": surprise(lm, sentences),
        "random": {place: random.Random(f"{number}/{place}").random() for place in whole},
    }
    for name, of_places in scores.items():
        best = frozenset(sorted(whole, key=lambda place: -of_places[place])[: len(kept)])
        effects = trial.effects(best, held_answers)
        row["held_out"][name] = [sum(effect.stays for effect in effects), len(effects)]
    return row


def tf_idf(sentences: Sequence[str], questions: Sequence[str]) -> dict[int, float]:
    """The largest cosine of each sentence with a question."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer().fit([*sentences, *questions])
    cosines = vectors.transform(sentences) @ vectors.transform(questions).T
    return dict(enumerate(cosines.toarray().max(1).tolist()))


def surprise(lm: LanguageModel, sentences: Sequence[str]) -> dict[int, float]:
    """The nats per token of each sentence after the ones before it."""
    found: dict[int, float] = {}
    for place, sentence in enumerate(sentences):
        before = " ".join(["System:", *sentences[:place]])
        question = Question(prompt=before, target=" " + sentence, target_unit="all")
        query = run_one(lm, prepare(lm, question))
        found[place] = -float(query.read_clean(query.objective("logprob"))) / len(query.target_ids)
    return found


def slim(path: Path, lm: LanguageModel, name: str, seconds: float, most: int) -> None:
    """Adds rows of up to so many system messages that count."""
    begun = time.monotonic()
    done = {(row["model"], row["id"]): row for row in rows_of(path) if row["part"] == "slim"}
    counting = 0
    for number in itertools.count(FIRST):
        row = done.get((name, number))
        if row is None:
            if counting >= most or time.monotonic() - begun > seconds:
                return
            row = {"part": "slim", "model": name, "id": number} | slimmed(lm, number)
            add(path, row)
        counting += "kept" in row


# ---- rows and tables -----------------------------------------------------------------------------


def rows_of(path: Path) -> list[Row]:
    """The stored rows."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def add(path: Path, row: Row) -> None:
    """Adds a line, and prints it."""
    print(row, flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table_of_expect(rows: Sequence[Row]) -> list[Row]:
    """For each kind of prompt the shares of verdicts."""
    lines: list[Row] = []
    for kind in (*KINDS, "all", "confident"):
        drawn = [row for row in rows if kind in (row["kind"], "all")]
        if kind == "confident":
            drawn = [row for row in rows if row.get("probability", 0.0) >= CONFIDENT]
        found = [row["findings"] for row in drawn if "findings" in row]
        if not found:
            continue
        needs = [row["findings"] for row in drawn if "findings" in row and is_needed(row)]
        either = [row["findings"] for row in drawn if "findings" in row and row["kind"] == "either"]
        named = [each["names the other"] for each in either if fails(each)]
        lines.append(
            {
                "kind": kind,
                "drawn, count": f"{len(drawn)}, {len(found)}",
                "depends_on: true clause passes": verdicts(needs, "depends_on gold", "pass"),
                "depends_on: padding fails": verdicts(found, "depends_on padding", "FAIL"),
                "not_on: padding passes": verdicts(found, "not_on padding", "pass"),
                "undecided": verdicts(found, "not_on padding", "undecided"),
                "fails": verdicts(found, "not_on padding", "FAIL"),
                "not_on: true clause fails": verdicts(needs, "not_on gold", "FAIL"),
                "either: names the other": percent(named),
                "either: fails": verdicts(either, "depends_on gold 0", "FAIL"),
            }
        )
    return lines


def fails(findings: Row) -> bool:
    """Whether the first gold sentence is said not to be needed."""
    return findings["depends_on gold 0"][0] == "FAIL"


def is_needed(row: Row) -> bool:
    """Whether each gold sentence by itself is needed."""
    return row["kind"] in ("once", "two", "system")


def verdicts(findings: Sequence[Row], name: str, verdict: str) -> str:
    """The share of a verdict among the findings whose name begins so."""
    hits: list[bool] = []
    for found in findings:
        hits += [value[0] == verdict for key, value in found.items() if key.startswith(name)]
    return percent(hits)


def percent(hits: Sequence[bool]) -> str:
    """A share with its interval, and of how many."""
    return f"{share(hits)} of {len(hits)}" if hits else ""


def table_of_slim(rows: Sequence[Row]) -> list[Row]:
    """What went, what stayed, and the held-out answers of each way."""
    found = [row for row in rows if "kept" in row]
    gone: list[bool] = []
    needed: list[bool] = []
    lines: list[Row] = []
    for row in found:
        padding = set(range(row["sentences"])) - set(row["asked"])
        gone += [place not in row["kept"] for place in padding]
        needed += [place in row["kept"] for place in row["needed"]]
    lines.append({"measure": "system messages drawn, count", "": f"{len(rows)}, {len(found)}"})
    lines.append({"measure": "padding gone", "": percent(gone)})
    lines.append({"measure": "needed sentences kept", "": percent(needed)})
    lengths = [row["tokens"][1] / row["tokens"][0] for row in found]
    lines.append({"measure": "length, mean share", "": f"{statistics.mean(lengths):.2f}"})
    for way in found[0]["held_out"] if found else ():
        hits: list[bool] = []
        for row in found:
            same, of = row["held_out"][way]
            hits += [True] * same + [False] * (of - same)
        lines.append({"measure": f"held-out answers the same: {way}", "": percent(hits)})
    return lines


def agreement(rows: Sequence[Row], name: str) -> str:
    """How many verdicts of a run are those of the model as it is, and how far the nats are apart.

    `name` is the run's, such as "smollm2-135m-instruct, bfloat16".
    """
    as_it_is = name.partition(",")[0]
    of_run, first_run = (
        {row["id"]: row.get("findings", {}) for row in rows if row["model"] == each}
        for each in (name, as_it_is)
    )
    same: list[bool] = []
    apart: list[float] = []
    for identity in of_run:
        one, other = of_run[identity], first_run[identity]
        for about in one.keys() & other.keys() - {"names the other"}:
            same.append(one[about][0] == other[about][0])
            if not math.isnan(one[about][1]):
                apart.append(abs(one[about][1] - other[about][1]))
    answered = sum(bool(findings) for findings in of_run.values())
    return (
        f"{name}: {len(of_run)} prompts, {answered} with the planted answer, the same verdict "
        f"{percent(same)}; nats differ by {max(apart):.2f}, median {statistics.median(apart):.2f}"
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("what", choices=("expect", "slim", "table"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, help="tokens in a pass")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--most", type=int, default=100, help="prompts that count")
    asked = parser.parse_args()
    if asked.what == "table":
        rows = rows_of(asked.results)
        of_expect = [row for row in rows if row["part"] == "expect"]
        for model in dict.fromkeys(row["model"] for row in rows if "," not in row["model"]):
            own = [row for row in rows if row["model"] == model]
            print(f"\n{model}\n")
            print(markdown(table_of_expect([row for row in own if row["part"] == "expect"])))
            slims = [row for row in own if row["part"] == "slim"]
            if slims:
                print("\n" + markdown(table_of_slim(slims)))
        runs = [name for name in {row["model"]: None for row in of_expect} if "," in name]
        print("\n" + "\n".join(agreement(of_expect, run) for run in runs))
        return
    lm = noiser.load_model(asked.model, dtype=asked.dtype)
    name = Path(asked.model).stem
    if asked.batch:
        lm.batch_tokens = asked.batch
        name = f"{name}, {asked.batch} tokens in a pass"
    if asked.dtype != "float32":
        name = f"{name}, {asked.dtype}"
    step = expect if asked.what == "expect" else slim
    step(asked.results, lm, name, asked.seconds, asked.most)


if __name__ == "__main__":
    main()
