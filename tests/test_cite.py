import dataclasses
import importlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import noiser
from attribution_for_tests import make, spans_of
from chat_for_tests import chat_model
from engine_for_tests import query_of
from noiser.attribution.summary import as_text
from noiser.engine import prepare, run_one
from noiser.errors import (
    NoiserError,
    ParameterError,
    PromptError,
    StoredFileError,
    TargetError,
    UnitError,
)
from noiser.explain import _cite, alternatives, decisive
from noiser.explain.alternatives import find_alternatives
from noiser.explain.citations_record import Alternative, SourcePair, in_nats
from noiser.explain.citations_summary import about_citations
from noiser.explain.source_removal import SourceRemoval
from noiser.text import read_documents, token_texts
from noiser.types import Pair, Question, Source, Target
from test_engine import masked
from tiny import tiny

SOURCES = ["The fox sings. A dog plays.", ("Weather", "It rains."), "The trains run late."]
ANSWER = " The fox sings. It rains."
QUESTION = "Who sings?"


def citations(**changes):
    """Two sentences and three sources; the first source in two parts, the second under its
    title.
    """
    pieces = ("A fox.", " A dog.", "\n\nRain\n", "It rains.", "\n\n", "Trains.")
    units = spans_of(*pieces)
    att = make(
        pieces,
        ((3.0, 1.0, 0.5, -2.0), (0.1, 0.2, 0.3, 0.4)),
        units=tuple(units[i] for i in (0, 1, 3, 5)),
        targets=(
            Target(" It sings.", 1, math.exp(-0.5), 1, rest=(2, 3)),
            Target(" Now.", 4, 0.25, 1),
        ),
        stderr=torch.tensor([[0.3, 0.4, 0.1, 0.1]] * 2),
        target_unit="sentence",
    )
    fields = {
        "question": QUESTION,
        "sources": (
            Source("", "A fox. A dog.", 0, 13),
            Source("Rain", "Rain\nIt rains.", 15, 29),
            Source("", "Trains.", 31, 38),
        ),
        "answer": " It sings. Now.",
        "answer_without": "I sing.",
        "attribution": att,
        "losses": (5.0, 2.9),
        "memory": 3.0,
        "least_share": 0.1,
    }
    return noiser.Citations(**(fields | changes))


def test_sources_are_cited_in_order_of_their_shares_by_rules_that_are_parameters():
    first, second = citations().sentences
    assert [(c.number, c.score) for c in first.citations] == [(1, 4.0), (2, 0.5)]
    assert [c.share for c in first.citations] == pytest.approx([4 / 4.5, 0.5 / 4.5])
    assert first.citations[0].stderr == pytest.approx(0.5)  # of two parts: the root of 0.3² + 0.4²
    assert [(q.text, q.score) for q in first.citations[0].quotes] == [
        ("A fox.", 3.0),
        ("A dog.", 1.0),
    ]
    assert first.log_probability == pytest.approx(-1.5)  # three tokens
    assert (first.mark, second.mark) == ("[1][2]", "(not supported)")
    assert (second.verdict, second.citations) == ("unsupported", ())
    assert [s.mark for s in citations(least_share=0.2, memory=2.0).sentences] == [
        "[1]",
        "[3][1][2]",
    ]
    assert citations(least_share=1.0, memory=2.0).sentences[1].mark == "(of unclear origin)"
    with pytest.raises(ParameterError, match="There are 1 losses; expected 2"):
        citations(losses=(1.0,))


@pytest.mark.parametrize(
    ("loss", "without", "verdict"),
    [
        (3.1, 0.9, "used"),
        (3.1, 0.1, "used"),
        (2.9, 0.41, "memory"),
        (2.9, 0.39, "unclear"),
        (2.9, 0.31, "unclear"),
        (2.9, 0.29, "unsupported"),
        (-2.0, 0.29, "unsupported"),
        (-2.0, 0.99, "memory"),
    ],
)
def test_a_verdict_follows_from_the_loss_and_the_probability_without_sources(
    loss, without, verdict
):
    """The first sentence has three tokens, so its log-probability is three times their mean."""
    att = citations().attribution
    first, second = att.targets
    token = math.exp(math.log(without) + loss / 3)
    att = dataclasses.replace(att, targets=(first._replace(probability=token), second))
    assert citations(attribution=att, losses=(loss, 2.9)).sentences[0].verdict == verdict


def test_a_sentence_that_falls_far_without_one_source_needs_it_though_others_make_up_for_it():
    """As where two sources say different things: without both it is more probable than with the
    other one alone.
    """
    att = citations().attribution  # the first source has 4.0 of the first sentence
    nats = dataclasses.replace(att, parameters={"objective": "logprob"})
    found = citations(attribution=nats, losses=(1.0, 1.0))
    assert [s.verdict for s in found.sentences] == ["used", "unsupported"]
    assert found.sentences[0].mark == "[1][2]"
    assert [found.needs_sources(row) for row in (0, 1)] == [True, False]
    higher = citations(attribution=nats, losses=(1.0, 1.0), memory=4.5)
    assert higher.sentences[0].verdict == "memory"
    # Other scores are no losses.
    assert citations(losses=(1.0, 1.0)).sentences[0].verdict == "memory"


def test_a_score_that_is_missing_makes_no_sentence_need_sources():
    att = citations().attribution
    scores = torch.full_like(att.scores, math.nan)
    missing = dataclasses.replace(att, scores=scores, parameters={"objective": "logprob"})
    assert not citations(attribution=missing, losses=(1.0, 1.0)).needs_sources(0)


