import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import noiser
from noiser.errors import (
    CacheError,
    DependencyError,
    ModelError,
    ModelNotFoundError,
    ParameterError,
)
from noiser.errors import UnsupportedModelError as Unsupported
from noiser.files import sha256_of
from noiser.model.gguf import BUILT_IN, BuiltIn
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
def folder(tmp_path) -> Path:
    """A checkpoint in half precision, in the layout of the hub."""
    place = tmp_path / "checkpoint"
    tiny_model("llama").to(torch.bfloat16).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory, llama) -> Path:
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama, tiny_tokenizer(bos=False)
    )


@pytest.fixture
def gguf_file(tmp_path, whole_gguf) -> Path:
    return Path(shutil.copy(whole_gguf, tmp_path / "tiny.gguf"))


def write_gguf(path: Path, model, tokenizer) -> Path:
    config = model.config
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "rope_dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "token_list": tokens,
        "token_types": [3 if token in tokenizer.all_special_tokens else 1 for token in tokens],
        "token_merges": [" ".join(pair) for pair in bpe["merges"]],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        part = name.split(".")[-2]
        named = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(named, _interleaved(array, heads[part]) if part in heads else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's rotary embedding wants: pairs side by side rather than
    halves.
    """
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).copy()


def logits(model, prompt_ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt_ids])).logits.float()


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").glob("*") if path.suffix != ".lock")


def test_folder_gives_its_model_and_tokenizer(folder, capfd):
    lm = noiser.load_model(folder)
    assert lm.identity._replace(revision="") == (
        str(folder.resolve()),
        "",
        "float32",
        "LlamaForCausalLM",
    )
    assert not lm.model.training
    ids = lm.tokenizer(PROMPT).input_ids
    assert ids == tiny_tokenizer()(PROMPT).input_ids
    expected = tiny_model("llama").eval()
    expected.load_state_dict(
        {name: weight.bfloat16().float() for name, weight in expected.state_dict().items()}
    )
    torch.testing.assert_close(logits(lm.model, ids), logits(expected, ids))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": torch.float64}, "float64"),
        ({"device": "auto", "device_map": "cpu"}, "bfloat16"),  # the checkpoint's own
    ],
)
def test_dtype(folder, options, dtype):
    lm = noiser.load_model(folder, attn_implementation="eager", **{"device": "cpu", **options})
    assert (lm.identity.dtype, lm.device.type) == (dtype, "cpu")
    assert lm.model.config._attn_implementation == "eager"


def test_other_kinds_of_model_and_missing_weights_are_refused(folder, tmp_path):
    transformers.CLIPConfig().save_pretrained(tmp_path / "other")
    with pytest.raises(
        Unsupported, match=r"not a causal language model .*CLIPConfig.*decoder-only"
    ):
        noiser.load_model(tmp_path / "other")
    with weights_of(folder) as weights:
        del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ModelError, match=r"lacks 1 weights.*model\.layers\.1\.mlp\.up_proj\.weight.*noiser\.wrap"
    ):
        noiser.load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("harm", ["cut", "remove"])
def test_damaged_folder(folder, name, harm):
    if harm == "cut":
        (folder / name).write_bytes((folder / name).read_bytes()[:40])
    else:
        (folder / name).unlink()
    with pytest.raises(
        ModelError, match=r"is damaged or incomplete: .*Fetch or save it again"
    ) as caught:
        noiser.load_model(folder)
    assert str(folder) in str(caught.value)
    assert caught.value.__cause__ is not None


def test_what_keeps_a_whole_checkpoint_from_loading(folder, monkeypatch):
    for error, kind, said in (
        (
            ImportError("SentencePiece is needed"),
            DependencyError,
            "needs a package .* SentencePiece",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            ModelError,
            "does not fit into memory.* smaller dtype",
        ),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(
                transformers.AutoModelForCausalLM, "from_pretrained", Mock(side_effect=error)
            )
            with pytest.raises(kind, match=said):
                noiser.load_model(folder)
    own = {
        "model_type": "unheard",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    config = json.loads((folder / "config.json").read_text()) | own
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        noiser.load_model(folder)


def _rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@contextmanager
def weights_of(folder):
    weights = load_file(folder / "model.safetensors")
    yield weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _flip(folder):
    with weights_of(folder) as weights:
        weights["model.layers.1.mlp.down_proj.weight"].neg_()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: _rewrite(
            folder / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'
        ),
        lambda folder: _rewrite(
            folder / "tokenizer.json", '"normalizer": null', '"normalizer": {"type": "NFC"}'
        ),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}"),
        lambda folder: (folder / "own.py").write_text(""),
        _flip,
    ],
    ids=["configuration", "tokenizer", "template", "code", "weights"],
)
def test_the_identity_of_a_folder_covers_all_that_is_loaded(folder, change):
    first = noiser.load_model(folder).identity
    (folder / "README.md").write_text("Nothing of this is loaded.")
    assert noiser.load_model(folder).identity == first
    change(folder)
    assert noiser.load_model(folder).identity.revision != first.revision


@pytest.fixture
def adapter(tmp_path, folder) -> Path:
    """An adapter of rank 1 on the query weights of `folder`, without a tokenizer."""
    import peft

    config = peft.LoraConfig(r=1, lora_alpha=1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # of PEFT
        model = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(folder), config
        )
    for name, weight in model.named_parameters():
        if "lora" in name:
            weight.detach().fill_(0.5)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_applied_and_is_another_model(adapter, folder):
    plain = noiser.load_model(folder)
    for name, weight in plain.model.state_dict().items():
        if "q_proj" in name:
            weight += 0.25
    adapted = noiser.load_model(adapter)
    assert adapted.tokenizer(PROMPT).input_ids == plain.tokenizer(PROMPT).input_ids
    torch.testing.assert_close(logits(adapted.model, [3, 4, 5]), logits(plain.model, [3, 4, 5]))
    _flip(folder)
    assert noiser.load_model(adapter).identity.revision != adapted.identity.revision


def test_without_peft_an_adapter_is_refused(adapter, folder, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_peft_available", lambda: False)
    for _ in range(2):  # alone, and beside the whole model, where transformers would leave it out
        with pytest.raises(
            DependencyError, match=r"has an adapter, which needs PEFT.*pip install peft"
        ):
            noiser.load_model(adapter)
        shutil.copytree(folder, adapter, dirs_exist_ok=True)


@pytest.mark.parametrize(
    "name", ["gemma-3-270", "./folder", "weights.gguf", "", "~nobody-of-it/x", "a\0b", "é" * 999]
)
def test_unknown_name(name):
    with pytest.raises(ModelNotFoundError, match=r"Cannot find the model") as caught:
        noiser.load_model(name)
    message = str(caught.value)
    assert repr(name)[1:150] in message
    assert all(known in message for known in (*BUILT_IN, "folder", ".gguf", "hub"))
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float8"}, "dtype is 'float8'; expected one of auto, float32"),
        ({"device": "toaster"}, "device is 'toaster', which this machine does not have"),
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
        ({"revision": "main"}, "revision is 'main', and gemma-3-270m is built in"),
        ({"tensor_parallel_size": 2}, "'tensor_parallel_size' is for models named vllm:"),
    ],
)
def test_impossible_options(folder, unchecked, options, says):
    with pytest.raises(ParameterError, match=says):
        noiser.load_model("gemma-3-270m" if "revision" in options else folder, **options)


@pytest.mark.slow
def test_hub_id_from_the_local_hub_cache(folder, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    code = "import noiser; print(*noiser.load_model('org/tiny').identity)"
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert ran.stdout == f"org/tiny {commit} float32 LlamaForCausalLM\n", ran.stderr


def test_a_gguf_file_is_the_same_model_and_is_converted_once(
    gguf_file, folder, llama, cache, capfd, monkeypatch
):
    for path in folder.iterdir():  # neighbours of the file, which are not read
        shutil.copy(path, gguf_file.parent)
    (gguf_file.parent / "chat_template.jinja").write_text("{{ 'another model' }}")
    lm = noiser.load_model(gguf_file)
    assert lm.identity == (str(gguf_file), sha256_of(gguf_file), "float32", "LlamaForCausalLM")
    assert lm.tokenizer.chat_template is None
    ids = lm.tokenizer(PROMPT, add_special_tokens=False).input_ids
    assert ids == tiny_tokenizer(bos=False)(PROMPT).input_ids
    torch.testing.assert_close(logits(lm.model, ids), logits(llama, ids))
    out, err = capfd.readouterr()
    assert out == ""
    assert "noiser: Converting 'tiny' (once, about a minute)\n" in err
    monkeypatch.setattr("noiser.model.gguf._convert", lambda *args: pytest.fail("converted again"))
    assert noiser.load_model(gguf_file, dtype="bfloat16").identity.dtype == "bfloat16"
    assert left_in(cache) == [f"tiny-{lm.identity.revision[:24]}-v1"]


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (lambda data: b"", ModelError),
        (lambda data: data[: len(data) // 2], ModelError),
        (lambda data: b"PK\x03\x04" + data[4:], ModelError),
        (lambda data: data[:16] + (2**24).to_bytes(8, "little") + data[24:], ModelError),
        (lambda data: data.replace(b"llama", b"lemon"), Unsupported),
    ],
    ids=["empty", "cut short", "another format", "sixteen million keys", "another architecture"],
)
def test_a_gguf_file_that_cannot_be_converted(gguf_file, cache, harm, kind):
    gguf_file.write_bytes(harm(gguf_file.read_bytes()))
    with pytest.raises(kind, match=r"tiny\.gguf"):
        noiser.load_model(gguf_file)
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_written(gguf_file, cache, monkeypatch):
    with monkeypatch.context() as patched:
        full = Mock(side_effect=OSError(28, "No space left on device"))
        patched.setattr(transformers.LlamaForCausalLM, "save_pretrained", full)
        with pytest.raises(CacheError, match=r"No space left on device.*set NOISER_CACHE"):
            noiser.load_model(gguf_file)
    assert left_in(cache) == []
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    with pytest.raises(CacheError, match=r"cannot be written.*set NOISER_CACHE"):
        noiser.load_model(gguf_file)


CONVERT = """
import sys, time, noiser
from noiser.model import gguf
convert = gguf._convert

def slow(files, folder):
    print("converting", flush=True)
    time.sleep(float(sys.argv[2]))
    convert(files, folder)

gguf._convert = slow
print(noiser.load_model(sys.argv[1]).identity.name, flush=True)
"""


@pytest.mark.slow
def test_one_process_converts_and_a_killed_one_leaves_nothing(gguf_file, cache):
    def start(seconds):
        command = [sys.executable, "-c", CONVERT, str(gguf_file), str(seconds)]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    victim = start(60)
    assert victim.stdout.readline() == "converting\n"
    other = start(0)
    time.sleep(1)
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=300)
    out, err = other.communicate(timeout=300)
    assert out == f"converting\n{gguf_file}\n", err
    assert start(0).communicate(timeout=300)[0] == f"{gguf_file}\n"
    assert len(left_in(cache)) == 1


def test_weights_in_parts_are_joined(tmp_path, whole_gguf, llama, monkeypatch, cache):
    """Eleven packages, so that 10 sorts before 2; none is imported."""
    data, count = whole_gguf.read_bytes(), 11
    step = -(-len(data) // count)
    for number in range(count):
        folder = tmp_path / "site" / f"tiny_model_part{number}"
        (folder / "data").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
        (folder / "data" / f"{number}.bin").write_bytes(data[number * step : (number + 1) * step])
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    packages = tuple(f"tiny-model-part{number}==2.0" for number in range(count))
    texts = {"name": "tiny", "summary": "", "licence": "", "install": "pip install it"}
    model = BuiltIn(**texts, packages=packages, file="data/*.bin", sha256=sha256_of(whole_gguf))
    monkeypatch.setitem(BUILT_IN, "tiny", dataclasses.replace(model, sha256="0" * 64))
    with pytest.raises(ModelError, match=r"are damaged\. Install tiny again"):
        noiser.load_model("tiny")
    monkeypatch.setitem(BUILT_IN, "tiny", model)
    lm = noiser.load_model("tiny")
    torch.testing.assert_close(logits(lm.model, [3, 4, 5]), logits(llama, [3, 4, 5]))
    assert not list(cache.rglob("*.gguf")), "the joined file is not kept"
    shutil.rmtree(tmp_path / "site" / "tiny_model_part7")
    importlib.invalidate_caches()
    assert model.folder() is None
    with pytest.raises(
        DependencyError, match=r"tiny-model-part7==2\.0 is not installed.*pip install it$"
    ):
        noiser.load_model("tiny")
