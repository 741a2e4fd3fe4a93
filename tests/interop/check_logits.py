#!/usr/bin/env python3
"""Compares the probabilities that a model's server gives with those of transformers in F32.

usage: check_logits.py reference MODEL OUT.json          needs torch and transformers
       check_logits.py compare MODEL OUT.json [--nibble BIN] [--bar B] [serve's options]

`reference` continues twenty prompts greedily and keeps the largest log-probabilities at each place.
Transforms of inputs in quantization_config.transform_config, which transformers passes over, are done by
compressed-tensors' own code.
`compare` serves MODEL, a folder or a GGUF file, asks for the same places, and reports the largest
difference among the log-probabilities and how often the first choice is another one. It ends with
"N passed, N failed": a prompt passes when no difference is above the bar.
"""
import json
import math
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

STEPS = 24
TOP = 5
PROMPTS = [
    "The capital of France is", "Water boils at a temperature of", "Once upon a time, a small fox",
    "The three states of matter are", "def fibonacci(n):\n", "In 1969, the first man on the moon",
    "A healthy breakfast should contain", "The largest planet of the solar system", "1, 1, 2, 3, 5, 8,",
    "To make a cup of tea, first", "Dear Sir or Madam,\n", "The opposite of hot is",
    "Photosynthesis is the process by which", "Shakespeare wrote plays such as", "My favourite season is",
    "The quick brown fox jumps over", "An atom consists of", "Rome was not built in",
    "The recipe needs 200 g of flour,", "If it rains tomorrow,"]


def add_online_transforms(model, network):
    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    transforms = (config.get("quantization_config") or {}).get("transform_config")
    if not transforms:
        return
    from compressed_tensors.transform import TransformConfig, apply_transform_config
    for scheme in transforms["config_groups"].values():  # weights have theirs already
        scheme["apply"] = [args for args in scheme["apply"] if not args["location"].startswith("weight")]
    apply_transform_config(network, TransformConfig(**transforms))


def reference(model, out):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    add_online_transforms(model, network)
    prompts = []
    for text in PROMPTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        begin, places = len(ids), []
        with torch.inference_mode():
            for _ in range(STEPS):
                row = network(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
                values, best = row.topk(TOP)
                places.append({"best": best[0].item(), "top": values.tolist()})
                ids.append(best[0].item())
        prompts.append({"ids": ids, "begin": begin, "places": places, "text": text})
    pathlib.Path(out).write_text(json.dumps({"prompts": prompts}))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, ids):
    body = json.dumps({"model": "m", "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": TOP,
                       "ignore_eos": True})
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body.encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.load(answer)["choices"][0]
    return sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)


def wait_for(port, server):
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            if server.poll() is not None:
                sys.exit("the server ended")
            time.sleep(0.1)
    sys.exit("the server does not answer")


def compare(model, path, options):
    nibble, bar = "build/cpu/tools/nibble", 1e-3
    while options and options[0] in ("--nibble", "--bar"):
        nibble, bar = (options[1], bar) if options[0] == "--nibble" else (nibble, float(options[1]))
        options = options[2:]
    port = free_port()
    prompts = json.loads(pathlib.Path(path).read_text())["prompts"]
    with subprocess.Popen([nibble, "serve", model, "--served-model-name", "m", "--port", str(port), *options],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(port, server)
            passed, worst, squares, count = 0, 0.0, 0.0, 0
            for prompt in prompts:
                largest = 0.0
                for i, place in enumerate(prompt["places"]):
                    got = ask(port, prompt["ids"][:prompt["begin"] + i])
                    gaps = [abs(a - b) for a, b in zip(got, place["top"])]  # equal texts count once
                    largest = max([largest, *gaps])
                    squares += sum(gap * gap for gap in gaps)
                    count += len(gaps)
                worst = max(worst, largest)
                passed += largest <= bar
        finally:
            server.terminate()
    print(f"largest difference {worst:.2e}, root mean square {math.sqrt(squares / count):.2e}, "
          f"of {count} log-probabilities")
    print(f"{passed} passed, {len(prompts) - passed} failed")
    return 0 if passed == len(prompts) else 1


def main():
    if len(sys.argv) < 4 or sys.argv[1] not in ("reference", "compare"):
        sys.exit(__doc__)
    if sys.argv[1] == "reference":
        return reference(*sys.argv[2:4])
    return compare(sys.argv[2], sys.argv[3], sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
