"""Reports as files: figures, the page, the command; and that no text of a data set gets into any of
them.
"""

import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noiser.cli import app
from noiser.metrics import bootstrap
from noiser.report import cells
from noiser.report.figures import COLOURS, MARKERS, families, pictures, saved
from report_for_tests import Run, full, made, near, plan, rows, soft, write_folder

DOCS = Path(__file__).parents[1] / "docs"
INTERVAL = bootstrap._interval
HOSTILE = "<b>\n\nred \x1b[31m \u202e\r{x}"


@pytest.fixture(scope="module", autouse=True)
def _few_resamples():
    """Intervals are not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "_interval", near)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run with names that are mark-up: three methods on six prompts."""
    metrics = [{"name": "faithfulness"}, {"name": "minimum_top_k", "judge": HOSTILE}]
    store = made(plan(name="<b> red {x}", methods="noiser occlusion random", metrics=metrics), 6)
    return write_folder(tmp_path_factory.mktemp("bench") / "run", store).path


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    """Everything that a report can be, as the command writes it."""
    out = tmp_path_factory.mktemp("report") / "a/b"
    files = run(folder, "--format", "all", "--figures", "--html", "-o", out).stdout.split()
    return {str(Path(path).relative_to(out)): Path(path) for path in files}


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


PACKS = {
    pack: [pack]
    for pack in sorted(
        str(path.parent.parent.relative_to(DOCS)) for path in DOCS.rglob("rows.jsonl.gz")
    )
}
PACKS["reproduction/both_readings"] = ["reproduction/three_models", "reproduction/second_reading"]


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKS)
def test_committed_glance_is_that_of_its_rows(pack, monkeypatch):
    """To write it again: noiser report docs/PACK/rows | sed '/^## How to read/,$d' >
    docs/PACK/glance.md; of both readings with the rows of both.
    """
    monkeypatch.setattr(bootstrap, "_interval", INTERVAL)
    found, committed = (
        re.sub("- reported by.*", "", text.split("\n## How to read")[0]).rstrip()
        for text in (
            run(*(DOCS / each / "rows" for each in PACKS[pack])).stdout,
            (DOCS / pack / "glance.md").read_text(encoding="utf-8"),
        )
    )
    assert found == committed


def drawn(store: Run):
    return {picture.key: picture for picture in pictures(store.plan, cells(store))}


@pytest.fixture(scope="module")
def whole():
    return drawn(full(models=1))


def test_figures_of_the_paper_are_there_and_those_without_a_number_are_not(whole):
    kinds = {f"{name}-known" for name in ("areas", "minimum", "answerability", "cost")}
    longra = {f"{name}-longra" for name in ("areas", "localisation", "cost")}
    assert set(whole) == kinds | longra  # and none of one prompt, which has no interval
    assert drawn(Run(plan(), rows("noiser", "soft_scores", [soft(0.03, 0.5)]))) == {}


def test_bars_have_the_cells_heights_and_a_missing_one_is_a_dash():
    store = full()
    store.kept = [
        one for one in store.kept if (one.method, one.metric) != ("lime", "minimum_top_k")
    ]
    store.plan = store.plan.model_copy(update={"metrics": store.plan.metrics[2:3]})
    found = cells(store)
    figures = {picture.key: picture.figure for picture in pictures(store.plan, found)}
    axes, other = figures["minimum-known"].axes
    assert [one.get_title("left") for one in (axes, other)] == ["gemma-3-270m", "Qwen2-0.5B"]
    shares = found[(found["number"] == "minimum_share") & (found["model"] == "gemma-3-270m")]
    values = shares.set_index("method")["value"]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == list(values.index)
    assert [patch.get_width() for patch in axes.patches] == pytest.approx(
        values.fillna(0.0).tolist()
    )
    assert [text.get_text() for text in axes.texts] == [" –"]
    assert axes.texts[0].get_position()[1] == names.index("lime")


def test_series_and_methods_differ_without_colour(whole):
    assert {patch.get_hatch() for patch in whole["localisation-longra"].figure.axes[0].patches} == {
        None,
        "////",
    }
    assert len(set(MARKERS)) == len(MARKERS) > 18
    assert len(set(COLOURS)) == len(COLOURS)
    lines = [
        line
        for line in whole["answerability-known"].figure.axes[0].lines
        if line.get_marker() != "None"
    ]
    assert len({line.get_marker() for line in lines}) == len(lines) == 6


