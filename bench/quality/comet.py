#!/usr/bin/env python3
"""What activations of 4 and 8 bits and 4-bit caches cost models, beside other schemes: rows, tables
and charts of docs/calibration.md and docs/kv-cache.md, all from `nibble` commands (COMET's Tables 1
and 2).

    bench/quality/comet.py measure RESULT NAME=MODEL,CALIBRATION,TEXT ... [--rows ROW ...]
    bench/quality/comet.py measure RESULT NAME=MODEL,CALIBRATION,TEXT ... --tasks FOLDER [--limit N]
    bench/quality/comet.py tables RESULT docs/calibration.md docs/kv-cache.md
    bench/quality/comet.py charts RESULT FOLDER

RESULT is bench/results/comet.json. A row is one `nibble quantize`, one `nibble eval kld` beside the
model as it is, and with --tasks one `nibble eval tasks` on the files NAME.jsonl, packed or not, of a
folder. Rows are those of ROWS, or given as SCHEME/METHOD[/BLOCK/A8_SHARE[/PERMUTE]][/kv=FORMAT]
(methods of a chain are joined by +), or bf16 and bf16/kv=FORMAT: the model as it is. Behind FORMAT
+calibrated gives the cache what `nibble calibrate-kv` finds in the calibration's text. Models of rows
that differ by the cache alone are made once. A row that `nibble` refuses, as it does rotations of
latent attention, is left out, with its reason. The list `accuracy` of RESULT keeps rows of other
models and rows that are not measured anew; `tables` writes what stands between <!-- comet:NAME -->
and <!-- /comet -->, each NAME in the one of the pages that has it. What `bench/quality/kv_forms.py` measures of caches by themselves is
the list `kv`.
"""
import argparse
import json
import lzma
import pathlib
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import kv_forms
import methods
import share_curve

# Rows of the tables, as they are called there. B stands for --block, S for --a8-share (which is
# --outlier-share, too), G for --group.
ROWS = {
    "bf16": "`bf16`",
    "w8a8_int8/smooth+rtn": "`w8a8_int8`, `smooth,rtn`",
    "w4a16_gB/awq+rtn": "`w4a16_g32`, `awq,rtn`",
    "w4a16_gB/lwc": "`w4a16_g32`, `lwc`",
    "w4a16_gB/gptq": "`w4a16_g32`, `gptq`",
    "w4a16_gB/gptaq": "`w4a16_g32`, `gptaq`",
    "w4a8/gptq": "`w4a8`, `gptq`",
    "w4a8_gG/gptq": "`w4a8_g128`, `gptq`",
    "w4a8_gG/smooth+gptq": "`w4a8_g128`, `smooth,gptq`",
    "w4a8_bf16/gptq/B/0.05": "`w4a8_bf16`, `gptq`, 5 % in BF16",
    "w4a8_bf16/gptq/B/0.1": "`w4a8_bf16`, `gptq`, 10 % in BF16",
    "w4a8_bf16/gptq/B/0.16": "`w4a8_bf16`, `gptq`, 16 % in BF16",
    "w4ax_class/rtn/B/0/none": "W4A4, a scale for each token, `rtn`",
    "w4ax_class/rotate+gptq/B/0/none": "W4A4, a scale for each token, `rotate,gptq`",
    "w4ax/rtn/B/0/none": "W4A4, blocks of 32, `rtn`",
    "w4ax/rotate+gptq/B/0/none": "W4A4, blocks of 32, `rotate,gptq`",
    "w4ax/rtn/B/S": "`w4ax_b32`, `rtn`",
    "w4ax/gptq/B/S": "`w4ax_b32`, `gptq`",
    "w4ax/gptq/B/S/gather": "`w4ax_b32`, `gptq`, `--permute gather`",
    "w4ax/gptaq/B/S": "`w4ax_b32`, `gptaq`",
    "w4ax/smooth+gptq/B/S": "`w4ax_b32`, `smooth,gptq`",
    "w4ax/smooth+gptaq/B/S": "`w4ax_b32`, `smooth,gptaq`",
    "w4ax_class/gptq/B/S": "`w4ax_class`, `gptq`",
    "w4ax_class/smooth+gptq/B/S": "`w4ax_class`, `smooth,gptq`",
    "bf16/kv=int4": "`bf16`, INT4 cache",
    "bf16/kv=int4+calibrated": "`bf16`, INT4 cache, calibrated",
    "bf16/kv=int4_page": "`bf16`, `int4_page`",
    "bf16/kv=int4_page+calibrated": "`bf16`, `int4_page`, calibrated",
    "w4a8_gG/gptq/kv=int4": "`w4a8_g128`, `gptq`, INT4 cache",
    "w4a8_gG/smooth+gptq/kv=int4": "`w4a8_g128`, `smooth,gptq`, INT4 cache",
    "w4ax/gptq/B/S/kv=int4": "`w4ax_b32`, `gptq`, INT4 cache",
    "w4ax/gptq/B/S/kv=int4+calibrated": "`w4ax_b32`, `gptq`, INT4 cache, calibrated",
    "w4ax/gptq/B/S/kv=int4_page": "`w4ax_b32`, `gptq`, `int4_page`",
    "w4ax/gptq/B/S/kv=int4_page+calibrated": "`w4ax_b32`, `gptq`, `int4_page`, calibrated",
    "w4ax/gptaq/B/S/kv=int4": "`w4ax_b32`, `gptaq`, INT4 cache",
    "w4ax/smooth+gptaq/B/S/kv=int4": "`w4ax_b32`, `smooth,gptaq`, INT4 cache",
}
# Rows with blocks of other sizes, which only tables take: they are measured by name.
OTHER_BLOCKS = {
    "w4ax/gptq/64/0.25": "`w4ax_b64`, `gptq`",
    "w4ax/gptaq/64/0.25": "`w4ax_b64`, `gptaq`",
    "w4ax/gptq/128/0.5": "`w4ax`, blocks of 128, `gptq`",
    "w4ax/gptaq/128/0.5": "`w4ax`, blocks of 128, `gptaq`",
}
# Perplexity over that of FP16 on WikiText-2 as published (COMET's Table 1, arXiv 2410.12168; W4A4 of
# OmniQuant there, rotated that of QuaRot; QoQ as its authors have it, in groups of 128): Llama 3 8B
# from 6.14, OPT 13B from 10.13.
PUBLISHED = {
    "w8a8_int8/smooth+rtn": (6.28, 10.47), "w4a16_gB/awq+rtn": (7.09, 10.39),
    "w4a16_gB/lwc": (6.81, 10.30), "w4a16_gB/gptq": (7.02, 10.31),
    "w4ax_class/rtn/B/0/none": (14.27, 11.65), "w4ax_class/rotate+gptq/B/0/none": (8.33, None),
    "w4ax/gptq/B/S": (6.88, 10.34), "w4a8_gG/smooth+gptq/kv=int4": (6.70, 10.42),
    "w4ax/smooth+gptaq/B/S/kv=int4": (6.91, 10.44),
}
FP16 = (6.14, 10.13)
TASKS = ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande"]
CALIBRATED = "+calibrated"
KEYS = ["kld", "kld_error", "same_top", "ppl_ratio", "ppl_ratio_error", "tokens"]


