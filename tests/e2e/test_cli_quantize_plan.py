"""The plan of `nibble quantize`: rules, what --dry-run prints, and what is refused before any data
is read."""

import array
import copy
import json
import random
import shutil
import struct

import pytest

from cli_tools import (
    INVALID, NOT_FOUND, ROOT, TINY_TENSORS, UNKNOWN_FAMILY, UNSUPPORTED, Model, fails, json_of, succeeds,
    write_safetensors)



def read_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    return {name: data[8 + size:][slice(*info["data_offsets"])]
            for name, info in header.items() if name != "__metadata__"}


LAYER = "model.layers.0."
ATTENTION = [f"{LAYER}self_attn.{name}_proj" for name in "qkvo"]
MATRIX = TINY_TENSORS[LAYER + "self_attn.q_proj.weight"]  # 32 x 32


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def with_tensors(model, config=None, **more):
    """Adds matrices: module name (dots as __) -> tensor."""
    tensors = dict(TINY_TENSORS)
    for name, tensor in more.items():
        tensors[name.replace("__", ".") + ".weight"] = tensor
    write_safetensors(model.weights, tensors)
    model.write_json("config.json", {**copy.deepcopy(UNKNOWN_FAMILY), **(config or {})})
    return model


def experts(count=3, layer=0):
    return {f"model__layers__{layer}__mlp__experts__{e}__{name}": MATRIX
            for e in range(count) for name in ("gate_proj", "up_proj", "down_proj")}


def plan(model, *more, scheme="w4a16_g32"):
    output = model.folder.parent / "output"
    value = json_of("quantize", model, output, "--scheme", scheme, *more, "--dry-run")
    assert not output.exists() and not output.with_name("output.partial").exists()
    return {tensor["name"]: tensor for tensor in value["tensors"]}


def actions(planned):
    return {name: tensor["action"] for name, tensor in planned.items()}


def refused(model, *words, more=(), scheme="w4a16_g32", code=INVALID):
    output = model.folder.parent / "output"
    arguments = ["quantize", model, output, "--scheme", scheme, *more]
    for dry in ([], ["--dry-run"]):
        fails(code, *words, arguments=[*arguments, *dry])
    assert not output.exists() and not output.with_name("output.partial").exists()


