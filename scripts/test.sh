#!/usr/bin/env bash
# Installs what is missing, builds, runs every test, prints one line "N passed, N failed, N skipped".
# Usage: scripts/test.sh [PRESET]     PRESET is cpu (default), cpu-asan or cpu-tsan
set -euo pipefail
"$(dirname "${BASH_SOURCE[0]}")/install-deps.sh"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

preset="${1:-cpu}"
reports="$NIBBLE_ROOT/build/$preset/reports"

note "build ($preset)"
build "$preset"
rm -rf "$reports" && mkdir -p "$reports"

note "ctest"
ctest --preset "$preset" -j "$(jobs)" --output-junit "$reports/ctest.xml" >&2 ||
  note "ctest reported failures"

case "$preset" in
  cpu) python_tests=(tests/e2e tests/issues) ;;
  cpu-asan) python_tests=(tests/e2e/test_cli_bad_input.py tests/e2e/test_cli_commands.py tests/issues) ;;
  *) python_tests=() ;;
esac
if [ ${#python_tests[@]} -gt 0 ]; then
  note "end-to-end tests (Python)"
  [ -x .venv/bin/python ] || python3 -m venv .venv >&2
  if .venv/bin/python -c 'import openai, pytest' 2>/dev/null ||
     .venv/bin/python -m pip install --quiet --disable-pip-version-check openai pytest >&2; then
    NIBBLE_BIN="$NIBBLE_ROOT/build/$preset/tools/nibble" .venv/bin/python -m pytest -q "${python_tests[@]}" \
      --junit-xml "$reports/pytest.xml" >&2 || note "pytest reported failures"
    [ -f "$reports/pytest.xml" ] || echo "pytest stopped without a report" > "$reports/pytest.broken"
  elif [ "${CI:-}" = true ]; then
    echo "could not install openai and pytest" > "$reports/pytest.broken"
  else
    echo "tests/e2e and tests/issues: could not install openai and pytest (no package index)" > "$reports/pytest.skipped"
  fi
fi

python3 scripts/summarize_tests.py "$reports"
