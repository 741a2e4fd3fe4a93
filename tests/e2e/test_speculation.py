"""Speculation by prompt lookup and by a draft model: the same answers in fewer steps."""

import json
import shutil
import subprocess

import pytest
from cli_tools import NOT_FOUND, STORYTELLER, UNSUPPORTED, succeeds
from test_openai import BINARY, MODEL, ROOT, Server

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
STORY = "Lily had a red ball. Lily had a red ball and a blue ball. Lily had a"


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "quantized"
    succeeds("quantize", STORYTELLER, folder, "--scheme", "w4a16_g32")
    return str(folder)


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def servers(request):
    config = CONFIG
    if request.param == "draft_model":
        config = {
            "method": "draft_model",
            "num_speculative_tokens": 4,
            "model": request.getfixturevalue("draft_model"),
        }
    both = [Server(), Server("--speculative-config", json.dumps(config))]
    yield both
    assert [server.stop() for server in both] == [0, 0]


@pytest.mark.parametrize(
    "sampling",
    [
        dict(temperature=0),
        dict(temperature=0.8, seed=3, n=3),
        dict(temperature=0.7, seed=4, presence_penalty=0.5, logit_bias={"5": -3}),
        dict(temperature=0, extra_body={"min_tokens": 60, "bad_words": ["ball"]}),
    ],
)
def test_answers_are_the_same(servers, sampling):
    plain, ahead = (
        server.complete(STORY, max_tokens=80, logprobs=2, **sampling) for server in servers
    )
    for one, other in zip(plain.choices, ahead.choices, strict=True):
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == other.logprobs
    assert plain.usage.completion_tokens == ahead.usage.completion_tokens


def test_counters(servers):
    plain, ahead = servers
    ahead.complete(STORY, max_tokens=80)
    drafts = ahead.metric("vllm:spec_decode_num_drafts_total")
    proposed = ahead.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = ahead.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < drafts <= proposed
    assert 0 < accepted <= proposed


@pytest.mark.parametrize(
    ("config", "code", "word"),
    [
        ("{", 2, "JSON object"),
        ('{"method": "ngram"}', 2, "num_speculative_tokens"),
        ('{"method": "eagle", "num_speculative_tokens": 3}', 5, "ngram"),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', 2, "needs model"),
    ],
)
def test_bad_configs_end_the_start(config, code, word):
    command = [BINARY, "serve", MODEL, "--port", "0", "--speculative-config", config]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert word in ended.stderr


def refused(model, code, word):
    config = json.dumps(
        {"method": "draft_model", "num_speculative_tokens": 3, "model": str(model)}
    )
    command = [BINARY, "serve", MODEL, "--port", "0", "--speculative-config", config]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert word in ended.stderr
    assert str(model) in ended.stderr


def test_a_draft_model_must_have_the_vocabulary(tmp_path):
    refused(tmp_path / "nowhere", NOT_FOUND, "nowhere")
    other = tmp_path / "other"
    shutil.copytree(STORYTELLER, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in vocabulary if len(token) == 1][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(other, UNSUPPORTED, "same vocabulary")
    shutil.copy(STORYTELLER / "tokenizer.json", other)
    config = json.loads((other / "config.json").read_text())
    config["vocab_size"] -= 1
    (other / "config.json").write_text(json.dumps(config))
    refused(other, UNSUPPORTED, "4095 tokens")
