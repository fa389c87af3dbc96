"""The pages of the manual: their fenced blocks, and the commands in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "design", "examples")

# What no test can run: the page ("" for any), the beginning of a command or of a Python block, and
# why.
NOT_RUN: dict[tuple[str, str], str] = {
    ("", "noiser serve"): "it serves until it is stopped; test_web.py has the server",
    (
        "docs/data.md",
        "noiser data fetch",
    ): "the network; test_data_files.py has a server of its own",
    (
        "docs/bench.md",
        "noiser bench run PLAN.toml -o DIR --executor ray",
    ): "a cluster; test_bench_ray.py",
    ("docs/bench.md", "ray start"): "a cluster",
    ("docs/report.md", "noiser report DIR OTHER"): "a second folder; test_report.py",
    (
        "docs/reproduction/index.md",
        "noiser",
    ): "hours, and the data sets; test_bench.py and test_report.py do the like",
    ("design/reproduction.md", "noiser"): "hours, and the data sets",
    ("design/which.md", "noiser"): "hours, and the data sets",
    (
        "docs/models.md",
        'lm = noiser.load_model(\n    "vllm:',
    ): "vLLM and eight cards, or two nodes; test_vllm.py",
    (
        "docs/models.md",
        'method = noiser.Occlusion(removal="delete", objective="logprob")\nwith',
    ): "a server; test_server_forms.py",
    ("docs/models.md", "vllm serve"): "vLLM; test_vllm.py",
    ("docs/models.md", "llama-server"): "llama.cpp; test_real_servers.py",
    ("docs/models.md", "lms server"): "LM Studio",
    ("docs/models.md", "noiser attribute -m http"): "a server; test_server.py",
    ("docs/models.md", "from transformers import"): "the hub, and a graphics card",
    ("docs/prompts.md", "documents = ["): "a template with documents; test_chat_forms.py",
    ("docs/howto/chat_models.md", "ollama pull"): "Ollama",
    (
        "docs/howto/chat_models.md",
        "noiser attribute - -m chat:",
    ): "an endpoint; test_chat_models.py",
    (
        "docs/howto/chat_models.md",
        'import noiser\n\nlm = noiser.load_model("chat:',
    ): "an endpoint; test_chat_models.py",
    (
        "docs/howto/chat_models.md",
        "claude = noiser.load_model(",
    ): "an endpoint; test_chat_models.py",
    ("docs/howto/edits.md", "noiser diff"): "its exit status depends on the model; test_explain.py",
    ("docs/howto/tests.md", "noiser test"): "a file of cases; test_expect.py",
    ("docs/howto/guard.md", "noiser guard"): "a model that the hub has; test_guard.py",
    ("docs/howto/slim.md", "noiser slim"): "files with a prompt and cases; test_slim.py",
    ("docs/models.md", "from torchao"): "torchao; test_quantised.py",
    (
        "docs/howto/pictures.md",
        "import noiser",
    ): "a model that reads pictures; test_images.py",
    (
        "docs/howto/pictures.md",
        "noiser attribute",
    ): "a model that reads pictures; test_image_doors.py",
    ("docs/coming_from.md", "import shap"): "another library",
    (
        "docs/coming_from.md",
        "from captum.attr",
    ): "another library, with a figure; see test_neighbours.py",
    (
        "docs/coming_from.md",
        "import inseq\n\nmodel",
    ): "another library, and the hub; test_inseq.py does the like",
    ("docs/coming_from.md", "from context_cite"): "another library",
    ("docs/coming_from.md", "from lxt"): "another library",
    (
        "examples/plugin/README.md",
        "noiser",
    ): "the plugin must be installed; test_plugins.py does that",
}


def pages() -> list[str]:
    """Every page, by its path in the repository."""
    found = [
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
    ]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def all_blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of every fenced block of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        (m[2].strip(), m[3])
        for m in re.finditer(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", text, re.MULTILINE)
    ]


def blocks(page: str, language: str) -> list[str]:
    """The texts of the blocks in a language that can be run."""
    found = [text for each, text in all_blocks(page) if each == language]
    return [text for text in found if reason_not_to_run(page, text.strip()) is None]


def commands(page: str) -> list[str]:
    """The command lines of a page, continued ones joined, without the environment variables that
    they set.
    """
    texts = [text.replace("\\\n", " ") for language, text in all_blocks(page) if language == "bash"]
    lines = [
        re.sub(r"^\s*([A-Z_]+=\S+ +|\.venv/bin/)*", "", line)
        for text in texts
        for line in text.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def reason_not_to_run(page: str, text: str) -> str | None:
    """Why a command or a block is left out, or None."""
    fitting = (
        why
        for (where, begin), why in NOT_RUN.items()
        if where in (page, "") and text.startswith(begin)
    )
    return next(fitting, None)
