#!/usr/bin/env bash
# Builds the fuzz targets (tests/fuzz/fuzz_*.cc) and runs each for a while; stops at a finding.
# Usage: scripts/fuzz.sh [SECONDS] [TARGET...]      60 seconds and all targets by default
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install_packages --fuzz

seconds="${1:-60}"; [ $# -gt 0 ] && shift
[[ "$seconds" =~ ^[0-9]+$ ]] || fail "SECONDS must be a number, got $seconds"
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
  for source in tests/fuzz/fuzz_*.cc; do
    [ -e "$source" ] || fail "there is no tests/fuzz/fuzz_*.cc"
    targets+=("$(basename "$source" .cc)")
  done
fi
build fuzz "${targets[@]}"
for target in "${targets[@]}"; do
  note "$target for $seconds s"
  corpus="build/fuzz/corpus/$target"; mkdir -p "$corpus"
  seeds="tests/fuzz/corpus/${target#fuzz_}"
  [ -d "$seeds" ] || fail "$seeds is missing: every target has seeds (tests/fuzz/make_corpus.py)"
  dictionary="tests/fuzz/dictionaries/${target#fuzz_}.dict"
  log="build/fuzz/$target.log"
  "build/fuzz/tests/fuzz/$target" -dict="$dictionary" -max_total_time="$seconds" -timeout=20 \
    -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/$target-" "$corpus" "$seeds" >"$log" 2>&1 ||
    { tail -n 60 "$log" >&2; fail "$target found something; the input is build/fuzz/$target-*"; }
  grep -E '^#[0-9]+\s+DONE|^Done|^stat::' "$log"
done
echo "${#targets[@]} targets, $seconds s each, no finding"