class Row:
    """A scheme with all that decides its codes, and the cache."""

    def __init__(self, text):
        self.text, parts = text, text.split("/")
        self.kv = parts.pop()[3:] if parts[-1].startswith("kv=") else "bf16"
        self.scheme, self.method, *blocks = parts + ["none"] * (len(parts) == 1)
        self.block, self.share, self.permute = blocks + ["fold"] * (len(blocks) == 2) \
            if blocks else (None, None, None)

    @property
    def as_it_is(self):
        return self.method == "none"

    @property
    def cache(self):
        return [] if self.kv == "bf16" else ["--kv-cache-dtype", self.kv.removesuffix(CALIBRATED)]

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


def unpacked(folder, to):
    """The files of the tasks in `to`, where `nibble eval tasks` looks for them."""
    for task in TASKS:
        found = sorted(pathlib.Path(folder).glob(f"{task}*.jsonl*"))
        if not found:
            raise SystemExit(f"{folder}: has no {task}.jsonl or {task}.jsonl.xz")
        opened = lzma.open if found[0].suffix == ".xz" else open
        with opened(found[0], "rb") as packed:
            (to / f"{task}.jsonl").write_bytes(packed.read())
    return to


class Bench:
    def __init__(self, args, model, folder):
        self.args, self.folder = args, folder
        self.model, calibration, text = model
        self.calibration = ["--calibrate", calibration, "--calibration-windows", args.windows,
                            "--calibration-length", args.length]
        self.device = ["--threads", args.threads, "--device", "cpu"]
        self.text = ["--text", text, *self.device]
        self.tasks = unpacked(args.tasks, folder) if args.tasks else None
        if not args.tasks_only:
            methods.run(args.nibble, "eval", "kld", self.model, "--save-base", folder / "base",
                        *self.text)

    def divergence(self, model, row):
        found = json.loads(methods.run(self.args.nibble, "eval", "kld", model, "--base-file",
                                       self.folder / "base", *self.text, *row.cache, "--json"))
        return {key: found[key] for key in KEYS if key in found}

    def answers(self, model, row):
        found = json.loads(methods.run(
            self.args.nibble, "eval", "tasks", model, "--tasks", ",".join(TASKS), "--data-dir",
            self.tasks, "--limit", self.args.limit, *self.device, *row.cache, "--json"))
        return {task["task"]: {key: value for key, value in task.items()
                               if key == "items" or key.startswith("acc")}
                for task in found["models"][0]["tasks"]}

    def measured(self, rows):
        """What is known of rows of one model; what `nibble` refuses is left out."""
        made, known, found = self.folder / "_".join(rows[0].flags()), None, []
        for row in rows:
            try:
                if known is None:
                    known = self.made(row, made)
                found.append({**row.keys(), **self.judged(made, row), **known})
            except SystemExit as refused:
                print(f"{row.text}: {str(refused)[-300:]}", flush=True)
        shutil.rmtree(made, ignore_errors=True)
        return found

    def made(self, row, to):
        begin, share = time.time(), {}
        if row.as_it_is:
            to.mkdir()
            kv_forms.links_to(self.model, to)
        else:
            report = json.loads(methods.run(
                self.args.nibble, "quantize", self.model, to, "--force", "--threads",
                self.args.threads, *self.calibration, *row.flags(), "--json"))
            if report.get("blocks"):
                share = {key: report["blocks"][key] for key in ("a4_share", "bf16_share")
                         if key in report["blocks"]}
        if self.args.tasks_only:
            return share
        seconds = 0.0 if row.as_it_is else round(time.time() - begin, 1)
        return {**share, "bytes": methods.size(to), "seconds": seconds}

    def judged(self, made, row):
        sidecar, found = made / kv_forms.SIDECAR, {}
        if row.kv.endswith(CALIBRATED):
            methods.run(self.args.nibble, "calibrate-kv", made, "--force", "--threads",
                        self.args.threads, *self.calibration)
        if not self.args.tasks_only:
            found |= self.divergence(made, row)
        if self.tasks:
            found["tasks"] = self.answers(made, row)
        sidecar.unlink(missing_ok=True)
        return found