def test_text_and_markdown_have_marks_numbers_units_and_what_a_citation_means():
    nats = dataclasses.replace(citations().attribution, parameters={"objective": "logprob"})
    text = str(citations(attribution=nats))
    assert text.startswith("It sings. [1][2]\n  [1] 4.0 ± 0.5 nats (89%)\n      “A fox.” 3.00\n")
    assert text.count("It sings.") == 1
    assert (
        "  [2] Rain: 0.50 ± 0.10 nats (11%)\n      “It rains.” 0.50\n" in text
    )  # its title is no quote of it
    assert "  log-probability -1.50, without any source -6.50\nNow. (not supported)\n" in text
    assert (
        "Answer without the sources: I sing.\n\n[1]: written under the influence of this source; "
        "not checked" in text
    )
    assert "loses without the source, in nats of log-probability. Cited: at least 10%" in text
    assert "less than 3 nats" in text
    shown = citations().to_markdown()
    assert shown.startswith(
        "- It sings. \\[1\\]\\[2\\]\n  - \\[1\\] 4.0 ± 0.5 (89%)\n    - “A fox.” 3.00\n"
    )
    assert "\n- Answer without the sources: I sing.\n\n\\[1\\]: written under" in shown


@pytest.mark.parametrize(
    "question",
    ["Who <sings>?", [{"role": "user", "content": "Who <sings>?"}]],
    ids=["text", "chat"],
)
def test_a_page_shows_the_question(question):
    assert (
        "<h3>Question</h3><p class=facts dir=auto>Who &lt;sings&gt;?</p>"
        in citations(question=question).to_html()
    )


ALTERNATIVES = ((Alternative(3, " barn", 0.985, 4.2),), ())


def test_alternatives_stand_in_every_form():
    first, second, third = citations().sources
    named = (first, second, third._replace(title="News"))
    found = citations(alternatives=ALTERNATIVES, sources=named)
    assert [sentence.alternatives for sentence in found.sentences] == [ALTERNATIVES[0], ()]
    assert found.sentences[0].mark == "[1][2]"  # it is not cited
    assert "\n  Without [1][2]: “barn” (98 %), from [3] News\n" in str(found)
    assert "\nWithout [1]: what the model says without the sources that the sentence cites" in str(
        found
    )
    assert "Without [" not in str(citations())
    assert "  - Without \\[1\\]\\[2\\]: “barn” (98 %), from \\[3\\] News" in found.to_markdown()
    assert 'without these: “barn” <a href="#noiser-3">[3]</a>' in found.to_html()
    assert "without these" not in citations().to_html()
    assert found.to_dataframe()["alternative"].tolist() == [False, False, True, False, False, False]
    data = found.to_dict()
    alternative = {"number": 3, "says": " barn", "probability": 0.985, "loss": 4.2}
    assert data["sentences"][0]["alternatives"] == [alternative]
    assert noiser.Citations.from_dict(data).sentences == found.sentences
    del data["alternatives"]  # a file of before
    assert noiser.Citations.from_dict(data).sentences[0].alternatives == ()
    with pytest.raises(ParameterError, match="There are 1 alternatives; expected 2"):
        citations(alternatives=ALTERNATIVES[:1])


def test_a_source_without_which_the_model_says_something_else_is_cited():
    """Whatever its share; and the sentence needs sources, whatever it loses."""
    small = {"losses": (1.0, 1.0), "least_share": 0.2}
    assert [s.verdict for s in citations(**small).sentences] == ["memory", "unsupported"]
    found = citations(decisive=((0,), (2,)), **small)
    assert [s.mark for s in found.sentences] == ["[1]", "[3][1][2]"]
    assert [s.mark for s in citations(decisive=((2,), ()), **small).sentences] == [
        "[1][2]",
        "(not supported)",
    ]
    alone = citations(decisive=((), (2,)), losses=(1.0, 1.0), least_share=1.0)
    assert [s.mark for s in alone.sentences] == ["(from memory)", "[2]"]
    assert alone.to_dataframe()["decisive"].tolist() == [False] * 4 + [True, False]
    assert "or without it the model says something else. Not used:" in str(found)
    assert "and still said" in str(found)
    assert "still said" not in str(citations())
    data = found.to_dict()
    assert noiser.Citations.from_dict(data).sentences == found.sentences
    del data["decisive"]  # a file of before
    assert noiser.Citations.from_dict(data).decisive == ()
    with pytest.raises(ParameterError, match="There are 1 decisive; expected 2"):
        citations(decisive=((),))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_a_sentence_is_decided_where_its_token_is_no_longer_the_first(family, monkeypatch):
    """Beside a slow computation; a random model's tokens fall by little."""
    for name, limit in (("LEAST_FALL", 0.01), ("LEAST_PROBABILITY", 1e-9), ("SHORT", 99)):
        monkeypatch.setattr(decisive, name, limit)
    lm = tiny(family)
    query, log_p = three_sources(lm)
    sources = SourceRemoval(query, "zero")

    def falls(gone, row):
        """Of the tokens that were the most probable ones, and no longer are."""
        with_all, without = log_p([], row), log_p(gone, row)
        places = enumerate(query.targets[row].token_ids)
        return [
            float(with_all[place, own] - without[place, own])
            for place, own in places
            if with_all[place].argmax() == own != without[place].argmax()
        ]

    losses, turned = run_one(lm, decisive.losses_without_all(query, sources))
    found = run_one(lm, decisive.find_decisive(query, sources, [[0, 1, 2], [2, 1]]))
    assert any(found)
    for row, candidates in enumerate([[0, 1, 2], [1, 2]]):
        assert (row in turned) == (max(falls([0, 1, 2], row), default=0) >= 0.01)
        expected = [i for i in candidates if max(falls([i], row), default=0) >= 0.01]
        assert sorted(found[row]) == expected
        own = list(enumerate(query.targets[row].token_ids))
        all_gone = log_p([0, 1, 2], row)
        loss = sum(
            float(log_p([], row)[place, token] - all_gone[place, token]) for place, token in own
        )
        assert losses[row] == pytest.approx(loss, abs=1e-3)


