"""`nibble bench serve`: against `nibble serve`, and against servers that misbehave."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import time

import pytest

from cli_tools import (BINARY, CORRUPT, INVALID, NOT_FOUND, ROOT, STORYTELLER, UNAVAILABLE, fails,
                       json_of, nibble, succeeds)
from stub_server import Stub, frame, head

QUICK = ("--vocab-size", 200, "--num-prompts", 6, "--random-input-len", 8, "--random-output-len", 4,
         "--ready-check-timeout-sec", 0, "--log-level", "error")


def bench(url, *flags):
    return ("bench", "serve", "--base-url", url, *QUICK, *flags)


class Server:
    """`nibble serve` on the embedded model."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [BINARY, "serve", str(STORYTELLER), "--port", str(self.port), "--log-level", "error"],
            cwd=ROOT, stderr=subprocess.DEVNULL)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server():
    made = Server()  # not ready: the client waits
    yield made
    made.stop()


def test_table_of_vllm(server, tmp_path):
    result = succeeds("bench", "serve", "--base-url", server.url + "/v1", "--tokenizer", STORYTELLER,
                      "--num-prompts", 12, "--random-input-len", 20, "--random-output-len", 8,
                      "--max-concurrency", 4, "--ignore-eos", "--num-warmups", 2,
                      "--goodput", "ttft:60000", "e2el:60000", "--metric-percentiles", "50,99.9",
                      "--result-file", tmp_path / "r.json", "--save-detailed",
                      "--report", tmp_path / "r.html", timeout=300)
    lines = result.stdout.splitlines()
    assert "============ Serving Benchmark Result ============" in lines
    values = dict(re.findall(r"^([A-Z][^:]+): +([\d.]+) *$", result.stdout, re.MULTILINE))
    assert values["Successful requests"] == "12" and values["Failed requests"] == "0"
    assert values["Maximum request concurrency"] == "4"
    assert values["Total generated tokens"] == str(12 * 8)
    assert "P99.9 TTFT (ms)" in values and "P50 E2EL (ms)" in values
    assert float(values["Request goodput (req/s)"]) == float(values["Request throughput (req/s)"])
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["completed"] == 12 and saved["output_lens"] == [8] * 12
    assert all(len(gaps) == 7 or gaps for gaps in saved["itls"])
    assert all(ttft < latency for ttft, latency in zip(saved["ttfts"], saved["latencies"]))
    assert saved["max_concurrent_requests"] <= 4
    assert len(set(saved["generated_texts"])) > 1
    page = (tmp_path / "r.html").read_text()
    assert "@REPORT@" not in page and "http://www.w3.org/2000/svg" in page
    assert not re.search(r"(src|href)=", page)  # nothing from outside


def test_layout_of_sglang_appends(server, tmp_path):
    for _ in range(2):
        result = succeeds("bench", "serve", "--base-url", server.url, "--backend", "sglang-oai",
                          "--layout", "sglang", "--vocab-size", 200, "--num-prompts", 5,
                          "--random-input-len", 16, "--random-output-len", 6,
                          "--random-range-ratio", 1, "--request-rate", 100,
                          "--output-file", tmp_path / "r.jsonl", timeout=300)
        assert "Traffic request rate:                    100" in result.stdout
        assert "random range 1 (sglang): input 16 to 16" in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [row["total_output_tokens"] for row in rows] == [30, 30]
    assert [row["total_input_tokens"] for row in rows] == [80, 80]


def test_chat_and_files(server, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Tell me of day {i}.", "output_tokens": 3}) + "\n"
                            for i in range(4))
                    + json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    result = json_of("bench", "serve", "--base-url", server.url, "--backend", "openai-chat",
                     "--dataset-name", "custom", "--dataset-path", data, "--num-prompts", 5,
                     "--output-len", 3, "--log-level", "error", timeout=300)
    assert result["completed"] == 5 and result["total_output_tokens"] <= 15
    fails(INVALID, "openai-chat", arguments=(
        "bench", "serve", "--base-url", server.url, "--dataset-name", "custom", "--dataset-path",
        data, "--num-prompts", 5, "--log-level", "error"))
    talk = [{"conversations": [{"from": "human", "value": f"What is it, number {i}?"},
                               {"from": "gpt", "value": "It is a long and winding tale."}]}
            for i in range(6)]
    data.write_text(json.dumps(talk))
    result = json_of("bench", "serve", "--base-url", server.url, "--dataset-name", "sharegpt",
                     "--dataset-path", data, "--tokenizer", STORYTELLER, "--num-prompts", 4,
                     "--ignore-eos", "--log-level", "error", timeout=300)
    assert result["completed"] == 4 and result["total_output_tokens"] > 16


