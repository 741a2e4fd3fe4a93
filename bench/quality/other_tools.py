#!/usr/bin/env python3
"""Quantizes a model with llm-compressor or AutoRound on the text that `nibble quantize` calibrates with.

    bench/quality/other_tools.py MODEL TEXT OUT --tool llm-compressor --scheme w4a16_g128
    nibble eval kld MODEL OUT --text TEST

Windows are taken as nibble takes them where the text has no more of them than --windows: side by
side, without special tokens. Needs torch, transformers, and llmcompressor 0.14 or auto-round 0.15.
The output head stays as it is.
"""
import argparse
import json
import os
import pathlib
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WEIGHTS = {"w4a16_g32": (4, 32), "w4a16_g128": (4, 128), "w4a8": (4, None), "w8a8_int8": (8, None)}
INT8_ROWS = ("w4a8", "w8a8_int8")


def windows(tokenizer, text, count, length):
    ids = tokenizer(pathlib.Path(text).read_text(), add_special_tokens=False)["input_ids"]
    found = [ids[i:i + length] for i in range(0, len(ids) - length + 1, length)]
    if len(found) > count:
        raise SystemExit(f"{text}: {len(found)} windows; cut the text to {count} of {length} tokens")
    return found


def llm_compressor(args, model, tokenizer, rows):
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    try:
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    except ImportError:
        from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

    bits, group = WEIGHTS[args.scheme]
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False,
               "strategy": "group" if group else "channel", "group_size": group}
    group_config = {"targets": ["Linear"], "weights": weights}
    if args.scheme in INT8_ROWS:
        group_config["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True,
                                             "dynamic": True, "strategy": "token"}
    kind = QuantizationModifier if args.rounding == "rtn" else GPTQModifier
    recipe = [kind(config_groups={"group_0": group_config}, ignore=["lm_head"])]
    if args.smooth is not None:
        recipe.insert(0, SmoothQuantModifier(smoothing_strength=args.smooth))
    data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
    oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=args.length,
            num_calibration_samples=len(rows), shuffle_calibration_samples=False)
    model.save_pretrained(args.out, save_compressed=True)
    tokenizer.save_pretrained(args.out)


def auto_round(args, model, tokenizer, rows):
    from auto_round import AutoRound

    bits, group = WEIGHTS[args.scheme]
    if args.scheme in INT8_ROWS:
        raise SystemExit("auto-round: only schemes with float activations")
    data = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
            for row in rows]
    AutoRound(model, tokenizer, bits=bits, group_size=group, sym=True, iters=args.iterations,
              nsamples=len(rows), seqlen=args.length, batch_size=8, dataset=data,
              seed=args.seed).quantize_and_save(str(args.out), format="auto_gptq")
    for inner in [path for path in args.out.iterdir() if path.is_dir()]:
        for file in inner.iterdir():
            file.rename(args.out / file.name)
        inner.rmdir()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tool", choices=["llm-compressor", "auto-round"], required=True)
    parser.add_argument("--scheme", choices=WEIGHTS, required=True)
    parser.add_argument("--rounding", choices=["gptq", "rtn"], default="gptq",
                        help="of llm-compressor")
    parser.add_argument("--smooth", type=float, help="SmoothQuant's exponent, llm-compressor")
    parser.add_argument("--iterations", type=int, default=200, help="of auto-round, for each block")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = windows(tokenizer, args.text, args.windows, args.length)
    begin = time.time()
    (llm_compressor if args.tool == "llm-compressor" else auto_round)(args, model, tokenizer, rows)
    print(json.dumps({"tool": args.tool, "scheme": args.scheme, "rounding": args.rounding,
                      "smooth": args.smooth, "windows": len(rows), "length": args.length,
                      "device": device, "seconds": round(time.time() - begin, 1)}))


if __name__ == "__main__":
    main()