@pytest.mark.parametrize(
    ("with_all", "without", "fall"),
    [
        ([[0.6, 0.3, 0.1]], [[0.1, 0.8, 0.1]], math.log(6)),  # from 60 % to 10 %
        ([[0.6, 0.3, 0.1]], [[0.4, 0.3, 0.3]], -math.inf),  # still the first
        ([[0.19, 0.18, 0.18]], [[0.01, 0.8, 0.1]], -math.inf),  # a guess
        ([[0.3, 0.6, 0.1]], [[0.1, 0.8, 0.1]], -math.inf),  # given, not said
        ([[0.6, 0.3, 0.1], [0.9, 0.1, 0]], [[0.2, 0.7, 0.1], [0.1, 0.9, 0]], math.log(9)),
        ([[0.6, 0.3, 0.1], [0.1, 0.9, 0]], [[0.2, 0.7, 0.1], [0.1, 0.9, 0]], -math.inf),
        ([[0.6, 0.3, 0.1]] * 6, [[0.1, 0.8, 0.1]] * 6, -math.inf),  # too long
    ],
)
def test_which_tokens_turn(with_all, without, fall):
    """Targets of the token 0; what is left of a row's sum of 1 is of no token here."""
    clean = torch.tensor(with_all).log()
    rest = 1 - torch.tensor(without).sum(-1, keepdim=True)
    logits = torch.cat([torch.tensor(without), rest.clamp_min(0)], -1).log()[None]
    clean = torch.cat([clean, torch.full_like(clean[:, :1], -9.0)], -1)
    ids = torch.zeros(len(with_all), dtype=torch.long)
    assert decisive._fall_of_turned(logits, clean, ids).tolist() == pytest.approx([fall])


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_two_sources_of_which_either_would_do_are_found(family, monkeypatch):
    """Beside a slow computation; pairs with the sources that are named, each once."""
    for name, limit in (("LEAST_FALL", 0.01), ("LEAST_PROBABILITY", 1e-9), ("SHORT", 99)):
        monkeypatch.setattr(decisive, name, limit)
    lm = tiny(family)
    query, log_p = three_sources(lm)
    asked = [[0, 2], []]
    found = run_one(lm, decisive.without_two(query, SourceRemoval(query, "zero"), asked))
    assert found[1] == []
    own = list(enumerate(query.targets[0].token_ids))
    with_all = log_p([], 0)
    expected = {}
    for pair in [(0, 1), (0, 2), (1, 2)]:
        without = log_p(pair, 0)
        losses = {place: float((with_all - without)[place, token]) for place, token in own}
        turned = [
            losses[place]
            for place, token in own
            if with_all[place].argmax() == token != without[place].argmax()
        ]
        expected[pair] = (sum(losses.values()), max(turned, default=0) >= 0.01)
    assert len(found[0]) == 3
    assert any(each.turned for each in found[0])
    for each in found[0]:
        loss, turned = expected[each.sources]
        assert each.loss == pytest.approx(loss, abs=1e-3)
        assert each.turned == turned


def test_either_of_two_sources_is_a_pair_in_every_form():
    repeats = ((SourcePair((1, 3), -2.5, 0.0, "either"),), ())
    found = citations(repeats=repeats)
    assert found.sentences[0].mark == "[1] or [3], [2]"
    assert found.sentences[0].pairs == repeats[0]
    assert "\n  either would do: [1] or [3] (-2.50)\n" in str(found)
    assert noiser.Citations.from_dict(found.to_dict()).sentences == found.sentences
    # A sentence that does not need sources cites none, whatever is stored.
    assert citations(repeats=((), repeats[0])).sentences[1].mark == "(not supported)"


@pytest.mark.parametrize(
    ("losses", "loss", "turned", "repeats"),
    [
        ((0.1, 0.5), 4.0, True, True),
        ((0.1, 0.5), 4.0, False, True),  # of a long sentence nothing turns
        ((0.1, 0.5), 2.8, True, True),
        ((0.1, 0.5), 2.8, False, False),
        ((0.1, 0.5), 1.5, True, False),  # less than a nat beyond each
        ((8.0, 9.0), 19.0, False, False),  # it falls far without each
        ((3.0, 1.3), 50.0, False, True),
    ],
)
def test_either_would_do_where_the_sentence_falls_without_both_only(losses, loss, turned, repeats):
    citations = SimpleNamespace(scores=torch.tensor([[*losses, 2.0]]), memory=3.0)
    (pairs,) = _cite._repeats(citations, [[decisive.Fall((0, 1), loss, turned)]])
    expected = SourcePair((1, 2), pytest.approx(sum(losses) - loss), 0.0, "either")
    assert pairs == ((expected,) if repeats else ())


@pytest.mark.parametrize(
    ("decisive_sources", "losses", "largest", "asked"),
    [
        ((0,), 2.0, 0.5, [0, 1]),  # the model says something else without all
        ((), 3.5, 0.5, [0, 1]),
        ((), 2.0, 0.5, []),
        ((0, 2), 3.5, 0.5, []),  # one decides alone
        ((), 3.5, 1.2, []),  # or is a third and more of all
        ((), 35.0, 3.5, [0, 1]),
    ],
)
def test_pairs_are_looked_for_where_none_decides_alone(decisive_sources, losses, largest, asked):
    cited = [SimpleNamespace(number=number) for number in (1, 2, 3)]
    found = SimpleNamespace(
        sentences=[SimpleNamespace(loss=losses, citations=cited)],
        decisive=[decisive_sources],
        scores=torch.tensor([[largest, 0.2, math.nan]]),
        memory=3.0,
    )
    assert _cite._undecided(found) == [asked]


