import importlib
import itertools
import json
import math
import re

import pytest
import torch
from typer.testing import CliRunner

import games
import noiser
from noiser.cli import app
from noiser.data import Example
from noiser.errors import ParameterError, StoredFileError
from noiser.explain import tolerance
from noiser.methods.noiser import draw_noise
from noiser.text import token_texts
from noiser.types import Span, Target
from pages import ROOT
from tiny import chat_tokenizer, save_tiny, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox jumps over"
KS = (0.0, 0.05, 0.2, 0.7)


def attribution(family="llama", **options):
    method = options.pop("method", noiser.Noiser(samples=4, bounding="k_max_per_unit"))
    return noiser.attribute(
        tiny(family),
        PROMPT,
        **({"unit": "token"} | {"max_new_tokens": 2, "seed": 3, "target_unit": "token"} | options),
        method=method,
    )


def by_hand(family: str, att, unit_index: int, k: float):
    lm = tiny(family)
    ids = [*lm.tokenizer(PROMPT)["input_ids"], *(target.token_id for target in att.targets)]
    longest = max(len(unit.token_indices) for unit in att.units)
    noise = draw_noise(4, longest, lm.embedding_dim, torch.Generator().manual_seed(3))
    found = []
    for vectors in noise:
        embeddings = lm.model.get_input_embeddings()(torch.tensor(ids)).detach().clone()
        for vector, position in zip(vectors, att.units[unit_index].token_indices, strict=False):
            embeddings[position] += k * lm.abilities.embedding_scale * vector
        found.append(lm.model(inputs_embeds=embeddings[None]).logits[0].softmax(-1))
    first = len(ids) - len(att.targets) - 1
    return torch.stack(found)[:, first : first + len(att.targets)].detach()


@pytest.mark.parametrize(
    ("family", "unit"), [("llama", "token"), ("gemma3", "word"), ("mamba", "token")]
)
def test_equals_one_pass_for_every_sample(family, unit):
    att = attribution(family, unit=unit)
    for unit_index in (0, 2):
        found = tolerance(tiny(family), att, unit_index, KS)
        for column, k in enumerate(KS):
            samples = by_hand(family, att, unit_index, k)
            mean = samples.mean(0)
            for row, target in enumerate(att.targets):
                p = samples[:, row, target.token_id]
                assert found.probabilities[row, column].item() == pytest.approx(
                    p.mean().item(), abs=1e-5
                )
                assert found.stderr[row, column].item() == pytest.approx(
                    p.std().item() / 2, abs=1e-5
                )
                assert found.leaders[row][column].token_id == int(mean[row].argmax())
                assert found.leaders[row][column].probability == pytest.approx(
                    mean[row].max().item(), abs=1e-5
                )
                assert bool(found.flips[row, column]) == (
                    int(mean[row].argmax()) != target.token_id
                )
    assert found.unit == att.units[2]
    assert found.ks.tolist() == pytest.approx(KS)


def test_agrees_with_the_search_of_noiser():
    att = attribution()
    for row, unit in att.thresholds.isfinite().nonzero().tolist():
        k = float(att.thresholds[row, unit])
        at, above = tolerance(tiny("llama"), att, unit, (k, k + 2**-10)).flips[row].tolist()
        assert not at
        assert above or k + 2**-10 >= 1


def test_uses_the_noise_that_the_scores_were_made_with_and_with_a_foil_a_flip_is_of_the_pair():
    for bounding in ("random", 0.4):
        att = attribution(method=noiser.Noiser(samples=4, bounding=bounding), max_new_tokens=1)
        found = tolerance(tiny("llama"), att, 1, (att.info["k"][0][1],)).probabilities[0, 0]
        assert found.item() == pytest.approx(
            att.targets[0].probability - att.scores[0, 1].item(), abs=1e-5
        )
    found = tolerance(
        tiny("llama"), attribution(target=" fox", foil=" dog", max_new_tokens=1), 1, KS
    )
    leads = found.probabilities[0] > found.foil_probabilities
    assert found.flips[0].tolist() == (leads != leads[0]).tolist()


