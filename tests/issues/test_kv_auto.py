"""F16 and F32 checkpoints got a BF16 cache by `auto`, whose error was many times that of the
checkpoint's own type: an F32 log-probability was off by 0.11 where an F32 cache gives 0.00004."""

import pytest

from cli_tools import TINY_TENSORS, Model, json_of, write_safetensors


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def evaluate(model, *flags):
    text = model.folder.parent / "text.txt"
    text.write_text("Once upon a time there was a king who had a daughter. " * 3)
    return json_of("eval", "ppl", model, "--text", text, "--window", 32, *flags)


@pytest.mark.parametrize("dtype,cache", [
    ("float32", "f32"), ("float16", "f32"), ("bfloat16", "bf16"), (None, "f32")])
def test_the_cache_holds_what_the_checkpoint_holds(model, dtype, cache):
    write_safetensors(model.weights, TINY_TENSORS)
    model.edit_json("config.json", dtype=dtype if dtype else ...)
    chosen = evaluate(model)
    assert chosen["kv_cache_dtype"] == cache
    assert chosen["perplexity"] == evaluate(model, "--kv-cache-dtype", cache)["perplexity"]
    other = "bf16" if cache == "f32" else "int8"
    assert chosen["perplexity"] != evaluate(model, "--kv-cache-dtype", other)["perplexity"]