def test_a_limit_of_the_caller_s_own_says_alone_which_sentences_need_sources():
    lm = tiny("llama")
    options = {"answer": ANSWER, "contrast": False, "unit": "source"}
    assert noiser.cite(lm, QUESTION, SOURCES, memory=3.0, **options).decisive == ()
    assert len(noiser.cite(lm, QUESTION, SOURCES, **options).decisive) == 2


def test_an_alternative_is_not_folded():
    pieces = tuple(f"S{i}." for i in range(9))
    att = make(
        pieces,
        ((9.0, -8.0, *(-0.1,) * 7),),
        targets=(Target(" It.", 1, 0.5, 1),),
        target_unit="sentence",
    )
    sources = tuple(Source("", unit.text, unit.start, unit.end) for unit in att.units)
    fields = {"attribution": att, "sources": sources, "answer": " It.", "losses": (20.0,)}
    alternatives = ((Alternative(2, " He", 0.9, 3.0),),)
    shown, folded = (
        citations(alternatives=alternatives, **fields).to_html().split("7 sources not cited")
    )
    assert 'id="noiser-2"' in shown
    assert 'id="noiser-2"' not in folded


def three_sources(lm):
    """A model's own words in two halves, after three sources; and a slow computation of their
    log-probabilities: the whole sequence with the rows of some sources zero.
    """
    texts = ["The fox sings. A dog plays.", "It rains.", "The trains run late."]
    prompt = "\n".join([*texts, QUESTION])
    fields = {"prompt": prompt, "sources": texts, "unit": "source", "continuation_units": False}
    whole = run_one(lm, prepare(lm, Question(**fields, max_new_tokens=12, target_unit="all")))
    length = len(whole.target_texts[0])
    halves = [(0, length // 2), (length // 2, length)]
    fields["target_unit"] = halves
    query = run_one(lm, prepare(lm, Question(**fields, target=tuple(whole.target_ids))))

    def log_p(gone, row):
        ids = query.token_ids[None]
        rows = lm.model.get_input_embeddings()(ids).clone()
        for source in gone:
            rows[0, list(query.positions[source])] = 0
        with torch.no_grad():
            logits = lm.model(inputs_embeds=rows).logits[0].float()
        return logits[[*query.positions_read(row)]].log_softmax(-1)

    return query, log_p


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_alternatives_are_what_the_model_says_with_rows_of_sources_zero(family, monkeypatch):
    """Beside a slow computation: the whole sequence once for each set of sources that are gone."""
    monkeypatch.setattr(alternatives, "LEAST_PROBABILITY", 0.0)
    monkeypatch.setattr(alternatives, "RESTS_ON", 1e-3)
    lm = tiny(family)
    query, log_p = three_sources(lm)
    cited = [[0], [1, 2]]
    found = run_one(lm, find_alternatives(lm.tokenizer, query, SourceRemoval(query, "zero"), cited))
    assert any(found)

    for row, (target, gone) in enumerate(zip(query.targets, cited, strict=True)):
        with_all = log_p([], row)
        without = log_p(gone, row)
        leaves = [
            (place, int(without[place].argmax()))
            for place, own in enumerate(target.token_ids)
            if with_all[place].argmax() == own != without[place].argmax()
        ]
        losses = {}
        for place, token in leaves[:1]:
            for other in {0, 1, 2} - {*gone}:
                loss = without[place, token] - log_p([*gone, other], row)[place, token]
                if loss >= 1e-3:
                    losses[other + 1] = float(loss)
        numbers = sorted(losses, key=lambda number: -losses[number])
        assert [each.number for each in found[row]] == numbers
        for each in found[row]:
            place, token = leaves[0]
            assert each.loss == pytest.approx(losses[each.number], abs=1e-4)
            assert each.probability == pytest.approx(float(without[place, token].exp()), rel=1e-3)
            assert each.says == token_texts(lm.tokenizer, [token])[0]


@pytest.mark.parametrize(
    ("method", "score", "nats"),
    [
        ("occlusion@1", "logprob", True),
        ("joint@1", "logit", True),
        ("joint@1", "root", False),
        ("attention_gradient@1", "logit", False),  # shares of slopes
    ],
)
def test_scores_in_nats_are_differences_of_logarithms(method, score, nats):
    att = citations().attribution
    assert in_nats(dataclasses.replace(att, method=method, parameters={"objective": score})) is nats


def test_a_table_has_every_sentence_and_source():
    table = citations().to_dataframe()
    assert table[["sentence_index", "number"]].to_numpy().tolist() == [
        [0, 1],
        [0, 2],
        [0, 3],
        [1, 1],
        [1, 2],
        [1, 3],
    ]
    first = table.iloc[0].to_dict()
    assert [first[name] for name in ("title", "start", "end", "loss", "verdict")] == [
        "",
        0,
        13,
        5.0,
        "used",
    ]
    assert table["log_probability"].tolist() == pytest.approx([-1.5] * 3 + [math.log(0.25)] * 3)
    assert table["score"].tolist() == pytest.approx([4.0, 0.5, -2.0, 0.3, 0.3, 0.4])
    assert table["stderr"].tolist() == pytest.approx([0.5, 0.1, 0.1] * 2)
    assert table["share"].tolist() == pytest.approx([4 / 4.5, 0.5 / 4.5, 0, 0.3, 0.3, 0.4])
    assert table["cited"].tolist() == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]  # the second needs none


def test_the_table_says_what_is_cited_also_without_standard_errors():
    """Methods without random numbers have none: NaN equals nothing, not even itself."""
    found = citations()
    bare = dataclasses.replace(
        found, attribution=dataclasses.replace(found.attribution, stderr=None, pairs=())
    )
    table = bare.to_dataframe()
    numbers = [citation.number for citation in bare.sentences[0].citations]
    assert numbers
    first = table[table["sentence_index"] == 0]
    assert first[first["cited"]]["number"].tolist() == sorted(numbers)


def test_texts_are_shown_safely_and_none_is_markdown():
    plain, evil = citations(), "<script>alert(1)</script>\x1b[2J"
    (title, *others), (it, now) = plain.sources, plain.attribution.targets
    targets = it._replace(text="- a\n==="), now._replace(text="\n2) b\n***")
    found = citations(
        sources=(title._replace(title=f"[t](x) <b>|{evil}"), *others),
        answer_without=f"1. ![i](http://example.org/)\n# h{evil}",
        attribution=dataclasses.replace(plain.attribution, targets=targets),
    )
    shown = found.to_markdown()
    assert "\\[t\\](x) \\<b\\>\\|" in shown
    assert "1. !\\[i\\](http" in shown  # within a line
    assert shown.startswith("- \\- a↵=== \\[1\\]")
    assert "\n- 2\\) b↵\\*\\*\\* (not supported)" in shown
    assert not re.search(r"(?<!\\)[\[\]<>#*_`|]", shown)
    assert "<script>" not in found.to_html()
    assert "\x1b" not in found.to_html() + str(found)


def test_page_ties_sentences_to_what_they_were_written_from_and_back(tmp_path):
    page = citations().to_html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == page
    rules = re.findall(
        r"#noiser:has\(\.(\w)(\d)(?::is\(:hover,:focus-within\)|:hover)\) \.(\w)(\d)", page
    )
    assert {*rules} == {("s", "0", "q", column) for column in "012"} | {
        ("q", column, "s", "0") for column in "012"
    }
    assert page.count('class="q q') == 4
    assert '<a href="#noiser-2">[2]</a>' in page
    assert "<script" not in page


def test_many_sources_without_a_citation_are_folded_and_a_long_one_scrolls_with_the_keyboard():
    pieces = tuple(f"S{i}." for i in range(9))
    att = make(
        pieces,
        ((9.0, 8.0, *(-1.0,) * 7),),
        targets=(Target(" It.", 1, 0.5, 1),),
        target_unit="sentence",
    )
    sources = tuple(Source("", unit.text, unit.start, unit.end) for unit in att.units)
    fields = {"attribution": att, "sources": sources, "answer": " It.", "losses": (20.0,)}
    shown, folded = citations(**fields).to_html().split("<summary>7 sources not cited</summary>")
    assert re.findall(r"class=\"source used\" id=\"noiser-(\d)", shown) == ["1", "2"]
    assert re.findall(r"class=\"source\" id=\"noiser-(\d)", folded) == list("3456789")
    assert re.findall(r"#noiser \.q(\d)\{--a:", shown) == [
        "0",
        "1",
    ]  # coloured before anybody points
    assert "not cited" not in citations(**(fields | {"sources": sources[:8]})).to_html()
    first, *others = citations().sources
    long = citations(sources=(first._replace(text="line\n" * 30), *others)).to_html()
    assert (
        long.count("dir=auto tabindex=0"),
        citations().to_html().count("dir=auto tabindex=0"),
    ) == (1, 0)
    one, other = citations()._repr_html_(), citations()._repr_html_()
    assert re.search(r'id="(noiser-\w+)"', one)[1] != re.search(r'id="(noiser-\w+)"', other)[1]


def test_saved_and_loaded(tmp_path):
    chat, file = [{"role": "user", "content": "Who?", "tool_calls": []}], tmp_path / "a.json"
    record = citations(question=chat, memory=math.inf)
    record.save(file)
    again = noiser.Citations.load(file)
    assert again.to_dict() == record.to_dict()
    assert (again.question, again.memory, again.sentences) == (chat, math.inf, record.sentences)
    data = citations(
        attribution=dataclasses.replace(citations().attribution, pairs=(EITHER,))
    ).to_dict()
    file.write_text(json.dumps(data), encoding="utf-8")
    assert noiser.Citations.load(file).to_dict() == data
    (first, *_), (pair, *_) = data["sentences"][0]["citations"], data["sentences"][0]["pairs"]
    assert (first["quotes"][0]["text"], pair["numbers"]) == ("A fox.", [1, 2])
    without = {key: value for key, value in data.items() if key != "losses"}
    for broken in ("{", "[]", json.dumps({**data, "schema": 2}), json.dumps(without)):
        file.write_text(broken, encoding="utf-8")
        with pytest.raises(StoredFileError, match=r"a\.json"):
            noiser.Citations.load(file)


def log_probabilities(lm, query, hidden=()):
    p = masked(lm, query, hidden, query.sources_stop)
    return p[range(len(p)), list(query.target_ids)].log().tolist(), query.target_texts


def by_sentence(values, texts):
    end = next(i for i in range(len(texts)) if "".join(texts[: i + 1]) == " The fox sings.") + 1
    return [sum(values[:end]), sum(values[end:])]


def test_scores_are_falls_of_each_sentences_log_probability():
    lm = tiny("llama")
    found = noiser.cite(
        lm, QUESTION, SOURCES, answer=ANSWER, unit="sentence", memory=-math.inf, max_new_tokens=3
    )
    prompt = noiser.place_sources(QUESTION, SOURCES)
    assert found.attribution.prompt == prompt
    query = query_of(lm, prompt, target=ANSWER, sources=SOURCES, unit="source")
    clean = by_sentence(*log_probabilities(lm, query))
    assert [s.log_probability for s in found.sentences] == pytest.approx(clean, abs=1e-3)
    everything = [i for unit in query.units[: len(SOURCES)] for i in unit.token_indices]
    none = by_sentence(*log_probabilities(lm, query, everything))
    assert list(found.losses) == pytest.approx(
        [a - b for a, b in zip(clean, none, strict=True)], abs=1e-3
    )
    for column, unit in enumerate(found.attribution.units):
        without = by_sentence(*log_probabilities(lm, query, unit.token_indices))
        expected = [a - b for a, b in zip(clean, without, strict=True)]
        assert found.attribution.scores[:, column].tolist() == pytest.approx(expected, abs=1e-3)


def test_sources_that_carry_a_score_are_taken_apart_and_no_others(monkeypatch):
    monkeypatch.setattr(importlib.import_module("noiser.explain._cite"), "MIN_SHARE", 0.45)
    lm = tiny("llama")
    coarse = noiser.cite(
        lm, QUESTION, SOURCES, answer=ANSWER, unit="source", memory=-math.inf, contrast=False
    )
    found = noiser.cite(
        lm, QUESTION, SOURCES, answer=ANSWER, memory=-math.inf, contrast=False, least_share=0.5
    )
    torch.testing.assert_close(found.scores, coarse.scores, atol=1e-4, rtol=1e-4)
    shares = coarse.scores.abs() / coarse.scores.abs().sum(1, keepdim=True)
    split = [
        bool((shares[:, i] >= 0.45).any()) for i in range(2)
    ]  # the third source is one sentence
    parts = [
        sum(s.start < u.end and u.start < s.end for u in found.attribution.units)
        for s in found.sources
    ]
    assert [count > 1 for count in parts[:2]] == split
    assert any(split)
    assert found.answer_without is None
    remembered = noiser.cite(lm, QUESTION, SOURCES, answer=ANSWER, memory=math.inf, contrast=False)
    assert (
        len(remembered.attribution.units) == 3
    )  # nothing is looked for in sources that do not matter


@pytest.mark.parametrize(
    ("family", "removal", "memory"), [("llama", "hidden", 3.0), ("mamba", "zero", 4.0)]
)
def test_sources_are_hidden_where_the_model_can_hide_them(family, removal, memory):
    options = {"answer": ANSWER, "unit": "source", "contrast": False}
    found = noiser.cite(tiny(family), QUESTION, SOURCES, **options)
    assert found.attribution.parameters["removal"] == removal
    assert found.memory == memory


def written(lm, prompt, count):
    (text,) = query_of(lm, prompt, target_unit="all", max_new_tokens=count).target_texts
    return text


def test_model_writes_the_answer_in_its_chat_template():
    lm = chat_model()
    found = noiser.cite(lm, QUESTION, SOURCES, max_new_tokens=4)
    chat = noiser.place_sources([{"role": "user", "content": QUESTION}], SOURCES)
    assert list(found.attribution.prompt) == chat
    assert found.answer == written(lm, chat, 4)
    alone = [{"role": "user", "content": "Question: Who sings?\nAnswer:"}]
    assert found.answer_without == written(lm, alone, 4)


def test_sources_may_stand_in_the_prompt_already():
    lm, prompt = tiny("llama"), "It rains. The fox sings. Who sings?"
    found = noiser.cite(
        lm,
        prompt,
        ["The fox sings."],
        template=None,
        answer=" The fox.",
        max_new_tokens=2,
        contrast=True,
    )
    assert found.attribution.prompt == prompt
    assert found.answer_without == written(lm, "It rains.  Who sings?", 2)
    assert (
        noiser.cite(
            lm, "The fox.", ["The fox."], template=None, answer=" It.", contrast=True
        ).answer_without
        is None
    )


@pytest.mark.parametrize(
    ("answer", "contrast", "writes"),
    [
        (ANSWER, None, False),
        (ANSWER, True, True),
        (ANSWER, False, False),
        (None, None, True),
        (None, False, False),
    ],
)
def test_an_answer_without_the_sources_is_written_beside_the_model_s_own(answer, contrast, writes):
    lm = chat_model()
    options = {"contrast": contrast, "max_new_tokens": 4}
    found = noiser.cite(lm, QUESTION, SOURCES, answer=answer, **options)
    assert (found.answer_without is not None) == writes
    both = noiser.cite(lm, [QUESTION] * 2, [SOURCES] * 2, answer=[ANSWER, answer], **options)
    assert (both[1].answer_without is not None) == writes


def test_citing_an_answer_that_is_given_takes_few_passes(monkeypatch):
    lm = chat_model()
    run = lm.run
    passes = []
    monkeypatch.setattr(lm, "run", lambda branches: passes.append(1) or run(branches))

    def count(**options):
        passes.clear()
        noiser.cite(lm, QUESTION, SOURCES, answer=ANSWER, max_new_tokens=9, **options)
        return len(passes)

    count()  # the first call also finds out what the model can do
    assert count() == count(contrast=False) < count(contrast=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sources": ["a cat"], "template": None}, UnitError, "is not in the prompt"),
        ({"sources": ["a cat " * 300]}, PromptError, "Shorten the prompt"),
        ({"answer": " \n"}, TargetError, "empty answer"),
        ({"template": 3}, NoiserError, "template is 3"),
        ({"unit": "word"}, LookupError, "Known: auto"),
        ({"question": 3}, NoiserError, "The prompt is a int"),
        ({"question": [{"role": "user"}]}, NoiserError, "The chat has no message with text"),
        ({"memory": "3"}, NoiserError, "memory is '3'"),
        ({"memory": math.nan}, NoiserError, "memory is nan"),
    ],
)
def test_what_cannot_be_cited_is_a_clear_error(changes, error, message, unchecked):
    given = {"question": QUESTION, "sources": SOURCES, "answer": ANSWER} | changes
    with pytest.raises(error, match=message):
        noiser.cite(tiny("llama"), **given)


