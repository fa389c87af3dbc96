"""Reports as files: figures, the page, the command; and that no text of a data set gets into any of them."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noiser.bench import Store
from noiser.cli import app
from noiser.metrics import bootstrap
from noiser.report import Cell, Results, tables, write_report
from noiser.report.figures import inline_svg, svg
from noiser.report.frontier import families
from noiser.report.grid import method_title
from noiser.report.heatmaps import heatmaps, own_attributions
from noiser.report.plots import COLOURS, MARKERS, plots
from report_for_tests import METHODS, full, plan, row, soft, toml, write_folder

SECRET = "Confidential tokens of a data set"
RESAMPLES = bootstrap.RESAMPLES
OWN = "LeBron James professionally plays the sport of"


@pytest.fixture(scope="module", autouse=True)
def _few_resamples():
    """Intervals are not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "RESAMPLES", 200)
        yield


@pytest.fixture(scope="module")
def small() -> Results:
    """Noiser and occlusion on KNOWN and on a prompt of the plan's own, six prompts."""
    methods = [{"name": name} for name in METHODS[:3]]
    data = [{"name": "known"}, {"label": "own", "prompts": [OWN]}]
    metrics = [
        {"name": "faithfulness", "data": ["known"]},
        {"name": "minimum_top_k", "judge": "local", "data": ["known"]},
    ]
    wanted = plan(methods=methods, data=data, metrics=metrics)
    whole = full(6)
    kept = [
        (one, cost)
        for one, cost in zip(whole.stored, whole.costs, strict=True)
        if one.model == "gemma-3-270m"
        and one.method in METHODS[:3]
        and (one.data == "known" and one.metric in ("faithfulness", "minimum_top_k", "attribution"))
    ]
    return Results(
        plan=wanted,
        stored=[one for one, _ in kept],
        costs=[cost for _, cost in kept],
        selections=[one for one in whole.selections if (one.model, one.data) == ("gemma-3-270m", "known")],
    )


@pytest.fixture(scope="module")
def folder(small, tmp_path_factory):
    """A run's folder, with attributions of both data sets."""
    place = tmp_path_factory.mktemp("bench") / "run"
    write_folder(place, small, {"known": SECRET, "own": OWN})
    return place


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    """Everything that a report can be."""
    out = tmp_path_factory.mktemp("report")
    files = write_report(Results.of(Store(folder)), out, ("md", "latex", "csv"), figures=True, html=True)
    return {str(path.relative_to(out)): path for path in files}


# ---- no text --------------------------------------------------------------------------------------------------------


def test_no_text_of_a_data_set_is_in_any_file(written):
    assert {"report.md", "report.tex", "report.csv", "report.html"} < set(written)
    for name, path in written.items():
        content = path.read_bytes().decode("utf-8", errors="replace")
        for word in SECRET.split():
            assert not re.search(rf"\b{word}\b", content) or word in ("of", "a", "data", "set", "tokens"), (name, word)
    page = written["report.html"].read_text()
    assert "LeBron" in page  # the plan's own prompt is
    assert not any("known" in name for name in written if "heatmap" in name)


def test_only_the_plans_own_prompts_are_shown(folder):
    shown = own_attributions(Results.of(Store(folder)))
    titles = list(map(method_title, METHODS[:3]))
    assert [(one.data, [att.method for att in one.attributions]) for one in shown] == [("own", titles)]


def test_rows_of_a_larger_plan_are_left_out(small, tmp_path):
    write_folder(tmp_path / "run", small)
    data = [{"name": "known", "limit": 2}, {"label": "own", "prompts": [OWN]}]
    fewer = small.plan.model_validate(small.plan.model_dump() | {"data": data, "methods": [{"name": "noiser"}]})
    store = Store(tmp_path / "run")
    store.set_meta(plan=toml(fewer))
    found = Results.of(Store(tmp_path / "run"))
    cell = Cell("gemma-3-270m", "known", "noiser", "faithfulness")
    assert len(small.rows(cell)) == 6
    assert sorted(found.rows(cell)["index"]) == [0, 1]
    assert found.seconds(cell._replace(metric="attribution")).n == 2
    assert found.rows(cell._replace(method=METHODS[1])).empty


