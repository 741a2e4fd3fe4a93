#!/usr/bin/env python3
"""Checks that nibble computes with other programs' quantized checkpoints what they compute.

usage: check_foreign.py NIBBLE_BINARY MODEL_DIR [--text FILE] [--layers N] [--only WORD]
                        [--autoawq DIR] [--autogptq DIR]

Quantizes MODEL_DIR, a small Llama in BF16 or F32, to each form that docs/formats.md lists, with the
functions of the public package that belongs to the form, and compares perplexities over a text:
nibble's of the stored files, and that of the model in PyTorch with the weights that the package's
own functions decode from the same tensors and with activations that they round. Everything but the
products is F32. Checkpoints that contradict themselves, and forms of activations that nothing here
computes, must be refused with the name of the tensor or field.

transformers' FP8 layer has no product on CPUs: its activations are rounded by the lines of this
file, after the formula of its kernel, and INT8 ones per token by vLLM's. Zero points of gptq_v2 and
compressed-tensors' act-order, which that package has dropped, are applied here too. The reference
leaves out what nibble does, the rounding of activations to 4-bit floats, and where a file asks for
one dynamic scale for all activations it makes one for each token, as nibble does.

With `--layers 2` it takes some minutes, with the whole model longer. The first run compiles Quark's
extension, which needs a C++ compiler.

needs: pip install torch transformers accelerate safetensors compressed-tensors nvidia-modelopt
amd-quark, and for AWQ and GPTQ the unpacked packages autoawq (pip download --no-deps
--no-build-isolation --no-binary :all: autoawq) and auto-gptq (pip download --no-deps auto-gptq),
whose single files run where the packages themselves cannot be installed. Forms whose package is
missing are listed as skipped. Known to work: PyTorch 2.15, transformers 5.24, compressed-tensors
0.20, modelopt 0.47, quark 0.13, autoawq 0.2.9, auto-gptq 0.7.1.
"""
import argparse
import copy
import importlib
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types
from typing import Callable, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 256
CHARACTERS = 2500  # of the text
# Largest relative differences of perplexities. With activations as they are both sides compute the
# same sums in another order, which gave at most 3e-7. Rounded activations differ by a code where a
# value lies at a tie, and later layers round that difference up: for these forms only gate_proj and
# up_proj of the last layer are quantized. One such code gave 2e-5, without any it is 3e-7; rounding
# left out gave 3e-4 and more. compressed-tensors divides INT8 rows by 127.5, nibble as vLLM by 127.
EXACT = 1e-5
ROUNDED = 1e-4
OTHER_SCALE = 5e-4


class Form(NamedTuple):
    name: str
    package: str
    make: Callable  # (model, inputs) -> (tensors, quantization_config); makes model the reference
    limit: float


class Refusal(NamedTuple):
    name: str
    form: str  # whose files are changed
    change: Callable  # (quantization_config, tensors): in place
    words: str  # that the message must have


def linears(model):
    """name, module of what is quantized."""
    return [(name, module) for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name not in left_out(model)]


def left_out(model):
    """Names of linear layers that are not: lm_head, and what main() says."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
            and (name == "lm_head" or not getattr(model, "quantized", re.compile("")).search(name))]


def set_weight(module, weight):
    assert weight.dtype == torch.float32 and weight.shape == module.weight.shape
    module.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)


def round_inputs(module, function):
    module.register_forward_pre_hook(lambda _, arguments: (function(arguments[0]),))


def each(make_one):
    """make_one(module, largest input) -> stored tensors, weight, and how inputs are rounded."""
    def make(model, inputs):
        tensors = {}
        for name, module in linears(model):
            stored, weight, rounding = make_one(module, inputs[name])
            tensors |= {f"{name}.{suffix}": value for suffix, value in stored.items()}
            set_weight(module, weight)
            if rounding is not None:
                round_inputs(module, rounding)
        return tensors
    return make


def plain(model, _):
    return {f"{name}.weight": module.weight.data for name, module in linears(model)}, None


# --- compressed-tensors ---

def compressed(weights, activations=None, layout=None, half_scales=None, other=None, rounding=None):
    """`other`: arguments for mlp layers, which makes the checkpoint one of mixed precision.
    `rounding`: of inputs, where it shall not be the package's."""
    def make(model, inputs):
        from compressed_tensors.quantization import (QuantizationConfig, QuantizationScheme,
                                                     apply_quantization_config)
        from compressed_tensors.compressors import compress_module, decompress_module
        from compressed_tensors.compressors.format import infer_model_format
        from compressed_tensors.utils import get_direct_state_dict
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights,
                                                input_activations=activations, format=layout)}
        if other is not None:
            groups = {"group_0": QuantizationScheme(targets=["re:.*self_attn.*"], weights=weights,
                                                    input_activations=activations),
                      "group_1": QuantizationScheme(targets=["re:.*mlp.*"], weights=other)}
        config = QuantizationConfig(config_groups=groups, ignore=left_out(model),
                                    quantization_status="frozen")
        apply_quantization_config(model, config, run_compressed=False)
        tensors = {}
        kind = infer_model_format(model, layout)
        for name, module in linears(model):
            set_scales(module, inputs[name], half_scales)
            compress_module(module)
            state = {key: value.data for key, value in get_direct_state_dict(module).items()
                     if value is not None}
            tensors |= {f"{name}.{key}": value.clone() for key, value in state.items()}
            if "weight_shape" in state:
                module.weight_shape = torch.nn.Parameter(state["weight_shape"],
                                                         requires_grad=False)
            decompress(module, state, decompress_module)
            if rounding is not None:
                module.quantization_enabled = False
                round_inputs(module, rounding)
        config.format = getattr(kind, "value", kind)
        config.quantization_status = "compressed"
        stored = json.loads(config.model_dump_json())
        return tensors, stored
    return make


