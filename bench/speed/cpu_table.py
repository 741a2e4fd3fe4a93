#!/usr/bin/env python3
"""Speed of one model in several schemes on the CPU, beside the machine's ceilings, as a Markdown table.

    bench/speed/cpu_table.py FOLDER bench/results/NAME.md

Writes a random Llama of 1.1 B parameters and its quantized forms to FOLDER (6 GB) unless they are
there, then runs `nibble bench kernels` and `nibble bench offline` on an otherwise idle machine.
"""
import argparse
import json
import pathlib
import platform
import subprocess

SCHEMES = ["bf16", "w8a8_int8", "w4a8", "w4a16_g32"]
INTEGER = {"w8a8_int8", "w4a8"}
PARAMETERS = 1.1e9


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, text=True,
                          stdout=subprocess.PIPE).stdout


class Bench:
    def __init__(self, args):
        self.nibble = args.nibble
        self.folder = pathlib.Path(args.folder)
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
                              "--repeats", 5, "--json", *flags))

    def row(self, what, value, share):
        self.rows.append((what, value, share))
        print(f"| {what} | {value} | {share} |", flush=True)

    def peak(self, scheme):
        return self.ceilings["amx_int8_tops" if scheme in INTEGER else "amx_bf16_tops"]

    def kernels(self):
        for scheme in SCHEMES:
            for n, k in ((2048, 2048), (5632, 2048)):
                out = json.loads(run(self.nibble, "bench", "kernels", "--scheme", scheme, "--m",
                                     "1,16,512", "--n", n, "--k", k, "--json"))
                self.ceilings = {key: max(value or 0, self.ceilings.get(key, 0))
                                 for key, value in out["ceilings"].items()}
                for kernel in out["kernels"]:
                    share = kernel["roofline_percent"]
                    self.row(f"product {scheme}, m {kernel['m']}, n {n}, k {k}",
                             f"{kernel['us']:.0f} us, {kernel['gbps']:.1f} GB/s, "
                             f"{kernel['tops']:.2f} TOPS", f"{share:.0f} % of its roofline")

    def decode(self):
        alone = {}
        for scheme in SCHEMES:
            out = self.offline(scheme, "--input-len", 16, "--output-len", 64)
            alone[scheme] = out["decode_tps"]
            self.row(f"decode {scheme}, no context", f"{out['decode_tps']:.1f} tokens/s",
                     f"{out['roofline_percent']:.0f} % of {out['read_gbps']:.1f} GB/s")
        out = self.offline("w4a8", "--input-len", 16, "--output-len", 32, "--batch", 16)
        self.row("decode w4a8, 16 sequences", f"{out['decode_tps']:.0f} tokens/s",
                 f"{out['decode_tps'] / alone['w4a8']:.1f} x one sequence")
        return alone

    def prefill(self):
        fresh = {}
        for scheme in SCHEMES:
            out = self.offline(scheme, "--input-len", 512, "--output-len", 8)
            fresh[scheme] = out["prefill_tps"]
            tops = 2e-12 * PARAMETERS * out["prefill_tps"]
            self.row(f"prefill 512, {scheme}", f"{out['prefill_tps']:.0f} tokens/s",
                     f"{100 * tops / self.peak(scheme):.0f} % of AMX")
        out = self.offline("w4a8", "--input-len", 512, "--output-len", 8, "--isa", "avx512")
        tops = 2e-12 * PARAMETERS * out["prefill_tps"]
        self.row("prefill 512, w4a8, --isa avx512", f"{out['prefill_tps']:.0f} tokens/s",
                 f"{100 * tops / self.ceilings['vnni_int8_tops']:.0f} % of VNNI")
        return fresh

    def context(self, alone, fresh):
        for scheme, kv in (("w4a8", "int8"), ("w4a8", "int4"), ("w4a16_g32", "int4")):
            out = self.offline(scheme, "--input-len", 512, "--output-len", 24, "--context", 3584,
                               "--kv-cache-dtype", kv)
            self.row(f"decode {scheme} at 4096, {kv} KV", f"{out['decode_tps']:.1f} tokens/s",
                     f"{100 * out['decode_tps'] / alone[scheme]:.0f} % of no context")
            out = self.offline(scheme, "--input-len", 512, "--output-len", 8, "--context", 4096,
                               "--kv-cache-dtype", kv)
            self.row(f"prefill 512 at 4096, {scheme}, {kv} KV", f"{out['prefill_tps']:.0f} tokens/s",
                     f"{100 * out['prefill_tps'] / fresh[scheme]:.0f} % of no context")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    args = parser.parse_args()
    bench = Bench(args)
    bench.models()
    bench.kernels()
    alone = bench.decode()
    bench.context(alone, bench.prefill())
    commit = run("git", "rev-parse", "--short", "HEAD").strip()
    ceilings = ", ".join(f"{name} {value:.1f}" for name, value in bench.ceilings.items())
    lines = ["# CPU speed", "", f"Commit {commit}, {platform.machine()}, command "
             "`bench/speed/cpu_table.py FOLDER OUT`; medians of at least 5. Best of the ceilings "
             f"measured in the runs: {ceilings}.", "", "| What | Measured | Share |",
             "| --- | --- | --- |", *(f"| {a} | {b} | {c} |" for a, b, c in bench.rows), ""]
    pathlib.Path(args.out).write_text("\n".join(lines))


main()
