#!/usr/bin/env python3
"""Writes package_vectors.json: small weights as published Python packages store and read them.

Usage: make_package_vectors.py > package_vectors.json

Needs torch, compressed-tensors and transformers (made with 2.15.0, 0.20.0 and 5.23.0). The codes come
from compressed-tensors' compressors, the values from its decompressors and, for MXFP4 of gpt-oss and
for FP8 in blocks, from transformers; all in float32, so that they can be compared bit for bit.
"""
import json

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers.integrations import finegrained_fp8, mxfp4

torch.manual_seed(11)
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8",
          torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}
cases = []


def to_hex(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def case(name, config, tensors, expected):
    cases.append({
        "name": name, "config": config,
        "tensors": {k: {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "hex": to_hex(t)}
                    for k, t in tensors.items()},
        "matrices": {m: {"n": w.shape[0], "k": w.shape[1], "hex": to_hex(w.float())}
                     for m, w in expected.items()}})


def weights(n, k):
    return torch.randn(n, k) * 0.05


def scales_of(w, args):
    """Scale and zero point of each block as the package's own formulas give them."""
    n, k = w.shape
    if args.strategy == "tensor":
        low, high = w.min().reshape(1), w.max().reshape(1)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        blocks = w.reshape(n // rows, rows, k // columns, columns)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        size = args.group_size if args.strategy in ("group", "tensor_group") else k
        parts = w.reshape(n, k // size, size)
        low, high = parts.amin(2), parts.amax(2)
    gparam = generate_gparam(w.min(), w.max()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=gparam)
    return scale, zero, gparam


def compressed_tensors(name, fmt, n, k, stored_dtype=torch.float32, **options):
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=fmt)
    w = weights(n, k)
    scale, zero, gparam = scales_of(w, args)
    scale = scale.float() if scale.dtype == torch.float8_e4m3fn else scale.to(stored_dtype)
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    if gparam is not None:
        state["weight_global_scale"] = gparam.reshape(1)
    compressor = BaseCompressor.get_value_from_registry(fmt)
    stored = {k: v for k, v in compressor.compress(state, scheme).items() if v is not None}
    if args.symmetric:
        stored.pop("weight_zero_point", None)
    wide = dict(stored)  # decompressed in float32 whatever the scales are
    if wide["weight_scale"].dtype == torch.bfloat16:
        wide["weight_scale"] = wide["weight_scale"].float()
    if "fp4" in fmt:  # its decompressor would round to bfloat16
        unpacked = unpack_fp4_from_uint8(stored["weight_packed"], n, k, torch.float32)
        wide_scale = compressor._decompress_scale(stored["weight_scale"], torch.float32)
        values = dequantize(unpacked, wide_scale, args=args, global_scale=gparam)
    else:
        values = compressor.decompress(wide, scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}}}
    case(name, config, {f"m.{k}": v for k, v in stored.items()}, {"m": values})


def pack():
    base = {"num_bits": 4, "type": "int"}
    for dtype, text in ((torch.bfloat16, "BF16"), (torch.float32, "F32")):
        compressed_tensors(f"pack-quantized g32 {text}", "pack-quantized", 4, 64, dtype,
                           strategy="group", group_size=32, symmetric=True, **base)
    compressed_tensors("pack-quantized g32 asymmetric", "pack-quantized", 9, 64,
                       strategy="group", group_size=32, symmetric=False, **base)
    compressed_tensors("pack-quantized channel, padded", "pack-quantized", 3, 13,
                       strategy="channel", symmetric=True, **base)
    compressed_tensors("pack-quantized 8 bits", "pack-quantized", 5, 64, num_bits=8, type="int",
                       strategy="group", group_size=32, symmetric=False)


def others():
    compressed_tensors("int-quantized channel", "int-quantized", 3, 70, num_bits=8, type="int",
                       strategy="channel", symmetric=True)
    compressed_tensors("int-quantized 4 bits", "int-quantized", 3, 64, num_bits=4, type="int",
                       strategy="group", group_size=32, symmetric=True)
    compressed_tensors("float-quantized channel", "float-quantized", 3, 70, num_bits=8,
                       type="float", strategy="channel", symmetric=True)
    compressed_tensors("float-quantized tensor", "float-quantized", 3, 70, num_bits=8,
                       type="float", strategy="tensor", symmetric=True)
    compressed_tensors("float-quantized blocks", "float-quantized", 8, 64, num_bits=8,
                       type="float", strategy="block", block_structure=[4, 32], symmetric=True)
    compressed_tensors("nvfp4-pack-quantized", "nvfp4-pack-quantized", 4, 64, num_bits=4,
                       type="float", strategy="tensor_group", group_size=16, symmetric=True,
                       scale_dtype=torch.float8_e4m3fn)
    compressed_tensors_mx("mxfp4-pack-quantized", num_bits=4)


def compressed_tensors_mx(fmt, num_bits):
    compressed_tensors(fmt, fmt, 4, 64, num_bits=num_bits, type="float", strategy="group",
                       group_size=32, symmetric=True, scale_dtype=torch.uint8)


def fp8_blocks():
    w = weights(8, 60)
    stored = w.clamp(-1, 1).mul(100).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) * 1e-3 + 1e-3
    values = finegrained_fp8._dequantize_fp8_weight(stored, scales, [4, 24], torch.float32)
    case("transformers fp8 blocks", {"quant_method": "fp8", "weight_block_size": [4, 24]},
         {"m.weight": stored, "m.weight_scale_inv": scales}, {"m": values})


def gpt_oss():
    tensors, expected = {}, {}
    for name, rows in (("gate_up_proj", 6), ("down_proj", 4)):
        blocks = torch.randint(0, 256, (2, rows, 2, 16), dtype=torch.uint8)
        scales = torch.randint(110, 125, (2, rows, 2), dtype=torch.uint8)
        base = f"model.layers.3.mlp.experts.{name}"
        tensors[base + "_blocks"], tensors[base + "_scales"] = blocks, scales
        # [experts, in, out], gate and up interleaved along out
        turned = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        for e in range(2):
            shares = {"down_proj": turned[e].T} if name == "down_proj" else \
                {"gate_proj": turned[e][:, 0::2].T, "up_proj": turned[e][:, 1::2].T}
            for share, w in shares.items():
                expected[f"model.layers.3.mlp.experts.{e}.{share}"] = w
    case("transformers mxfp4 of gpt-oss", {"quant_method": "mxfp4"}, tensors, expected)


for part in (pack, others, fp8_blocks, gpt_oss):
    part()
print("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]")
