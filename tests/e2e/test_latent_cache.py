"""Cache formats of a model with latent attention, through the commands that run or describe it."""

import json

import pytest
from cli_tools import UNSUPPORTED, fails, json_of, succeeds
from test_openai import Server

RANK, ROPE, LAYERS = 136, 24, 3  # a group of INT4 that is not full
CONFIG = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
          "vocab_size": 512, "hidden_size": 96, "num_hidden_layers": LAYERS,
          "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 1024,
          "q_lora_rank": 48, "kv_lora_rank": RANK, "qk_nope_head_dim": 32,
          "qk_rope_head_dim": ROPE, "v_head_dim": 40, "first_k_dense_replace": 1,
          "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
          "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1,
          "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
          "topk_method": "noaux_tc", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
          "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
# Bytes of a token and layer: codes, the rotated key in BF16, parameters.
BYTES = {"f32": 4 * (RANK + ROPE), "bf16": 2 * (RANK + ROPE), "fp8": RANK + 2 * ROPE + 4,
         "int8": RANK + 2 * ROPE + 4, "int4": RANK // 2 + 2 * ROPE + 2 * 4}
RUN = ("--prompt", "the sea was calm and the wind was cold " * 4, "--max-tokens", 24,
       "--temperature", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    (folder / "in.json").write_text(json.dumps(CONFIG))
    succeeds("make-dummy", "--config", folder / "in.json", "--out", folder / "model")
    return folder / "model"


def test_inspect_counts_rows_of_latents(model):
    rows = json_of("inspect", model, "--context", 512, "--concurrency", 2)["memory"]
    assert {row["kv"]: row["kv_bytes"] for row in rows} == {
        kv: 512 * 2 * LAYERS * each for kv, each in BYTES.items()}


def test_bench_counts_the_bytes_that_a_step_reads(model):
    shape = ("--input-len", 60, "--output-len", 4, "--repeats", 1)
    read = {kv: json_of("bench", "offline", model, *shape, "--kv-cache-dtype", kv)["kv_bytes"]
            for kv in ("bf16", "int8", "int4")}
    assert read["int8"] * BYTES["bf16"] == read["bf16"] * BYTES["int8"]
    assert read["int4"] * BYTES["bf16"] == read["bf16"] * BYTES["int4"]


@pytest.mark.parametrize("kv", BYTES)
def test_answers_depend_neither_on_threads_nor_on_steps(model, kv):
    cache = ("--kv-cache-dtype", kv)
    text = succeeds("generate", model, *RUN, *cache).stdout
    assert text == succeeds("generate", model, *RUN, *cache, "--threads", 1).stdout
    story = model.parent / "text"
    story.write_text("it was a dark night and the wind was loud. " * 40)
    plain = json_of("eval", "ppl", model, "--text", story, "--window", 300)["perplexity"]
    coded = json_of("eval", "ppl", model, "--text", story, "--window", 300, *cache)["perplexity"]
    assert coded == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("kv", ["fp8", "int8", "int4"])
def test_a_server_gives_the_same_answer_from_its_prefix_cache(model, kv):
    server = Server("--kv-cache-dtype", kv, model=model)
    try:
        prompt = "a house by the sea " * 20
        texts = {server.complete(prompt, max_tokens=12, temperature=0).choices[0].text
                 for _ in range(3)}
        assert len(texts) == 1
        assert server.metric("vllm:prefix_cache_hits_total") > 0
    finally:
        server.stop()


@pytest.mark.parametrize("kv", ["int4_page", "int4_static"])
def test_forms_that_latents_have_not_are_refused_with_what_to_choose(model, kv):
    fails(UNSUPPORTED, kv, "latent attention", "--kv-cache-dtype f32, bf16, fp8, int8, int4",
          arguments=("generate", model, *RUN, "--kv-cache-dtype", kv))


def test_rows_that_kernels_do_not_hold_are_refused(tmp_path):
    (tmp_path / "in.json").write_text(json.dumps({**CONFIG, "kv_lora_rank": 1024}))
    succeeds("make-dummy", "--config", tmp_path / "in.json", "--out", tmp_path / "model")
    fails(UNSUPPORTED, "up to 576 numbers", "1048", "quantized, not run",
          arguments=("generate", tmp_path / "model", *RUN))
