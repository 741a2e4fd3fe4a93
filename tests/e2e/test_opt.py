"""A random OPT, whose parts other decoders do not have, through every command that runs a model."""

import json
import shutil
import struct

import pytest
from cli_tools import (CORRUPT, INVALID, NOT_FOUND, UNSUPPORTED, fails, json_of, succeeds,
                       write_safetensors)
from test_openai import Server
from test_same_answers import ISAS, supported

CONFIG = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
    "bos_token_id": 2, "pad_token_id": 1, "do_layer_norm_before": True,  # no end
    "ffn_dim": 512, "hidden_size": 128, "max_position_embeddings": 128, "num_attention_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 512, "word_embed_proj_dim": 128, "dtype": "bfloat16",
}
SCHEMES = ("bf16", "w4a16_g32", "w8a8_int8", "w8a8_fp8", "w4a8")
PROMPTS = [f"{number} sailors went to sea" * (number + 1) for number in range(4)]


def write_config(folder, **changes):
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opt")
    succeeds("make-dummy", "--config", write_config(folder), "--out", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module", params=SCHEMES)
def model(request, plain, tmp_path_factory):
    if request.param == "bf16":
        return plain
    folder = tmp_path_factory.mktemp("opt") / request.param
    succeeds("quantize", plain, folder, "--scheme", request.param)
    return folder


def stored(folder):
    """name -> (dtype, shape, bytes) of the tensors of a folder."""
    data = (folder / "model.safetensors").read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"],
                   data[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]])
            for name, entry in header.items()}


def rewrite(source, folder, rename):
    """A copy with the tensors that `rename` has a name for."""
    shutil.copytree(source, folder)
    write_safetensors(folder / "model.safetensors",
                      {rename(name): tensor for name, tensor in stored(source).items()
                       if rename(name)})
    return folder


def perplexity(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king who had a daughter." * 4)
    return json_of("eval", "ppl", model, "--text", text, "--window", 64)["perplexity"]


def tokens(model, *flags):
    return json_of("generate", model, "--prompt", PROMPTS[2], "--max-tokens", 24,
                   *flags)["tokens"]


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8", "int4"])
def test_every_instruction_set_gives_the_same_tokens(model, kv_cache_dtype):
    flags = ["--kv-cache-dtype", kv_cache_dtype, "--isa"]
    answers = {isa: tokens(model, *flags, isa) for isa in ISAS if supported(isa)}
    assert len(answers["scalar"]) == 24
    for isa, answer in answers.items():
        assert answer == answers["scalar"], isa


def test_the_server_gives_the_same_text_alone_and_together(model):
    server = Server(model=model)
    arguments = dict(max_tokens=16)
    alone = [server.complete(prompt, **arguments).choices[0].text for prompt in PROMPTS]
    together = server.complete(PROMPTS, **arguments).choices
    assert [choice.text for choice in together] == alone
    assert server.stop() == 0
    for prompt, text in zip(PROMPTS, alone):
        generated = json_of("generate", model, "--prompt", prompt, "--max-tokens", 16)["text"]
        assert generated == text


def test_biases_norms_and_positions_stay_as_they_are(plain, tmp_path):
    out = tmp_path / "quantized"
    succeeds("quantize", plain, out, "--scheme", "w4a16_g32")
    before, after = stored(plain), stored(out)
    kept = [name for name in before if name.endswith(".bias") or "norm" in name or "embed" in name]
    assert "model.decoder.embed_positions.weight" in kept
    assert len(kept) == 2 + 2 + 2 * (6 + 4)
    for name in kept:
        assert after[name] == before[name], name
    matrices = [name for name in after if name.endswith(".weight_packed")]
    assert len(matrices) == 2 * 6


def test_names_without_the_model_in_front(plain, tmp_path):
    bare = rewrite(plain, tmp_path / "bare", lambda name: name.removeprefix("model."))
    assert perplexity(bare, tmp_path) == perplexity(plain, tmp_path)
    for folder, out in ((plain, tmp_path / "a"), (bare, tmp_path / "b")):
        succeeds("quantize", folder, out, "--scheme", "w8a8_int8")
    assert perplexity(tmp_path / "a", tmp_path) == perplexity(tmp_path / "b", tmp_path)


def test_mixed_names_are_refused(plain, tmp_path):
    mixed = rewrite(plain, tmp_path / "mixed",
                    lambda name: name.replace("model.decoder.layers.1", "decoder.layers.1"))
    fails(NOT_FOUND, "model.decoder.layers.1", arguments=["generate", mixed, "--prompt", "A"])


def test_no_positions(plain, tmp_path):
    without = rewrite(plain, tmp_path / "without",
                      lambda name: None if "embed_positions" in name else name)
    fails(NOT_FOUND, "model.decoder.embed_positions",
          arguments=["generate", without, "--prompt", "A"])


def test_fewer_positions_than_config_says(plain, tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(plain, folder)
    write_config(folder, max_position_embeddings=256)
    fails(CORRUPT, "embed_positions", "[130, 128]", "[258, 128]",
          arguments=["generate", folder, "--prompt", "A"])


def test_a_prompt_longer_than_the_positions(plain):
    fails(INVALID, "128", arguments=["generate", plain, "--prompt", "word " * 200])
    assert len(json_of("generate", plain, "--prompt", "a" * 120, "--max-tokens", 50)["tokens"]) <= 9


@pytest.mark.parametrize("changes", [
    {"do_layer_norm_before": False}, {"word_embed_proj_dim": 64}, {"activation_function": "gelu"},
    {"_remove_final_layer_norm": True}, {"layer_norm_elementwise_affine": False},
])
def test_parts_that_are_not_there_are_refused_and_quantized(plain, tmp_path, changes):
    folder = tmp_path / "other"
    shutil.copytree(plain, folder)
    write_config(folder, **changes)
    field, = changes
    fails(UNSUPPORTED, f"field {field}", arguments=["generate", folder, "--prompt", "A"])
    report = json_of("quantize", folder, tmp_path / "out", "--scheme", "w4a16_g32")
    assert not report["runs"] and field in report["why_not"]
