"""Checkpoints shaped like Kimi K2.5: made, loaded and served in every form, and damaged ones."""

import json
import struct
import subprocess
import sys

import pytest
from cli_tools import (BINARY, CORRUPT, INVALID, NOT_FOUND, ROOT, UNSUPPORTED, fails, json_of,
                       succeeds)
from test_moe import damaged
from test_openai import Server, eventually
from test_opt import stored

CONFIG = ROOT / "bench/configs/kimi_k25.json"
LAYER = "language_model.model.layers.1."
ATTENTION = LAYER + "self_attn."
CORRECTION = LAYER + "mlp.gate.e_score_correction_bias"
RUN = ("--prompt", "the sea", "--max-tokens", 6, "--temperature", 0)


def config_of(**changes):
    config = json.loads(CONFIG.read_text())
    text = config["text_config"]
    text.update({"n_routed_experts": 16, "num_experts_per_tok": 4, "vocab_size": 300,
                 "bos_token_id": 256, "eos_token_id": 257, "max_position_embeddings": 4096})
    text.update(changes)
    config.update({"bos_token_id": 256, "eos_token_id": 257})  # of generation_config.json
    return config


def make(folder, *flags, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "in.json").write_text(json.dumps(config_of(**changes)))
    succeeds("make-dummy", "--config", folder / "in.json", "--out", folder / "model", "--tiny",
             "--layers", 3, *flags)
    return folder / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """As it was published: INT4 in groups of 32, described under text_config."""
    return make(tmp_path_factory.mktemp("kimi"))


def generates(folder):
    return succeeds("generate", folder, *RUN).stdout


@pytest.mark.parametrize("flags", [(), ("--scheme", "w4a8"), ("--scheme", "w8a8_fp8"),
                                   ("--dtype", "bf16")])
def test_every_form_loads_and_generates(flags, tmp_path):
    folder = make(tmp_path, *flags)
    assert generates(folder) == succeeds("generate", folder, *RUN, "--threads", 1).stdout
    config = json.loads((folder / "config.json").read_text())
    assert ("quantization_config" in config) == ("--scheme" in flags)
    assert ("quantization_config" in config["text_config"]) == (flags == ())


def test_quantizing_a_plain_one_gives_the_same_layout(tmp_path):
    plain = make(tmp_path, "--dtype", "bf16")
    for scheme in ("w4a8", "w8a8_fp8"):
        made = make(tmp_path, "--scheme", scheme, "--force")
        expected = {name: tensor[:2] for name, tensor in stored(made).items()}
        plain = make(tmp_path, "--dtype", "bf16", "--force")
        succeeds("quantize", plain, tmp_path / scheme, "--scheme", scheme)
        succeeds("verify", plain, tmp_path / scheme)
        assert {name: tensor[:2] for name, tensor in stored(tmp_path / scheme).items()} == expected


ATTENTION_SCHEMES = ("w8a8_fp8", "w4a16_g32")


@pytest.mark.parametrize("scheme", ATTENTION_SCHEMES)
@pytest.mark.parametrize("flags", [(), ("--scheme", "w8a8_fp8")])
def test_attention_and_shared_experts_in_a_scheme(scheme, flags, tmp_path):
    folder = make(tmp_path, *flags, "--attention-scheme", scheme)
    assert generates(folder) == succeeds("generate", folder, *RUN, "--threads", 1).stdout
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    groups = config["quantization_config"]["config_groups"]
    assert len(groups) == (1 if scheme in flags or (not flags and scheme == "w4a16_g32") else 2)
    tensors = stored(folder)
    kept = sorted(name for name in tensors if name.endswith(("gate.weight", "embed_tokens.weight",
                                                             "lm_head.weight")))
    assert len(kept) == 2 + 2  # routers, embedding and head
    code = "F8_E4M3" if scheme == "w8a8_fp8" else "I32"
    suffix = "weight" if scheme == "w8a8_fp8" else "weight_packed"
    for module in (f"{ATTENTION}kv_b_proj", f"{ATTENTION}q_a_proj", f"{ATTENTION}o_proj",
                   f"{LAYER}mlp.shared_experts.down_proj",
                   "language_model.model.layers.0.mlp.gate_proj"):
        assert tensors[f"{module}.{suffix}"][0] == code
    experts = f"{LAYER}mlp.experts.3.up_proj."
    assert (experts + "weight_packed" in tensors) == (flags == ())


