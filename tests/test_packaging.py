"""Set-up scripts and versions: what a fresh machine relies on."""

from __future__ import annotations

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
needs_bash = pytest.mark.skipif(os.name == "nt", reason="the scripts are for bash, on Linux and macOS")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    installed = [
        *project["dependencies"],
        *project["optional-dependencies"]["demo"],
        *project["optional-dependencies"]["app"],
        *project["optional-dependencies"]["inseq"],
        *PROJECT["dependency-groups"]["dev"],
        *PROJECT["dependency-groups"]["docs"],
        *PROJECT["dependency-groups"]["release"],
    ]
    return [Requirement(text) for text in [*installed, *PROJECT["build-system"]["requires"]]]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_tested_version_is_in_the_range_we_promise(requirement):
    version = pinned()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True)


HEAVY = {"torch", "transformers", "pandas", "numpy", "sklearn", "matplotlib", "noiser.model", "noiser.methods"}


def test_imports_are_light():
    """A command that lists data sets waits neither for torch nor for pandas."""
    code = "import sys, noiser; print('rich' in sys.modules); import noiser.cli, noiser.data; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with_rich, *modules = ran.stdout.split()
    assert (with_rich, HEAVY & {*modules}) == ("False", set())


@needs_bash
@pytest.mark.parametrize("name", ["scripts/test", "scripts/demo", "scripts/smoke", ".ci/run"])
def test_scripts_can_be_run_and_parsed(name):
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run([BASH, "-n", ROOT / name], check=True)


def workflow_steps() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")]
    jobs = [job for text in texts for job in yaml.safe_load(text)["jobs"].values()]
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@needs_bash
def test_releases_compare_the_tag_with_the_version():
    (step,) = [step for step in workflow_steps() if step.startswith("grep")]
    for tag, status in ((f"v{noiser.__version__}", 0), ("v0.0.7", 1)):
        env = {"PATH": os.environ["PATH"], "GITHUB_REF_NAME": tag}
        ran = subprocess.run([BASH, "-c", step], cwd=ROOT, env=env, capture_output=True, check=False)
        assert ran.returncode == status


# ---- scripts/environment.sh ------------------------------------------------------------------------------------------


def bash(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    code = f". scripts/environment.sh\n{code}"
    return subprocess.run([BASH, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def bin_folder(tmp_path) -> Path:
    """A PATH with nothing on it but what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@needs_bash
def test_the_chosen_python_or_the_first_that_works_is_taken(bin_folder):
    put(bin_folder, "python3.13", "echo 'not installed' >&2; exit 127")  # as a version manager's stand-in does
    put(bin_folder, "python3.12", "exit 1")  # too old, or without venv
    none = bash("ensure_environment", ROOT, PATH=f"{bin_folder}")
    assert (none.returncode, none.stdout) == (1, "")
    assert re.search("No Python 3.11 or newer .* set PYTHON", none.stderr)
    for name in ("mine", "python3"):
        put(bin_folder, name, "exit 0")
    ran = bash("find_python", ROOT, PATH=f"{bin_folder}")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "python3\n", "")
    assert bash("find_python", ROOT, PATH=f"{bin_folder}", PYTHON="mine").stdout == "mine\n"


def test_exact_versions_install_on_the_oldest_python():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    named = {canonicalize_name(d.metadata["Name"]): d for d in distributions() if d.metadata["Name"]}
    installed = [named[name] for name, version in pinned().items() if name in named and named[name].version == version]
    wanted = {d.metadata["Name"]: d.metadata.get("Requires-Python") or "" for d in installed}
    assert len(wanted) > 50
    assert {name: python for name, python in wanted.items() if not SpecifierSet(python).contains(oldest)} == {}