@pytest.mark.parametrize("text", ["Solve $$ x = 2 $$ now", "It costs $100% of_x$ here", "Say \\frac{ and $5 " * 9])
def test_heat_maps_show_any_prompt_as_it_is(small, tmp_path, text):
    write_folder(tmp_path, small, {"own": text})
    (picture,) = heatmaps(own_attributions(Results.of(Store(tmp_path))))
    svg(picture)
    shown = [one.get_text() for one in picture.figure.axes[0].texts]
    assert [word for word in text.split() if word not in shown] == []


def test_packed_run_gives_the_same_tables_and_no_heat_maps(folder, tmp_path):
    Store(folder).pack(tmp_path / "packed")
    whole, packed = (Results.of(Store(place)) for place in (folder, tmp_path / "packed"))
    assert str(tables(whole)) == str(tables(packed))  # NaN, in cells without rows, is not equal to itself
    assert own_attributions(packed) == []
    assert len(drawn(packed)) == len(drawn(whole))


@pytest.mark.slow
@pytest.mark.parametrize("folder", [
    "reproduction/three_models", "reproduction/longra", "reproduction/sentences",
    "evidence", "evidence/frontier", "evidence/fair",
])  # fmt: skip
def test_committed_tables_are_those_of_their_rows(folder):
    """All resamples, unlike the other tests. The version that reports may be another."""
    place = Path(__file__).parents[1] / "docs" / folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "RESAMPLES", RESAMPLES)
        found = run(place / "rows").stdout
    committed = (place / "report.md").read_text(encoding="utf-8")
    said = [
        [line for line in text.rstrip().splitlines() if not line.startswith("| reported by")]
        for text in (found, committed)
    ]
    assert said[0] == said[1], f"to write them again: noiser report docs/{folder}/rows --figures -o OUT"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="there is no pdflatex: apt-get install texlive-latex-recommended"
)
@pytest.mark.parametrize("folder", ["three_models", "longra", "sentences"])
def test_committed_tables_are_typeset(tmp_path, folder):
    rows = Path(__file__).parents[1] / "docs/reproduction" / folder / "rows"
    write_report(Results.of(Store(rows)), tmp_path, ("latex",))
    ran = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"],
        cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert "Overfull" not in ran.stdout
    assert (tmp_path / "report.pdf").stat().st_size > 50_000


# ---- figures --------------------------------------------------------------------------------------------------------


def drawn(results):
    return plots(results, tables(results))


@pytest.fixture(scope="module")
def pictures():
    return drawn(full())


def test_figures_of_the_paper_are_there(pictures):
    kinds = {picture.key.split("-")[0] for picture in pictures}
    assert kinds == {"areas", "localisation", "minimum", "answerability", "cost"}
    keys = [picture.key for picture in pictures]
    assert len(set(keys)) == len(keys)
    assert not any("-own" in key for key in keys)  # one prompt has no interval, and a figure of it would mislead


def test_every_figure_says_its_numbers_in_words(pictures):
    for picture in pictures:
        assert "Noiser" in picture.description, picture.key
        assert re.search(r"\d", picture.description), picture.key


@pytest.mark.slow
def test_bars_have_the_tables_heights(pictures):
    found = next(table for table in tables(full()) if table.key.startswith("minimum-known"))
    values = [row.cells[0].value for row in found.rows]
    picture = next(one for one in pictures if one.key == "minimum-known")
    widths = [patch.get_width() for patch in picture.figure.axes[0].patches]
    assert widths == pytest.approx(values)


def test_main_part_and_distractor_differ_without_colour(pictures):
    picture = next(one for one in pictures if one.key.startswith("localisation"))
    hatches = {patch.get_hatch() for patch in picture.figure.axes[1].patches}
    assert hatches == {None, "////"}


def test_methods_have_markers_of_their_own(pictures):
    assert len(set(MARKERS)) == len(MARKERS) > 18
    picture = next(one for one in pictures if one.key.startswith("answerability"))
    points = [line for line in picture.figure.axes[0].lines if line.get_marker() not in ("None", "", None)]
    assert len({point.get_marker() for point in points}) == len(points) == 6
    assert len(set(COLOURS)) == len(COLOURS)


