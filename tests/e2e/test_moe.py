"""Random mixtures of experts through every command that runs a model, and damaged ones."""

import json
import shutil

import pytest
from cli_tools import CORRUPT, NOT_FOUND, UNSUPPORTED, fails, json_of, succeeds, write_safetensors
from test_openai import Server, eventually
from test_opt import stored

COMMON = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
          "eos_token_id": 2, "dtype": "bfloat16"}
CONFIGS = {
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 32,
                "intermediate_size": 96, "num_local_experts": 5, "num_experts_per_tok": 2,
                "sliding_window": 16, "quantization_config": {"quant_method": "mxfp4"}},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
                  "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 6,
                  "num_experts_per_tok": 3, "shared_expert_intermediate_size": 96,
                  "mlp_only_layers": [1]},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                  "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 6,
                  "num_experts_per_tok": 2, "head_dim": 32, "norm_topk_prob": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
                "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
}
SCHEMES = ("w4a16_g32", "w8a8_int8", "w8a8_fp8_expert", "mxfp4", "mxfp4_fp8", "w4a8")
RUN = ("--prompt", "the sea", "--max-tokens", 12, "--temperature", 0)


def make(folder, name, **changes):
    folder.mkdir(exist_ok=True)
    config = folder / "in.json"
    config.write_text(json.dumps({**COMMON, **CONFIGS[name], **changes}))
    succeeds("make-dummy", "--config", config, "--out", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp(request.param), request.param)


def parameters(name, kind, shape, data):
    if name.endswith("_scales"):
        return 0
    return len(data) * 2 if name.endswith("_blocks") else len(data) // 2


def test_every_command_runs_them(model):
    text = succeeds("generate", model, *RUN).stdout
    assert text == succeeds("generate", model, *RUN, "--threads", 1).stdout
    inspected = json_of("inspect", model)
    assert inspected["parameters"] == sum(parameters(name, *tensor)
                                          for name, tensor in stored(model).items())
    story = model.parent / "text"
    story.write_text("it was a dark night and the wind was loud. " * 12)
    one = json_of("eval", "ppl", model, "--text", story, "--window", 64)
    assert 1 < one["perplexity"] < 5000
    bench = json_of("bench", "offline", model, "--input-len", 16, "--output-len", 4, "--repeats", 1)
    assert bench["decode_tps"] > 0
    top_k = CONFIGS[model.parent.name.rstrip("0123456789")]["num_experts_per_tok"]
    assert (bench["active_experts_mean"], bench["max_over_mean"]) == (top_k, 1)  # of one row


def test_requests_at_once_get_their_own_answers(model):
    prompts = [f"{number} ships " * (number + 1) for number in range(5)]
    server = Server(model=model)
    alone = [server.complete(prompt, max_tokens=10).choices[0].text for prompt in prompts]
    together = server.complete(prompts, max_tokens=10).choices
    assert [choice.text for choice in together] == alone

    def counts():
        names = ("layer_runs", "active", "slots", "rows_max")
        return [server.metric(f"nibble:expert_{name}_total") for name in names]

    # Once the engine is idle: prompts and five requests at once give experts more than one row.
    assert eventually(lambda: 0 < counts()[0] < counts()[1] < counts()[2])
    runs, active, slots, rows_max = counts()
    assert runs < rows_max < slots and active / runs < 7
    assert server.stop() == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_experts_run_and_verify(model, scheme, tmp_path):
    succeeds("quantize", model, tmp_path / "q", "--scheme", scheme)
    succeeds("verify", model, tmp_path / "q")
    succeeds("generate", tmp_path / "q", *RUN)


def damaged(model, folder, change):
    """A copy of the model whose tensors `change` has changed."""
    shutil.copytree(model, folder)
    tensors = stored(folder)
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_a_missing_expert_is_named(tmp_path):
    model = make(tmp_path, "qwen3_moe")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    broken = damaged(model, tmp_path / "broken", lambda tensors: tensors.pop(name))
    fails(NOT_FOUND, name, arguments=("generate", broken, *RUN))


