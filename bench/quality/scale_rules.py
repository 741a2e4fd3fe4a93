#!/usr/bin/env python3
"""What the choice of scales costs: signal to noise and perplexity of one model for many rules.

    bench/quality/scale_rules.py MODEL TEXT bench/results/NAME.jsonl [--tokens N]

Each row quantizes MODEL with one scheme and scale rule, checks it (`nibble verify`), decodes the
result to BF16 (`nibble quantize --scheme bf16`) and measures the perplexity of those weights in
transformers, so that only the weights differ between rows and any architecture will do. Needs torch
and transformers. Rows that the last argument already has are kept.
"""
import argparse
import json
import math
import pathlib
import re
import subprocess
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [("bf16", "")] + [
    ("w4a16_g32", rule) for rule in ("absmax", "absmax7.5", "signed", "lsq", "lsq_signed", "mse")
] + [
    ("w4a16_g128", rule) for rule in ("absmax", "absmax7.5", "signed", "lsq", "lsq_signed", "mse")
] + [("w4a8", "absmax"), ("w4a8", "absmax7.5"), ("w4a8", "quark"), ("w4a8", "lsq"), ("w4a8", "mse"),
     ("w4a16_g32_asym", "best"), ("mxfp4", "absmax"), ("mxfp4", "best"),
     ("w8a8_fp8", "best"), ("w8a8_fp8_expert", "best"), ("w8a8_fp8_block", "best"),
     ("w8a8_int8", "best")]
WINDOW = 512


def run_json(*command):
    return json.loads(subprocess.run([*map(str, command), "--json"], check=True, text=True,
                                     stdout=subprocess.PIPE).stdout)


def tensors_of(folder):
    found = {}
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found.update(load_file(file))
    return found


def fuse_experts(tensors, own):
    """Puts per-expert matrices where the model keeps all experts of a layer in one tensor."""
    for name in [name for name in tensors if name not in own]:
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        matrix = tensors.pop(name)
        base, expert, kind = match[1], int(match[2]), match[3]
        whole = tensors.setdefault(
            f"{base}.{'down_proj' if kind == 'down' else 'gate_up_proj'}",
            torch.empty_like(own[f"{base}.{'down_proj' if kind == 'down' else 'gate_up_proj'}"]))
        if kind == "down":
            whole[expert] = matrix.T
        else:
            whole[expert][:, 0 if kind == "gate" else 1::2] = matrix.T
    assert tensors.keys() == own.keys(), tensors.keys() ^ own.keys()
    return tensors


def perplexity(model, ids):
    total, count = 0.0, 0
    with torch.inference_mode():
        for begin in range(0, len(ids) - WINDOW + 1, 8 * WINDOW):
            rows = ids[begin:begin + 8 * WINDOW]
            batch = rows[:len(rows) // WINDOW * WINDOW].view(-1, WINDOW)
            logits = model(batch).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(),
                                                     reduction="sum")
            total += loss.item()
            count += batch[:, 1:].numel()
    return math.exp(total / count), count


def measure(args, model, own, ids, scheme, rule):
    row = {"model": pathlib.Path(args.model).name, "scheme": scheme, "rule": rule}
    with tempfile.TemporaryDirectory() as folder:
        source = args.model
        if scheme != "bf16":
            quantized, source = pathlib.Path(folder) / "q", pathlib.Path(folder) / "decoded"
            run_json(args.nibble, "quantize", args.model, quantized, "--scheme", scheme,
                     "--scale-rule", rule)
            checked = run_json(args.nibble, "verify", args.model, quantized)
            decibels = [matrix["snr_db"] for matrix in checked["worst_first"]]
            row |= {"matrices": len(decibels), "snr_db_mean": sum(decibels) / len(decibels),
                    "snr_db_min": decibels[0],
                    "bytes": sum(f.stat().st_size for f in quantized.glob("*.safetensors"))}
            run_json(args.nibble, "quantize", quantized, source, "--scheme", "bf16")
        tensors = fuse_experts(tensors_of(source), own)
        state = model.state_dict()
        for name, value in tensors.items():
            if name in state:
                state[name].copy_(value)
        if any(".experts." in name and name not in state for name in tensors):
            load_experts(state, tensors)
    row["perplexity"], row["tokens"] = perplexity(model, ids)
    return row


def load_experts(state, tensors):
    """Experts that the file keeps apart and the model in one tensor [expert, out, in]."""
    for name, value in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            continue
        base, expert, kind = match[1], int(match[2]), match[3]
        if kind == "down":
            state[f"{base}.down_proj"][expert].copy_(value)
        else:
            whole = state[f"{base}.gate_up_proj"][expert]
            half = whole.shape[0] // 2
            whole[half * (kind == "up"):][:half].copy_(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=1 << 40, help="measure the first N tokens")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] \
        if args.out.exists() else []
    name = pathlib.Path(args.model).name
    known = {(row["scheme"], row["rule"]) for row in rows if row["model"] == name}
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer(pathlib.Path(args.text).read_text(),
                                 add_special_tokens=False)["input_ids"][:args.tokens])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    own = tensors_of(args.model)
    for scheme, rule in ROWS:
        if (scheme, rule) not in known:
            row = measure(args, model, own, ids, scheme, rule)
            rows.append(row)
            print(json.dumps(row), flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