def test_targets_that_the_unit_does_not_stand_before_have_no_values():
    att = attribution()
    last = len(att.units) - 1
    found = tolerance(tiny("llama"), att, torch.tensor(last), KS)  # a tensor is an index too
    assert isinstance(found.unit_index, int)
    assert found.probabilities[0].isnan().all()
    assert not found.probabilities[1].isnan().any()
    assert [len(leaders) for leaders in found.leaders] == [0, len(KS)]


def test_a_leader_that_is_part_of_a_character_is_named_alone():
    """This model leads with two bytes whose ids stand next to each other, and which would read as
    one character.
    """
    lm = noiser.wrap(tiny_model("llama", seed=1).eval(), tiny_tokenizer())
    att = noiser.attribute(lm, "The quick brown fox", method="occlusion", unit="token")
    rows = tolerance(lm, att, 0, [0.0, 0.1, 0.2, 0.3, 0.5, 1.0]).leaders
    ids, texts = zip(
        *sorted({(leader.token_id, leader.text) for row in rows for leader in row}), strict=True
    )
    alone = [token_texts(lm.tokenizer, [token])[0] for token in ids]
    assert [*texts] == alone
    assert alone != token_texts(lm.tokenizer, ids)


def test_other_methods_have_ten_samples_and_a_callers_noise_is_kept():
    of_noiser, of_another = (
        attribution(method=method) for method in (noiser.Noiser(samples=10), "occlusion")
    )
    ten, other = (
        tolerance(tiny("llama"), att, 1, KS).probabilities for att in (of_noiser, of_another)
    )
    assert torch.equal(ten, other)
    own = torch.randn(3, tiny("llama").embedding_dim, generator=torch.Generator().manual_seed(1))
    kept = attribution(method=noiser.Noiser(noise=own))
    stored = noiser.Attribution.from_dict(kept.to_dict())
    expected, found = (
        tolerance(tiny("llama"), each, 1, KS).probabilities for each in (kept, stored)
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found, ten)


def by_hand_worked(**changes):
    """Two targets, the first of which the unit does not stand before."""
    dog, cat = Target(" dog", 1, 0.5, 1), Target("\x1bcat", 2, 0.25, 1)
    fields = {
        "unit": Span(" fox", 3, 7, (1,)),
        "unit_index": 1,
        "targets": (dog, cat),
        "ks": torch.tensor([0.0, 0.05]),
        "probabilities": torch.tensor([[math.nan, math.nan], [0.25, 0.125]]),
        "stderr": torch.tensor([[math.nan, math.nan], [0.0, 0.03125]]),
        "flips": torch.tensor([[False, False], [False, True]]),
        "leaders": ((), (cat, dog)),
    }
    return noiser.explain.Tolerance(**fields | changes)


def test_it_prints_as_a_table_that_has_what_the_tensors_have():
    assert str(by_hand_worked()) == (
        "⟨U+001B⟩cat, with k times standard normal noise on fox\n"
        "       k  P(target)          most probable\n"
        "       0  0.250              ⟨U+001B⟩cat\n"
        "    0.05  0.12 ± 0.03        dog  (flips)"
    )
    foil = torch.tensor([0.5, 0.75])
    rows = by_hand_worked(foil_probabilities=foil).to_dataframe().to_numpy().tolist()
    assert [row[:3] for row in rows] == [[1, "\x1bcat", 0.0], [1, "\x1bcat", pytest.approx(0.05)]]
    values = [[0.25, 0.0, False, "\x1bcat", 0.25, 0.5], [0.125, 0.03125, True, " dog", 0.5, 0.75]]
    assert [row[3:] for row in rows] == values
    assert by_hand_worked().to_dataframe()["foil_probability"].isna().all()


@pytest.mark.parametrize(
    ("unit_index", "ks", "message"),
    [
        (99, KS, "unit_index is 99; expected 0 to"),
        (0, (), "expected one or more finite numbers"),
        (0, (-1.0,), r"ks is \(-1\.0,\)"),
        (0, (math.nan,), "expected one or more finite numbers"),
        (1.0, KS, r"unit_index is 1\.0; expected 0 to"),
        (0, 0.5, r"ks is 0\.5; expected one or more"),
    ],
)
def test_errors_say_what_was_expected(unit_index, ks, message):
    with pytest.raises(ParameterError, match=message):
        tolerance(tiny("llama"), attribution(method="position"), unit_index, ks)


