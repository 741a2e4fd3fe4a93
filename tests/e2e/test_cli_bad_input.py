"""Damaged files and wrong flags: one message that names the culprit, a distinct exit code, no
crash, and nothing half-written. NIBBLE_BIN names the binary; run from the repository root."""

import json
import os
import resource
import signal
import socket
import struct
import subprocess

import pytest

from cli_tools import (
    BINARY, CONFIG, CORRUPT, EXHAUSTED, EXISTS, INVALID, IO, NOT_FOUND, ROOT, TINY_TENSORS,
    UNSUPPORTED, Model, fails, json_of, nibble, succeeds)

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def text_file(model):
    path = model.folder.parent / "text.txt"
    path.write_text("Once upon a time there was a king.")
    return path


def commands(model):
    output = model.folder.parent / "output"
    return {
        "generate": ["generate", model, "--prompt", "hi", "--max-tokens", 2],
        "chat": ["chat", model],
        "eval": ["eval", "ppl", model, "--text", text_file(model), "--window", 16],
        "quantize": ["quantize", model, output, "--scheme", "w4a16_g32"],
        "inspect": ["inspect", model],
        "serve": ["serve", model, "--port", 0],
    }


ALL = ("generate", "chat", "eval", "quantize", "inspect", "serve")
RUNNING = ("generate", "chat", "eval", "serve")
DESCRIBING = RUNNING + ("inspect",)


def check(model, code, *words, names=ALL):
    before = sorted(os.listdir(model.folder.parent) + ["text.txt"])
    for name in names:
        fails(code, *words, arguments=commands(model)[name])
    assert sorted(set(os.listdir(model.folder.parent)) | {"text.txt"}) == sorted(set(before))


def test_the_undamaged_model_works(model):
    for name in ("generate", "eval", "quantize", "inspect"):
        succeeds(*commands(model)[name])


# --- safetensors ---------------------------------------------------------------------------------

def test_truncated_data(model):
    data = model.weights.read_bytes()
    model.weights.write_bytes(data[:-100])
    check(model, CORRUPT, "model.safetensors", "model.norm.weight", "cut off")


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_truncated_header(model, size):
    model.weights.write_bytes(model.weights.read_bytes()[:size])
    check(model, CORRUPT, "model.safetensors", "download it again")


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 99_999_999, 1 << 40, (1 << 64) - 1])
def test_lying_header_length(model, length):
    data = model.weights.read_bytes()
    model.weights.write_bytes(struct.pack("<Q", length) + data[8:])
    check(model, CORRUPT, "model.safetensors", "header")


def damaged(**fields):
    def header(entries):
        entries[Q_PROJ] = {**entries[Q_PROJ], **fields}
        return entries
    return header


@pytest.mark.parametrize("name,header,word", [
    ("overlap", damaged(data_offsets=[0, 4096]), "overlap"),
    ("far", damaged(data_offsets=[1 << 40, (1 << 40) + 4096]), "data_offsets|begins at"),
    ("beyond", damaged(data_offsets=[0, 1 << 62]), "data_offsets"),
    ("huge", damaged(data_offsets=[1 << 70, 1 << 71]), "data_offsets"),
    ("negative", damaged(data_offsets=[-4096, 0]), "data_offsets"),
    ("backwards", damaged(data_offsets=[4096, 0]), "backwards"),
    ("one_offset", damaged(data_offsets=[0]), "data_offsets"),
    ("text_offsets", damaged(data_offsets="all"), "data_offsets"),
    ("dtype", damaged(dtype="F17"), "F17"),
    ("no_dtype", damaged(dtype=None), "dtype"),
    ("shape_overflow", damaged(shape=[1 << 40, 1 << 40]), "overflows"),
    ("negative_shape", damaged(shape=[-32, -32]), "shape"),
    ("other_size", damaged(shape=[32, 31]), "needs"),
    ("no_object", lambda entries: {**entries, Q_PROJ: 5}, "object"),
])
def test_lying_header(model, name, header, word):
    model.write_tensors(header)
    message = fails(CORRUPT, "model.safetensors", arguments=commands(model)["generate"])
    assert any(part in message for part in word.split("|")), message
    check(model, CORRUPT, "model.safetensors", "tensor ")