def test_a_line_joins_the_budgets_of_a_method():
    """Two budgets of Noiser in the order of their cost; occlusion is a point, and what needs no
    model a level.
    """
    budgets = {
        "much": ({"name": "noiser", "args": {"samples": 20}}, 2000, 1.3),
        "noiser": ({"name": "noiser"}, 1000, 1.2),
        "other": ({"name": "noiser", "args": {"bounding": "none"}}, 1000, 1.1),
        "occlusion": ({"name": "occlusion"}, 100, 1.25),
        "position": ({"name": "position"}, 0, 1.15),
    }
    kept = []
    for label, (_, cost, height) in budgets.items():
        kept += rows(
            label, "mass_matched_rank", [{"rank_area": height + 0.01 * i} for i in range(6)]
        )
        kept += rows(label, "attribution", [{"token_forwards": cost}] * 6)
    methods = [fields | {"label": label} for label, (fields, *_) in budgets.items()]
    store = Run(plan(methods=methods, metrics="mass_matched_rank"), kept)
    assert list(families(store.plan.methods).values()) == [
        "noiser",
        "noiser",
        "other",
        "occlusion",
        "position",
    ]
    (axes,) = drawn(store)["frontier-known"].figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["position", "noiser", "other", "occlusion"]
    assert lines["noiser"].get_xdata().tolist() == [1000, 2000]
    assert lines["noiser"].get_ydata().tolist() == pytest.approx([1.225, 1.325])
    assert lines["occlusion"].get_xdata().tolist() == [100]
    assert lines["position"].get_ydata() == pytest.approx([1.175, 1.175])


def test_svg_repeats_and_png_is_a_picture(whole, written):
    picture = whole["minimum-known"]
    assert saved(picture, "svg") == saved(picture, "svg")
    ET.fromstring(saved(picture, "svg"))
    content = written["figures/minimum-known.png"].read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24])[0] > 800


def test_page_needs_nothing_else(written):
    text = written["report.html"].read_text()
    ids, links = re.findall(r' id="([^"]*)"', text), re.findall(r'<a href="#([^"]*)"', text)
    assert len({*ids}) == len(ids)
    assert {*links} <= {*ids}
    assert len(links) == text.count("<section") == text.count("</section>")
    assert not re.search(r"<script|@import|url\((?!#)|<[^>]* (src|srcset|action|on\w+)=", text)
    assert (
        text.count("<svg")
        == text.count('role="img"')
        == len([name for name in written if name.endswith(".svg")])
    )
    assert "&lt;b&gt; red {x}" in text


def test_names_stay_on_their_line(written):
    for name in ("report.md", "report.tex", "report.csv", "report.html"):
        text = written[name].read_text()
        assert ("⟨U+001B⟩" in text) == (
            name in ("report.md", "report.html")
        )  # as the judge of a table
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert written["report.md"].read_text().splitlines()[0] == r"# Benchmark “\<b\> red \{x\}”"


def test_command_prints_the_tables(folder):
    assert run(folder).stdout.startswith("# Benchmark “")
    assert run(folder, "--format", "csv").stdout.startswith(
        '"data","metric","model","method","number","value",'
    )
    assert r"\begin{longtable}" in run(folder, "--format", "latex").stdout


def test_command_writes_a_folder(folder, written):
    assert {
        "report.md",
        "report.tex",
        "report.csv",
        "report.html",
        "figures/minimum-known.svg",
    } <= written.keys()
    assert all(path.is_file() for path in written.values())
    assert run(folder, "--html").stdout.split() == [
        str(folder / f"report/report.{kind}") for kind in ("md", "html")
    ]
    write_folder(
        folder.parent / "few", Run(plan(), rows("noiser", "soft_scores", [soft(0.03, 0.5)]))
    )
    assert "No figure" in run(folder.parent / "few", "--figures").stderr


def test_command_refuses_what_it_cannot_do(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = run(folder, "--figures", "-o", "out")
    assert (ran.exit_code, Path("out").exists()) == (2, False)
    assert "Figures need matplotlib. Install it: pip install 'noiser[report]'" in ran.stderr
    assert run(folder).exit_code == 0  # tables need none
    Path("taken.md").write_text("mine")
    ran = run(folder, "-o", "taken.md")
    assert (ran.exit_code, "is a file" in ran.stderr) == (2, True)
    assert Path("taken.md").read_text() == "mine"
    assert "There is no benchmark in" in run(tmp_path).stderr


def test_a_report_of_some_methods_and_metrics(folder):
    text = run(folder, "--method", "occlusion", "--metric", "faithfulness").stdout
    assert "occlusion" in text
    assert "noiser |" not in text
    assert "minimum" not in text
    whole = run(folder).stdout
    assert "noiser |" in whole
    assert "minimum" in whole


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--method", "oclusion"], "occlusion"), (["--metric", "faithfullness"], "faithfulness")],
)
def test_a_label_that_the_plan_does_not_have_is_refused(folder, given, message):
    ran = run(folder, *given)
    assert ran.exit_code == 2
    assert f"Did you mean '{message}'" in ran.stderr