def spelled(row, args):
    return row.replace("gB", f"g{args.block}").replace("gG", f"g{args.group}") \
        .replace("/B", f"/{args.block}").replace("/S", f"/{args.a8_share}")


def together(rows):
    """Rows in lists: those of a list differ by their caches alone."""
    lists = {}
    for row in map(Row, rows):
        lists.setdefault(tuple(row.flags()), []).append(row)
    return lists.values()


def measure(args):
    result = json.loads(args.result.read_text()) if args.result.exists() else {}
    for word in args.rest:
        name, _, files = word.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(args, files.split(","), pathlib.Path(folder))
            rows = [spelled(row, args) for row in args.rows or ROWS]
            with ThreadPoolExecutor(args.jobs) as pool:
                for found in pool.map(bench.measured, together(rows)):
                    for row in found:
                        add(result, {"model": name, **row})
                    methods.save(result, args.result)


def add(result, row):
    """The row in place of the one before; what is not measured anew of it stays."""
    rows = result.setdefault("accuracy", [])
    before = [old for old in rows if identity(old) == identity(row)]
    row = {**(before[0] if before else {}), **row, "commit": methods.commit()}
    print(json.dumps(row), flush=True)
    result["accuracy"] = [old for old in rows if identity(old) != identity(row)] + [row]


# --- tables and charts ---------------------------------------------------------------------------

def rows_of(result, args):
    """{(model, row of ROWS): what was measured}; SmolLM2's rows of w4a8 are in groups of 64."""
    known = {identity(row): row for row in result["accuracy"]}
    found = {}
    for model in dict.fromkeys(row["model"] for row in result["accuracy"]):
        for text in [*ROWS, *OTHER_BLOCKS]:
            for group in (args.group, "64"):
                args_of = argparse.Namespace(**{**vars(args), "group": group})
                row = known.get(identity({"model": model, **Row(spelled(text, args_of)).keys()}))
                if row is not None:
                    found.setdefault((model, text), row)
    return found


