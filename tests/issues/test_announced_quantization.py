"""A quantization_config over plain tensors (say, GPTQ's beside BF16 weights) was accepted in silence:
the files belong to two checkpoints, and the one that was meant is missing."""

import json

import pytest

from cli_tools import CORRUPT, Model, fails, json_of, succeeds

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
           "dynamic": False}
# quant_method -> (config, what names the missing tensors)
CONFIGS = {
    "gptq": ({"bits": 4, "group_size": 32, "sym": True, "desc_act": False}, "*.qweight"),
    "compressed-tensors": ({"format": "pack-quantized", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}, "*.weight_packed"),
    "fp8": ({"activation_scheme": "dynamic"}, "F8_E4M3"),
    "quark": ({"global_quant_config": {"weight": [
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
        {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}]}},
        "*.weight in I32"),
    "awq": ({"bits": 4, "group_size": 32, "version": "gemm"}, "*.qweight"),
    "mxfp4": ({}, "*_blocks"),
    "modelopt": ({"quant_algo": "NVFP4"}, "*.weight in U8"),
}


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def announce(model, method):
    config, tensors = CONFIGS[method]
    model.edit_json("config.json", quantization_config={"quant_method": method, **config})
    return tensors


def quantize(model, *options):
    return ["quantize", model, model.folder.parent / "output", "--scheme", "w4a16_g32", *options]


@pytest.mark.parametrize("method", CONFIGS)
def test_a_config_without_its_tensors_is_refused(model, method):
    tensors = announce(model, method)
    commands = [quantize(model), quantize(model, "--dry-run"), ["verify", model, model],
                ["generate", model, "--prompt", "hi"], ["serve", model, "--port", 0],
                ["inspect", model]]
    for command in commands:
        fails(CORRUPT, "config.json: quantization_config", f'quant_method: "{method}"', str(model),
              tensors, "remove the field quantization_config", arguments=command)


def test_modules_that_are_left_out_stay_plain(model):
    output = model.folder.parent / "output"
    succeeds(*quantize(model, "--ignore", "re:.*[.](gate|up)_proj"))
    assert json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    succeeds("generate", output, "--prompt", "hi", "--max-tokens", 2)
    succeeds("verify", model, output)
    assert json_of("inspect", output)["scheme"] == "w4a16_g32"


def test_a_config_without_groups_announces_nothing(model):
    """As for a KV cache in FP8 alone."""
    model.edit_json("config.json", quantization_config={
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": None})
    succeeds("generate", model, "--prompt", "hi", "--max-tokens", 2)
    succeeds(*quantize(model))