def test_sweep_and_compare(server, tmp_path):
    result = json_of("bench", "serve", "--base-url", server.url, *QUICK[:8], "--sweep",
                     "concurrency=1,2,4", "--report", tmp_path / "s.html", "--log-level", "error",
                     timeout=300)
    assert [run["label"] for run in result["runs"]] == ["1", "2", "4"]
    assert all(run["max_concurrent_requests"] <= int(run["label"]) for run in result["runs"])
    result = json_of("bench", "serve", *QUICK[:8], "--compare", server.url, server.url, "--rounds", 4,
                     "--log-level", "error", "--report", tmp_path / "c.html", timeout=300)
    assert len(result["runs_a"]) == len(result["runs_b"]) == 4
    for number in result["compared"]:
        assert number["low"] <= number["ratio"] <= number["high"]


def test_gsm8k_beside(server, tmp_path):
    data = tmp_path / "gsm.jsonl"
    data.write_text("".join(json.dumps({"question": f"What is {i} plus {i}?",
                                        "answer": f"It is {2 * i}.\n#### {2 * i}"}) + "\n"
                            for i in range(8)))
    arguments = ("--dataset-name", "gsm8k", "--dataset-path", data, "--fewshot", 2, "--output-len",
                 12, "--num-prompts", 5, "--log-level", "error")
    result = json_of("bench", "serve", "--compare", server.url, server.url, *arguments, timeout=300)
    a, b = result["servers"]
    assert a["items"] == b["items"] == 5
    assert a["flexible_match"] == b["flexible_match"]  # the same greedy answers
    assert result["accuracy_difference"] == 0
    assert a["p90_ttft_ms"] >= a["median_ttft_ms"] > 0
    text = succeeds("bench", "serve", "--base-url", server.url, *arguments, timeout=300).stdout
    assert "GSM8K, 5 problems, 2 examples" in text and "+-" in text


def test_gsm8k_scores_what_a_server_says(tmp_path):
    """An independent count: the stub's answers have no number, so none is right."""
    data = tmp_path / "gsm.jsonl"
    data.write_text('{"question": "2+2?", "answer": "#### 4"}\n' * 3)
    stub = Stub()
    result = json_of("bench", "serve", "--base-url", stub.start(), "--dataset-name", "gsm8k",
                     "--dataset-path", data, "--fewshot", 1, "--num-prompts", 2,
                     "--log-level", "error")
    assert result["servers"][0]["flexible_match"] == 0
    sent = stub.bodies[-1]
    assert sent["temperature"] == 0 and sent["messages"][0]["content"].endswith("2+2?\nAnswer:")
    assert "#### 4" in sent["messages"][0]["content"]  # the example


