#!/usr/bin/env bash
# Runs the test suite under ASan+UBSan and under TSan.
# Usage: scripts/sanitize.sh [asan|tsan]      both by default
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
# Not detect_stack_use_after_return, which gcc 13 turns on by itself: its frames are not aligned to 64
# bytes, and aligned AVX-512 stores to local arrays fault there.
export ASAN_OPTIONS="${ASAN_OPTIONS:-strict_string_checks=1:detect_stack_use_after_return=0}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}"
case "${1:-both}" in
  asan) "$here/test.sh" cpu-asan ;;
  tsan) "$here/test.sh" cpu-tsan ;;
  both) status=0; "$here/test.sh" cpu-asan || status=1; "$here/test.sh" cpu-tsan || status=1
        exit "$status" ;;
  *) echo "sanitize.sh: unknown suite $1 (use asan or tsan)" >&2; exit 2 ;;
esac
