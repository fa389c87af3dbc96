"""Cases of the golden numbers: every method and metric on tiny models, as functions from a model to
named numbers.
"""

import warnings
from functools import cache, partial

import torch

import noiser
from noiser.errors import NoiserError
from noiser.methods import METHODS, make_method
from tiny import chat_tokenizer, tiny_model

# Public names only, so that everything underneath can be replaced.


def numbers_of(*attributions):
    """What is stored of attributions: all numbers that a user reads, and the work."""
    return numbered(
        {
            "scores": att.scores,
            "stderr": att.stderr,
            "thresholds": att.thresholds,
            "k_min": att.k_min,
            "p": [target.probability for target in att.targets],
            "foil_p": None if att.foil is None else att.foil.probability,
            "units": [[unit.start, unit.end] for unit in att.units],
            "token_forwards": att.info.get("token_forwards"),
        }
        for att in attributions
    )


def numbered(found):
    """The numbers of several results in one, by names that count them."""
    pairs = [
        (index, name, value) for index, each in enumerate(found) for name, value in each.items()
    ]
    return {f"{name}{index or ''}": value for index, name, value in pairs if value is not None}


def listed(found):
    return found if isinstance(found, list) else [found]


def attributed(lm, prompt, **options):
    return numbers_of(*listed(noiser.attribute(lm, prompt, **{"unit": "token"} | options)))


def cited(lm, question, sources, **options):
    """The scores per source, what each sentence loses without all of them, and the attribution."""
    found = listed(noiser.cite(lm, question, sources, max_new_tokens=6, **options))
    return numbered(
        {"by_source": one.scores, "losses": one.losses, **numbers_of(one.attribution)}
        for one in found
    )


@cache
def model(family, batch_tokens=None):
    return noiser.wrap(tiny_model(family).eval(), chat_tokenizer(), batch_tokens=batch_tokens)


# The questions.

PROMPT = "The quick fox sings late"
LONG = "A dog sings. The trains run late! It rains near the river bank."
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The dog sings."}]
SOURCES = ["The lute is in the attic. It rains.", ("Notes", "A dog sings near the bank.")]
QUESTION = "Where is the lute?"
ANSWER = " In the attic. The dog sings."
MANY = [PROMPT, CHAT, "It rains"]
IN_SOURCES = noiser.place_sources(QUESTION, SOURCES)


def favourite(log_p, clean):
    """A number of one's own: the log-probability of token 40 minus the highest one at the clean
    run.
    """
    return (log_p[..., 40] - clean.max(-1).values).sum(-1)


TOKEN = {"target_unit": "token"}
QUESTIONS = {
    "token": (PROMPT, {}),
    "bytes": ("Café 🎻 señor", {}),
    "word": (LONG, {"unit": "word", **TOKEN}),
    "sentence": (LONG, {"unit": "sentence", **TOKEN}),
    "spans": (PROMPT, {"unit": [(4, 9), (10, 19)], **TOKEN}),
    "chat": (CHAT, {"unit": "word", "target": " rain", **TOKEN}),
    "turn": (CHAT, {"unit": "turn", "max_new_tokens": 1, **TOKEN}),
    "source": (IN_SOURCES, {"sources": SOURCES, "unit": "source", **TOKEN}),
    "source_sentence": (
        IN_SOURCES,
        {"sources": SOURCES, "unit": "sentence", "target": " attic", **TOKEN},
    ),
    "token_id": (PROMPT, {"target": 70, "special_tokens": "perturbed"}),
    "foil": (PROMPT, {"target": " rain", "foil": " dog"}),
    "three": (PROMPT, {"max_new_tokens": 3}),
    "three_alone": (PROMPT, {"max_new_tokens": 3, "continuation_units": False}),
    "target_word": (PROMPT, {"unit": "word", "target": " in the river", "target_unit": "word"}),
    "target_sentence": (
        LONG,
        {"unit": "sentence", "target": " Dogs run. It rains.", "target_unit": "sentence"},
    ),
    "target_all": (PROMPT, {"target": " near the bank", "target_unit": "all"}),
    "target_spans": (PROMPT, {"target": " near the bank", "target_unit": [(0, 9), (9, 14)]}),
    "of": (PROMPT, {"of": favourite}),
    "entropy": (
        PROMPT,
        {"of": noiser.objectives.entropy, "target": " in the", "target_unit": "all"},
    ),
    "many": (
        MANY,
        {"target": [None, " rain", None], "foil": [None, " dog", None], "seed": [0, 5, 2]},
    ),
    "many_words": ([PROMPT, LONG], {"unit": "word", "max_new_tokens": 2, **TOKEN}),
    "seed": (PROMPT, {"seed": 7}),
}

