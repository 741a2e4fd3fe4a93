# Shared by the scripts of this folder; source it, do not run it.
set -euo pipefail
NIBBLE_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$NIBBLE_ROOT"
export CCACHE_DIR="${CCACHE_DIR:-$HOME/.cache/ccache}"
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$NIBBLE_ROOT}" CCACHE_NOHASHDIR=1

note() { printf '\n== %s\n' "$*" >&2; }
fail() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }
jobs() { nproc; }

# build PRESET [TARGET...]: configures and builds (everything when no target is given).
build() {
  local preset="$1"; shift
  cmake --preset "$preset" >&2
  if [ $# -gt 0 ]; then
    cmake --build --preset "$preset" -j "$(jobs)" --target "$@" >&2
  else
    cmake --build --preset "$preset" -j "$(jobs)" >&2
  fi
}

# need COMMAND PACKAGE: stops with the remedy when a command is missing.
need() { command -v "$1" >/dev/null || fail "$1 is missing; install it with: apt-get install $2"; }
