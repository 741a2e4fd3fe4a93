"""Several API keys that are served in turns, time limits of requests, names of threads."""

import concurrent.futures
import pathlib
import re
import subprocess
import time
import urllib.request

import openai
import pytest
from test_openai import BINARY, KEY, MODEL, PROMPT, ROOT, Server

OTHER = "key-of-bob"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"# others\n{OTHER} bob 2\n")
    running = Server("--api-key-file", str(keys), "--max-num-seqs", "2")
    yield running
    assert running.stop() == 0


def client_of(server, key):
    return openai.OpenAI(
        base_url=server.client.base_url, api_key=key, max_retries=0, timeout=300
    )


def test_one_keys_queue_does_not_starve_another(server):
    ends = {}

    def ask(name, key):
        client_of(server, key).completions.create(
            model=server.name, prompt=PROMPT, max_tokens=60, extra_body={"ignore_eos": True}
        )
        ends[name] = time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(41) as pool:
        many = [pool.submit(ask, f"many {i}", KEY) for i in range(40)]
        while server.metric("vllm:num_requests_waiting") < 20:
            assert not all(one.done() for one in many)
            time.sleep(0.005)
        done_before = sum(one.done() for one in many)
        pool.submit(ask, "late", OTHER).result()
        for one in many:
            one.result()
    before_late = sum(end < ends["late"] for end in ends.values())
    assert before_late <= done_before + 12, (before_late, done_before)


def test_metrics_name_the_keys_without_showing_them(server):
    client_of(server, OTHER).completions.create(model=server.name, prompt=PROMPT, max_tokens=3)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert re.search(r'nibble:key_generation_tokens_total{[^}]*key="bob"} [1-9]', text)
    assert 'key="key-1"' in text
    assert OTHER not in text and KEY not in text


def test_a_waiting_request_is_refused_at_its_limit(server):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        busy = [
            pool.submit(server.complete, max_tokens=400, extra_body={"ignore_eos": True})
            for _ in range(2)
        ]
        while server.metric("vllm:num_requests_running") < 2:
            assert not all(one.done() for one in busy)
            time.sleep(0.002)
        with pytest.raises(openai.InternalServerError) as caught:
            server.complete(max_tokens=4, extra_body={"timeout": 0.001})
        for one in busy:
            one.result()
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    assert "time limit of 0.001 s" in caught.value.message


def test_threads_have_names(server):
    server.complete(max_tokens=2)
    tasks = pathlib.Path(f"/proc/{server.process.pid}/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
    assert "engine" in names
    assert "http-0" in names and "http-1" in names
    unnamed = [name for name in names if name == "nibble"]
    assert len(unnamed) == 1, names  # the first one


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (["--api-key-file", "no/such/file"], 3, "no/such/file"),
        (["--api-key", "a", "--api-key", "a"], 2, "--api-key"),
        (["--api-key", "a b"], 2, "without blanks"),
        (["--prefer", "latency"], 2, "--prefer"),
        (["--request-timeout", "-1"], 2, "--request-timeout"),
    ],
)
def test_bad_flags_end_the_start(flags, code, word):
    command = [BINARY, "serve", MODEL, "--port", "0", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert word in ended.stderr