BEFORE = "The quick fox sings near the river bank"
AFTER = "A quick dog sings late near the bank"
EDITS = [("The", "A"), (" fox", " dog"), ("", " late"), (" river", "")]


def text_with(kept):
    one, two, three, four = (edit[is_kept] for edit, is_kept in zip(EDITS, kept, strict=True))
    return f"{one} quick{two} sings{three} near the{four} bank"


@torch.no_grad()
def log_p(lm, prompt, answer):
    ids = lm.tokenizer(prompt)["input_ids"]
    after = lm.tokenizer(answer, add_special_tokens=False)["input_ids"]
    logits = lm.model(torch.tensor([[*ids, *after]])).logits[0].log_softmax(-1)
    return sum(float(logits[len(ids) - 1 + i, token]) for i, token in enumerate(after))


def test_scores_are_shapley_values_over_all_mixtures():
    lm, answer = tiny("llama"), " in the"
    found = noiser.diff(lm, BEFORE, AFTER, target=answer)
    assert [(edit.before, edit.after) for edit in found.edits] == EDITS
    assert [BEFORE[edit.start :].startswith(edit.before) for edit in found.edits] == [True] * 4
    values = {
        kept: log_p(lm, text_with(kept), answer) for kept in itertools.product((0, 1), repeat=4)
    }
    for index, edit in enumerate(found.edits):
        gains = []
        for order in itertools.permutations(range(4)):
            first = {*order[: order.index(index)]}
            kept = tuple(int(i in first) for i in range(4))
            gains.append(values[(*kept[:index], 1, *kept[index + 1 :])] - values[kept])
        assert edit.score == pytest.approx(sum(gains) / len(gains), abs=1e-4)
        assert edit.stderr == 0
    assert (found.log_p_before, found.log_p_after) == pytest.approx(
        (values[0, 0, 0, 0], values[1, 1, 1, 1]), abs=1e-4
    )


@pytest.mark.parametrize(("count", "exact"), [(3, True), (4, False)])
def test_few_edits_are_exact_many_are_sampled_and_both_add_up(count, exact, monkeypatch):
    monkeypatch.setattr(importlib.import_module("noiser.explain._diff"), "EXACT", 3)
    words = ["the", "fox", "sings", "near", "a", "river", "bank", "in"][: 2 * count]
    after = " ".join(f"x{word}" if i % 2 else word for i, word in enumerate(words))
    found = noiser.diff(tiny("llama"), " ".join(words), after, max_new_tokens=2)
    assert len(found.edits) == count
    assert sum(edit.score for edit in found.edits) == pytest.approx(
        found.log_p_after - found.log_p_before, abs=1e-3
    )
    assert all((edit.stderr == 0) is exact for edit in found.edits)


def test_a_chat_keeps_its_roles_and_messages_without_content():
    lm, call = (
        noiser.wrap(tiny("llama").model, chat_tokenizer()),
        {"role": "assistant", "content": None},
    )
    asked = {"role": "user", "content": "Why?"}
    chats = [
        [{"role": "user", "content": f"The {each} sings."}, call, asked] for each in ("dog", "fox")
    ]
    found = noiser.diff(lm, *chats, max_new_tokens=1)
    assert [(edit.message, edit.before, edit.after) for edit in found.edits] == [
        (0, " dog", " fox")
    ]
    assert found.edits[0].score == pytest.approx(found.log_p_after - found.log_p_before, abs=1e-4)
    for before, after, message in (
        (chats[0], chats[1][1:], "roles"),
        ([{"role": "user", "content": 1}], chats[1], "content of type int"),
        (chats[0], [chats[1][0], {**call, "name": "x"}, asked], "more than its content"),
        ("The dog", chats[1], "a text and the other a chat"),
    ):
        with pytest.raises(noiser.NoiserError, match=message):
            noiser.diff(lm, before, after)


