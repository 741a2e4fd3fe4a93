#!/usr/bin/env python3
"""Whether `nibble sensitivity --budget` keeps what it promises, on one model.

    bench/quality/budget.py models/storyteller CALIBRATION TEXT bench/results/NAME.json

Measures, by `nibble eval kld` on TEXT and with folders that `nibble quantize` made: the choice for
each of some sizes, every scheme alone, and random mixes. Fails unless the divergence falls where the
choice grows with the size, is never above that of the best single scheme that fits the size, is below it at 4.25 and 4.5
bits where a scheme of fewer bits and one of more are there to mix (--strict), and predictions order
the mixes as measurements do (Spearman's rank correlation of 0.9 and more).
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

SCHEMES = ["w4a16_channel", "w4a16_g128", "w4a16_g32", "w8a16_channel", "keep"]
SIZES = [4.25, 4.5, 5.0, 5.5, 6.0, 7.0]
STRICT_SIZES = [4.25, 4.5]


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE).stdout


class Bench:
    def __init__(self, args, folder):
        self.args, self.folder = args, pathlib.Path(folder)
        run(args.nibble, "eval", "kld", args.model, "--save-base", self.folder / "base",
            "--base-precision", "f32", "--text", args.text)

    def choose(self, size):
        """What nibble sensitivity says, with the rules that it writes."""
        rules, found = self.folder / "rules", self.folder / "found.json"
        run(self.args.nibble, "sensitivity", self.args.model, "--schemes", ",".join(SCHEMES),
            "--calibrate", self.args.calibration, "--budget", f"{size}bpw", "--write-rules", rules,
            "--measure", self.args.measure, "--json", found)
        return json.loads(found.read_text()), rules

    def kld(self, scheme, rules=None):
        """The measured divergence, and the bytes of the weight files."""
        made = self.folder / "made"
        more = ["--rules", rules] if rules else []
        run(self.args.nibble, "quantize", self.args.model, made, "--scheme", scheme, "--force",
            "--format", "compressed-tensors", *more)
        result = json.loads(run(self.args.nibble, "eval", "kld", made, "--base-file",
                                self.folder / "base", "--text", self.args.text, "--json"))
        size = sum(file.stat().st_size for file in made.glob("*.safetensors"))
        return {"kld": result["kld"], "kld_error": result["kld_error"], "bytes": size}


def units(matrices):
    """Matrices that are given one scheme together, in a fixed order."""
    found = {}
    for matrix in sorted(matrices, key=lambda matrix: matrix["name"]):
        found.setdefault(matrix["tied"], []).append(matrix)
    return list(found.values())


def random_mix(bench, matrices, seed):
    """A scheme for each unit by chance, with chances that are drawn, too."""
    generator = random.Random(seed)
    chances = [generator.random() ** 2 for _ in SCHEMES]
    predicted, lines, used = 0.0, [], set()
    for unit in units(matrices):
        allowed = [name for name in SCHEMES if all(name in matrix["errors"] for matrix in unit)]
        scheme = generator.choices(allowed, [chances[SCHEMES.index(name)] for name in allowed])[0]
        used.add(scheme)
        for matrix in unit:
            predicted += matrix["nats_per_error"] * matrix["errors"][scheme]
            lines.append(f"{matrix['name']}={scheme}")
    rules = bench.folder / "mix"
    rules.write_text("\n".join(lines) + "\n")
    quantized = sorted(used - {"keep"})
    return None if not quantized else {
        "seed": seed, "predicted": predicted, **bench.kld(quantized[0], rules)}


def ranks(values):
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [order.index(i) for i in range(len(values))]


def rank_correlation(rows):
    a, b = ranks([row["predicted"] for row in rows]), ranks([row["kld"] for row in rows])
    n = len(rows)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b)) / (n * (n * n - 1))


def bits_of(scheme, matrices):
    weights = sum(matrix["weights"] for matrix in matrices)
    if any(scheme not in matrix["bits_per_weight"] for matrix in matrices):
        return None
    return sum(m["bits_per_weight"][scheme] * m["weights"] for m in matrices) / weights


def complaints(result, strict):
    """What does not hold."""
    wrong = []
    sizes, singles = result["sizes"], result["schemes"]
    for before, after in zip(sizes, sizes[1:]):
        if after["kld"] > before["kld"] or (after["bits"] > before["bits"] and
                                            after["kld"] == before["kld"]):
            wrong.append(f"{after['size']} bits lose {after['kld']:.6f}, {before['size']} bits "
                         f"{before['kld']:.6f}")
    for row in sizes:
        fits = [one for one in singles if one["bits"] <= row["size"] + 1e-9]
        best = min((one["kld"] for one in fits), default=float("inf"))
        if row["kld"] > best or (strict and row["size"] in STRICT_SIZES and row["kld"] >= best):
            wrong.append(f"{row['size']} bits lose {row['kld']:.6f}, one scheme {best:.6f}")
        if row["bits"] > row["size"] + 1e-9:
            wrong.append(f"{row['size']} bits became {row['bits']}")
    if result["rank_correlation"] < 0.9:
        wrong.append(f"rank correlation {result['rank_correlation']:.3f}")
    return wrong


def measure(args, bench):
    result = {"model": pathlib.Path(args.model).name, "measure": args.measure, "sizes": [],
              "schemes": [], "mixes": []}
    for size in SIZES:
        found, rules = bench.choose(size)
        choice = found["choice"]
        row = {"size": size, "bits": choice["bits_per_weight"], "predicted": choice["predicted"],
               "bound": choice["bound"], "seconds": found["seconds"],
               **bench.kld(choice["scheme"], rules)}
        result["sizes"].append(row)
        print(row, flush=True)
    for scheme in SCHEMES[:-1]:
        bits = bits_of(scheme, found["matrices"])
        if bits is not None:
            result["schemes"].append({"scheme": scheme, "bits": bits, **bench.kld(scheme)})
            print(result["schemes"][-1], flush=True)
    for seed in range(1000):
        if len(result["mixes"]) == args.mixes:
            break
        mix = random_mix(bench, found["matrices"], seed)
        result["mixes"] += [mix] if mix else []
    result["rank_correlation"] = rank_correlation(result["mixes"])
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("text")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--measure", type=float, default=0.1, help="as of nibble sensitivity")
    parser.add_argument("--mixes", type=int, default=20)
    parser.add_argument("--strict", action="store_true",
                        help="mixes of 4.25 and 4.5 bits have to be better than single schemes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Bench(args, folder))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = complaints(result, args.strict)
    print(f"rank correlation {result['rank_correlation']:.3f}")
    print("\n".join(wrong) or "all holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
