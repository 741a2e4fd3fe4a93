"""The official OpenAI client against `nibble serve` on the embedded model.

NIBBLE_BIN names the binary (default: build/cpu/tools/nibble). Run from the repository root.
"""

import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time
import urllib.request

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("NIBBLE_BIN", str(ROOT / "build/cpu/tools/nibble"))
MODEL = "models/storyteller"
KEY = "e2e-key"
PROMPT = "Once upon a time there was a"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, *flags):
        self.port = free_port()
        command = [BINARY, "serve", MODEL, "--port", str(self.port), "--api-key", KEY, *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        deadline = time.monotonic() + 120
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"no server: {self.process.communicate()[1]}")
            time.sleep(0.05)
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=300
        )
        self.name = self.client.models.list().data[0].id

    def healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False

    def metric(self, name):
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found.group(1))

    def post(self, path, body, key=KEY):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def complete(self, prompt=PROMPT, **arguments):
        arguments.setdefault("temperature", 0)
        arguments.setdefault("max_tokens", 24)
        return self.client.completions.create(model=self.name, prompt=prompt, **arguments)

    def chat(self, **arguments):
        arguments.setdefault("temperature", 0)
        arguments.setdefault("max_tokens", 24)
        arguments.setdefault("messages", [{"role": "user", "content": "Tell me a story."}])
        return self.client.chat.completions.create(model=self.name, **arguments)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    assert running.stop() == 0


def eventually(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_models(server):
    model = server.client.models.retrieve(server.name)
    assert model.id == server.name
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("nobody")


def test_chat(server):
    answer = server.chat()
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content is not None
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert server.chat().choices[0].message.content == choice.message.content


def test_streaming_equals_whole_and_reports_usage(server):
    whole = server.chat()
    chunks = list(server.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content


def test_usage_counts_cached_tokens(server):
    prompt = "It was long ago, in a land far away, that " * 4
    server.complete(prompt)
    usage = server.complete(prompt).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_stop(server):
    full = server.complete().choices[0].text
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    cut = server.complete(stop=stop).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == full[: full.index(stop)]
    streamed = "".join(c.choices[0].text for c in server.complete(stop=[stop], stream=True))
    assert streamed == cut.text


def test_logprobs(server):
    chat = server.chat(max_tokens=4, logprobs=True, top_logprobs=3).choices[0]
    assert 1 <= len(chat.logprobs.content) <= 4
    for token in chat.logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)  # greedy
    choice = server.complete(max_tokens=4, logprobs=2).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset) == 4
    assert choice.logprobs.text_offset[0] == 0


def test_n_seed_and_prompt_forms(server):
    sampled = dict(temperature=1.0, seed=7, n=2, max_tokens=12)
    first, second = server.complete(**sampled), server.complete(**sampled)
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert [c.index for c in first.choices] == [0, 1]
    status, tokens = server.post("/tokenize", json.dumps({"prompt": PROMPT}))
    assert status == 200
    alone = server.complete().choices[0].text
    several = server.complete([tokens["tokens"], tokens["tokens"]])
    assert [c.text for c in several.choices] == [alone, alone]
    assert server.complete(echo=True).choices[0].text == PROMPT + alone


def test_min_tokens_and_ignore_eos(server):
    answer = server.chat(max_tokens=40, extra_body={"ignore_eos": True, "min_tokens": 40})
    assert answer.usage.completion_tokens == 40
    assert answer.choices[0].finish_reason == "length"


def test_wrong_key(server):
    stranger = openai.OpenAI(base_url=server.client.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        stranger.chat.completions.create(model=server.name, messages=[])
    assert caught.value.code == "invalid_api_key"
    assert caught.value.type == "authentication_error"


def test_unknown_model(server):
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.completions.create(model="gpt-17", prompt="x")
    assert caught.value.code == "model_not_found"


def test_prompt_too_long(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.complete("word " * 5000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body, param",
    [
        ("{", None),
        ("[]", None),
        ('{"messages": [{"role": "user"', None),
        ('{"prompt": "x"}', "messages"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        (
            '{"messages": [{"role": "user", "content": "x"}],'
            ' "response_format": {"type": "json_object"}}',
            "response_format",
        ),
    ],
)
def test_malformed_requests(server, body, param):
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert answer["error"]["message"]


def test_disconnect_frees_pages(server):
    assert eventually(lambda: server.metric("vllm:num_requests_running") == 0)
    streams = [
        server.complete(max_tokens=900, stream=True, extra_body={"ignore_eos": True})
        for _ in range(4)
    ]
    for stream in streams:
        next(iter(stream))
    assert server.metric("nibble:kv_cache_pages_used") > 0
    for stream in streams:
        stream.close()
    closed = time.monotonic()
    assert eventually(lambda: server.metric("nibble:kv_cache_pages_used") == 0, 2.0)
    assert server.metric("vllm:num_requests_running") == 0
    print(f"pages free {time.monotonic() - closed:.3f} s after the disconnect")


def test_64_streams_equal_their_sequential_answers(server):
    starts = ["The king", "A fox", "My mother", "In the forest", "The old ship", "Alice", "He", "I"]
    prompts = [f"{start} {word}" for start in starts for word in
               ("said", "was", "had", "went", "saw", "knew", "came", "and")]
    assert len(set(prompts)) == 64
    arguments = dict(max_tokens=32, extra_body={"ignore_eos": True})
    expected = [server.complete(prompt, **arguments).choices[0].text for prompt in prompts]

    def stream(prompt):
        chunks = server.complete(prompt, stream=True, **arguments)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(stream, prompts))
    assert answers == expected


def test_sigterm_drains_and_port_in_use_is_reported():
    running = Server("--shutdown-timeout", "60")
    second = subprocess.run(
        [BINARY, "serve", MODEL, "--port", str(running.port)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )
    assert second.returncode == 8
    assert str(running.port) in second.stderr
    stream = iter(running.complete(max_tokens=300, stream=True, extra_body={"ignore_eos": True}))
    chunks = [next(stream)]
    running.process.send_signal(signal.SIGTERM)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert running.process.wait(timeout=60) == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", running.port), timeout=2)
