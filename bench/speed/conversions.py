"""Instructions that a weight of 4 bits takes to become an operand, counted in the machine code that
nvcc makes of conversions.cu for Hopper. Needs nvcc, cuobjdump and nvdisasm (CUDA toolkit).

Usage: conversions.py [--json FILE]
"""
import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile

WEIGHTS = 32 * 8  # of a thread
FLAGS = ["-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a"]
FUNCTION = re.compile(r"Function : \S*?converted\S*?\d([A-Z][a-zA-Z0-9]*?)EE?vPK")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\S+\s+)?([A-Z][A-Z0-9_]*)")
MEMORY = {"LDG", "STG", "LDC", "ULDC", "MOV", "EXIT", "BRA", "NOP", "S2R"}


def counts():
    """{conversion: Counter of instructions}"""
    source = pathlib.Path(__file__).with_suffix(".cu")
    with tempfile.TemporaryDirectory() as folder:
        code = f"{folder}/conversions.cubin"
        subprocess.run(["nvcc", *FLAGS, "-cubin", source, "-o", code], check=True)
        text = subprocess.run(["cuobjdump", "-sass", code], check=True, capture_output=True,
                              text=True).stdout
    found, current = {}, None
    for line in text.splitlines():
        if match := FUNCTION.search(line):
            current = found.setdefault(match[1], collections.Counter())
        elif (match := INSTRUCTION.search(line)) and match[1] not in MEMORY:
            current[match[1]] += 1
    return found


def main():
    found = counts()
    nothing = found.pop("Nothing")
    rows = []
    for name, each in sorted(found.items()):
        each.subtract(nothing)
        kinds = {kind: count for kind, count in each.most_common() if count > 0}
        rows.append({"conversion": name, "per_weight": round(sum(kinds.values()) / WEIGHTS, 3),
                     "per_8_weights": {kind: round(count / (WEIGHTS / 8), 2)
                                       for kind, count in kinds.items()}})
        print(f"{name:20} {rows[-1]['per_weight']:6.3f} instructions a weight; of eight: "
              + ", ".join(f"{kind} {count}" for kind, count in rows[-1]["per_8_weights"].items()))
    if sys.argv[1:2] == ["--json"]:
        pathlib.Path(sys.argv[2]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