def test_a_legend_of_many_methods_is_whole():
    methods = [{"name": "noiser", "label": f"samples_{i}", "args": {"samples": i + 1}} for i in range(30)]
    rows = [
        row(method["label"], metric, i, values)
        for method in methods
        for i in range(6)
        for metric, values in (
            ("soft_scores", soft(0.03 + 0.01 * i, 0.6)),
            ("attribution", {"token_forwards": 10.0, "passes": 1.0, "rank": 1.0}),
        )
    ]
    results = Results(plan=plan(methods=methods), stored=rows)
    (picture,) = [one for one in plots(results, tables(results)) if one.key.startswith("cost")]
    (legend,) = picture.figure.legends
    assert len(legend.get_texts()) == 30
    picture.figure.draw_without_rendering()
    box, page = legend.get_window_extent(), picture.figure.bbox
    assert page.x0 <= box.x0
    assert page.y0 <= box.y0
    assert box.x1 <= page.x1
    assert box.y1 <= page.y1


def test_panels_have_the_same_rows_where_a_model_lacks_a_method():
    models = [{"name": "smollm2-135m-instruct"}, {"name": "gemma-3-270m"}]
    methods = [{"name": "noiser"}, {"name": "lime", "models": ["smollm2-135m-instruct"]}, {"name": "occlusion"}]
    numbers = {"rank_area": 1.2, "rank_random_area": 1.0, "rank_position_area": 1.1}
    rows = [
        row(method["name"], "mass_matched_rank", i, numbers)._replace(model=model["name"])
        for model in models
        for method in methods
        for i in range(6)
        if model["name"] in method.get("models", [model["name"]])
    ]
    wanted = plan(models=models, methods=methods, metrics=[{"name": "mass_matched_rank"}])
    results = Results(plan=wanted, stored=rows)
    (picture,) = [one for one in plots(results, tables(results)) if one.key.startswith("areas")]
    panels = picture.figure.axes
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["Noiser", "LIME", "Occlusion"]
    assert {axes.get_ylim() for axes in panels} == {(2.6, -0.6)}
    assert [[text.get_text() for text in axes.texts] for axes in panels] == [["n", *"666"], ["n", *"606"]]
    assert [len(axes.collections[0].get_segments()) for axes in panels] == [3, 2]


def test_frontier_draws_a_line_per_method_through_its_budgets():
    """Two budgets of Noiser in the order of their cost; occlusion is a point, and what needs no model a level."""
    methods = [
        {"name": "noiser", "label": "much", "args": {"samples": 20}},
        {"name": "noiser"},
        {"name": "noiser", "label": "other", "args": {"bounding": "none"}},
        {"name": "occlusion"},
        {"name": "position"},
    ]
    heights = {"much": 1.3, "noiser": 1.2, "other": 1.1, "occlusion": 1.25, "position": 1.15}
    costs = {"much": 2000, "noiser": 1000, "other": 1000, "occlusion": 100, "position": 0}
    rows = [
        row(name, metric, i, {"rank_area": height + 0.01 * i} if metric != "attribution" else {"token_forwards": cost})
        for (name, height), cost in zip(heights.items(), costs.values(), strict=True)
        for metric in ("mass_matched_rank", "attribution")
        for i in range(6)
    ]
    results = Results(plan=plan(methods=methods, metrics=[{"name": "mass_matched_rank"}]), stored=rows)
    assert families(results.methods) == ["Noiser", "Noiser", "other", "Occlusion", "Position"]
    made = tables(results)
    (table,) = [one for one in made if one.key == "frontier-known-gemma-3-270m"]
    assert [[cell.value for cell in line.cells] for line in table.rows] == [
        [costs[name], pytest.approx(height + 0.025)] for name, height in heights.items()
    ]
    (picture,) = [one for one in plots(results, made) if one.key.startswith("frontier")]
    (axes,) = picture.figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["Position", "Noiser", "other", "Occlusion"]
    assert lines["Noiser"].get_xdata().tolist() == [1000, 2000]
    assert lines["Noiser"].get_ydata().tolist() == pytest.approx([1.225, 1.325])
    assert lines["Occlusion"].get_xdata().tolist() == [100]
    assert lines["Position"].get_ydata() == pytest.approx([1.175, 1.175])
    assert "much 1.33, Noiser 1.2" in picture.description


def test_plans_with_one_budget_have_no_frontier():
    rows = [row("noiser", "soft_scores", i, soft(0.03 + i, 0.5)) for i in range(6)]
    results = Results(plan=plan(), stored=rows)
    assert not any("frontier" in one.key for one in [*tables(results), *drawn(results)])


def test_figure_without_a_number_is_left_out():
    rows = [row("noiser", "soft_scores", 0, soft(0.03, 0.5))]
    assert drawn(Results(plan=plan(), stored=rows)) == []


