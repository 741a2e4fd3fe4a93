"""Products of INT4 weights with rows in blocks of 4 and 8 bits on a GPU, beside cuBLASLt in BF16 and
INT8 rows: the rows `products` of a results file, and their means.

Usage: comet_products.py GEMM_BENCH RESULTS.json [--a4-share 0.75]
GEMM_BENCH is bench/cuda/gemm_bench of a CUDA build; other lists of the file stay as they are.
"""
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

# Of LLaMA 13B, 30B, Llama 3 8B and 70B, Qwen2 72B, as in figure 9 of the paper.
SHAPES = ["13824x5120", "5120x13824", "17920x6656", "28672x4096", "4096x14336", "28672x8192",
          "8192x28672", "29568x8192"]
ROWS = [2, 4, 8, 16, 64, 256, 4096]
FORMS = {"block": "w4ax", "class": "w4ax_class"}
BESIDE = "w4a8"


def measured(program, share):
    """The report of one run over all schemes."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [program, "--scheme", ",".join([BESIDE, *FORMS.values()]), "--shape",
                   ",".join(SHAPES), "--m", ",".join(map(str, ROWS)), "--a4-share", str(share),
                   "--json", str(report)]
        subprocess.run(command, check=True)
        return json.loads(report.read_text()), " ".join(["gemm_bench", *command[1:-2]])


def best(report):
    """{(scheme, m, n, k): the fastest kernel's row}"""
    rows = {}
    for row in report["kernels"]:
        key = row["scheme"], row["m"], row["n"], row["k"]
        if key not in rows or row["us"] < rows[key]["us"]:
            rows[key] = row
    return rows


def main():
    program, results = sys.argv[1:3]
    share = float(sys.argv[4]) if sys.argv[3:4] == ["--a4-share"] else 0.75
    report, command = measured(program, share)
    rows, products = best(report), []
    for form, scheme in FORMS.items():
        for (name, m, n, k), row in rows.items():
            if name == scheme:
                beside = rows[BESIDE, m, n, k]
                products.append({"n": n, "k": k, "m": m, "form": form, "a4_share": share,
                                 "us": row["us"], "vs_bf16": row["vs_bf16"],
                                 "vs_w4a8": beside["us"] / row["us"]})
    path = pathlib.Path(results)
    whole = json.loads(path.read_text()) if path.exists() else {}
    whole["products"] = products
    whole["products_run"] = {"command": command, "device": report["device"],
                             "ceilings": report["ceilings"],
                             "date": datetime.date.today().isoformat()}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    print("means over the shapes: form, rows, over cuBLASLt in BF16, over", BESIDE)
    for form in FORMS:
        for m in ROWS:
            means = [statistics.mean(row[key] for row in products
                                     if row["form"] == form and row["m"] == m)
                     for key in ("vs_bf16", "vs_w4a8")]
            print(f"{form:6} {m:5} {means[0]:6.2f} {means[1]:6.3f}")


if __name__ == "__main__":
    main()
