import itertools
import json
import math

import pytest
import torch
from typer.testing import CliRunner

import noiser
from noiser.cli import app
from noiser.explain.diff import EXACT
from tiny import chat_tokenizer, save_tiny, tiny

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
    values = {kept: log_p(lm, text_with(kept), answer) for kept in itertools.product((0, 1), repeat=4)}
    for index, edit in enumerate(found.edits):
        gains = []
        for order in itertools.permutations(range(4)):
            first = {*order[: order.index(index)]}
            kept = tuple(int(i in first) for i in range(4))
            gains.append(values[(*kept[:index], 1, *kept[index + 1 :])] - values[kept])
        assert edit.score == pytest.approx(sum(gains) / len(gains), abs=1e-4)
        assert edit.stderr == 0
    assert (found.log_p_before, found.log_p_after) == pytest.approx((values[0, 0, 0, 0], values[1, 1, 1, 1]), abs=1e-4)


def test_many_edits_are_sampled_and_add_up():
    lm = tiny("llama")
    words = ["the", "fox", "sings", "near", "a", "river", "bank", "in", "the", "rain"] * 2
    after = " ".join(f"x{word}" if i % 2 else word for i, word in enumerate(words[:18]))
    found = noiser.diff(lm, " ".join(words[:18]), after, max_new_tokens=2)
    assert len(found.edits) > EXACT
    assert sum(edit.score for edit in found.edits) == pytest.approx(found.log_p_after - found.log_p_before, abs=1e-3)
    assert all(edit.stderr > 0 for edit in found.edits)


def test_a_chat_keeps_its_roles_and_messages_without_content():
    lm, call = noiser.wrap(tiny("llama").model, chat_tokenizer()), {"role": "assistant", "content": None}
    asked = {"role": "user", "content": "Why?"}
    chats = [[{"role": "user", "content": f"The {each} sings."}, call, asked] for each in ("dog", "fox")]
    found = noiser.diff(lm, *chats, max_new_tokens=1)
    assert [(edit.message, edit.before, edit.after) for edit in found.edits] == [(0, " dog", " fox")]
    assert found.edits[0].score == pytest.approx(found.log_p_after - found.log_p_before, abs=1e-4)
    for before, after, message in (
        (chats[0], chats[1][1:], "roles"),
        ([{"role": "user", "content": 1}], chats[1], "content of type int"),
        (chats[0], [chats[1][0], {**call, "name": "x"}, asked], "more than its content"),
        ("The dog", chats[1], "a text and the other a chat"),
        (BEFORE, BEFORE, "same"),
    ):
        with pytest.raises(noiser.NoiserError, match=message):
            noiser.diff(lm, before, after)


def test_shown_as_a_word_diff(tmp_path):
    found = noiser.diff(tiny("llama"), BEFORE, AFTER, max_new_tokens=1)
    assert str(found).startswith(
        "[-The-]{+A+}(1) quick[- fox-]{+ dog+}(2) sings{+ late+}(3) near the[- river-](4) bank\n"
    )
    assert found.to_dataframe()["score"].tolist() == [edit.score for edit in found.edits]
    page = found.to_html(tmp_path / "d.html")
    assert page.count("<del>") == 8
    assert (tmp_path / "d.html").read_text(encoding="utf-8") == page


@pytest.mark.parametrize(("limit", "status"), [(None, 0), (1e-9, 1), (math.inf, 0)])
def test_the_command_fails_above_a_limit(tmp_path, limit, status):
    model = save_tiny("llama", tmp_path / "model")
    for name, text in (("a.txt", BEFORE), ("b.txt", AFTER)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    arguments = ["diff", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "-m", str(model), "--format", "json"]
    ran = CliRunner().invoke(app, [*arguments, *([] if limit is None else ["--fail-above", str(limit)])])
    assert ran.exit_code == status, ran.output
    assert len(json.loads(ran.stdout)["edits"]) == 4