def test_header_that_is_no_json(model):
    model.weights.write_bytes(struct.pack("<Q", 8) + b"{broken}" + b"\0" * 64)
    check(model, CORRUPT, "model.safetensors: header", "byte")


def test_data_behind_the_last_tensor(model):
    model.weights.write_bytes(model.weights.read_bytes() + b"\0" * 10)
    check(model, CORRUPT, "model.safetensors", "10 bytes")


def test_no_weights(model):
    model.weights.unlink()
    check(model, NOT_FOUND, str(model), "model.safetensors")


def test_weights_are_a_folder(model):
    model.weights.unlink()
    model.weights.mkdir()
    check(model, INVALID, "model.safetensors", "regular file")


# --- shards --------------------------------------------------------------------------------------

def test_missing_shard(model):
    files = model.shard()
    succeeds(*commands(model)["generate"])
    (model.folder / files[1]).unlink()
    check(model, NOT_FOUND, files[1], "missing", "download")


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "{}", '{"weight_map": []}',
                                  '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../a"}}'])
def test_malformed_index(model, text):
    model.shard()
    model.write("model.safetensors.index.json", text)
    check(model, CORRUPT, "model.safetensors.index.json")


def test_index_that_names_the_wrong_shard(model):
    files = model.shard()
    path = model.folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][Q_PROJ] = files[1]
    model.write_json(path.name, index)
    check(model, CORRUPT, path.name, Q_PROJ, files[1])


def test_index_that_names_no_tensor(model):
    model.shard()
    path = model.folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.nothing"] = "model-00001-of-00002.safetensors"
    model.write_json(path.name, index)
    check(model, CORRUPT, path.name, "model.nothing")


# --- tensors -------------------------------------------------------------------------------------

@pytest.mark.parametrize("short,shape", [
    ("q_proj", [16, 32]), ("down_proj", [64, 32]), ("input_layernorm", [31]), ("norm", [1, 32]),
    ("embed_tokens", [4095, 32])])
def test_wrong_shape(model, short, shape):
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    model.write_tensors(**{short: ("F32", shape, b"\0" * 4 * count)})
    check(model, CORRUPT, "model.safetensors", short, "shape", str(shape), names=RUNNING)


@pytest.mark.parametrize("short,dtype,shape,size", [
    ("q_proj", "I64", [32, 32], 8), ("norm", "I32", [32], 4), ("embed_tokens", "U8", [4096, 32], 1),
    ("up_proj", "F64", [64, 32], 8), ("v_proj", "BOOL", [16, 32], 1)])
def test_wrong_dtype(model, short, dtype, shape, size):
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    model.write_tensors(**{short: (dtype, shape, b"\0" * count * size)})
    check(model, UNSUPPORTED, "model.safetensors", short, dtype, "BF16", names=RUNNING)


@pytest.mark.parametrize("short", ["q_proj", "down_proj", "input_layernorm", "embed_tokens"])
def test_missing_tensor(model, short):
    model.write_tensors(drop=short)
    check(model, NOT_FOUND, str(model), short + ".weight", "config.json", names=RUNNING)


def test_missing_head(model):
    model.edit_json("config.json", tie_word_embeddings=False)
    check(model, NOT_FOUND, str(model), "lm_head.weight", names=RUNNING)


def test_tensor_that_nobody_uses(model):
    model.edit_json("config.json", num_hidden_layers=0)
    check(model, CORRUPT, "config.json", "num_hidden_layers", names=RUNNING)
    model.write_tensors(lambda entries: {n.replace("q_proj.weight", "q_proj.bias"): e
                                         for n, e in entries.items()})
    model.edit_json("config.json", num_hidden_layers=1)
    check(model, NOT_FOUND, "q_proj", names=RUNNING)


def test_weights_that_are_not_numbers(model):
    nan = struct.pack("<f", float("nan"))
    model.write_tensors(down_proj=("F32", [32, 64], nan * 2048))
    check(model, CORRUPT, "model.safetensors", "down_proj", "[0, 0] is nan", "get another copy",
          names=["generate", "eval", "quantize", "serve"])


# --- config.json ---------------------------------------------------------------------------------

@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json",
                                  "tokenizer.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "\ufeff{}", "\x00"])
def test_malformed_json(model, file, text):
    model.write(file, text)
    names = ALL if file == "config.json" else RUNNING
    if file == "generation_config.json":
        names = RUNNING
    check(model, CORRUPT, file, names=names)


