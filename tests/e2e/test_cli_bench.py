"""make-dummy and bench: models with random weights, their speed, and what is refused. NIBBLE_BIN
names the binary; run from the repository root."""

import json
import os
import pathlib

import pytest

from cli_tools import (
    CORRUPT, EXHAUSTED, EXISTS, INVALID, NOT_FOUND, ROOT, UNSUPPORTED, fails, json_of, succeeds)

CONFIGS = pathlib.Path(os.environ.get("NIBBLE_SHARED", ROOT.parent / "shared")) / "data/configs"
SMALL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "hidden_act": "silu",
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "vocab_size": 512,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": [2, 300], "torch_dtype": "bfloat16",
}


def write_config(path, **fields):
    value = {**SMALL, **fields}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))
    return path


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "config.json")


# --- make-dummy ----------------------------------------------------------------------------------

def test_make_dummy_json_and_what_can_be_done_with_it(config, tmp_path):
    out = tmp_path / "dummy"
    value = json_of("make-dummy", "--config", config, "--out", out, "--layers", 2)
    assert {"architecture", "dtype", "layers", "tensors", "parameters", "bytes", "seconds",
            "peak_rss_bytes"} == set(value)
    assert value["architecture"] == "LlamaForCausalLM" and value["dtype"] == "BF16"
    parameters = 2 * 512 * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert value["parameters"] == parameters
    assert value["bytes"] == (out / "model.safetensors").stat().st_size > 2 * parameters
    inspected = json_of("inspect", out)
    assert inspected["parameters"] == parameters and inspected["scheme"] == "bf16"
    answer = json_of("generate", out, "--prompt", "héllo", "--max-tokens", 4)
    assert answer["prompt_tokens"] == 1 + len("héllo".encode())
    succeeds("quantize", out, tmp_path / "w4", "--scheme", "w4a16_g32")
    assert len(json_of("generate", tmp_path / "w4", "--prompt", "x", "--max-tokens", 2)["tokens"])


def test_make_dummy_is_reproducible(config, tmp_path):
    def weights(name, *flags):
        succeeds("make-dummy", "--config", config, "--out", tmp_path / name, *flags)
        return (tmp_path / name / "model.safetensors").read_bytes()

    first = weights("one", "--threads", 1)
    assert first == weights("two", "--threads", 3)
    assert first != weights("three", "--seed", 7)
    assert len(weights("wide", "--dtype", "f32")) > 1.9 * len(first)
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"


def test_make_dummy_replaces_only_when_told(config, tmp_path):
    arguments = ["make-dummy", "--config", config, "--out", tmp_path / "out"]
    succeeds(*arguments)
    before = (tmp_path / "out/model.safetensors").read_bytes()
    fails(EXISTS, "out", "--force", arguments=arguments + ["--seed", 5])
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    succeeds(*arguments, "--seed", 5, "--force")
    assert (tmp_path / "out/model.safetensors").read_bytes() != before


@pytest.mark.parametrize("fields, code, words", [
    ({"architectures": ["RwkvForCausalLM"]}, UNSUPPORTED, ["RwkvForCausalLM", "LlamaForCausalLM"]),
    ({"architectures": ...}, UNSUPPORTED, ["architectures"]),
    ({"hidden_size": ...}, CORRUPT, ["hidden_size", "missing"]),
    ({"num_hidden_layers": ...}, CORRUPT, ["num_hidden_layers", "missing"]),
    ({"vocab_size": -5}, CORRUPT, ["vocab_size", "-5"]),
    ({"num_key_value_heads": 3}, CORRUPT, ["num_key_value_heads"]),
])
def test_make_dummy_refuses_a_config(tmp_path, fields, code, words):
    config = write_config(tmp_path / "config.json", **fields)
    fails(code, "config.json", *words,
          arguments=["make-dummy", "--config", config, "--out", tmp_path / "out"])
    assert sorted(os.listdir(tmp_path)) == ["config.json"]


