"""SGLang's routes on the embedded model, as its benchmark client uses them; browsers' preflights."""

import json
import time
import urllib.error
import urllib.request

import pytest

from test_openai import KEY, MODEL, PROMPT, Server

PAGE = "https://page.example"


@pytest.fixture(scope="module")
def server():
    running = Server("--allowed-origins", json.dumps([PAGE]), "--allowed-methods", "POST")
    yield running
    assert running.stop() == 0


def request(server, path, body=None, method=None, headers=()):
    headers = {"Authorization": f"Bearer {KEY}", **dict(headers)}
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{server.port}{path}"
    return urllib.request.urlopen(
        urllib.request.Request(url, data, headers, method=method), timeout=60
    )


def generate(server, **members):
    members.setdefault("sampling_params", {"temperature": 0, "max_new_tokens": 24})
    return json.load(request(server, "/generate", members))


def test_texts_are_those_of_completions(server):
    completion = server.complete(PROMPT)
    answer = generate(server, text=PROMPT, return_logprob=True, logprob_start_len=-1)
    meta = answer["meta_info"]
    assert answer["text"] == completion.choices[0].text
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["completion_tokens"] == completion.usage.completion_tokens
    assert meta["prompt_tokens"] == completion.usage.prompt_tokens
    assert meta["finish_reason"]["type"] == completion.choices[0].finish_reason
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"][
        : len(meta["output_token_logprobs"])
    ]
    ids = server.post("/tokenize", json.dumps({"prompt": PROMPT}))[1]["tokens"]
    again = generate(server, input_ids=[ids, ids[:4]])
    assert again[0]["text"] == answer["text"] and len(again) == 2


def test_stream(server):
    whole = generate(server, text=PROMPT)
    body = {
        "text": PROMPT,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 24},
        "lora_path": "",
        "return_logprob": False,
        "logprob_start_len": -1,
    }
    lines = [line.decode().strip() for line in request(server, "/generate", body)]
    frames = [line.removeprefix("data: ") for line in lines if line]
    assert frames.pop() == "[DONE]"
    events = [json.loads(frame) for frame in frames]
    for before, after in zip(events, events[1:]):
        assert after["text"].startswith(before["text"])
        assert after["meta_info"]["completion_tokens"] >= before["meta_info"]["completion_tokens"]
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_flushed_prefixes_are_not_found(server):
    text = "The old fox went down to the river every morning. " * 8

    def cached():
        return generate(server, text=text)["meta_info"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert request(server, "/flush_cache").status == 200
    assert cached() == 0 and cached() > 0
    assert request(server, "/reset_prefix_cache", {}).status == 200
    assert cached() == 0


def test_what_benchmark_clients_ask_for(server):
    for path in ("/get_model_info", "/model_info"):
        info = json.load(request(server, path))
        assert info["model_path"] == MODEL == info["tokenizer_path"] and info["is_generation"]
    for path in ("/get_server_info", "/server_info"):
        states = json.load(request(server, path))["internal_states"]
        assert states[0].get("avg_spec_accept_length") is None
    deadline = time.monotonic() + 10  # an answer's last bytes may come before it is counted out
    while json.load(request(server, "/load"))["server_load"] > 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert request(server, "/health_generate").status == 200
    assert json.load(request(server, "/abort_request", {"abort_all": True}))["aborted"] == 0
    with pytest.raises(urllib.error.HTTPError, match="400"):
        request(server, "/start_profile", {})


def test_pages_of_browsers(server):
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    answer = request(server, "/v1/chat/completions", method="OPTIONS", headers=asks)
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert answer.headers["Access-Control-Allow-Methods"] == "POST"
    assert request(server, "/v1/models", headers={"Origin": "https://other"}).headers[
        "Access-Control-Allow-Origin"
    ] is None
    asks["Access-Control-Request-Method"] = "DELETE"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        request(server, "/v1/responses/x", method="OPTIONS", headers=asks)
