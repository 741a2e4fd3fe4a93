#!/usr/bin/env python3
"""What serving a model shaped like Kimi K2.5 gains by INT4 and 8-bit experts, form by form.

Usage: kimi_serving.py --nibble FILE [--device cuda] [--layers 4] [--forms w4a16 w4a8 w8a8]
                       [--input-len 10240] [--output-len 512] [--concurrency 2 40] [--rounds 4 2]
                       [--work FOLDER] [--model FOLDER] [--answers N] [--first-token] [--out FILE]
                       [--small] [-- more flags of serve]

For each form a checkpoint with random weights is made (`nibble make-dummy`: the first layers, the
first of them dense, the others with all 384 experts), served (`nibble serve`) and asked by `nibble
bench serve` with different random prompts, concurrency by concurrency; then it is removed, so that
one is on the disk at a time. Forms:

  w4a16  INT4 in groups of 32 with BF16 activations, as the model is published
  w4a8   INT4 by way of FP8 with a scale per output channel, as Quark stores it, INT8 activations
  w8a8   FP8 with a scale per output channel, FP8 activations
  w4a16_channel  if asked for: weights as in w4a8, BF16 activations

A line of JSON for each form and concurrency: ttft_ms, tpot_ms and e2e_ms (median and p99),
output_tokens_per_s, total_tokens_per_s, the tokens that fit the cache beside the model, seconds to
ready, what the server said of loading and of its sizes, bytes of the checkpoint, command, commit
and machine. In the end, for each concurrency, the ratios of every form to the first. Prompts are
random token ids, answers letters. --model measures a checkpoint that is there, of the one form that
is given, and leaves it there. --answers N compares N greedy answers (512 tokens in, 32 out) alone
and all at once. --first-token starts a process anew, with the checkpoint in the page cache: seconds to its
first token, bytes of the checkpoint a second, peaks of its memory. --small is a run of the script
itself on a CPU in seconds: tiny widths, prompts of 48 and answers of 8 tokens. Standard library
only.
"""

import argparse
import contextlib
import json
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

import same_answers
from cpu_process import Server, file_bytes, rounded, start_to_first_token

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What make-dummy is told of each.
FORMS = {"w4a16": [], "w4a8": ["--scheme", "w4a8"], "w8a8": ["--scheme", "w8a8_fp8"],
         "w4a16_channel": ["--scheme", "w4a16_channel"]}
SMALL = {"device": "cpu", "input_len": 48, "output_len": 8, "concurrency": [2, 4], "rounds": [1],
         "make": ["--tiny"]}
# Few tokens of a random model have text, and events come with text: answers are of letters.
LETTERS = json.dumps({"logit_bias": {str(token): 100 for token in range(97, 123)}})
PER_S = {"output_tokens_per_s": "output_throughput", "total_tokens_per_s": "total_token_throughput"}
TIMES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms": "e2el"}


