"""Sentences of the manual that compare methods say what the rows bear: first, level or behind."""

import re
from functools import cache
from pathlib import Path

import pytest
from scipy import stats

from noiser.bench import Store
from noiser.report import cells, standings
from noiser.report.tables import HEADLINES, in_profile

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX, DESIGN, WHICH = "docs/reproduction/index.md", "design/reproduction.md", "design/which.md"
MODELS, LONGRA = "reproduction/three_models", "reproduction/longra"
READINGS = "reproduction/both_readings"  # of the rows of MODELS and of the second reading together
SENTENCES, EVIDENCE = "reproduction/sentences", "evidence"
FIRST, LEVEL, BEHIND, NONE = "first", "level", "behind", "–"


@cache
def committed(pack):
    """The standings in a pack's glance.md, by data set, method and number: one word per model."""
    text = (DOCS / pack / "glance.md").read_text(encoding="utf-8").replace("\\", "")
    lines = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.split("## Standings")[1].splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]
    head, *rest = lines
    return {
        (line[0], line[1], number): tuple(words.split(" · "))
        for line in rest
        for number, words in zip(head[2:], line[2:], strict=True)
    }


QUOTED = [
    # page, words of a sentence, pack, data set, number, and the standings that it states
    (
        INDEX,
        "level with the first on SmolLM2 and Qwen, and behind on Gemma",
        MODELS,
        "known",
        "faithfulness",
        {"noiser": (LEVEL, BEHIND, LEVEL)},
    ),
    (
        INDEX,
        "It is first on Gemma, and level with AttnLRP on SmolLM2",
        LONGRA,
        "longra_capital",
        "critical",
        {"noiser": (LEVEL, FIRST), "attn_lrp": (LEVEL, BEHIND)},
    ),
    (
        INDEX,
        "Behind occlusion's words on SmolLM2, level with the first on Gemma and Qwen",
        MODELS,
        "known",
        "answerability_rate",
        {"noiser": (BEHIND, LEVEL, LEVEL), "occlusion": (LEVEL, LEVEL, LEVEL)},
    ),
    (
        INDEX,
        "`noiser_relative` is first on SmolLM2 and level with input × gradient on Gemma",
        LONGRA,
        "longra_capital",
        "rank_area",
        {"noiser_relative": (FIRST, LEVEL), "input_x_gradient": (BEHIND, LEVEL)},
    ),
    (
        INDEX,
        "By LDS, `joint` is\nfirst on both",
        LONGRA,
        "longra_capital",
        "lds_bernoulli",
        {"joint": (FIRST, FIRST)},
    ),
    (
        INDEX,
        "DeepLIFT is level with it, and `noiser` behind",
        SENTENCES,
        "wikitext",
        "faithfulness",
        {
            "occlusion_logprob": (LEVEL, LEVEL),
            "deeplift": (LEVEL, LEVEL),
            "noiser": (BEHIND, BEHIND),
        },
    ),
    (
        INDEX,
        "By LDS, `joint` is first on both models",
        SENTENCES,
        "wikitext",
        "lds_bernoulli",
        {"joint": (FIRST, FIRST)},
    ),
    *(
        (
            page,
            "behind on Gemma; by rank, LDS and insertion area it is behind on all three",
            READINGS,
            "known",
            number,
            {"noiser_l2": words},
        )
        for page in (INDEX, DESIGN)
        for number, words in (
            ("faithfulness", (LEVEL, BEHIND, LEVEL)),
            ("rank_area", (BEHIND,) * 3),
            ("lds_bernoulli", (BEHIND,) * 3),
            ("insertion_area", (BEHIND,) * 3),
        )
    ),
    (
        INDEX,
        "by rank on Qwen the first reading is level with the first method",
        READINGS,
        "known",
        "rank_area",
        {"noiser_certified": (BEHIND, BEHIND, LEVEL)},
    ),
    (
        DESIGN,
        "AttnLRP is level with it, on Gemma",
        MODELS,
        "known",
        "rank_area",
        {
            "noiser_relative": (LEVEL,) * 3,
            "attn_lrp": (BEHIND, LEVEL, LEVEL),
            "noiser": (BEHIND, BEHIND, LEVEL),
            "joint": (BEHIND, BEHIND, LEVEL),
        },
    ),
    (
        DESIGN,
        "and `joint` is level with it on all three",
        MODELS,
        "known",
        "lds_bernoulli",
        {"context_cite": (LEVEL,) * 3, "joint": (LEVEL,) * 3, "noiser": (BEHIND,) * 3},
    ),
    (
        DESIGN,
        "`noiser_relative` is first by rank (1.319 · 1.272), `joint` by LDS",
        LONGRA,
        "longra",
        "lds_bernoulli",
        {"joint": (FIRST, FIRST)},
    ),
    (
        DESIGN,
        "`joint` is first by LDS, ahead of ContextCite",
        SENTENCES,
        "wikitext",
        "lds_bernoulli",
        {"joint": (FIRST, FIRST), "context_cite": (BEHIND, BEHIND)},
    ),
    (
        WHICH,
        "**`noiser` is behind by rank, LDS and insertion area.**",
        EVIDENCE,
        "known",
        "insertion_area",
        {"noiser": (BEHIND, BEHIND, NONE), "occlusion_logprob": (LEVEL, FIRST, NONE)},
    ),
    (
        WHICH,
        "**`noiser` is behind by rank, LDS and insertion area.**",
        EVIDENCE,
        "known",
        "lds",
        {"noiser": (BEHIND,) * 3, "joint": (LEVEL,) * 3, "context_cite": (LEVEL,) * 3},
    ),
    (
        WHICH,
        "is level with the first by rank on Gemma and Qwen",
        EVIDENCE,
        "known",
        "rank_area",
        {
            "attn_lrp": (BEHIND, LEVEL, LEVEL),
            "joint": (LEVEL, BEHIND, LEVEL),
            "noiser": (BEHIND,) * 3,
        },
    ),
    (
        WHICH,
        "On facts that stand once it is level with the first",
        EVIDENCE,
        "once",
        "mrr",
        {"noiser_sentences": (LEVEL,) * 3},
    ),
]


