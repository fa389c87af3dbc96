"""How much faster a list of prompts is than the same prompts one by one.

    python benchmarks/many_prompts.py --model gemma-3-270m

Both ways run in turns in this process, on the same prompts and threads. Results must agree, or the run fails: scores
within 1e-5, thresholds to the bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import noiser
from measuring import Claim, Part, Setting, main, say
from noiser.model import LanguageModel

METHODS = ("noiser", "noiser_relative", "occlusion", "lime")

NOTE = (
    "float32, {count} prompts of {least} to {most} tokens. One by one: a call for each. As a list: one call. Medians "
    "of {repeats} runs, the two ways in turns; times faster is the median of their ratios."
)

PROMPTS = (
    "The capital of the country that borders only Spain is",
    "A carpenter works mostly with",
    "Two plus three equals",
    "The opposite of cold is",
    "She opened her umbrella because it had started to",
    "The largest planet that goes around our sun is",
    "In the evening the baker sets the alarm early because the bread must be ready before",
    "Bees make",
    "The violin, the viola and the cello belong to the family of",
    "Water freezes at a temperature of zero degrees",
    "My grandmother was born in Lisbon, so her first language was",
    "The tower that Gustave built for the fair in Paris is called the",
    "A group of wolves is called a",
    "After the long flight from Tokyo they were tired, and went straight to",
    "The author of the play about Romeo and Juliet was William",
    "If today is Monday, then tomorrow is",
    "Cats like to chase",
    "The currency that people use in Japan is the",
    "He put the letter into an envelope, wrote the address on it and glued on a",
    "Photosynthesis takes place in the leaves of",
    "The first person who walked on the moon was Neil",
    "To see things that are far away in the sky, astronomers use a",
    "The river that flows through Cairo is the",
    "A triangle has three",
    "At the end of the concert the audience stood up and began to",
    "The chemical symbol H stands for",
    "Oranges, lemons and limes are kinds of",
    "The ship was sinking, so the captain told everyone to climb into the",
    "The painter mixed blue and yellow to get",
    "In chess, the piece that may move any distance along a diagonal is the",
    "The mechanic lifted the bonnet of the car, looked at the engine and shook his",
    "The language that most people in Brazil speak is",
    "Snow is",
    "The seventh month of the year is",
    "When the traffic light turns red, drivers must",
    "The Great Wall is a famous sight in",
    "The surgeon washed her hands, put on her gloves and asked the nurse for the",
    "Bread is made of flour, water, salt and",
    "The fastest animal on land is the",
    "The museum closes at five, so we should arrive before",
)

Found = TypeVar("Found")


def timed(run: Callable[[], Found]) -> tuple[float, Found]:
    begin = time.perf_counter()
    found = run()
    return time.perf_counter() - begin, found


def check(ones: Sequence[noiser.Attribution], many: Sequence[noiser.Attribution]) -> float:
    """The largest difference between scores; an error where results are not the same."""
    worst = 0.0
    for one, other in zip(ones, many, strict=True):
        assert one.prompt == other.prompt
        assert [target.token_id for target in one.targets] == [target.token_id for target in other.targets]
        torch.testing.assert_close(other.scores, one.scores, atol=1e-5, rtol=0, equal_nan=True)
        if one.thresholds is not None:
            assert torch.equal(one.thresholds.nan_to_num(-1), other.thresholds.nan_to_num(-1)), one.prompt
        worst = max(worst, float((one.scores - other.scores).nan_to_num().abs().max()))
    return worst


def row_of(lm: LanguageModel, method: str, prompts: Sequence[str], repeats: int) -> dict[str, Any]:
    """One line of the table: the medians of both ways, which take turns."""
    alone, together = list[float](), list[float]()
    worst = 0.0
    for prompt in prompts[:2]:
        noiser.attribute(lm, prompt, method=method)
    for _ in range(repeats):
        seconds, ones = timed(lambda: [noiser.attribute(lm, prompt, method=method) for prompt in prompts])
        alone.append(seconds)
        seconds, many = timed(lambda: noiser.attribute(lm, list(prompts), method=method))
        together.append(seconds)
        worst = max(worst, check(ones, many))
    return {
        "method": f"`{method}`",
        "one by one, s": statistics.median(alone),
        "as a list, s": statistics.median(together),
        "times faster": statistics.median(a / b for a, b in zip(alone, together, strict=True)),
        "largest difference of a score": f"{worst:.0e}",
    }


def run(setting: Setting) -> Part:
    """Every method, with all prompts."""
    lm = setting.load("float32")
    prompts = PROMPTS[:4] if setting.quick else PROMPTS
    lengths = [len(lm.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    rows = [say(row_of(lm, method, prompts, setting.repeats)) for method in METHODS]
    note = NOTE.format(count=len(prompts), least=min(lengths), most=max(lengths), repeats=setting.repeats)
    return Part("A list of prompts", note, rows, claims(rows))


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """A list is never slower."""
    return [
        Claim(f"{row['method']}, a list of prompts: times faster than one by one", row["times faster"], at_least=1.0)
        for row in rows
    ]


if __name__ == "__main__":
    main(run, __doc__)
