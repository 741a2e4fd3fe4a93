"""Models with RoPE scaling of the kind `dynamic` ended at max_position_embeddings, beyond which
alone that scaling does anything."""

import concurrent.futures
import json
import shutil

import pytest
from cli_tools import INVALID, ROOT, STORYTELLER, fails, json_of
from test_openai import Server

GOLDEN = json.loads((ROOT / "tests/golden/storyteller_dynamic.json").read_text())
ANSWERS = GOLDEN["answers"]  # of transformers, to a short prompt and to one beyond the original end


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "dynamic"
    shutil.copytree(STORYTELLER, folder)
    for name in ("config.json", "generation_config.json"):
        changes = GOLDEN["config"] if name == "config.json" else {"eos_token_id": None}
        fields = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return folder


def continuation(answer):
    return answer["ids"][answer["prompt_tokens"]:]


def generate(model, answer):
    return json_of("generate", model, "--prompt", answer["text"], "--temperature", 0,
                   "--max-tokens", len(continuation(answer)), "--kv-cache-dtype", "f32",
                   "--device", "cpu")


@pytest.mark.parametrize("answer", ANSWERS, ids=["short prompt", "long prompt"])
def test_generate_continues_as_transformers(model, answer):
    got = generate(model, answer)
    assert got["prompt_tokens"] == answer["prompt_tokens"]
    assert got["tokens"] == continuation(answer)


def test_serve_gives_the_same_answer_in_any_batch_and_chunks(model):
    server = Server("--kv-cache-dtype", "f32", "--max-num-batched-tokens", "24",
                    "--max-num-seqs", "6", "--device", "cpu", model=model)

    def ask(answer):
        length = len(continuation(answer))
        return server.complete(answer["text"], max_tokens=length)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, ANSWERS * 4))
    replies += [ask(answer) for answer in ANSWERS]
    texts = [reply.choices[0].text for reply in replies]
    assert texts == [generate(model, answer)["text"] for answer in ANSWERS] * 5
    # Pages of prompts beyond the original end depend on the prompt's length: they are not shared.
    short, long = (reply.usage.prompt_tokens_details.cached_tokens for reply in replies[-2:])
    assert short > 0 and long == 0
    assert server.stop() == 0


def test_contexts_end_at_the_scaled_length(model):
    assert json_of("inspect", model)["max_context"] == 512
    text = ROOT / "tests/data/text/the_black_cat.txt"
    assert json_of("eval", "ppl", model, "--text", text, "--window", 512)["perplexity"] > 1
    fails(INVALID, "--window 513", "512", "max_position_embeddings times the factor",
          arguments=["eval", "ppl", model, "--text", text, "--window", 513])
    fails(INVALID, "--max-model-len 513", "512", "max_position_embeddings times the factor",
          arguments=["serve", model, "--port", 0, "--max-model-len", 513])