@pytest.mark.parametrize(("page", "sentence", "pack", "data", "number", "said"), QUOTED)
def test_a_sentence_states_the_standings_of_its_pack(page, sentence, pack, data, number, said):
    assert sentence in (ROOT / page).read_text(encoding="utf-8")
    for method, words in said.items():
        assert committed(pack)[data, method, number] == words


NUMBERS = {
    "paper's score": "faithfulness",
    "area by rank": "rank_area",
    "LDS": "lds_bernoulli",
    "insertion area": "insertion_area",
    "judge is right": "answerability_rate",
}


def test_the_table_of_where_noiser_stands_is_that_of_its_rows():
    text = (ROOT / INDEX).read_text(encoding="utf-8").split("| where `noiser` stands |")[1]
    lines = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text.split("\n\n")[0], re.MULTILINE))
    lines.pop("---", None)
    assert lines.keys() == NUMBERS.keys()
    for name, number in NUMBERS.items():
        assert tuple(lines[name].split(" · ")) == committed(MODELS)["known", "noiser", number], name


def test_no_method_is_first_by_the_papers_score():
    """So design/reproduction.md has it."""
    assert "**By the paper's score no method is first.**" in (ROOT / DESIGN).read_text("utf-8")
    columns = [words for key, words in committed(MODELS).items() if key[2] == "faithfulness"]
    assert FIRST not in {word for words in columns for word in words}


def test_as_many_prompts_saturate_in_the_second_reading_as_the_manual_says():
    """Where raw noise was tolerated beyond 1 / E‖n‖ of the embedding's size."""
    sizes = {"smollm2-135m-instruct": 576, "gemma-3-270m": 640, "qwen2.5-coder-1.5b-instruct": 1536}
    bound = {model: 1 / stats.chi.mean(size) for model, size in sizes.items()}
    tolerated = [
        (row.model, row.values["k_min"] >= bound[row.model])
        for row in Store(DOCS / MODELS / "rows").rows()
        if (row.method, row.metric) == ("noiser", "attribution")
    ]
    smol, gemma, qwen = (
        (tolerated.count((model, True)), tolerated.count((model, False))) for model in sizes
    )
    assert (smol, gemma, qwen) == ((101, 19), (15, 105), (36, 24))
    said = "on 101 of 120\nprompts of SmolLM2, 36 of 60 of Qwen and 15 of 120 of Gemma"
    assert said in (ROOT / INDEX).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("pack", [MODELS, LONGRA, SENTENCES, EVIDENCE])
def test_committed_standings_are_those_of_the_rows(pack):
    """With every resample: about a minute each."""
    store = Store(DOCS / pack / "rows")
    table = standings(store.plan, in_profile(store.plan, cells(store)), HEADLINES)
    found = {
        (line["data"], line["method"], number): tuple(line[number].split(" · "))
        for line in table.to_dict("records")
        for number in line.keys() - {"data", "method"}
    }
    assert found == committed(pack)


def test_the_newest_records_are_counted_as_the_manual_has_them():
    good, every = {}, {}
    for (_, label, _), words in committed(EVIDENCE).items():
        method = label.removesuffix("_sentences")
        good[method] = good.get(method, 0) + words.count(FIRST) + words.count(LEVEL)
        every[method] = every.get(method, 0) + len(words) - words.count(NONE)
    first, second, third = sorted(good.values(), reverse=True)[:3]
    assert (good["joint"], good["context_cite"]) == (first, second)
    text = (ROOT / "docs/which.md").read_text(encoding="utf-8")
    said = f"in {first} of {every['joint']} comparisons, `context_cite` in {second} and"
    assert f"{said} no other method in more than {third}" in text


RECORDS = (EVIDENCE, f"{EVIDENCE}/frontier", MODELS, LONGRA, SENTENCES, "reproduction/bfloat16")


def test_the_default_is_first_or_level_as_often_as_the_manual_says():
    """One comparison is a number, a data set and a model of a pack."""
    counts = {}
    for pack in RECORDS:
        for (_, method, number), words in committed(pack).items():
            if method != "joint":
                continue
            for word in words:
                if word in (FIRST, LEVEL, BEHIND):
                    good, every = counts.get(number, (0, 0))
                    counts[number] = (good + (word != BEHIND), every + 1)
    good, every = (sum(column) for column in zip(*counts.values(), strict=True))
    by_rank = counts["rank_area"]
    both_forms = counts["lds"], counts["lds_bernoulli"]
    by_lds = [sum(column) for column in zip(*both_forms, strict=True)]
    text = (ROOT / "docs/which.md").read_text(encoding="utf-8")
    assert f"in {good} of the {every} comparisons" in text
    assert f"in all {by_lds[1]} by LDS, and in {by_rank[0]} of {by_rank[1]} by rank" in text
    assert by_lds[0] == by_lds[1]