def test_the_copy_that_was_placed_is_cited_and_not_one_before_it():
    """As in a chat in which the same source was quoted before, and where the question quotes it."""
    lm, source = chat_model(), "A fox </s> sings."  # with a special token
    user, assistant = ({"role": role, "content": ""} for role in ("user", "assistant"))
    chat = [
        user | {"content": f"{source} Where is it?"},
        assistant | {"content": "Here."},
        user | {"content": "Now?"},
    ]
    template = "Is this true: {question}\n\n{sources}"
    for question, options, find in (
        (chat, {}, str.rfind),
        (source, {"template": template}, str.rfind),
        (f"Is it true: {source}", {}, str.find),
    ):
        found = noiser.cite(
            lm, question, [source, "It rains."], answer=ANSWER, contrast=False, **options
        )
        assert found.sources[0].start == find(found.attribution.text, source)
        assert found.sources[0].text == source
        assert found.scores.isfinite().all()


def test_many_questions_are_answered_as_one_by_one():
    lm = tiny("llama")
    questions, answers = [QUESTION, "Does it rain?"], [ANSWER, None]
    sources = [SOURCES, ["The fox sings in the rain. It jumps.", "It rains."]]
    many = noiser.cite(lm, questions, sources, answer=answers, max_new_tokens=4)
    for found, question, texts, answer in zip(many, questions, sources, answers, strict=True):
        alone = noiser.cite(lm, question, texts, answer=answer, max_new_tokens=4)
        assert (found.answer, found.answer_without) == (alone.answer, alone.answer_without)
        torch.testing.assert_close(
            found.attribution.scores, alone.attribution.scores, atol=1e-4, rtol=1e-4
        )
        assert found.losses == pytest.approx(alone.losses, abs=1e-4)
    with pytest.raises(UnitError, match=r"Prompt 1: All sources are empty"):
        noiser.cite(lm, questions, [SOURCES, [" "]], answer=ANSWER)
    with pytest.raises(ParameterError, match="sources is a list of 3 for 2 prompts"):
        noiser.cite(lm, questions, SOURCES)
    with pytest.raises(
        ParameterError, match=r"pair for 2 prompts; expected a list of sources for each"
    ):
        noiser.cite(lm, questions, [("fox", "It sings."), ("dog", "It barks.")])


