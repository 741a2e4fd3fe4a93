#!/usr/bin/env python3
"""Speed of one model in several schemes on the CPU, beside the machine's ceilings, as a Markdown table.

    bench/speed/cpu_table.py FOLDER bench/results/NAME.md

Writes a random Llama of 1.1 B parameters and its quantized forms to FOLDER (6 GB) unless they are
there, then measures on an otherwise idle machine; `taskset -c 0,1` in front takes two of its cores.
Figures are medians. Shares and ratios are medians, too, with their quartiles, of comparisons of
neighbours in time: products, prefills and decode steps with the ceilings before and after them,
contexts, batches and busy neighbours with turns without them in the same process. --parts chooses:

    kernels  products of 1, 16 and 512 rows     context  4096 tokens in the cache, over none
    decode   one sequence                       batch    16 sequences, over one
    prefill  512 tokens                         start    from start to first token; memory while
                                                         serving; decoding beside a busy process
"""
import argparse
import json
import pathlib
import platform
import subprocess
import time

import cpu_process

SCHEMES = ["bf16", "w8a8_int8", "w4a8", "w4a16_g32"]
INT8_ACTIVATIONS = ["w8a8_int8", "w4a8"]
FOUR_BITS = ["w4a8", "w4a16_g32"]
PARAMETERS = 1.1e9
PARTS = ["kernels", "decode", "prefill", "context", "batch", "start"]


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, text=True,
                          stdout=subprocess.PIPE).stdout