# Small hyper-parameters for what would be slow; a method that is not here runs with its defaults.
SMALL = {
    "noiser": {"samples": 3, "steps": 5},
    "noiser@1": {"samples": 3, "steps": 5},
    "noiser_relative": {"samples": 3},
    "lime": {"samples": 12},
    "kernel_shap": {"samples": 14},
    "joint": {"samples": 12},
    "shapley_sampling": {"permutations": 3},
    "context_cite": {"samples": 16},
    "integrated_gradients": {"n_steps": 5},
    "gradient_shap": {"samples": 3},
    "sequential_integrated_gradients": {"n_steps": 3},
}


def each(name, *values):
    return [{name: value} for value in values]


MEAN_ROW = {"baseline": "mean"}
MEAN, LOGPROB = {"removal": "mean"}, {"objective": "logprob"}
# Hyper-parameters, one change at a time, on the question "three".
VARIANTS = {
    "noiser": [
        *each("bounding", "k_max", "k_max_per_unit", "norm_l1", "norm_l2", "norm_linf"),
        *each("bounding", "random", "none", "relative", 0.3),
        *each("objective", "logprob", "hellinger"),
        {"bounding": "relative", "r": 0.5, "objective": "logprob"},
        {"search": "bisection", "bounding": "k_max_per_unit", "objective": "logprob"},
        {"profile": "authors", "bounding": 0.4},
        {"noise": torch.linspace(-2, 2, 64).reshape(2, 32), "samples": 2, "bounding": "k_min"},
    ],
    "occlusion": [
        *each("removal", "mean", "delete", "hidden"),
        *each("objective", "logprob", "hellinger"),
        {"objective": "logprob", "removal": "hidden"},
        {"objective": "hellinger", "removal": "delete"},
    ],
    "joint": each("removal", "mean", "noise", "delete")
    + each("objective", "prob", "logprob", "logit", "hellinger"),
    "lime": [
        MEAN,
        *each("objective", "logprob", "logit", "hellinger"),
        {"mask_probability": 0.6, "alpha": 0.1, "kernel_width": 0.5},
    ],
    "kernel_shap": [MEAN, {"objective": "logit"}],
    "shapley_sampling": [MEAN, LOGPROB],
    "context_cite": [MEAN, LOGPROB, {"keep_probability": 0.7, "alpha": 0.1}],
    "input_x_gradient": [{"reduce": "sum"}, {"reduce": "sum", "objective": "logprob"}],
    "integrated_gradients": [{"reduce": "l2"}, MEAN_ROW, LOGPROB],
    "gradient_shap": [{"stdev": 0.1}, {"reduce": "l2"}, MEAN_ROW | LOGPROB],
    "sequential_integrated_gradients": [MEAN_ROW, LOGPROB],
    "deeplift": [MEAN_ROW, LOGPROB],
    "attn_lrp": [{"softmax": "constant"}],
}

# A question is a query before a method sees it: every question is asked of one method that removes,
# one that adds noise and one that follows gradients, and other methods are asked what they see of
# it.
EVERYWHERE = ("occlusion", "noiser", "integrated_gradients")
COMMON = ("token", "word", "foil", "three", "target_all", "many", "source_sentence", "of")
FEW = ("three", "many")
# A method that refuses tokens and words is asked about larger units.
LARGER = {"attention_gradient": ("sentence", "spans", "turn", "source", "source_sentence")}
FULL = "llama"  # everything
DEEP = (FULL, "gemma3")  # every method

