#!/usr/bin/env python3
"""Compares `nibble eval` with transformers, PyTorch in F64 and lm-eval, on one model in F32.

usage: check_eval.py MODEL TEXT [--nibble BIN] [--tasks FOLDER] [--items N] [--windows N]
                     [--window N] [--work FOLDER]

Needs torch, transformers and safetensors; lm_eval for the tasks. MODEL is copied with its weights in
F32, and once more with coarser weights as the other side of the KL divergence. TEXT is a file like
wiki.test.raw, of which as much is taken as --windows windows need. FOLDER holds NAME.jsonl of the
known tasks, of which the first N items are asked. Each check is a line with both figures; the last
line counts them.
"""
import argparse
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import types

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

BAR_PPL, BAR_KLD, BAR_NATS = 1e-4, 1e-6, 1e-3
RESULTS = []


def report(what, ours, theirs, error, bar):
    RESULTS.append(error <= bar)
    print(f"{'pass' if error <= bar else 'FAIL'}  {what}: {ours:.8g}, reference {theirs:.8g}, "
          f"off by {error:.2e} (bar {bar:g})", flush=True)


def copy_of(model, out, change):
    """MODEL with its weights in F32, each changed by `change`."""
    out.mkdir()
    for path in pathlib.Path(model).iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    config = json.loads((out / "config.json").read_text())
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = "float32"
    (out / "config.json").write_text(json.dumps(config))
    tensors = {}
    for path in sorted(pathlib.Path(model).glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            tensors[name] = change(name, tensor.float()).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def coarse(name, tensor):
    if tensor.dim() < 2 or "embed" in name:
        return tensor
    scale = tensor.abs().amax(dim=1, keepdim=True) / 7.5
    return (tensor / scale).round().clamp(-8, 7) * scale


def run(options, *arguments):
    command = [options.nibble, "eval", *map(str, arguments), "--device", "cpu", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stderr}")
    return json.loads(result.stdout)


@torch.inference_mode()
def log_probs(network, ids):
    return network(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def mean_nll(network, windows):
    """Of windows (tokens, first scored)."""
    total = count = 0
    for ids, first in windows:
        rows = log_probs(network, ids[:-1])
        for i in range(first, len(ids)):
            total -= rows[i - 1, ids[i]].item()
        count += len(ids) - first
    return total / count


def windows_of(protocol, text, tokenizer, n):
    if protocol == "gptq":
        lines = text.splitlines(keepends=True)
        ids = tokenizer("\n\n".join(line if line.strip() else "" for line in lines)).input_ids
        return [(ids[at:at + n], 1) for at in range(0, len(ids) - n + 1, n)]
    if protocol == "llama.cpp":
        text = text[:-1] if text.endswith("\n") else text
        plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        added = tokenizer("").input_ids  # BOS, or nothing
        ids = added + plain
        chunks = [ids[at:at + n] for at in range(0, len(ids) - n + 1, n)]
        return [((added[:1] + chunk[1:] if added else chunk), n // 2 + 1) for chunk in chunks]
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return [(ids[at:at + n], 1) for at in range(0, len(ids) - n + 1, n)]


def check_perplexity(options, network, tokenizer, text_file):
    text = text_file.read_text(encoding="utf-8")
    for protocol in ("ours", "gptq", "llama.cpp"):
        windows = windows_of(protocol, text, tokenizer, options.window)
        theirs = math.exp(mean_nll(network, windows))
        found = run(options, "ppl", options.exact, "--text", text_file, "--protocol", protocol,
                    "--window", options.window)
        if found["tokens"] != sum(len(ids) - first for ids, first in windows):
            sys.exit(f"{protocol}: {found['tokens']} tokens are scored, others in the reference")
        report(f"{protocol}, {found['tokens']} tokens", found["perplexity"], theirs,
               abs(found["perplexity"] / theirs - 1), BAR_PPL)


def check_divergence(options, tokenizer, text_file):
    load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    base, other = load(options.exact), load(options.coarse)
    values = []
    for ids, _ in windows_of("ours", text_file.read_text(encoding="utf-8"), tokenizer,
                             options.window):
        p, q = log_probs(base, ids[:-1]), log_probs(other, ids[:-1])
        values += (p.exp() * (p - q)).sum(-1).tolist()
    theirs = sum(values) / len(values)
    found = run(options, "kld", options.exact, options.coarse, "--text", text_file, "--window",
                options.window)
    report(f"kld, {found['tokens']} tokens", found["kld"], theirs, abs(found["kld"] - theirs), BAR_KLD)
    theirs = torch.tensor(values).double()
    for share, key in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"), (1, "max")):
        value = theirs.quantile(share).item()
        report(f"kld {key}", found[f"kld_{key}"], value, abs(found[f"kld_{key}"] - value) / value, 1e-4)


def lm_eval_documents(name, path, items):
    """Contexts and continuations as lm-eval's own task files make them of the same lines."""
    from jinja2 import Template
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:items]]
    for doc in lines:
        if name == "winogrande":
            pairs = [(context, " " + doc["continuation"]) for context in doc["context_options"]]
        elif name == "lambada_openai":
            text = doc["context"] + " " + doc["continuation"]
            pairs = [(Template("{{text.split(' ')[:-1]|join(' ')}}").render(text=text),
                      Template("{{' '+text.split(' ')[-1]}}").render(text=text))]
        else:
            if name == "boolq":
                passage, question = doc["query"].removeprefix("Passage: ").rsplit("\nQuestion: ", 1)
                context = f"{passage}\nQuestion: {question.removesuffix('?')}?\nAnswer:"
            elif name == "hellaswag":
                context = doc["query"]
            else:
                question = doc["query"].removeprefix("Question: ").removesuffix("\n")
                context = f"Question: {question}\nAnswer:"
            pairs = [(context, " " + choice) for choice in doc["choices"]]
        yield pairs, doc.get("gold", 0), doc.get("choices")


def check_tasks(options):
    import lm_eval.models.huggingface as huggingface
    import numpy
    network = huggingface.HFLM(pretrained=str(options.exact), dtype="float32", device="cpu",
                               batch_size=8)
    for path in sorted(pathlib.Path(options.tasks).glob("*.jsonl")):
        documents = list(lm_eval_documents(path.stem, path, options.items))
        requests = [types.SimpleNamespace(args=pair) for pairs, _, _ in documents for pair in pairs]
        start = time.monotonic()
        answers = iter(network.loglikelihood(requests, disable_tqdm=True))
        theirs = time.monotonic() - start
        samples = pathlib.Path(options.exact).parent / "samples.jsonl"
        found = run(options, "tasks", options.exact, "--tasks", f"{path.stem}={path}", "--limit",
                    options.items, "--samples", samples)["models"][0]
        print(f"      {path.stem}: {found['seconds']:.1f} s with loading, lm-eval {theirs:.1f} s without",
              flush=True)
        found = found["tasks"][0]
        ours = [json.loads(line) for line in samples.read_text().splitlines()]
        right, right_norm, worst = [], [], 0
        for sample, (pairs, gold, choices) in zip(ours, documents, strict=True):
            sums, greedy = zip(*(next(answers) for _ in pairs))
            worst = max(worst, *(abs(a - b) for a, b in zip(sample["log_likelihoods"], sums)))
            right.append(greedy[0] if len(pairs) == 1 else numpy.argmax(sums) == gold)
            if choices:
                lengths = [len(choice) for choice in choices]
                right_norm.append(numpy.argmax(numpy.array(sums) / lengths) == gold)
        report(f"{path.stem}: worst log-likelihood of {len(requests)}", worst, 0, worst, BAR_NATS)
        report(f"{path.stem}: acc", found["acc"], numpy.mean(right),
               abs(found["acc"] - numpy.mean(right)), 1e-12)
        if right_norm:
            report(f"{path.stem}: acc_norm", found["acc_norm"], numpy.mean(right_norm),
                   abs(found["acc_norm"] - numpy.mean(right_norm)), 1e-12)
    return network


def check_rolling(options, network, text_file):
    """The protocol lm-eval, with its own detokenizer, tokens and windows."""
    import re
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
    text = text_file.read_text(encoding="utf-8")
    pages = [""]
    for line in text.splitlines(keepends=True):
        if re.fullmatch(r" = [^=](.*[^=])? = \n?", line) and pages[-1].strip() and \
                re.search(r"^ = [^=]", pages[-1], re.MULTILINE):
            pages.append("")
        pages[-1] += line
    network._max_length = options.window
    requests = [types.SimpleNamespace(args=(wikitext_detokenizer({"page": page}),)) for page in pages]
    total = sum(network.loglikelihood_rolling(requests, disable_tqdm=True))
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    found = run(options, "ppl", options.exact, "--text", text_file, "--protocol", "lm-eval", "--window",
                options.window)
    theirs = math.exp(-total / words)
    report(f"lm-eval: word perplexity, {len(pages)} pages, {found['tokens']} tokens",
           found["word_perplexity"], theirs, abs(found["word_perplexity"] / theirs - 1), 5 * BAR_PPL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--tasks")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--work", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        work = pathlib.Path(work)
        options.exact = copy_of(options.model, work / "exact", lambda name, tensor: tensor)
        options.coarse = copy_of(options.model, work / "coarse", coarse)
        tokenizer = AutoTokenizer.from_pretrained(options.exact)
        text = options.text.read_text(encoding="utf-8")
        part = work / "text.txt"
        ids = tokenizer(text[:200000], add_special_tokens=False, return_offsets_mapping=True)
        end = ids.offset_mapping[min(options.windows * options.window, len(ids.input_ids) - 1)][1]
        part.write_text(text[:text.find("\n", end) + 1], encoding="utf-8")
        network = AutoModelForCausalLM.from_pretrained(options.exact, dtype=torch.float32).eval()
        check_perplexity(options, network, tokenizer, part)
        check_divergence(options, tokenizer, part)
        if options.tasks:
            check_rolling(options, check_tasks(options), part)
    print(f"{sum(RESULTS)} passed, {len(RESULTS) - sum(RESULTS)} failed")
    return 0 if all(RESULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
