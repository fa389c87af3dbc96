"""How far a reader walks through the code of one call does not grow."""

import pytest

from tiny import tiny
from walk import walks

# Named functions, files, and frames at once; to be lowered as the code gets shorter.
LIMITS = {
    "attribute": {"functions": 84, "files": 19, "depth": 12},
    "evaluate": {"functions": 107, "files": 24, "depth": 13},
}


@pytest.fixture(scope="module")
def found():
    return walks(tiny("llama"))


@pytest.mark.parametrize("call", LIMITS)
def test_a_call_passes_few_functions(found, call):
    numbers = {name: getattr(found[call], name) for name in LIMITS[call]}
    over = {name: number for name, number in numbers.items() if number > LIMITS[call][name]}
    assert not over, f"{over} of at most {LIMITS[call]}; python benchmarks/walk.py -l lists the functions"


def test_what_is_counted(found):
    assert any("occlusion.py" in name for name in found["attribute"].calls)
    assert found["attribute"].functions < found["evaluate"].functions
    assert not any("<lambda>" in name for name in found["evaluate"].calls)