@pytest.mark.parametrize("arguments, code, words", [
    (["--config", "CONFIG"], INVALID, ["--out"]),
    (["--out", "OUT"], INVALID, ["--config"]),
    (["--config", "nowhere.json", "--out", "OUT"], NOT_FOUND, ["nowhere.json"]),
    (["--config", "CONFIG", "--out", "OUT", "--layers", "5"], INVALID, ["--layers 5", "4"]),
    (["--config", "CONFIG", "--out", "OUT", "--layers", "0"], INVALID, ["--layers"]),
    (["--config", "CONFIG", "--out", "OUT", "--dtype", "int8"], INVALID, ["--dtype", "bf16"]),
    (["--config", "CONFIG", "--out", "OUT", "--seed", "x"], INVALID, ["--seed"]),
    (["--config", "CONFIG", "--out", "OUT", "--threads", "-1"], INVALID, ["--threads"]),
    (["--config", "CONFIG", "--out", "/"], INVALID, ["/"]),
])
def test_make_dummy_flags(config, tmp_path, arguments, code, words):
    names = {"CONFIG": config, "OUT": tmp_path / "out"}
    fails(code, *words, arguments=["make-dummy", *(names.get(a, a) for a in arguments)])
    assert sorted(os.listdir(tmp_path)) == ["config.json"]


@pytest.mark.parametrize("name", ["Qwen_Qwen3-0.6B", "meta-llama_Meta-Llama-3.1-8B"])
def test_make_dummy_reads_published_configs(tmp_path, name):
    path = CONFIGS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"needs {path}")
    fields = json.loads(path.read_text())
    fields.update(hidden_size=512, intermediate_size=256, vocab_size=fields["eos_token_id"] + 1)
    small = tmp_path / "config.json"
    small.write_text(json.dumps(fields))
    value = json_of("make-dummy", "--config", small, "--out", tmp_path / "out", "--layers", 1)
    assert value["architecture"] == fields["architectures"][0] and value["layers"] == 1
    assert json_of("generate", tmp_path / "out", "--prompt", "x", "--max-tokens", 2)["tokens"]


# --- bench offline -------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def dummy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    config = write_config(folder / "config.json")
    succeeds("make-dummy", "--config", config, "--out", folder / "dummy")
    return folder / "dummy"


def offline(model, *flags):
    return json_of("bench", "offline", model, "--repeats", 2, *flags, timeout=300)


def test_bench_offline_json(dummy):
    value = offline(dummy, "--input-len", 40, "--output-len", 6)
    assert {"prefill_tps", "decode_tps", "bytes_per_token", "read_gbps", "roofline_percent",
            "peak_rss_bytes", "batch", "input_len", "output_len", "context", "scheme", "backend",
            "kv_cache_dtype", "load_ms", "decode_ms_median", "prefill_ms_median"} <= set(value)
    assert (value["batch"], value["input_len"], value["output_len"]) == (1, 40, 6)
    assert value["scheme"] == "bf16" and value["kv_cache_dtype"] == "bf16"
    assert abs(value["prefill_tps"] - 40e3 / value["prefill_ms_median"]) < 1e-6 * value["prefill_tps"]
    assert abs(value["decode_tps"] - 1e3 / value["decode_ms_median"]) < 1e-6 * value["decode_tps"]
    linear = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 512 * 64
    assert 2 * linear <= value["weight_bytes"] < 3 * linear
    kv = 4 * 2 * 16 * 2 * 2 * (40 + 3)  # layers, heads, channels, K and V, bytes, length
    assert value["kv_bytes"] == kv and value["bytes_per_token"] == value["weight_bytes"] + kv
    assert value["read_gbps"] > 0.5 and value["peak_rss_bytes"] < 1 << 30
    # A unit test of the report shows what exactly it is; steps this short vary by a factor of 30.
    assert (0 < value["roofline_percent_p25"] <= value["roofline_percent"]
            <= value["roofline_percent_p75"])
    assert len(value["prefill_ms"]) == 2 and max(value["prefill_ms"]) == value["prefill_ms_median"]
    assert len(value["peak_tops"]) == 2 and min(value["peak_tops"]) > 1e-3


