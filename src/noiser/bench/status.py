"""How far a benchmark is."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

from noiser.bench.samples import selections_of
from noiser.bench.store import Key, Store


def status(folder: Path) -> str:
    """A table of rows stored and wanted per model and data set, and the errors by type, each with a message."""
    store = Store(folder)
    rows, errors, types, seconds = Counter[str](), Counter[str](), defaultdict[str, list[Key]](list), dict[str, float]()
    for row in filter(store.plan.wanted(), store.rows()):
        pair = f"{row.model}/{row.data}"
        rows[pair] += 1
        seconds[pair] = seconds.get(pair, 0) + (row.seconds or 0)
        errors[pair] += row.error is not None
        types[row.error or ""].append(row.key)
    selections = selections_of(store)
    lines, complete = [("model", "data", "right of checked", "chosen of", "rows of", "errors", "seconds")], True
    for (model, data), limit in store.plan.pairs().items():
        pair, selection = f"{model}/{data}", selections.get((model, data))
        chosen = len(selection.chosen[:limit]) if selection else 0
        wanted = store.plan.row_count(model, data, chosen)
        complete &= selection is not None and not selection.lacks(limit) and rows[pair] >= wanted
        asked = f"{selection.right} of {selection.checked}" if selection and selection.checked is not None else ""
        total = f"{chosen} of {selection.total}" if selection else "not yet"
        counts = (f"{rows[pair]} of {wanted}", str(errors[pair]), f"{seconds.get(pair, 0):.0f}")
        lines.append((model, data, asked, total, *counts))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    state = "complete" if complete else "not complete"
    head = f"{store.plan.name}: {state}, {rows.total():,} rows, {sum(seconds.values()):,.0f} seconds of work"
    found = sorted([(-len(keys), name, store.text(keys[0]).get("error", "")) for name, keys in types.items() if name])
    kinds = [f"  {-count} × {name}: {said}".removesuffix(": ") for count, name, said in found]
    return "\n".join([head, "", *table, *(["", "Errors:", *kinds] if kinds else [])])
