#!/usr/bin/env bash
# Quantizes the model of this repository to 4 bits, measures what it lost, tells a story, serves it.
# Usage: scripts/demo.sh [--once] [--port PORT]
#   --once   stop before serving      --port   port of the server (default 8000)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

once=false port=8000
while [ $# -gt 0 ]; do
  case "$1" in
    --once) once=true; shift ;;
    --port) [ $# -ge 2 ] || fail "--port needs a number"; port="$2"; shift 2 ;;
    *) fail "unknown option $1 (use --once, --port PORT)" ;;
  esac
done

nibble=build/cpu/tools/nibble
scheme=w4a16_g32
source_model=models/storyteller
quantized_model="build/demo/storyteller-$scheme"
text=tests/data/text/the_black_cat.txt

first_build=900  # seconds of one core for the target nibble, measured without ccache

echo "demo.sh quantizes a small model to 4 bits, measures what it lost, tells a story and serves it." >&2
[ -x "$nibble" ] ||
  echo "The program is built first: about $(minutes $first_build) if the $(jobs) cores here are free." >&2
install_packages
build cpu nibble
mkdir -p build/demo

field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
bytes_of() { find "$1" -name '*.safetensors' -printf '%s\n' | awk '{ s += $1 } END { print s }'; }
perplexity() { "$nibble" eval ppl "$1" --text "$text" --json > "build/demo/$2.json"; }

stage "quantize to $scheme" \
  "$nibble" quantize "$source_model" "$quantized_model" --scheme "$scheme" --force --json || exit 1
stage "perplexity of bf16" perplexity "$source_model" bf16 || exit 1
stage "perplexity of $scheme" perplexity "$quantized_model" "$scheme" || exit 1
before="$(field perplexity < build/demo/bf16.json)"
after="$(field perplexity < "build/demo/$scheme.json")"
awk -v a="$before" -v b="$after" -v s="$scheme" \
    -v from="$(bytes_of "$source_model")" -v to="$(bytes_of "$quantized_model")" 'BEGIN {
  printf "bf16:      perplexity %.3f, %.1f MB\n", a, from / 1e6
  printf "%s: perplexity %.3f, %.1f MB\n", s, b, to / 1e6
  printf "loss: %+.2f %%\n", 100 * (b / a - 1)
}'

note "a story"
prompt="It was a dark and stormy night"
printf '%s' "$prompt"
"$nibble" --log-level warning generate "$quantized_model" --prompt "$prompt" --max-tokens 120 \
  --temperature 0.7 --top-p 0.9 --seed 1
echo

$once && exit 0
cat <<END

Serving on port $port; stop with Ctrl-C. From another terminal:
  curl -s http://127.0.0.1:$port/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "storyteller-$scheme", "prompt": "Once upon a time", "max_tokens": 60}'
END
exec "$nibble" serve "$quantized_model" --port "$port"
