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
import urllib.error
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
    def __init__(self, *flags, model=MODEL):
        self.port = free_port()
        command = [BINARY, "serve", str(model), "--port", str(self.port), "--api-key", KEY, *flags]
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
            ' "response_format": {"type": "yaml"}}',
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
    closed, steps = time.monotonic(), server.metric("nibble:engine_steps_total")
    assert eventually(lambda: server.metric("nibble:kv_cache_pages_used") == 0, 2.0)
    assert server.metric("vllm:num_requests_running") == 0
    # The engine steps only while something runs: these are the steps until it saw the disconnect.
    # One after the sockets are closed; a few more when the machine is busy with other things.
    steps = server.metric("nibble:engine_steps_total") - steps
    assert steps <= 20
    print(f"pages free {time.monotonic() - closed:.3f} s and {steps:.0f} steps after the disconnect")


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


def test_every_route_answers_with_error_objects(server):
    def error(method, path, body=None, key=KEY):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        found = json.loads(response.read())["error"]
        assert set(found) == {"message", "type", "param", "code"} and found["message"]
        return response.status, found["type"]

    gets = ["/v1/models", "/v1/models/x", "/health", "/ready", "/ping", "/version", "/metrics"]
    posts = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/tokenize", "/detokenize",
             "/v1/detokenize"]
    for path in gets:
        assert error("POST", path, "{}") == (405, "invalid_request_error")
    for path in posts:
        assert error("GET", path) == (405, "invalid_request_error")
        assert error("POST", path, '{"') == (400, "invalid_request_error")
        assert error("POST", path, "{}", key="wrong") == (401, "authentication_error")
        assert error("POST", path, "x" * (17 << 20)) == (413, "invalid_request_error")
    assert error("GET", "/nowhere") == (404, "not_found_error")
    assert error("GET", "/nowhere", key="wrong") == (401, "authentication_error")


def test_characters_are_whole_however_tokens_cut_them(server):
    # A token that is a part of a character, over and over: nothing that is no UTF-8 may come out.
    _, tokens = server.post("/tokenize", json.dumps({"prompt": "\U0001f980"}))
    part = next(t for t in tokens["tokens"] if "\ufffd" in server.post(
        "/detokenize", json.dumps({"tokens": [t]}))[1]["prompt"])
    forced = dict(max_tokens=6, logit_bias={str(part): 100})
    whole = server.complete(**forced).choices[0].text
    assert "\ufffd" in whole
    streamed = [chunk.choices[0].text for chunk in server.complete(stream=True, **forced)]
    assert "".join(streamed) == whole


def test_flags_of_other_servers():
    def refused(*flags):
        run = subprocess.run([BINARY, "serve", MODEL, *flags], cwd=ROOT, capture_output=True,
                             text=True, timeout=60)
        return run.returncode, run.stderr

    code, message = refused("--tensor-parallel-size", "2")
    assert code == 5 and "--tensor-parallel-size 2 is not supported: " in message
    code, message = refused("--enable-expert-parallel")
    assert code == 5 and "--enable-expert-parallel is not supported: " in message
    code, message = refused("--default-chat-template-kwargs", "[]")
    assert code == 2 and "--default-chat-template-kwargs" in message
    code, message = refused("--kv-cache-dtype", "fp4")
    assert code == 2 and "int4" in message
    running = Server(
        "--tensor-parallel-size", "1", "--dtype", "auto", "--trust-remote-code", "--enforce-eager",
        "--tokenizer", MODEL, "--seed", "7", "--stream-interval", "5", "-c", "512",
        "--default-chat-template-kwargs", '{"enable_thinking": false}',
    )
    try:
        assert running.client.models.list().data[0].max_model_len == 512
        chunks = list(running.complete(max_tokens=11, stream=True, extra_body={"ignore_eos": True}))
        assert len(chunks) <= 5
        answers = [running.complete(temperature=1).choices[0].text]
    finally:
        assert running.stop() == 0
    again = Server("-c", "512", "--seed", "7", "--no-enable-prefix-caching")
    try:
        list(again.complete(max_tokens=11, stream=True, extra_body={"ignore_eos": True}))
        answers.append(again.complete(temperature=1).choices[0].text)
    finally:
        assert again.stop() == 0
    assert answers[0] == answers[1]


def test_sigterm_drains_and_port_in_use_is_reported():
    running = Server("--shutdown-timeout", "60")
    second = subprocess.run(
        [BINARY, "serve", MODEL, "--port", str(running.port)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )
    assert second.returncode == 8
    assert str(running.port) in second.stderr
    stream = iter(running.complete(max_tokens=900, stream=True, extra_body={"ignore_eos": True}))
    chunks = [next(stream)]
    running.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: not running.healthy())
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{running.port}/health", timeout=5)
    assert caught.value.code == 503
    with pytest.raises(openai.InternalServerError) as caught:
        running.complete()
    assert caught.value.status_code == 503 and caught.value.type == "unavailable_error"
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert running.process.wait(timeout=60) == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", running.port), timeout=2)
