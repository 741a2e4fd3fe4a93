#!/usr/bin/env python3
"""Perplexity of every scheme and KV cache type of one model, as JSON lines and a Markdown table.

    bench/quality/perplexity.py models/storyteller TEXT bench/results/NAME.jsonl

Each row quantizes the model afresh (`nibble quantize`), measures (`nibble eval ppl`), and appends
one object to the last argument. Rows that this file already has are kept, so an interrupted run continues.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

SCHEMES = ["bf16", "w8a16_channel", "w8a8_int8", "w8a8_fp8", "w8a8_fp8_block", "mxfp4", "w4a16_g32_asym",
           "w4a16_g32", "w4a16_g128", "w4a16_channel", "w4a8"]
KV_TYPES = ["bf16", "int8", "fp8", "int4"]


def run_json(command):
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def quantized(args, scheme, folder):
    """Path, bytes on disk of the weights, and SNR of the model in `scheme`."""
    path = args.model
    snr = None
    if scheme != "bf16":
        path = pathlib.Path(folder) / scheme
        report = run_json([args.nibble, "quantize", args.model, path, "--scheme", scheme, "--json"])
        snr = report["snr_db"]
    size = sum(file.stat().st_size for file in pathlib.Path(path).glob("*.safetensors"))
    return path, size, snr


def measure(args, scheme, kv_types, append):
    with tempfile.TemporaryDirectory() as folder:
        path, size, snr = quantized(args, scheme, folder)
        for kv in kv_types:
            result = run_json([args.nibble, "eval", "ppl", path, "--text", args.text, "--window",
                               str(args.window), "--kv-cache-dtype", kv, "--device", args.device,
                               "--json"])
            append({"scheme": scheme, "kv": kv, "bytes": size, "snr_db": snr,
                    "perplexity": result["perplexity"], "tokens": result["tokens"],
                    "window": result["window"]})


def print_table(rows):
    base = next(r["perplexity"] for r in rows if (r["scheme"], r["kv"]) == ("bf16", "bf16"))
    print("| Scheme | KV | Size, MB | Perplexity | Ratio to bf16 | Mean SNR, dB |")
    print("| --- | --- | --: | --: | --: | --: |")
    for row in rows:
        snr = f"{row['snr_db']['mean']:.1f}" if row["snr_db"] else ""
        print(f"| `{row['scheme']}` | `{row['kv']}` | {row['bytes'] / 1e6:.2f} | "
              f"{row['perplexity']:.3f} | {row['perplexity'] / base:.4f} | {snr} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--schemes", type=lambda names: names.split(","), default=SCHEMES)
    parser.add_argument("--kv-types", type=lambda names: names.split(","), default=KV_TYPES)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] \
        if args.out.exists() else []
    known = {(row["scheme"], row["kv"]) for row in rows}

    def append(row):
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    for scheme in args.schemes:
        missing = [kv for kv in args.kv_types if (scheme, kv) not in known]
        if missing:
            measure(args, scheme, missing, append)
    print_table(rows)


if __name__ == "__main__":
    main()
