#!/usr/bin/env python3
"""What activations of 4 and 8 bits cost a model, beside other schemes (COMET's Tables 1 and 2).

    bench/quality/comet.py MODEL CALIBRATION TEXT bench/results/comet.json --name NAME [--rows ROW ...]

Each row is one `nibble quantize` and one `nibble eval kld` beside the model as it is. Rows are
those of ROWS, or given as SCHEME/METHOD[/BLOCK/A8_SHARE[/PERMUTE]][/kv=FORMAT]; methods of a
chain are joined by +. The list
`accuracy` of the result keeps rows of other models and rows that are not measured anew.
"""
import argparse
import json
import pathlib
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import methods

# Rows of the tables; B stands for --block, S for --a8-share.
ROWS = ["w8a8_int8/smooth+rtn", "w4a16_gB/gptq", "w4a16_gB/awq+rtn", "w4a16_gB/lwc",
        "w4a8_g128/smooth+gptq/kv=int4",
        "w4ax/rtn/B/0/none", "w4ax/rotate+gptq/B/0/none",
        "w4ax/rtn/B/S", "w4ax/gptq/B/S", "w4ax/gptaq/B/S", "w4ax/smooth+gptq/B/S",
        "w4ax/smooth+gptaq/B/S", "w4ax/gptq/B/S/gather", "w4ax/smooth+gptq/B/S/kv=int4"]


class Row:
    """A scheme with all that decides its codes, and the cache."""

    def __init__(self, text):
        parts = text.split("/")
        self.kv = parts.pop()[3:] if parts[-1].startswith("kv=") else "bf16"
        self.scheme, self.method, *blocks = parts
        self.block, self.share, self.permute = blocks + ["fold"] * (len(blocks) == 2) \
            if blocks else (None, None, None)

    def flags(self):
        flags = ["--scheme", self.scheme, "--method", self.method.replace("+", ",")]
        if self.block is not None:
            flags += ["--block", self.block, "--a8-share", self.share, "--permute", self.permute]
        return flags

    def keys(self):
        keys = {"scheme": self.scheme, "method": self.method, "kv": self.kv}
        if self.block is not None:
            keys |= {"block": int(self.block), "permute": self.permute,
                     "a8_share_asked": float(self.share)}
        return keys


def identity(row):
    return tuple(row.get(key) for key in ("model", "scheme", "method", "block", "permute",
                                          "a8_share_asked", "kv"))


class Bench:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.text = ["--text", args.text, "--threads", args.threads, "--device", "cpu"]
        methods.run(args.nibble, "eval", "kld", args.model, "--save-base", folder / "base",
                    *self.text)

    def divergence(self, model, kv):
        more = [] if kv == "bf16" else ["--kv-cache-dtype", kv]
        found = json.loads(methods.run(self.args.nibble, "eval", "kld", model, "--base-file",
                                       self.folder / "base", *self.text, *more, "--json"))
        keys = ["kld", "kld_error", "same_top", "ppl_ratio", "ppl_ratio_error", "tokens"]
        return {key: found[key] for key in keys if key in found}

    def measure(self, text):
        row = Row(text)
        made = self.folder / text.replace("/", "_")
        begin = time.time()
        report = json.loads(methods.run(
            self.args.nibble, "quantize", self.args.model, made, "--force", "--threads",
            self.args.threads, "--calibrate", self.args.calibration, "--calibration-windows",
            self.args.windows, "--calibration-length", self.args.length, *row.flags(), "--json"))
        seconds = time.time() - begin
        chosen = report.get("blocks") or {}
        share = {"a4_share": chosen["a4_share"]} if chosen else {}
        found = {**row.keys(), **share, **self.divergence(made, row.kv),
                 "bytes": methods.size(made), "seconds": round(seconds, 1)}
        shutil.rmtree(made)
        return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("text")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="instead of those of the tables")
    parser.add_argument("--name", help="of the model, in the rows")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="rows at once, each with --threads")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--block", default="32")
    parser.add_argument("--a8-share", default="0.16")
    args = parser.parse_args()
    name = args.name or pathlib.Path(args.model).name
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows = args.rows or [row.replace("gB", f"g{args.block}").replace("/B", f"/{args.block}")
                         .replace("/S", f"/{args.a8_share}") for row in ROWS]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, pathlib.Path(folder))
        with ThreadPoolExecutor(args.jobs) as pool:
            for found in pool.map(bench.measure, rows):
                row = {"model": name, **found}
                print(json.dumps(row), flush=True)
                known = [old for old in result.get("accuracy", [])
                         if identity(old) != identity(row)]
                result["accuracy"] = known + [row]
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
