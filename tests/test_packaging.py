"""Set-up scripts and versions: what a fresh machine relies on."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import noiser

ROOT = Path(__file__).parent.parent
BASH = shutil.which("bash") or "bash"
needs_bash = pytest.mark.skipif(
    os.name == "nt", reason="the scripts are for bash, on Linux and macOS"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned():
    pins = re.findall(
        r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    return {canonicalize_name(name): version for name, version in pins}


def requirements():
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    lists = [project["dependencies"], PROJECT["build-system"]["requires"]]
    lists += [project["optional-dependencies"][name] for name in ("demo", "app", "inseq")]
    lists += [groups[name] for name in ("dev", "docs", "release")]
    return [Requirement(text) for texts in lists for text in texts]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_tested_version_is_in_the_range_we_promise(requirement):
    version = pinned()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True)


HEAVY = {
    "torch",
    "transformers",
    "pandas",
    "numpy",
    "sklearn",
    "matplotlib",
    "noiser.model",
    "noiser.methods",
}


def test_imports_are_light():
    """A command that lists data sets waits neither for torch nor for pandas."""
    code = (
        "import sys, noiser; print('rich' in sys.modules); import noiser.cli, noiser.data; "
        "print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with_rich, *modules = ran.stdout.split()
    assert (with_rich, HEAVY & {*modules}) == ("False", set())


@needs_bash
@pytest.mark.parametrize("name", ["scripts/test", "scripts/demo", "scripts/smoke", ".ci/run"])
def test_scripts_can_be_run_and_parsed(name):
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run([BASH, "-n", ROOT / name], check=True)


@needs_bash
def test_releases_compare_the_tag_with_the_version():
    workflows = [
        yaml.safe_load(path.read_text("utf-8"))
        for path in (ROOT / ".github/workflows").glob("*.yml")
    ]
    steps = [step for flow in workflows for job in flow["jobs"].values() for step in job["steps"]]
    (step,) = [step["run"] for step in steps if step.get("run", "").startswith("grep")]
    for tag, status in ((f"v{noiser.__version__}", 0), ("v0.0.7", 1)):
        env = {"PATH": os.environ["PATH"], "GITHUB_REF_NAME": tag}
        ran = subprocess.run(
            [BASH, "-c", step], cwd=ROOT, env=env, capture_output=True, check=False
        )
        assert ran.returncode == status


@needs_bash
def test_the_chosen_python_or_the_first_that_works_is_taken(tmp_path):
    def bash(code, **env):
        """Of a PATH with nothing on it but what the test puts there."""
        command, env = (
            [BASH, "-c", f". scripts/environment.sh\n{code}"],
            {"PATH": str(tmp_path)} | env,
        )
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )

    def put(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    put("python3.13", "echo 'not installed' >&2; exit 127")  # as a version manager's stand-in does
    put("python3.12", "exit 1")  # too old, or without venv
    none = bash("ensure_environment")
    assert (none.returncode, none.stdout) == (1, "")
    assert re.search("No Python 3.11 or newer .* set PYTHON", none.stderr)
    for name in ("mine", "python3"):
        put(name, "exit 0")
    ran = bash("find_python")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "python3\n", "")
    assert bash("find_python", PYTHON="mine").stdout == "mine\n"


def test_exact_versions_install_on_the_oldest_python():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    named = {
        canonicalize_name(d.metadata["Name"]): d for d in distributions() if d.metadata["Name"]
    }
    installed = [
        named[name]
        for name, version in pinned().items()
        if name in named and named[name].version == version
    ]
    wanted = {d.metadata["Name"]: d.metadata.get("Requires-Python") or "" for d in installed}
    assert len(wanted) > 50
    assert {
        name: python for name, python in wanted.items() if not SpecifierSet(python).contains(oldest)
    } == {}