def test_config_nested_too_deeply(model):
    model.write("config.json", "[" * 100_000 + "]" * 100_000)
    check(model, CORRUPT, "config.json")


def test_missing_config(model):
    (model.folder / "config.json").unlink()
    check(model, NOT_FOUND, "config.json", names=RUNNING + ("quantize",))


def test_unknown_architecture(model):
    model.edit_json("config.json", architectures=["FutureForCausalLM"])
    check(model, UNSUPPORTED, "config.json", "architectures", "FutureForCausalLM",
          "LlamaForCausalLM", names=RUNNING)


@pytest.mark.parametrize("value", [..., [], "LlamaForCausalLM", [5], ["LlamaForCausalLM", "x"]])
def test_architecture_that_is_no_name(model, value):
    model.edit_json("config.json", architectures=value)
    check(model, UNSUPPORTED, "config.json", "architectures", names=RUNNING)


SIZES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "max_position_embeddings"]


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [-1, -(1 << 63), (1 << 63) - 1, 1 << 70, 1.5, "32", 1e300])
def test_absurd_sizes(model, field, value):
    model.edit_json("config.json", **{field: value})
    check(model, CORRUPT, "config.json", field, names=DESCRIBING)


@pytest.mark.parametrize("field", ["vocab_size", "intermediate_size"])
@pytest.mark.parametrize("value", [-1, 0, (1 << 63) - 1, "32"])
def test_absurd_sizes_that_only_running_needs(model, field, value):
    model.edit_json("config.json", **{field: value})
    check(model, CORRUPT, "config.json", field, names=RUNNING)


WIDTHS = ["hidden_size", "vocab_size", "intermediate_size"]


@pytest.mark.parametrize("field", WIDTHS + SIZES[1:5])
def test_sizes_far_too_large(model, field):
    """Within the limits, but not what the tensors are: an error, not a huge allocation."""
    model.edit_json("config.json", **{field: (1 << 31) - 2 if field in WIDTHS else 65534})
    for name in ALL:
        result = nibble(*commands(model)[name])
        assert result.returncode in (CORRUPT, NOT_FOUND, EXHAUSTED, UNSUPPORTED), result.stderr
        assert result.stderr.count("nibble: ") == 1


def test_context_far_too_large(model):
    model.edit_json("config.json", max_position_embeddings=(1 << 31) - 2)
    succeeds(*commands(model)["generate"])  # only a limit: the cache is as large as it may be


def test_missing_field(model):
    for field in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"):
        model.write_json("config.json", CONFIG)
        model.edit_json("config.json", **{field: ...})
        check(model, CORRUPT, "config.json", field, names=RUNNING)


def test_heads_that_do_not_divide(model):
    model.edit_json("config.json", num_attention_heads=3, num_key_value_heads=2)
    check(model, CORRUPT, "config.json", "num_key_value_heads", names=RUNNING)


@pytest.mark.parametrize("rope", [
    {"rope_type": "spiral", "factor": 2.0}, 5, {"rope_type": "linear"},
    {"rope_type": "linear", "factor": -1}, {"rope_type": "yarn", "factor": "big"}])
def test_unknown_rope(model, rope):
    model.edit_json("config.json", rope_scaling=rope)
    for name in RUNNING:
        result = nibble(*commands(model)[name])
        assert result.returncode in (CORRUPT, UNSUPPORTED), result.stderr
        assert "config.json" in result.stderr and "rope_scaling" in result.stderr


def test_unknown_activation(model):
    model.edit_json("config.json", hidden_act="cube")
    check(model, UNSUPPORTED, "config.json", "hidden_act", "cube", "silu", names=RUNNING)


@pytest.mark.parametrize("fields,word", [
    ({"eos_token_id": "one"}, "eos_token_id"), ({"eos_token_id": [1, -5]}, "eos_token_id"),
    ({"eos_token_id": 1 << 40}, "eos_token_id"), ({"temperature": "hot"}, "temperature"),
    ({"top_k": 1.5}, "top_k"), ({"do_sample": 3}, "do_sample"),
    ({"temperature": -3.0}, "temperature"), ({"top_p": 7}, "top_p"), ({"top_k": -7}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"top_p": 0}, "top_p")])
def test_generation_config(model, fields, word):
    model.write_json("generation_config.json", fields)
    check(model, CORRUPT, "generation_config.json", word, names=RUNNING)


