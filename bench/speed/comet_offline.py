#!/usr/bin/env python3
"""Greatest throughput of whole models on a GPU whose memory is bounded: the rows `offline` of a
results file (COMET's figures 10 to 12 and 15).

Usage: comet_offline.py NIBBLE RESULTS.json [--gpu-memory 80GB] [--batch N,N] CASE ...
A CASE is CONFIG:INPUT:OUTPUT:SCHEME+KV[,SCHEME+KV...], like llama_70b:1024:512:w4a16_g128+bf16,w4a8+int4:
a file of bench/configs, tokens in and out, and pairs of weights and cache, of which the first is
what the others are compared with. Rows of the same case and pair are replaced. --batch: at most
these numbers of sequences, one after the other.
"""
import argparse
import datetime
import json
import pathlib
import subprocess

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
MOST = 1024  # sequences at once


def command(nibble, config, lengths, pair, sizes):
    scheme, cache = pair.split("+")
    return [nibble, "--log-level", "error", "bench", "offline", CONFIGS / f"{config}.json",
            "--dummy-weights", "--scheme", scheme, "--kv-cache-dtype", cache, "--device", "cuda",
            *sizes, "--input-len", lengths[0], "--output-len", lengths[1], "--repeats", 1,
            "--max-num-batched-tokens", 8192, "--json"]


def measured(nibble, config, lengths, pair, sizes):
    """One run's row."""
    run = subprocess.run(list(map(str, command(nibble, config, lengths, pair, sizes))),
                         capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{config} {pair}: {run.stderr.strip()}")
    report = json.loads(run.stdout)
    scheme, cache = pair.split("+")
    return {"model": config, "input": lengths[0], "output": lengths[1], "scheme": scheme,
            "kv": cache, "batch": report["batch"], "tps": round(report["throughput_tps"], 1),
            "decode_ms": round(report["decode_ms_median"], 2),
            "prefill_ms": round(report["prefill_ms_median"])}


def key(row, batch):
    return (row["model"], row["input"], row["output"], row["scheme"], row["kv"],
            row["batch"] if batch else None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("nibble")
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--gpu-memory", default="80GB")
    parser.add_argument("--batch", default="")
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    batches = [int(n) for n in options.batch.split(",") if n]
    kind = "offline_batches" if batches else "offline"
    for case in options.cases:
        config, given, taken, pairs = case.split(":")
        for batch in batches or [None]:
            sizes = ["--gpu-memory", options.gpu_memory, "--fit-batch",
                     "--max-batch", batch or MOST]
            first = None
            for pair in pairs.split(","):
                row = measured(options.nibble, config, (int(given), int(taken)), pair, sizes)
                first = first or row["tps"]
                row["over_first"] = round(row["tps"] / first, 3)
                row["date"] = datetime.date.today().isoformat()
                print(json.dumps(row), flush=True)
                whole = json.loads(options.results.read_text()) if options.results.exists() else {}
                kept = [old for old in whole.get(kind, [])
                        if key(old, batches) != key(row, batches)]
                whole[kind] = [*kept, row]
                options.results.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