def set_scales(module, largest, half_scales):
    """Scales by the package's rule for the minimum and maximum of what they cover."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    args = module.quantization_scheme.weights
    w = module.weight.data
    if args.strategy == "block":
        rows, columns = args.block_structure
        parts = w.reshape(w.shape[0] // rows, rows, w.shape[1] // columns, columns)
        parts = parts.permute(0, 2, 1, 3).flatten(2)
    elif args.strategy in ("group", "tensor_group"):
        parts = w.unflatten(-1, (-1, args.group_size))
    else:
        parts = w.unsqueeze(1) if args.strategy == "channel" else w.reshape(1, -1)
    over = None
    if args.strategy == "tensor_group":
        over = generate_gparam(w.min(), w.max())
        module.weight_global_scale.data = over.reshape(1)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=over)
    module.weight_scale.data = scale.to(half_scales or torch.float32)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero
    inputs = module.quantization_scheme.input_activations
    if inputs is not None and inputs.dynamic is False:
        ends = 127.0 if inputs.type == "int" else 448.0
        # A scale that is too small for some values, whose codes must become the ends of the range.
        module.input_scale.data = torch.tensor([largest * 0.6 / ends])
        if hasattr(module, "input_zero_point") and not inputs.symmetric:
            module.input_zero_point.data = torch.tensor([3], dtype=torch.int8)
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data = torch.tensor([448.0 * 6 / largest])


def decompress(module, state, decompress_module):
    """The package decodes to the type of the scales or, 4-bit floats, to BF16; in F32 the same
    functions do not round the product of code and scale."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    args = module.quantization_scheme.weights
    module.weight_scale.data = module.weight_scale.data.clone()
    if module.weight_scale.is_floating_point() and module.weight_scale.element_size() == 2:
        module.weight_scale.data = module.weight_scale.data.float()
    decompress_module(module)
    if args.num_bits == 4 and args.type == "float":
        packed, scale = state["weight_packed"], state["weight_scale"]
        scale = decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)
        weight = dequantize(codes, scale.float(), args=args, dtype=torch.float32,
                            global_scale=state.get("weight_global_scale"))
        module.quantization_scheme = module.quantization_scheme.model_copy(
            update={"input_activations": None})
    else:
        weight = module.weight.data.float()
    if hasattr(module, "weight_packed"):
        del module.weight_packed
    set_weight(module, weight)