@pytest.mark.parametrize("scheme", ATTENTION_SCHEMES)
def test_its_answers_are_those_of_its_weights(scheme, tmp_path):
    """Beside the same weights in BF16, which a checkpoint in a scheme is decoded to."""
    folder = make(tmp_path, "--attention-scheme", scheme)
    plain = tmp_path / "plain"
    succeeds("quantize", folder, plain, "--scheme", "bf16")
    text = tmp_path / "text"
    text.write_bytes((ROOT / "tests/data/text/the_black_cat.txt").read_bytes()[:3000])
    found = json_of("eval", "kld", plain, folder, "--text", text, "--window", 256)
    # 1.2e-5 where activations are rounded to E4M3, else 2e-6; of other weights 0.025.
    assert 0 <= found["kld"] < (1e-4 if scheme == "w8a8_fp8" else 1e-5)
    assert found["same_top"] > (0.9 if scheme == "w8a8_fp8" else 0.97)
    other = make(tmp_path, "--attention-scheme", scheme, "--seed", 1, "--force")
    assert json_of("eval", "kld", plain, other, "--text", text, "--window", 256)["kld"] > 0.01


@pytest.mark.parametrize("scheme", ATTENTION_SCHEMES)
def test_quantizing_by_rules_gives_the_layout_of_an_attention_scheme(scheme, tmp_path):
    made = make(tmp_path, "--attention-scheme", scheme)
    expected = {name: tensor[:2] for name, tensor in stored(made).items()}
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    plain = make(tmp_path, "--dtype", "bf16", "--force")
    succeeds("quantize", plain, tmp_path / "q", "--scheme", scheme, "--rule",
             r"re:.*\.experts\..*=w4a16_g32", "--include", "re:.*_proj")
    assert {name: tensor[:2] for name, tensor in stored(tmp_path / "q").items()} == expected
    written = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert sorted(map(str, written["config_groups"].values())) == sorted(
        map(str, config["config_groups"].values()))
    assert sorted(written["ignore"]) == sorted(config["ignore"])


def test_an_attention_scheme_that_cannot_be(tmp_path):
    def refused(code, *words, flags):
        (tmp_path / "in.json").write_text(json.dumps(config_of()))
        fails(code, *words, arguments=("make-dummy", "--config", tmp_path / "in.json", "--out",
                                       tmp_path / "model", "--tiny", "--layers", 2, *flags))

    refused(UNSUPPORTED, "--attention-scheme w4ax", flags=("--attention-scheme", "w4ax"))
    fails(INVALID, "--attention-scheme w8a8_fp8", "no experts", arguments=(
        "make-dummy", "--config", ROOT / "bench/configs/llama_1b.json", "--out", tmp_path / "l",
        "--tiny", "--attention-scheme", "w8a8_fp8"))


def test_a_rank_of_several_devices_has_its_experts_alone(model):
    bench = ("bench", "offline", model, "--input-len", 16, "--output-len", 4, "--repeats", 1)
    whole = json_of(*bench)
    ranks = [json_of(*bench, "--expert-rank", f"{rank}/4") for rank in range(4)]
    assert "expert_rank" not in whole and ranks[3]["expert_rank"] == "3/4"
    assert all(rank["weight_bytes"] < whole["weight_bytes"] for rank in ranks)
    assert 0 < sum(rank["expert_slots_mean"] for rank in ranks) < 16
    assert whole["expert_slots_mean"] == 4
    for wrong, words in (("4/4", "I from 0 to N - 1"), ("0", "like 0/8"), ("0/3", "16 experts")):
        fails(INVALID, "--expert-rank", words, arguments=(*bench, "--expert-rank", wrong))
    fails(INVALID, "cannot be shared out", arguments=(
        "bench", "offline", ROOT / "models/storyteller", "--expert-rank", "0/2"))


# -- What is wrong with files ----------------------------------------------------------------------


@pytest.mark.parametrize("lost,there", [
    ("q_a_proj", "q_b_proj"), ("q_b_proj", "q_a_proj"), ("q_a_layernorm", "q_a_proj"),
    ("kv_a_proj_with_mqa", "kv_b_proj"), ("kv_b_proj", "kv_a_proj_with_mqa"),
    ("kv_a_layernorm", "kv_a_proj_with_mqa"),
])
def test_half_of_a_pair_is_missing(model, lost, there, tmp_path):
    broken = damaged(model, tmp_path / "b", lambda tensors: tensors.pop(f"{ATTENTION}{lost}.weight"))
    fails(NOT_FOUND, f"model.safetensors: tensor {ATTENTION}{there}.weight",
          f"{ATTENTION}{lost}.weight is missing", "download", arguments=("generate", broken, *RUN))