GOLD = {"first": [(0, 9)], "gold": [(10, 15)]}
# Each metric with its settings; attributions to measure are below.
METRIC_SETTINGS = [
    ("lds", {"masks": 12, "draws": 2}),
    ("lds", {"masks": 12, "draws": 2, "removal": "delete"}),
    *(("erasure", {"removal": removal}) for removal in ("zero", "mean", "noise", "delete")),
    ("erasure_curves", {"draws": 2}),
    ("erasure_curves", {"draws": 2, "removal": "delete"}),
    ("top_k", {"k": (1, 2), "draws": 2}),
    ("top_k", {"k": (2,), "draws": 2, "removal": "mean"}),
    ("normalised_aopc", {}),
    ("normalised_aopc", {"removal": "delete"}),
    ("soft_scores", {"masks": 3, "draws": 2}),
    ("soft_scores", {"masks": 2, "draws": 2, "normalization": "positive", "seed": 3}),
    ("soft_scores", {"draws": 2, "profile": "authors"}),
    ("mass_matched", {"masks": 2, "draws": 2, "rates": (0.2, 0.5, 0.8)}),
    ("mass_matched_rank", {"masks": 2, "draws": 2, "rates": (0.2, 0.5, 0.8)}),
    ("gold_spans", {"spans": GOLD, "k": (1, 2)}),
    ("localisation", {"spans": GOLD}),
    ("stability", {}),
]
MEASURED = {
    "three": (PROMPT, {"method": "lime", "max_new_tokens": 3}),
    "word": ("A dog sings near the bank",
             {"method": "occlusion", "unit": "word", "target": " in the", "target_unit": "all"}),
}  # fmt: skip


def cases(family, batch_tokens=None):
    """The cases of a family, by names that are stored."""
    lm = model(family, batch_tokens)
    for name in METHODS.names() if family in DEEP else EVERYWHERE:
        whole = QUESTIONS if name in EVERYWHERE else COMMON
        some = whole if family == FULL else FEW if family in DEEP else FEW[:1]
        for question in LARGER.get(name, some):
            yield f"{name}/{question}", partial(asked, lm, name, question)
    if family == FULL:
        yield from metrics(lm)
        yield "noiser@1/three", partial(asked, lm, "noiser@1", "three")
        for name, changed in [
            (name, changed) for name, several in VARIANTS.items() for changed in several
        ]:
            label = " ".join(
                f"{key}={'own' if key == 'noise' else value}" for key, value in changed.items()
            )
            yield f"{name}/{label}", partial(asked, lm, name, "three", **changed)
        yield from citations(lm)


def asked(lm, name, question, **changed):
    prompt, options = QUESTIONS[question]
    return attributed(
        lm, prompt, method=make_method(name, **{**SMALL.get(name, {}), **changed}), **options
    )


def citations(lm):
    for unit in ("source", "sentence"):
        yield f"cite/{unit}", partial(cited, lm, QUESTION, SOURCES, unit=unit, answer=ANSWER)
    yield "cite/chat", partial(cited, lm, CHAT, SOURCES, unit="source", answer=ANSWER)
    many = {"answer": [ANSWER, " It rains."], "unit": "source"}
    yield (
        "cite/many",
        partial(cited, lm, [QUESTION, "Who sings?"], [SOURCES, SOURCES[::-1]], **many),
    )


def metrics(lm):
    for question, (prompt, options) in MEASURED.items():
        for name, settings in METRIC_SETTINGS:
            if name == "stability":
                again = partial(noiser.attribute, lm, prompt, **{"unit": "token"} | options)
                settings = {"reattribute": lambda seed, again=again: again(seed=seed)}
            label = " ".join(
                f"{key}={value}"
                for key, value in settings.items()
                if key not in ("spans", "reattribute")
            )
            yield (
                f"{name}/{question} {label}".strip(),
                partial(_measured, lm, prompt, options, name, settings),
            )


def _measured(lm, prompt, options, name, settings):
    columns = noiser.measure(
        lm, noiser.attribute(lm, prompt, **{"unit": "token"} | options), name, **settings
    )
    return {column: value for column, value in columns.items() if isinstance(value, int | float)}


def run(case):
    """The numbers of a case as float64 tensors; None where the library refuses the question."""
    try:
        with warnings.catch_warnings(action="ignore"):
            numbers = case()
    except NoiserError:
        return None
    return {name: torch.as_tensor(value).double().detach().cpu() for name, value in numbers.items()}