EITHER = Pair(0, (0, 2), -1.2, 0.1, "either")


@pytest.mark.parametrize(
    ("pairs", "mark"),
    [
        ((EITHER,), "[1] or [2]"),
        ((Pair(0, (1, 3), 0.5, 0.0, "together"),), "[1] with [3], [2]"),
        ((EITHER, Pair(0, (2, 3), -1.0, 0.1, "either")), "[1] or [2] or [3]"),
        ((EITHER, Pair(0, (2, 3), 1.0, 0.1, "together")), "[1] or [2], [3]"),
        (
            (Pair(0, (0, 1), -1.2, 0.1, "either"), Pair(1, (0, 2), -1.2, 0.1, "either")),
            "[1][2]",
        ),  # of one source
    ],
)
def test_pairs_of_sources_are_marked(pairs, mark):
    found = citations(attribution=dataclasses.replace(citations().attribution, pairs=pairs))
    assert found.sentences[0].mark == mark
    assert f"It sings. {mark}" in str(found)
    if pairs == (EITHER,):
        assert "either would do: [1] or [2] (-1.20 ± 0.10)" in str(found)
        assert re.search(r'#\S+-1">\[1\]</a> or <a href="#\S+-2">\[2\]</a>', found.to_html())


class _LangChain:
    def __init__(self, page_content, metadata):
        self.page_content = page_content
        self.metadata = metadata