@pytest.mark.parametrize("matrix,rows,words", [
    ("kv_b_proj", 60, "num_attention_heads 2 x (qk_nope_head_dim 16 + v_head_dim 32) = 96"),
    ("q_b_proj", 40, "num_attention_heads 2 x (qk_nope_head_dim 16 + qk_rope_head_dim 8) = 48"),
    ("kv_a_proj_with_mqa", 39, "kv_lora_rank 32 + qk_rope_head_dim 8 = 40"),
    ("q_a_proj", 30, "q_lora_rank 64 = 64"),
])
def test_rows_that_do_not_fit_the_heads(model, matrix, rows, words, tmp_path):
    name = f"{ATTENTION}{matrix}.weight"

    def change(tensors):
        kind, (_, columns), data = tensors[name]
        tensors[name] = (kind, [rows, columns], data[:rows * columns * 2])

    broken = damaged(model, tmp_path / "b", change)
    fails(CORRUPT, f"model.safetensors: tensor {name}: {rows} rows", words, "correct the field",
          arguments=("generate", broken, *RUN))


def test_a_correction_of_another_length_or_type(model, tmp_path):
    def shorten(tensors):
        kind, _, data = tensors[CORRECTION]
        tensors[CORRECTION] = (kind, [15], data[:60])

    def lose(tensors):
        del tensors[CORRECTION]

    def round_it(kind, element):
        def change(tensors):
            values = struct.unpack("<16f", tensors[CORRECTION][2])
            tensors[CORRECTION] = (kind, [16], b"".join(element(v) for v in values))
        return change

    fails(CORRUPT, f"tensor {CORRECTION}: shape [15]", "n_routed_experts is 16",
          arguments=("generate", damaged(model, tmp_path / "short", shorten), *RUN))
    fails(NOT_FOUND, CORRECTION, "download",
          arguments=("generate", damaged(model, tmp_path / "none", lose), *RUN))
    fails(UNSUPPORTED, CORRECTION, "I32", "published", arguments=(
        "generate", damaged(model, tmp_path / "int", round_it("I32", lambda v: struct.pack("<i", 0))),
        *RUN))
    rounded = damaged(model, tmp_path / "bf16",
                      round_it("BF16", lambda v: struct.pack("<f", v)[2:]))
    result = succeeds("generate", rounded, *RUN)
    assert f"tensor {CORRECTION}: stored as BF16" in result.stderr
    assert result.stderr.count("stored as BF16") == 1  # of both layers


def further_layer(tensors, experts):
    """Another layer that predicts further tokens, with so many experts of 16."""
    for name, tensor in list(tensors.items()):
        if name.startswith(LAYER.replace(".1.", ".2.")):
            expert = name.split(".experts.")[1].split(".")[0] if ".experts." in name else 0
            if int(expert) < experts:
                tensors[name.replace(".layers.2.", ".layers.3.")] = tensor
    norm = ("BF16", [64], b"\x80\x3f" * 64)
    tensors[LAYER.replace(".1.", ".3.") + "enorm.weight"] = norm
    tensors[LAYER.replace(".1.", ".3.") + "hnorm.weight"] = norm
    tensors[LAYER.replace(".1.", ".3.") + "eh_proj.weight"] = ("BF16", [64, 128], b"\0" * 64 * 256)


def test_a_layer_of_further_tokens_in_part(tmp_path):
    model = make(tmp_path, num_nextn_predict_layers=1)
    text = generates(model)  # without it
    whole = damaged(model, tmp_path / "whole", lambda tensors: further_layer(tensors, 16))
    assert generates(whole) == text
    part = damaged(model, tmp_path / "part", lambda tensors: further_layer(tensors, 9))
    fails(NOT_FOUND, "layer 3", "mlp.experts.9.gate_proj.weight", "num_nextn_predict_layers to 0",
          arguments=("generate", part, *RUN))


def test_a_shard_that_is_not_there(tmp_path):
    model = make(tmp_path, "--shard-size", 40_000)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    generates(model)
    (model / files[2]).unlink()
    fails(NOT_FOUND, "model.safetensors.index.json", files[2], "download it into",
          arguments=("generate", model, *RUN))


# -- What is wrong with config.json ----------------------------------------------------------------


