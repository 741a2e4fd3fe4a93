"""tie_word_embeddings was true while the file held another lm_head: it was dropped without a word,
and the text was another than that of transformers, which uses it."""

import random

import pytest

from cli_tools import HIDDEN, TINY_TENSORS, VOCAB, Model, f32, json_of, succeeds, write_safetensors

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a king who had a daughter.")
    return path


def perplexity(model, text):
    return json_of("eval", "ppl", model, "--text", text, "--window", 16)["perplexity"]


def with_head(model, head):
    write_safetensors(model.weights, {**TINY_TENSORS, HEAD: head})


def test_another_head_is_used(model, text):
    tied = perplexity(model, text)
    with_head(model, f32([VOCAB, HIDDEN], random.Random(8), scale=0.3))
    stored = perplexity(model, text)
    model.edit_json("config.json", tie_word_embeddings=False)
    assert stored == perplexity(model, text)
    assert stored != tied


def test_a_copy_of_the_embedding_changes_nothing(model, text):
    tied = perplexity(model, text)
    with_head(model, TINY_TENSORS[EMBEDDING])
    assert perplexity(model, text) == tied


def test_another_head_survives_quantization(model, text, tmp_path):
    with_head(model, f32([VOCAB, HIDDEN], random.Random(8), scale=0.3))
    out = tmp_path / "out"
    succeeds("quantize", model, out, "--scheme", "w8a8_int8")
    tied_out = tmp_path / "tied-out"
    model.write_tensors()
    succeeds("quantize", model, tied_out, "--scheme", "w8a8_int8")
    assert perplexity(out, text) != perplexity(tied_out, text)