def test_shown_as_a_word_diff(tmp_path):
    found = noiser.diff(tiny("llama"), BEFORE, AFTER, max_new_tokens=1)
    shown = (
        "[-The-]{+A+}(1) quick[- fox-]{+ dog+}(2) sings{+ late+}(3) near the[- river-](4) bank\n"
    )
    sentence, _, text = str(found).partition("\n\n")
    assert text.startswith(shown)
    assert sentence.startswith(f"“{found.answer.strip()}” became ")
    assert found.to_dataframe()["score"].tolist() == [edit.score for edit in found.edits]
    page = found.to_html(tmp_path / "d.html")
    assert page.count("<del>") == page.count("<ins>") == 6  # three each, in the text and the table
    assert "<del>fox</del>" in page  # the space before a word is not struck out
    assert (tmp_path / "d.html").read_text(encoding="utf-8") == page


def test_saved_edits_come_back(tmp_path):
    found = noiser.diff(tiny("llama"), BEFORE, AFTER, max_new_tokens=1)
    found.save(tmp_path / "d.json")
    loaded = noiser.Diff.load(tmp_path / "d.json")
    assert loaded == found
    assert str(loaded) == str(found)
    noiser.attribute(tiny("llama"), AFTER, method="random", unit="token").save(tmp_path / "a.json")
    with pytest.raises(StoredFileError, match=r"noiser\.diff"):
        noiser.Diff.load(tmp_path / "a.json")
    for change, message in (
        ({"texts": [["A", 1, 0]]}, "texts have the edits"),
        ({"log_p_after": "much"}, "log_p_after"),
        ({"edits": []}, "texts have the edits"),
    ):
        with pytest.raises(StoredFileError, match=message):
            noiser.Diff.from_dict(found.to_dict() | change)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param(
            {"log_p_after": -3.0, "answer_before": " yes"},
            "“yes” became less likely (14 % to 5.0 %), most of all because of “A” in place of "
            "“The”; the model said it before as well.",
            id="less likely",
        ),
        pytest.param(
            {"scores": (0.05, -0.05)},
            "“yes” is about as likely as before; no edit has a clear effect; before, the model "
            "said “no”.",
            id="no clear effect",
        ),
        pytest.param(
            {"scores": ()}, "Both versions are the same, so that “yes” stays.", id="no edits"
        ),
    ],
)
def test_edits_in_one_sentence(fields, expected):
    fields = {"answer": " yes", "answer_before": " no", "log_p_before": -2.0} | fields
    fields = {"log_p_after": -1.25, "pairs": ()} | fields
    places = ((0, "The", "A"), (4, "", " old"))
    edits = tuple(
        noiser.explain.Edit(0, *place, score)
        for place, score in zip(places, fields.pop("scores", (-0.5, 0.25)), strict=False)
    )
    texts = ((0, " fox", 1),) if edits else (("The fox",),)
    found = noiser.Diff(edits=edits, texts=texts, **fields)
    assert found.to_text().partition("\n")[0] == expected
    assert re.sub("<[^>]*>", "", found._repr_html_().partition("</style>")[2]).startswith(
        re.sub("[“”]", "", expected).replace(" %", "\u00a0%")
    )


def test_edits_as_markdown():
    edits = (
        noiser.explain.Edit(0, 0, "The", "A|B", -0.5, 0.0),
        noiser.explain.Edit(0, 4, "", " old", 1.25, 0.0),
    )
    found = noiser.Diff(
        answer=" yes",
        answer_before=" no",
        log_p_before=-2.0,
        log_p_after=-1.25,
        edits=edits,
        pairs=(),
        texts=((0, " fox", 1),),
    )
    assert found.to_markdown() == (
        "**yes** became likelier (14 % to 29 %), most of all because of the new **old**; before, "
        "the model said *no*.\n\n"
        "\\[-The-\\]\\{+A\\|B+\\}(1) fox\\{+ old+\\}(2)\n\n"
        "log-probability of ' yes': -2.000 before, -1.250 after, +0.750 nats\n\n"
        "the answer before: ' no'\n\n"
        "| edit | nats | before | after |\n|---|---:|---|---|\n"
        "| 2 | +1.25 | ∅ | old |\n| 1 | -0.50 | The | A\\|B |\n"
    )


