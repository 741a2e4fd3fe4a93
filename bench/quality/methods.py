#!/usr/bin/env python3
"""What each method of rounding makes of a model: KL divergence, perplexity, size, seconds.

    bench/quality/methods.py MODEL CALIBRATION TEXT OUT.json w4a16_g32=rtn,gptq,rotate+gptq kv=turned,best

Each row is one `nibble quantize` (methods of a chain are joined by +) and one `nibble eval kld`
beside the model as it is; kv rows are INT4 caches without a sidecar (turned) and with the one that
`nibble calibrate-kv` makes. A row that is another program's output is given as
`made:w4a16_g32=llm-compressor+gptq:FOLDER`. OUT.json has the rows of bench/results/calibration.json;
rows of other models that it holds already stay.
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor


running = set()  # processes that run() waits for
stopped = threading.Event()


def stop(number, _):
    """Ends what runs, and this program by an exception, so that temporary folders are removed."""
    stopped.set()
    for process in list(running):
        process.terminate()
    raise SystemExit(128 + number)


def stop_on_signals():
    """Of a program that is killed or interrupted nothing stays: no folders, no processes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def run(*command):
    if stopped.is_set():
        raise SystemExit("stopped")
    process = subprocess.Popen([str(part) for part in command], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    running.add(process)
    if stopped.is_set():  # meanwhile, in another thread
        process.terminate()
    try:
        out, errors = process.communicate()
    finally:
        running.discard(process)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: {errors.strip()[-500:]}")
    return out


def commit():
    """Of the sources beside this file, whose build measures."""
    done = subprocess.run(["git", "-C", pathlib.Path(__file__).parent, "rev-parse", "--short", "HEAD"],
                          text=True, stdout=subprocess.PIPE)
    return done.stdout.strip() or None


def linked_copy(model, folder):
    folder.mkdir()
    for file in pathlib.Path(model).resolve().iterdir():
        (folder / file.name).symlink_to(file)
    return folder


class Bench:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.text = ["--text", args.text, "--threads", args.threads]
        self.text += ["--device", args.device] if args.device else []
        self.calibration = ["--calibrate", args.calibration, "--calibration-windows", args.windows,
                            "--calibration-length", args.length]
        run(args.nibble, "eval", "kld", args.model, "--save-base", folder / "base", *self.text)

    def divergence(self, model, *more):
        found = json.loads(run(self.args.nibble, "eval", "kld", model, "--base-file",
                               self.folder / "base", *self.text, *more, "--json"))
        keys = ["kld", "kld_error", "same_top", "ppl_ratio", "ppl_ratio_error", "tokens"]
        return {key: found[key] for key in keys if key in found}

    def quantized(self, scheme, method):
        made = self.folder / f"{scheme}-{method}"
        begin = time.time()
        options = self.args.quantize_option + self.calibration
        run(self.args.nibble, "quantize", self.args.model, made, "--scheme", scheme, "--threads",
            self.args.threads, *options, "--method", method.replace("+", ","))
        seconds = time.time() - begin
        row = {"scheme": scheme, "method": method, **self.divergence(made), "bytes": size(made),
               "seconds": round(seconds, 1)}
        run("rm", "-r", made)
        return row

    def cache(self, form):
        begin = time.time()
        model = linked_copy(self.args.model, self.folder / f"kv-{form}")
        if form != "turned":
            more = [] if form == "best" else ["--form", form]
            run(self.args.nibble, "calibrate-kv", model, "--threads", self.args.threads,
                *self.calibration, *more)
        seconds = time.time() - begin
        return {"scheme": "kv_int4", "method": form,
                **self.divergence(model, "--kv-cache-dtype", "int4"), "seconds": round(seconds, 1)}

    def foreign(self, scheme, label, folder):
        return {"scheme": scheme, "method": label, **self.divergence(folder), "bytes": size(folder)}


def save(result, path):
    """Writes a result file: every row of its lists is one line."""
    parts = []
    for key, value in result.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if rows else json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    fresh.replace(path)


def size(folder):
    return sum(file.stat().st_size for file in pathlib.Path(folder).glob("*.safetensors"))


def tasks(bench, words):
    for word in words:
        name, _, methods = word.partition("=")
        if name.startswith("made:"):
            label, _, folder = methods.partition(":")
            yield lambda scheme=name[5:], label=label, folder=folder: bench.foreign(
                scheme, label, folder)
            continue
        for method in methods.split(","):
            if name == "kv":
                yield lambda form=method: bench.cache(form)
            else:
                yield lambda scheme=name, method=method: bench.quantized(scheme, method)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("text")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("rows", nargs="+", metavar="SCHEME=METHOD,...")
    parser.add_argument("--name", help="of the model, in the rows")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--device", help="of the evaluation")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--jobs", type=int, default=1, help="rows at once, each with --threads")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--quantize-option", action="append", default=[])
    args = parser.parse_args()
    stop_on_signals()
    name = args.name or pathlib.Path(args.model).name
    result = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, pathlib.Path(folder))
        with ThreadPoolExecutor(args.jobs) as pool:
            for row in pool.map(lambda task: task(), list(tasks(bench, args.rows))):
                rows.append({"model": name, **row})
                print(json.dumps(rows[-1]), flush=True)
    nearest = {row["scheme"]: row["kld"] for row in rows if row["method"] == "rtn"}
    for row in rows:
        if row["scheme"] in nearest and row["method"] != "rtn":
            row["kld_over_rtn"] = row["kld"] / nearest[row["scheme"]]
    new = {(row["model"], row["scheme"], row["method"]) for row in rows}
    result["rows"] = [row for row in result["rows"]
                      if (row["model"], row["scheme"], row["method"]) not in new] + rows
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