def quartiles(values):
    """As `nibble bench` takes them."""
    values = sorted(values)
    return {key: values[len(values) * i // 4] for i, key in ((1, "p25"), (2, "median"), (3, "p75"))}


def percent(q, scale=100.0):
    return f"{scale * q['median']:.0f} % ({scale * q['p25']:.0f} to {scale * q['p75']:.0f})"


def times(q):
    return f"{q['median']:.2f} x ({q['p25']:.2f} to {q['p75']:.2f})"


def peak_name(backend, scheme):
    """What the ceiling of prefills counts: the instructions that the kernels use."""
    isa = backend.split("/")[-1]
    if isa == "amx":
        return "AMX"
    return "VNNI" if scheme in INT8_ACTIVATIONS and isa in ("avx512", "avx2_vnni") else "f32"


class Bench:
    def __init__(self, args):
        self.nibble = args.nibble
        self.folder = pathlib.Path(args.folder)
        self.repeats = args.repeats
        self.flags = ["--isa", args.isa] if args.isa else []
        self.rows = []
        self.facts = {}  # of the machine

    def models(self):
        base = self.folder / "bf16"
        if not base.exists():
            run(self.nibble, "make-dummy", "--config", "bench/configs/llama_1b.json", "--out", base)
        for scheme in SCHEMES[1:]:
            if not (self.folder / scheme).exists():
                run(self.nibble, "quantize", base, self.folder / scheme, "--scheme", scheme,
                    "--scale-rule", "absmax")

    def offline(self, scheme, *flags, repeats=None):
        out = json.loads(run(self.nibble, "bench", "offline", self.folder / scheme, "--repeats",
                             repeats or self.repeats, "--json", *flags,
                             *([] if "--isa" in flags else self.flags)))
        self.facts.setdefault("backend", out.get("shapes", [out])[0]["backend"])
        return out

    def row(self, what, value, share):
        self.rows.append((what, value, share))
        print(f"| {what} | {value} | {share} |", flush=True)

    def kernels(self):
        for scheme in SCHEMES:
            out = json.loads(run(self.nibble, "bench", "kernels", "--scheme", scheme, "--m",
                                 "1,16,512", "--n", "2048,5632", "--k", "2048,2048", "--json",
                                 *self.flags))
            for name, value in out["ceilings"].items():
                self.facts[name] = max(value or 0, self.facts.get(name, 0))
            for kernel in out["kernels"]:
                share = {key: kernel[f"roofline_percent{end}"]
                         for key, end in (("median", ""), ("p25", "_p25"), ("p75", "_p75"))}
                alone = kernel["us"] / (kernel["us"] - kernel["input_us"])
                self.row(f"product {scheme}, m {kernel['m']}, n {kernel['n']}, k {kernel['k']}",
                         f"{kernel['us']:.0f} us ({kernel['input_us']:.0f} of them rounding), "
                         f"{kernel['gbps']:.1f} GB/s, {kernel['tops']:.2f} TOPS",
                         f"{percent(share, 1)} of its roofline, "
                         f"{alone * share['median']:.0f} % without the rounding")

    def decode(self):
        for scheme in SCHEMES:
            out = self.offline(scheme, "--input-len", 16, "--output-len", 32)
            share = {"median": out["roofline_percent"], "p25": out["roofline_percent_p25"],
                     "p75": out["roofline_percent_p75"]}
            self.row(f"decode {scheme}, no context", f"{out['decode_tps']:.1f} tokens/s",
                     f"{percent(share, 1)} of {out['read_gbps']:.1f} GB/s")

    def prefill(self):
        for scheme in SCHEMES:
            out = self.prefill_once(scheme)
            if scheme == "w4a8" and out["backend"] == "cpu/amx":
                self.prefill_once(scheme, "--isa", "avx512")

    def prefill_once(self, scheme, *flags):
        out = self.offline(scheme, "--input-len", 512, "--output-len", 1, *flags)
        shares = [2e-12 * PARAMETERS * 512 / (ms * 1e-3) / peak
                  for ms, peak in zip(out["prefill_ms"], out["peak_tops"])]
        share = (f"{percent(quartiles(shares))} of {peak_name(out['backend'], scheme)}, "
                 f"{quartiles(out['peak_tops'])['median']:.2f} TOPS" if shares else "no ceiling")
        self.row(" ".join(["prefill 512,", scheme, *flags]), f"{out['prefill_tps']:.0f} tokens/s",
                 share)
        return out

    def context(self):
        rounds = self.repeats // 2 + 1  # at least as many pairs of neighbours as repeats
        for scheme, kv in (("w4a8", "int8"), ("w4a8", "int4"), ("w4a16_g32", "int4")):
            _, out = self.offline(scheme, "--context", "0,4096", "--input-len", 512,
                                  "--output-len", 16, "--kv-cache-dtype", kv,
                                  repeats=rounds)["shapes"]
            for what in ("prefill", "decode"):
                self.row(f"{what} {'512 at 4096' if what == 'prefill' else 'at 4608'}, {scheme}, "
                         f"{kv} KV", f"{out[what + '_tps']:.1f} tokens/s",
                         f"{percent(out[what + '_over_first'])} of no context before")

    def batch(self):
        _, out = self.offline("w4a8", "--batch", "1,16", "--input-len", 16,
                              "--output-len", 32)["shapes"]
        self.row("decode w4a8, 16 sequences", f"{out['decode_tps']:.0f} tokens/s",
                 f"{times(out['decode_over_first'])} one sequence")

    def start(self):
        for scheme in FOUR_BITS:
            model, seconds = self.folder / scheme, {"cold": [], "warm": []}
            for _ in range(self.repeats):  # in turns: a cold start leaves a warm cache
                dropped = cpu_process.drop_from_cache(model)
                seconds["cold"].append(cpu_process.first_token(self.nibble, model, *self.flags))
                seconds["warm"].append(cpu_process.first_token(self.nibble, model, *self.flags))
            for name in ["warm", "cold"] if dropped else ["warm"]:
                q = quartiles(seconds[name])
                self.row(f"start to first token, {scheme}, {name}", f"{q['median']:.2f} s "
                         f"({q['p25']:.2f} to {q['p75']:.2f})",
                         f"{cpu_process.file_bytes(model) / q['median'] * 1e-9:.1f} GB/s of the file")
        for scheme in FOUR_BITS:
            model = self.folder / scheme
            with cpu_process.Server(self.nibble, model, *self.flags) as server:
                server.answer(200)
                most, now = server.memory()
                size = cpu_process.file_bytes(model)
                self.row(f"serving {scheme}, resident after 200 tokens",
                         f"{now * 1e-6:.0f} MB, at most {most * 1e-6:.0f} MB",
                         f"{now / size:.2f} and {most / size:.2f} x the file")
                if scheme == "w4a8":
                    tps, ratios = cpu_process.beside_a_busy_process(server, self.repeats)
                    self.row(f"decode {scheme} beside a busy process",
                             f"{tps:.1f} tokens/s alone",
                             f"{percent(quartiles(ratios))} of alone")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--isa", help="instruction set of everything, as in `nibble bench`")
    parser.add_argument("--repeats", type=int, default=5, help="of every turn of a model")
    parser.add_argument("--commit", help="where git does not say it")
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: there are {','.join(PARTS)}")
    bench = Bench(args)
    bench.models()
    for part in parts:
        begin = time.monotonic()
        getattr(bench, part)()
        print(f"{part}: {time.monotonic() - begin:.0f} s", flush=True)
    commit = args.commit or run("git", "rev-parse", "--short", "HEAD").strip()
    facts = ", ".join(f"{name} {value if isinstance(value, str) else round(value, 2)}"
                      for name, value in bench.facts.items() if value)
    isa = f" --isa {args.isa}" if args.isa else ""
    lines = ["# CPU speed", "", f"Commit {commit}, {platform.machine()}, command "
             f"`bench/speed/cpu_table.py FOLDER OUT --repeats {args.repeats}{isa} --parts "
             f"{args.parts}`. Medians, of shares and ratios with quartiles. {facts} (ceilings: the "
             "best in the runs).", "", "| What | Measured | Share |", "| --- | --- | --- |",
             *(f"| {a} | {b} | {c} |" for a, b, c in bench.rows), ""]
    pathlib.Path(args.out).write_text("\n".join(lines))


main()