class _LlamaIndex:
    def __init__(self, text, metadata):
        self.text = text
        self.metadata = metadata


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("A fox. A dog.\n", encoding="utf-8")
    (tmp_path / "sub" / "b.md").write_text("It rains.", encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    return tmp_path


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ({"Fox": "A fox.", "Rain": "It rains."}, [("Fox", "A fox."), ("Rain", "It rains.")]),
        (["A fox.", ("Rain", "It rains.")], ["A fox.", ("Rain", "It rains.")]),
        ([_LangChain("A fox.", {"source": "f.txt"})], [("f.txt", "A fox.")]),
        ([_LangChain("A fox.", {"source": "f.txt", "title": "Fox"})], [("Fox", "A fox.")]),
        ([_LangChain("A fox.", {"page": 3})], ["A fox."]),
        ([{"title": "Fox", "text": "A fox.", "id": 3}], [("Fox", "A fox.")]),
        ([{"text": "A fox."}], [("", "A fox.")]),
        ([_LlamaIndex("A fox.", {"file_name": "f.txt"})], [("f.txt", "A fox.")]),
        ([SimpleNamespace(node=_LlamaIndex("A fox.", {}), score=0.5)], ["A fox."]),
    ],
    ids=[
        "dict",
        "pairs",
        "langchain",
        "titled",
        "untitled",
        "titled dict",
        "untitled dict",
        "llamaindex",
        "scored",
    ],
)
def test_documents_come_in_many_forms(documents, expected):
    assert read_documents(documents) == expected


def test_folders_and_files_are_read(folder):
    files = [("a.txt", "A fox. A dog.\n"), ("sub/b.md", "It rains.")]
    assert read_documents(folder) == files
    assert read_documents([folder / "a.txt", "Trains."]) == [files[0], "Trains."]
    found = noiser.cite(tiny("llama"), QUESTION, folder, answer=" It rains.", contrast=False)
    assert [source.title for source in found.sources] == ["a.txt", "sub/b.md"]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (Path("no/such/file.txt"), "cannot be read"),
        ("docs", "or a pathlib.Path"),
        ([3], "Source 1 is 3"),
        (["", ("Rain", " ")], "All sources are empty"),
    ],
)
def test_documents_that_are_none_are_refused(documents, message):
    with pytest.raises(noiser.NoiserError, match=message):
        noiser.cite(tiny("llama"), QUESTION, documents, answer=" It rains.")


def test_a_text_that_looks_like_a_file_s_name_is_taken_with_a_warning():
    with pytest.warns(UserWarning, match=r"Source 2, 'docs/a.txt', is taken as a text"):
        assert read_documents(["A cat.", "docs/a.txt"]) == ["A cat.", "docs/a.txt"]


