#!/usr/bin/env bash
# Runs the tests of kernels, and those of small models under memcheck and initcheck, on a GPU under
# compute-sanitizer, each test in a process of its own and several at once, and fails if anything is
# reported or does not end. Needs a GPU and compute-sanitizer; nvcc 13 unless --build is given.
# Usage: scripts/gpu-sanitize.sh [--build DIR] [--out DIR] [--tools racecheck,initcheck]
#   --build  folder with cuda_test and cuda_model_test
#   --out    where the tools' output goes (default build/gpu-sanitize)
#   --tools  default racecheck,memcheck,synccheck,initcheck
#   --tests  filter of GoogleTest (default: all but those of long sequences or without kernels)
#   --jobs   tests that run at the same time (default: number of cores, at most 16)
#   --limit  seconds for one test (default 120); one that takes longer counts as failed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build="" out=build/gpu-sanitize tools=racecheck,memcheck,synccheck,initcheck limit=120
jobs=$(nproc)
((jobs <= 16)) || jobs=16
tests='*-*Long*:*DeathTest*:SelfCheck.*:CudaBackend.*:DeviceInfo.*:CublasLt.*:*Refuses*:*Plans*'
while [ $# -gt 0 ]; do
  case "$1" in
    --build|--out|--tools|--tests|--jobs|--limit)
      [ $# -ge 2 ] || { echo "gpu-sanitize.sh: $1 needs a value" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"; shift 2 ;;
    *) echo "gpu-sanitize.sh: unknown option $1 (see its head)" >&2; exit 2 ;;
  esac
done
PATH="$PATH:/usr/local/cuda/bin"
command -v compute-sanitizer > /dev/null || {
  echo "gpu-sanitize.sh: no compute-sanitizer; it comes with the CUDA toolkit" >&2; exit 9; }
nvidia-smi -L || { echo "gpu-sanitize.sh: nvidia-smi finds no GPU" >&2; exit 9; }
if [ -z "$build" ]; then
  source scripts/common.sh
  build cuda-sm90 cuda_test cuda_model_test
  build="$out/bin"
  mkdir -p "$build"
  cp build/cuda-sm90/{src/backend/cuda/cuda_test,tests/cuda/cuda_model_test} "$build"
fi
mkdir -p "$out"

# One test of a program under one tool: its log, and a line with what became of it.
check_test() {
  local tool=$1 program=$2 test=$3 start=$SECONDS status=0 verdict=ok
  local log="$out/$tool-${test//\//_}.log" own
  own="$(mktemp -d)"  # tests of models write their copies there
  TMPDIR="$own" timeout -k 5 "$limit" compute-sanitizer --tool "$tool" --print-limit 20 \
    --error-exitcode 86 --show-backtrace device "$build/$program" --gtest_filter="$test" \
    > "$log" 2>&1 || status=$?
  rm -rf "$own"
  if grep -q 'before first instrumented API call' "$log" && grep -q '^\[  PASSED  \] 1 test' "$log"; then
    verdict="ok, nothing on the GPU"
  elif ! grep -qE '^=+ (ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' "$log"; then
    verdict="$(grep -hE '^=+ (ERROR|RACECHECK) SUMMARY' "$log" | tr -d = || true)"
    verdict="FAILED ${verdict:-without a result, status $status}"
  elif [ $status -ne 0 ]; then
    verdict="FAILED status $status"
  fi
  printf '%-10s %-72s %4d s  %s\n' "$tool" "$test" $((SECONDS - start)) "$verdict"
}
export -f check_test
export build out limit NIBBLE_BRIEF_TESTS=1

tests_of() {
  "$build/$1" --gtest_list_tests --gtest_filter="$tests" |
    awk -v program="$1" '/^[^ ]/ { suite = $1; next } { print program, suite $1 }'
}
for tool in ${tools//,/ }; do
  tests_of cuda_test | sed "s/^/$tool /"
  # Attention copies whole tiles of the cache and clears what no token has been written to. Its own
  # tests write something everywhere; initcheck's of models are those that begin no tile in a step.
  case $tool in
    memcheck) tests_of cuda_model_test | sed "s/^/$tool /" ;;
    initcheck) tests_of cuda_model_test | { grep LogitsAre || true; } | sed "s/^/$tool /" ;;
  esac
done > "$out/all.txt"
# Those that take long come first: racecheck's of whole kernels.
long='^racecheck .*(FewTokens|InEveryTile|FewSequences|EveryFormat|Draws|EqualsTheReference|Captured)|^memcheck Schemes/'
{ grep -E "$long" "$out/all.txt" || true; grep -vE "$long" "$out/all.txt" || true; } |
  xargs -r -P "$jobs" -L 1 bash -c 'check_test "$@"' check_test | tee "$out/summary.txt"
count() { grep -cE "$1" "$out/summary.txt" || true; }
for tool in ${tools//,/ }; do
  echo "gpu-sanitize: $tool: $(count "^$tool ") tests, $(count "^$tool .*FAILED") failed," \
    "of them $(count "^$tool .*FAILED.*status 124") not done after $limit s"
done
echo "gpu-sanitize: $SECONDS s, logs in $out"
[ "$(count .)" -eq "$(wc -l < "$out/all.txt")" ] && [ "$(count .)" -gt 0 ] && [ "$(count FAILED)" -eq 0 ]
