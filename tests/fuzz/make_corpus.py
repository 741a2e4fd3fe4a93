"""Writes the seed corpora of the fuzz targets, tests/fuzz/corpus/<target>/, from test data of this
repository and from small documents written here. Run from the repository root; standard library
only. The result is committed: rerun it only to change the seeds.
"""

import json
import pathlib
import struct
import sys

sys.path.insert(0, "tests/interop")
from fmpq_files import xxh64  # noqa: E402

CORPUS = pathlib.Path("tests/fuzz/corpus")


def write(target, name, content):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else
                   json.dumps(content, ensure_ascii=False, separators=(",", ":"))).encode()
    (folder / name).write_bytes(content)


def safetensors(header, data):
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def make_safetensors():
    write("safetensors", "empty", safetensors({}, b""))
    write("safetensors", "two", safetensors(
        {"__metadata__": {"format": "pt"},
         "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
         "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}, bytes(range(32))))
    write("safetensors", "scalar_and_empty", safetensors(
        {"s": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
         "e": {"dtype": "F8_E4M3", "shape": [0, 5], "data_offsets": [8, 8]}}, bytes(8)))
    write("safetensors", "lies", safetensors(
        {"a": {"dtype": "F16", "shape": [1 << 62, 8], "data_offsets": [0, 16]}}, bytes(16)))


def make_sidecars():
    half = {"form": "centred+turned", "mean": [0.5, -1.0], "errors": {"plain": 0.25}}
    ranges = {"form": "turned", "mean": [0.0, 1.0], "step": [0.125, 0.0]}
    for name, layer in (("means", {"keys": half, "values": {"form": "plain", "mean": None}}),
                        ("ranges", {"keys": {**half, "page_form": "turned", "ranges": ranges},
                                    "values": {"form": "turned", "ranges": {**ranges, "mean": None}}})):
        write("sidecars", f"kv_{name}", "k" + json.dumps({
            "nibble_kv": 1, "kv_heads": 1, "head_dim": 2, "weights_xxh64": "0123456789abcdef",
            "calibration": {"tokens": 7}, "layers": [layer] * 2}))
    columns = [*range(31, -1, -1), *range(32, 64)]
    weights = b"".join(f"{name}.weight_packed".encode() + bytes(64) + f"{name}.weight_scale".encode() +
                       bytes(8) for name in "ab")  # what the target has
    for permute in ("none", "gather"):
        sites = [{"modules": [name], "inputs": 64, "clip": 0.9, "split": name == "a"} for name in "ab"]
        sites[1]["rows"] = 0.5
        header, data = {}, b""
        if permute == "gather":
            header["sites.0.columns"] = {"dtype": "I32", "shape": [64], "data_offsets": [0, 256]}
            data = struct.pack("<64i", *columns)
        for site, bits in enumerate((b"\x08\x08", b"\x04\x08")):
            header[f"sites.{site}.bits"] = {"dtype": "U8", "shape": [2],
                                            "data_offsets": [len(data), len(data) + 2]}
            data += bits
        text = json.dumps({"nibble_fmpq": 2, "form": "block", "block": 32, "permute": permute, "parts": 2,
                           "weights_xxh64": f"{xxh64(weights):016x}", "calibration": None, "kv": None,
                           "sites": sites})
        write("sidecars", f"blocks_{permute}", b"f" + text.encode() + b"\0" + safetensors(header, data))


def gguf_text(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(entries=(), tensors=(), version=3, alignment=32):
    """entries: (key, type, bytes); tensors: (name, dimensions, type, offset, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    for key, kind, value in entries:
        out += gguf_text(key) + struct.pack("<I", kind) + value
    for name, dimensions, kind, offset, _ in tensors:
        out += gguf_text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        out += struct.pack("<IQ", kind, offset)
    for _, _, _, _, data in tensors:
        out += b"\0" * (-len(out) % alignment) + data
    return out


def make_gguf():
    array = struct.Struct("<IQ")
    write("gguf", "empty", gguf())
    write("gguf", "values", gguf([
        ("u8", 0, b"\7"), ("i8", 1, b"\xff"), ("u16", 2, b"\1\2"), ("i16", 3, b"\0\x80"),
        ("u32", 4, b"abcd"), ("i32", 5, b"\xfe\xff\xff\xff"), ("f32", 6, struct.pack("<f", 0.5)),
        ("bool", 7, b"\1"), ("string", 8, gguf_text("text")), ("u64", 10, b"\xff" * 8),
        ("i64", 11, b"\xff" * 8), ("f64", 12, struct.pack("<d", -1e300))], version=2))
    write("gguf", "arrays", gguf([
        ("tokens", 9, array.pack(8, 3) + gguf_text("a") + gguf_text("") + gguf_text("\u4e16")),
        ("scores", 9, array.pack(6, 2) + struct.pack("<2f", 1, -2)),
        ("flags", 9, array.pack(7, 2) + b"\0\1"), ("none", 9, array.pack(11, 0)),
        ("nested", 9, array.pack(9, 1) + array.pack(0, 1) + b"\1")]))
    write("gguf", "split", gguf([("split.no", 2, b"\0\0"), ("split.count", 2, b"\2\0"),
                                 ("split.tensors.count", 5, b"\4\0\0\0")]))
    tensors, offset = [], 0
    sizes = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
             10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
             24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2), 39: (32, 17)}
    for kind, (elements, size) in sizes.items():
        tensors.append((f"t{kind}", (elements, 1, 1), kind, offset,
                        bytes((37 * i + kind) % 256 for i in range(size))))
        offset += (size + 31) // 32 * 32
    write("gguf", "types", gguf(tensors=tensors))
    write("gguf", "alignment", gguf([("general.alignment", 4, struct.pack("<I", 8))],
                                    [("a", (2, 1), 0, 0, bytes(8)), ("s", (), 1, 8, b"\0\x3c")],
                                    alignment=8))
    write("gguf", "lies", gguf([("a", 8, b"\xff" * 8)], [("a", (1 << 62, 8), 1, 1 << 63, b"")]))


def make_gguf_model():
    """A layer of each kind of family, with one number or block per row."""
    def u32(value):
        return 4, struct.pack("<I", value)

    def model(arch, entries, extra):
        sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32,
                 "feed_forward_length": 32, "attention.head_count": 2,
                 "attention.head_count_kv": 1, **entries}
        keys = [("general.architecture", 8, gguf_text(arch)),
                (f"{arch}.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))]
        keys += [(f"{arch}.{name}", *u32(value)) for name, value in sizes.items()]
        rows = {"token_embd.weight": ((32, 3), 0), "blk.0.attn_norm.weight": ((32,), 0),
                "blk.0.attn_q.weight": ((32, 32), 2), "blk.0.attn_k.weight": ((32, 16), 8),
                **extra}
        bytes_of = {0: (1, 4), 2: (32, 18), 3: (32, 20), 8: (32, 34), 39: (32, 17)}
        tensors, offset = [], 0
        for name, (shape, kind) in rows.items():
            elements, size = bytes_of[kind]
            count = size
            for dimension in shape:
                count *= dimension
            count //= elements
            tensors.append((name, shape, kind, offset, bytes(i % 61 for i in range(count))))
            offset += (count + 31) // 32 * 32
        return gguf(keys, tensors)

    experts = {"expert_count": 2, "expert_used_count": 1}
    write("gguf_model", "llama", model("llama", {}, {"blk.0.ffn_up.weight": ((32, 32), 3)}))
    write("gguf_model", "qwen3moe", model(
        "qwen3moe", {**experts, "expert_feed_forward_length": 32},
        {"blk.0.ffn_gate_inp.weight": ((32, 2), 0), "blk.0.ffn_up_exps.weight": ((32, 4, 2), 3)}))
    write("gguf_model", "gpt_oss", model(
        "gpt-oss", {**experts, "attention.sliding_window": 16},
        {"blk.0.attn_sinks.weight": ((2,), 0), "blk.0.ffn_gate_exps.weight": ((32, 4, 2), 39),
         "blk.0.ffn_gate_exps.bias": ((4, 2), 0), "blk.0.ffn_up_exps.bias": ((4, 2), 0),
         "blk.0.ffn_down_exps.bias": ((4, 2), 0)}))


def make_config():
    for path in sorted(pathlib.Path("tests/golden").glob("*/config.json")):
        config = json.loads(path.read_text())
        generation = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20,
                      "do_sample": True, "repetition_penalty": 1.05}
        text = json.dumps(config, separators=(",", ":"))
        write("config", path.parent.name, text + "\0" + json.dumps(generation))
    write("config", "storyteller", pathlib.Path("models/storyteller/config.json").read_bytes())


def weights(bits, strategy, **more):
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **more}


def make_quant_config():
    def config(**groups):
        return {"quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": groups, "ignore": ["lm_head", "re:.*mlp\\.gate$"]}}

    dynamic = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token",
               "symmetric": True}
    write("quant_config", "int4_group", config(
        group_0={"targets": ["Linear"], "weights": weights(4, "group", group_size=32),
                 "input_activations": None}))
    write("quant_config", "fp8", config(
        group_0={"targets": ["Linear"], "weights": {**weights(8, "channel"), "type": "float"},
                 "input_activations": dynamic}))
    write("quant_config", "two_groups", config(
        a={"targets": ["Linear"], "weights": weights(4, "channel")},
        b={"targets": ["re:.*(down|up)_proj"], "weights": weights(8, "channel")}))
    write("quant_config", "nested", {"text_config": config(
        group_0={"targets": ["Linear"], "weights": weights(4, "channel")})})


def make_sources():
    """Small checkpoints in every stored form, and the configs of the dialects that run."""
    cases = json.loads(pathlib.Path("tests/data/formats/oracle_vectors.json").read_text())
    for case in cases:
        name = case["name"].replace(",", "").replace(" ", "_")
        config = {"quantization_config": case["config"]}
        lines = "\n".join(f"{tensor} {info['dtype']} {','.join(map(str, info['shape']))}"
                          for tensor, info in case["tensors"].items())
        fill = bytes.fromhex(next(iter(case["tensors"].values()))["hex"])[:64]
        head = json.dumps(config, separators=(",", ":")) + "\0" + lines + "\0"
        write("sources", name, head.encode() + fill)
        if name in ("quark_w4a8_order", "gptq_sym", "fp8_per_tensor"):
            write("quant_config", name, config)
    fused = {"model_type": "gpt_oss", "hidden_size": 8}
    write("sources", "fused", (json.dumps(fused) + "\0l.mlp.experts.gate_up_proj BF16 2,8,6\n"
                               "l.mlp.experts.down_proj BF16 2,3,8\nnorm.weight F32 8\0")
          .encode() + b"\x80\x3f\x00\xc0")


def byte_alphabet():
    """The printable stand-ins of the 256 bytes in byte-level vocabularies."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for byte in range(256):
        if byte in kept:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


def make_tokenizer():
    tokens = list(byte_alphabet().values()) + ["he", "ll", "hell", "hello", "\u0120a"]
    merges = ["h e", "l l", "he ll", "hell o", "\u0120 a"]
    special = {"id": len(tokens), "content": "<|end|>", "special": True, "single_word": False,
               "lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)},
             "merges": merges, "byte_fallback": False, "ignore_merges": False,
             "unk_token": None, "dropout": None, "fuse_unk": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": True}
    base = {"version": "1.0", "added_tokens": [special], "normalizer": None,
            "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}
    write("tokenizer", "byte_level", base)
    pattern = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
               " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
    split = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {**level, "use_regex": False}]}
    template = {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}},
                           {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [], "special_tokens": {
                    "<|end|>": {"id": "<|end|>", "ids": [len(tokens)], "tokens": ["<|end|>"]}}}
    write("tokenizer", "split_regex",
          {**base, "normalizer": {"type": "NFC"}, "pre_tokenizer": split,
           "post_processor": template,
           "model": {**model, "merges": [m.split(" ") for m in merges], "ignore_merges": True}})
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581", "\u2581a", "a", "b", "ab", "\u2581ab"]
    write("tokenizer", "byte_fallback", {
        "version": "1.0", "added_tokens": [
            {**special, "id": i, "content": pieces[i]} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {**model, "vocab": {piece: i for i, piece in enumerate(pieces)},
                  "merges": ["a b", "\u2581 a", "\u2581a b"], "byte_fallback": True,
                  "unk_token": "<unk>", "fuse_unk": True}})
    write("tokenizer", "tokenizer_config", {
        "add_bos_token": True, "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": "{{ messages }}",
        "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}}})
    write("tokenizer", "sentencepiece", sentencepiece(pieces))


def sentencepiece(pieces):
    """A ModelProto: repeated pieces {piece, score, type} and a BPE trainer_spec."""
    out = b""
    for index, piece in enumerate(pieces):
        text = piece.encode()
        kind = 2 if index == 0 else 3 if index < 3 else 6 if piece.startswith("<0x") else 1
        body = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", -index)
        body += b"\x18" + bytes([kind])
        out += b"\x0a" + bytes([len(body)]) + body
    trainer = b"\x18\x02\x98\x02\x01"  # model_type BPE, byte_fallback
    return out + b"\x12" + bytes([len(trainer)]) + trainer


def make_chat_template():
    for path in sorted(pathlib.Path("tests/data/templates").glob("*.jinja")):
        if path.stat().st_size < 8000:
            write("chat_template", path.stem, path.read_bytes())
    cases = json.loads(pathlib.Path("tests/data/templates/jinja_cases.json").read_text())["cases"]
    for index in range(0, len(cases), 8):
        part = "\n".join(case["template"] for case in cases[index:index + 8] if "template" in case)
        write("chat_template", f"cases_{index // 8:02}", part)


def make_answer():
    """The first byte chooses the form; 0 and a number are a special token."""
    call = b'{"name": "f", "arguments": {"a": "}<"}}'
    for form, (name, text) in enumerate([
            ("hermes", b"<think>a</think>b <tool_call>" + call + b"</tool_call>"),
            ("llama", b"\x00\x04" + call + b"; " + call),
            ("mistral", b"[THINK]a[/THINK]\x00\x05[" + call + b"]\x00\x05f\x00\x06{}"),
            ("kimi", b"a\x00\x0bfunctions.f:0\x00\x0c{}\x00\x0d"),
            ("deepseek", b"\x00\x0ef\x00\x0f{}\x00\x10\x00\x0efunction\x00\x0ff\n```json\n{}\n```\x00\x10"),
            ("harmony", b"\x00\x07analysis\x00\x08a\x00\x09assistant\x00\x07commentary to=functions.f\x00\x08{}\x00\x0a")]):
        write("answer", name, bytes([form]) + text)


def make_grammar():
    """The first byte chooses: a schema, a regular expression, EBNF, a pattern of a schema, tools
    (and the form of their calls)."""
    schema = {"type": "object", "required": ["a", "n"], "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 3}, "n": {"$ref": "#/$defs/n"},
        "e": {"enum": ["x", 1.5, None]}, "d": {"type": "string", "format": "date"},
        "p": {"type": "string", "pattern": "^[a-c]{2,3}-\\d$"},
        "l": {"type": "array", "items": {"type": "number", "minimum": -1.5}, "maxItems": 3}},
        "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {
            "$ref": "#/$defs/n"}, "properties": {"ab": {"type": "integer", "maximum": 120}}}]}}}
    write("grammar", "schema", b"\x00" + json.dumps(schema).encode())
    write("grammar", "schema_one_of", b"\x00" + json.dumps(
        {"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                   {"type": ["string", "null"], "maxLength": 2}]}).encode())
    write("grammar", "schema_refused", b"\x00" + json.dumps(
        {"allOf": [{"$ref": "#"}, {"not": {"uniqueItems": True}}]}).encode())
    write("grammar", "regex", b"\x01" + rb"^(?:a|[^\d\s-]{2,3}?)+\.\x41(?<n>.)*$")
    write("grammar", "pattern", b"\x03" + rb"^[^\s\x00-\x1f\"]{1,3}(\\|\u00e9|.)?$")
    tools = [{"name": "f", "parameters": schema}, {"name": "add", "parameters": {
        "type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}}]
    for form in range(6):
        write("grammar", f"tools_{form}", bytes([4 + 5 * form]) + json.dumps(tools).encode())
    write("grammar", "ebnf", b"\x02" + rb"""root ::= item ("," item){0,3}
item ::= [a-z]+ | "\n" # end
""")


def make_http():
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi \u4e16\u754c"}]}]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {
        "type": "object", "properties": {"x": {"type": "integer"}}}}}]
    write("http", "chat", b"\x01" + json.dumps(
        {"model": "m", "messages": messages, "stream": True,
         "stream_options": {"include_usage": True}, "stop": ["\n", "END"], "logprobs": True,
         "top_logprobs": 3, "max_completion_tokens": 5, "seed": 7, "n": 2}).encode())
    write("http", "chat_strict", b"\x03" + json.dumps(
        {"model": "m", "messages": messages, "tools": tools, "tool_choice": "auto",
         "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False,
         "temperature": 0.5, "top_p": 0.9, "frequency_penalty": 1}).encode())
    write("http", "completion", b"\x00" + json.dumps(
        {"model": "m", "prompt": ["a", "b"], "echo": True, "logprobs": 2, "max_tokens": 3,
         "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True,
         "stop_token_ids": [1, 2], "min_tokens": 1}).encode())
    write("http", "completion_ids", b"\x02" + json.dumps(
        {"model": "m", "prompt": [[1, 2, 3], [4]], "presence_penalty": -1,
         "logit_bias": {"5": 1}, "skip_special_tokens": False}).encode())
    schema = {"type": "object"}
    write("http", "messages", b"\x08" + json.dumps(
        {"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "Be brief."}],
         "messages": [{"role": "user", "content": "Hi"},
                      {"role": "assistant", "content": [
                          {"type": "thinking", "thinking": "h", "signature": ""},
                          {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
                      {"role": "user", "content": [
                          {"type": "tool_result", "tool_use_id": "1", "content": "2"}]}],
         "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "auto"},
         "thinking": {"type": "enabled", "budget_tokens": 9}, "stop_sequences": ["x"]}).encode())
    write("http", "responses", b"\x10" + json.dumps(
        {"model": "m", "instructions": "Be brief.", "max_output_tokens": 5, "store": False,
         "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                   {"type": "reasoning", "summary": [{"type": "summary_text", "text": "h"}]},
                   {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "1", "output": "2"}],
         "tools": [{"type": "function", "name": "f", "parameters": schema}],
         "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}).encode())
    write("http", "generate", b"\x18" + json.dumps(
        {"text": ["a", "b"], "rid": "r", "stream": True, "return_logprob": True,
         "sampling_params": {"max_new_tokens": 5, "stop": ["x"], "sampling_seed": 1}}).encode())
    write("http", "embeddings", b"\x20" + json.dumps(
        {"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 2,
         "truncate_prompt_tokens": -1, "cache_salt": "s", "priority": 1, "user": "u"}).encode())
    write("http", "embeddings_ids", b"\x22" + json.dumps({"input": [[1, 2], [3]]}).encode())
    write("http", "path", b"\x00/v1/models/a%2Fb%zz%?x=1")
    body = json.dumps({"model": "m", "prompt": "a"}).encode()
    head = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nX-Request-Id: r-1\r\n"
    write("http", "request", b"\x04" + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    write("http", "request_chunked", b"\x04" + head + b"Transfer-Encoding: chunked\r\n\r\n"
          + b"%x;e=1\r\n%s\r\n0\r\nT: 1\r\n\r\n" % (len(body), body))
    write("http", "request_get", b"\x04GET /health HTTP/1.0\r\nAuthorization: Bearer k\r\n\r\n")


def make_client():
    """The first byte chooses the API and where the bytes are cut."""
    events = (b'data: {"choices":[{"delta":{"content":"a","reasoning":"b"}}]}\n\n: ping\r\n\r\n'
              b'event: x\rdata: {"choices":[{"text":"c","finish_reason":"stop"}]}\r\r'
              b'data: {"text":"ab","meta_info":{"completion_tokens":2}}\n\n'
              b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n')
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (events[:50], events[50:]))
    for api, name in enumerate(("completions", "chat", "generate")):
        write("client", f"chunked_{name}", bytes([api]) + head
              + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        write("client", f"sized_{name}", bytes([api | 4]) + head
              + b"Content-Length: %d\r\n\r\n" % len(events) + events)
    for status, body in ((400, b'{"error":{"message":"a"}}'), (503, b'{"detail":"b"}'),
                         (200, b'{"choices":[{"message":{"content":"c"}}]}')):
        write("client", f"whole_{status}", b"\x01HTTP/1.1 %d X\r\nContent-Type: application/json\r\n"
              b"Retry-After: 1\r\n\r\n" % status + body)
    write("client", "interim", b"\x00HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 204 None\r\n\r\n")
    write("client", "url", b"\x00http://[::1]:8000/a/v1/")


def make_encoder():
    similar = bytes((37 * i * i + 11 * i) % 251 for i in range(61))
    sizes = struct.pack(">16f", 1, -1, 0, -0.0, 3e38, -3e38, 1e-38, -1e-45, 1e30, 448, 6, 7.5,
                        -8, 65504, 1e-30, 2 ** -126)
    for scheme in range(12):
        for rule in range(9) if scheme in (5, 7, 11) else (0,):
            dialect = 1 if rule == 8 else 2 if scheme == 4 else 0
            write("encoder", f"similar_{scheme}_{rule}",
                  bytes([0x80 | scheme, rule, dialect + 3 * 2, 31]) + similar)
        write("encoder", f"sizes_{scheme}", bytes([scheme, 0, 3 * 3, 15]) + sizes)
        write("encoder", f"odd_{scheme}", bytes([0x80 | scheme, 0, 3 * 8, 200]) + similar)


if __name__ == "__main__":
    for make in (make_safetensors, make_gguf, make_gguf_model, make_config, make_quant_config,
                 make_sources, make_tokenizer, make_chat_template, make_answer, make_client,
                 make_grammar, make_http, make_encoder, make_sidecars):
        make()