def test_dry_run_tells_what_happens(model):
    planned = plan(model)
    output = model.folder.parent / "output"
    assert set(name for name, action in actions(planned).items() if action == "w4a16_g32") == {
        *ATTENTION, *(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down"))}
    q_proj = planned[LAYER + "self_attn.q_proj"]
    assert q_proj["bytes_in"] == 32 * 32 * 4
    assert q_proj["bytes_out"] == 32 * 32 // 2 + 32 * 2 + 16
    assert q_proj["shape"] == [32, 32] and q_proj["source"] == "F32"
    assert planned["model.embed_tokens.weight"]["action"] == "keep"
    done = json_of("quantize", model, output, "--scheme", "w4a16_g32")
    told = json_of("quantize", model, output.with_name("other"), "--scheme", "w4a16_g32",
                   "--dry-run")
    assert (told["bytes_in"], told["bytes_out"]) == (done["bytes_in"], done["bytes_out"])
    shown = succeeds("quantize", model, output, "--scheme", "w4a16_g32", "--dry-run").stdout
    assert f"w4a16_g32      {LAYER}self_attn.q_proj F32 4096 -> 592 bytes" in shown


def test_rules_in_order(model):
    rules = model.folder.parent / "rules.txt"
    rules.write_text("# attention\n\n  re:.*self_attn\\..* = w8a8_int8\n*.down_proj=keep # no\n"
                     .replace(" # no", ""))
    planned = plan(model, "--rule", "*.o_proj=keep", "--rules", rules, "--rule",
                   f"{LAYER}self_attn.o_proj=w8a8_fp8")
    assert [planned[name]["action"] for name in ATTENTION[:3]] == ["w8a8_int8"] * 3
    assert planned[ATTENTION[0]]["rule"].startswith("--rules rules.txt:3: re:")
    assert planned[ATTENTION[3] + ".weight"]["rule"] == "--rule *.o_proj=keep"
    assert planned[LAYER + "mlp.down_proj.weight"]["action"] == "keep"
    assert planned[LAYER + "mlp.up_proj"]["rule"] == "default: linear layers"


def test_two_schemes_in_one_folder(model):
    output = model.folder.parent / "output"
    succeeds("quantize", model, output, "--scheme", "w4a16_g32", "--rule",
             "re:.*self_attn=w8a8_int8")
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    groups = {group["weights"]["num_bits"]: group for group in config["config_groups"].values()}
    assert set(groups) == {4, 8}
    assert all("self_attn" in target for target in groups[8]["targets"])
    assert all("mlp" in target for target in groups[4]["targets"])
    value = json_of("inspect", output)
    assert value["scheme"] not in ("f32", "bf16")


@pytest.mark.parametrize("rule,words", [
    ("nothing=keep", ["nothing", "no module"]),
    ("*.x_proj=w4a8", ["*.x_proj"]),
    ("*.q_proj", ["PATTERN=SCHEME"]),
    ("*.q_proj=w9", ["w9"]),
    ("re:(=keep", ["re:("]),
    ("=keep", ["empty"]),
    ("*.q_proj=keep", ["q/k/v", "q_proj", "k_proj"]),
    ("*.up_proj=w8a8_int8", ["gate/up", "w8a8_int8"]),
    ("model.embed_tokens=w8a8_int8", ["embedding", "--include"]),
    ("*=w8a8_int8", ["embedding"]),
])
def test_refused_rules(model, rule, words):
    refused(model, *words, more=["--rule", rule])


def test_missing_rules_file(model):
    refused(model, "--rules", more=["--rules", model.folder / "none"], code=NOT_FOUND)


def test_protected_modules_need_include(model):
    with_tensors(model, model__layers__0__mlp__gate=MATRIX, mtp__fc=MATRIX,
                 model__layers__1__eh_proj=MATRIX)
    assert plan(model)[LAYER + "mlp.gate.weight"]["action"] == "keep"
    assert plan(model)["model.layers.1.eh_proj.weight"]["action"] == "keep"  # beyond the last layer
    for name, kind in ((LAYER + "mlp.gate", "router"), ("mtp.fc", "MTP"),
                       ("model.layers.1.eh_proj", "MTP")):
        refused(model, kind, name, "--include", more=["--rule", f"{name}=w8a8_int8"])
        assert plan(model, "--include", name)[name]["action"] == "w4a16_g32"


def test_experts_go_together(model):
    with_tensors(model, **experts())
    planned = plan(model)
    assert planned[LAYER + "mlp.experts.2.down_proj"]["action"] == "w4a16_g32"
    refused(model, "experts", "must be stored alike",
            more=["--rule", "re:.*experts\\.1\\.=keep"])


@pytest.mark.parametrize("config,family", [
    ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}, "kimi_k25"),
    ({"model_type": "kimi_k2"}, "kimi_k2"), ({"model_type": "deepseek_v3"}, "deepseek_v3"),
    ({"model_type": "gpt_oss"}, "gpt_oss"),
])
def test_ready_made_rules_take_experts_only(model, config, family):
    planned = plan(with_tensors(model, config, **experts()))
    assert planned[LAYER + "mlp.experts.0.up_proj"]["rule"] == f"{family}: routed experts"
    kept = planned[LAYER + "self_attn.q_proj.weight"]
    assert kept["action"] == "keep" and kept["rule"] == f"{family}: routed experts only"
    everywhere = plan(model, scheme="w8a8_fp8")
    assert (LAYER + "self_attn.q_proj" in everywhere) == (family == "deepseek_v3")


def test_ready_made_rules_follow_the_architecture_alone(tmp_path):
    source = tmp_path / "model"
    shutil.copytree(ROOT / "tests/golden/deepseek_v3", source)
    config = json.loads((source / "config.json").read_text())
    del config["model_type"]
    (source / "config.json").write_text(json.dumps(config))
    value = json_of("quantize", source, tmp_path / "out", "--scheme", "w4a16_g32", "--dry-run")
    planned = {tensor["name"]: tensor for tensor in value["tensors"]}
    expert = planned["model.layers.1.mlp.experts.0.up_proj"]
    assert expert["action"] == "w4a16_g32" and expert["rule"] == "deepseek_v3: routed experts"
    kept = planned["model.layers.1.self_attn.o_proj.weight"]
    assert kept["action"] == "keep" and kept["rule"] == "deepseek_v3: routed experts only"


def test_k_that_no_group_divides(model):
    matrix = ("F32", [32, 40], bytes(4 * 32 * 40))
    with_tensors(model, model__layers__0__self_attn__g_proj=matrix)
    refused(model, "g_proj", "40", "32", "--ignore", code=UNSUPPORTED)
    assert plan(model, "--ignore", "*.g_proj")[LAYER + "self_attn.g_proj.weight"]["action"] == "keep"


def test_back_to_bf16(model):
    small, plain = (model.folder.parent / name for name in ("small", "plain"))
    succeeds("quantize", model, small, "--scheme", "w4a16_g32")
    succeeds("quantize", small, plain, "--scheme", "bf16")
    config = json.loads((plain / "config.json").read_text())
    assert "quantization_config" not in config
    assert json_of("inspect", plain)["parameters"] == json_of("inspect", model)["parameters"]


