"""Computes the golden numbers and stores them: `python -m golden.make`, with `src` and `tests` on
the path.

Only cases whose numbers do not depend on how sequences are put into passes are stored: where
rounding turns a search another way, a number says nothing about the code.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch

from golden.cases import cases, run
from tiny import FAMILIES

FILE = Path(__file__).with_name("scores.npz")
SMALL_PASSES = 48  # tokens


def main():
    """Stores the numbers of all cases, and prints those that are left out."""
    kept = {}
    for family in FAMILIES:
        numbers, others = computed(family, None), computed(family, SMALL_PASSES)
        stable = {name: each for name, each in numbers.items() if _agree(each, others[name])}
        print(f"{family}: {len(stable)} cases, left out:", *(numbers.keys() - stable.keys()))
        kept |= {f"{family}/{name}": each for name, each in stable.items()}
    save(kept)


def save(kept):
    """Writes numbers by family and case, then by name, into one file."""
    shapes = {
        case: {name: value.shape for name, value in numbers.items()}
        for case, numbers in kept.items()
    }
    values = [value.ravel() for numbers in kept.values() for value in numbers.values()]
    np.savez_compressed(FILE, shapes=np.array(json.dumps(shapes)), values=np.concatenate(values))
    print(f"{len(kept)} cases, {FILE.stat().st_size / 1000:.0f} kB")


def computed(family, batch_tokens):
    found = {name: run(case) for name, case in cases(family, batch_tokens)}
    return {
        name: {each: value.float().numpy() for each, value in numbers.items()}
        for name, numbers in found.items()
        if numbers is not None
    }


def _agree(one, other):
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape
        and np.allclose(one[name], other[name], rtol=5e-6, atol=5e-6, equal_nan=True)
        for name in one
        if not name.startswith("token_forwards")
    )


def stored():
    """The stored numbers, by family and case, then by name."""
    with np.load(FILE) as file:
        shapes, values = json.loads(str(file["shapes"])), torch.from_numpy(file["values"]).double()
    parts = iter(
        values.split([math.prod(shape) for fields in shapes.values() for shape in fields.values()])
    )
    return {
        case: {name: next(parts).reshape(shape) for name, shape in fields.items()}
        for case, fields in shapes.items()
    }


if __name__ == "__main__":
    main()
