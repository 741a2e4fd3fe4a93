"""`nibble quantize --method CHAIN`: transforms that leave the model what it is, then a rounding."""

import json
import shutil

import pytest
from cli_tools import EXISTS, INVALID, UNSUPPORTED, fails, json_of, succeeds
from test_moe import make

MODEL = "models/storyteller"
TEXT = "tests/data/text/the_black_cat.txt"
CALIBRATION = ["--calibrate", TEXT, "--calibration-windows", "4", "--calibration-length", "100"]


def perplexity(folder):
    return json_of("eval", "ppl", folder, "--text", TEXT, "--window", "64")["perplexity"]


def test_a_rotation_needs_no_text_and_keeps_the_model(tmp_path):
    out = tmp_path / "out"
    succeeds("quantize", MODEL, out, "--scheme", "w8a8_int8", "--method", "rotate")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert abs(perplexity(out) / perplexity(MODEL) - 1) < 0.01
    recipe = json.loads((out / "quantization_recipe.json").read_text())
    assert recipe["calibration"] == {"method": "rotate,rtn", "seed": 0}
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["model"] == "storyteller"
    fails(EXISTS, "--force",
          arguments=["quantize", MODEL, out, "--scheme", "w8a8_int8", "--method", "rotate"])
    fails(UNSUPPORTED, "rotate,rtn", "eval kld", arguments=["verify", MODEL, out])


def test_a_recipe_repeats_a_chain(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    succeeds("quantize", MODEL, first, "--scheme", "w4a8", "--method", "rotate,smooth,gptq",
             "--seed", "3", *CALIBRATION)
    succeeds("quantize", MODEL, second, "--recipe", first / "quantization_recipe.json",
             "--calibrate", TEXT)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert perplexity(first) < 1.2 * perplexity(MODEL)
    shutil.rmtree(second)
    succeeds("quantize", MODEL, second, "--recipe", first / "quantization_recipe.json",
             "--calibrate", TEXT, "--seed", "4")
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_learned_roundings_say_what_they_did(tmp_path):
    for method in ("autoround", "lwc"):
        out = tmp_path / method
        succeeds("quantize", MODEL, out, "--scheme", "w4a16_g128", "--method", method, *CALIBRATION)
        recipe = json.loads((out / "quantization_recipe.json").read_text())
        assert recipe["calibration"]["method"] == method
        report = json.loads((out / "quantization_report.json").read_text())
        tensors = [tensor for tensor in report["tensors"] if "output_error" in tensor]
        assert tensors and all(tensor["rounding"] == method for tensor in tensors)
        assert all(tensor["output_error"] < tensor["output_error_rtn"] for tensor in tensors)
    fails(UNSUPPORTED, "take gptq or imatrix",
          arguments=["quantize", MODEL, tmp_path / "none", "--scheme", "mxfp4", "--method",
                     "autoround", *CALIBRATION])


def test_an_online_rotation_is_declared_and_run(tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    flags = ["--scheme", "w4a8", "--method", "rotate,gptq", "--online-rotation", *CALIBRATION]
    succeeds("quantize", MODEL, out, *flags)
    config = json.loads((out / "config.json").read_text())
    declared = config["quantization_config"].pop("transform_config")["config_groups"]["R4"]
    assert declared["type"] == "hadamard" and declared["head_dim"] == 256
    assert [one["location"] for one in declared["apply"]] == ["input", "weight_input"]
    assert all(one["targets"] == [r"re:model\.layers\.\d+\.mlp\.down_proj$"]
               for one in declared["apply"])
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    turned = perplexity(out)
    assert turned < 1.2 * perplexity(MODEL)
    recipe = json.loads((out / "quantization_recipe.json").read_text())
    assert recipe["calibration"]["method"] == "rotate,turn,gptq"
    succeeds("quantize", MODEL, again, "--recipe", out / "quantization_recipe.json",
             "--calibrate", TEXT)
    assert (out / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()

    # What is read again keeps its transforms, in whatever scheme; twice it is not turned.
    plain = tmp_path / "plain"
    succeeds("quantize", out, plain, "--scheme", "bf16")
    assert abs(perplexity(plain) / turned - 1) < 0.02
    fails(INVALID, "transform_config", "--online-rotation",
          arguments=["quantize", out, tmp_path / "twice", "--scheme", "w4a8", "--method", "rotate",
                     "--online-rotation"])
    fails(UNSUPPORTED, "quark", "compressed-tensors",
          arguments=["quantize", plain, tmp_path / "quark", "--scheme", "w4a8", "--format", "quark"])

    # Without the declaration the same weights are another model's.
    (again / "config.json").write_text(json.dumps(config))
    assert perplexity(again) > 2 * turned


@pytest.mark.parametrize("method", ["smooth", "awq"])
def test_experts_without_factors_are_named_once(tmp_path, method):
    model = make(tmp_path / "moe", "qwen2_moe")  # 6 experts in the first of two layers, and a shared one
    command = ["quantize", model, tmp_path / "out", "--scheme", "w8a16_channel", "--method", method,
               "--calibrate", TEXT, "--calibration-windows", "2", "--calibration-length", "64"]
    said = succeeds(*command).stderr
    assert said.count("factors: none for the 21 matrices of experts in 1 layers, 0 to 0 "
                      "(model.layers.0.mlp.experts.0.gate_proj and so on)") == 1
    dense = succeeds("quantize", MODEL, tmp_path / "dense", "--scheme", "w4a8", "--method", method,
                     *CALIBRATION).stderr
    assert "products take them" in dense and "of experts" not in dense


def test_a_permutation_keeps_the_model(tmp_path):
    out = tmp_path / "out"
    succeeds("quantize", MODEL, out, "--scheme", "w8a8_int8", "--method", "permute,rtn", *CALIBRATION)
    assert "transform_config" not in (out / "config.json").read_text()
    assert abs(perplexity(out) / perplexity(MODEL) - 1) < 0.01
