"""One word, one meaning: a type has a name of its own in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import noiser
from noiser.errors import ParameterError
from noiser.methods import make_method

PACKAGE = Path(noiser.__file__).parent


def type_names(tree):
    """Classes, type aliases and type variables at the top of a module."""
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name) and is_type_name(target.id):
                    yield target.id


def is_type_name(name):
    """Whether a name is written as those of types are: `UnitName`, not `UNITS` or `units`."""
    bare = name.lstrip("_")
    return bare[:1].isupper() and not bare.isupper()


def test_a_type_has_a_name_of_its_own():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in type_names(ast.parse(path.read_text(encoding="utf-8"))):
            places[name].append(str(path.relative_to(PACKAGE)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert shared == {}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(
            lambda: noiser.Occlusion(score="logprob", baseline="hidden"),
            noiser.Occlusion(objective="logprob", removal="hidden"),
            id="a class",
        ),
        pytest.param(
            lambda: make_method("lime:score=logprob:baseline=mean"),
            noiser.Lime(objective="logprob", removal="mean"),
            id="a name",
        ),
        pytest.param(
            lambda: make_method("integrated_gradients", score="logprob", baseline="mean"),
            noiser.IntegratedGradients(objective="logprob", baseline="mean"),
            id="the row of a path keeps its name",
        ),
    ],
)
def test_old_names_of_hyper_parameters_are_read_with_a_warning(make, expected):
    with pytest.warns(DeprecationWarning, match="the old name is read"):
        assert make() == expected


def test_a_present_and_an_old_name_together_are_refused():
    with (
        pytest.warns(DeprecationWarning, match="objective"),
        pytest.raises(ParameterError, match="was given too"),
    ):
        noiser.Occlusion(score="prob", objective="logprob")
