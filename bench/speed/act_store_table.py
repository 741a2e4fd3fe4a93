"""What storing 4-bit activations two a byte is worth beside a byte each, from what `w4ax_schedules
--acts4 1` wrote: tables, and with --out the lists `act_products` and `act_rows` of a results file,
whose others stay as they are.

Usage: act_store_table.py FILE.json [FILE.json ...] [--out RESULTS.json --commit COMMIT]
FILE.json: one for each --bf16 that was measured; the rows' kernel is taken from the first.
"""
import argparse
import datetime
import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "quality"))
import methods  # noqa: E402

COMMAND = "w4ax_schedules --acts4 1 --bf16 PERCENT --replays 5 --json FILE, for 0 and 25 percent"


def mean(values):
    """Geometric mean."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def product_table(rows):
    """Times as fast with two a byte, means over the shapes."""
    percents = sorted({row["bf16_percent"] for row in rows})
    tiles = list(dict.fromkeys(row["tile"] for row in rows))
    head = [f"{tile}, {100 - percent} % of K" for percent in percents for tile in tiles]
    lines = ["| M | " + " | ".join(head) + " |", "| --: " * (len(head) + 1) + "|"]
    for m in sorted({row["m"] for row in rows}):
        cells = []
        for percent in percents:
            for tile in tiles:
                found = [row["bytes_over_nibbles"] for row in rows
                         if (row["m"], row["bf16_percent"], row["tile"]) == (m, percent, tile)]
                cells.append(f"{mean(found):.3f} ({min(found):.2f} to {max(found):.2f})"
                             if found else "")
        lines.append(f"| {m} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def row_table(rows):
    lines = ["| M | K | bytes, us | two a byte, us | times as fast | INT8 rows, us |",
             "| --: " * 6 + "|"]
    lines += [f"| {row['m']} | {row['k']} | {row['bytes_us']:.2f} | {row['nibbles_us']:.2f} | "
              f"{row['bytes_over_nibbles']:.3f} | {row['int8_us']:.2f} |" for row in rows]
    return "\n".join(lines)


def short(row):
    return {name: round(value, 3) if isinstance(value, float) else value
            for name, value in row.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--commit", help="of the build that measured")
    args = parser.parse_args()
    if args.out and not args.commit:
        parser.error("--out needs --commit, of the build that measured")
    reports = [json.loads(file.read_text()) for file in args.files]
    products = [row for report in reports for row in report["act_products"]]
    rows = reports[0]["act_rows"]
    print(product_table(products), row_table(rows), sep="\n\n")
    if args.out:
        result = json.loads(args.out.read_text())
        result["act_store_command"] = COMMAND
        result["act_store_commit"] = args.commit
        result["act_store_device"] = reports[0]["device"]
        result["act_store_date"] = datetime.date.today().isoformat()
        result["act_products"] = [short(row) for row in products]
        result["act_rows"] = [short(row) for row in rows]
        methods.save(result, args.out)


if __name__ == "__main__":
    main()
