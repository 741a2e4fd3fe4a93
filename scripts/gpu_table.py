"""Gathers what scripts/gpu-check.sh measured: h200-kernels.json, h200-models.json and one table.

Usage: gpu_table.py FOLDER       NIBBLE_COMMIT names the commit where there is no git
"""

import datetime
import json
import os
import pathlib
import subprocess
import sys


def commit():
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return os.environ.get("NIBBLE_COMMIT") or found.stdout.strip() or "unknown"


def meta():
    name = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True).stdout.strip()
    return {"command": "scripts/gpu-check.sh", "commit": commit(), "device": name,
            "date": datetime.date.today().isoformat()}


def attention_rows(text):
    """Rows of attention_bench's two tables as objects keyed by the table's own head."""
    rows, part, head = [], "", []
    for line in text.splitlines():
        words = line.split()
        if line.startswith(("prefill", "decode")):
            part = line
        elif words and words[0] == "kv":
            head = words
        elif len(words) > 3 and words[0] in ("bf16", "shared", "fp8", "int8", "int4"):
            rows.append({"part": part.split(",")[0], "line": line.strip(), "kv": words[0],
                         "batch": int(words[1])})
    return rows


def print_ratios(rows):
    counts = sorted({row["m"] for row in rows})
    print(f"{'n x k':>14} {'scheme':12}" + "".join(f"{m:>8}" for m in counts))
    table = {}
    for row in rows:
        table.setdefault((row["n"], row["k"], row["scheme"]), {})[row["m"]] = row
    for (n, k, scheme), cells in table.items():
        print(f"{n:>7}x{k:<6} {scheme:12}" + "".join(
            f"{cells[m]['vs_bf16']:8.2f}" if m in cells else " " * 8 for m in counts))
    print()


def kernels(folder):
    if not (folder / "kernels-rest-3.json").exists():
        return
    rested, busy = (json.loads((folder / f"kernels-rest-{rest}.json").read_text())
                    for rest in (3, 0))
    attention = (folder / "attention.txt").read_text()
    out = {**meta(), "ceilings": rested["ceilings"], "kernels": rested["kernels"],
           "kernels_without_rest": busy["kernels"], "attention": attention_rows(attention)}
    (folder / "h200-kernels.json").write_text(json.dumps(out, indent=1) + "\n")
    print(f"\nread ceiling {out['ceilings']['read_tbps']:.2f} TB/s; time of BF16 / time of ours")
    print_ratios(out["kernels"])
    print("the same without idle time between replays, under the power limit")
    print_ratios(out["kernels_without_rest"])
    print(attention)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def models(folder):
    rows = lines(folder / "models.jsonl")
    if not rows:
        return
    start_path = folder / "start.json"
    start = json.loads(start_path.read_text()) if start_path.exists() else {}
    capacity = lines(folder / "capacity.jsonl")
    (folder / "h200-models.json").write_text(
        json.dumps({**meta(), **start, "models": rows, "capacity": capacity}, indent=1) + "\n")
    print(f"{'scheme':12} {'kv':5} {'batch':>5} {'context':>7} {'input':>6} {'prefill tok/s':>13} "
          f"{'decode ms':>9} {'tok/s':>8} {'% of read':>9}")
    for row in rows:
        print(f"{row['scheme']:12} {row['kv_cache_dtype']:5} {row['batch']:5} {row['context']:7} "
              f"{row['input_len']:6} {row['prefill_tps']:13.0f} {row['decode_ms_median']:9.3f} "
              f"{row['decode_tps']:8.0f} {row['roofline_percent']:9.1f}")
    for row in capacity:
        print(f"capacity beside {row['scheme']}, {row['kv_cache_dtype']:5}: {row['tokens']:9} tokens, "
              f"{row['sequences_of_longest']} x {row['longest_context']} or {row['sequences']} x "
              f"{row['context_of_each']}; {row['measured_other_bytes'] / 1e9:.2f} GB beside the "
              f"cache, planned {planned(row) / 1e9:.2f}; {row['free_bytes_after'] / 1e9:.2f} left")
    if start:
        print(f"process start to end of a one-token answer, w4a16_g128: {start['start_to_end_s']} s")


def planned(row):
    return sum(row[f"planned_{part}_bytes"] for part in ("weight", "scratch", "reserve"))


def main():
    folder = pathlib.Path(sys.argv[1])
    kernels(folder)
    models(folder)


if __name__ == "__main__":
    main()
