"""`nibble quantize --calibrate` where a method cannot be applied to a matrix: what was done instead is
recorded, and --strict refuses it."""

import array
import json

import pytest

from cli_tools import INVALID, TINY_TENSORS, Model, fails, json_of, succeeds, write_safetensors

TEXT = "it was a dark night and the wind was loud, and the cat sat by the fire. "
LAYER = "model.layers.0."
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 512,
           "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
           "num_experts_per_tok": 2, "max_position_embeddings": 256, "bos_token_id": 1,
           "eos_token_id": 2, "dtype": "bfloat16"}


@pytest.fixture(name="model")
def make_model(tmp_path):
    model = Model(tmp_path / "model")
    model.write("text.txt", TEXT * 20)
    return model


def scale(model, factors, rows=None):
    """Multiplies weights by name; of all rows, or of the first so many."""
    tensors = dict(TINY_TENSORS)
    for name, factor in factors.items():
        dtype, shape, data = tensors[name]
        values = array.array("f", data)
        for i in range(len(values) if rows is None else rows * shape[1]):
            values[i] *= factor
        tensors[name] = dtype, shape, values.tobytes()
    write_safetensors(model.weights, tensors)


def quantize(model, out, *more):
    return ["quantize", model, out, "--scheme", "w4a16_g32", "--calibrate",
            model.folder / "text.txt", "--calibration-length", 16, *more]


def rounding_of(out):
    report = json.loads((out / "quantization_report.json").read_text())
    return {tensor["name"]: tensor for tensor in report["tensors"]}


@pytest.mark.parametrize("method", ["imatrix", "gptq", "gptaq"])
def test_an_infinite_activation(model, tmp_path, method):
    """Gate times up is past what F32 holds: nothing is known of what down multiplies."""
    scale(model, {LAYER + "mlp.gate_proj.weight": 1e25, LAYER + "mlp.up_proj.weight": 1e25})
    out = tmp_path / "out"
    down = LAYER + "mlp.down_proj"
    message = fails(INVALID, "--strict", "1 matrices", down, "no numbers", "--rule NAME=keep",
                    arguments=quantize(model, out, "--method", method, "--strict"))
    assert "o_proj" not in message and not out.exists()
    said = succeeds(*quantize(model, out, "--method", method)).stdout
    assert "fell back: 1 for inputs that are no numbers" in said
    tensors = rounding_of(out)
    assert {name for name, tensor in tensors.items() if "fallback" in tensor} == {down}
    assert tensors[down]["rounding"] == "rtn"
    assert not (tmp_path / "out.partial").exists()
    fails(INVALID, "--strict", down, arguments=quantize(model, out, "--method", method, "--strict"))
    succeeds(*quantize(model, tmp_path / "kept", "--method", method, "--strict", "--rule",
                       f"{down}=keep"))


def test_figures_of_json(model, tmp_path):
    scale(model, {LAYER + "mlp.gate_proj.weight": 1e25, LAYER + "mlp.up_proj.weight": 1e25})
    found = json_of(*quantize(model, tmp_path / "out"))
    assert found["fallbacks"] == {"inputs that are no numbers": 1}


def test_to_the_nearest_needs_no_inputs(model, tmp_path):
    scale(model, {LAYER + "mlp.gate_proj.weight": 1e25, LAYER + "mlp.up_proj.weight": 1e25})
    succeeds(*quantize(model, tmp_path / "out", "--method", "rtn", "--strict"))


@pytest.mark.parametrize("rows", [3, None])
@pytest.mark.parametrize("method", ["gptq", "gptaq"])
def test_dead_channels(model, tmp_path, method, rows):
    """Values that are always 0: the sums are singular, and the method does without them."""
    scale(model, {LAYER + "self_attn.v_proj.weight": 0}, rows)
    out = tmp_path / "out"
    succeeds(*quantize(model, out, "--method", method, "--strict"))
    assert "fallback" not in rounding_of(out)[LAYER + "self_attn.o_proj"]
    assert json_of("eval", "ppl", out, "--text", model.folder / "text.txt")["perplexity"] > 0


def test_experts_with_few_rows(tmp_path):
    config, model = tmp_path / "config.json", tmp_path / "model"
    config.write_text(json.dumps(MIXTRAL))
    succeeds("make-dummy", "--config", config, "--out", model)
    (tmp_path / "text.txt").write_text(TEXT * 20)
    out = tmp_path / "out"

    def arguments(windows, *more):
        return ["quantize", model, out, "--scheme", "w4a16_g32", "--calibrate",
                tmp_path / "text.txt", "--calibration-length", 16, "--calibration-windows",
                windows, *more]
    fails(INVALID, "--strict", "experts.", "few rows", "longer text",
          arguments=arguments(2, "--strict"))
    assert not out.exists()
    said = succeeds(*arguments(2)).stdout
    few = {name for name, tensor in rounding_of(out).items() if "fallback" in tensor}
    assert f"fell back: {len(few)} for few rows" in said and few
    for name, tensor in rounding_of(out).items():
        if ".experts." in name:
            columns = 96 if name.endswith("w2") or "down" in name else 64
            assert (name in few) == (tensor["calibration_rows"] < columns // 8)
            assert tensor["rounding"] != "gptq" or name not in few
    succeeds(*arguments(64, "--strict", "--force"))


def test_strict_needs_a_text(model, tmp_path):
    fails(INVALID, "--strict", "--calibrate", arguments=[
        "quantize", model, tmp_path / "out", "--scheme", "w4a16_g32", "--strict"])