def test_a_role_is_no_first_token_of_gsm8k(tmp_path):
    data = tmp_path / "gsm.jsonl"
    data.write_text('{"question": "2+2?", "answer": "#### 4"}\n' * 3)
    stub = Stub(first=0.15)

    async def role_first(writer, chat, tokens):
        writer.write(head(kind="text/event-stream", extra="Transfer-Encoding: chunked\r\n\r\n"))
        writer.write(frame({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        await writer.drain()
        await asyncio.sleep(stub.first)
        writer.write(frame({"choices": [{"index": 0, "delta": {"content": "#### 4"}}]}))
        writer.write(frame("[DONE]") + b"0\r\n\r\n")

    stub.stream = role_first
    result = json_of("bench", "serve", "--base-url", stub.start(), "--dataset-name", "gsm8k",
                     "--dataset-path", data, "--fewshot", 0, "--num-prompts", 3,
                     "--log-level", "error")["servers"][0]
    assert result["flexible_match"] == result["strict_match"] == 1
    assert result["median_ttft_ms"] >= 149


def test_times_are_those_of_the_server():
    """The stub sends its first token after 120 ms and one every 30 ms."""
    url = Stub(first=0.12, gap=0.03).start()
    result = json_of(*bench(url, "--extra-body", '{"max_tokens": 6}', "--max-concurrency", 2))
    assert result["completed"] == 6 and result["total_output_tokens"] == 36
    assert 119 <= result["median_ttft_ms"] <= 160
    assert 29 <= result["median_tpot_ms"] <= 36
    assert 29 <= result["median_itl_ms"] <= 36
    assert 269 <= result["median_e2el_ms"] <= 330


def test_what_is_sent():
    stub = Stub()
    url = stub.start()
    succeeds(*bench(url, "--extra-body", '{"top_k": 3, "stream_options": null}', "--temperature",
                    0.5, "--ignore-eos", "--api-key", "k"))
    body = stub.bodies[-1]
    assert body["model"] == "stub" and body["stream"] is True and body["max_tokens"] == 4
    assert body["top_k"] == 3 and body["temperature"] == 0.5 and body["ignore_eos"] is True
    assert body["stream_options"] is None and len(body["prompt"]) == 8
    prompts = [tuple(body["prompt"]) for body in stub.bodies]
    assert len(prompts) == 7 and len(set(prompts)) == 7  # the first one is a try, of its own prompt


@pytest.mark.parametrize("mode, code, words", [
    ("unauthorized", INVALID, ["HTTP 401", "Unauthorized"]),
    ("refused", INVALID, ["HTTP 400", "no such field"]),
    ("late-error", UNAVAILABLE, ["the engine fell over"]),
    ("half", UNAVAILABLE, ["closed the connection in the middle"]),
    ("stall", UNAVAILABLE, ["no more for 0.5 s"]),
    ("silent", UNAVAILABLE, ["nothing for 0.5 s"]),
    ("garbage", CORRUPT, ["no HTTP"]),
])
def test_servers_that_misbehave(mode, code, words):
    began = time.monotonic()
    fails(code, *words, arguments=bench(Stub(mode).start(), "--stall-timeout", 0.5))
    assert time.monotonic() - began < 20


def test_failures_in_a_run_are_counted_by_reason():
    stub = Stub()
    url = stub.start()
    begun = []
    good = stub.stream

    async def sometimes(writer, chat, tokens):
        begun.append(1)
        stub.mode = "late-error" if len(begun) % 3 == 0 else "good"
        await good(writer, chat, tokens)

    stub.stream = sometimes
    result = json_of(*bench(url, "--max-concurrency", 1))
    assert result["completed"] == 4 and result["failed"] == 2
    assert result["error_counts"] == {
        "the server failed while it answered: the engine fell over": 2}


def test_nobody_there_and_wrong_models(server):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fails(UNAVAILABLE, "cannot reach", "refused", arguments=bench(f"http://127.0.0.1:{port}"))
    fails(NOT_FOUND, "HTTP 404", "nope", arguments=bench(server.url, "--model", "nope"))
    fails(INVALID, "https", "proxy", arguments=bench("https://127.0.0.1"))


def test_connections_that_the_server_closes_are_made_anew():
    stub = Stub("closes")
    result = json_of(*bench(stub.start(), "--max-concurrency", 1))
    assert result["completed"] == 6 and result["failed"] == 0
    assert len(stub.bodies) == 7


def test_hundreds_of_streams_at_once():
    url = Stub(first=2.0, tokens=2).start()
    result = json_of("bench", "serve", "--base-url", url, "--vocab-size", 2000, "--num-prompts", 600,
                     "--random-input-len", 4, "--random-output-len", 2, "--log-level", "error")
    assert result["completed"] == 600 and result["max_concurrent_requests"] == 600


def test_waits_for_a_server_that_loads():
    stub = Stub("busy-first")
    result = json_of("bench", "serve", "--base-url", stub.start(), *QUICK[:8],
                     "--ready-check-timeout-sec", 20, "--log-level", "error")
    assert result["completed"] == 6


def test_answers_without_usage_are_counted():
    url = Stub("no-usage", tokens=3).start()
    result = nibble("bench", "serve", "--base-url", url, *QUICK[:8], "--json")
    assert "no usage" in result.stderr
    assert json.loads(result.stdout)["total_output_tokens"] == 18


@pytest.mark.parametrize("flags, words", [
    (["--request-rate", "0"], ["--request-rate", "above 0"]),
    (["--request-rate", "fast"], ["--request-rate", "no number"]),
    (["--random-range-ratio", "1"], ["--random-range-ratio", "vllm"]),
    (["--goodput", "latency:3"], ["--goodput", "e2el"]),
    (["--extra-body", "[1]"], ["--extra-body", "object"]),
    (["--metric-percentiles", "101"], ["--metric-percentiles"]),
    (["--percentile-metrics", "x"], ["--percentile-metrics", "ttft"]),
    (["--ramp-up-strategy", "linear"], ["--ramp-up-start-rps"]),
    (["--sweep", "users=3"], ["--sweep", "concurrency"]),
    (["--header", "x"], ["--header", "KEY=VALUE"]),
    (["--dataset-name", "custom"], ["--dataset-path"]),
    (["--backend", "openai-chat"], ["--tokenizer"]),
    (["--backend", "openai-chat", "--endpoint", "/v1/completions"], ["--endpoint"]),
    (["--compare", "a"], ["--compare"]),
])
def test_flags_that_make_no_sense(flags, words):
    fails(INVALID, *words, arguments=bench(Stub().start(), *flags))
