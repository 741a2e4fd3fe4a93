"""What the command-line tests share: running `nibble`, and building small models to damage."""

import array
import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("NIBBLE_BIN", str(ROOT / "build/cpu/tools/nibble"))
STORYTELLER = ROOT / "models/storyteller"

INVALID, NOT_FOUND, CORRUPT, UNSUPPORTED, EXISTS, EXHAUSTED, IO, UNAVAILABLE = range(2, 10)
KINDS = {
    INVALID: "invalid argument", NOT_FOUND: "not found", CORRUPT: "corrupt",
    UNSUPPORTED: "unsupported", EXISTS: "already exists", EXHAUSTED: "resource exhausted",
    IO: "i/o error", UNAVAILABLE: "unavailable",
}
TITLE = "nibble: low-bit inference and quantization of language models"  # above --help
# A size that no machine has is an error of the program to report, not a finding.
os.environ["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":allocator_may_return_null=1"
SANITIZER = re.compile(r"Sanitizer|runtime error:")


def nibble(*arguments, timeout=120, **options):
    """Runs the binary; checks only that no sanitizer complained and that it did not crash."""
    command = [BINARY, *map(str, arguments)]
    options.setdefault("stdin", subprocess.DEVNULL)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=timeout, **options)
    result.stdout = result.stdout.decode(errors="replace")
    result.stderr = result.stderr.decode(errors="replace")
    assert not SANITIZER.search(result.stderr), result.stderr
    assert 0 <= result.returncode < 70, f"crash: {result.returncode}\n{result.stderr}"
    return result


def succeeds(*arguments, **options):
    result = nibble(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result


def fails(code, *words, arguments, **options):
    """Exactly one message of the code's kind, holding every word; nothing on stdout."""
    result = nibble(*arguments, **options)
    messages = [line for line in result.stderr.splitlines()
                if line.startswith("nibble: ") and line != TITLE]
    assert result.returncode == code, f"exit code {result.returncode}\n{result.stderr}"
    assert len(messages) == 1, result.stderr
    assert messages[0].startswith(f"nibble: {KINDS[code]}: "), messages[0]
    for word in words:
        assert word in messages[0], f"no {word!r} in {messages[0]}"
    assert result.stdout == ""
    return messages[0]


def json_of(*arguments, **options):
    """The single JSON object that a command with --json prints on stdout."""
    result = succeeds(*arguments, "--json", **options)
    assert result.stdout.count("\n") == 1 and result.stdout.endswith("\n")
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def write_safetensors(path, tensors, header=None):
    """tensors: name -> (dtype, shape, bytes). header: what to write instead of the true one."""
    entries, blobs, at = {}, [], 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        blobs.append(data)
        at += len(data)
    text = json.dumps(entries if header is None else header(entries)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def f32(shape, generator, scale=0.05):
    count = 1
    for dim in shape:
        count *= dim
    values = array.array("f", (generator.gauss(0, scale) for _ in range(count)))
    return "F32", shape, values.tobytes()


HIDDEN, INTERMEDIATE, VOCAB = 32, 64, 4096
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "hidden_act": "silu",
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}
# Nobody knows which tensors a model of this family has, so all and none may be there.
UNKNOWN_FAMILY = {**CONFIG, "architectures": ["UnknownForCausalLM"]}


def tiny_tensors(hidden=HIDDEN, intermediate=INTERMEDIATE):
    generator = random.Random(3)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": [VOCAB, hidden],
        layer + "input_layernorm.weight": [hidden],
        layer + "self_attn.q_proj.weight": [32, hidden],
        layer + "self_attn.k_proj.weight": [16, hidden],
        layer + "self_attn.v_proj.weight": [16, hidden],
        layer + "self_attn.o_proj.weight": [hidden, 32],
        layer + "post_attention_layernorm.weight": [hidden],
        layer + "mlp.gate_proj.weight": [intermediate, hidden],
        layer + "mlp.up_proj.weight": [intermediate, hidden],
        layer + "mlp.down_proj.weight": [hidden, intermediate],
        "model.norm.weight": [hidden],
    }
    return {name: f32(shape, generator) for name, shape in shapes.items()}


TINY_TENSORS = tiny_tensors()


class Model:
    """A random Llama of one layer with the embedded model's tokenizer, in a folder to damage."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.weights = folder / "model.safetensors"
        self.write_tensors()
        self.write_json("config.json", CONFIG)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(STORYTELLER / name, folder / name)

    def __str__(self):
        return str(self.folder)

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def write_json(self, name, value):
        self.write(name, json.dumps(value))

    def edit_json(self, name, **fields):
        path = self.folder / name
        value = json.loads(path.read_text()) if path.exists() else {}
        value.update(fields)
        self.write_json(name, {k: v for k, v in value.items() if v is not ...})

    def write_tensors(self, header=None, drop=None, **replaced):
        """Writes the weights with tensors exchanged: q_proj=(dtype, shape, bytes)."""
        tensors = {}
        for name, tensor in TINY_TENSORS.items():
            short = name.split(".")[-2]
            if short != drop:
                tensors[name] = replaced.get(short, tensor)
        write_safetensors(self.weights, tensors, header)

    def shard(self):
        """Splits the weights into two files with an index."""
        names = list(TINY_TENSORS)
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        parts = [names[:4], names[4:]]
        weight_map = {}
        for file, part in zip(files, parts):
            write_safetensors(self.folder / file, {name: TINY_TENSORS[name] for name in part})
            weight_map.update({name: file for name in part})
        self.weights.unlink()
        self.write_json("model.safetensors.index.json", {"weight_map": weight_map})
        return files
