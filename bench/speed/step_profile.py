#!/usr/bin/env python3
"""Where a decode step's time on a GPU goes.

Usage: step_profile.py --nibble FILE [--trace LIBRARY] MODEL [--batch 1 64] [--context 1008]
                       [--kv bf16] [--json OUT] [-- more flags of bench offline]

Runs `nibble bench offline` as it is and, with --trace, under kernel_trace.cc (built as its head
says), and shares out the time between the starts of two recorded steps among what ran: a kernel or
copy gets the time from the end of what ended before it to its own end, less the time in which
nothing ran. Kernels overlap their predecessors (programmatic dependent launch), so this is what
each adds to the step. Times are medians over steps; tracing slows kernels a little, so the untraced
step stands beside it.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile

ATTENTION, QUERIES, ACTIVATION = "attention", "rotate queries", "activation + quantize"
COMBINED, PARTS = "combine experts", "parts of a product"
# Words of names, in the order in which they are looked for.
KINDS = [("norm_kernel", "norm + quantize"), ("activation_", ACTIVATION),
         ("append_kernel", "rope + append"), ("queries_kernel", QUERIES),
         ("plan_kernel", "attention plan"), ("lengths_kernel", "attention plan"),
         ("decode_kernel", ATTENTION), ("decode_short", ATTENTION), ("latent_sm90", ATTENTION),
         ("merge_latent", ATTENTION), ("warp_latent", ATTENTION), ("plain_kernel", ATTENTION),
         ("expanded_sm90", ATTENTION), ("gemm_experts_", "experts"), ("gemm_grouped_", "experts"),
         ("grouped_kernel", "experts"), ("scatter_kernel", "rows to experts"),
         ("combine_kernel", COMBINED), ("route_", "routing"), ("logits_kernel", "routing"),
         ("sort_kernel", "routing"), ("round_bf16", "round logits"),
         ("quantize_kernel", "quantize"), ("EmbeddingArgs", "embedding"),
         ("gather_kernel", "gather latents"), ("feed_back", "feedback"),
         ("argmax_kernel", "sampling"), ("weigh_kernel", "sampling"), ("draw_kernel", "sampling"),
         ("edit_kernel", "sampling"), ("splitKreduce", PARTS)]
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


def is_product(kind):
    return kind in ("product", PARTS)


def names_of_run(before, after, latent):
    """Of products that follow each other, by what stands around them."""
    names = []
    if before == ACTIVATION:
        names.append("down")
    if before == ATTENTION:
        names += ["values", "o"] if latent else ["o"]
    if after == "rope + append":
        names.append("q_a + kv_a" if latent else "qkv")
    elif after == QUERIES:
        names += ["q_b", "keys"]
    elif after == ATTENTION:
        names.append("qkv")  # that is rotated there
    elif after == ACTIVATION:
        names.append("gate_up")
    elif not names:
        names.append("head")
    return names


def name_branches(kinds, named):
    """Products between a norm and the sum of the experts that tokens choose: of the expert that
    every token takes, beside the others or in front of them."""
    for end, kind in enumerate(kinds):
        if kind != COMBINED:
            continue
        begin = next((j for j in range(end, 0, -1) if kinds[j] == "norm + quantize"), 0)
        name = "gate_up"
        for j in range(begin, end):
            if is_product(kinds[j]):
                down = kinds[j] == "product" and "product" in kinds[begin:j]
                name = "down" if down else name
                named[j] = f"product shared {name}"


def name_products(kinds):
    """Tells the products apart by what stands around them, and by their order where nothing does.
    What adds the parts of one has its name; those of an expert that every token takes, or that
    tokens choose, are told from a dense layer's."""
    named = list(kinds)
    shared = False  # behind the experts that tokens choose
    for i, kind in enumerate(kinds):
        shared = kind == COMBINED or (shared and kind != "norm + quantize")
        if kind == ACTIVATION and "experts" in kinds[max(0, i - 1):i]:
            named[i] = "activation of experts"
        if not is_product(kind) or (i > 0 and is_product(kinds[i - 1])):
            continue
        end = next((j for j in range(i, len(kinds)) if not is_product(kinds[j])), len(kinds))
        before = next((k for k in reversed(kinds[:i]) if k != "quantize"), "")
        names = names_of_run(before, kinds[end] if end < len(kinds) else "", QUERIES in kinds)
        names = names[-max(1, kinds[i:end].count("product")):]
        number = -1
        for j in range(i, end):
            number += kinds[j] == "product" or j == i
            name = names[min(number, len(names) - 1)]
            named[j] = f"product {'shared ' if shared else ''}{name}"
    name_branches(kinds, named)
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