def run(command):
    """Standard output of a command that must not fail."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit code {result.returncode}: "
                           f"{result.stderr.strip()[-500:]}")
    return result.stdout


def commit():
    try:
        return run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip()
    except (OSError, RuntimeError):
        return None


def machine():
    """The GPUs, or the processor where there are none."""
    try:
        names = run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
        return ", ".join(name.strip() for name in names)
    except (OSError, RuntimeError):
        info = pathlib.Path("/proc/cpuinfo")
        found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
        return found[1] if found else platform.processor()


def tokens_that_fit(url):
    """Of all pages of the cache: block_size times num_gpu_blocks."""
    text = urllib.request.urlopen(url + "/metrics", timeout=30).read().decode()
    line = re.search(r"^vllm:cache_config_info\{(.*)\} ", text, re.M)[1]
    size, blocks = (int(re.search(rf'{key}="(\d+)"', line)[1])
                    for key in ("block_size", "num_gpu_blocks"))
    return size * blocks


def ask(args, url, concurrency, seed):
    """One run of `nibble bench serve`, as its JSON object."""
    rounds = dict(zip(args.concurrency, args.rounds * len(args.concurrency)))[concurrency]
    prompts = max(concurrency * rounds, 2)
    command = [args.nibble, "bench", "serve", "--base-url", url, "--dataset-name", "random",
               "--prompt-form", "ids", "--vocab-size", args.vocabulary,
               "--random-input-len", args.input_len, "--random-output-len", args.output_len,
               "--num-prompts", prompts, "--max-concurrency", concurrency, "--num-warmups", 1,
               "--ignore-eos", "--temperature", 0, "--seed", seed,
               "--extra-body", LETTERS,
               "--percentile-metrics", ",".join(TIMES.values()), "--metric-percentiles", 99,
               "--json"]
    measured = json.loads(run(command))
    if measured["failed"] or measured["completed"] != prompts:
        raise RuntimeError(f"{measured['failed']} of {prompts} requests failed: "
                           f"{measured['error_counts']}")
    if measured["total_output_tokens"] != prompts * args.output_len:
        raise RuntimeError(f"{measured['total_output_tokens']} tokens instead of "
                           f"{prompts} x {args.output_len}")
    return measured, command


def row_of(measured, **facts):
    row = dict(facts)
    for name, key in TIMES.items():
        row[name] = {"median": measured[f"median_{key}_ms"], "p99": measured[f"p99_{key}_ms"]}
    for name, key in PER_S.items():
        row[name] = measured[key]
    return row


@contextlib.contextmanager
def checkpoint(args, form):
    """The folder of one and what is known of its making; one that was made is gone afterwards."""
    if args.model:
        yield pathlib.Path(args.model), {}
        return
    if args.work:
        pathlib.Path(args.work).mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kimi-", dir=args.work))
    try:
        made = json.loads(run([args.nibble, "make-dummy", "--config", args.config, "--out",
                               folder / "model", "--layers", args.layers, "--json", *args.make,
                               *FORMS[form]]))
        yield folder / "model", {"tensors": made["tensors"], "make_s": made["seconds"]}
    finally:
        shutil.rmtree(folder)


def serve(args, model, facts, emit):
    """Rows by concurrency of what a server of this model is asked."""
    rows = {}
    begin = time.monotonic()
    with Server(args.nibble, str(model), *facts["serve_flags"]) as server:
        facts["ready_s"] = time.monotonic() - begin
        said = "".join(server.said)
        facts["loading"] = re.findall(r" weights: (.*)", said)
        facts["sizes"] = re.findall(r" (?:GPU memory|steps): (.*)", said)
        facts["tokens_that_fit"] = tokens_that_fit(server.url)
        for number, concurrency in enumerate(args.concurrency):
            measured, command = ask(args, server.url, concurrency, 1 + number)
            rows[concurrency] = row_of(
                measured, concurrency=concurrency, input_len=args.input_len,
                output_len=args.output_len, prompts=measured["completed"], **facts,
                command=" ".join(map(str, command[1:])).replace(LETTERS, "LETTERS"))
            emit(rows[concurrency])
        if args.answers > 0:
            emit({"form": facts["form"],
                  **same_answers.compare(server.url, args.vocabulary, args.answers,
                                         min(512, args.input_len), min(32, args.output_len))})
    return rows


def measure(args, form, emit):
    """Makes, serves and asks one form; its rows by concurrency."""
    with checkpoint(args, form) as (model, made):
        size = file_bytes(model)
        facts = {"form": form, "layers": args.layers, "file_bytes": size, **made,
                 "device": args.device, "serve_flags": ["--device", args.device, *args.flags],
                 "machine": machine(), "commit": commit()}
        rows = serve(args, model, facts, emit)
        if args.first_token:
            start = start_to_first_token(args.nibble, str(model), "--device", args.device)
            emit({"form": form, "first_token_s": start["seconds"], "load_s": start["load_s"],
                  "gb_per_s_to_first_token": size / start["seconds"] / 1e9,
                  "gb_per_s_of_loading": size / start["load_s"] / 1e9, "loading": start["loading"],
                  "peak_bytes": start["peaks"]})
    return rows


def ratios(rows, concurrency, forms):
    """Of every form to the first."""
    base = rows[forms[0]][concurrency]
    result = {"ratios_to": forms[0], "concurrency": concurrency}
    for form in forms[1:]:
        row = rows[form][concurrency]
        result[form] = {name: row[name]["median"] / base[name]["median"] for name in TIMES}
        result[form].update({name: row[name] / base[name]
                             for name in (*PER_S, "tokens_that_fit", "file_bytes")})
    return result


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nibble", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", default=str(ROOT / "bench/configs/kimi_k25.json"))
    parser.add_argument("--layers", type=int, default=4, help="the first of them dense")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["w4a16", "w4a8", "w8a8"])
    parser.add_argument("--input-len", type=int, default=10240)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[2, 40])
    parser.add_argument("--rounds", type=int, nargs="+", default=[2],
                        help="prompts of each stream, or of each number of --concurrency")
    parser.add_argument("--work", help="folder for the checkpoint; default: the system's")
    parser.add_argument("--model", help="a checkpoint that is there, of the only one of --forms")
    parser.add_argument("--answers", type=int, default=0, help="so many, alone and all at once")
    parser.add_argument("--first-token", action="store_true", help="of a process anew")
    parser.add_argument("--out", help="file that the lines are appended to")
    parser.add_argument("--small", action="store_true", help="tiny widths on a CPU")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    args.flags = words[split + 1:]
    if args.model and len(args.forms) > 1:
        parser.error("--model is of one form: name it with --forms")
    args.make = []
    if args.small:
        vars(args).update(SMALL)
    config = json.loads(pathlib.Path(args.config).read_text())
    args.vocabulary = config.get("text_config", config)["vocab_size"]
    return args


def main():
    args = arguments()
    # So that the folder of a checkpoint, which takes up to 57 GB, goes where this is killed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def emit(row):
        line = json.dumps(rounded(row, 4))
        print(line, flush=True)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    try:
        rows = {form: measure(args, form, emit) for form in args.forms}
    except (RuntimeError, OSError) as error:
        sys.exit(f"kimi_serving.py: {error}")
    if len(args.forms) > 1:
        for concurrency in args.concurrency:
            emit(ratios(rows, concurrency, args.forms))


if __name__ == "__main__":
    main()
