#!/usr/bin/env python3
"""Makes the golden files beside this script: small random checkpoints of every architecture and
the F32 logits that transformers computes for them. Needs torch, transformers and safetensors.

    python tests/golden/make_goldens.py

Each folder holds config.json and model.safetensors (BF16), golden.json (versions, prompts, and
which rows of logits are kept) and golden.f32 (those rows, little-endian float32, one prompt after
the other, each row vocab_size long). Weights are multiples of 1/64 so that they compress well.
"""

import json
import pathlib

import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
PROMPT_LENGTHS = (1, 17, 300)
COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    attn_implementation="eager",
)


def rope(kind="default", theta=10000.0, **fields):
    return dict(rope_type=kind, rope_theta=theta, **fields)


def cases():
    """name -> (config, whether config.json is rewritten to the keys of transformers 4)"""
    llama, mistral = transformers.LlamaConfig, transformers.MistralConfig
    qwen2, qwen3 = transformers.Qwen2Config, transformers.Qwen3Config

    def make(kind, **changes):
        return kind(**{**COMMON, "rope_parameters": rope(), **changes})

    llama3 = rope("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=64)
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=128)
    window = dict(use_sliding_window=True, sliding_window=32, max_window_layers=1)
    return {
        "llama2": (make(llama, num_key_value_heads=4, rms_norm_eps=1e-5), False),
        "llama3": (make(llama, rope_parameters=llama3), False),
        "llama_linear": (make(llama, rope_parameters=rope("linear", factor=4.0)), True),
        "llama_dynamic": (make(llama, rope_parameters=rope("dynamic", factor=2.0)), False),
        "llama_yarn": (make(llama, rope_parameters=yarn), True),
        "llama_bias": (make(llama, attention_bias=True, mlp_bias=True), False),
        "mistral": (make(mistral, sliding_window=32, head_dim=16), False),
        "qwen2": (make(qwen2, tie_word_embeddings=True), False),
        "qwen2_window": (make(qwen2, num_hidden_layers=3, **window), False),
        "qwen3": (make(qwen3, head_dim=32, rope_parameters=rope(theta=1e6)), False),
    }


def randomize(model, generator):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                value = 1.0 + 0.25 * noise
            elif name.endswith("bias"):
                value = 0.25 * noise
            else:
                value = 0.14 * noise
            parameter.copy_(torch.round(value * 64) / 64)


def as_transformers_4(config):
    """rope_theta beside rope_scaling, and the older name of its type field."""
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    return config


def kept_rows(length):
    step = max(1, (length - 1) // 8)
    return sorted({*range(0, length - 1, step), length - 1})[-9:]


def write_case(name, config, old_keys, seed):
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, generator)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    tensors = {key: value.to(torch.bfloat16).contiguous()
               for key, value in model.state_dict().items()
               if not (config.tie_word_embeddings and key == "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads(config.to_json_string(use_diff=False))
    keep = {key: value for key, value in fields.items()
            if value is not None and not key.startswith("_")}
    keep |= {"architectures": [type(model).__name__], "dtype": "float32"}
    keep = as_transformers_4(keep) if old_keys else keep
    (folder / "config.json").write_text(json.dumps(keep, indent=1, sort_keys=True) + "\n")
    prompts, blobs = [], []
    for length in PROMPT_LENGTHS:
        tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float()
        rows = kept_rows(length)
        blobs.append(logits[rows].numpy().astype("<f4").tobytes())
        prompts.append({"tokens": tokens.tolist(), "rows": rows})
    (folder / "golden.f32").write_bytes(b"".join(blobs))
    golden = {"transformers": transformers.__version__, "torch": torch.__version__,
              "script": "tests/golden/make_goldens.py", "seed": seed, "prompts": prompts}
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


def main():
    torch.set_num_threads(1)
    for seed, (name, (config, old_keys)) in enumerate(cases().items(), start=1):
        write_case(name, config, old_keys, seed)
        print(name)


if __name__ == "__main__":
    main()
