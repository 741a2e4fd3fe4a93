#!/usr/bin/env python3
"""Checks encoded bytes against an independent program, number by number.

usage: check_oracle.py NIBBLE_BINARY MODEL_DIR format_oracle.py [MODULE]

Quantizes MODEL_DIR by every rule that other tools have too, and compares the tensors of one module
with what the oracle encodes from the same weights: they must be the same bytes. Results of the
rules that search are decoded by the oracle and must be what `nibble quantize --scheme bf16` makes of
them.
"""
import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

# scheme, rule, format, layout and options of the oracle. Where another tool has no such rule the
# bytes are only decoded.
ENCODED = [
    ("w4a16_g32", "absmax7.5", "compressed-tensors", "ct-pack", {"group": 32}),
    ("w4a16_g32", "absmax", "compressed-tensors", "ct-pack", {"group": 32, "div": 7}),
    ("w4a16_g128", "absmax7.5", "compressed-tensors", "ct-pack", {"group": 128}),
    ("w4a16_channel", "absmax7.5", "compressed-tensors", "ct-pack", {"group": 0}),
    ("w4a16_g32_asym", "minmax", "compressed-tensors", "ct-pack", {"group": 32, "sym": False}),
    ("w4a16_g128_asym", "minmax", "compressed-tensors", "ct-pack", {"group": 128, "sym": False}),
    ("w4a8", "quark", "quark", "quark-w4a8", {}),
    ("w8a8_int8", "absmax", "compressed-tensors", "ct-int8", {"div": 127, "sdtype": "F32"}),
    ("w8a8_int8", "absmax7.5", "compressed-tensors", "ct-int8", {"sdtype": "F32"}),
    ("w8a16_channel", "absmax", "compressed-tensors", "ct-pack",
     {"bits": 8, "group": 0, "div": 127}),
    ("w8a16_channel", "absmax7.5", "compressed-tensors", "ct-pack", {"bits": 8, "group": 0}),
    ("w8a8_fp8", "absmax", "compressed-tensors", "fp8", {"gran": "channel"}),
    ("w8a8_fp8_expert", "absmax", "compressed-tensors", "fp8", {"gran": "tensor"}),
    ("w8a8_fp8_block", "absmax", "fp8", "fp8", {"gran": "block", "name": "weight_scale_inv"}),
    ("w8a8_fp8_block", "absmax", "compressed-tensors", "fp8", {"gran": "block"}),
    ("mxfp4", "absmax", "compressed-tensors", "mxfp4-ct", {}),
    ("mxfp4_fp8", "absmax", "compressed-tensors", "mxfp4-ct", {}),
]
DECODED = [
    ("w4a16_g32", "lsq_signed", "compressed-tensors", "ct-pack", {}),
    ("w4a16_g32", "mse", "compressed-tensors", "ct-pack", {}),
    ("w4a16_g128_asym", "best", "compressed-tensors", "ct-pack", {}),
    ("w4a8", "best", "quark", "quark-w4a8", {}),
    ("w4a8", "best", "compressed-tensors", "ct-pack", {}),
    ("mxfp4", "best", "compressed-tensors", "mxfp4-ct", {}),
]


def stored(folder, module):
    """name -> {dtype, shape, hex} of the tensors of a module."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:8 + size]).items():
            if name.startswith(module + "."):
                begin, end = entry["data_offsets"]
                found[name[len(module) + 1:]] = {
                    "dtype": entry["dtype"], "shape": entry["shape"],
                    "hex": data[8 + size + begin:8 + size + end].hex()}
    return found


def values(tensor):
    """Rows of a plain F32 or BF16 matrix."""
    raw = bytes.fromhex(tensor["hex"])
    if tensor["dtype"] == "BF16":
        raw = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
    flat = struct.unpack(f"<{len(raw) // 4}f", raw)
    k = tensor["shape"][1]
    return [list(flat[i:i + k]) for i in range(0, len(flat), k)]


def bf16(value):
    """As nibble rounds: to nearest, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16


def oracle(program, verb, layout, query):
    done = subprocess.run([sys.executable, program, verb, layout], check=True,
                          input=json.dumps(query).encode(), stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def quantize(nibble, source, folder, *flags):
    subprocess.run([nibble, "quantize", source, folder, *flags], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nibble")
    parser.add_argument("model")
    parser.add_argument("oracle")
    parser.add_argument("module", nargs="?", default="model.layers.0.self_attn.k_proj")
    arguments = parser.parse_args()
    weights = values(stored(arguments.model, arguments.module)["weight"])
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        for number, (scheme, rule, form, layout, options) in enumerate(ENCODED + DECODED):
            folder = pathlib.Path(temporary) / str(number)
            quantize(arguments.nibble, arguments.model, folder, "--scheme", scheme,
                     "--scale-rule", rule, "--format", form)
            ours = stored(folder, arguments.module)
            if number < len(ENCODED):
                theirs = oracle(arguments.oracle, "encode", layout,
                                {"w": weights, "opt": options})["tensors"]
                good = ours.keys() == theirs.keys() and all(
                    ours[name]["hex"] == theirs[name]["hex"] for name in ours)
            else:
                plain = pathlib.Path(temporary) / f"{number}-bf16"
                quantize(arguments.nibble, folder, plain, "--scheme", "bf16")
                decoded = oracle(arguments.oracle, "decode", layout,
                                 {"tensors": ours, "opt": options})["w"]
                theirs = b"".join(struct.pack("<H", bf16(value)) for row in decoded
                                  for value in row).hex()
                good = stored(plain, arguments.module)["weight"]["hex"] == theirs
            failures += not good
            print(f"{scheme:16} {rule:10} {form:18} {layout:10} {'same' if good else 'DIFFERS'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
