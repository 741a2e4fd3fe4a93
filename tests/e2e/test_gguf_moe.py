"""Mixtures of experts in GGUF files: what the same model's Hugging Face folder says."""

import json
import shutil

import pytest
from cli_tools import CORRUPT, NOT_FOUND, STORYTELLER, UNSUPPORTED, fails, json_of, succeeds
from gguf_writer import (F32, ROLES, STRING, U32, metadata, paired, random_blocks,
                         stored, write_gguf)
from test_moe import COMMON, CONFIGS

ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
GPT_OSS = {**COMMON, **CONFIGS["gpt_oss"], "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
           "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0,
                            "beta_slow": 1.0, "truncate": False,
                            "original_max_position_embeddings": 64}}
# Of one expert: its projection, and where GGUF has those of all.
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
           "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
OTHER_ROLES = {"mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
               "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
               "mlp.shared_expert.up_proj": "ffn_up_shexp",
               "mlp.shared_expert.down_proj": "ffn_down_shexp",
               "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
               "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
HEADS = {"attn_q": COMMON["num_attention_heads"], "attn_k": COMMON["num_key_value_heads"]}
RUN = ("--prompt", "It was a dark night", "--max-tokens", 24, "--temperature", 0)


def storyteller_config():
    return json.loads((STORYTELLER / "config.json").read_text())


def make(folder, name):
    """A random model with the storyteller's tokenizer."""
    vocab = storyteller_config()["vocab_size"]
    config = {**(GPT_OSS if name == "gpt_oss" else {**COMMON, **CONFIGS[name]}),
              "vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 1}
    (folder / "in.json").write_text(json.dumps(config))
    succeeds("make-dummy", "--config", folder / "in.json", "--out", folder / "hf")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORYTELLER / file, folder / "hf" / file)
    return folder / "hf"


def gguf_entries(folder, name):
    config = json.loads((folder / "config.json").read_text())
    arch = {**ARCHITECTURES, "gpt_oss": "gpt-oss"}[name]
    heads = config["num_attention_heads"]
    sizes = {"block_count": config["num_hidden_layers"], "embedding_length": config["hidden_size"],
             "context_length": config["max_position_embeddings"],
             "feed_forward_length": config["intermediate_size"], "attention.head_count": heads,
             "attention.head_count_kv": config["num_key_value_heads"],
             "attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
             "attention.value_length": config.get("head_dim") or config["hidden_size"] // heads,
             "rope.dimension_count": config.get("head_dim") or config["hidden_size"] // heads,
             "expert_count": config.get("num_experts", config.get("num_local_experts")),
             "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        sizes["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        sizes["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    kept = [row for row in metadata(STORYTELLER) if row[0].startswith("tokenizer.")]
    return ([("general.architecture", STRING, arch)]
            + [(f"{arch}.{key}", U32, value) for key, value in sizes.items()]
            + [(f"{arch}.attention.layer_norm_rms_epsilon", F32, config.get("rms_norm_eps", 1e-6)),
               (f"{arch}.rope.freq_base", F32, 10000.0)] + kept)


def gguf_tensors(folder, name, blocks=None):
    """The folder's tensors as GGUF has them; `blocks`: a type of random blocks for experts."""
    result, experts = {}, {}
    for full, (dtype, shape, raw) in stored(folder).items():
        module, _, suffix = full.rpartition(".")
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
               "lm_head": "output"}.get(module)
        if top:
            result[f"{top}.{suffix}"] = (dtype, shape, raw)
            continue
        _, _, layer, role = module.split(".", 3)
        if ".experts." in role:
            projection = EXPERTS[role.rsplit(".", 1)[1]]
            experts.setdefault(f"blk.{layer}.{projection}.weight", []).append(
                (int(role.split(".experts.")[1].split(".")[0]), dtype, shape, raw))
            continue
        short = {**ROLES, **OTHER_ROLES}[role]
        if name == "mixtral" and short in HEADS:
            raw = paired(shape, raw, HEADS[short])
        if short == "ffn_gate_inp_shexp":
            shape = shape[1:]
        result[f"blk.{layer}.{short}.{suffix}"] = (dtype, shape, raw)
    for seed, (full, parts) in enumerate(experts.items()):
        parts.sort()
        _, dtype, shape, _ = parts[0]
        data = b"".join(raw for *_, raw in parts)
        if blocks:
            dtype, data = blocks, random_blocks(blocks, len(parts) * shape[0] * shape[1], seed)
        result[full] = (dtype, [len(parts), *shape], data)
    return result


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, make(folder, request.param)


def without_norms_divided(folder, name):
    """Files of Qwen 2 do not say that weights are divided by their sum; the folder's must agree."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["norm_topk_prob"] = name == "qwen3_moe"
    path.write_text(json.dumps(config))


def test_a_file_says_what_the_folder_does(model, tmp_path):
    name, folder = model
    without_norms_divided(folder, name)
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_entries(folder, name), gguf_tensors(folder, name))
    text = json_of("generate", path, *RUN)["text"]
    assert text == json_of("generate", folder, *RUN)["text"]
    succeeds("import", path, tmp_path / "imported")
    before, after = stored(folder), stored(tmp_path / "imported")
    experts = [tensor for tensor in before if ".experts." in tensor]
    assert len(experts) > 10
    for tensor in experts:
        assert after[tensor] == before[tensor], tensor
    assert text == json_of("generate", tmp_path / "imported", *RUN)["text"]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
def test_experts_in_blocks_run(model, kind, tmp_path):
    name, folder = model
    path = tmp_path / "blocks.gguf"
    write_gguf(path, gguf_entries(folder, name), gguf_tensors(folder, name, kind))
    succeeds("generate", path, *RUN)


def test_damaged_experts_are_refused(tmp_path):
    folder = make(tmp_path, "qwen3_moe")
    entries, tensors = gguf_entries(folder, "qwen3_moe"), gguf_tensors(folder, "qwen3_moe")
    router = "blk.0.ffn_gate_inp.weight"
    experts = "blk.1.ffn_up_exps.weight"
    path = tmp_path / "bad.gguf"
    write_gguf(path, entries, {key: value for key, value in tensors.items() if key != router})
    fails(NOT_FOUND, "model.layers.0.mlp.gate", arguments=("generate", path, *RUN))
    dtype, (count, rows, columns), data = tensors[experts]
    less = data[:(count - 1) * rows * columns * 2]
    write_gguf(path, entries, {**tensors, experts: (dtype, [count - 1, rows, columns], less)})
    fails(NOT_FOUND, f"experts.{count - 1}.up_proj", arguments=("generate", path, *RUN))
    flat = (dtype, [count * rows, columns], data)
    write_gguf(path, entries, {**tensors, experts: flat})
    fails(CORRUPT, "ffn_up_exps", "[experts, rows, columns]", arguments=("generate", path, *RUN))
    write_gguf(path, entries, {**tensors, "blk.0.ffn_up_exps.bias": ("F32", [4], b"\0" * 16)})
    fails(UNSUPPORTED, "ffn_up_exps.bias", arguments=("generate", path, *RUN))


OSS_ROLES = {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"}


def blocks_of(blocks, scales):
    """Blocks of 32 as GGUF has them: a scale, then value j beside value j + 16 in each byte."""
    out = bytearray()
    for index, scale in enumerate(scales):
        pairs = blocks[16 * index:16 * index + 16]
        values = [code for pair in pairs for code in (pair & 15, pair >> 4)]
        out.append(scale)
        out += bytes(values[j] | values[j + 16] << 4 for j in range(16))
    return bytes(out)


def rows_of(data, width, first, step):
    rows = [data[at:at + width] for at in range(0, len(data), width)]
    return b"".join(rows[first::step])


def gpt_oss_tensors(folder):
    """The published form, gate and up in turns and in one tensor, as GGUF has it: in two."""
    tensors, result = stored(folder), {}
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for full, (dtype, shape, raw) in tensors.items():
        module, _, suffix = full.rpartition(".")
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
               "lm_head": "output"}.get(module)
        if top:
            result[f"{top}.{suffix}"] = (dtype, shape, raw)
        elif full.endswith(".sinks"):
            result[f"blk.{full.split('.')[2]}.attn_sinks.weight"] = (dtype, shape, raw)
        elif ".experts" not in full:
            _, _, layer, role = module.split(".", 3)
            result[f"blk.{layer}.{ {**ROLES, **OSS_ROLES}[role]}.{suffix}"] = (dtype, shape, raw)
    for layer in range(layers):
        def experts(name, layer=layer):
            return tensors[f"model.layers.{layer}.mlp.experts.{name}"]
        for name, outputs in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            _, (count, rows, per_row, _), codes = experts(name + "_blocks")
            blocks = blocks_of(codes, experts(name + "_scales")[2])
            dtype, _, bias = experts(name + "_bias")
            for first, output in enumerate(outputs):
                step = len(outputs)
                place = f"blk.{layer}.ffn_{output}_exps"
                result[place + ".weight"] = ("MXFP4", [count, rows // step, 32 * per_row],
                                             rows_of(blocks, 17 * per_row, first, step))
                result[place + ".bias"] = (dtype, [count, rows // step],
                                           rows_of(bias, 2, first, step))
    return result


def gpt_oss_entries(folder):
    return gguf_entries(folder, "gpt_oss") + [
        ("gpt-oss.attention.sliding_window", U32, 16),
        ("gpt-oss.rope.scaling.type", STRING, "yarn"), ("gpt-oss.rope.scaling.factor", F32, 4.0),
        ("gpt-oss.rope.scaling.original_context_length", U32, 64)]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    model = make(folder, "gpt_oss")
    write_gguf(folder / "model.gguf", gpt_oss_entries(model), gpt_oss_tensors(model))
    return folder


def perplexity(model, text):
    return json_of("eval", "ppl", model, "--text", text, "--window", 96)["perplexity"]


def test_gpt_oss_says_what_the_folder_does(gpt_oss, tmp_path):
    story = tmp_path / "text"
    story.write_text("It was a dark night and the wind was loud. " * 20)
    hf, gguf = gpt_oss / "hf", gpt_oss / "model.gguf"
    assert perplexity(gguf, story) == pytest.approx(perplexity(hf, story), rel=1e-6)
    assert json_of("generate", gguf, *RUN)["text"] == json_of("generate", hf, *RUN)["text"]
    succeeds("import", gguf, tmp_path / "imported")
    assert perplexity(tmp_path / "imported", story) == pytest.approx(perplexity(hf, story),
                                                                      rel=1e-6)
    before, after = stored(hf), stored(tmp_path / "imported")
    biases = [name for name in before if name.endswith("gate_up_proj_bias")]
    assert len(biases) == 2
    for name in biases:
        assert after[name] == before[name], name
    succeeds("quantize", gguf, tmp_path / "q", "--scheme", "w4a16_g32")
    succeeds("verify", gguf, tmp_path / "q")
    succeeds("generate", tmp_path / "q", *RUN)


def test_gpt_oss_without_a_part_is_refused(gpt_oss, tmp_path):
    entries, tensors = gpt_oss_entries(gpt_oss / "hf"), gpt_oss_tensors(gpt_oss / "hf")
    path = tmp_path / "bad.gguf"
    without = {key: value for key, value in tensors.items() if key != "blk.1.ffn_up_exps.bias"}
    write_gguf(path, entries, without)
    fails(NOT_FOUND, "gate_up_proj_bias", "gate alone", arguments=("generate", path, *RUN))
    dtype, (count, width), raw = tensors["blk.1.ffn_up_exps.bias"]
    less = (dtype, [count - 1, width], raw[:2 * (count - 1) * width])
    write_gguf(path, entries, {**without, "blk.1.ffn_up_exps.bias": less})
    fails(CORRUPT, "gate_up_proj_bias", "[5, 96]", arguments=("generate", path, *RUN))
    write_gguf(path, [row for row in entries if "sliding" not in row[0]], tensors)
    fails(CORRUPT, "gpt-oss.attention.sliding_window", arguments=("generate", path, *RUN))