def test_methods_with_one_title_are_all_drawn():
    methods = [{"name": "noiser"}, {"name": "noiser", "label": "noiser@1"}]
    metrics = [{"name": "localisation"}]
    shares = [{"share_antecedent": 0.1 * i, "share_last_content_word": 0.1} for i in range(7)]  # and no distractor
    rows = [
        row(method, "localisation", i, values, data="longra", category="capital-world")
        for method in ("noiser", "noiser@1")
        for i, values in enumerate(shares)
    ]
    wanted = plan(methods=methods, metrics=metrics, data=[{"name": "longra"}])
    (picture,) = drawn(Results(plan=wanted, stored=rows))
    names = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert names == ["Noiser", "Noiser (2)"]


@pytest.mark.slow
def test_missing_bar_is_a_dash_not_a_zero():
    results = full()
    rows = [one for one in results.stored if (one.method, one.metric) != ("lime", "minimum_top_k")]
    without = Results(plan=results.plan, stored=rows)
    (picture,) = [one for one in drawn(without) if one.key == "minimum-known"]
    texts = [text.get_text() for text in picture.figure.axes[0].texts]
    assert " –" in texts
    assert "0%" not in texts


def test_svg_repeats_and_is_well_formed(pictures):
    picture = pictures[0]
    assert svg(picture) == svg(picture)
    ET.fromstring(svg(picture))
    inline = inline_svg(picture)
    ET.fromstring(inline)
    ids = re.findall(r'\bid="([^"]+)"', inline)
    assert ids
    assert all(name.startswith(f"{picture.key}-") for name in ids)
    for target in re.findall(r'(?:url\(#|href="#)([^")]+)', inline):
        assert target in ids


def test_png_is_a_picture(written):
    name = next(name for name in written if name.endswith(".png"))
    content = written[name].read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 800
    assert height > 200