# --- quantization_config -------------------------------------------------------------------------

@pytest.fixture(scope="module")
def quantized_source(tmp_path_factory):
    model = Model(tmp_path_factory.mktemp("quantized") / "model")
    succeeds("quantize", model, model.folder.parent / "done", "--scheme", "w4a16_g32")
    return model.folder.parent / "done"


@pytest.fixture
def quantized(model, quantized_source):
    for path in quantized_source.iterdir():
        (model.folder / path.name).write_bytes(path.read_bytes())
    return model


def edit_quantization(model, edit):
    path = model.folder / "config.json"
    config = json.loads(path.read_text())
    edit(config["quantization_config"])
    model.write_json("config.json", config)


@pytest.mark.parametrize("edit,code,word", [
    (lambda q: q.update(quant_method="magic"), UNSUPPORTED, "magic"),
    (lambda q: q.pop("quant_method"), CORRUPT, "quant_method"),
    (lambda q: q.update(quant_method=4), CORRUPT, "quant_method"),
    (lambda q: q.update(surprise=1), UNSUPPORTED, "surprise"),
    (lambda q: q.update(format="pack-strangely"), UNSUPPORTED, "pack-strangely"),
    (lambda q: q.pop("config_groups"), CORRUPT, "config_groups"),
    (lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=5), UNSUPPORTED, "5-bit"),
    (lambda q: q["config_groups"]["group_0"]["weights"].update(symmetric=False), CORRUPT,
     "symmetric"),
    (lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=-1), None, "group_size"),
    (lambda q: q["config_groups"]["group_0"]["weights"].update(type="complex"), UNSUPPORTED,
     "complex"),
    (lambda q: q["config_groups"]["group_0"].update(weights=None), None, "no group"),
    (lambda q: q["config_groups"]["group_0"].update(targets=["re:("]), None, "targets|re:("),
    (lambda q: q.update(ignore=5), CORRUPT, "ignore"),
])
def test_quantization_config(quantized, edit, code, word):
    edit_quantization(quantized, edit)
    for name in DESCRIBING:
        expected = code or nibble(*commands(quantized)[name]).returncode
        assert expected in (CORRUPT, UNSUPPORTED, INVALID)
        message = fails(expected, "config.json", arguments=commands(quantized)[name])
        assert any(part in message for part in word.split("|")), message


def test_quantization_config_gone(quantized):
    config = quantized.folder / "config.json"
    quantized.write_json("config.json", {k: v for k, v in json.loads(config.read_text()).items()
                                         if k != "quantization_config"})
    check(quantized, CORRUPT, "quantization_config", "_proj", names=RUNNING)


def test_quantizing_what_is_quantized(quantized):
    """Codes are decoded and fitted again; the same scheme finds the same numbers."""
    output = quantized.folder.parent / "again"
    value = json_of("quantize", quantized, output, "--scheme", "w4a16_g32")
    assert value["snr_db"]["min"] == 200
    config = json.loads((output / "config.json").read_text())
    before = json.loads((quantized.folder / "config.json").read_text())
    assert config["quantization_config"] == before["quantization_config"]


# --- tokenizer -----------------------------------------------------------------------------------

def test_no_tokenizer(model):
    (model.folder / "tokenizer.json").unlink()
    check(model, NOT_FOUND, str(model), "tokenizer.json", names=RUNNING)


def edit_tokenizer(model, edit):
    path = model.folder / "tokenizer.json"
    value = json.loads(path.read_text())
    edit(value)
    model.write_json("tokenizer.json", value)


