#!/usr/bin/env python3
"""Where a decode step's time on a GPU goes.

Usage: step_profile.py --nibble FILE --trace LIBRARY MODEL [--batch 1 64] [--context 1008]
                       [--kv bf16] [--json OUT] [-- more flags of bench offline]

Runs `nibble bench offline` as it is and under kernel_trace.cc (built as its head says), and shares
out the time between the starts of two recorded steps among what ran: a kernel or copy gets the time
from the end of what ended before it to its own end, less the time in which nothing ran. Kernels
overlap their predecessors (programmatic dependent launch), so this is what each adds to the step.
Times are medians over steps; tracing slows kernels a little, so the untraced step stands beside it.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile

KINDS = [("norm_kernel", "norm + quantize"), ("activation_", "activation + quantize"),
         ("append_kernel", "rope + append"), ("plan_kernel", "attention plan"),
         ("decode_kernel", "attention"), ("decode_short", "attention"), ("round_bf16", "round logits"),
         ("quantize_kernel", "quantize"), ("gather_kernel", "embedding"), ("feed_back", "feedback"),
         ("argmax_kernel", "sampling"), ("weigh_kernel", "sampling"), ("draw_kernel", "sampling"),
         ("edit_kernel", "sampling")]
Record = collections.namedtuple("Record", "what begin end launch blocks bytes name")


def read(path):
    with open(path) as file:
        rows = [line.rstrip("\n").split(" ", 6) for line in file]
    records = [Record(r[0], int(r[1]), int(r[2]), int(r[3]), int(r[4]), int(r[5]), r[6])
               for r in rows]
    return sorted(records, key=lambda r: r.end)


def kind_of(record):
    if record.what == "copy":
        return "copy " + record.name
    return next((kind for word, kind in KINDS if word in record.name), "product")


def name_products(kinds):
    """Tells the products apart by what stands around them, and by their order where nothing does."""
    named = list(kinds)
    starts = [i for i, kind in enumerate(kinds)
              if kind == "product" and (i == 0 or kinds[i - 1] != "product")]
    for start in starts:
        end = next((i for i in range(start, len(kinds)) if kinds[i] != "product"), len(kinds))
        before = kinds[start - 1] if start > 0 else ""
        after = kinds[end] if end < len(kinds) else ""
        names = ([] if before != "silu + quantize" else ["down"]) + (
            [] if before not in ("attention", "quantize") else ["o"])
        last = ("qkv" if after in ("rope + append", "attention") else
                "gate_up" if after == "silu + quantize" else "head")
        names += [last] * (end - start - len(names))
        for i, name in zip(range(start, end), names):
            named[i] = "product " + name
    return named


def steps_of(records):
    """Lists of records, each from one recorded step's first kernel to the next one's."""
    counts = collections.Counter(r.launch for r in records if r.what == "kernel")
    most = max(counts.values())
    starts = [i for i, r in enumerate(records)
              if counts[r.launch] == most and (i == 0 or records[i - 1].launch != r.launch)]
    return [records[a - 1:b] for a, b in zip(starts, starts[1:]) if a > 0]


def share_out(step):
    """Microseconds and number of each kind in a step; step[0] ended before it."""
    out = collections.defaultdict(lambda: [0.0, 0])
    kinds = name_products([kind_of(r) for r in step])
    graph = step[1].launch
    for before, record, kind in zip(step, step[1:], kinds[1:]):
        idle = max(0, record.begin - before.end)
        out[kind][0] += (record.end - before.end - idle) / 1e3
        out[kind][1] += 1
        inside = record.launch == graph and before.launch == graph
        out["nothing, in the step" if inside else "nothing, between steps"][0] += idle / 1e3
    return out


def profile(args, batch):
    command = [os.path.abspath(args.nibble), "--log-level", "warning", "bench", "offline",
               os.path.abspath(args.model), "--device", "cuda", "--batch", str(batch), "--context",
               str(args.context), "--input-len", "16", "--output-len", "32", "--repeats", "2",
               "--max-num-batched-tokens", "8192", "--kv-cache-dtype", args.kv, "--json",
               *args.more]
    plain = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, CUDA_INJECTION64_PATH=os.path.abspath(args.trace))
        traced = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=folder,
                                           env=environment).stdout)
        trace = read(os.path.join(folder, "kernel_trace.txt"))
        steps = [share_out(step) for step in steps_of(trace)]
    # Rounds begin with prefills: those steps hold more than a recorded step and its sampling.
    size = statistics.mode(sum(n for _, n in step.values()) for step in steps)
    steps = [step for step in steps if sum(n for _, n in step.values()) == size]
    kinds = sorted({kind for step in steps for kind in step})
    rows = [{"kind": kind, "launches": steps[-1][kind][1],
             "us": statistics.median(step[kind][0] for step in steps)} for kind in kinds]
    return {"batch": batch, "context": args.context, "kv": args.kv, "scheme": plain["scheme"],
            "step_ms": plain["decode_ms_median"], "traced_step_ms": traced["decode_ms_median"],
            "steps": len(steps), "kinds": sorted(rows, key=lambda row: -row["us"])}


def show(result):
    total = sum(row["us"] for row in result["kinds"])
    print(f"{result['scheme']}, batch {result['batch']} after {result['context']}, "
          f"KV {result['kv']}: {result['step_ms']:.3f} ms a step; traced "
          f"{result['traced_step_ms']:.3f}, of which the kinds are {total / 1e3:.3f}")
    for row in result["kinds"]:
        print(f"  {row['kind']:24s} {row['launches']:4d} {row['us']:9.1f} us "
              f"{100 * row['us'] / total:5.1f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--nibble", required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1008)
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--json")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    args.more = sys.argv[split + 1:]
    results = [profile(args, batch) for batch in args.batch]
    for result in results:
        show(result)
    if args.json:
        with open(args.json, "a") as file:
            for result in results:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
