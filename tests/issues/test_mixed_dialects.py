"""Files that quantize read were refused by the commands that run a model, each by a reader of its
own; what contradicts itself is refused by all commands in the same words."""

import random
import struct

import pytest

from cli_tools import (CORRUPT, TINY_TENSORS, UNSUPPORTED, Model, fails, json_of, succeeds,
                       write_safetensors)

MODULE = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS, GROUP = 32, 64, 32
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
NIBBLE_SLOTS = [0, 2, 4, 6, 1, 3, 5, 7]  # of AWQ: which element lies in a slot of a word


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def words(rows):
    """Eight codes of 4 bits in a word, the first lowest."""
    return b"".join(struct.pack("<I", sum(code << (4 * i) for i, code in enumerate(row[at:at + 8])))
                    for row in rows for at in range(0, len(row), 8))


def in_slots(row):
    return [row[at + slot] for at in range(0, len(row), 8) for slot in NIBBLE_SLOTS]


def random_codes(seed=1):
    generator = random.Random(seed)
    return [[generator.randrange(16) for _ in range(COLUMNS)] for _ in range(ROWS)]


def plain(value):
    return struct.pack("<f", value)


def store(model, tensors, config):
    """The tensors in the place of the module's plain weight."""
    stored = {name: tensor for name, tensor in TINY_TENSORS.items()
              if not name.startswith(MODULE)}
    stored.update({f"{MODULE}.{name}": tensor for name, tensor in tensors.items()})
    write_safetensors(model.weights, stored)
    model.edit_json("config.json", quantization_config=config)


def awq_tensors(codes, zeros, scales):
    columns = [list(column) for column in zip(*codes)]
    return {"qweight": ("I32", [COLUMNS, ROWS // 8], words(map(in_slots, columns))),
            "qzeros": ("I32", [COLUMNS // GROUP, ROWS // 8], words(map(in_slots, zeros))),
            "scales": ("F16", [COLUMNS // GROUP, ROWS],
                       b"".join(struct.pack("<e", x) for row in scales for x in row))}


def decoded(codes, zeros, scales):
    values = [(code - zeros[j // GROUP][i]) * scales[j // GROUP][i]
              for i, row in enumerate(codes) for j, code in enumerate(row)]
    return {"weight": ("F32", [ROWS, COLUMNS], b"".join(map(plain, values)))}


def test_a_file_of_awq_runs_as_its_decoded_weights(model, tmp_path):
    generator = random.Random(2)
    codes = random_codes()
    zeros = [[generator.randrange(16) for _ in range(ROWS)] for _ in range(COLUMNS // GROUP)]
    scales = [[generator.choice((0.0078125, 0.015625)) for _ in range(ROWS)] for _ in zeros]
    store(model, awq_tensors(codes, zeros, scales), AWQ)
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a cat who could not sleep.")
    quantized = json_of("eval", "ppl", model, "--text", text, "--window", 16)["perplexity"]
    assert json_of("inspect", model)["scheme"] == "w4a16_g32_asym"
    store(model, decoded(codes, zeros, scales), ...)
    assert json_of("eval", "ppl", model, "--text", text, "--window", 16)["perplexity"] == pytest.approx(
        quantized, rel=1e-6)


def commands(model):
    return (["generate", model, "--prompt", "hi"], ["inspect", model],
            ["quantize", model, model.folder.parent / "out", "--scheme", "w8a8_int8"])


MIXED = {
    "AWQ's words beside GPTQ's config": (lambda t: t, GPTQ, "qweight"),
    "codes of two dialects": (lambda t: {**t, "weight_packed": ("I32", [ROWS, COLUMNS // 8],
                                                                bytes(ROWS * COLUMNS // 2))},
                              AWQ, "described twice"),
    "words without a config": (lambda t: t, ..., "no quantization_config"),
    "scales that are missing": (lambda t: {k: v for k, v in t.items() if k != "scales"}, AWQ,
                                "scales is missing"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_contradicts_itself_is_refused_by_every_command(model, name):
    change, config, word = MIXED[name]
    zeros = [[8] * ROWS for _ in range(COLUMNS // GROUP)]
    scales = [[0.0078125] * ROWS for _ in zeros]
    store(model, change(awq_tensors(random_codes(), zeros, scales)), config)
    for command in commands(model):
        fails(CORRUPT, word, MODULE, arguments=command)


def test_activations_that_nobody_computes_are_named_where_they_would_run(model):
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": False,
                              "strategy": "token", "dynamic": True}}}}
    store(model, {"weight": ("I8", [ROWS, COLUMNS], bytes(ROWS * COLUMNS)),
                  "weight_scale": ("F32", [ROWS, 1], plain(1.0) * ROWS)}, config)
    fails(UNSUPPORTED, "config_groups.group_0", "zero points", "nibble quantize SRC DST",
          arguments=["generate", model, "--prompt", "hi"])
    succeeds("quantize", model, model.folder.parent / "out", "--scheme", "w4a16_g32")


def scheme_of_int8(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, **weights}}}}


def test_one_zero_point_for_a_matrix_as_compressed_tensors_stores_it(model, tmp_path):
    generator = random.Random(4)
    codes = bytes(generator.randrange(256) for _ in range(ROWS * COLUMNS))
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a cat who could not sleep.")
    ppl = ["eval", "ppl", model, "--text", text, "--window", 16]
    store(model, {"weight": ("I8", [ROWS, COLUMNS], codes), "weight_scale": ("F32", [1], plain(0.01)),
                  "weight_zero_point": ("I8", [1], struct.pack("b", -7))},
          scheme_of_int8(type="int", symmetric=False, strategy="tensor"))
    quantized = json_of(*ppl)["perplexity"]
    scale = struct.unpack("<f", plain(0.01))[0]
    values = [(code + 7) * scale for code in struct.unpack(f"{len(codes)}b", codes)]
    store(model, {"weight": ("F32", [ROWS, COLUMNS], b"".join(map(plain, values)))}, ...)
    assert json_of(*ppl)["perplexity"] == pytest.approx(quantized, rel=1e-6)


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_static_scales_of_activations_by_both_names(model, name):
    """transformers calls them activation_scale."""
    tensors = {"weight": ("F8_E4M3", [ROWS, COLUMNS], bytes([0x30]) * ROWS * COLUMNS),
               "weight_scale": ("F32", [1], plain(0.01)), name: ("F32", [], plain(0.02))}
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    store(model, tensors, config)
    succeeds("generate", model, "--prompt", "hi", "--max-tokens", 2)
    del tensors[name]
    store(model, tensors, config)
    fails(CORRUPT, f"{MODULE}.input_scale is missing", "activations",
          arguments=["generate", model, "--prompt", "hi"])
