"""The storyteller as a GGUF file, through every command that takes a model folder."""

import json
import math

import pytest
from cli_tools import (CORRUPT, INVALID, NOT_FOUND, STORYTELLER, UNSUPPORTED, fails, json_of,
                       succeeds)
from gguf_writer import (STRING, U32, metadata, storyteller_tensors, stored, write_gguf)

STORY = "tests/data/text/the_black_cat.txt"
PROMPT = "Once upon a time"


def perplexity(model):
    return json_of("eval", "ppl", model, "--text", STORY, "--window", 256)["perplexity"]


def greedy(model):
    return json_of("generate", model, "--prompt", PROMPT, "--max-tokens", 24, "--temperature", 0)


def changed(entries, key, *value):
    """The metadata with one entry replaced, or without it."""
    rest = [entry for entry in entries if entry[0] != key]
    return rest + [(key, *value)] if value else rest


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "story.gguf"
    write_gguf(path, metadata(STORYTELLER), storyteller_tensors(STORYTELLER))
    return path


def test_says_what_the_folder_says(plain):
    assert perplexity(plain) == perplexity(STORYTELLER)
    assert greedy(plain)["text"] == greedy(STORYTELLER)["text"]
    ours, theirs = (json_of("inspect", each) for each in (plain, STORYTELLER))
    for key in ("architecture", "parameters", "max_context"):
        assert ours[key] == theirs[key], key


def test_chats(plain):
    answers = [succeeds("chat", each, "--temperature", "0", "--max-tokens", "16",
                        input=b"Tell me a story\n", stdin=None).stdout
               for each in (plain, STORYTELLER)]
    assert answers[0] == answers[1] and answers[0].strip()