def accuracy_table(result, args):
    found = rows_of(result, args)
    models = list(dict.fromkeys(model for model, _ in found))
    tokens = {model: next(row["tokens"] for (of, _), row in found.items()
                          if of == model and "tokens" in row) for model in models}
    yield "| Scheme, `--method` | W4A4, % | " + " | ".join(
        f"{model} ({tokens[model]:,})" for model in models) + " | Llama 3 8B, published | OPT 13B, published |"
    yield "| --- | --: | " + "--: | " * len(models) + "--: | --: |"
    for text, label in [*ROWS.items(), *OTHER_BLOCKS.items()]:
        own = {model: found.get((model, text)) for model in models}
        shares = [100 * row["a4_share"] for row in own.values() if row and "a4_share" in row]
        if not any(row and "kld" in row for row in own.values()):
            continue
        cells = [f"{row['ppl_ratio']:.3f}, {row['kld']:.4f}" if row and "kld" in row else ""
                 for row in own.values()]
        published = [f"{value / base:.3f}" if value else "" for value, base in
                     zip(PUBLISHED.get(text, (None, None)), FP16)]
        spread = f"{min(shares):.0f} to {max(shares):.0f}" if shares and \
            round(max(shares)) > round(min(shares)) else f"{shares[0]:.0f}" if shares else ""
        yield "| " + " | ".join([label, spread, *cells, *published]) + " |"


def tasks_table(result, args):
    found = {key: row for key, row in rows_of(result, args).items() if "tasks" in row}
    yield "| Model | Scheme, `--method` | " + " | ".join(TASKS) + " | mean |"
    yield "| --- | --- |" + " --: |" * (len(TASKS) + 1)
    for (model, text), row in found.items():
        means = [row["tasks"][task]["acc"] for task in TASKS]
        errors = [row["tasks"][task]["acc_error"] for task in TASKS]
        error = sum(error ** 2 for error in errors) ** 0.5 / len(TASKS)
        yield "| " + " | ".join(
            [f"{model} ({max(row['tasks'][task]['items'] for task in TASKS):,} items at most)",
             (ROWS | OTHER_BLOCKS)[text],
             *(f"{100 * mean:.1f} ± {100 * se:.1f}" for mean, se in zip(means, errors)),
             f"{100 * sum(means) / len(means):.1f} ± {100 * error:.1f}"]) + " |"


def kv_table(result, _):
    rows = [row for row in result["kv"] if "kld" in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    yield "| Form | Heads | " + " | ".join(models) + " |"
    yield "| --- | --- |" + " --: |" * len(models)
    for form, options in dict.fromkeys((row["form"], row["options"]) for row in rows):
        cells = []
        for model in models:
            own = {row["window"]: row["kld"] for row in rows
                   if (row["model"], row["form"], row["options"]) == (model, form, options)}
            long = f" ({own[1024]:.3f})" if 1024 in own else ""
            cells.append(f"{own[512]:.4f}{long}" if 512 in own else "")
        yield "| " + " | ".join([f"`{form}`", options, *cells]) + " |"


def tables(args):
    result = json.loads(args.result.read_text())
    texts = {page: pathlib.Path(page).read_text() for page in args.rest}
    for name, make in (("accuracy", accuracy_table), ("tasks", tasks_table), ("kv", kv_table)):
        begin, end = f"<!-- comet:{name} -->\n", "<!-- /comet -->"
        pages = [page for page, text in texts.items() if begin in text]
        if len(pages) != 1 or texts[pages[0]].count(begin) != 1:
            raise SystemExit(f"{', '.join(args.rest)}: {len(pages)} of them have a place for the table "
                             f"{begin.strip()}, not one")
        text = texts[pages[0]]
        at = text.index(begin) + len(begin)
        texts[pages[0]] = text[:at] + "\n".join(make(result, args)) + "\n" + text[text.index(end, at):]
    for page, text in texts.items():
        pathlib.Path(page).write_text(text)


def charts(args):
    result = json.loads(args.result.read_text())
    folder = pathlib.Path(args.rest[0])
    lines = share_curve.lines_of(result["accuracy"], "gptq", int(args.block))
    (folder / "comet_share.svg").write_text(share_curve.draw(lines))
    kv_forms.chart([row for row in result["kv"] if "kld" in row], folder / "kv_forms.svg")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "tables", "charts"])
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("rest", nargs="+", metavar="NAME=MODEL,CALIBRATION,TEXT | PAGE | FOLDER")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="instead of those of the tables")
    parser.add_argument("--tasks", help="folder of the zero-shot tasks")
    parser.add_argument("--tasks-only", action="store_true", help="no divergences")
    parser.add_argument("--limit", default="0", help="items of each task; 0: all")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="rows at once, each with --threads")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--block", default="32")
    parser.add_argument("--a8-share", default="0.16")
    parser.add_argument("--group", default="128", help="of w4a8's weights")
    args = parser.parse_args()
    methods.stop_on_signals()
    {"measure": measure, "tables": tables, "charts": charts}[args.what](args)


if __name__ == "__main__":
    main()