def test_an_expert_of_another_shape_or_type_is_named(tmp_path):
    model = make(tmp_path, "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"

    def shorten(tensors):
        kind, (rows, columns), data = tensors[name]
        tensors[name] = (kind, [rows - 1, columns], data[:-2 * columns])

    def widen(tensors):
        _, shape, data = tensors[name]
        wide = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
        tensors[name] = ("F32", shape, wide)

    fails(CORRUPT, name, "[95, 64]", arguments=("generate", damaged(model, tmp_path / "a", shorten),
                                                *RUN))
    fails(UNSUPPORTED, name, "another format",
          arguments=("generate", damaged(model, tmp_path / "b", widen), *RUN))


def test_an_expert_that_nobody_asks_for_is_refused(tmp_path):
    model = make(tmp_path, "mixtral")

    def repeat(tensors):
        first = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
        tensors[first.replace("experts.0", "experts.7")] = tensors[first]

    fails(UNSUPPORTED, "experts.7.w1",
          arguments=("generate", damaged(model, tmp_path / "more", repeat), *RUN))


def test_blocks_without_scales_or_with_nan_are_named(tmp_path):
    model = make(tmp_path, "gpt_oss")
    scales = "model.layers.0.mlp.experts.down_proj_scales"

    def spoil(tensors):
        kind, shape, data = tensors[scales]
        tensors[scales] = (kind, shape, data[:7] + b"\xff" + data[8:])

    def drop(tensors):
        del tensors[scales]

    fails(CORRUPT, scales, arguments=("generate", damaged(model, tmp_path / "nan", spoil), *RUN))
    fails(CORRUPT, "down_proj_scales is missing",
          arguments=("generate", damaged(model, tmp_path / "none", drop), *RUN))


def test_experts_twice_are_refused(tmp_path):
    model = make(tmp_path, "gpt_oss")

    def twice(tensors):
        _, (experts, rows, blocks, _), _ = tensors["model.layers.0.mlp.experts.down_proj_blocks"]
        shape = [experts, blocks * 32, rows]
        count = experts * blocks * 32 * rows
        tensors["model.layers.0.mlp.experts.down_proj"] = ("BF16", shape, b"\0" * (2 * count))

    fails(CORRUPT, "described twice",
          arguments=("generate", damaged(model, tmp_path / "twice", twice), *RUN))


@pytest.mark.parametrize("name,changes,words", [
    ("mixtral", {"num_experts_per_tok": 5}, ("num_experts_per_tok", "5 of 4")),
    ("qwen3_moe", {"num_experts_per_tok": 0}, ("num_experts_per_tok", "0 of 6")),
    ("gpt_oss", {"swiglu_limit": -1.0}, ("swiglu_limit",)),
    ("gpt_oss", {"layer_types": ["full_attention", "spiral"]}, ("layer_types",)),
])
def test_fields_that_cannot_be(name, changes, words, tmp_path):
    model = make(tmp_path, name)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    result = fails_either(words, ("generate", model, *RUN))
    assert "config.json" in result


def fails_either(words, arguments):
    try:
        return fails(CORRUPT, *words, arguments=arguments)
    except AssertionError:
        return fails(UNSUPPORTED, *words, arguments=arguments)


def test_a_nan_of_the_router_is_found(tmp_path):
    model = make(tmp_path, "qwen2_moe")
    name = "model.layers.0.mlp.gate.weight"

    def spoil(tensors):
        kind, shape, data = tensors[name]
        tensors[name] = (kind, shape, b"\xc0\x7f" + data[2:])

    broken = damaged(model, tmp_path / "nan", spoil)
    story = tmp_path / "text"
    story.write_text("it was a dark night. " * 10)
    fails(CORRUPT, name, arguments=("eval", "ppl", broken, "--text", story, "--window", 16))
