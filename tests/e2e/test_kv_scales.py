"""Scales of an FP8 cache that a checkpoint stores: k_scale and v_scale."""

import json
import struct

import pytest

from cli_tools import (
    CORRUPT, STORYTELLER, TINY_TENSORS, UNSUPPORTED, Model, fails, json_of, succeeds,
    write_safetensors)

TEXT = "Once upon a time there was a king who had a daughter. They lived near the sea. " * 6
# Keys and values so many powers of two larger: FP8 holds no number above 448.
POWER = {"k_proj": 9, "q_proj": -9, "v_proj": 11, "o_proj": -11}


def read_safetensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, (entry["dtype"], entry["shape"], data[8 + size + begin:8 + size + end])


def times_power_of_two(data, power):
    """BF16 numbers times 2^power; those that would have no exponent become 0."""
    numbers = bytearray()
    for (bits,) in struct.iter_unpack("<H", data):
        exponent = (bits >> 7 & 255) + power
        numbers += struct.pack("<H", bits + (power << 7) if exponent > 0 and bits & 0x7fff else 0)
    return bytes(numbers)


def scalar(value):
    return "F32", [1], struct.pack("<f", value)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The storyteller with large keys and values, whose scales say so. Queries and outputs make up
    for it, so that it is the same function."""
    model = Model(tmp_path_factory.mktemp("kv") / "model")
    model.write("config.json", (STORYTELLER / "config.json").read_text())
    tensors = {}
    for file in sorted(STORYTELLER.glob("*.safetensors")):
        for name, (dtype, shape, data) in read_safetensors(file):
            power = POWER.get(name.split(".")[-2], 0)
            assert power == 0 or dtype == "BF16"
            tensors[name] = dtype, shape, times_power_of_two(data, power) if power else data
    layers = json.loads((STORYTELLER / "config.json").read_text())["num_hidden_layers"]
    scales = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.self_attn"
        scales[f"{prefix}.k_scale"] = scalar(2.0 ** POWER["k_proj"])
        scales[f"{prefix}.v_scale"] = scalar(2.0 ** POWER["v_proj"])
    model.unscaled = tensors
    model.scales = scales
    write_safetensors(model.weights, {**tensors, **scales})
    return model


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def perplexity(model, text, cache):
    return json_of("eval", "ppl", model, "--text", text, "--window", 64,
                   "--kv-cache-dtype", cache)["perplexity"]


def test_an_fp8_cache_takes_them(large, text):
    plain = perplexity(STORYTELLER, text, "bf16")
    expected = perplexity(STORYTELLER, text, "fp8")
    assert plain != expected and expected == pytest.approx(plain, rel=0.02)
    assert perplexity(large, text, "fp8") == expected
    assert perplexity(large, text, "bf16") == pytest.approx(plain, rel=1e-6)
    run = succeeds("generate", large, "--prompt", "Once", "--max-tokens", 2)
    assert "k_scale, v_scale" in run.stderr and "--kv-cache-dtype fp8" in run.stderr
    write_safetensors(large.weights, large.unscaled)
    try:
        assert perplexity(large, text, "fp8") > 1.5 * expected
    finally:
        write_safetensors(large.weights, {**large.unscaled, **large.scales})


def test_quantize_keeps_and_announces_them(large, text, tmp_path):
    out = tmp_path / "out"
    succeeds("quantize", large, out, "--scheme", "w8a16_channel")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    assert perplexity(out, text, "fp8") == pytest.approx(perplexity(out, text, "bf16"), rel=0.02)
    stored = dict(read_safetensors(out / "model.safetensors"))
    assert {name: stored[name] for name in large.scales} == large.scales


@pytest.mark.parametrize("change,code,words", [
    ({"v_scale": None}, CORRUPT, ["k_scale", "values is missing"]),
    ({"k_scale": scalar(float("nan"))}, CORRUPT, ["k_scale", "nan", "must be positive"]),
    ({"k_scale": scalar(0.0)}, CORRUPT, ["k_scale", " is 0,"]),
    ({"k_scale": ("F32", [2, 1, 1], b"\0\0\x80?" * 2)}, UNSUPPORTED, ["k_scale", "[2, 1, 1]"]),
    ({"k_proj.k_scale": scalar(1.0)}, CORRUPT, ["k_scale", "remove one"]),
])
def test_bad_ones_are_refused_by_all_commands(tmp_path, change, code, words):
    model = Model(tmp_path / "model")
    prefix = "model.layers.0.self_attn."
    scales = {"k_scale": scalar(0.5), "v_scale": scalar(0.5), **change}
    write_safetensors(model.weights, {
        **TINY_TENSORS, **{prefix + name: scale for name, scale in scales.items() if scale}})
    for arguments in (["generate", model, "--prompt", "hi", "--max-tokens", 2],
                      ["inspect", model],
                      ["quantize", model, tmp_path / "out", "--scheme", "w8a8_int8"]):
        fails(code, *words, arguments=arguments)
    assert not (tmp_path / "out").exists()
