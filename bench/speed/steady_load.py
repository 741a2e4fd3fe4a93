#!/usr/bin/env python3
"""Whether a server stays whole under load: many streams for minutes, every answer compared.

Usage: steady_load.py MODEL [--streams 256] [--seconds 300] [--questions 64] [--tokens 24]

Starts `nibble serve MODEL`, asks every question once, alone, and keeps its answer; then holds
`streams` connections open that ask questions at random, greedy and streamed, until the time is
over. Prints one line of JSON:

  requests, errors, differences   answered; failed in any way; other than when asked alone
  rss_spread_percent              of the server's memory after the first minute, largest over smallest
  pages_used                      of the cache, when all is answered
  streamed_tokens, http_cpu_us    tokens that came, and CPU time of the HTTP threads for each

NIBBLE_BIN names the binary. Standard library only.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("NIBBLE_BIN", str(ROOT / "build/cpu/tools/nibble"))
HOST = "127.0.0.1"


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def wait_until_ready(port, process):
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5).read()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"the server ended with {process.returncode}")


def questions(count):
    """Beginnings of stories, of a few to a hundred words, all different."""
    names = ["Lily", "Tom", "Mia", "Ben", "Anna", "Max", "Sue", "Tim"]
    things = ["ball", "boat", "kite", "hat", "drum", "cake", "book", "frog"]
    rng = random.Random(7)
    texts = []
    while len(texts) < count:
        sentences = [f"{rng.choice(names)} had a {rng.choice(['red', 'big', 'new', 'old'])} "
                     f"{rng.choice(things)}." for _ in range(rng.randint(1, 16))]
        text = " ".join(sentences)
        if text not in texts:
            texts.append(text)
    return texts


async def ask(stream, prompt, tokens):
    """The text of a streamed answer, and how many events brought it."""
    reader, writer = stream
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
                       "stream": True, "ignore_eos": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n" % len(body) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or b"chunked" not in head:
        raise ValueError(head.decode(errors="replace"))
    data = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        data += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    text, events = "", 0
    for line in data.decode().split("\n\n"):
        if line.startswith("data: {"):
            text += json.loads(line[6:])["choices"][0]["text"]
            events += 1
    if "data: [DONE]" not in data.decode():
        raise ValueError("a stream without its end")
    return text, events


def http_cpu_ticks(pid):
    ticks = 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rsplit(")", 1)
        if "(http" in fields[0]:
            ticks += sum(int(field) for field in fields[1].split()[11:13])
    return ticks


def resident_kb(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])


async def stream_of_questions(port, args, expected, counts):
    rng = random.Random()
    stream = await asyncio.open_connection(HOST, port)
    while time.monotonic() < counts["until"]:
        prompt = rng.choice(list(expected))
        try:
            text, events = await ask(stream, prompt, args.tokens)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            counts["errors"] += 1
            print(f"error: {error}", flush=True)
            stream = await asyncio.open_connection(HOST, port)
            continue
        counts["requests"] += 1
        counts["events"] += events
        counts["differences"] += text != expected[prompt]
    stream[1].close()


async def watch_memory(pid, counts):
    while time.monotonic() < counts["until"]:
        await asyncio.sleep(1)
        counts["rss"].append(resident_kb(pid))


async def load(port, pid, args):
    alone = await asyncio.open_connection(HOST, port)
    expected = {}
    for prompt in questions(args.questions):
        expected[prompt] = (await ask(alone, prompt, args.tokens))[0]
    alone[1].close()
    counts = {"requests": 0, "errors": 0, "differences": 0, "events": 0, "rss": [],
              "until": time.monotonic() + args.seconds}
    before = http_cpu_ticks(pid)
    await asyncio.gather(watch_memory(pid, counts), *(
        stream_of_questions(port, args, expected, counts) for _ in range(args.streams)))
    counts["ticks"] = http_cpu_ticks(pid) - before
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    args, flags = parser.parse_known_args()
    port = free_port()
    process = subprocess.Popen(
        [BINARY, "serve", args.model, "--port", str(port), "--served-model-name", "m",
         "--max-queued-requests", str(2 * args.streams), *(f for f in flags if f != "--")],
        stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(port, process)
        counts = asyncio.run(load(port, process.pid, args))
        metrics = urllib.request.urlopen(f"http://{HOST}:{port}/metrics").read().decode()
    finally:
        process.terminate()
        process.wait()
    settled = counts["rss"][60:] or counts["rss"]
    cpu = counts["ticks"] / os.sysconf("SC_CLK_TCK") * 1e6
    print(json.dumps({
        "streams": args.streams, "seconds": args.seconds, "requests": counts["requests"],
        "errors": counts["errors"], "differences": counts["differences"],
        "rss_spread_percent": round(100 * (max(settled) / min(settled) - 1), 2),
        "pages_used": float(re.search(r"kv_cache_pages_used\{.*\} (\S+)", metrics)[1]),
        "streamed_tokens": counts["events"],
        "http_cpu_us": round(cpu / max(1, counts["events"]), 2),
        "exit": process.returncode}))


if __name__ == "__main__":
    main()