@pytest.mark.parametrize("edit,word", [
    (lambda t: t.pop("model"), "model"),
    (lambda t: t["model"].pop("vocab"), "vocab"),
    (lambda t: t["model"].pop("merges"), "merges"),
    (lambda t: t["model"].update(vocab={"a": "b"}), "vocab"),
    (lambda t: t["model"].update(vocab={"a": -1}), "vocab"),
    (lambda t: t["model"].update(vocab={"a": 1 << 40}), "vocab"),
    (lambda t: t["model"].update(merges=[["a"]]), "merge"),
    (lambda t: t["model"].update(merges=[["never", "seen"]]), "merge"),
    (lambda t: t["model"].update(type="WordPiece"), "WordPiece"),
    (lambda t: t.update(pre_tokenizer={"type": "Mystery"}), "Mystery"),
    (lambda t: t.update(normalizer={"type": "Mystery"}), "Mystery"),
    (lambda t: t.update(decoder={"type": "Mystery"}), "Mystery"),
    (lambda t: t.update(post_processor={"type": "Mystery"}), "Mystery"),
    (lambda t: t.update(added_tokens=[{"id": 0}]), "added_tokens"),
    (lambda t: t.update(added_tokens=5), "added_tokens"),
])
def test_tokenizer_field(model, edit, word):
    edit_tokenizer(model, edit)
    for name in RUNNING:
        code = nibble(*commands(model)[name]).returncode
        assert code in (CORRUPT, UNSUPPORTED)
        fails(code, "tokenizer.json", word, arguments=commands(model)[name])


def test_tokenizer_of_another_model(model):
    """Its ids reach beyond the model's vocabulary."""
    model.edit_json("config.json", vocab_size=100)
    dtype, shape, data = TINY_TENSORS["model.embed_tokens.weight"]
    model.write_tensors(embed_tokens=(dtype, [100, shape[1]], data[:100 * shape[1] * 4]))
    check(model, INVALID, "token id", "100", "tokenizer", names=["eval"])
    fails(INVALID, "token id", "100", "tokenizer",
          arguments=["generate", model, "--prompt", "Once upon a time"])


def test_chat_template(model):
    model.write("chat_template.jinja", "{% for %}")
    check(model, CORRUPT, "chat_template.jinja", names=["chat"])
    (model.folder / "chat_template.jinja").unlink()
    continued = nibble_chat(model, "king")
    assert continued.returncode == 0 and "no chat template" in continued.stderr
    succeeds(*commands(model)["generate"])


# --- prompts and texts ---------------------------------------------------------------------------

def test_prompt_longer_than_the_context(model):
    long = "king " * 80
    fails(INVALID, "prompt", "64", arguments=["generate", model, "--prompt", long])


def test_prompt_longer_than_the_context_in_chat(model):
    result = nibble_chat(model, "king " * 80)
    assert result.returncode == INVALID and "64" in result.stderr


def nibble_chat(model, line):
    return subprocess.run([BINARY, "chat", str(model)], cwd=ROOT, input=line + "\n", text=True,
                          capture_output=True, timeout=120)


def test_eval_texts(model):
    arguments = ["eval", "ppl", model, "--window", 16, "--text"]
    fails(NOT_FOUND, "nowhere.txt", arguments=[*arguments, model.folder / "nowhere.txt"])
    fails(INVALID, str(model), "regular file", arguments=[*arguments, model])
    model.write("empty.txt", "")
    fails(INVALID, "empty.txt", "tokens", arguments=[*arguments, model.folder / "empty.txt"])


@pytest.mark.parametrize("window", [-1, 0, 1, 65, 1 << 40, (1 << 63) - 1])
def test_eval_windows(model, window):
    fails(INVALID, "--window", "64" if window > 1 else "at least 2",
          arguments=["eval", "ppl", model, "--text", text_file(model), "--window", window])


