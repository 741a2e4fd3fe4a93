#!/usr/bin/env python3
"""What a client of `nibble serve` sees of one model after another, kernel by kernel.

Usage: moe_server.py --nibble FILE MODEL ... [--device cuda] [--kernel default NAME ...]
                     [--lengths 113 561 1681] [--context 1024] [--tokens 128] [--repeats 10]
                     [-- more flags of serve]

For every model and kernel ("default": no --kernel) a server is started on a free port, and one line
of JSON printed:

  ready_s, first_token_s    from the start of the process until /health says so, and until the first
                            token of a prompt of 8 tokens came
  ttft_ms                   for each length of a prompt: the first request of that length after the
                            start, the last of `repeats`, and the median of those after the first
  tpot_ms, tokens_per_s     at batch 1 behind a prompt of --context tokens: time of a token after
                            the first, and tokens over the time of the whole answer; medians
  tpot_from                 "stream": from the first event to the last; "difference": between whole
                            answers and those of one token, where events come late: text of some
                            tokens is held back until a character is whole, and models of
                            `nibble make-dummy` have tokens without text
  gpu_memory_mib            used on the GPU by all processes, and by the server where nvidia-smi
                            tells, at the end; null without nvidia-smi

First tokens are answers of one token. Prompts are random token ids, each different, so that no
prefix is cached. Answers are greedy and ignore the end token. Standard library only.
"""

import argparse
import http.client
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from cpu_process import Server, rounded

SHORT_PROMPT = 8
SPECIAL = 256  # ids below may be control tokens
DEFAULT = "default"


def vocabulary(model):
    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    return config.get("vocab_size") or config["text_config"]["vocab_size"]


class Client:
    """Requests to one server, with prompts of random token ids."""

    def __init__(self, url, vocab, seed=1):
        self.host = urllib.parse.urlsplit(url).netloc
        self.url = url
        self.random = random.Random(seed)
        self.ids = range(min(SPECIAL, vocab // 2), min(vocab, 50000))

    def wait_until_healthy(self, seconds=600):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.005)
        raise RuntimeError(f"{self.url}/health: not well after {seconds} s")

    def ask(self, length, tokens):
        """The answer's events, (seconds since the request, tokens so far)."""
        body = {"prompt": self.random.choices(self.ids, k=length), "max_tokens": tokens,
                "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        connection = http.client.HTTPConnection(self.host, timeout=600)
        begin = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{length} tokens: {response.status} {response.read().decode()}")
        events = list(read_events(response, begin))
        connection.close()
        if not events or events[-1][1] != tokens:
            raise RuntimeError(f"{length} tokens: {events[-1:]} instead of {tokens} tokens")
        return events

    def first_token(self, length):
        """Seconds until the only token of an answer."""
        return self.ask(length, 1)[-1][0]


def read_events(response, begin):
    """Yields (seconds since `begin`, tokens so far) whenever tokens have come."""
    seen = 0
    for line in response:
        now = time.monotonic() - begin
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data: "):])
        if "error" in event:
            raise RuntimeError(event["error"])
        tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        if tokens > seen:
            seen = tokens
            yield now, tokens


def gpu_memory(pid):
    """MiB on the first GPU, and those of one process, or None where nvidia-smi does not tell."""
    def query(*words):
        try:
            run = subprocess.run(["nvidia-smi", *words, "--format=csv,noheader,nounits"],
                                 capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return [line.split(", ") for line in run.stdout.splitlines()] if run.returncode == 0 else []
    used = query("--query-gpu=memory.used")
    own = [int(memory) for process, memory in query("--query-compute-apps=pid,used_memory")
           if process == str(pid) and memory.isdigit()]
    return {"used": int(used[0][0]) if used else None, "server": sum(own) if own else None}


def times_to_first(client, lengths, repeats):
    result = {}
    for length in lengths:
        ms = [1e3 * client.first_token(length) for _ in range(repeats)]
        result[str(length)] = {"first": ms[0], "last": ms[-1],
                               "median": statistics.median(ms[1:] or ms)}
    return result


def decoding(client, context, tokens, repeats):
    first, answers = [], []
    for _ in range(repeats):  # in turns
        first.append(client.first_token(context))
        answers.append(client.ask(context, tokens))
    whole = statistics.median(events[-1][0] for events in answers)
    if all(events[0][1] == 1 for events in answers):
        source = "stream"
        later = statistics.median((events[-1][0] - events[0][0]) / (tokens - 1)
                                  for events in answers)
    else:
        source = "difference"
        later = (whole - statistics.median(first)) / (tokens - 1)
    return {"context": context, "tokens": tokens, "tpot_ms": 1e3 * later, "tpot_from": source,
            "tokens_per_s": tokens / whole}


def measure(args, model, kernel):
    flags = ["--device", args.device] + (["--kernel", kernel] if kernel != DEFAULT else [])
    begin = time.monotonic()
    with Server(args.nibble, model, *flags, *args.flags) as server:
        client = Client(server.url, vocabulary(model))
        client.wait_until_healthy()
        ready = time.monotonic() - begin
        asked = time.monotonic() - begin
        first_token = asked + client.first_token(SHORT_PROMPT)
        ttft = times_to_first(client, args.lengths, args.repeats)
        later = decoding(client, args.context, args.tokens, max(2, args.repeats // 2))
        return {"model": str(model), "device": args.device, "kernel": kernel,
                "flags": args.flags, "ready_s": ready, "first_token_s": first_token,
                "ttft_ms": ttft, **later,
                "gpu_memory_mib": gpu_memory(server.process.pid)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--nibble", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernel", nargs="+", default=[DEFAULT], help="names; default: none")
    parser.add_argument("--lengths", type=int, nargs="+", default=[113, 561, 1681])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    args.flags = words[split + 1:]
    if args.tokens < 2 or args.repeats < 1:
        parser.error("--tokens has to be at least 2, and --repeats 1")
    for model in args.models:
        for kernel in args.kernel:
            try:
                result = measure(args, model, kernel)
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                result = {"model": model, "device": args.device, "kernel": kernel,
                          "error": str(error)}
            print(json.dumps(rounded(result, 3)), flush=True)


if __name__ == "__main__":
    main()
