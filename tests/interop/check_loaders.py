#!/usr/bin/env python3
"""Checks that quantized checkpoints mean to others what they mean to nibble.

usage: check_loaders.py NIBBLE_BINARY MODEL_DIR [--oracle format_oracle.py]

Quantizes MODEL_DIR with every scheme into a temporary folder, loads each result with transformers
and compressed-tensors, and compares logits with those of the unquantized model. With --oracle, the
first rows of one packed and one int8 module are decoded by that independent program as well and
compared with what compressed-tensors makes of them.

needs: pip install torch transformers compressed-tensors safetensors
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

# Largest mean squared error of logits relative to their mean square. A coarse bound: a wrong layout
# or scale gives 1 and more; rounding to four bits gave 0.035 to 0.066 on the model in models/. The
# exact check is the one against the oracle.
SCHEMES = {
    "w8a8_int8": 0.02,
    "w8a8_fp8": 0.02,
    "w4a16_g32": 0.2,
    "w4a16_g128": 0.2,
    "w4a16_channel": 0.2,
    "w4a8": 0.2,
}
MODULE = "model.layers.0.mlp.up_proj"
ROWS = 4


def logits(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(ids).logits, model


def hexed(tensor, name):
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes().hex()
    return {"dtype": name, "shape": list(tensor.shape), "hex": raw}


def oracle_rows(oracle, folder):
    """The first rows of MODULE as the oracle decodes the stored bytes; None for FP8 and the like."""
    tensors = load_file(folder / "model.safetensors")
    scale = tensors[f"{MODULE}.weight_scale"][:ROWS]
    scale_type = {torch.bfloat16: "BF16", torch.float32: "F32"}[scale.dtype]
    stored = {"weight_scale": hexed(scale, scale_type)}
    if f"{MODULE}.weight_packed" in tensors:
        layout = "ct-pack"
        packed = tensors[f"{MODULE}.weight_packed"][:ROWS]
        stored["weight_packed"] = hexed(packed, "I32")
        shape = torch.tensor([ROWS, packed.shape[1] * 8], dtype=torch.int64)
        stored["weight_shape"] = hexed(shape, "I64")
    elif tensors[f"{MODULE}.weight"].dtype == torch.int8:
        layout = "ct-int8"
        stored["weight"] = hexed(tensors[f"{MODULE}.weight"][:ROWS], "I8")
    else:
        return None
    done = subprocess.run([sys.executable, oracle, "decode", layout], check=True,
                          input=json.dumps({"tensors": stored, "opt": {}}).encode(),
                          stdout=subprocess.PIPE)
    return torch.tensor(json.loads(done.stdout)["w"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nibble")
    parser.add_argument("model")
    parser.add_argument("--oracle")
    arguments = parser.parse_args()
    ids = torch.arange(6, 38).unsqueeze(0)
    reference, original = logits(arguments.model, ids)
    source = original.get_submodule(MODULE).weight.detach()[:ROWS]
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        for scheme, limit in SCHEMES.items():
            folder = pathlib.Path(temporary) / scheme
            subprocess.run([arguments.nibble, "quantize", arguments.model, str(folder), "--scheme",
                            scheme, "--json"], check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
            output, loaded = logits(folder, ids)
            error = ((output - reference).pow(2).mean() / reference.pow(2).mean()).item()
            good = error < limit
            note = ""
            rows = oracle_rows(arguments.oracle, folder) if arguments.oracle else None
            if rows is not None:
                theirs = loaded.get_submodule(MODULE).weight.detach()[:ROWS].float()
                noise = ((rows - source).pow(2).sum() / source.pow(2).sum()).item()
                apart = (rows - theirs).abs().max().item() / rows.abs().max().item()
                good = good and noise < 0.02 and apart < 1e-6
                note = f", oracle noise {noise:.5f}, oracle against loader {apart:.1e}"
            failures += not good
            print(f"{scheme:14} relative logit error {error:.5f}{note} {'ok' if good else 'FAIL'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
