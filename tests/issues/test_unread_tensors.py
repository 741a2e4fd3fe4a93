"""Tensors that nobody reads were accepted in silence: by quantize and inspect where generate
refused them, and by all where the index of the shards did not name them."""

import json
import random

import pytest

from cli_tools import (
    CORRUPT, TINY_TENSORS, UNSUPPORTED, Model, f32, fails, json_of, succeeds, write_safetensors)

EXTRA = "model.layers.0.self_attn.q_gate.weight"


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def commands(model):
    text = model.folder.parent / "text.txt"
    text.write_text("Once upon a time there was a king.")
    return [
        ["generate", model, "--prompt", "hi", "--max-tokens", 2],
        ["eval", "ppl", model, "--text", text, "--window", 8],
        ["inspect", model],
        ["quantize", model, model.folder.parent / "out", "--scheme", "w8a8_int8"],
    ]


def add(model, name, tensor):
    write_safetensors(model.weights, {**TINY_TENSORS, name: tensor})


def all_refuse(model, code, *words):
    for arguments in commands(model):
        fails(code, *words, arguments=arguments)
    assert not (model.folder.parent / "out").exists()


def all_accept(model):
    for arguments in commands(model):
        succeeds(*arguments)


@pytest.mark.parametrize("name", [EXTRA, "model.layers.1.mlp.up_proj.weight", "extra"])
def test_a_tensor_without_a_reader_is_refused(model, name):
    add(model, name, f32([4, 4], random.Random(1)))
    all_refuse(model, UNSUPPORTED, name)


def test_a_missing_layer_is_refused_before_quantizing(model):
    model.write_tensors(drop="up_proj")
    for arguments in commands(model):
        fails(3, "model.layers.0.mlp.up_proj.weight", arguments=arguments)


def test_a_wrong_shape_is_refused_before_quantizing(model):
    model.write_tensors(up_proj=f32([48, 32], random.Random(1)))
    all_refuse(model, CORRUPT, "up_proj", "[64, 32]")


def test_hidden_size_in_words_is_refused_before_quantizing(model):
    model.edit_json("config.json", hidden_size="32")
    all_refuse(model, CORRUPT, "hidden_size")


def test_frequencies_of_the_rotation_may_be_stored(model):
    add(model, "model.layers.0.self_attn.rotary_emb.inv_freq", f32([8], random.Random(1)))
    all_accept(model)


def test_layers_for_further_tokens_may_be_stored_where_config_names_them(model):
    add(model, "model.layers.1.eh_proj.weight", f32([4, 4], random.Random(1)))
    all_refuse(model, UNSUPPORTED, "model.layers.1.eh_proj.weight")
    model.edit_json("config.json", num_nextn_predict_layers=1)
    all_accept(model)


def test_a_bias_of_zeros_may_be_stored_and_no_other(model):
    name = "model.layers.0.mlp.up_proj.bias"
    add(model, name, f32([64], random.Random(1)))
    all_refuse(model, UNSUPPORTED, name)
    add(model, name, f32([64], random.Random(1), scale=0))
    all_accept(model)


def test_a_tensor_that_the_index_does_not_name(model):
    model.shard()
    index = model.folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = "model.layers.0.mlp.up_proj.weight"
    file = weight_map.pop(name)
    index.write_text(json.dumps({"weight_map": weight_map}))
    all_refuse(model, CORRUPT, "model.safetensors.index.json", name, file)


def test_an_unknown_architecture_is_quantized_and_said_not_to_run(model):
    model.edit_json("config.json", architectures=["UnheardForCausalLM"])
    add(model, EXTRA, f32([32, 32], random.Random(1)))
    out = model.folder.parent / "out"
    said = succeeds("quantize", model, out, "--scheme", "w8a8_int8").stdout.splitlines()[-1]
    assert "does not run it" in said and "UnheardForCausalLM" in said
    report = json_of("quantize", model, out, "--scheme", "w8a8_int8", "--force")
    assert report["runs"] is False and "UnheardForCausalLM" in report["why_not"]