def with_text(model, folder, top=None, **changes):
    """A copy whose text_config has other fields; ... takes one out."""
    broken = damaged(model, folder, lambda tensors: None)
    config = json.loads((broken / "config.json").read_text())
    config.update(top or {})
    for field, value in changes.items():
        config["text_config"].pop(field, None)
        if value is not ...:
            config["text_config"][field] = value
    (broken / "config.json").write_text(json.dumps(config))
    return broken


YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize("changes,code,words", [
    ({"v_head_dim": 33}, CORRUPT, ("field v_head_dim: 33", "kv_lora_rank 32")),
    ({"kv_lora_rank": 0}, CORRUPT, ("kv_lora_rank 0",)),
    ({"qk_rope_head_dim": 7}, CORRUPT, ("qk_rope_head_dim 7", "even")),
    ({"n_group": 3}, CORRUPT, ("n_group 3", "16 experts", "divide")),
    ({"n_group": 4, "topk_group": 5}, CORRUPT, ("topk_group 5",)),
    ({"scoring_func": "softmax"}, UNSUPPORTED, ("scoring_func", "softmax")),
    ({"rope_scaling": {**YARN, "type": "longrope"}}, UNSUPPORTED, ("rope_type", "longrope", "yarn")),
    ({"rope_scaling": {**YARN, "mscale": -1.0}}, CORRUPT, ("rope_scaling: field mscale: -1",)),
    ({"rope_scaling": {**YARN, "mscale_all_dim": 1e9}}, CORRUPT,
     ("rope_scaling: field mscale_all_dim: 1000000000",)),
    ({"rope_scaling": {**YARN, "factor": 0}}, CORRUPT, ("rope_scaling: field factor",)),
    ({"q_lora_rank": None}, CORRUPT, ("q_a_proj.weight", "q_lora_rank", "two stages")),
    ({"q_lora_rank": 48}, CORRUPT, ("q_a_proj.weight: 64 rows", "q_lora_rank 48")),
    ({"num_attention_heads": 4, "num_key_value_heads": 4}, CORRUPT,
     ("q_b_proj.weight: 48 rows", "num_attention_heads 4")),
])
def test_fields_that_cannot_be(model, changes, code, words, tmp_path):
    fails(code, *words, arguments=("generate", with_text(model, tmp_path / "b", **changes), *RUN))


