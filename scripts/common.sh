# Shared by the scripts of this folder; source it, do not run it.
set -euo pipefail
NIBBLE_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$NIBBLE_ROOT"
export CCACHE_DIR="${CCACHE_DIR:-$HOME/.cache/ccache}"
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$NIBBLE_ROOT}" CCACHE_NOHASHDIR=1

note() { printf '\n== %s\n' "$*" >&2; }
fail() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }
jobs() { nproc; }

# minutes SECONDS: how long so much work of one core takes on the cores here, in words.
minutes() {
  local minutes=$((($1 / $(jobs) + 59) / 60))
  [ "$minutes" -eq 1 ] && echo "a minute" || echo "$minutes minutes"
}

# stage TITLE COMMAND...: runs it with its output in build/logs/TITLE.log, and shows one line: how
# far it is and after how many seconds. When it fails, shows its errors, names the log and returns
# its status. STAGE_RESULT is a command that may print what to say about success, given the log.
stage() {
  local title="$1" status=0 start=$SECONDS said=""; shift
  local log="build/logs/${title// /-}.log"
  mkdir -p build/logs && : > "$log"
  show_progress "$title" "$log" & stage_monitor=$!
  "$@" > "$log" 2>&1 < /dev/null || status=$?
  end_progress
  if [ "$status" -ne 0 ]; then
    printf '== %s: failed after %d s\n' "$title" $((SECONDS - start)) >&2
    errors_of "$log" >&2
    printf '%s: %s failed; all its output is in %s\n' "$(basename "$0")" "$title" "$log" >&2
    return "$status"
  fi
  if [ -n "${STAGE_RESULT:-}" ]; then said="$("$STAGE_RESULT" "$log")"; fi
  printf '== %s: %s%d s\n' "$title" "${said:+$said, }" $((SECONDS - start)) >&2
}

on_terminal() { [ -t 2 ] && [ "${TERM:-dumb}" != dumb ]; }

# On a terminal one line is written again every second; elsewhere there is a line every 30 seconds.
show_progress() {
  local title="$1" log="$2" start=$SECONDS script=$$ next=30 seconds line
  while sleep 1 && kill -0 "$script" 2> /dev/null; do
    seconds=$((SECONDS - start))
    line="== $title: $(progress_of "$log")$seconds s"
    if on_terminal; then
      printf '\r\033[K%s' "$line" >&2
    elif [ "$seconds" -ge "$next" ]; then
      printf '%s\n' "$line" >&2
      next=$((seconds / 30 * 30 + 30))
    fi
  done
}

end_progress() {
  [ -n "${stage_monitor:-}" ] || return 0
  kill "$stage_monitor" 2> /dev/null || true
  wait "$stage_monitor" 2> /dev/null || true
  stage_monitor=""
  ! on_terminal || printf '\r\033[K' >&2
}

interrupted() { end_progress; echo "$(basename "$0"): interrupted" >&2; exit 130; }
trap interrupted INT

# The last count in the output of ninja ("[3/70]"), ctest ("3/70 Test") or pytest ("[ 4%]").
progress_of() {
  tail -c 2000 "$1" | grep -vE '\] Re-(checking|running)' |
    grep -oE '^\[[0-9]+/[0-9]+\]|[0-9]+/[0-9]+ Test|\[ *[0-9]+%\]' | tail -n 1 |
    sed -E 's/ Test//; s/[][ ]//g; s/$/, /; s,/, of ,' || true
}

# What failed in the output of ninja (without the command lines), CMake, ctest, pytest or apt; the
# last lines where nothing of these is found.
errors_of() {
  local errors
  errors="$(awk '
    /^FAILED: / { show = 1; skip = 2 }
    /^\[[0-9]+\/[0-9]+\] / { show = 0 }
    /^CMake Error/ { show = 1 }
    /^ *[0-9]+\/[0-9]+ Test +#/ || /^ +Start +[0-9]+:/ { show = 0 }
    / Test +#.*\*\*\*/ { show = 1 }
    /^=+ (FAILURES|ERRORS) =+$/ { show = 1 }
    /^(E|Err|ERROR): / { print }
    skip == 1 { skip = 0; next }
    skip == 2 { skip = 1 }
    show { print }' "$1")"
  [ -n "$errors" ] || errors="$(tail -n 20 "$1")"
  printf '%s\n' "$errors" | if [ "${CI:-}" = true ]; then cat; else head -n 80; fi
}

# build PRESET [TARGET...]: configures and builds (everything when no target is given).
build() {
  local preset="$1" targets=(); shift
  [ $# -eq 0 ] || targets=(--target "$@")
  if [ -f "build/$preset/build.ninja" ]; then
    mkdir -p build/logs
    cmake --preset "$preset" > build/logs/configure.log 2>&1 ||
      stage "configure $preset" cmake --preset "$preset" || exit 1
  else
    stage "configure $preset" cmake --preset "$preset" || exit 1
  fi
  STAGE_RESULT=build_result stage "build $preset" \
    cmake --build --preset "$preset" -j "$(jobs)" "${targets[@]}" || exit 1
}

build_result() {
  if grep -q '^ninja: no work to do' "$1"; then echo "nothing to do"
  else echo "$(grep -cE '^\[[0-9]+/[0-9]+\] (Build|Link)' "$1") steps"; fi
}

# install_packages [OPTION...]: of scripts/install-deps.sh; says nothing when all are there.
install_packages() {
  if ! scripts/install-deps.sh --check "$@" 2> /dev/null; then
    # Its password is asked for here, where it can be typed.
    [ "$(id -u)" -eq 0 ] || ! command -v sudo > /dev/null || sudo -v
    stage packages scripts/install-deps.sh "$@" || exit 1
  fi
}

# need COMMAND PACKAGE: stops with the remedy when a command is missing.
need() { command -v "$1" >/dev/null || fail "$1 is missing; install it with: apt-get install $2"; }
