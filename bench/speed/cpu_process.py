"""What is measured of `nibble` processes from outside, for cpu_table.py and kimi_serving.py: the
time to a first token, memory while loading and serving, and decoding beside another process that is
always busy."""
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request


def model_files(model):
    return sorted(pathlib.Path(model).glob("*.safetensors"))


def rounded(value, digits):
    """A row, all numbers of which have so many digits behind the point."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return round(value, digits) if isinstance(value, float) else value


def file_bytes(model):
    return sum(path.stat().st_size for path in model_files(model))


class MemoryPeaks:
    """The most bytes of each kind that a process has resident while the block runs, as read every
    few milliseconds: RssFile and RssShmem are pages of mapped files."""

    def __init__(self, pid):
        self.pid = pid
        self.bytes = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def watch(self):
        while not self.over.wait(0.005):
            with contextlib.suppress(OSError):
                status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
                for key, most in self.bytes.items():
                    if found := re.search(rf"^{key}:\s+(\d+) kB", status, re.M):
                        self.bytes[key] = max(most, 1024 * int(found[1]))


def start_to_first_token(nibble, model, *flags):
    """Of a process that answers with one token: the seconds from its start to that, those of
    loading and what it said of it, and the peaks of its memory."""
    begin = time.monotonic()
    command = [nibble, "generate", model, "--prompt", "a", "--max-tokens", "1", "--json", *flags]
    with (tempfile.TemporaryFile("w+") as log,
          subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process):
        with MemoryPeaks(process.pid) as peaks:
            line = process.stdout.readline()
            seconds = time.monotonic() - begin
        process.wait()
        log.seek(0)
        said = log.read()
    if not line:
        raise RuntimeError(f"{command}: exit code {process.returncode}: {said.strip()[-500:]}")
    answer = json.loads(line)
    return {"seconds": seconds, "load_s": answer["load_ms"] / 1e3,
            "loading": re.findall(r" weights: (.*)", said),
            "peaks": {"all": answer["peak_rss_bytes"], **peaks.bytes}}


def first_token(nibble, model, *flags):
    """Seconds from the start of a process to its answer of one token."""
    return start_to_first_token(nibble, model, *flags)["seconds"]


def drop_from_cache(model):
    """Whether the system's cache let go of the model's weights."""
    for path in model_files(model):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())  # dirty pages stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = path.stat().st_size
            cached = 0
            for i in range(16):
                with contextlib.suppress(BlockingIOError):
                    cached += os.preadv(file.fileno(), [bytearray(1)], size * i // 16,
                                        os.RWF_NOWAIT)
            if cached > 1:
                return False
    return True


class Server:
    """`nibble serve` of a model on a free port, as long as the block runs."""

    def __init__(self, nibble, model, *flags):
        self.command = [nibble, "serve", model, "--port", "0", *flags]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)
        self.said = said = []
        for line in self.process.stdout:
            said.append(line)
            if found := re.search(r"serving .* at (http://\S+)/v1", line):
                self.url = found[1]
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return self
        raise RuntimeError(f"{self.command}: exit code {self.process.wait()}: "
                           + "".join(said[-3:]).strip())

    def __exit__(self, *_):
        self.process.kill()  # rather than wait for an answer under way
        self.process.wait()

    def answer(self, tokens):
        """Asks for an answer of so many tokens; returns when it is there."""
        body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with contextlib.suppress(OSError, http.client.HTTPException):  # the block may end before
            urllib.request.urlopen(request).read()

    def generated(self):
        """Tokens so far."""
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        return float(re.search(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.M)[1])

    def memory(self):
        """Bytes: the most that was resident so far, and what is now."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return [1024 * int(re.search(rf"^{key}:\s+(\d+) kB", status, re.M)[1])
                for key in ("VmHWM", "VmRSS")]

    def rate(self, seconds):
        """Tokens a second in the next so many seconds."""
        begin, before = time.monotonic(), self.generated()
        time.sleep(seconds)
        after = self.generated()
        return (after - before) / (time.monotonic() - begin)


def beside_a_busy_process(server, turns, seconds=1.0):
    """Rates of decoding alone, and the ratios to them beside a process that loops: in turns, each
    compared with its neighbours in time."""
    tokens = 8000  # more than are decoded meanwhile
    threading.Thread(target=server.answer, args=(tokens,), daemon=True).start()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        alone, beside = [], []
        for turn in range(2 * turns + 1):
            busy.send_signal(signal.SIGCONT if turn % 2 else signal.SIGSTOP)
            time.sleep(0.2)  # until the system has placed its threads anew
            (beside if turn % 2 else alone).append(server.rate(seconds))
    finally:
        busy.kill()
        busy.wait()
    ratios = [rate / base for i, rate in enumerate(beside) for base in alone[i:i + 2]]
    return statistics.median(alone), ratios
