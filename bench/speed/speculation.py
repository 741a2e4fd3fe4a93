"""What --speculative-config gains: two servers of one model, asked the same in turns.

Usage: speculation.py MODEL CONFIG [--text FILE] [--chat] [--edit] [--repeat] [--among N]
                      [--device D] [--tokens N] [--batch N] [--rounds N] [--threads N] [--temperature T]

Prompts are passages of FILE; with --chat a few tasks; with --edit short programs to be
written again with one name changed; with --repeat a story three times, so that the answer repeats
it; with --among N answers are of N tokens alone, by bias, so that proposals to
a model of any weights are right about once in N. In every round each server answers `batch`
prompts at once, in changing order; seconds are those of all answers. Prints the median
ratio of tokens per second with its quartiles, what was proposed and accepted, and whether every
answer was the same. NIBBLE_BIN names the binary. Standard library only.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("NIBBLE_BIN", str(ROOT / "build/cpu/tools/nibble"))
TASKS = [
    "Write a short story about a fisherman who finds a map.",
    "Explain in simple words how a bicycle stays upright.",
    "Give me ten tips for a good night's sleep.",
    "What is the difference between weather and climate?",
    "Write a Python function that finds the longest word of a text, and explain it.",
    "Describe how bread is made, step by step.",
]


STORY = ("Lily had a red ball. She went to the park with her mom. At the park, Lily saw a big dog. "
         "The dog wanted to play with the ball. ")
BEGINNINGS = ["Lily had a red ball.", "Lily", "One day, Lily had a red", "She went"]


PROGRAM = '''import json
import pathlib


def read_records(path):
    """All records of a file, one a line."""
    records = []
    for line in pathlib.Path(path).read_text().splitlines():
        if line.strip():
            records.append(json.loads(line))
    return records


def total_of(records, field):
    total = 0
    for record in records:
        total += record.get(field, 0)
    return total


def main():
    records = read_records("sales.jsonl")
    print("records:", len(records))
    print("total:", total_of(records, "amount"))
'''
EDIT = (f"Here is a Python file:\n\n```python\n{PROGRAM}```\n\n"
        "Write the file again, with the name {old} changed to {new}.")
CHANGES = [("records", "rows"), ("total", "amount_sum"), ("line", "text"), ("field", "column")]


class Server:
    def __init__(self, model, args, *flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [BINARY, "serve", model, "--port", self.url.rsplit(":", 1)[1], "--threads",
                   str(args.threads), "--device", args.device, *flags]
        if args.kv_cache_memory:
            command += ["--kv-cache-memory", args.kv_cache_memory]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)}: ended with {self.process.returncode}")
                time.sleep(0.05)

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def ask(self, body):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            whole = json.loads(answer.read())
        choice = whole["choices"][0]
        text = choice["message"]["content"] if "messages" in body else choice["text"]
        return text, whole["usage"]["completion_tokens"]

    def run(self, bodies):
        """Texts, and tokens per second of all together."""
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(self.ask, bodies))
        seconds = time.monotonic() - begin
        return [text for text, _ in answers], sum(count for _, count in answers) / seconds

    def counter(self, name):
        found = re.search(rf"^vllm:spec_decode_num_{name}_total{{[^}}]*}} (\S+)$",
                          self.get("/metrics"), re.MULTILINE)
        return int(float(found.group(1))) if found else 0


def bodies_of(args):
    common = {"max_tokens": args.tokens, "temperature": args.temperature, "seed": 1}
    if args.repeat:
        return [{"prompt": STORY * 3 + begin, "ignore_eos": True, **common} for begin in BEGINNINGS]
    if args.among:
        common["logit_bias"] = {str(300 + 90 * i): 100 for i in range(args.among)}
        return [{"prompt": f"{number} {STORY}", **common, "seed": number, "ignore_eos": True}
                for number in range(64)]
    if args.chat:
        return [{"messages": [{"role": "user", "content": task}], **common} for task in TASKS]
    if args.edit:
        return [{"messages": [{"role": "user", "content": EDIT.format(old=old, new=new)}], **common}
                for old, new in CHANGES]
    text = pathlib.Path(args.text).read_text(errors="replace")
    step = max(len(text) // 64, 1500)
    return [{"prompt": text[at:at + 1500], **common} for at in range(0, len(text) - 1500, step)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("config")
    parser.add_argument("--text")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--edit", action="store_true")
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--among", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-cache-memory")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    bodies = bodies_of(args)
    servers = [Server(args.model, args),
               Server(args.model, args, "--speculative-config", args.config)]
    ratios, speeds, same, answers = [], [], 0, 0
    try:
        for number in range(args.rounds + 1):
            batch = [bodies[(number * args.batch + i) % len(bodies)] for i in range(args.batch)]
            results = [None, None]
            for which in ((0, 1), (1, 0))[number % 2]:
                results[which] = servers[which].run(batch)
            same += sum(map(str.__eq__, results[0][0], results[1][0]))
            answers += len(batch)
            if number > 0:  # the first warms up
                speeds.append([result[1] for result in results])
                ratios.append(results[1][1] / results[0][1])
        counts = {name: servers[1].counter(name)
                  for name in ("drafts", "draft_tokens", "accepted_tokens")}
    finally:
        for server in servers:
            server.process.terminate()
            server.process.wait()
    quartiles = statistics.quantiles(ratios, n=4)
    print(json.dumps({
        "ratio": round(statistics.median(ratios), 3),
        "ratio_p25": round(quartiles[0], 3),
        "ratio_p75": round(quartiles[2], 3),
        "tokens_per_second": [round(statistics.median(side), 1) for side in zip(*speeds)],
        "same_answers": f"{same} of {answers}", **counts, "batch": args.batch, "tokens": args.tokens}))


if __name__ == "__main__":
    main()
