"""Saved results with one value changed: refused in one sentence, or read and then shown in every
form.
"""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noiser.errors import NoiserError, StoredFileError, UnknownNameError
from saved_for_tests import ODD, changed, places, questions, saved, show
from soak import times

KINDS = (
    "noiser",
    "joint",
    "aggregated",
    "rich",
    "attributions",
    "comparison",
    "citations",
    "tolerance",
    "diff",
    "evaluation",
    "evaluations",
    "cited rule",
    "rule",
    "slim",
    "expectations",
    "guarded",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_as_it_was_saved_can_be_shown(kind):
    form, data = saved()[kind]
    result = form.from_dict(data)
    assert result.to_dict() == data
    show(result)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_refused_or_can_be_shown(kind):
    form, data = saved()[kind]
    every = list(places(data))

    @settings(max_examples=times(25, 1000))
    @given(st.sampled_from(every), st.sampled_from(ODD))
    def check(path, odd):
        refusal = None
        try:
            result = form.from_dict(changed(data, path, odd))
        except (StoredFileError, UnknownNameError) as error:  # such as a plugin's metric
            refusal = str(error)
        if refusal is not None:
            assert "\n" not in refusal
            return
        show(result)
        for ask in questions(result):
            with contextlib.suppress(NoiserError):
                ask()

    check()


NEVER_SHOWN = {
    "check.p": (("info", "check", "p"), "x"),
    "no targets": (("targets",), []),
    "longer prompt": (("prompt_length",), 99_999),
    "no tokens": (("units", 0, "token_indices"), []),
    "a position beyond int64": (("units", 0, "token_indices"), [2**63]),
    "a unit beyond the text": (("units", 0, "end"), 99_999),
    "a seed beyond 64 bits": (("seed",), 2**64),
    "a score that is a list": (("parameters", "objective"), []),
}


TOGETHER_NEVER_SHOWN = {
    "no evaluation": ("evaluations", ("evaluations",), {}),
    "evaluations of other draws": ("evaluations", ("evaluations", "second", "settings"), {}),
    "a prompt without tokens": ("slim", ("tokens_before",), 0),
    "more tokens than there are numbers": ("slim", ("tokens_after",), 10**400),
    "more cases than there are": ("slim", ("held_out_same",), 3),
}


@pytest.mark.parametrize("name", TOGETHER_NEVER_SHOWN)
def test_values_that_cannot_be_right_together_are_refused(name):
    kind, path, odd = TOGETHER_NEVER_SHOWN[name]
    form, data = saved()[kind]
    with pytest.raises(StoredFileError):
        form.from_dict(changed(data, path, odd))


@pytest.mark.parametrize("name", NEVER_SHOWN)
def test_a_value_that_cannot_be_right_is_refused(name):
    path, odd = NEVER_SHOWN[name]
    form, data = saved()["noiser"]
    with pytest.raises(StoredFileError):
        form.from_dict(changed(data, path, odd))


def test_a_check_without_a_p_value_is_saved_and_shown():
    form, data = saved()["noiser"]
    check = data["info"]["check"] | {"p": None, "fewest_units": 4}
    result = form.from_dict(changed(data, ("info", "check"), check))
    assert "Four words are too few for a verdict" in result.to_text()
    assert result.to_dict()["info"]["check"]["p"] is None
