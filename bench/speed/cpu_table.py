#!/usr/bin/env python3
"""Speed of one model in several schemes on the CPU, beside the machine's ceilings, as a Markdown table.

    bench/speed/cpu_table.py FOLDER bench/results/NAME.md

Writes a random Llama of 1.1 B parameters and its quantized forms to FOLDER (6 GB) unless they are
there, then runs `nibble bench kernels` and `nibble bench offline` on an otherwise idle machine.
Every share compares figures taken directly after each other: products and prefills with the
ceilings before and after each timing, a long context with an empty one run just before.
--parts kernels,decode,prefill,context runs some of it.
"""
import argparse
import json
import pathlib
import platform
import statistics
import subprocess

SCHEMES = ["bf16", "w8a8_int8", "w4a8", "w4a16_g32"]
PARAMETERS = 1.1e9


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, text=True,
                          stdout=subprocess.PIPE).stdout


class Bench:
    def __init__(self, args):
        self.nibble = args.nibble
        self.folder = pathlib.Path(args.folder)
        self.repeats = args.repeats
        self.rounds = args.rounds
        self.rows = []
        self.ceilings = {}

    def models(self):
        base = self.folder / "bf16"
        if not base.exists():
            run(self.nibble, "make-dummy", "--config", "bench/configs/llama_1b.json", "--out", base)
        for scheme in SCHEMES[1:]:
            if not (self.folder / scheme).exists():
                run(self.nibble, "quantize", base, self.folder / scheme, "--scheme", scheme,
                    "--scale-rule", "absmax")

    def offline(self, scheme, *flags):
        return json.loads(run(self.nibble, "bench", "offline", self.folder / scheme,
                              "--repeats", self.repeats, "--json", *flags))

    def row(self, what, value, share):
        self.rows.append((what, value, share))
        print(f"| {what} | {value} | {share} |", flush=True)

    def kernels(self):
        for scheme in SCHEMES:
            outs = [json.loads(run(self.nibble, "bench", "kernels", "--scheme", scheme, "--m",
                                   "1,16,512", "--n", "2048,5632", "--k", "2048,2048", "--json"))
                    for _ in range(self.rounds)]
            for out in outs:
                self.ceilings = {key: max(value or 0, self.ceilings.get(key, 0))
                                 for key, value in out["ceilings"].items()}
            for kernels in zip(*(out["kernels"] for out in outs)):
                shares = sorted(kernel["roofline_percent"] for kernel in kernels)
                kernel = sorted(kernels, key=lambda k: k["us"])[self.rounds // 2]
                spread = f" ({shares[0]:.0f} to {shares[-1]:.0f})" if self.rounds > 1 else ""
                self.row(f"product {scheme}, m {kernel['m']}, n {kernel['n']}, k {kernel['k']}",
                         f"{kernel['us']:.0f} us, {kernel['gbps']:.1f} GB/s, "
                         f"{kernel['tops']:.2f} TOPS",
                         f"{statistics.median(shares):.0f} %{spread} of its roofline")

    def decode(self):
        for scheme in SCHEMES:
            out = self.alone(scheme)
            self.row(f"decode {scheme}, no context", f"{out['decode_tps']:.1f} tokens/s",
                     f"{out['roofline_percent']:.0f} % of {out['read_gbps']:.1f} GB/s")
        alone = self.alone("w4a8")["decode_tps"]
        out = self.offline("w4a8", "--input-len", 16, "--output-len", 32, "--batch", 16)
        self.row("decode w4a8, 16 sequences", f"{out['decode_tps']:.0f} tokens/s",
                 f"{out['decode_tps'] / alone:.1f} x one sequence")

    def alone(self, scheme, *flags):
        return self.offline(scheme, "--input-len", 16, "--output-len", 64, *flags)

    def prefill(self):
        runs = [(scheme, "AMX", ()) for scheme in SCHEMES]
        runs.append(("w4a8", "VNNI", ("--isa", "avx512")))
        for scheme, name, flags in runs:
            out = self.offline(scheme, "--input-len", 512, "--output-len", 1, *flags)
            peaks = out["peak_tops"]
            shares = [100 * 2e-12 * PARAMETERS * 512 / (ms * 1e-3) / peak
                      for ms, peak in zip(out["prefill_ms"], peaks)]
            self.row(" ".join(["prefill 512,", scheme, *flags]), f"{out['prefill_tps']:.0f} tokens/s",
                     f"{statistics.median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f}) "
                     f"of {name}, {statistics.median(peaks):.1f} TOPS")

    def context(self):
        for scheme, kv in (("w4a8", "int8"), ("w4a8", "int4"), ("w4a16_g32", "int4")):
            cache = ("--kv-cache-dtype", kv)
            alone = self.alone(scheme, *cache)["decode_tps"]
            fresh = self.offline(scheme, "--input-len", 512, "--output-len", 1, *cache)["prefill_tps"]
            out = self.offline(scheme, "--context", 4096, "--input-len", 512, "--output-len", 24,
                               *cache)
            for what, tps, base in (("prefill 512 at 4096,", out["prefill_tps"], fresh),
                                    ("decode at 4608,", out["decode_tps"], alone)):
                self.row(f"{what} {scheme}, {kv} KV", f"{tps:.1f} tokens/s",
                         f"{100 * tps / base:.0f} % of no context")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--repeats", type=int, default=5, help="of a run of a model")
    parser.add_argument("--rounds", type=int, default=1,
                        help="of the products: medians and ranges of their shares")
    parser.add_argument("--commit", help="where git does not say it")
    parser.add_argument("--parts", default="kernels,decode,prefill,context")
    args = parser.parse_args()
    bench = Bench(args)
    bench.models()
    for part in args.parts.split(","):
        getattr(bench, part)()
    commit = args.commit or run("git", "rev-parse", "--short", "HEAD").strip()
    ceilings = ", ".join(f"{name} {value:.1f}" for name, value in bench.ceilings.items())
    lines = ["# CPU speed", "", f"Commit {commit}, {platform.machine()}, command "
             f"`bench/speed/cpu_table.py FOLDER OUT --repeats {args.repeats} --rounds {args.rounds}`. "
             f"Best of the ceilings measured in the runs: {ceilings}.", "", "| What | Measured | Share |",
             "| --- | --- | --- |", *(f"| {a} | {b} | {c} |" for a, b, c in bench.rows), ""]
    pathlib.Path(args.out).write_text("\n".join(lines))


main()
