"""Saved results of every kind, and changes of one value to something odd."""

import copy
import json
import math
from functools import cache

import noiser
from attribution_for_tests import rich_example
from noiser.attribution import Attribution, Attributions
from noiser.evaluation import Evaluation, Evaluations
from noiser.explain import Comparison, Diff, Expectations, Guarded, Slim, Tolerance
from noiser.explain._expect import Finding
from noiser.explain._guard import ToolEffect
from noiser.explain._slim import Part
from tiny import tiny

ODD = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
    1e308,
    -1e308,
    1e-320,
    0.5,
    "",
    "x",
    "Infinity",
    "-Infinity",
    "NaN",
    [],
    [[]],
    {},
    [None],
    [1, 2, 3],
    ["a"],
    {"a": 1},
    [[1e308] * 3] * 3,
    "a" * 5000,
    [0] * 500,
    "\ud800",
    [[[[]]]],
    "<b>\x1b[31m\u202e",
)
"""What may stand where something else belongs."""

PROMPT = "The quick brown fox jumps. It runs."


@cache
def saved():
    """For each kind of result its class and the content of a file, by name."""
    lm = tiny("llama")
    noisy = noiser.attribute(lm, PROMPT, method="noiser", foil=" a", unit="word", check=4)
    joint = noiser.attribute(lm, PROMPT, unit="word", max_new_tokens=2)
    spans = noiser.attribute(lm, PROMPT, unit="sentence", method="occlusion").aggregate([(0, 26)])
    sources = [("Title", "The fox is in the wood. It sleeps."), ("B", "A dog.")]
    citations = noiser.cite(lm, "Where is the fox?", sources, max_new_tokens=6)
    evaluation = noiser.evaluate(lm, [PROMPT, "The quick"], method="occlusion", metrics=["top_k"])
    results = {
        "noiser": noisy,
        "joint": joint,
        "aggregated": spans,
        "rich": rich_example(),
        "attributions": Attributions([noisy, joint]),
        "comparison": Comparison((noisy,), ("lime: no",)),
        "citations": citations,
        "tolerance": noiser.tolerance(lm, noisy, 1, [0.0, 0.1, 1.0]),
        "diff": noiser.diff(lm, "The quick brown fox", "The slow brown fox"),
        "evaluation": evaluation,
        "evaluations": Evaluations({"first": evaluation, "second": evaluation}),
        "cited rule": noiser.cite(
            lm, "Where is the fox?", sources, max_new_tokens=6, rule=True, check=4
        ),
        "rule": noiser.rule(lm, "The quick fox. It sings. The dog."),
        "slim": Slim(
            before="It rains. Be kind.",
            after="Be kind.",
            tokens_before=8,
            tokens_after=4,
            fitted=3,
            fitted_same=3,
            held_out=2,
            held_out_same=1,
            parts=(
                Part("It rains. ", False, 0, None, 0.0, "no case needs it"),
                Part("Be kind.", True, 2, 1, 5.0, "needed by 2 cases"),
            ),
        ),
        "expectations": Expectations(
            answer="a fox",
            findings=(Finding("says", "dog", "FAIL", math.nan, "the answer says it not"),),
            strongest=(("It rains.", 2.0),),
            model=noisy.model,
        ),
        "guarded": Guarded(
            call="play()",
            function="play",
            verdict="injected",
            user_nats=0.5,
            tools_nats=4.0,
            tools=(ToolEffect(2, "Play!", 4.0),),
            limit=3.0,
            token_forwards=12,
            model=noisy.model,
        ),
    }
    assert isinstance(results["tolerance"], Tolerance)
    assert isinstance(results["diff"], Diff)
    assert isinstance(results["evaluation"], Evaluation)
    return {
        name: (type(result), json.loads(json.dumps(result.to_dict())))
        for name, result in results.items()
    }


def places(value, path=()):
    """The path of every value inside a value; of a list the first two."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from places(item, (*path, index))


def changed(value, path, odd):
    """The value with something odd at a path."""
    if not path:
        return odd
    found = copy.deepcopy(value)
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = odd
    return found


def show(result):
    """The result in every form."""
    result.to_html()
    result.to_markdown()
    result.to_text()
    str(result)
    repr(result)
    result.to_dataframe()
    result.to_json().encode("utf-8", "backslashreplace")
    if isinstance(result, Attribution):
        result.top(3)


def questions(result):
    """What may be asked of an attribution that was loaded: an answer, or an error of the library's
    own.
    """
    if isinstance(result, Attribution):
        yield lambda: result.normalized()
        yield lambda: result.aggregate("sentence")
        yield lambda: result.through()
        yield lambda: noiser.tolerance(tiny("llama"), result, 0, [0.1])
