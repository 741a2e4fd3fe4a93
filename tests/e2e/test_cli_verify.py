"""`nibble verify`: what was written is what was meant, and every difference is found."""

import json
import math
import random
import shutil
import struct

import pytest
from cli_tools import CORRUPT, NOT_FOUND, TINY_TENSORS, Model, fails, json_of, nibble, succeeds

SCHEMES = ["w8a8_int8", "w8a8_fp8", "w4a16_g32", "w4a8"]


@pytest.fixture(name="pair")
def make_pair(tmp_path):
    source = Model(tmp_path / "source")
    succeeds("quantize", source, tmp_path / "result", "--scheme", "w4a16_g32")
    return source.folder, tmp_path / "result"


def header_of(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return 8 + size, json.loads(data[8:8 + size])


def flip(folder, tensor, byte=0, mask=0x01):
    """Flips bits of one byte of a tensor's data."""
    path = folder / "model.safetensors"
    begin, header = header_of(path)
    data = bytearray(path.read_bytes())
    data[begin + header[tensor]["data_offsets"][0] + byte] ^= mask
    path.write_bytes(data)


def problems(pair, *words):
    result = nibble("verify", *pair, "--json")
    assert result.returncode == CORRUPT, result.stderr
    found = json.loads(result.stdout)["problems"]
    assert len(found) == 1, found
    for word in words:
        assert word in found[0], found[0]
        assert word in result.stderr


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sound_result(tmp_path, scheme):
    source = Model(tmp_path / "source")
    report = json_of("quantize", source, tmp_path / "result", "--scheme", scheme)
    verified = json_of("verify", source, tmp_path / "result")
    assert verified["ok"] and verified["problems"] == []
    assert verified["quantized"] == 7
    assert verified["copied_tensors"] == 4  # the embedding and three norms
    assert verified["copied_files"] == 4  # config.json among them
    assert math.isclose(verified["snr_db_mean"], report["snr_db"]["mean"], abs_tol=1e-3)
    worst = verified["worst_first"][0]
    assert math.isclose(worst["snr_db"], report["snr_db"]["min"], abs_tol=1e-3)


def test_a_decoded_model(pair, tmp_path):
    succeeds("quantize", pair[1], tmp_path / "decoded", "--scheme", "bf16")
    verified = json_of("verify", pair[1], tmp_path / "decoded")
    assert verified["quantized"] == 7
    assert verified["worst_first"][0]["snr_db"] > 50  # codes times scales, rounded to BF16


def test_a_model_equals_itself(tmp_path):
    source = Model(tmp_path / "source")
    verified = json_of("verify", source, source)
    assert verified["quantized"] == 0 and verified["copied_tensors"] == len(TINY_TENSORS)


def test_a_copied_tensor_that_changed(pair):
    flip(pair[1], "model.layers.0.input_layernorm.weight", byte=5)
    problems(pair, "input_layernorm.weight", "was to be copied")


def test_a_copied_matrix_that_changed(pair):
    flip(pair[1], "model.embed_tokens.weight", byte=1001)
    problems(pair, "embed_tokens.weight", "was to be copied")


def test_codes_that_are_not_those_of_the_report(pair):
    flip(pair[1], "model.layers.0.mlp.up_proj.weight_packed", byte=7, mask=0x88)
    problems(pair, "up_proj", "quantization_report.json", "dB")


def test_too_little_signal(pair):
    result = nibble("verify", *pair, "--min-snr", "40")
    assert result.returncode == CORRUPT
    assert "--min-snr" in result.stderr and "down_proj" in result.stderr


def test_a_missing_tokenizer(pair):
    (pair[1] / "tokenizer.json").unlink()
    problems(pair, "tokenizer.json", "missing")


def test_another_config(pair):
    path = pair[1] / "config.json"
    config = json.loads(path.read_text())
    config["rms_norm_eps"] = 1e-6
    path.write_text(json.dumps(config))
    problems(pair, "config.json", "differs")


def test_a_report_of_another_model(pair):
    path = pair[1] / "quantization_report.json"
    report = json.loads(path.read_text())
    report["tensors"].append(dict(report["tensors"][0], name="model.layers.1.mlp.up_proj"))
    path.write_text(json.dumps(report))
    problems(pair, "model.layers.1.mlp.up_proj", "not in the files")


def test_another_shape(tmp_path, pair):
    other = Model(tmp_path / "other")
    generator = random.Random(4)
    rows = struct.pack("<2048f", *(generator.gauss(0, 1) for _ in range(2048)))
    other.write_tensors(up_proj=("F32", [32, 64], rows))
    result = nibble("verify", other, pair[1], "--json")
    found = json.loads(result.stdout)
    assert result.returncode == CORRUPT and "up_proj" in found["problems"][0]


def test_folders_that_are_not_there(tmp_path, pair):
    fails(NOT_FOUND, "nowhere", arguments=["verify", tmp_path / "nowhere", pair[1]])
    fails(NOT_FOUND, "nowhere", arguments=["verify", pair[0], tmp_path / "nowhere"])


def test_a_missing_tensor(tmp_path, pair):
    other = Model(tmp_path / "other")
    other.write_tensors(drop="up_proj")
    shutil.copy(pair[0] / "config.json", other.folder / "config.json")
    result = nibble("verify", other, pair[1], "--json")
    assert result.returncode == CORRUPT
    assert any("up_proj" in text and "no such module" in text
               for text in json.loads(result.stdout)["problems"])
