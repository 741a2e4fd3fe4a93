#!/usr/bin/env python3
"""Compares the means of `nibble calibrate-kv` with those of the keys and values that transformers caches.

usage: check_kv_sidecar.py MODEL TEXT [--nibble BIN] [--length N]     needs torch and transformers

MODEL is a folder that is not written to. Both read all windows of N tokens of TEXT. The bar is 0.3 %
of the deviation of a channel (root of the mean over channels) plus 0.1 % of the mean: the program
computes in the model's type, transformers in F32.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile


def sidecar_of(args):
    with tempfile.TemporaryDirectory() as folder:
        link = pathlib.Path(folder)
        for file in pathlib.Path(args.model).resolve().iterdir():
            if file.name != "nibble_kv.json":
                (link / file.name).symlink_to(file)
        subprocess.run([args.nibble, "calibrate-kv", link, "--calibrate", args.text, "--form", "centred",
                        "--calibration-windows", "1000000", "--calibration-length", str(args.length)],
                       check=True, stdout=subprocess.DEVNULL)
        return json.loads((link / "nibble_kv.json").read_text())


def means_of(args):
    """By layer and half: mean and deviation of each channel, [heads x dim]."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    network = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    text = pathlib.Path(args.text).read_text()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    sums = {}
    count = 0
    for begin in range(0, len(ids) - args.length + 1, args.length):
        with torch.inference_mode():
            cache = network(torch.tensor([ids[begin:begin + args.length]]), use_cache=True).past_key_values
        count += args.length
        for layer, cached in enumerate(cache.layers):
            for half, rows in (("keys", cached.keys), ("values", cached.values)):
                rows = rows[0].double().transpose(0, 1).flatten(1)  # [tokens, heads x dim]
                total = sums.setdefault((layer, half), [0, 0])
                total[0] = total[0] + rows.sum(0)
                total[1] = total[1] + rows.square().sum(0)
    return count, {at: ((s / count).tolist(), ((q / count - (s / count) ** 2).mean().sqrt()).item())
                   for at, (s, q) in sums.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--length", type=int, default=200)
    args = parser.parse_args()
    sidecar = sidecar_of(args)
    count, means = means_of(args)
    assert sidecar["calibration"]["tokens"] == count, (sidecar["calibration"], count)
    assert 2 * len(sidecar["layers"]) == len(means)
    failed, largest = 0, 0.0
    for (layer, half), (expected, deviation) in means.items():
        got = sidecar["layers"][layer][half]["mean"]
        assert len(got) == len(expected)
        off = max(abs(g - e) / (0.003 * deviation + 0.001 * abs(e)) for g, e in zip(got, expected))
        largest = max(largest, off)
        failed += off > 1
    print(f"{count} tokens, largest difference {largest:.3f} of the bar")
    print(f"{len(means) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