def offline(args, batches, **environment):
    """Shapes that `nibble bench offline` measured in one process."""
    command = [os.path.abspath(args.nibble), "--log-level", "warning", "bench", "offline",
               os.path.abspath(args.model), "--device", "cuda", "--batch",
               ",".join(map(str, batches)), "--context", str(args.context), "--input-len", "16",
               "--output-len", "32", "--repeats", "2", "--max-num-batched-tokens", "8192",
               "--kv-cache-dtype", args.kv, "--json", *args.more]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(command, capture_output=True, text=True, cwd=folder,
                                env=dict(os.environ, **environment))
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit code {result.returncode}: "
                               f"{result.stderr.strip()[-500:]}")
        measured = json.loads(result.stdout)
        trace = os.path.join(folder, "kernel_trace.txt")
        records = read(trace) if os.path.exists(trace) else []
        if environment and not records:
            raise RuntimeError(f"{args.trace} recorded nothing: {result.stderr.strip()[-500:]}")
    return measured.get("shapes", [measured]), records


def trace_step(args, batch):
    """What is in a step, from a run under the library that records it."""
    (shape,), records = offline(args, [batch], CUDA_INJECTION64_PATH=os.path.abspath(args.trace))
    steps = [share_out(step) for step in steps_of(records)]
    # Rounds begin with prefills: those steps hold more than a recorded step and its sampling.
    size = statistics.mode(sum(n for _, n in step.values()) for step in steps)
    steps = [step for step in steps if sum(n for _, n in step.values()) == size]
    kinds = sorted({kind for step in steps for kind in step})
    rows = [{"kind": kind, "launches": steps[-1][kind][1],
             "us": statistics.median(step[kind][0] for step in steps)} for kind in kinds]
    return {"traced_step_ms": shape["decode_ms_median"], "steps": len(steps),
            "kinds": sorted(rows, key=lambda row: -row["us"])}


def profiles(args):
    """A row for each batch; without a trace where it fails, with the reason."""
    shapes, _ = offline(args, args.batch)
    for shape in shapes:
        row = {"batch": shape["batch"], "context": args.context, "kv": args.kv,
               "scheme": shape["scheme"], "flags": args.more, "step_ms": shape["decode_ms_median"]}
        row.update({key: shape[key] for key in ("weight_bytes", "kv_bytes", "read_gbps", "load_ms",
                                                "active_experts_mean", "expert_slots_mean")
                    if key in shape})
        if args.trace:
            try:
                row.update(trace_step(args, shape["batch"]))
            except (RuntimeError, statistics.StatisticsError, ValueError) as error:
                row["no_trace"] = str(error)
        yield row


def show(result):
    print(f"{result['scheme']}, batch {result['batch']} after {result['context']}, "
          f"KV {result['kv']}: {result['step_ms']:.3f} ms a step; ", end="")
    if "kinds" not in result:
        print(result.get("no_trace", "not traced"), flush=True)
        return
    total = sum(row["us"] for row in result["kinds"])
    print(f"traced {result['traced_step_ms']:.3f}, of which the kinds are {total / 1e3:.3f}")
    for row in result["kinds"]:
        print(f"  {row['kind']:24s} {row['launches']:4d} {row['us']:9.1f} us "
              f"{100 * row['us'] / total:5.1f} %", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--nibble", required=True)
    parser.add_argument("--trace", help="without it, steps are timed and not shared out")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1008)
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--json")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    args.more = sys.argv[split + 1:]
    try:
        for result in profiles(args):
            show(result)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps(result) + "\n")
    except RuntimeError as error:
        sys.exit(f"step_profile.py: {error}")


if __name__ == "__main__":
    main()
