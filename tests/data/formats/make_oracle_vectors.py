#!/usr/bin/env python3
"""Writes oracle_vectors.json: small quantized matrices in every stored form, and their values.

Usage: make_oracle_vectors.py PATH_TO_format_oracle.py > oracle_vectors.json

The tensors come from the oracle's encoders; forms that it does not know are put together here from
its packing functions. Values are the oracle's own, except where several scales multiply each other:
there each product is rounded as src/checkpoint/source_coded.h says, and checked against the
oracle's to within two rounding steps. Standard library only.
"""
import importlib.util
import json
import random
import struct
import sys

spec = importlib.util.spec_from_file_location("format_oracle", sys.argv[1])
fo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fo)
rng = random.Random(20240607)


def weights(n, k):
    return [[fo.f32(rng.gauss(0, 0.05) * (1 + i % 3)) for i in range(k)] for _ in range(n)]


def hex_values(w):
    return "".join(struct.pack("<f", v).hex() for row in w for v in row)


cases = []


def case(name, config, tensors, expected, extra=None):
    """tensors {name: T}; expected {module: rows}."""
    cases.append({
        "name": name, "config": config, **(extra or {}),
        "tensors": {t: {"dtype": x.dtype, "shape": x.shape, "hex": x.data.hex()}
                    for t, x in tensors.items()},
        "matrices": {m: {"n": len(w), "k": len(w[0]), "hex": hex_values(w)}
                     for m, w in expected.items()}})


def simple(name, config, layout, w, opt, decode_opt=None, values=None, prefix="m"):
    t = fo.LAYOUTS[layout][0](w, opt)
    d = values or fo.LAYOUTS[layout][1](t, decode_opt or opt)
    if values:
        check_close(values, fo.LAYOUTS[layout][1](t, decode_opt or opt))
    case(name, config, {f"{prefix}.{s}": x for s, x in t.items()}, {prefix: d})


def check_close(a, b):
    for x, y in zip(fo.flat(a), fo.flat(b)):
        assert abs(x - y) <= 2 ** -22 * abs(y), (x, y)


