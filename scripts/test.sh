#!/usr/bin/env bash
# Installs what is missing, builds, runs every test, prints one line "N passed, N failed, N skipped".
# Usage: scripts/test.sh [PRESET]     PRESET is cpu (default), cpu-asan or cpu-tsan
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

preset="${1:-cpu}"
reports="$NIBBLE_ROOT/build/$preset/reports"
first_build=1500  # seconds of one core, measured without ccache
last_time="build/logs/tests-$preset.seconds"

echo "test.sh builds everything ($preset) and runs all tests." >&2
[ -f "build/$preset/.ninja_log" ] ||
  echo "The first build takes about $(minutes $first_build) if the $(jobs) cores here are free." >&2
[ ! -f "$last_time" ] || echo "The tests took $(cat "$last_time") s last time." >&2
install_packages
build "$preset"
rm -rf "$reports" && mkdir -p "$reports"
tests_begin=$SECONDS

# Failed tests are in the reports, too, which say how the script ends.
stage "unit tests" ctest --preset "$preset" -j "$(jobs)" --output-junit "$reports/ctest.xml" || true

case "$preset" in
  cpu) python_tests=(tests/e2e tests/issues) ;;
  cpu-asan) python_tests=(tests/e2e/test_cli_bad_input.py tests/e2e/test_cli_commands.py tests/issues) ;;
  *) python_tests=() ;;
esac
has_client() { .venv/bin/python -c 'import anthropic, jsonschema, openai, pytest' 2> /dev/null; }
get_client() {
  [ -x .venv/bin/python ] || python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check anthropic jsonschema openai pytest
}
if [ ${#python_tests[@]} -gt 0 ]; then
  if has_client || stage "install Python packages" get_client; then
    NIBBLE_BIN="$NIBBLE_ROOT/build/$preset/tools/nibble" stage "end-to-end tests" \
      .venv/bin/python -m pytest -q "${python_tests[@]}" --junit-xml "$reports/pytest.xml" || true
    [ -f "$reports/pytest.xml" ] || echo "pytest stopped without a report" > "$reports/pytest.broken"
  elif [ "${CI:-}" = true ]; then
    echo "could not install anthropic, jsonschema, openai and pytest" > "$reports/pytest.broken"
  else
    echo "tests/e2e and tests/issues: could not install anthropic, jsonschema, openai and pytest (no package index)" > "$reports/pytest.skipped"
  fi
fi

echo $((SECONDS - tests_begin)) > "$last_time"
python3 scripts/summarize_tests.py "$reports"