def test_matplotlib_missing_is_a_clear_error(folder, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = CliRunner().invoke(app, ["report", str(folder), "--figures", "-o", str(tmp_path / "out")])
    assert ran.exit_code == 2
    assert "Figures need matplotlib; install it with: pip install 'noiser[report]'" in ran.stderr
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0  # tables need none


# ---- the page -------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Open elements, ids, links, and whatever a page that needs nothing else must not have."""

    void = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.links, self.outside, self.tags = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in self.void:
            self.open.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if tag == "a" else []
        self.outside += [value for key, value in attrs if key in ("src", "srcset", "action") or key.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()


@pytest.fixture(scope="module")
def read(written) -> Reader:
    reader = Reader()
    reader.feed(written["report.html"].read_text())
    return reader


def test_page_needs_nothing_else(read, written):
    text = written["report.html"].read_text()
    assert read.open == []
    assert read.outside == []
    assert not re.search(r"<script|@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_page_is_accessible(read, written):
    assert len(set(read.ids)) == len(read.ids)
    assert {link[1:] for link in read.links} <= set(read.ids)
    for tag, attributes in read.tags:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
        if tag == "th":
            assert attributes.get("scope") in ("col", "row", "colgroup")
    text = written["report.html"].read_text()
    assert text.count("<table class=grid>") == text.count("<caption>")
    assert '<html lang="en">' in text
    assert "color-scheme: light dark" in text


def test_heat_maps_have_the_plans_names(written):
    text = written["report.html"].read_text()
    assert "<h3>Noiser</h3>" in text
    assert "<h3>Noiser, relative noise</h3>" in text


def test_inline_figures_follow_the_pages_colours(written):
    text = written["report.html"].read_text()
    figure = re.search(r"<figure>.*?</figure>", text, re.DOTALL)[0]
    assert "var(--ink)" in figure
    assert "#14161b" not in figure
    assert "#ffffff" not in figure


def test_page_repeats(folder, written, tmp_path):
    write_report(Results.of(Store(folder)), tmp_path, (), html=True)
    assert (tmp_path / "report.html").read_bytes() == written["report.html"].read_bytes()


def test_names_are_escaped(tmp_path):
    data = [{"label": "own", "prompts": ["<script>alert(1)</script> is"]}]
    wanted = plan(name="<b>&", data=data, metrics=[])
    results = Results(plan=wanted, stored=[], costs=[])
    store = write_folder(tmp_path / "run", results, {"own": "<script>alert(1)</script> is"})
    write_report(Results.of(store), tmp_path / "out", (), html=True)
    text = (tmp_path / "out/report.html").read_text()
    assert "<script>" not in text
    assert "&lt;b&gt;&amp;" in text


# ---- names and files that others made -------------------------------------------------------------------------------

HOSTILE = "<b>\n\nred \x1b[31m \u202e\r{x}"


MARKED = "<b> red {x}"


@pytest.fixture
def hostile(tmp_path):
    """A folder whose plan has line breaks, control characters and marks of every format in its names, but its own."""
    data = [{"name": HOSTILE, "label": "known"}, {"label": "own", "prompts": [OWN]}]
    wanted = plan(name=MARKED, data=data, metrics=[{"name": "answerability", "judge": HOSTILE}])
    rows = [row("noiser", "answerability", i, {"answerability_rate": i % 2}) for i in range(3)]
    rows.append(row("occlusion", "answerability", 0, error=f"{HOSTILE}: why"))
    folder = tmp_path / "run"
    store = Store(folder, create=True)
    store.set_meta(plan=toml(wanted), resolved={}, models={}, selections=[], versions={HOSTILE: HOSTILE})
    store.add(rows)
    return folder


@pytest.mark.parametrize("form", ["md", "latex", "csv"])
def test_control_characters_of_names_do_not_reach_the_terminal(hostile, form):
    text = run(hostile, "--format", form).stdout
    assert re.search(r"[⟨$]U\+001B[⟩$]", text.replace(r"\langle", "").replace(r"\rangle", "").replace("$$", "$"))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_names_stay_on_their_line(hostile, tmp_path):
    assert run(hostile, "--format", "all", "--html", "-o", tmp_path / "out").exit_code == 0
    latex = (tmp_path / "out/report.tex").read_text()
    assert r"\section*{Benchmark ``\textless{}b\textgreater{} red" in latex
    assert all("{" not in line or line.count("{") == line.count("}") for line in latex.splitlines() if "red" in line)
    assert (tmp_path / "out/report.md").read_text().splitlines()[0].endswith("red {x}”")
    assert not re.search(r"[\x1b\u202e]", (tmp_path / "out/report.html").read_text())


def test_a_number_that_is_too_large_is_no_value():
    rows = [row("noiser", "soft_scores", i, soft(0.03, nc)) for i, nc in enumerate((0.5, 0.6, 10**400))]
    cell = Cell("gemma-3-270m", "known", "noiser", "soft_scores")
    assert Results(plan=plan(), stored=rows).numbers(cell)["soft_nc"].isna().tolist() == [False, False, True]


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_command_prints_the_tables(folder):
    assert run(folder).stdout.startswith("# Benchmark “test”")
    assert run(folder, "--format", "csv").stdout.startswith("table,row,group,column,source,value,low,high,n,failed,")
    latex = run(folder, "--format", "latex").stdout
    assert latex.startswith((r"\begin{table}", r"\begin{sidewaystable}"))
    assert r"\documentclass" not in latex


def test_command_writes_a_folder(folder, tmp_path):
    ran = run(folder, "--format", "all", "-o", tmp_path / "a/b")
    assert ran.stdout.split() == [str(tmp_path / "a/b" / name) for name in ("report.md", "report.tex", "report.csv")]
    assert (tmp_path / "a/b/report.tex").read_text().startswith(r"\documentclass")


def test_figures_without_a_folder_go_into_the_runs(folder):
    ran = run(folder, "--figures")
    assert ran.exit_code == 0
    assert (folder / "report/figures/minimum-known.svg").is_file()
    assert len(list(Store(folder).rows())) == 54  # the run itself is as it was


def test_interval_of_another_confidence(folder):
    assert "| intervals | 80% |" in run(folder, "--confidence", "0.8").stdout
    ran = run(folder, "--confidence", "95")
    assert (ran.exit_code, "expected a number between 0 and 1" in ran.stderr) == (2, True)


def test_no_benchmark_there(tmp_path):
    ran = run(tmp_path)
    assert ran.exit_code == 2
    assert "There is no benchmark in" in ran.stderr


def test_output_that_is_a_file(folder, tmp_path):
    (tmp_path / "report.md").write_text("mine")
    ran = run(folder, "-o", tmp_path / "report.md")
    assert ran.exit_code == 2
    assert "is a file; expected a folder" in ran.stderr
    assert (tmp_path / "report.md").read_text() == "mine"