def ct(weights, **rest):
    return {"quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, **rest}


def ct_int(bits, strategy, group=None, symmetric=True):
    return ct({"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
               "group_size": group, "dynamic": False, "actorder": None})


def compressed_tensors():
    simple("ct int4 g32", ct_int(4, "group", 32), "ct-pack", weights(4, 64), {"group": 32})
    simple("ct int4 g32 f32 scales", ct_int(4, "group", 32), "ct-pack", weights(2, 64),
           {"group": 32, "sdtype": "F32"})
    simple("ct int4 g32 zero points", ct_int(4, "group", 32, False), "ct-pack", weights(9, 64),
           {"group": 32, "sym": False})
    simple("ct int4 channel, padded words", ct_int(4, "channel"), "ct-pack", weights(3, 13), {})
    simple("ct int8 packed channel, padded words", ct_int(8, "channel"), "ct-pack", weights(3, 6),
           {"bits": 8})
    simple("ct int8 packed g32 zero points", ct_int(8, "group", 32, False), "ct-pack",
           weights(5, 64), {"bits": 8, "group": 32, "sym": False})
    simple("ct int8 channel", ct_int(8, "channel"), "ct-int8", weights(3, 70), {"group": None})
    simple("ct int8 g32", ct_int(8, "group", 32), "ct-int8", weights(3, 64), {"group": 32})
    unpacked_int4()
    act_order()
    byte_zero_points()
    simple("ct fp8 tensor", ct({"num_bits": 8, "type": "float", "strategy": "tensor"}), "fp8",
           weights(3, 70), {"gran": "tensor"})
    simple("ct fp8 channel", ct({"num_bits": 8, "type": "float", "strategy": "channel"}), "fp8",
           weights(3, 70), {"sdtype": "BF16"})
    block = {"gran": "block", "block": [4, 24]}
    simple("ct fp8 blocks, partial at the edges",
           ct({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 24]}),
           "fp8", weights(6, 60), block)
    simple("ct mxfp4", ct({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                           "scale_dtype": "torch.uint8"}), "mxfp4-ct", weights(3, 64), {})
    simple("ct nvfp4", ct({"num_bits": 4, "type": "float", "strategy": "tensor_group",
                           "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}), "nvfp4",
           weights(3, 64), {})
    mxfp8()


def mxfp8():
    w = weights(2, 64)
    codes, scales, values = [], [], []
    for row in w:
        for grp in fo.split(row, 32):
            b = fo.mx_scale_byte(max(map(abs, grp)), 8)
            q = [fo.e4m3_encode(fo.f32(x / fo.e8m0_decode(b))) for x in grp]
            scales.append(b)
            codes += q
            values += [fo.f32(fo.e4m3_decode(c) * fo.e8m0_decode(b)) for c in q]
    case("ct mxfp8", ct({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
                         "scale_dtype": "torch.uint8"}),
         {"m.weight": fo.tensor("F8_E4M3", [2, 64], codes),
          "m.weight_scale": fo.tensor("U8", [2, 2], scales)}, {"m": fo.split(values, 64)})


def unpacked_int4():
    w = weights(3, 64)
    q, s, _ = fo.per_group(w, {"group": 32}, fo.sym(7.5, -8, 7, "BF16"))
    case("ct int4 in bytes g32", ct_int(4, "group", 32),
         {"m.weight": fo.tensor("I8", [3, 64], fo.flat(q)),
          "m.weight_scale": fo.tensor("BF16", [3, 2], fo.flat(s))}, {"m": fo.dequant(q, s)})


def act_order():
    w = weights(4, 64)
    gi = [i // 32 for i in range(64)]
    rng.shuffle(gi)
    q, s = [], []
    for row in w:
        scales = [fo.bf16(max(abs(v) for v, g in zip(row, gi) if g == j) / 7.5) for j in range(2)]
        q.append([fo.clamp(round(v / scales[g]), -8, 7) for v, g in zip(row, gi)])
        s.append(scales)
    packed = [fo.pack_dense([c + 8 for c in row], 4) for row in q]
    case("ct int4 act-order", ct_int(4, "group", 32),
         {"m.weight_packed": fo.tensor("I32", [4, 8], fo.flat(packed)),
          "m.weight_scale": fo.tensor("BF16", [4, 2], fo.flat(s)),
          "m.weight_g_idx": fo.tensor("I32", [64], gi)},
         {"m": [[fo.f32(c * s[i][g]) for c, g in zip(q[i], gi)] for i in range(4)]})


def byte_zero_points():
    w = weights(4, 64)
    q, s, z = fo.per_group(w, {"group": 32}, fo.asym(-8, 7, "BF16", True))
    packed = [fo.pack_dense([c + 8 for c in row], 4) for row in q]
    case("ct int4 zero points in bytes", ct_int(4, "group", 32, False),
         {"m.weight_packed": fo.tensor("I32", [4, 8], fo.flat(packed)),
          "m.weight_scale": fo.tensor("BF16", [4, 2], fo.flat(s)),
          "m.weight_zero_point": fo.tensor("I8", [4, 2], fo.flat(z))},
         {"m": fo.dequant(q, s, z)})


def quark_config(weight, pack="reorder"):
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": [],
            "layer_quant_config": {}, "layer_type_quant_config": {},
            "export": {"pack_method": pack, "weight_format": "real_quantized"}}


INT4_CHANNEL = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}


def quark():
    for pack in ("reorder", "order"):
        opt = {"reorder": pack == "reorder"}
        simple(f"quark int4 channel {pack}", quark_config(INT4_CHANNEL, pack), "quark-int4",
               weights(3, 72), opt)
        simple(f"quark int4 g32 {pack}",
               quark_config({"dtype": "int4", "qscheme": "per_group", "group_size": 32,
                             "symmetric": True}, pack), "quark-int4", weights(16, 64),
               {"group": 32, **opt})
        progressive(pack, opt)
    uint4_groups()
    for gran, scheme in (("tensor", "per_tensor"), ("channel", "per_channel")):
        w = weights(3, 70)
        t = fo.fp8_enc(w, {"gran": gran})
        d = fo.fp8_dec(t, {"gran": gran})
        shape = [] if gran == "tensor" else [3]
        t["weight_scale"] = t["weight_scale"]._replace(shape=shape)
        case(f"quark fp8 {scheme}", quark_config({"dtype": "fp8_e4m3", "qscheme": scheme}),
             {f"m.{s}": x for s, x in t.items()}, {"m": d})
    t = fo.ct_int8_enc(weights(3, 70), {"sdtype": "F32"})
    d = fo.ct_int8_dec(t, {})
    t["weight_scale"] = t["weight_scale"]._replace(shape=[3])
    case("quark int8 per_channel", quark_config({"dtype": "int8", "qscheme": "per_channel",
                                                 "symmetric": True}),
         {f"m.{s}": x for s, x in t.items()}, {"m": d})
    simple("quark mxfp4", quark_config({"dtype": "fp4", "qscheme": "per_group", "group_size": 32}),
           "mxfp4-quark", weights(3, 64), {})
    simple("quark nvfp4", quark_config([
        {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True}]), "nvfp4",
        weights(3, 64), {"flavour": "modelopt"})


def progressive(pack, opt):
    t = fo.quark_w4a8_enc(weights(3, 72), opt)
    s1, s2 = fo.values(t["weight_scale"])[0], fo.values(t["weight_scale_2"])
    q = fo.quark_int4_dec({"weight": t["weight"],
                           "weight_scale": fo.tensor("F32", [3], [1.0] * 3)}, opt)
    values = [[fo.f32(c * fo.f32(s * s1)) for c in row] for row, s in zip(q, s2)]
    check_close(values, fo.quark_w4a8_dec(t, opt))
    stages = [{"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}, INT4_CHANNEL]
    case(f"quark w4a8 {pack}", quark_config(stages, pack), {f"m.{s}": x for s, x in t.items()},
         {"m": values})


def uint4_groups():
    w = weights(16, 64)
    q, s, z = fo.per_group(w, {"group": 32}, fo.asym(0, 15, "F32", True))
    pack = lambda m: [fo.pack_nibbles(r, fo.ORDER) for r in fo.transpose(m)]
    case("quark uint4 g32", quark_config({"dtype": "uint4", "qscheme": "per_group",
                                          "group_size": 32, "symmetric": False}),
         {"m.weight": fo.tensor("I32", [64, 2], fo.flat(pack(q))),
          "m.weight_scale": fo.tensor("F32", [2, 16], fo.flat(fo.transpose(s))),
          "m.weight_zero_point": fo.tensor("I32", [2, 2], fo.flat(pack(z)))},
         {"m": fo.dequant(q, s, z)})


def gptq_config(**options):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
            "checkpoint_format": "gptq", "lm_head": False, **options}


def words():
    for v2 in (False, True):
        fmt = {"checkpoint_format": "gptq_v2" if v2 else "gptq"}
        simple(f"{fmt['checkpoint_format']} sym", gptq_config(**fmt), "gptq", weights(8, 64),
               {"group": 32, "v2": v2})
        simple(f"{fmt['checkpoint_format']} asym", gptq_config(sym=False, **fmt), "gptq",
               weights(16, 64), {"group": 32, "v2": v2, "sym": False})
    gi = [i // 32 for i in range(64)]
    rng.shuffle(gi)
    simple("gptq act-order", gptq_config(desc_act=True), "gptq", weights(8, 64), {"g_idx": gi})
    simple("gptq one group", gptq_config(group_size=-1), "gptq", weights(8, 96), {"group": 0})
    t = fo.gptq_enc(weights(8, 64), {"group": 32, "v2": True})
    case("gptq that says v1 and stores v2 zeros", gptq_config(),
         {f"m.{s}": x for s, x in t.items()}, {"m": fo.gptq_dec(t, {"v2": True})})
    simple("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
                   "version": "gemm"}, "awq", weights(24, 64), {"group": 32})


def fp8():
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    simple("fp8 blocks", {**config, "weight_block_size": [4, 24]}, "fp8", weights(10, 60),
           {"gran": "block", "block": [4, 24], "name": "weight_scale_inv"})
    simple("fp8 per tensor", {**config, "activation_scheme": "static"}, "fp8", weights(3, 20),
           {"gran": "tensor"})


def modelopt():
    simple("modelopt nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4",
           weights(3, 64), {"flavour": "modelopt"})


def gpt_oss():
    """Two experts; gate and up rows are interleaved."""
    tensors, expected = {}, {}
    for name, rows in (("gate_up_proj", 6), ("down_proj", 4)):
        parts = [fo.mx_enc(weights(rows, 64), {}, ("blocks", "scales")) for _ in range(2)]
        base = f"model.layers.0.mlp.experts.{name}"
        tensors[base + "_blocks"] = fo.T("U8", [2, rows, 2, 16],
                                         b"".join(p["blocks"].data for p in parts))
        tensors[base + "_scales"] = fo.T("U8", [2, rows, 2],
                                         b"".join(p["scales"].data for p in parts))
        for e, p in enumerate(parts):
            d = fo.mx_dec(p, {}, ("blocks", "scales"))
            shares = {"down_proj": d} if name == "down_proj" else \
                {"gate_proj": d[0::2], "up_proj": d[1::2]}
            for share, rows_of in shares.items():
                expected[f"model.layers.0.mlp.experts.{e}.{share}"] = rows_of
    case("mxfp4 of gpt-oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
         tensors, expected)


for part in (compressed_tensors, quark, words, fp8, modelopt, gpt_oss):
    part()
print("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]")
