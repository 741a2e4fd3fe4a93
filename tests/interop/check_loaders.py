#!/usr/bin/env python3
"""Checks that quantized checkpoints mean to others what they mean to nibble.

usage: check_loaders.py NIBBLE_BINARY MODEL_DIR [--calibrate TEXT]

Quantizes MODEL_DIR with every scheme into a temporary folder, loads each result with transformers
and compressed-tensors, and compares logits with those of the unquantized model, and every decoded
weight, bit for bit, with what `nibble quantize --scheme bf16` makes of the same folder.
With a text, chains of methods are checked in the same way.

needs: pip install torch transformers compressed-tensors safetensors
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

# Largest mean squared error of logits relative to their mean square. A coarse bound: a wrong layout
# or scale gives 1 and more; rounding to four bits gave 0.035 to 0.066 on the model in models/. The
# exact check is that of the weights.
SCHEMES = {
    "w8a8_int8": 0.02,
    "w8a16_channel": 0.02,
    "w8a8_fp8": 0.02,
    "w8a8_fp8_expert": 0.02,
    "w8a8_fp8_block": 0.02,
    "w4a16_g32": 0.2,
    "w4a16_g128": 0.2,
    "w4a16_channel": 0.2,
    "w4a16_g32_asym": 0.2,
    "w4a16_g128_asym": 0.2,
    "w4a8": 0.2,
    "w4a8_g64": 0.2,
    "w4a8_g128": 0.2,
    "mxfp4": 0.3,
    "mxfp4_fp8": 0.3,
}
# transformers 5.23 with compressed-tensors 0.20 makes its empty model with zero points that are not
# packed, and refuses packed ones; MXFP4 it decodes to BF16 in a model of F32, which cannot run. For
# these the package's own decompressor is asked.
DIRECT = ("w4a16_g32_asym", "w4a16_g128_asym", "w4a8_g64", "w4a8_g128", "mxfp4", "mxfp4_fp8")
MIXED = ["--scheme", "w4a16_g32", "--rule", "*.self_attn.*=w8a8_fp8", "--rule",
         "*.down_proj=w8a8_int8"]
# Chains of --method, each with a scheme; each method is in one of them.
CHAINS = (("w4a16_g32", "imatrix"), ("w4a16_g128", "gptq"), ("w4a16_g32", "gptaq"),
          ("w4a16_g128", "autoround"), ("w4a8", "lwc"), ("w8a8_int8", "smooth,gptq"),
          ("w4a16_g128", "awq,gptaq"), ("w4a8", "rotate,gptq"), ("w4a8", "permute,gptq"),
          ("w4a8", "rotate,smooth,gptaq"), ("w4a16_g128_asym", "gptq"), ("w4a8_g128", "gptq"),
          ("mxfp4", "gptq"))
HEAD = ["--scheme", "w4a16_g32", "--lm-head", "w8a16_channel"]


def logits(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(ids).logits.float(), model


def quantize(nibble, source, folder, *flags):
    subprocess.run([nibble, "quantize", source, str(folder), *flags, "--json"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def decompress(folder, model):
    """Puts what compressed-tensors makes of the stored tensors into a plain model."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = list(QuantizationConfig.model_validate(config).config_groups.values())
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        own = {key[len(name) + 1:]: value for key, value in tensors.items()
               if key.startswith(name + ".weight")}
        if isinstance(module, torch.nn.Linear) and "weight_packed" in own:
            if "weight_shape" in own:
                own["weight_shape"] = torch.Size(own["weight_shape"].tolist())
            weight = compressor.decompress(own, groups[0])["weight"]
            module.weight = torch.nn.Parameter(weight.float())


def differing(loaded, plain):
    """Weights of linear layers that are not the same numbers in BF16, and how many were compared."""
    tensors = load_file(plain / "model.safetensors")
    bad, count = 0, 0
    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in tensors:
            ours = tensors[f"{name}.weight"]
            theirs = module.weight.detach()
            bad += int((theirs.to(torch.bfloat16) != ours).sum())
            count += ours.numel()
    return bad, count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nibble")
    parser.add_argument("model")
    parser.add_argument("--calibrate", metavar="TEXT")
    arguments = parser.parse_args()
    ids = torch.arange(6, 38).unsqueeze(0)
    reference, _ = logits(arguments.model, ids)
    failures = 0
    cases = [(name, ["--scheme", name], limit) for name, limit in SCHEMES.items()]
    cases.append(("mixed", MIXED, 0.2))
    cases.append(("head", HEAD, 0.2))
    for scheme, method in CHAINS if arguments.calibrate else ():
        flags = ["--scheme", scheme, "--calibrate", arguments.calibrate, "--method", method]
        cases.append((f"{scheme}:{method}", flags, SCHEMES[scheme]))
    with tempfile.TemporaryDirectory() as temporary:
        for name, flags, limit in cases:
            folder = pathlib.Path(temporary) / name
            plain = pathlib.Path(temporary) / f"{name}-bf16"
            quantize(arguments.nibble, arguments.model, folder, *flags, "--format",
                     "compressed-tensors")
            quantize(arguments.nibble, folder, plain, "--scheme", "bf16")
            if name.split(":")[0] in DIRECT:
                _, loaded = logits(arguments.model, ids)
                decompress(folder, loaded)
                with torch.no_grad():
                    output = loaded(ids).logits
            else:
                output, loaded = logits(folder, ids)
            error = ((output - reference).pow(2).mean() / reference.pow(2).mean()).item()
            bad, count = differing(loaded, plain)
            good = error < limit and bad == 0 and count > 0
            failures += not good
            print(f"{name:24} relative logit error {error:.5f}, {bad} of {count} weights differ "
                  f"{'ok' if good else 'FAIL'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