def act_order(bits, symmetric):
    def make_one(module, _):
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
        from compressed_tensors.quantization.utils import calculate_qparams
        args = QuantizationArgs(num_bits=bits, strategy="group", group_size=64,
                                symmetric=symmetric)
        w = module.weight.data
        order = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(1))
        back = torch.argsort(order)
        parts = w[:, order].unflatten(-1, (-1, 64))
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        codes = quantize(w[:, order], scale, zero, args, dtype=torch.int8)
        weight = dequantize(codes, scale, zero, args)[:, back]
        stored = {"weight_packed": pack_to_int32(codes[:, back].contiguous(), bits),
                  "weight_scale": scale, "weight_shape": torch.tensor(w.shape),
                  "weight_g_idx": (back // 64).to(torch.int32)}
        if not symmetric:
            stored["weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0).contiguous()
        return stored, weight, None

    def make(model, inputs):
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                  "quantization_status": "compressed", "ignore": ["lm_head"],
                  "config_groups": {"group_0": {
                      "targets": ["Linear"], "input_activations": None, "output_activations": None,
                      "weights": {"num_bits": bits, "type": "int", "symmetric": symmetric,
                                  "strategy": "group", "group_size": 64, "actorder": "group",
                                  "dynamic": False, "block_structure": None,
                                  "observer": "minmax", "observer_kwargs": {}}}}}
        return each(make_one)(model, inputs), config
    return make


def compressed_forms():
    weight = {"type": "int", "num_bits": 4}
    int8 = {"type": "int", "num_bits": 8}
    fp8 = {"type": "float", "num_bits": 8}
    fp4 = {"type": "float", "num_bits": 4}
    token = {"strategy": "token", "dynamic": True}
    static = {"strategy": "tensor", "dynamic": False}
    group = {"strategy": "group"}
    local = {"strategy": "tensor_group", "group_size": 16}
    channel = {"strategy": "channel"}
    tensor = {"strategy": "tensor"}
    zeros = {"symmetric": False}
    block = {"strategy": "block", "block_structure": [128, 128]}
    form = [
        ("int4 g32", compressed(weight | group | {"group_size": 32}), EXACT),
        ("int4 g128", compressed(weight | group | {"group_size": 128}), EXACT),
        ("int4 g128, scales in bf16",
         compressed(weight | group | {"group_size": 128}, half_scales=torch.bfloat16), EXACT),
        ("int4 g128, scales in f16",
         compressed(weight | group | {"group_size": 128}, half_scales=torch.float16), EXACT),
        ("int4 channel", compressed(weight | channel), EXACT),
        ("int4 tensor", compressed(weight | tensor), EXACT),
        ("int4 g32, zero points", compressed(weight | group | zeros | {"group_size": 32}), EXACT),
        ("int4 g128, zero points", compressed(weight | group | zeros | {"group_size": 128}), EXACT),
        ("int4 channel, zero points", compressed(weight | channel | zeros), EXACT),
        ("int4 g64, act-order", act_order(4, True), EXACT),
        ("int4 g64, act-order, zero points", act_order(4, False), EXACT),
        ("int8 packed channel", compressed(int8 | channel), EXACT),
        ("int8 packed g128", compressed(int8 | group | {"group_size": 128}), EXACT),
        ("int8 packed tensor", compressed(int8 | tensor), EXACT),
        ("int8 packed channel, zero points", compressed(int8 | channel | zeros), EXACT),
        ("int8 packed g64, zero points",
         compressed(int8 | group | zeros | {"group_size": 64}), EXACT),
        ("int8 packed g64, act-order", act_order(8, True), EXACT),
        ("int8 bytes channel", compressed(int8 | channel, layout="int-quantized"), EXACT),
        ("int8 bytes channel, zero points",
         compressed(int8 | channel | zeros, layout="int-quantized"), EXACT),
        ("int8 bytes tensor, zero points",
         compressed(int8 | tensor | zeros, layout="int-quantized"), EXACT),
        ("int8 bytes blocks", compressed(int8 | block, layout="int-quantized"), EXACT),
        ("int4 bytes g128",
         compressed(weight | group | {"group_size": 128}, layout="int-quantized"), EXACT),
        ("fp8 channel", compressed(fp8 | channel, layout="float-quantized"), EXACT),
        ("fp8 tensor", compressed(fp8 | tensor, layout="naive-quantized"), EXACT),
        ("fp8 g128",
         compressed(fp8 | group | {"group_size": 128}, layout="naive-quantized"), EXACT),
        ("fp8 blocks", compressed(fp8 | block, layout="float-quantized"), EXACT),
        ("mxfp4", compressed(fp4 | group | {
            "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}), EXACT),
        ("mxfp4, inputs too", compressed(
            fp4 | group | {"group_size": 32, "scale_dtype": torch.uint8,
                           "zp_dtype": torch.uint8},
            fp4 | group | {"group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8,
                           "dynamic": True}), EXACT),
        ("nvfp4", compressed(fp4 | local | {"scale_dtype": torch.float8_e4m3fn}), EXACT),
        ("nvfp4, inputs too", compressed(
            fp4 | local | {"scale_dtype": torch.float8_e4m3fn},
            fp4 | local | {"scale_dtype": torch.float8_e4m3fn, "dynamic": "local"}), EXACT),
        ("mixed: int4 g128, fp8 channel", compressed(
            weight | group | {"group_size": 128}, other=fp8 | channel), EXACT),
        ("int8 channel, int8 token", compressed(int8 | channel, int8 | token, rounding=int8_rows),
         ROUNDED),
        ("int8 channel, int8 token by package", compressed(int8 | channel, int8 | token),
         OTHER_SCALE),
        ("int8 channel, int8 dynamic tensor", compressed(
            int8 | channel, int8 | tensor | {"dynamic": True}, rounding=int8_rows), ROUNDED),
        ("int8 channel, int8 static", compressed(int8 | channel, int8 | static), ROUNDED),
        ("int8 tensor, int8 static", compressed(int8 | tensor, int8 | static), ROUNDED),
        ("int4 channel, int8 token", compressed(
            weight | channel, int8 | token, layout="pack-quantized", rounding=int8_rows), ROUNDED),
        ("int4 bytes channel, int8 token",
         compressed(weight | channel, int8 | token, rounding=int8_rows), ROUNDED),
        ("fp8 channel, fp8 token", compressed(fp8 | channel, fp8 | token), ROUNDED),
        ("fp8 tensor, fp8 token", compressed(fp8 | tensor, fp8 | token), ROUNDED),
        ("fp8 tensor, fp8 static", compressed(fp8 | tensor, fp8 | static), ROUNDED),
        ("fp8 channel, fp8 static", compressed(fp8 | channel, fp8 | static), ROUNDED),
        ("fp8 blocks, fp8 per 128", compressed(
            fp8 | block, fp8 | group | {"group_size": 128, "dynamic": True}), ROUNDED),
    ]
    return [Form(name, "compressed-tensors", make, limit) for name, make, limit in form]


# --- GPTQ, AWQ ---

def bare_package(name, folder):
    """Makes single files of a package importable whose __init__ wants what is not there."""
    for depth in range(len(parts := name.split("."))):
        module = types.ModuleType(".".join(parts[:depth + 1]))
        module.__path__ = [str(pathlib.Path(folder, *parts[:depth + 1]))]
        sys.modules.setdefault(module.__name__, module)


def affine(weight, group_size, symmetric, order=None):
    """Scales and zero points [n, groups] of 4-bit codes, as GPTQ's Quantizer finds them."""
    weight = weight if order is None else weight[:, order]
    parts = weight.unflatten(-1, (-1, group_size if group_size > 0 else weight.shape[1]))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(low.abs(), high)
        low = -high
    scale = (high - low) / 15
    zero = torch.full_like(scale, 8.0) if symmetric else torch.round(-low / scale)
    return scale, zero


def gptq(group_size, symmetric, order=False, v2=False):
    def make(folder):
        bare_package("auto_gptq.nn_modules.qlinear", folder)
        kind = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear

        def make_one(module, _):
            n, k = module.weight.shape
            size = group_size if group_size > 0 else k
            perm = torch.randperm(k, generator=torch.Generator().manual_seed(2))
            perm = perm if order else torch.arange(k)
            scale, zero = affine(module.weight.data, size, symmetric, perm)
            if symmetric is False:
                zero = zero.clamp(min=1)  # AutoGPTQ stores it less one, in four bits
            scale = scale.half().float()
            index = (torch.argsort(perm) // size).to(torch.int32)
            layer = kind(4, group_size, k, n, False)
            half = torch.nn.Linear(k, n, bias=False, dtype=torch.float32)
            half.weight.data = module.weight.data
            codes = torch.round(module.weight.data / scale[:, index] + zero[:, index])
            half.weight.data = scale[:, index] * (codes.clamp(0, 15) - zero[:, index])
            layer.pack(half, scale.clone(), zero.clone(), index)
            layer.scales = layer.scales.float()
            weight = layer(torch.eye(k)).t().contiguous()
            stored = {"qweight": layer.qweight, "qzeros": layer.qzeros, "g_idx": layer.g_idx,
                      "scales": layer.scales.half()}
            if v2:
                stored["qzeros"] = layer.qzeros + 0x11111111  # each less than 15
            return stored, weight, None
        return make_one
    return make, {"quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": symmetric,
                  "desc_act": order, "damp_percent": 0.1, "true_sequential": True,
                  "checkpoint_format": "gptq_v2" if v2 else "gptq"}


def awq(group_size):
    def make(folder):
        bare_package("awq.utils", folder)
        bare_package("awq.modules.linear", folder)
        gemm = importlib.import_module("awq.modules.linear.gemm")

        def make_one(module, _):
            scale, zero = affine(module.weight.data, group_size, False)
            scale = scale.half().float()
            size = group_size if group_size > 0 else module.weight.shape[1]
            half = torch.nn.Linear(*reversed(module.weight.shape), bias=False)
            wide = [part.repeat_interleave(size, dim=1) for part in (scale, zero)]
            codes = torch.round(module.weight.data / wide[0] + wide[1]).clamp(0, 15)
            half.weight.data = (codes - wide[1]) * wide[0]
            layer = gemm.WQLinear_GEMM.from_linear(half, 4, group_size, scales=scale.t(),
                                                   zeros=zero.t())
            weight = gemm.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4,
                                          size)
            stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
            return stored, weight.t().contiguous(), None
        return make_one
    return make, {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True,
                  "version": "gemm", "modules_to_not_convert": None}


def word_form(name, package, folder, made):
    make_one, config = made

    def make(model, inputs):
        if folder is None:
            raise ModuleNotFoundError(f"--{package.replace('-', '')} DIR is not given")
        return each(make_one(folder))(model, inputs), dict(config)
    return Form(name, package, make, EXACT)


def word_forms(arguments):
    one = [("int4 g128, symmetric", gptq(128, True)), ("int4 g32, symmetric", gptq(32, True)),
           ("int4 channel, symmetric", gptq(-1, True)),
           ("int4 g128, zero points", gptq(128, False)),
           ("int4 g64, act-order", gptq(64, True, True)),
           ("int4 g64, act-order, zero points", gptq(64, False, True)),
           ("int4 g64, zero points, gptq_v2", gptq(64, False, v2=True))]
    two = [("int4 g128, gemm", awq(128)), ("int4 g64, gemm", awq(64))]
    return [word_form(name, "auto-gptq", arguments.autogptq, made) for name, made in one] + \
        [word_form(name, "autoawq", arguments.autoawq, made) for name, made in two]


# --- FP8 of transformers ---

def fp8_rounded(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def fp8_rows(x, group=None):
    """What the kernel does with dynamic activations: a scale for each row or each `group` of it."""
    parts = x.unflatten(-1, (-1, group or x.shape[-1]))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return fp8_rounded(parts, scale).flatten(-2)


def transformers_fp8(blocks, static=False, channel=False):
    def make_one(module, largest):
        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
        w = module.weight.data
        size = (128, 128) if blocks else (1, w.shape[1]) if channel else tuple(w.shape)
        config = FineGrainedFP8Config(weight_block_size=size)
        owner = types.SimpleNamespace(quantization_config=config)
        stored = Fp8Quantize(owner).convert({"weight": w})
        weight = Fp8Dequantize(owner)._dequantize_one(stored["weight"],
                                                      stored["weight_scale_inv"], torch.float32)
        if not blocks and not channel:
            stored["weight_scale_inv"] = stored["weight_scale_inv"].reshape(())
        if static:
            scale = torch.tensor(largest * 0.6 / 448)
            stored["activation_scale"] = scale
            return stored, weight, lambda x: fp8_rounded(x, scale)
        return stored, weight, lambda x: fp8_rows(x, 128 if blocks else None)

    def make(model, inputs):
        config = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic",
                  "weight_block_size": [128, 128] if blocks else None,
                  "modules_to_not_convert": ["lm_head"]}
        return each(make_one)(model, inputs), config
    return make


def fp8_forms():
    return [Form("fp8 blocks, fp8 per 128", "transformers", transformers_fp8(True), ROUNDED),
            Form("fp8 channel, fp8 token", "transformers",
                 transformers_fp8(False, channel=True), ROUNDED),
            Form("fp8 tensor, fp8 token", "transformers", transformers_fp8(False), ROUNDED),
            Form("fp8 tensor, fp8 static", "transformers",
                 transformers_fp8(False, static=True), ROUNDED)]


# --- ModelOpt ---

def modelopt(algorithm):
    def make(model, inputs):
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
        other = mtq.quantize(copy.deepcopy(model), copy.deepcopy(getattr(mtq, algorithm)),
                             lambda calibrated: calibrated(inputs["ids"]))
        other.quantized = getattr(model, "quantized", re.compile(""))
        for name, module in other.named_modules():
            if isinstance(module, torch.nn.Linear) and name in left_out(model):
                module.weight_quantizer.disable()
                module.input_quantizer.disable()
        for _, module in linears(other):
            module.input_quantizer.amax = module.input_quantizer.amax * 0.6  # some are cut
        rounding = {name: copy.deepcopy(module.input_quantizer) for name, module in linears(other)}
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(other, dtype=torch.float32, export_dir=folder)
            stored = load_file(pathlib.Path(folder, "model.safetensors"))
            config = json.loads(pathlib.Path(folder, "config.json").read_text())
        for name, module in linears(model):
            codes, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
            shape = module.weight.shape
            if codes.dtype == torch.uint8:
                weight = NVFP4QTensor(shape, torch.float32, codes).dequantize(
                    scale=scale, double_scale=stored[f"{name}.weight_scale_2"],
                    block_sizes={-1: 16})
            else:
                weight = FP8QTensor(shape, torch.float32, codes).dequantize(scale=scale)
                round_inputs(module, rounding[name])
            set_weight(module, weight)
        return stored, config["quantization_config"]
    return make


def modelopt_forms():
    return [Form("fp8 tensor, fp8 static", "modelopt", modelopt("FP8_DEFAULT_CFG"), ROUNDED),
            Form("nvfp4, inputs too", "modelopt", modelopt("NVFP4_DEFAULT_CFG"), EXACT)]


# --- Quark ---

def int8_rows(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def quark(weight, activations=None, pack="reorder", rounding=None):
    """`weight`, `activations`: functions of Quark's module of configs that make specs. `rounding`:
    of inputs, where it shall not be the package's."""
    def make(model, inputs):
        from quark.torch import ModelQuantizer, export_safetensors
        from quark.torch.quantization.config import config as specs
        layers = specs.QLayerConfig(weight=weight(specs),
                                    input_tensors=activations(specs) if activations else None)
        quantizer = ModelQuantizer(specs.QConfig(global_quant_config=layers,
                                                 exclude=left_out(model)))
        other = quantizer.quantize_model(copy.deepcopy(model), [inputs["ids"]])
        other = quantizer.freeze(other.eval())
        names = dict(linears(model))
        with tempfile.TemporaryDirectory() as folder:
            reference = copy.deepcopy(other)
            if hasattr(model, "quantized"):
                reference.quantized = model.quantized
            with torch.no_grad():
                export_safetensors(other, folder, pack_method=pack)
            stored = {}
            for path in pathlib.Path(folder).glob("*.safetensors"):
                stored |= load_file(path)
            config = json.loads(pathlib.Path(folder, "config.json").read_text())
        if rounding is not None:
            for _, module in linears(unrounded(reference)):
                round_inputs(module, rounding)
        stored = {name: value for name, value in stored.items()
                  if name.rsplit(".", 1)[0] in names}
        return stored, config["quantization_config"], reference
    return make


def quark_forms():
    def fp8(specs):
        return specs.FP8E4M3PerTensorSpec(observer_method="min_max",
                                          is_dynamic=False).to_quantization_spec()

    def fp8_dynamic(specs):
        return specs.FP8E4M3PerTensorSpec(observer_method="min_max",
                                          is_dynamic=True).to_quantization_spec()

    def fp8_channel(specs):
        return specs.FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec()

    def fp8_token(specs):
        return specs.FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True).to_quantization_spec()

    def int4_channel(specs):
        return specs.Int4PerChannelSpec(ch_axis=0).to_quantization_spec()

    def int4_group(specs):
        return specs.Int4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec()

    def uint4_group(specs):
        return specs.Uint4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec()

    def int8_channel(specs):
        return specs.Int8PerChannelSpec(ch_axis=0, symmetric=True, scale_type="float",
                                        round_method="half_even",
                                        is_dynamic=False).to_quantization_spec()

    def int8_tensor(specs):
        return specs.Int8PerTensorSpec(observer_method="min_max", symmetric=True,
                                       scale_type="float", round_method="half_even",
                                       is_dynamic=False).to_quantization_spec()

    def mxfp4(specs):
        return specs.FP4PerGroupSpec(ch_axis=-1, group_size=32, scale_format="e8m0",
                                     scale_calculation_mode="even",
                                     is_dynamic=False).to_quantization_spec()

    def mxfp4_dynamic(specs):
        return specs.FP4PerGroupSpec(ch_axis=-1, group_size=32, scale_format="e8m0",
                                     scale_calculation_mode="even",
                                     is_dynamic=True).to_quantization_spec()

    def progressive(specs):
        return [fp8(specs), int4_channel(specs)]

    forms = [("int4 g128, reorder", quark(int4_group), EXACT),
             ("int4 g128, order", quark(int4_group, pack="order"), EXACT),
             ("uint4 g128, reorder", quark(uint4_group), EXACT),
             ("uint4 g128, order", quark(uint4_group, pack="order"), EXACT),
             ("int4 channel", quark(int4_channel), EXACT),
             ("int4 channel, order", quark(int4_channel, pack="order"), EXACT),
             ("int8 channel", quark(int8_channel), EXACT),
             ("int8 tensor", quark(int8_tensor), EXACT),
             ("mxfp4", quark(mxfp4), EXACT),
             ("fp8 tensor", quark(fp8), EXACT),
             ("int4 over fp8, int8 token", quark(progressive, rounding=int8_rows), ROUNDED),
             ("int8 channel, int8 static", quark(int8_channel, int8_tensor), ROUNDED),
             ("fp8 tensor, fp8 static", quark(fp8, fp8), ROUNDED),
             ("fp8 channel, fp8 token", quark(fp8_channel, fp8_token), ROUNDED),
             ("fp8 tensor, fp8 dynamic tensor",
              quark(fp8, fp8_dynamic, rounding=fp8_rows), ROUNDED)]
    return [Form(name, "quark", make, limit) for name, make, limit in forms]


# --- Refusals ---

def first_group(config):
    return config["config_groups"]["group_0"]


def refusals():
    ct, packed = "compressed-tensors", "compressed-tensors: int4 g128"
    int8 = "compressed-tensors: int8 channel, int8 token"
    gptq_config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True,
                   "desc_act": False}
    awq_config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
                  "version": "gemm"}

    def replace(new):
        def change(config, _):
            config.clear()
            config.update(new)
        return change

    def update(where, **values):
        return lambda config, _: where(config).update(values)

    def activations(config):
        return first_group(config)["input_activations"]

    def drop(suffix):
        def change(_, tensors):
            for name in [name for name in tensors if name.endswith(suffix)]:
                del tensors[name]
        return change

    return [
        Refusal("AWQ's tensors, config of GPTQ", "autoawq: int4 g128, gemm", replace(gptq_config),
                "qweight|qzeros|scales"),
        Refusal("GPTQ's tensors, config of AWQ", "auto-gptq: int4 g128, symmetric",
                replace(awq_config), "qweight|qzeros|scales"),
        Refusal("compressed-tensors, config of GPTQ", packed, replace(gptq_config),
                "weight_packed"),
        Refusal("compressed-tensors, config of AWQ", packed, replace(awq_config), "weight_packed"),
        Refusal("GPTQ's tensors, config of compressed-tensors", "auto-gptq: int4 g128, symmetric",
                replace({"quant_method": ct, "format": "pack-quantized", "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": {
                        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}}}),
                "qweight"),
        Refusal("FP8 codes, config of INT8", "compressed-tensors: fp8 channel, fp8 token",
                update(lambda config: first_group(config)["weights"], type="int"), "weight"),
        Refusal("NVFP4 of ModelOpt, config says FP8", "modelopt: nvfp4, inputs too",
                update(lambda config: config, quant_algo="FP8"), "weight"),
        Refusal("scales cut off", packed, drop("weight_scale"), "weight_scale"),
        Refusal("static scales cut off", "compressed-tensors: fp8 tensor, fp8 static",
                drop("input_scale"), "input_scale"),
        Refusal("zero points of symmetric weights", "compressed-tensors: int4 g128, zero points",
                update(lambda config: first_group(config)["weights"], symmetric=True),
                "weight_zero_point"),
        Refusal("activations with zero points", int8, update(activations, symmetric=False),
                "zero points"),
        Refusal("4-bit integers as activations", int8, update(activations, num_bits=4), "4-bit"),
        Refusal("16-bit activations", int8, update(activations, num_bits=16), "16-bit"),
        Refusal("activations in groups of 64", "compressed-tensors: fp8 blocks, fp8 per 128",
                update(activations, group_size=64), "group"),
        Refusal("quantized outputs", int8,
                update(first_group, output_activations={"num_bits": 8, "type": "int"}),
                "output_activations"),
        Refusal("unknown field of weights", packed,
                update(lambda config: first_group(config)["weights"], new_field=1), "new_field"),
        Refusal("sparse weights", packed,
                update(lambda config: config, sparsity_config={"format": "sparse-24-bitmask"}),
                "sparsity_config"),
        Refusal("rotated weights", packed,
                update(lambda config: config, transform_config={"config_groups": {"u": {}}}),
                "transform_config"),
        Refusal("AWQ for gemv", "autoawq: int4 g128, gemm",
                update(lambda config: config, version="gemv"), "version"),
        Refusal("GPTQ of 8 bits", "auto-gptq: int4 g128, symmetric",
                update(lambda config: config, bits=8), "bits"),
        Refusal("unknown activations of fp8", "transformers: fp8 tensor, fp8 token",
                update(lambda config: config, activation_scheme="local"), "activation_scheme"),
        Refusal("unknown algorithm of ModelOpt", "modelopt: nvfp4, inputs too",
                update(lambda config: config, quant_algo="W4A8_AWQ"), "quant_algo"),
        Refusal("activations of Quark with zero points", "quark: int8 channel, int8 static",
                lambda config, _: config["global_quant_config"]["input_tensors"].update(
                    symmetric=False), "input_tensors"),
    ]


# --- Running ---

class Bench:
    """The model, the text, and what is written for nibble."""

    def __init__(self, arguments, folder):
        self.nibble, self.source = arguments.nibble, pathlib.Path(arguments.model)
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        if arguments.layers > 0:
            self.model.model.layers = self.model.model.layers[:arguments.layers]
            self.model.config.num_hidden_layers = arguments.layers
        text = pathlib.Path(arguments.text).read_text()[:CHARACTERS]
        self.text = folder / "text.txt"
        self.text.write_text(text)
        tokens = AutoTokenizer.from_pretrained(self.source)(text, add_special_tokens=False)
        ids = torch.tensor(tokens["input_ids"])
        self.windows = ids[:len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
        self.inputs = {"ids": self.windows} | self.largest_inputs()

    def largest_inputs(self):
        largest = {}
        handles = [module.register_forward_pre_hook(
            lambda _, given, name=name: largest.update({name: given[0].abs().max().item()}))
            for name, module in linears(self.model)]
        self.model(self.windows)
        for handle in handles:
            handle.remove()
        return largest

    def perplexity(self, model):
        losses = []
        with torch.no_grad():
            for window in self.windows:
                logits = model(window.unsqueeze(0)).logits[0, :-1].double()
                losses.append(torch.nn.functional.cross_entropy(logits, window[1:],
                                                                reduction="none"))
        return math.exp(torch.cat(losses).mean().item())

    def write(self, name, tensors, config):
        folder = self.folder / re.sub("[^a-z0-9]+", "-", name.lower())
        folder.mkdir()
        for path in self.source.iterdir():
            if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                shutil.copy(path, folder)
        quantized = {key.rsplit(".", 1)[0] for key in tensors
                     if key.endswith((".weight", ".weight_packed", ".qweight"))}
        rest = {key: value for key, value in self.model.state_dict().items()
                if key.rsplit(".", 1)[0] not in quantized}
        if self.model.config.tie_word_embeddings:
            rest.pop("lm_head.weight", None)
        stored = {key: value for key, value in tensors.items()
                  if key.rsplit(".", 1)[0] in quantized}
        save_file({key: value.detach().contiguous() for key, value in (rest | stored).items()},
                  folder / "model.safetensors", metadata={"format": "pt"})
        text = json.loads((folder / "config.json").read_text())
        text.pop("torch_dtype", None)
        text["dtype"] = "float32"
        text["num_hidden_layers"] = self.model.config.num_hidden_layers
        if config is not None:
            text["quantization_config"] = config
        (folder / "config.json").write_text(json.dumps(text, indent=1))
        return folder

    def run(self, folder):
        return subprocess.run([self.nibble, "eval", "ppl", folder, "--text", self.text, "--device",
                               "cpu", "--window", str(WINDOW), "--threads", "1", "--json"],
                              capture_output=True, text=True)


def unrounded(model):
    """The same weights, with activations as they are."""
    for _, module in linears(model):
        module._forward_pre_hooks.clear()
        module.quantization_enabled = False  # compressed-tensors; weights are decoded already
        if hasattr(module, "_input_quantizer"):  # Quark
            module._input_quantizer = None
    return model


def last_line(done):
    return (done.stderr.strip().splitlines() or ["no message"])[-1]


def check_form(bench, form):
    """(folder, config, tensors) for refusals, and whether it is right; None when skipped."""
    title = f"{form.name:34} {form.package:18}"
    try:
        model = copy.deepcopy(bench.model)
        if form.limit > EXACT:
            model.quantized = re.compile(rf"\.{model.config.num_hidden_layers - 1}\.mlp\.(gate|up)")
        made = form.make(model, bench.inputs)
    except ModuleNotFoundError as error:
        print(f"{title} skipped: {error}", flush=True)
        return None, True
    tensors, config = made[:2]
    reference = made[2] if len(made) > 2 else model
    if hasattr(model, "quantized"):
        reference.quantized = model.quantized
    theirs = bench.perplexity(reference)
    folder = bench.write(f"{form.package} {form.name}", tensors, config)
    done = bench.run(folder)
    if done.returncode != 0:
        print(f"{title} {'':9} {theirs:9.5f} FAIL: {last_line(done)}", flush=True)
        return (folder, config, tensors), False
    ours = json.loads(done.stdout)["perplexity"]
    difference = abs(ours / theirs - 1)
    good = difference <= form.limit
    note = ""
    if form.limit > EXACT:
        note = f", {abs(bench.perplexity(unrounded(reference)) / theirs - 1):.1e} if not rounded"
    print(f"{title} {ours:9.5f} {theirs:9.5f} {difference:8.1e} {'ok' if good else 'FAIL'}{note}",
          flush=True)
    return (folder, config, tensors), good


def check_refusal(bench, refusal, kept):
    if refusal.form not in kept:
        return True
    config, tensors = copy.deepcopy(kept[refusal.form][0]), dict(kept[refusal.form][1])
    refusal.change(config, tensors)
    folder = bench.write(f"refused {refusal.name}", tensors, config)
    done = bench.run(folder)
    line = last_line(done)
    good = done.returncode in (4, 5) and re.search(refusal.words, line) is not None
    print(f"{refusal.name:46} {'ok' if good else 'FAIL'}: exit {done.returncode}, "
          f"{line if done.returncode else done.stdout.strip()}", flush=True)
    shutil.rmtree(folder)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nibble")
    parser.add_argument("model")
    here = pathlib.Path(__file__).parent
    parser.add_argument("--text", default=here / "../data/text/the_black_cat.txt")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all")
    parser.add_argument("--only", default="", help="forms whose 'package: name' this finds")
    parser.add_argument("--autoawq", help="folder that holds awq/")
    parser.add_argument("--autogptq", help="folder that holds auto_gptq/")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    failures, kept = 0, {}
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(arguments, pathlib.Path(temporary))
        print(f"{'form':34} {'package':18} {'nibble':>9} {'package':>9} {'relative':>8}")
        forms = [Form("f32", "none", plain, EXACT)] + compressed_forms() + word_forms(arguments) + \
            fp8_forms() + modelopt_forms() + quark_forms()
        wanted = {refusal.form for refusal in refusals()}
        for form in forms:
            key = f"{form.package}: {form.name}"
            if re.search(arguments.only, key) is None:
                continue
            written, good = check_form(bench, form)
            failures += not good
            if written is not None:
                shutil.rmtree(written[0])
                if key in wanted:
                    kept[key] = written[1:]
        for refusal in refusals():
            failures += not check_refusal(bench, refusal, kept)
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
