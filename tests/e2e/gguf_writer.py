"""Writes GGUF files: the storyteller as one, in plain types and in blocks."""

import json
import random
import struct

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
         "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210), "BF16": (30, 1, 2),
         "MXFP4": (39, 32, 17)}
ROLES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind, value):
    if kind == STRING:
        return text(value)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)


def entry(key, kind, value, element=None):
    raw = text(key) + struct.pack("<I", kind)
    if kind != ARRAY:
        return raw + scalar(kind, value)
    raw += struct.pack("<IQ", element, len(value))
    return raw + b"".join(scalar(element, item) for item in value)


def write_gguf(path, entries, tensors, alignment=32):
    """entries: (key, kind, value[, element]); tensors: name -> (type, shape, bytes)."""
    infos, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        infos += text(name) + struct.pack("<I", len(shape))
        infos += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        infos += struct.pack("<IQ", TYPES[kind][0], len(data))
        data += raw
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    head += b"".join(entry(*each) for each in entries) + infos
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)


def stored(folder):
    """name -> (dtype, shape, bytes) of all weight files of a folder."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        for name, info in header.items():
            first, last = info["data_offsets"]
            tensors[name] = (info["dtype"], info["shape"], data[begin + first:begin + last])
    return tensors


def paired(shape, raw, heads):
    """Rows of each head in pairs: 0, half, 1, half + 1, ..."""
    width = len(raw) // shape[0]
    size = shape[0] // heads
    rows = [raw[i * width:(i + 1) * width] for i in range(shape[0])]
    return b"".join(rows[head * size + half * size // 2 + pair] for head in range(heads)
                    for pair in range(size // 2) for half in range(2))


def gguf_name(name):
    module, _, suffix = name.rpartition(".")
    if module == "model.embed_tokens":
        return "token_embd." + suffix
    if module == "model.norm":
        return "output_norm." + suffix
    _, _, layer, role = module.split(".", 3)
    return f"blk.{layer}.{ROLES[role]}.{suffix}"


def metadata(folder, pre="gpt-2"):
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = [token for token, _ in sorted(tokenizer["model"]["vocab"].items(),
                                           key=lambda item: item[1])]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge)
              for merge in tokenizer["model"]["merges"]]
    return [
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", U32, config["num_hidden_layers"]),
        ("llama.context_length", U32, config["max_position_embeddings"]),
        ("llama.embedding_length", U32, config["hidden_size"]),
        ("llama.feed_forward_length", U32, config["intermediate_size"]),
        ("llama.attention.head_count", U32, config["num_attention_heads"]),
        ("llama.attention.head_count_kv", U32, config["num_key_value_heads"]),
        ("llama.attention.layer_norm_rms_epsilon", F32, config["rms_norm_eps"]),
        ("llama.rope.freq_base", F32, config["rope_parameters"]["rope_theta"]),
        ("llama.rope.dimension_count", U32, config["head_dim"]),
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, pre),
        ("tokenizer.ggml.tokens", ARRAY, tokens, STRING),
        ("tokenizer.ggml.token_type", ARRAY,
         [3 if i in special else 1 for i in range(len(tokens))], I32),
        ("tokenizer.ggml.merges", ARRAY, merges, STRING),
        ("tokenizer.ggml.bos_token_id", U32, config["bos_token_id"]),
        ("tokenizer.ggml.eos_token_id", U32, config["eos_token_id"]),
        ("tokenizer.ggml.add_bos_token", BOOL, True),
        ("tokenizer.chat_template", STRING, (folder / "chat_template.jinja").read_text()),
    ]


def random_blocks(kind, elements, seed):
    """Any codes with scales of a weight's size."""
    source = random.Random(seed)
    _, size, width = TYPES[kind]
    half = struct.pack("<e", 0.004)
    blocks = []
    for _ in range(elements // size):
        codes = source.randbytes(width)
        if kind in ("Q4_0", "Q8_0"):
            codes = half + codes[2:]
        elif kind == "Q4_1":
            codes = half + struct.pack("<e", -0.03) + codes[4:]
        elif kind == "MXFP4":
            codes = bytes([120]) + codes[1:]
        elif kind == "Q4_K":
            codes = struct.pack("<ee", 0.0001, 0.0005) + codes[4:]
        elif kind == "Q6_K":
            codes = codes[:-2] + struct.pack("<e", 0.00001)
        blocks.append(codes)
    return b"".join(blocks)


def storyteller_tensors(folder, blocks=None):
    """The folder's tensors under GGUF's names; `blocks`: role -> type of random blocks."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, (dtype, shape, raw) in stored(folder).items():
        new = gguf_name(name)
        role = new.split(".")[-2]
        kind = (blocks or {}).get(role)
        if kind:
            tensors[new] = (kind, shape, random_blocks(kind, shape[0] * shape[1], new))
        elif role.endswith("norm"):  # which llama.cpp keeps in F32
            values = struct.unpack(f"<{len(raw) // 2}H", raw)
            tensors[new] = ("F32", shape, struct.pack(f"<{len(values)}I",
                                                      *(value << 16 for value in values)))
        else:
            if role in heads:
                raw = paired(shape, raw, heads[role])
            tensors[new] = (dtype, shape, raw)
    return tensors