@pytest.mark.parametrize("prompt", [BEFORE, [{"role": "user", "content": BEFORE}]], ids=type)
def test_equal_versions_have_no_edits(prompt, tmp_path):
    found = noiser.diff(
        noiser.wrap(tiny("llama").model, chat_tokenizer()), prompt, prompt, max_new_tokens=1
    )
    assert found.edits == ()
    assert found.log_p_before == found.log_p_after
    for shown in (str(found), found.to_markdown(), found.to_html()):
        assert "no edits: both versions are the same" in shown
    found.save(tmp_path / "d.json")
    assert noiser.Diff.load(tmp_path / "d.json") == found


@pytest.mark.parametrize(
    ("score", "stderr", "is_clear"),
    [(0.5, 0.0, True), (-0.5, 0.1, True), (0.5, 0.3, False), (0.05, 0.0, False)],
)
def test_edits_without_a_clear_effect_are_called_so(score, stderr, is_clear):
    found = noiser.Diff(
        answer=" yes",
        answer_before=" yes",
        log_p_before=-2.0,
        log_p_after=-2.0 + score,
        edits=(noiser.explain.Edit(0, 0, "The", "A", score, stderr),),
        pairs=(),
        texts=((0, " fox"),),
    )
    assert ("no clear effect" in str(found)) is not is_clear