def test_what_stays_quantized_is_described(model):
    """INT4 layers of the source stay, others become INT8: both are in the configuration."""
    small, mixed = (model.folder.parent / name for name in ("small", "mixed"))
    succeeds("quantize", model, small, "--scheme", "w4a16_g32")
    succeeds("quantize", small, mixed, "--scheme", "w8a8_int8", "--ignore", "*.mlp.*")
    config = json.loads((mixed / "config.json").read_text())["quantization_config"]
    bits = {group["weights"]["num_bits"]: group["targets"]
            for group in config["config_groups"].values()}
    assert all("mlp" in target for target in bits[4]) and all("attn" in t for t in bits[8])


def test_what_cannot_be_described_is_refused(model):
    small = Model(model.folder.parent / "source")
    succeeds("quantize", model, model.folder.parent / "small", "--scheme", "w4a16_g32")
    small.folder = model.folder.parent / "small"
    refused(small, "would stay int4 g32", "--others bf16", scheme="w8a8_fp8_block",
            more=["--ignore", "*.mlp.*"], code=UNSUPPORTED)


def test_others_are_decoded(model):
    """FP8 blocks everywhere; only the experts become INT4, the rest BF16."""
    config = {"model_type": "deepseek_v3"}
    with_tensors(model, config, **experts())
    blocks = Model(model.folder.parent / "blocks")
    blocks.folder = model.folder.parent / "fp8"
    succeeds("quantize", model, blocks.folder, "--scheme", "w8a8_fp8_block")
    refused(blocks, "--others bf16", code=UNSUPPORTED)
    planned = actions(plan(blocks, "--others", "bf16"))
    assert planned[LAYER + "mlp.experts.2.up_proj"] == "w4a16_g32"
    assert planned[LAYER + "self_attn.q_proj"] == "bf16"
    assert planned["model.embed_tokens.weight"] == "keep"


def test_fused_layers_share_their_one_scale(model):
    output = model.folder.parent / "output"
    succeeds("quantize", model, output, "--scheme", "w8a8_fp8_expert")
    scales = {name: data for name, data in read_safetensors(output / "model.safetensors").items()
              if name.endswith("weight_scale")}
    attention = {scales[name + ".weight_scale"] for name in ATTENTION[:3]}
    assert len(attention) == 1 and scales[ATTENTION[3] + ".weight_scale"] not in attention
    assert (scales[LAYER + "mlp.gate_proj.weight_scale"] == scales[LAYER + "mlp.up_proj.weight_scale"]
            != scales[LAYER + "mlp.down_proj.weight_scale"])
    # The one scale is that of the largest weight of all three.
    largest = max(abs(value) for name in ATTENTION[:3]
                  for value in array.array("f", TINY_TENSORS[name + ".weight"][2]))
    assert abs(struct.unpack("<f", attention.pop())[0] / (largest / 448) - 1) < 1e-6


def test_codes_packed_along_the_other_axis(tmp_path):
    """GPTQ words hold rows of K: the chunks of one matrix read all of its pages."""
    n, k, group = 20_000, 128, 64
    generator = random.Random(5)
    half = struct.pack("<e", 0.01)
    tensors = {
        LAYER + "mlp.up_proj.qweight": ("I32", [k // 8, n], generator.randbytes(k // 8 * n * 4)),
        LAYER + "mlp.up_proj.qzeros": ("I32", [k // group, n // 8], b"\x77" * (k // group * n // 2)),
        LAYER + "mlp.up_proj.scales": ("F16", [k // group, n], half * (k // group * n)),
        LAYER + "mlp.up_proj.g_idx": ("I32", [k], struct.pack(f"<{k}i", *(i // group
                                                                        for i in range(k)))),
    }
    source = tmp_path / "source"
    source.mkdir()
    write_safetensors(source / "model.safetensors", tensors)
    (source / "config.json").write_text(json.dumps({**UNKNOWN_FAMILY, "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq"}}))
    made = []
    for threads in (1, 3):
        output = tmp_path / f"output{threads}"
        succeeds("quantize", source, output, "--scheme", "bf16", "--threads", threads)
        made.append(read_safetensors(output / "model.safetensors")[LAYER + "mlp.up_proj.weight"])
    assert made[0] == made[1]
    words = struct.unpack(f"<{k // 8 * n}I", tensors[LAYER + "mlp.up_proj.qweight"][2])
    for row, column in ((0, 0), (1, 127), (8191, 5), (8192, 77), (19_999, 127), (12_345, 64)):
        code = words[column // 8 * n + row] >> (column % 8 * 4) & 15
        value = (code - 8) * struct.unpack("<e", half)[0]
        stored = struct.unpack("<f", b"\0\0" + made[0][2 * (row * k + column):][:2])[0]
        assert abs(stored - value) <= abs(value) / 256, (row, column)
