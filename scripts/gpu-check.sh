#!/usr/bin/env bash
# Builds for CUDA (or takes a build), runs all tests that need a GPU, times kernels and a model of
# Llama 3 8B's shape, and prints one table. Needs a GPU; nvcc 13 unless --build is given; 40 GB of
# disk and as much memory for --models.
# Usage: scripts/gpu-check.sh [--build DIR] [--out DIR] [--work DIR] [--skip tests,kernels,models]
#   --build  folder with nibble, libnibble_cuda.so, libnibble_cuda_faulty.so, cuda_test,
#            cuda_model_test, attention_bench
#   --out    where h200-kernels.json and h200-models.json go (default build/gpu-check)
#   --work   where the model's files go (default a temporary folder, removed afterwards)
#   --schemes, --batches   of the models, e.g. --schemes "bf16 w4a8" --batches "64 256"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build="" out=build/gpu-check work="" skip="" batches="64 256"
schemes="bf16 w4a16_g128 w4a8 w8a8_fp8 w8a8_int8"
while [ $# -gt 0 ]; do
  case "$1" in
    --build|--out|--work|--skip|--schemes|--batches)
      [ $# -ge 2 ] || { echo "gpu-check.sh: $1 needs a value" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"; shift 2 ;;
    *) echo "gpu-check.sh: unknown option $1 (see its head)" >&2; exit 2 ;;
  esac
done
skipped() { [[ ",$skip," == *",$1,"* ]]; }

nvidia-smi --query-gpu=name,driver_version,memory.free --format=csv,noheader || {
  echo "gpu-check.sh: nvidia-smi finds no GPU; run this where there is one" >&2; exit 9; }
if [ -z "$build" ]; then
  source scripts/common.sh
  build cuda-sm90 nibble nibble_cuda nibble_cuda_bench nibble_cuda_faulty cuda_test cuda_model_test attention_bench
  cuda=build/cuda-sm90
  build=build/gpu-check/bin
  mkdir -p "$build"
  cp "$cuda"/tools/{nibble,libnibble_cuda.so,libnibble_cuda_bench.so} "$cuda"/src/backend/cuda/cuda_test "$cuda"/bench/cuda/attention_bench \
    "$cuda"/tests/cuda/{cuda_model_test,libnibble_cuda_faulty.so} "$build"
fi
mkdir -p "$out"
out="$(cd "$out" && pwd)"
failed=0

if ! skipped tests; then
  pids=()
  for shard in 0 1 2 3; do  # references take the time, on the CPU
    for test in cuda_test cuda_model_test; do
      GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX=$shard "$build/$test" > "$out/$test.$shard.log" 2>&1 &
      pids+=($!)
    done
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  for test in cuda_test cuda_model_test; do
    cat "$out/$test".?.log > "$out/$test.log"
    rm "$out/$test".?.log
    grep -B12 '^\[  FAILED  \] .*ms)' "$out/$test.log" | head -60 || true
    for word in PASSED SKIPPED FAILED; do
      echo "$test: $(awk -v word="$word" '$2 == word && $5 ~ /^test/ {sum += $4} END {print sum + 0}' \
        "$out/$test.log") $word"
    done
  done
  NIBBLE_BIN="$build/nibble" NIBBLE_FAULTY_LIBRARY="$build/libnibble_cuda_faulty.so" \
    python3 tests/e2e/test_gpu.py > "$out/test_gpu.log" 2>&1 || failed=1
  grep -E '^(FAIL|ERROR|Ran|OK)' "$out/test_gpu.log" | sed "s/^/test_gpu: /"
fi
if ! skipped kernels; then
  "$build/attention_bench" > "$out/attention.txt"
  for rest in 3 0; do
    "$build/nibble" --log-level warning bench kernels --backend cuda --n 28672,8192,4096 \
      --k 8192,8192,14336 --rest $rest --json > "$out/kernels-rest-$rest.json"
  done
fi
if ! skipped models; then
  cleanup=""
  [ -n "$work" ] || { work="$(mktemp -d)"; cleanup="$work"; }
  trap '[ -z "$cleanup" ] || rm -rf "$cleanup"' EXIT
  nibble() { "$build/nibble" --log-level warning "$@"; }
  [ -d "$work/bf16" ] || nibble make-dummy --config bench/configs/llama_8b.json --out "$work/bf16" --json
  for scheme in $schemes; do
    [ $scheme = bf16 ] || [ -d "$work/$scheme" ] || nibble quantize "$work/bf16" "$work/$scheme" --scheme $scheme \
      --scale-rule absmax --json > /dev/null
  done
  : > "$out/models.jsonl"
  measure() { nibble bench offline "$work/$1" --device cuda --json "${@:2}" >> "$out/models.jsonl"; }
  for scheme in $schemes; do
    measure $scheme --batch 1 --context 1008 --input-len 16 --output-len 64 --repeats 2
    measure $scheme --batch 1 --input-len 8192 --output-len 4 --repeats 5 --max-num-batched-tokens 8192
    for kv in bf16 int4; do
      for batch in $batches; do
        measure $scheme --batch $batch --context 1008 --input-len 16 --output-len 16 --repeats $((batch < 256 ? 2 : 1)) \
          --max-num-batched-tokens 8192 --kv-cache-dtype $kv
      done
    done
  done
  : > "$out/capacity.jsonl"
  for kv in bf16 fp8 int8 int4; do
    nibble bench capacity "$work/w4a16_g128" --device cuda --kv-cache-dtype $kv --json \
      >> "$out/capacity.jsonl" || failed=1
  done
  start=$(date +%s%N)
  "$build/nibble" generate "$work/w4a16_g128" --device cuda --prompt hello --max-tokens 1 \
    > /dev/null 2> "$out/start.log"
  echo "{\"start_to_end_s\": $(( ($(date +%s%N) - start) / 1000000 ))e-3}" > "$out/start.json"
fi
python3 scripts/gpu_table.py "$out"
exit $failed
