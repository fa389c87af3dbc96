"""What a type checker knows of the public functions; pyright reads this file, and nothing runs
it.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

import noiser
from noiser import Attribution, Attributions, Citations, LanguageModel, Rule
from noiser.explain import Comparison, Tolerance


def of_attribute(lm: LanguageModel) -> None:
    assert_type(noiser.attribute(lm, "The sky is", unit="token"), Attribution)
    assert_type(
        noiser.attribute(lm, [{"role": "user", "content": "Hello"}], unit="token"), Attribution
    )
    assert_type(
        noiser.attribute(lm, ["The sky is", "The sea is"], seed=[1, 2], unit="token"), Attributions
    )


def of_cite(lm: LanguageModel) -> None:
    assert_type(noiser.cite(lm, "Where?", ["Here."]), Citations)
    assert_type(noiser.cite(lm, ["Where?", "When?"], [["Here."], ["Now."]]), list[Citations])


def of_others(lm: LanguageModel) -> None:
    assert_type(noiser.compare(lm, "The sky is", unit="token"), Comparison)
    assert_type(noiser.rule(lm, "It rains. The sky is"), Rule)
    assert_type(
        noiser.tolerance(lm, noiser.attribute(lm, "The sky is", unit="token"), 0), Tolerance
    )


def what_is_wrong(lm: LanguageModel) -> None:
    _ = noiser.attribute(lm, "The sky is", unit="token").skores  # pyright: ignore[reportAttributeAccessIssue]
    noiser.attribute(lm, "The sky is", samples=3, unit="token")  # pyright: ignore[reportCallIssue]
    noiser.attribute(lm, "The sky is", seed=[1], unit="token")  # pyright: ignore[reportCallIssue, reportArgumentType]
