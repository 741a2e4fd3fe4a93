#!/usr/bin/env python3
"""Asks `nibble serve` through lm-eval's own client (local-completions) and compares with `nibble eval`.

usage: check_server_eval.py MODEL [--nibble BIN] [--tasks FOLDER] [--items N]
                            [--gsm8k TEST.jsonl] [--problems N] [--concurrent N]

Needs lm_eval with its api extra, and torch for it; MODEL has a tokenizer that transformers loads.
FOLDER holds NAME.jsonl of the known tasks. Each check is a line with both figures; the last line
counts them. Both sides run the same kernels, whose bits do not depend on the
rows that share a step, so figures are equal; but the client takes every likeliest token for a
greedy one where several are equally likely, as BF16 logits often are, and `eval` the first of them.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import types

import numpy

from check_eval import RESULTS, lm_eval_documents, report
from check_logits import free_port, wait_for

BAR_NATS = 1e-5  # a token
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def start_server(options):
    port = free_port()
    server = subprocess.Popen([options.nibble, "serve", options.model, "--port", str(port),
                               "--served-model-name", "asked"], stderr=subprocess.DEVNULL)
    wait_for(port, server)
    return server, port


def evaluate(options, *command):
    done = subprocess.run([options.nibble, "eval", *map(str, command), "--json"], check=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout)


def check_choices(options, client, work):
    for path in sorted(pathlib.Path(options.tasks).glob("*.jsonl")):
        documents = list(lm_eval_documents(path.stem, path, options.items))
        requests = [types.SimpleNamespace(args=pair) for pairs, _, _ in documents for pair in pairs]
        answers = iter(client.loglikelihood(requests, disable_tqdm=True))
        samples = work / "samples.jsonl"
        found = evaluate(options, "tasks", options.model, "--tasks", f"{path.stem}={path}",
                         "--limit", options.items, "--samples", samples)["models"][0]["tasks"][0]
        ours = [json.loads(line) for line in samples.read_text().splitlines()]
        right, worst = [], 0
        for sample, (pairs, gold, _) in zip(ours, documents, strict=True):
            sums, greedy = zip(*(next(answers) for _ in pairs))
            tokens = [max(1, len(client.tok_encode(end))) for _, end in pairs]
            worst = max(worst, *(abs(a - b) / n for a, b, n in
                                 zip(sample["log_likelihoods"], sums, tokens)))
            right.append(greedy[0] if len(pairs) == 1 else numpy.argmax(sums) == gold)
        report(f"{path.stem}: worst log-likelihood a token of {len(requests)}", worst, 0, worst,
               BAR_NATS)
        ties = 0.05 if documents[0][2] is None else 0  # of answers that must be greedy
        report(f"{path.stem}: acc of {len(documents)}", found["acc"], numpy.mean(right),
               abs(found["acc"] - numpy.mean(right)), 1e-12 + ties)


def number(text):
    return re.sub(r"[,$]|(?s:.*#### )|\.$", "", text.strip())


def lm_eval_matches(answer, gold):
    """The filters strict-match and flexible-extract of lm-eval's gsm8k."""
    strict = STRICT.search(answer)
    flexible = [first or second for first, second in FLEXIBLE.findall(answer)]
    return (bool(strict) and number(strict[1]) == number(gold),
            bool(flexible) and number(flexible[-1]) == number(gold))


def check_problems(options, client, work):
    lines = [json.loads(line) for line in
             pathlib.Path(options.gsm8k).read_text(encoding="utf-8").splitlines()]
    shots, asked = lines[:5], lines[5:5 + options.problems]
    prompt = "".join(f"Question: {d['question']}\nAnswer: {d['answer']}\n\n" for d in shots)
    until = {"until": ["Question:", "</s>", "<|im_end|>"], "max_gen_toks": 256, "do_sample": False,
             "temperature": 0.0}
    requests = [types.SimpleNamespace(args=(f"{prompt}Question: {d['question']}\nAnswer:", until))
                for d in asked]
    answers = client.generate_until(requests, disable_tqdm=True)
    pairs = [lm_eval_matches(answer, d["answer"]) for answer, d in zip(answers, asked, strict=True)]
    samples = work / "samples.jsonl"
    found = evaluate(options, "gsm8k", options.model, "--data", options.gsm8k, "--limit",
                     options.problems, "--samples", samples)
    ours = [json.loads(line)["answer"] for line in samples.read_text().splitlines()]
    same = sum(a.strip() == b.strip() for a, b in zip(ours, answers, strict=True))
    report(f"gsm8k: equal answers of {len(pairs)}", same, len(pairs), len(pairs) - same, 0)
    for place, name in enumerate(["strict_match", "flexible_match"]):
        theirs = sum(pair[place] for pair in pairs) / len(pairs)
        report(f"gsm8k: {name} of {len(pairs)}", found[name], theirs, abs(found[name] - theirs),
               1e-12)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--tasks")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--gsm8k")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--concurrent", type=int, default=256)
    options = parser.parse_args()
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    server, port = start_server(options)
    try:
        client = LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{port}/v1/completions", model="asked",
            tokenizer=options.model, tokenizer_backend="huggingface",
            num_concurrent=options.concurrent, batch_size=1, max_length=2048,
            add_bos_token=True)  # what the tokenizer puts in front, as lm-eval's own models do
        with tempfile.TemporaryDirectory() as work:
            if options.tasks:
                check_choices(options, client, pathlib.Path(work))
            if options.gsm8k:
                check_problems(options, client, pathlib.Path(work))
    finally:
        server.terminate()
        server.wait()
    print(f"{sum(RESULTS)} passed, {len(RESULTS) - sum(RESULTS)} failed")
    return 0 if all(RESULTS) else 1


if __name__ == "__main__":
    sys.exit(main())
