"""Packages that add methods, metrics, judges and data sets: the example, and what goes wrong."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from noiser.errors import UnknownNameError
from noiser.registry import Family, Registry

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples/plugin"


@pytest.fixture
def registry(monkeypatch):
    points: list[EntryPoint] = []
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [p for p in points if p.group == group]
    )
    made = Registry("thing", "noiser.things")
    made.register("own", dict, summary="a dict")
    return made, lambda name, value: points.append(EntryPoint(name, value, "noiser.things"))


def test_entry_points_are_entries(registry):
    things, install = registry
    install("counter", "collections:Counter")
    assert things.names() == ["own", "counter"]
    assert things.get("counter@1").factory("aab") == {"a": 2, "b": 1}
    assert things.get("counter").summary.startswith("Dict subclass for counting")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_package:Thing", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("collections:NoSuchThing", "AttributeError"),
    ],
)
def test_broken_plugin_harms_nothing_else(registry, value, reason):
    things, install = registry
    install("broken", value)
    install("counter", "collections:Counter")
    with pytest.warns(
        UserWarning, match="The thing plugin 'broken'.* could not be loaded and is left out"
    ) as caught:
        assert things.names() == ["own", "counter"]
    assert reason in str(caught[0].message)
    with pytest.raises(UnknownNameError, match="Known: counter, own"), warnings.catch_warnings():
        things.get("broken")


def test_a_name_that_is_taken_is_refused(registry):
    things, install = registry
    install("own", "collections:Counter")
    with pytest.warns(UserWarning, match=r"thing plugin 'own'.*registered twice"):
        assert things.get("own").factory is dict


def test_the_name_of_a_newer_version_is_refused(registry):
    things, _ = registry
    things.register("new", dict, summary="a dict", version=2)
    with pytest.raises(ValueError, match=r"is new@2\. Take another name, or version=3"):
        things.register("new", list, summary="a list")
    assert things.get("new").factory is dict


def test_a_newer_version_takes_the_place(registry):
    things, _ = registry
    things.register("new", dict, summary="a dict")
    things.register("new", list, summary="a list", version=2)
    assert things.get("new").factory is list
    assert things.get("new@1").factory is dict


def test_a_cell_that_registers_can_be_run_again(registry):
    things, _ = registry
    cell = "class Mine: pass\nthings.register('mine', Mine, summary='of a notebook')"
    for _run in range(2):
        names = {"things": things, "__name__": "__main__"}
        exec(cell, names)
        assert things.get("mine").factory is names["Mine"]


def colours(name):
    if name != "red":
        raise UnknownNameError("thing", f"colour:{name}", ["colour:red"])
    return str


def test_families(registry):
    things, _ = registry
    things.families["colour"] = Family("colour", f"{__name__}:colours", "any colour")
    assert [*things.families.values()] == [
        Family(prefix="colour", place=f"{__name__}:colours", summary="any colour")
    ]
    assert things.names() == ["own"]
    assert things.get("colour:red").versioned_name == "colour:red@1"
    assert things.get("colour:red@1").factory is str
    with pytest.raises(UnknownNameError, match="Did you mean 'colour:red'"):
        things.get("colour:rad")
    with pytest.raises(UnknownNameError, match="Known: colour:NAME, own"):
        things.get("horse")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(
        PLUGIN,
        folder / "source",
        ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"),
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", folder / "site", folder / "source"], check=True
    )
    return folder


def run(installed, *arguments, **options):
    places = [
        str(installed / "site"),
        str(ROOT / "src"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.mark.slow
def test_example_passes_its_own_tests(installed):
    done = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=installed / "source")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_example_is_listed_and_a_package_that_cannot_be_imported_is_left_out(installed):
    (installed / "site/broken_plugin.py").write_text("raise ImportError('a part is missing')\n")
    info = installed / "site/broken_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[noiser.methods]\nbad = broken_plugin:Bad\n")
    done = run(installed, "-m", "noiser", "methods")
    shutil.rmtree(info)
    assert done.returncode == 0
    assert re.search(
        "plugin 'bad' .broken_plugin:Bad. could not .* left out: ImportError: a part is",
        done.stderr,
    )
    assert "\nleave_one_in\n  p(target) with one unit alone" in done.stdout
    assert "\nbad\n" not in done.stdout


def commands():
    blocks = re.findall(
        r"```bash\n(.*?)```", (PLUGIN / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    return [line for block in blocks for line in block.splitlines() if line.startswith("noiser ")]


ONE_BY_ONE = """
import shlex, sys
from noiser.cli import app
for command in sys.argv[1:]:
    assert not app(shlex.split(command, comments=True)[1:], standalone_mode=False), command
"""


@pytest.mark.slow
def test_commands_of_its_readme(installed, gemma, tmp_path):
    done = run(installed, "-c", ONE_BY_ONE, *commands(), cwd=tmp_path)
    loading = "Loading gemma-3-270m ...\n"
    said = f"{loading}{loading}capitals: Took 2 of 8 examples, in the order of the file.\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert done.stdout.count("leave_one_in") == 4