def test_two_quantization_configs(model, tmp_path):
    nested = json.loads((model / "config.json").read_text())["text_config"]["quantization_config"]
    turned = dict(reversed(nested.items()))  # the same members in another order
    same = with_text(model, tmp_path / "same", {"quantization_config": turned})
    assert generates(same) == generates(model)
    weights = dict(nested["config_groups"]["group_0"]["weights"], group_size=64)
    other = {**nested, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    broken = with_text(model, tmp_path / "other", {"quantization_config": other})
    for command in (("generate", broken, *RUN), ("inspect", broken),
                    ("quantize", broken, tmp_path / "q", "--scheme", "w8a8_fp8", "--dry-run")):
        fails(CORRUPT, "config.json: quantization_config and text_config.quantization_config",
              "remove", arguments=command)


def test_a_request_with_an_image_is_refused(model, tmp_path):
    template = damaged(model, tmp_path / "chat", lambda tensors: None)
    (template / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}")
    server = Server(model=template)
    parts = [{"type": "text", "text": "a"},
             {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    body = {"model": server.name, "max_tokens": 2, "messages": [{"role": "user", "content": parts}]}
    status, answer = server.post("/v1/chat/completions", json.dumps(body))
    assert status == 400
    assert answer["error"]["param"].startswith("messages[0].content")
    assert "image_url" in answer["error"]["message"] and "text" in answer["error"]["message"]
    parts.pop()
    assert server.post("/v1/chat/completions", json.dumps(body))[0] == 200
    assert server.stop() == 0


# -- What measures them ----------------------------------------------------------------------------


def test_the_experiment_runs_in_small(tmp_path):
    command = [sys.executable, ROOT / "bench/speed/kimi_serving.py", "--nibble", BINARY, "--small",
               "--forms", "w4a16", "w8a8", "--work", tmp_path, "--out", tmp_path / "rows"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(row.get("form"), row["concurrency"]) for row in rows] == [
        ("w4a16", 2), ("w4a16", 4), ("w8a8", 2), ("w8a8", 4), (None, 2), (None, 4)]
    for row in rows[:4]:
        assert row["ttft_ms"]["median"] > 0 and row["tpot_ms"]["median"] > 0
        assert row["tokens_that_fit"] > 48 and row["file_bytes"] > 0
    for row, base in zip(rows[4:], rows[:2]):
        expected = rows[2 + rows[4:].index(row)]["e2e_ms"]["median"] / base["e2e_ms"]["median"]
        assert row["w8a8"]["e2e_ms"] == pytest.approx(expected, rel=1e-2)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]  # one checkpoint at a time, then none


def test_the_experiment_of_a_checkpoint_that_is_there(model, tmp_path):
    command = [sys.executable, ROOT / "bench/speed/kimi_serving.py", "--nibble", BINARY, "--small",
               "--model", model, "--out", tmp_path / "rows", "--answers", "5", "--first-token",
               "--config", model.parent / "in.json"]
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2 and "--forms" in wrong.stderr
    subprocess.run([*command, "--forms", "w4a16"], check=True, stdout=subprocess.DEVNULL,
                   timeout=300)
    assert (model / "config.json").exists()
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row.get("concurrency") for row in rows] == [2, 4, None, None]
    assert rows[2]["answers"] == 5 and rows[2]["equal"] + len(rows[2]["differing"]) == 5
    start = rows[3]
    assert start["first_token_s"] > start["load_s"] > 0
    assert start["peak_bytes"]["all"] > start["peak_bytes"]["RssAnon"] > 0


def test_a_checkpoint_goes_where_the_experiment_is_killed(tmp_path):
    slow = tmp_path / "nibble"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    process = subprocess.Popen([sys.executable, ROOT / "bench/speed/kimi_serving.py", "--nibble", slow,
                                "--small", "--work", tmp_path / "work"])
    try:
        assert eventually(lambda: (tmp_path / "pid").exists())
        assert list((tmp_path / "work").iterdir())
        process.terminate()
        assert process.wait(timeout=30) == 128 + 15
    finally:
        process.kill()
    assert not list((tmp_path / "work").iterdir())


def test_the_products_of_a_step_are_told_apart(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench/speed"))
    import step_profile
    attention = ["norm", "p", "rope + append", "p", "p", "rotate queries", "attention", "p",
                 "parts of a product", "p", "norm"]
    dense = ["p", "activation + quantize", "p"]
    experts = ["routing", "experts", "activation + quantize", "experts", "combine experts", *dense]
    full = {"p": "product", "norm": "norm + quantize"}
    step = [full.get(kind, kind)
            for kind in [*attention, *dense, *attention, *experts, "norm", "p"]]
    names = [name[8:] for name in step_profile.name_products(step) if name.startswith("product ")]
    of_layer = ["q_a + kv_a", "q_b", "keys", "values", "values", "o"]
    assert names == [*of_layer, "gate_up", "down", *of_layer, "shared gate_up", "shared down",
                     "head"]
    beside = ["p", "routing", "activation + quantize", "p", "routing", "experts",
              "parts of a product", "experts", "combine experts"]
    step = [full.get(kind, kind) for kind in [*attention, *beside, "norm", "p"]]
    names = [name[8:] for name in step_profile.name_products(step) if name.startswith("product ")]
    assert names == [*of_layer, "shared gate_up", "shared down", "shared down", "head"]
    plain = ["norm", "p", "rope + append", "attention", "p", "norm", *dense, "norm", "p"]
    names = step_profile.name_products([full.get(kind, kind) for kind in plain])
    assert [name for name in names if name.startswith("product")] == [
        "product qkv", "product o", "product gate_up", "product down", "product head"]
    mangled = {"_ZN6nibble4cuda12_GLOBAL__N_113gather_kernelI13__nv_bfloat16EEvNS0_13EmbeddingArgsE":
               "embedding", "_ZN6nibble4cuda12_GLOBAL__N_113gather_kernelENS1_10GatherArgsE":
               "gather latents", "_ZN6nibble4cuda15few_latent_sm90INS0_7FewBf16ILi8EEEEvE":
               "attention", "_ZN6nibble4cuda21gemm_experts_few_sm90INS0_9Int4CodecEEEv": "experts",
               "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT": "product",
               "_ZN6nibble4cuda24gemm_w4a16_decode_sm90E": "product"}
    for name, kind in mangled.items():
        record = step_profile.Record("kernel", 0, 1, 0, 1, 0, name)
        assert step_profile.kind_of(record) == kind