def test_import_gives_the_folder_back(plain, tmp_path):
    succeeds("import", plain, tmp_path / "model")
    ours, theirs = stored(tmp_path / "model"), stored(STORYTELLER)
    assert ours.keys() == theirs.keys()
    for name, (dtype, shape, raw) in theirs.items():
        if not name.endswith("norm.weight"):  # F32 in the file
            assert ours[name] == (dtype, shape, raw), name
    assert greedy(tmp_path / "model")["text"] == greedy(STORYTELLER)["text"]
    tokenizer = json.loads((tmp_path / "model/tokenizer.json").read_text())
    original = json.loads((STORYTELLER / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"] == original["model"]["vocab"]
    assert {token["content"] for token in tokenizer["added_tokens"]} == {
        token["content"] for token in original["added_tokens"]}
    verified = json_of("verify", plain, tmp_path / "model")
    assert verified["problems"] == []


def test_quantizes(plain, tmp_path):
    succeeds("quantize", plain, tmp_path / "ours", "--scheme", "w4a16_g32")
    succeeds("quantize", STORYTELLER, tmp_path / "theirs", "--scheme", "w4a16_g32")
    ours, theirs = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == value for name, value in theirs.items()
               if not name.endswith("norm.weight"))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
def test_blocks_run_as_they_are(kind, tmp_path):
    """Not decoded, and the same as decoded but for the rounding of activations."""
    path = tmp_path / "blocks.gguf"
    roles = dict.fromkeys(("ffn_down", "attn_q", "attn_k", "attn_v"), kind)
    write_gguf(path, metadata(STORYTELLER), storyteller_tensors(STORYTELLER, roles))
    result = succeeds("eval", "ppl", path, "--text", STORY, "--window", "256", "--json")
    assert "decoded" not in result.stderr
    succeeds("import", path, tmp_path / "model")
    ours = math.log(json.loads(result.stdout)["perplexity"])
    assert ours == pytest.approx(math.log(perplexity(tmp_path / "model")), rel=2e-3)


def test_a_table_in_blocks_stays_and_is_the_head(tmp_path):
    path = tmp_path / "blocks.gguf"
    write_gguf(path, metadata(STORYTELLER),
               storyteller_tensors(STORYTELLER, {"token_embd": "Q8_0"}))
    result = succeeds("--log-level", "info", "generate", path, "--prompt", PROMPT,
                      "--max-tokens", "4")
    assert "decoded" not in result.stderr
    assert "1 by gemm_w8a16" in result.stderr


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_other_blocks_are_decoded_and_said(kind, tmp_path):
    path = tmp_path / "blocks.gguf"
    write_gguf(path, metadata(STORYTELLER), storyteller_tensors(STORYTELLER, {"ffn_down": kind}))
    result = succeeds("generate", path, "--prompt", PROMPT, "--max-tokens", "4",
                      "--temperature", "0", "--json")
    assert f"weights in {kind} are decoded to BF16" in result.stderr
    succeeds("import", path, tmp_path / "model")
    assert json.loads(result.stdout)["text"] == json_of(
        "generate", tmp_path / "model", "--prompt", PROMPT, "--max-tokens", 4, "--temperature",
        0)["text"]


def test_quantize_advises_against_coarse_schemes_of_small_models(tmp_path):
    coarse = succeeds("quantize", STORYTELLER, tmp_path / "coarse", "--scheme", "w4a8")
    assert "does not bear" in coarse.stdout and "w8a16_channel" in coarse.stdout
    fine = json_of("quantize", STORYTELLER, tmp_path / "fine", "--scheme", "w4a16_g32")
    assert fine["advice"] == ""


BAD_METADATA = [
    ("general.architecture", (STRING, "gemma7"), UNSUPPORTED, "gemma7"),
    ("tokenizer.ggml.pre", (STRING, "viking"), UNSUPPORTED, "viking"),
    ("tokenizer.ggml.model", (STRING, "bert"), UNSUPPORTED, "bert"),
    ("tokenizer.ggml.merges", (), CORRUPT, "tokenizer.ggml.merges"),
    ("tokenizer.ggml.bos_token_id", (U32, 99999), CORRUPT, "99999"),
    ("llama.rope.dimension_count", (U32, 32), UNSUPPORTED, "rope.dimension_count"),
    ("llama.expert_count", (U32, 8), CORRUPT, "llama.expert_used_count"),
    ("llama.rope.scaling.type", (STRING, "longrope"), UNSUPPORTED, "longrope"),
    ("llama.block_count", (U32, 9), NOT_FOUND, "model.layers.8"),
    ("tokenizer.chat_template", (STRING, "{% if %}"), CORRUPT, "chat_template"),
]


@pytest.mark.parametrize("key,value,code,word", BAD_METADATA, ids=[row[0] for row in BAD_METADATA])
def test_bad_metadata_is_refused(key, value, code, word, tmp_path):
    path = tmp_path / "bad.gguf"
    write_gguf(path, changed(metadata(STORYTELLER), key, *value), storyteller_tensors(STORYTELLER))
    fails(code, word, "bad.gguf",
          arguments=["chat" if "template" in key else "generate", path]
          + ([] if "template" in key else ["--prompt", "a"]))


def test_tensors_that_nothing_explains_are_refused(tmp_path):
    tensors = storyteller_tensors(STORYTELLER)
    tensors["blk.0.ssm_conv1d.weight"] = tensors["blk.0.ffn_norm.weight"]
    write_gguf(tmp_path / "odd.gguf", metadata(STORYTELLER), tensors)
    fails(UNSUPPORTED, "blk.0.ssm_conv1d.weight",
          arguments=["generate", tmp_path / "odd.gguf", "--prompt", "a"])


def test_a_cut_file_is_refused(plain, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(plain.read_bytes()[:-1000])
    fails(CORRUPT, "cut.gguf", arguments=["inspect", tmp_path / "cut.gguf"])


def test_a_folder_of_gguf_files_is_told_apart(plain):
    fails(NOT_FOUND, "story.gguf", arguments=["inspect", plain.parent])


def test_import_wants_a_gguf_file(tmp_path):
    fails(INVALID, "GGUF", arguments=["import", STORYTELLER, tmp_path / "out"])
