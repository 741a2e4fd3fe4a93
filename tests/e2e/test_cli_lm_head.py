"""`nibble quantize --lm-head SCHEME`: the output head gets codes of its own, also where it is the
embeddings' table, which stays."""

import array
import json
import math
import random
import struct

import pytest

from cli_tools import (
    CORRUPT, HIDDEN, INVALID, TINY_TENSORS, UNKNOWN_FAMILY, UNSUPPORTED, VOCAB, Model, f32, fails,
    json_of, nibble, succeeds, write_safetensors)

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FLAGS = ["--scheme", "w8a8_int8", "--lm-head", "w8a16_channel"]


@pytest.fixture(name="tied")
def make_tied(tmp_path):
    return Model(tmp_path / "tied")


@pytest.fixture(name="untied")
def make_untied(tmp_path):
    model = Model(tmp_path / "untied")
    head = f32([VOCAB, HIDDEN], random.Random(8), scale=0.3)
    write_safetensors(model.weights, {**TINY_TENSORS, HEAD: head})
    model.edit_json("config.json", tie_word_embeddings=False)
    return model


def tensors_of(folder):
    """name -> (dtype, shape, bytes)"""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + size])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], data[8 + size + begin:8 + size + end])
    return found


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def decoded_head(folder):
    """Values of the packed head: (byte - 128) * scale, as compressed-tensors stores them."""
    tensors = tensors_of(folder)
    assert tensors["lm_head.weight_packed"][:2] == ("I32", [VOCAB, HIDDEN // 4])
    assert tensors["lm_head.weight_scale"][:2] == ("BF16", [VOCAB, 1])
    assert struct.unpack("<2q", tensors["lm_head.weight_shape"][2]) == (VOCAB, HIDDEN)
    codes = tensors["lm_head.weight_packed"][2]
    halves = struct.unpack(f"<{VOCAB}H", tensors["lm_head.weight_scale"][2])
    scales = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    return array.array("f", ((code - 128) * scales[i // HIDDEN] for i, code in enumerate(codes)))


def perplexity(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king who had a daughter.")
    return json_of("eval", "ppl", folder, "--text", text, "--window", 16)["perplexity"]


def check_result(source, result, original):
    """Everything but the head is as without --lm-head, and the head is close to `original`."""
    head = decoded_head(result)
    signal = sum(w * w for w in original)
    noise = sum((w - v) ** 2 for w, v in zip(original, head))
    assert 10 * math.log10(signal / noise) > 38
    config = config_of(result)
    assert config["tie_word_embeddings"] is False
    quantization = config["quantization_config"]
    assert quantization["ignore"] == []
    groups = quantization["config_groups"].values()
    own = [group for group in groups if group["targets"] == ["re:lm_head$"]]
    assert len(own) == 1 and own[0]["format"] == "pack-quantized"
    assert own[0]["weights"]["num_bits"] == 8 and own[0]["input_activations"] is None
    plain = result.parent / "without"
    succeeds("quantize", source, plain, "--scheme", "w8a8_int8")
    without = {name: tensor for name, tensor in tensors_of(plain).items() if name != HEAD}
    with_head = tensors_of(result)
    assert {name: with_head[name] for name in without} == without
    assert with_head[TABLE] == TINY_TENSORS[TABLE]
    assert succeeds("verify", source, result)
    assert "w8a16_channel" in json_of("inspect", result)["scheme"]
    # The head's numbers written out give the same model.
    written = {name: tensor for name, tensor in with_head.items() if not name.startswith("lm_head")}
    write_safetensors(plain / "model.safetensors",
                      {**written, HEAD: ("F32", [VOCAB, HIDDEN], head.tobytes())})
    plain_config = config_of(plain)
    plain_config["tie_word_embeddings"] = False
    (plain / "config.json").write_text(json.dumps(plain_config))
    assert math.isclose(perplexity(result, result.parent), perplexity(plain, result.parent),
                        rel_tol=1e-5)


def test_a_tied_head_gets_codes_of_its_own(tied, tmp_path):
    out = tmp_path / "out"
    succeeds("quantize", tied, out, *FLAGS)
    check_result(tied, out, array.array("f", TINY_TENSORS[TABLE][2]))


def test_a_head_that_is_stored_gets_codes(untied, tmp_path):
    out = tmp_path / "out"
    succeeds("quantize", untied, out, *FLAGS)
    check_result(untied, out, array.array("f", tensors_of(untied.folder)[HEAD][2]))


def test_a_stored_copy_of_the_table_is_a_head_too(tied, tmp_path):
    write_safetensors(tied.weights, {**TINY_TENSORS, HEAD: TINY_TENSORS[TABLE]})
    out = tmp_path / "out"
    succeeds("quantize", tied, out, *FLAGS)
    check_result(tied, out, array.array("f", TINY_TENSORS[TABLE][2]))


def test_the_plan_names_the_head_and_the_table(tied, tmp_path):
    plan = json_of("quantize", tied, tmp_path / "out", *FLAGS, "--dry-run")
    actions = {tensor["name"]: (tensor["action"], tensor["rule"]) for tensor in plan["tensors"]}
    assert actions["lm_head"] == ("w8a16_channel", "--lm-head w8a16_channel")
    assert actions[TABLE][0] == "keep"
    assert not (tmp_path / "out").exists()


def test_rules_decide_about_the_rest_and_the_flag_about_the_head(untied, tmp_path):
    plan = json_of("quantize", untied, tmp_path / "out", *FLAGS, "--rule", "re:.*head=w8a8_fp8",
                   "--rule", "*.down_proj=keep", "--dry-run")
    actions = {tensor["name"]: tensor["action"] for tensor in plan["tensors"]}
    assert actions["lm_head"] == "w8a16_channel"
    assert actions["model.layers.0.mlp.down_proj.weight"] == "keep"


def test_another_head_is_another_plan(tied, tmp_path):
    out = tmp_path / "out"
    succeeds("quantize", tied, out, *FLAGS)
    again = json_of("quantize", tied, out, *FLAGS)
    assert again["already_there"] is True
    other = nibble("quantize", tied, out, "--scheme", "w8a8_int8")
    assert other.returncode != 0 and "exists already" in other.stderr


def test_every_scheme_of_a_head_runs_or_is_said_not_to(tied, tmp_path):
    for scheme in ["w8a8_int8", "w8a8_fp8", "w4a16_channel", "w4a16_g32", "mxfp4"]:
        out = tmp_path / scheme
        made = succeeds("quantize", tied, out, "--scheme", "w8a8_int8", "--lm-head", scheme)
        ran = nibble("generate", out, "--prompt", "hi", "--max-tokens", 2)
        said = "does not run it" in made.stdout.splitlines()[-1]
        assert (ran.returncode == 0) != said, f"{scheme}: {made.stdout}\n{ran.stderr}"
        assert succeeds("verify", tied, out)


def test_a_result_is_quantized_again_with_its_head_kept_or_decoded(tied, tmp_path):
    first, second, plain = (tmp_path / name for name in ("first", "second", "plain"))
    succeeds("quantize", tied, first, *FLAGS)
    succeeds("quantize", first, second, "--scheme", "w8a8_fp8")
    assert tensors_of(second)["lm_head.weight_packed"] == tensors_of(first)["lm_head.weight_packed"]
    assert math.isfinite(perplexity(second, tmp_path))
    succeeds("quantize", first, plain, "--scheme", "w8a8_int8", "--lm-head", "bf16")
    assert tensors_of(plain)[HEAD][0] == "BF16"
    assert math.isfinite(perplexity(plain, tmp_path))


def test_verify_finds_a_changed_head_and_a_changed_config(tied, tmp_path):
    out = tmp_path / "out"
    succeeds("quantize", tied, out, *FLAGS)
    weights = out / "model.safetensors"
    data = bytearray(weights.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    begin = json.loads(data[8:8 + size])["lm_head.weight_packed"]["data_offsets"][0]
    for i in range(HIDDEN):
        data[8 + size + begin + i] ^= 0x40
    weights.write_bytes(data)
    result = nibble("verify", tied, out)
    assert result.returncode == CORRUPT and "lm_head" in result.stdout + result.stderr
    config = config_of(out)
    config["rms_norm_eps"] = 1e-4
    (out / "config.json").write_text(json.dumps(config))
    result = nibble("verify", tied, out)
    assert result.returncode == CORRUPT and "config.json" in result.stdout + result.stderr


@pytest.mark.parametrize("code, words, flags", [
    (INVALID, ["--lm-head", "w9", "choose one of", "w8a16_channel"], ["--lm-head", "w9"]),
    (INVALID, ["--lm-head bf16", "table"], ["--lm-head", "bf16"]),
    (INVALID, ["--ignore", "lm_head", "--lm-head"],
     ["--lm-head", "w8a16_channel", "--ignore", "lm_head"]),
    (UNSUPPORTED, ["w8a16_channel", "--format"],
     ["--lm-head", "w8a16_channel", "--format", "quark", "--scheme", "w4a8"]),
])
def test_what_makes_no_sense_is_refused(tied, tmp_path, code, words, flags):
    out = tmp_path / "out"
    scheme = [] if "--scheme" in flags else ["--scheme", "w8a8_int8"]
    fails(code, *words, arguments=["quantize", tied, out, *scheme, *flags])
    assert not out.exists()


def test_a_family_that_is_not_known_must_store_its_head(tied, tmp_path):
    out = tmp_path / "out"
    tied.write_json("config.json", UNKNOWN_FAMILY)
    fails(INVALID, "--lm-head", "not known", arguments=["quantize", tied, out, *FLAGS])
    write_safetensors(tied.weights, {**TINY_TENSORS, HEAD: TINY_TENSORS[TABLE]})
    succeeds("quantize", tied, out, *FLAGS)
    assert "lm_head.weight_packed" in tensors_of(out)
