"""A NaN in a weight ended `nibble generate` with "unavailable" and without the tensor's name, and what
`nibble quantize` advised about it (--ignore) led to a model that does not run."""

import array
import contextlib
import json
import random
import re
import struct
import subprocess
import urllib.error
import urllib.request

import pytest

from cli_tools import (
    BINARY, CORRUPT, HIDDEN, ROOT, TINY_TENSORS, VOCAB, Model, f32, fails, nibble, succeeds,
    write_safetensors)

LAYER = "model.layers.0."
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = LAYER + "input_layernorm.weight"
DOWN = LAYER + "mlp.down_proj.weight"
NAMED = [EMBEDDING, HEAD, NORM, "model.norm.weight", DOWN, LAYER + "self_attn.q_proj.weight"]
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def packed(dtype, values):
    if dtype == "BF16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{'f' if dtype == 'F32' else 'e'}", *values)


def spoil(model, dtype, name, place=(1, 3), value=BAD["nan"]):
    """Writes the model in this type, with a head of its own and one number replaced."""
    tensors = {}
    for each, (_, shape, data) in {**TINY_TENSORS,
                                   HEAD: f32([VOCAB, HIDDEN], random.Random(4))}.items():
        values = array.array("f", data)
        if each == name:
            values[place[0] * shape[-1] + place[1] if len(shape) == 2 else place[1]] = value
        tensors[each] = (dtype, shape, packed(dtype, values))
    write_safetensors(model.weights, tensors)
    model.edit_json("config.json", tie_word_embeddings=False, dtype=TYPES[dtype])


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def place_text(name, place=(1, 3)):
    return f"[{place[1]}]" if "norm" in name else f"[{place[0]}, {place[1]}]"


def commands(model):
    parent = model.folder.parent
    (parent / "text.txt").write_text("Once upon a time there was a king.")
    return {
        "generate": ["generate", model, "--prompt", "Once upon a time", "--max-tokens", 2],
        "eval": ["eval", "ppl", model, "--text", parent / "text.txt", "--window", 8],
        "bench": ["bench", "offline", model, "--input-len", 4, "--output-len", 2],
        "serve": ["serve", model, "--port", 0],
    }


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [name for name in NAMED if name != EMBEDDING])
def test_whoever_runs_it_names_the_tensor(model, dtype, name):
    spoil(model, dtype, name)
    for arguments in commands(model).values():
        fails(CORRUPT, f"model.safetensors: tensor {name}: element {place_text(name)} is nan",
              "get another copy", arguments=arguments)


def test_chat_names_the_tensor(model):
    spoil(model, "BF16", DOWN)
    path = model.folder.parent / "turn.txt"
    path.write_text("Hello\n")
    with path.open() as turn:
        fails(CORRUPT, f"tensor {DOWN}: element [1, 3] is nan", arguments=["chat", model],
              stdin=turn)


@pytest.mark.parametrize("value", ["inf", "-inf"])
def test_infinities_are_named_too(model, value):
    spoil(model, "F32", NORM, value=BAD[value])
    fails(CORRUPT, f"tensor {NORM}: element [3] is {value}",
          arguments=commands(model)["generate"])


@contextlib.contextmanager
def serving(model):
    """The URL of `nibble serve` while it runs."""
    command = [BINARY, "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if found := re.search(r"at (http://\S+/v1)", line):
                    yield found[1]
                    break
            else:
                pytest.fail(f"exit code {process.wait()}")
        finally:
            process.terminate()
            process.communicate()


def test_a_row_of_the_embedding_fails_the_requests_that_use_it(model):
    vocabulary = json.loads((model.folder / "tokenizer.json").read_text())["model"]["vocab"]
    token = vocabulary["~"]
    spoil(model, "BF16", EMBEDDING, (token, 3))
    found = f"model.safetensors: tensor {EMBEDDING}: element [{token}, 3] is nan"
    succeeds("generate", model, "--prompt", "Once upon", "--max-tokens", 1)
    fails(CORRUPT, found, arguments=["generate", model, "--prompt", "~~~", "--max-tokens", 1])
    with serving(model) as server:
        assert ask(server, "Once upon")[0] == 200
        for _ in range(2):
            status, body = ask(server, "~~~")
            assert status == 500 and body["error"]["type"] == "server_error"
            assert found in body["error"]["message"]
        assert ask(server, "Once upon")[0] == 200


def ask(server, prompt):
    data = json.dumps({"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0})
    request = urllib.request.Request(f"{server}/completions", data.encode(),
                                     {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w8a8_int8", "w8a8_fp8"])
def test_quantize_gives_advice_that_leads_somewhere(model, scheme):
    spoil(model, "F32", DOWN)
    message = fails(CORRUPT, f"model.safetensors: tensor {DOWN}", "[1, 3] is nan",
                    "get another copy", "--ignore would keep the tensor as it is",
                    arguments=["quantize", model, model.folder.parent / "out", "--scheme", scheme])
    assert "leave the module out" not in message
    assert not (model.folder.parent / "out").exists()


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, NORM])
def test_quantize_refuses_it_in_what_stays_too(model, name):
    spoil(model, "BF16", name)
    fails(CORRUPT, f"model.safetensors: tensor {name}: element {place_text(name)} is nan",
          "get another copy",
          arguments=["quantize", model, model.folder.parent / "out", "--scheme", "w4a16_g32"])
    assert not (model.folder.parent / "out").exists()


def test_what_is_left_out_by_name_is_kept_with_a_warning(model):
    spoil(model, "BF16", DOWN)
    output = model.folder.parent / "out"
    result = succeeds("quantize", model, output, "--scheme", "w4a16_g32", "--ignore",
                      "*.down_proj")
    assert f"tensor {DOWN}: element [1, 3] is nan, kept as --ignore *.down_proj says" \
        in result.stderr
    fails(CORRUPT, f"tensor {DOWN}: element [1, 3] is nan",
          arguments=["generate", output, "--prompt", "hi"])


def test_sums_that_overflow_are_not_blamed_on_a_weight(model):
    spoil(model, "F32", DOWN, value=3e38)
    for name in ("generate", "eval"):
        result = nibble(*commands(model)[name])
        if result.returncode != 0:
            assert result.returncode == CORRUPT, result.stderr
            assert "all stored weights are finite" in result.stderr
