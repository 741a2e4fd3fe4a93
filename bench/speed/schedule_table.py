"""The tables of docs/cuda.md from what w4ax_schedules wrote.

Usage: schedule_table.py FILE.json [FILE.json ...]
"""

import json
import math
import sys

SCHEDULES = ["lock_step", "round_robin", "balanced", "remapped", "decomposed"]
FORMS = ["no_pipeline", "no_interleave", "sign_extension"]


def mean(values):
    """Geometric mean."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def main():
    rows = [row for name in sys.argv[1:] for row in json.load(open(name))["schedules"]]
    us = {(row["shape"], row["m"], row["variant"]): row["us"] for row in rows}
    optimum = {(row["shape"], row["m"]): row["of_optimum"] for row in rows
               if row["variant"] == "decomposed"}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    counts = sorted({row["m"] for row in rows})

    def ratio(m, over, under):
        return mean(us[shape, m, over] / us[shape, m, under] for shape in shapes)

    print("| M | " + " | ".join(f"`{name}`" for name in SCHEDULES[1:]) +
          " | of the optimum | all INT8 | all BF16 | " + " | ".join(FORMS) + " |")
    print("| --: " * (len(SCHEDULES) + 3 + len(FORMS)) + "|")
    for m in counts:
        cells = [f"{ratio(m, 'lock_step', name):.2f}" for name in SCHEDULES[1:]]
        cells.append(f"{mean(optimum[shape, m] for shape in shapes):.2f} "
                     f"({min(optimum[shape, m] for shape in shapes):.2f})")
        cells += [f"{ratio(m, name, 'decomposed'):.2f}" for name in ("all_int8", "all_bf16")]
        cells += [f"{ratio(m, 'decomposed-' + form, 'decomposed'):.2f}" for form in FORMS]
        print(f"| {m} | " + " | ".join(cells) + " |")
    print()
    print("| Shape, N x K | " + " | ".join(f"M={m}" for m in counts) + " |")
    print("| --- | " + "--: | " * len(counts))
    sizes = {row["shape"]: f"{row['n']}x{row['k']}" for row in rows}
    for shape in shapes:
        cells = [f"{us[shape, m, 'product_w4a16'] / us[shape, m, 'decomposed']:.2f}, "
                 f"{us[shape, m, 'product_w4a8'] / us[shape, m, 'decomposed']:.2f}, "
                 f"{optimum[shape, m]:.2f}" for m in counts]
        print(f"| {shape}, {sizes[shape]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
