"""A removal: every token holds half of its row."""

from noiser.engine import REMOVALS, Perturbation, Removal


def halve(query, rng, samples):
    """Half of each row."""

    def change(positions, targets):
        def rows(clean):
            return clean[None] / 2

        return Perturbation(tuple(sorted(positions)), rows, targets=targets)

    return Removal(change)


REMOVALS.register("half", halve, summary="rows become half of themselves")