def test_bench_offline_shapes_in_turns(dummy):
    """Every combination, batch outermost; contexts are found in the cache in every round."""
    flags = ["--input-len", 20, "--output-len", 18, "--kv-cache-dtype", "int4", "--repeats", 3]
    value = json_of("bench", "offline", dummy, "--batch", "1,3", "--context", "0,100", *flags)
    assert set(value) == {"shapes"}
    shapes = value["shapes"]
    assert [(s["batch"], s["context"]) for s in shapes] == [(1, 0), (1, 100), (3, 0), (3, 100)]
    alone = json_of("bench", "offline", dummy, *flags)
    ratios = {"prefill_over_first", "decode_over_first"}
    for shape in shapes:
        assert set(shape) == set(alone) | ratios
        assert len(shape["prefill_ms"]) == len(shape["peak_tops"]) == 3
        computed = shape["prefill_tps"] * shape["prefill_ms_median"] / 1e3
        rest = shape["context"] % 16  # of the context's last page, which is not whole
        assert round(computed) == shape["batch"] * (20 + rest)
        row = 4 * 2 * 2 * (16 // 2 + 8)  # layers, heads, K and V, codes and two F32 parameters
        assert shape["kv_bytes"] == row * (shape["context"] + 20 + 4)  # turns of 8 steps
        for name in ratios:
            if shape is shapes[0]:
                assert shape[name] is None
            else:
                assert set(shape[name]) == {"median", "p25", "p75"}
                assert 0 < shape[name]["p25"] <= shape[name]["median"] <= shape[name]["p75"]


def test_bench_offline_shapes_table(dummy):
    text = succeeds("bench", "offline", dummy, "--input-len", 8, "--output-len", 2, "--repeats",
                    1, "--batch", "1,2").stdout
    assert text.count("x the first") == 2 and text.count("resident") == 1
    assert "1 x 8 tokens" in text and "2 x 8 tokens" in text


def test_bench_offline_shapes(dummy):
    """Many sequences, a context that ends inside a page, chunks smaller than the prompts."""
    value = offline(dummy, "--batch", 5, "--context", 37, "--input-len", 21, "--output-len", 3,
                    "--max-num-batched-tokens", 16, "--kv-cache-dtype", "int8", "--threads", 1,
                    "--isa", "scalar")
    assert value["batch"] == 5 and value["context"] == 37 and value["threads"] == 1
    assert value["backend"] == "cpu/scalar" and value["kv_cache_dtype"] == "int8"
    assert value["peak_tops"] == []
    # 32 of 37 tokens of context are whole pages in the prefix cache.
    computed = value["prefill_tps"] * value["prefill_ms_median"] / 1e3
    assert round(computed) == 5 * (37 - 32 + 21)


def test_bench_offline_table(dummy):
    text = succeeds("bench", "offline", dummy, "--input-len", 8, "--output-len", 2, "--repeats",
                    1).stdout
    for word in ("prefill", "decode", "tokens/s", "GB/s", "resident", "bf16"):
        assert word in text


@pytest.mark.parametrize("flags, code, words", [
    (["--context", "200", "--input-len", "50", "--output-len", "10"], INVALID,
     ["--context 200", "--input-len 50", "256", "max_position_embeddings"]),
    (["--context", "0,200", "--input-len", "50", "--output-len", "10"], INVALID,
     ["--context 200", "--input-len 50", "256", "max_position_embeddings"]),
    (["--batch", "0"], INVALID, ["--batch"]),
    (["--batch", "1,0"], INVALID, ["--batch"]),
    (["--batch", "1;2"], INVALID, ["--batch"]),
    (["--batch", ""], INVALID, ["--batch"]),
    (["--context", "0,-1"], INVALID, ["--context"]),
    (["--context", "0,x"], INVALID, ["--context"]),
    (["--input-len", "0"], INVALID, ["--input-len"]),
    (["--output-len", "x"], INVALID, ["--output-len"]),
    (["--context", "-1"], INVALID, ["--context"]),
    (["--repeats", "0"], INVALID, ["--repeats"]),
    (["--max-num-batched-tokens", "0"], INVALID, ["--max-num-batched-tokens"]),
    (["--kv-cache-dtype", "fp4"], INVALID, ["--kv-cache-dtype"]),
    (["--isa", "neon"], INVALID, ["--isa"]),
])
def test_bench_offline_flags(dummy, flags, code, words):
    fails(code, *words, arguments=["bench", "offline", dummy, *flags])


def test_bench_without_a_model_or_a_subcommand(tmp_path):
    fails(INVALID, "MODEL", arguments=["bench", "offline"])
    fails(INVALID, arguments=["bench"])
    fails(NOT_FOUND, "config.json", arguments=["bench", "offline", tmp_path / "nowhere"])


# --- bench kernels -------------------------------------------------------------------------------

CEILINGS = {"read_gbps", "amx_int8_tops", "amx_bf16_tops", "vnni_int8_tops"}
KERNEL = {"name", "scheme", "isa", "m", "n", "k", "us", "input_us", "gbps", "tops",
          "roofline_percent", "roofline_percent_p25", "roofline_percent_p75", "speed"}


def test_bench_kernels_json():
    value = json_of("bench", "kernels", "--backend", "cpu", "--scheme", "w8a8_int8", "--m", "1,3",
                    "--n", 4096, "--k", 4096, timeout=300)
    assert set(value) == {"ceilings", "kernels"} and set(value["ceilings"]) == CEILINGS
    assert value["ceilings"]["read_gbps"] > 0.5
    assert all(tops is None or tops > 0.01 for tops in value["ceilings"].values())
    assert [row["m"] for row in value["kernels"]] == [1, 3]
    for row in value["kernels"]:
        assert set(row) == KERNEL
        assert (row["scheme"], row["n"], row["k"]) == ("w8a8_int8", 4096, 4096)
        assert row["name"].startswith("gemm_w8a8_int8") and row["isa"] in row["name"]
        assert 0 < row["input_us"] < row["us"] and row["speed"] == 1
        assert (0 < row["roofline_percent_p25"] <= row["roofline_percent"]
                <= row["roofline_percent_p75"])
        operations = 2 * row["m"] * 4096 * 4096
        assert abs(row["tops"] * row["us"] * 1e6 - operations) < 1e-6 * operations
        assert 4096 * 4096 <= row["gbps"] * row["us"] * 1e3 < 1.1 * 4096 * 4096
    # A product of one row is bound by reading, at a bandwidth measured again beside it.
    one, read = value["kernels"][0], value["ceilings"]["read_gbps"]
    assert 1 / 4 < one["roofline_percent"] / (100 * one["gbps"] / read) < 4


def test_bench_kernels_in_turns():
    rows = json_of("bench", "kernels", "--scheme", "w4a8,w4ax,w8a16_channel", "--a4-share", 0.5, "--m",
                   "1,7", "--n", 512, "--k", 1024, timeout=300)["kernels"]
    assert [(row["scheme"], row["m"]) for row in rows] == \
        [(scheme, m) for m in (1, 7) for scheme in ("w4a8", "w4ax", "w8a16_channel")]
    for first, *others in (rows[:3], rows[3:]):
        assert first["speed"] == 1
        for row in others:  # medians of ratios beside the ratio of medians
            assert 1 / 3 < row["speed"] * row["us"] / first["us"] < 3


def test_bench_kernels_table():
    text = succeeds("bench", "kernels", "--scheme", "w4a8", "--m", "1", "--n", "1024,512", "--k",
                    "8192,4096", "--isa", "scalar", "--threads", 1, timeout=300).stdout
    for word in ("cpu/scalar", "GB/s", "GOPS", "w4a8", "8192", "4096"):
        assert word in text


@pytest.mark.parametrize("flags, words", [
    (["--backend", "tpu"], ["tpu", "cuda:N"]),
    (["--scheme", "w9"], ["--scheme", "w9", "w4a16_g32"]),
    (["--isa", "neon"], ["--isa"]),
    (["--m", "0"], ["--m"]),
    (["--m", "1,x"], ["--m"]),
    (["--n", "64"], ["--n 64", "--k"]),
    (["--n", "64,128", "--k", "64"], ["--n 64,128", "--k 64"]),
    (["--n", "64", "--k", "0"], ["--k"]),
    (["--n", "64", "--k", "100"], ["--k 100", "group", "--scheme"]),
    (["--threads", "-1"], ["--threads"]),
])
def test_bench_kernels_flags(flags, words):
    fails(INVALID, *words, arguments=["bench", "kernels", *flags])


# --- random weights without a file ---------------------------------------------------------------

DUMMY = ("--input-len", 20, "--output-len", 8, "--repeats", 2, "--device", "cpu")


@pytest.mark.parametrize("scheme", ["bf16", "w4a16_g32", "w4a8", "w8a8_fp8", "mxfp4"])
def test_bench_offline_of_dummy_weights(config, scheme):
    value = json_of("bench", "offline", config, "--dummy-weights", "--scheme", scheme, "--batch", 3,
                    *DUMMY)
    assert value["scheme"] == scheme and value["batch"] == 3
    assert 0 < value["throughput_tps"] < 3 * 8 / (min(value["prefill_ms"]) / 1e3)
    assert value["cache_bytes"] > 0 and value["decode_tps"] > 0


def test_bench_offline_of_dummy_weights_takes_a_folder_and_experts(tmp_path):
    write_config(tmp_path / "config.json", architectures=["Qwen3MoeForCausalLM"],
                 model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2,
                 moe_intermediate_size=64, norm_topk_prob=True)
    value = json_of("bench", "offline", tmp_path, "--dummy-weights", "--scheme", "w4a16_g32", *DUMMY)
    assert value["scheme"] == "w4a16_g32" and value["active_experts_mean"] > 0
    for kv in ("int4", "int8"):
        value = json_of("bench", "offline", tmp_path, "--dummy-weights", "--scheme", "w4a8",
                        "--kv-cache-dtype", kv, *DUMMY)
        assert value["kv_cache_dtype"] == kv


def test_bench_offline_finds_the_batch_that_fits(tmp_path):
    config = write_config(tmp_path / "config.json", num_hidden_layers=16)  # 2 kB a token
    fit = ("bench", "offline", config, "--dummy-weights", "--scheme", "w4a16_g32", "--fit-batch",
           "--input-len", 120, "--output-len", 8, "--repeats", 1, "--device", "cpu")
    few, more = (json_of(*fit, "--gpu-memory", memory) for memory in ("40MiB", "80MiB"))
    assert 1 <= few["batch"] < more["batch"] <= 512
    for value, memory in ((few, 40 << 20), (more, 80 << 20)):
        assert value["cache_bytes"] <= memory
        assert value["throughput_tps"] > 0
    assert json_of(*fit, "--gpu-memory", "4GB", "--max-batch", 5)["batch"] == 5
    fails(INVALID, "--fit-batch", "--gpu-memory", arguments=fit)


def test_bench_offline_counts_the_memory_that_it_may_take(config):
    arguments = ["bench", "offline", config, "--dummy-weights", "--scheme", "bf16", *DUMMY]
    succeeds(*arguments, "--gpu-memory", "4GB")
    fails(EXHAUSTED, "--gpu-memory", "cache", arguments=[*arguments, "--batch", 64, "--gpu-memory", "1KB"])


def test_bench_offline_refuses_half_of_dummy_weights(config):
    fails(INVALID, "--scheme", arguments=["bench", "offline", config, "--dummy-weights"])
    fails(INVALID, "--dummy-weights", arguments=["bench", "offline", config, "--scheme", "w4a8"])
    fails(INVALID, "unknown scheme", arguments=["bench", "offline", config, "--dummy-weights",
                                                "--scheme", "w3a3"])