@pytest.mark.parametrize(("limit", "status"), [(None, 0), (1e-9, 1), (math.inf, 0)])
def test_the_command_fails_above_a_limit(tmp_path, limit, status):
    model = save_tiny("llama", tmp_path / "model")
    for name, text in (("a.txt", BEFORE), ("b.txt", AFTER)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    arguments = [
        "diff",
        str(tmp_path / "a.txt"),
        str(tmp_path / "b.txt"),
        "-m",
        str(model),
        "--format",
        "json",
    ]
    ran = CliRunner().invoke(
        app, [*arguments, *([] if limit is None else ["--fail-above", str(limit)])]
    )
    assert ran.exit_code == status, ran.output
    assert len(json.loads(ran.stdout)["edits"]) == 4


JUMPS = "the quick brown fox jumps"


@pytest.mark.parametrize(
    ("method", "score"),
    [
        (noiser.Occlusion(objective="logprob"), "logprob"),
        (noiser.Occlusion(), "prob"),
        (noiser.Occlusion(objective="hellinger"), "hellinger"),
        (noiser.Joint(samples=20), "logit"),
        (noiser.Joint(), "logit"),
        (noiser.Lime(samples=20), "prob"),
        (noiser.ContextCite(samples=20), "logit"),
        (noiser.KernelShap(), "prob"),
        (noiser.ShapleySampling(permutations=3), "prob"),
    ],
)
def test_methods_give_on_a_stored_game_what_they_give_on_its_model(method, score, tmp_path):
    lm = tiny("llama")
    att = noiser.attribute(lm, JUMPS, method=method, max_new_tokens=2, seed=3, unit="token")
    game = noiser.Game(lm, JUMPS, objective=score, max_new_tokens=2, unit="token")
    assert torch.equal(game.score(method, seed=3).scores.nan_to_num(), att.scores.nan_to_num())
    game(games.subsets(len(game.units)).numpy())
    game.save(tmp_path / "game.json")
    loaded = noiser.Game.load(tmp_path / "game.json")
    assert (loaded.units, loaded.targets) == (game.units, game.targets)
    assert torch.equal(loaded.score(method, seed=3).scores.nan_to_num(), att.scores.nan_to_num())


def test_a_contrast_is_played_on_its_log_odds_and_what_a_game_cannot_do(tmp_path):
    lm, file = tiny("llama"), tmp_path / "game.json"
    att = noiser.attribute(lm, JUMPS, method="joint", foil=" river", unit="token")
    assert torch.equal(
        noiser.Game(lm, JUMPS, foil=" river", unit="token").score("joint").scores, att.scores
    )
    game = noiser.Game(lm, JUMPS, unit="token")
    game.save(file)
    for error, message, call in (
        (ParameterError, r"expected \[inputs, ", lambda: game([[True]])),
        (ParameterError, "not a method that removes units", lambda: game.score("input_x_gradient")),
        (ParameterError, "not stored", lambda: noiser.Game.load(file).score("occlusion")),
        (
            StoredFileError,
            "not a saved game",
            lambda: file.write_text("{}") and noiser.Game.load(file),
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_game_has_the_values_of_its_model_and_prompts_that_do_not_count_are_no_games():
    lm = tiny("llama")
    said = noiser.attribute(lm, JUMPS, method="random", unit="token").targets[0].text
    asked = {"id": "own-1", "prompt": JUMPS, "target": said, "dataset": "own"}
    row, game = (
        games.play(lm, Example(**asked)),
        noiser.Game(lm, JUMPS, objective="prob", unit="token"),
    )
    values = game(games.subsets(len(game.units)).numpy())[0]
    torch.testing.assert_close(
        torch.tensor(row["prob"], dtype=torch.float64), values, rtol=1e-3, atol=1e-6
    )
    assert row["hellinger"][-1] == pytest.approx(0, abs=1e-9)
    assert min(row["hellinger"][:-1]) > 0
    for other in ({"target": "Zq"}, {"prompt": " ".join(["fox"] * 12)}):
        assert games.play(lm, Example(**asked | other)) is None


def test_measures_of_a_game_worked_by_hand():
    """Unit 0 alone decides; p = 0.8 with it and 0.2 without, and the distance is 0 or 0.5."""
    inputs = games.subsets(2)
    game = games.Played(
        2,
        (0,),
        torch.where(inputs[:, 0], 0.8, 0.2).double(),
        torch.where(inputs[:, 0], 0.0, 0.5).double(),
    )
    right, wrong = (
        game.measures(torch.tensor(scores, dtype=torch.float64))
        for scores in ([1.0, 0.0], [0.0, 1.0])
    )
    assert right["erasure"] == pytest.approx(0.6)
    assert wrong["erasure"] == pytest.approx(-0.6)
    assert (right["gold"], wrong["gold"]) == (1, 0)
    # Of the inputs with half of the units, {0} and {1}, the first has the higher odds.
    assert right["LDS"] == pytest.approx(1)
    assert wrong["LDS"] == pytest.approx(-1)
    # kept with probability q, unit 0 adds q to either curve; by rank it has 2 of 3 parts of the
    # mass until it is full
    full = [min(1.0, 2 * rate * 2 / 3) for rate in games.SETTINGS["rates"]]
    rates = torch.tensor(games.SETTINGS["rates"])
    expected = 2 * float(torch.trapezoid(torch.tensor(full), rates) / (rates[-1] - rates[0]))
    assert right["rank"] + game._random_area == pytest.approx(expected, rel=1e-5)


def test_the_stored_games_are_whole_and_make_the_table():
    path = ROOT / "benchmarks" / "results" / "games.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {
        len(row["prob"]) == len(row["hellinger"]) == 2 ** row["units"]
        for row in rows
        if "units" in row
    } == {True}
    assert {row["units"] for row in rows if row["set"] != "known" and "units" in row} == {
        games.SENTENCES
    }
    table = games.table(path, {"leave one out, p": noiser.Occlusion()}, seeds=1)
    lines = [line.split("|")[1:-1] for line in table.splitlines()[2:]]
    assert [line[0].strip() for line in lines] == ["leave one out, p", "constant", "random"]
    documented = (ROOT / "design" / "estimator.md").read_text(encoding="utf-8")
    assert all(cell.strip() in documented for line in lines for cell in line[1:])


@pytest.mark.parametrize("kind", ["together", "either"])
@pytest.mark.parametrize("way", ["joint, 8 n", "KernelSHAPIQ"])
def test_the_gold_pair_is_found_in_a_game_that_is_nothing_else(kind, way):
    pytest.importorskip("shapiq")
    first, second = games.subsets(4)[:, :2].T
    prob = 0.05 + 0.9 * ((first & second) if kind == "together" else (first | second)).double()
    game = games.Played(4, (0, 1), prob, torch.empty(0))
    assert games.found_by(way, 16, kind, game, seed=0)[0]
    wrong = {"together": "either", "either": "together"}[kind]
    assert not games.found_by(way, 16, wrong, game, seed=0)[0]
