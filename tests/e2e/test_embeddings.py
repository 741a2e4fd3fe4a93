"""/v1/embeddings through the official OpenAI client: vectors of transformers are the oracle
(tests/golden/make_embeddings.py)."""

import base64
import concurrent.futures
import json
import math
import struct

import openai
import pytest

from test_openai import KEY, MODEL, PROMPT, ROOT, Server

GOLDEN = json.loads((ROOT / "tests/golden/storyteller_embeddings.json").read_text())["entries"]


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    assert running.stop() == 0


def model_with(tmp_path, files):
    """The model's folder with some more files."""
    folder = tmp_path / "storyteller"
    folder.mkdir()
    for path in (ROOT / MODEL).iterdir():
        (folder / path.name).symlink_to(path)
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def embed(server, text, **fields):
    return server.client.embeddings.create(model=server.name, input=text, **fields)


def angle(one, other):
    apart = math.dist(one, other) / 2
    return 2 * math.asin(min(apart, 1.0))


def check_golden(server, pooling):
    got = [entry.embedding for entry in embed(server, [each["text"] for each in GOLDEN]).data]
    for vector, expected in zip(got, GOLDEN):
        assert len(vector) == len(expected[pooling])
        assert angle(vector, expected[pooling]) < 0.02  # the model computes in BF16
    other = "mean" if pooling == "last" else "last"
    assert angle(got[0], GOLDEN[0][other]) > 0.1
    return got


def test_vectors_are_those_of_transformers(server):
    first = check_golden(server, "last")
    assert check_golden(server, "last") == first  # with the prefixes in the cache
    used = embed(server, [each["text"] for each in GOLDEN]).usage
    assert used.prompt_tokens == used.total_tokens == sum(len(each["tokens"]) for each in GOLDEN)


def test_means_are_those_of_transformers(tmp_path):
    files = {
        "modules.json": [
            {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "config.json": json.loads((ROOT / MODEL / "config.json").read_text())
        | {"matryoshka_dimensions": [64, 128]},
    }
    running = Server(model=model_with(tmp_path, files))
    try:
        running.complete(GOLDEN[2]["text"], max_tokens=1)  # its pages are in the cache
        whole = check_golden(running, "mean")[0]
        cut = embed(running, GOLDEN[0]["text"], dimensions=64).data[0].embedding
        length = math.hypot(*whole[:64])
        assert cut == pytest.approx([x / length for x in whole[:64]], abs=1e-6)
        with pytest.raises(openai.BadRequestError, match="64, 128") as caught:
            embed(running, "a", dimensions=32)
        assert caught.value.param == "dimensions"
    finally:
        assert running.stop() == 0
    running = Server("--pooling", "last", model=tmp_path / "storyteller")
    try:
        check_golden(running, "last")
    finally:
        assert running.stop() == 0


def test_what_the_files_ask_for_and_is_not_computed_is_refused(tmp_path):
    running = Server(model=model_with(tmp_path, {"1_Pooling/config.json": {"pooling_mode": "cls"}}))
    try:
        with pytest.raises(openai.BadRequestError, match="cls"):
            embed(running, "a")
        assert running.complete(max_tokens=1).usage.completion_tokens == 1
    finally:
        assert running.stop() == 0


def test_forms_of_input_and_answer(server):
    texts = ["The king", "A fox went by"]
    ids = [server.post("/tokenize", json.dumps({"prompt": t}))[1]["tokens"] for t in texts]
    expected = [entry.embedding for entry in embed(server, texts).data]
    assert [entry.embedding for entry in embed(server, ids).data] == expected
    for one in (texts[0], ids[0], [texts[0]]):
        assert embed(server, one).data[0].embedding == expected[0]
    plain = embed(server, texts, encoding_format="float")
    assert [entry.index for entry in plain.data] == [0, 1] and plain.object == "list"
    coded = server.post("/v1/embeddings", json.dumps({"input": texts, "encoding_format": "base64"}))
    for entry, numbers, raw in zip(plain.data, expected, coded[1]["data"]):
        assert entry.embedding == pytest.approx(numbers, abs=1e-7)
        unpacked = struct.unpack(f"<{len(numbers)}f", base64.b64decode(raw["embedding"]))
        assert list(unpacked) == numbers
        assert math.hypot(*numbers) == pytest.approx(1, abs=1e-5)


def test_refusals(server):
    for field, fields in {
        "dimensions": {"dimensions": 64},
        "input": {"input": "word " * 5000},
        "encoding_format": {"encoding_format": "hex"},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": 0},
    }.items():
        status, answer = server.post("/v1/embeddings", json.dumps({"input": "a", **fields}))
        assert (status, answer["error"]["param"]) == (400, field), answer
    long = "word " * 5000
    cut = embed(server, long, extra_body={"truncate_prompt_tokens": 8})
    assert cut.usage.prompt_tokens == 8
    assert embed(server, long, extra_body={"truncate_prompt_tokens": -1}).usage.prompt_tokens == 1024
    status, _ = server.post("/v1/embeddings", json.dumps({"input": "a"}), key="wrong")
    assert status == 401


def test_embeddings_beside_chats(server):
    texts = [f"Number {i} of the stories about {'foxes and ' * (i % 40)}kings" for i in range(48)]
    alone = [embed(server, text).data[0].embedding for text in texts]
    answer = server.complete(max_tokens=32, extra_body={"ignore_eos": True}).choices[0].text

    def work(i):
        if i % 3 == 0:
            return server.complete(PROMPT, max_tokens=32, extra_body={"ignore_eos": True})
        return embed(server, texts[i] if i % 3 == 1 else texts[i : i + 4])

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        results = list(pool.map(work, range(48)))
    for i, result in enumerate(results):
        if i % 3 == 0:
            assert result.choices[0].text == answer
        for entry, expected in zip(result.data if i % 3 else [], alone[i:]):
            assert angle(entry.embedding, expected) < 2e-3
    assert server.metric("nibble:kv_cache_pages_used") == 0
    assert server.metric("vllm:num_requests_running") == 0


def test_a_wrong_key_is_refused(server):
    stranger = openai.OpenAI(base_url=server.client.base_url, api_key=KEY + "x", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.embeddings.create(model=server.name, input="a")
