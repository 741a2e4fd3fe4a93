"""Writes blocks.gguf: for each type of tensor, random blocks and the values that gguf-py decodes.

Usage: make_blocks.py [OUT] [--blocks N] [--seed N]     needs gguf (0.19.0 made the committed file)

Tensor "Q4_0" holds the blocks, tensor "Q4_0.values" gguf.quants.dequantize() of them in F32. Scales
are random F16 of every size, subnormals, zeros and both signs among them, but finite.
"""

import argparse
import pathlib

import gguf
import numpy as np

# Byte offsets of the F16 numbers in a block.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": []}


def random_halves(random, count):
    """F16 numbers whose 16 bits are random, but for infinities and NaNs."""
    bits = random.integers(0, 1 << 16, count, dtype=np.uint16)
    return np.where(bits & 0x7C00 == 0x7C00, bits & 0x83FF, bits).astype(np.uint16)


def random_blocks(random, name, count):
    """Blocks of one type, as bytes [count, bytes of a block]."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for offset in HALVES[name]:
        blocks[:, offset:offset + 2] = random_halves(random, count).view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":  # the exponents where the power of two is special
        special = np.array([0, 1, 2, 254, 255], dtype=np.uint8)[:count]
        blocks[:len(special), 0] = special
    return blocks


def main():
    here = pathlib.Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=here / "blocks.gguf")
    parser.add_argument("--blocks", type=int, default=2, help="of each type with 256 elements")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    writer = gguf.GGUFWriter(arguments.out, "blocks")
    writer.add_string("blocks.types", " ".join([*HALVES, "F16", "BF16"]))

    def add(name, blocks):
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, blocks, raw_dtype=kind)
        writer.add_tensor(name + ".values", gguf.quants.dequantize(blocks, kind))

    for name in HALVES:
        elements, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        count = arguments.blocks * (1 if elements == 256 else 3)
        add(name, random_blocks(random, name, count))
    halves = random_halves(random, 48 * arguments.blocks)
    add("F16", halves.view(np.float16).reshape(-1, 48))
    add("BF16", halves.view(np.uint8).reshape(-1, 96))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