def test_a_sentence_that_ends_with_a_file_s_name_is_a_text(recwarn):
    read_documents(["See docs/a.txt"])
    assert not recwarn


def test_a_source_with_a_fifth_of_the_effect_is_cited():
    cited = noiser.cite(tiny("llama"), QUESTION, SOURCES, answer=ANSWER, contrast=False)
    assert cited.least_share == 0.2


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(PromptError, match="has no text file"):
        read_documents(tmp_path)


@pytest.mark.parametrize("empty", [0, 1, 2])
@pytest.mark.parametrize("unit", ["auto", "source", "sentence"])
def test_an_empty_source_keeps_its_number(empty, unit):
    asked = {"answer": " It rains. A dog.", "memory": -math.inf, "contrast": False, "unit": unit}
    sources = ["A fox. A dog.", ("Rain", "It rains.")]
    without = noiser.cite(tiny("llama"), QUESTION, sources, **asked)
    sources.insert(empty, "  ")
    found = noiser.cite(tiny("llama"), QUESTION, sources, **asked)
    assert found.attribution.text == without.attribution.text
    assert found.scores[:, empty].isnan().all()
    others = [number for number in range(3) if number != empty]
    torch.testing.assert_close(found.scores[:, others], without.scores)
    cited = [[c.number for c in sentence.citations] for sentence in found.sentences]
    assert cited == [
        [others[c.number - 1] + 1 for c in sentence.citations] for sentence in without.sentences
    ]
    assert noiser.Citations.from_dict(found.to_dict()).scores.shape == found.scores.shape


def test_sentences_and_quotes_have_their_places():
    sources = ["\n  A fox. A dog.", ("Rain", " It rains.  It pours. ")]
    asked = {"answer": " It rains. A dog runs.", "memory": -math.inf, "contrast": False}
    found = noiser.cite(tiny("llama"), QUESTION, sources, unit="sentence", **asked)
    for sentence in found.sentences:
        assert found.answer[sentence.start : sentence.end] == sentence.text == sentence.text.strip()
        for citation in sentence.citations:
            given = sources[citation.number - 1]
            text = given if isinstance(given, str) else given[1]
            for quote in citation.quotes:
                assert text[quote.start_in_source : quote.end_in_source] == quote.text
                assert found.attribution.text[quote.start : quote.end] == quote.text
    assert any(citation.quotes for sentence in found.sentences for citation in sentence.citations)


def made(scores, losses, **changes):
    """Citations of sentences S0. S1. ... by two titled sources and one without a title."""
    pieces = ("A fox.", "\nA dog.", "\nTrains.")
    units = spans_of(*pieces)
    titles = ("Animals", "Pets", "")
    sources = tuple(
        Source(title, unit.text.strip(), unit.end - len(unit.text.strip()), unit.end)
        for title, unit in zip(titles, units, strict=True)
    )
    targets = tuple(Target(f" S{row}.", row, 0.9, 1) for row in range(len(scores)))
    att = make(
        pieces,
        scores,
        units=units,
        targets=targets,
        target_unit="sentence",
        parameters={"objective": "logprob"},
    )
    answer = "".join(target.text for target in targets)
    fields = {"sources": sources, "answer": answer, "attribution": att, "losses": losses}
    return citations(**fields | changes)


STRONG, WEAK, NONE = (6.3, 0.1, 0.0), (0.0, 0.8, 0.0), (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            made((STRONG, WEAK), (7.0, 4.0)),
            "The answer was written from the sources, most of all “[1] Animals”.",
        ),
        (made((STRONG,), (7.0,)), "The answer was written from source “[1] Animals”."),
        (made(((0.0, 0.0, 9.0),), (9.0,)), "The answer was written from source “[3]”."),
        (
            made((STRONG, STRONG, NONE), (7.0, 7.0, 0.0)),
            "Two sentences were written from source “[1] Animals”; one is “from memory”.",
        ),
        (made((NONE, NONE), (0.0, 0.0)), "The answer is “from memory”."),
    ],
    ids=["all", "one source", "no title", "some", "none"],
)
def test_citations_in_one_sentence(found, expected):
    assert as_text(about_citations(found)) == expected


def test_a_strong_citation_does_not_look_like_a_weak_one():
    """Of one scale for the whole answer, in the text, after the sentence and in the sources."""
    page = made((STRONG, WEAK), (7.0, 4.0)).to_html()
    tints = dict(re.findall(r"#noiser \.q(\d)\{--a:([\d.]+)\}", page))
    assert tints == {"0": "1.00", "1": "0.13"}
    assert re.findall(r'class="s s\d cited" style="--a:([\d.]+)"', page) == ["1.00", "0.13"]
    bars = re.findall(r'<i class=strength title="([^"]*)"', page)
    assert bars == ["[1] 6.30 nats", "[2] 0.80 nats", "6.30 nats", "0.80 nats"]
    assert 'title="0.80 nats for “S1.”">A dog.</span>' in page


def test_quotes_stand_in_a_table_the_strongest_first():
    page = made((WEAK, STRONG), (4.0, 7.0)).to_html()
    table = page.partition(">quote<")[2].partition("</table>")[0]
    rows = re.findall(r"<th scope=row dir=auto>(.*?)</th><td>(.*?)</td><td>(.*?)</td>", table)
    scores = [score for _, _, score in rows]
    assert scores == ["6.30 nats", "0.80 nats"]
    assert rows[1][:2] == ("A dog.", "[2]")
    assert ">quote<" not in made((NONE,), (0.0,)).to_html()


def test_the_verdict_is_the_sentence_s_mark():
    found = citations()
    page = found.to_html()
    assert '<span class="memory not-supported" tabindex=0>not supported</span>' in page
    assert "one is “not supported”" in as_text(about_citations(found))