# --- flags ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments,words", [
    ([], ["subcommand"]),
    (["fly"], ["fly"]),
    (["--fly"], ["--fly"]),
    (["generate"], ["MODEL is required", "nibble generate --help"]),
    (["generate", "MODEL"], ["--prompt"]),
    (["generate", "MODEL", "--prompt", "a", "--fly"], ["--fly"]),
    (["generate", "MODEL", "--prompt", "a", "--max-tokens", "many"], ["--max-tokens", "many"]),
    (["generate", "MODEL", "--prompt", "a", "--max-tokens", "0"], ["--max-tokens"]),
    (["generate", "MODEL", "--prompt", "a", "--max-tokens", "9999999999999999999"],
     ["--max-tokens"]),
    (["generate", "MODEL", "--prompt", "a", "--threads", "-1"], ["--threads"]),
    (["generate", "MODEL", "--prompt", "a", "--isa", "mmx"], ["--isa", "mmx", "avx2"]),
    (["generate", "MODEL", "--prompt", "a", "--kv-cache-dtype", "fp4"],
     ["--kv-cache-dtype", "fp4", "int8"]),
    (["generate", "MODEL", "--prompt", "a", "--temperature", "-1"], ["temperature"]),
    (["generate", "MODEL", "--prompt", "a", "--temperature", "nan"], ["temperature"]),
    (["generate", "MODEL", "--prompt", "a", "--top-p", "2"], ["top_p"]),
    (["generate", "MODEL", "--prompt", "a", "--top-k", "-3"], ["--top-k"]),
    (["generate", "MODEL", "--prompt", "a", "--min-p", "2"], ["min_p"]),
    (["generate", "MODEL", "--prompt", "a", "--repetition-penalty", "0"], ["repetition_penalty"]),
    (["generate", "MODEL", "--prompt", "a", "--seed", "-1"], ["--seed"]),
    (["generate", "MODEL", "--prompt", "a", "--log-level", "loud"], ["--log-level", "loud"]),
    (["eval"], ["subcommand"]),
    (["eval", "ppl", "MODEL"], ["--text"]),
    (["quantize", "MODEL"], ["DST"]),
    (["quantize", "MODEL", "OUT"], ["--scheme"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w9"], ["--scheme", "w9", "w4a16_g32"]),
    (["quantize", "MODEL", "OUT", "--scheme", "bf16"], ["bf16"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--scale-rule", "x"],
     ["--scale-rule", "x", "absmax"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--ignore", "nothing"],
     ["--ignore", "nothing"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--include", "nothing"],
     ["--include", "nothing"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--ignore", "re:("], ["re:("]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--ignore", "re:.*"], ["quantize"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--method", "gptq"],
     ["--method gptq", "--calibrate"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--seed", "3"], ["--seed", "--calibrate"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--calibrate", "CONFIG",
      "--method", "awk"], ["awk", "imatrix"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--method", "smooth"],
     ["--method smooth", "--calibrate"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--calibrate", "CONFIG",
      "--method", "gptq,rotate"], ["--method", "rotate", "after a rounding"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--method", "permute"],
     ["--method permute", "--calibrate"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--online-rotation"],
     ["--online-rotation", "rotate,gptq"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--method", "smooth,gptq", "--calibrate",
      "CONFIG", "--online-rotation"], ["--online-rotation", "rotate,gptq"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--method", "rotate", "--online-rotation",
      "--format", "quark"], ["--format quark", "--online-rotation", "compressed-tensors"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--method", "rotate,turn"],
     ["--method rotate,turn", "--online-rotation"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--method", "rotate", "--part", "1/2"],
     ["--part", "rotate"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--shard-size", "0"], ["--shard-size"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--shard-size", "big"], ["--shard-size"]),
    (["quantize", "MODEL", "OUT", "--scheme", "w4a8", "--threads", "-2"], ["--threads"]),
    (["quantize", "MODEL", "MODEL", "--scheme", "w4a8"], ["MODEL", "same"]),
    (["quantize", "MODEL", "MODEL/", "--scheme", "w4a8", "--force"], ["MODEL", "same"]),
    (["quantize", "MODEL", "", "--scheme", "w4a8"], ["name"]),
    (["quantize", "MODEL", "/", "--scheme", "w4a8"], ["/"]),
    (["inspect"], ["PATH"]),
    (["inspect", "MODEL", "--context", "-5"], ["--context"]),
    (["inspect", "MODEL", "--context", "x"], ["--context"]),
    (["inspect", "MODEL", "--concurrency", "0"], ["--concurrency"]),
    (["inspect", "MODEL", "--concurrency", "9223372036854775807"], ["--concurrency"]),
    (["serve", "MODEL", "--port", "65536"], ["--port", "65536"]),
    (["serve", "MODEL", "--port", "-1"], ["--port", "-1"]),
    (["serve", "MODEL", "--host", "not a host", "--port", "0"], ["not a host"]),
    (["serve", "MODEL", "--max-model-len", "65"], ["--max-model-len", "64"]),
    (["serve", "MODEL", "--max-num-seqs", "0"], ["--max-num-seqs"]),
    (["serve", "MODEL", "--max-num-seqs", "9223372036854775807"], ["--max-num-seqs"]),
    (["serve", "MODEL", "--max-num-batched-tokens", "9223372036854775807"],
     ["--max-num-batched-tokens"]),
    (["serve", "MODEL", "--block-size", "9223372036854775807"], ["--block-size"]),
    (["serve", "MODEL", "--max-model-len", "9223372036854775807"], ["--max-model-len"]),
    (["serve", "MODEL", "--kv-cache-dtype", "fp4"], ["--kv-cache-dtype", "fp4"]),
], ids=lambda value: " ".join(value) if value and isinstance(value, list) else "none")
def test_flags(model, arguments, words):
    output = model.folder.parent / "output"
    names = {"MODEL": str(model), "MODEL/": f"{model}/", "OUT": str(output),
             "CONFIG": f"{model}/config.json"}
    fails(INVALID, *(names.get(word, word) for word in words),
          arguments=[names.get(argument, argument) for argument in arguments])
    assert os.listdir(output.parent) == ["model"]


def test_isa_that_this_cpu_lacks(model):
    """Every instruction set runs or is refused, and the refusal lists what runs here."""
    for isa in ("scalar", "avx2", "avx2_vnni", "avx512_bw", "avx512", "amx"):
        arguments = [*commands(model)["generate"], "--isa", isa]
        if nibble(*arguments).returncode != 0:
            fails(UNSUPPORTED, isa, "scalar", arguments=arguments)


def test_model_that_does_not_exist(tmp_path):
    missing = tmp_path / "nowhere"
    for name, arguments in (("generate", ["--prompt", "a"]), ("inspect", []), ("chat", []),
                            ("serve", ["--port", 0]),
                            ("quantize", [tmp_path / "out", "--scheme", "w4a8"])):
        fails(NOT_FOUND, str(missing), arguments=[name, missing, *arguments])
    file = tmp_path / "file"
    file.write_text("x")
    fails(NOT_FOUND, str(file), "folder", arguments=["generate", file, "--prompt", "a"])
    assert sorted(os.listdir(tmp_path)) == ["file"]


# --- output --------------------------------------------------------------------------------------

def test_destination_exists(model):
    output = model.folder.parent / "output"
    arguments = ["quantize", model, output, "--scheme", "w4a8"]
    output.mkdir()
    (output / "mine").write_text("kept")
    fails(EXISTS, str(output), "--force", arguments=arguments)
    assert (output / "mine").read_text() == "kept"
    succeeds(*arguments, "--force")
    assert not (output / "mine").exists() and (output / "config.json").exists()
    output2 = model.folder.parent / "file"
    output2.write_text("kept")
    fails(EXISTS, str(output2), arguments=["quantize", model, output2, "--scheme", "w4a8"])
    assert output2.read_text() == "kept"


def test_destination_below_a_file(model):
    file = model.folder.parent / "file"
    file.write_text("x")
    result = nibble("quantize", model, file / "below", "--scheme", "w4a8")
    assert result.returncode in (NOT_FOUND, IO) and str(file) in result.stderr


def test_destination_inside_the_source(model):
    """The output must not copy itself into itself."""
    before = sorted(os.listdir(model.folder))
    result = nibble("quantize", model, model.folder / "inside", "--scheme", "w4a8")
    if result.returncode == 0:
        assert sorted(os.listdir(model.folder)) == sorted([*before, "inside"])
        assert not (model.folder / "inside" / "inside").exists()
    else:
        assert sorted(os.listdir(model.folder)) == before


def limit_files():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_full_disk(model):
    output = model.folder.parent / "output"
    fails(EXHAUSTED, "output.partial", "write", "continues",
          arguments=["quantize", model, output, "--scheme", "w4a8"], preexec_fn=limit_files)
    assert sorted(os.listdir(output.parent)) == ["model", "output.partial"]
    succeeds("quantize", model, output, "--scheme", "w4a8")
    assert sorted(os.listdir(output.parent)) == ["model", "output"]


def test_result_on_a_full_disk(model):
    """A result that cannot be written is a failure, not silence."""
    with open("/dev/full", "w") as full:
        for arguments in (["generate", str(model), "--prompt", "a", "--max-tokens", "2"],
                          ["inspect", str(model), "--json"], ["inspect", str(model)]):
            result = subprocess.run([BINARY, *arguments], cwd=ROOT, stdout=full,
                                    stderr=subprocess.PIPE, text=True, timeout=120)
            assert result.returncode == EXHAUSTED, result.stderr
            assert "standard output" in result.stderr


def test_port_in_use(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = fails(IO, str(port), "--port", arguments=["serve", model, "--port", port])
        assert "in use" in message

