#!/usr/bin/env python3
"""Makes the golden files beside this script: small random checkpoints of every architecture and
the F32 logits that transformers computes for them. Needs torch, transformers and safetensors.

    python tests/golden/make_goldens.py [NAME...]

Each folder holds config.json and model.safetensors (BF16), golden.json (versions, prompts, and
which rows of logits are kept) and golden.f32 (those rows, little-endian float32, one prompt after
the other, each row vocab_size long). Weights are multiples of 1/64 so that they compress well.
Of a prompt's tokens, the last `decoded` are fed one by one by generate(), the others at once.

storyteller_dynamic.json holds greedy continuations of models/storyteller in F32, had it been made
for 64 positions and dynamic NTK scaling.
"""

import copy
import json
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
STORYTELLER = HERE.parents[1] / "models/storyteller"
TEXT = HERE.parents[1] / "tests/data/text/the_black_cat.txt"
PROMPTS = ((1, 0), (17, 0), (300, 0))  # tokens, and how many of them are decoded
# On both sides of max_position_embeddings and across it.
PROMPTS_OF = {"llama_dynamic_long": ((300, 0), (200, 160), (250, 150))}
PUBLISHED = ("qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v3_plain")  # whose tensors save_pretrained() splits and names
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


OPT_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
              "bos_token_id", "eos_token_id", "pad_token_id", "attn_implementation")


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
        "llama_dynamic_long": (make(llama, max_position_embeddings=64,
                                    rope_parameters=rope("dynamic", factor=8.0)), False),
        "opt": (transformers.OPTConfig(**{key: COMMON[key] for key in OPT_FIELDS}, ffn_dim=96,
                                       max_position_embeddings=300), False),
        "starcoder2": (make(transformers.Starcoder2Config, sliding_window=32), False),
        **mixtures(make),
    }


def mixtures(make):
    """Of experts: all in one tensor, as models in memory have them, and one by one (PUBLISHED)."""
    yarn = rope("yarn", 150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=128)
    gpt_oss = dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=32, head_dim=16,
                   num_attention_heads=8, rope_parameters=yarn)
    qwen = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32)
    return {
        "gpt_oss": (make(transformers.GptOssConfig, **gpt_oss), False),
        "qwen2_moe": (make(transformers.Qwen2MoeConfig, **qwen, num_hidden_layers=3,
                           mlp_only_layers=[1], shared_expert_intermediate_size=48,
                           norm_topk_prob=False), False),
        "qwen3_moe": (make(transformers.Qwen3MoeConfig, **qwen, num_hidden_layers=3,
                           decoder_sparse_step=2, head_dim=32, norm_topk_prob=True), False),
        "mixtral": (make(transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2,
                         sliding_window=None), False),
        **latent(make),
    }


def latent(make):
    """Latent attention: queries in two stages with YaRN's factors and groups of experts, or at once."""
    yarn = rope("yarn", 50000.0, factor=64.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0,
                mscale_all_dim=1.0, original_max_position_embeddings=128)
    shape = dict(num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
                 v_head_dim=24, n_routed_experts=8, num_experts_per_tok=3, num_hidden_layers=3,
                 moe_intermediate_size=32, norm_topk_prob=True)
    config = transformers.DeepseekV3Config
    return {
        "deepseek_v3": (make(config, **shape, q_lora_rank=24, n_group=4, topk_group=2,
                             n_shared_experts=1, routed_scaling_factor=2.5,
                             first_k_dense_replace=1, rope_parameters=yarn), False),
        "deepseek_v3_plain": (make(config, **shape, q_lora_rank=None, n_group=1, topk_group=1,
                                   n_shared_experts=2, routed_scaling_factor=1.0,
                                   first_k_dense_replace=0), False),
    }


def randomize(model, generator):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                value = 0.25 * noise
            elif name.endswith("sinks"):
                value = noise
            elif "norm" in name:
                value = 1.0 + 0.25 * noise
            else:
                value = 0.14 * noise
            parameter.copy_(torch.round(value * 64) / 64)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                noise = torch.randn(buffer.shape, generator=generator)
                buffer.copy_(torch.round(0.25 * noise * 64) / 64)


def as_transformers_4(config):
    """rope_theta beside rope_scaling, and the older name of its type field."""
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    return config


def kept_rows(first, length):
    step = max(1, (length - 1 - first) // 8)
    return sorted({*range(first, length - 1, step), length - 1})[-9:]


def logits_of(model, tokens, decoded):
    """Logits of rows from the first one on that is kept, and which that is."""
    model = copy.deepcopy(model)  # dynamic scaling keeps the longest length that it has seen
    with torch.no_grad():
        if decoded == 0:
            return model(tokens[None]).logits[0].float(), 0
        prompt = len(tokens) - decoded
        forced = [*tokens.tolist(), 0]
        out = model.generate(
            tokens[None, :prompt], attention_mask=torch.ones(1, prompt, dtype=torch.long),
            max_new_tokens=decoded + 1, do_sample=False, eos_token_id=None, output_logits=True,
            return_dict_in_generate=True,
            prefix_allowed_tokens_fn=lambda _, ids: [forced[len(ids)]])
        assert out.sequences[0].tolist() == forced
        return torch.cat(out.logits).float(), prompt - 1


def state_of(name, model):
    if name not in PUBLISHED:
        return model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(pathlib.Path(folder) / "model.safetensors")


def write_case(name, config, old_keys, seed):
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, generator)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    tensors = {key: value.to(torch.bfloat16).contiguous()
               for key, value in state_of(name, model).items()
               if not (config.tie_word_embeddings and key == "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads(config.to_json_string(use_diff=False))
    keep = {key: value for key, value in fields.items()
            if value is not None and not key.startswith("_")}
    keep |= {"architectures": [type(model).__name__], "dtype": "float32"}
    keep = as_transformers_4(keep) if old_keys else keep
    (folder / "config.json").write_text(json.dumps(keep, indent=1, sort_keys=True) + "\n")
    prompts, blobs = [], []
    for length, decoded in PROMPTS_OF.get(name, PROMPTS):
        tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
        logits, first = logits_of(model, tokens, decoded)
        rows = kept_rows(first, length)
        blobs.append(logits[[row - first for row in rows]].numpy().astype("<f4").tobytes())
        prompts.append({"tokens": tokens.tolist(), "rows": rows})
        if decoded:
            prompts[-1]["decoded"] = decoded
    (folder / "golden.f32").write_bytes(b"".join(blobs))
    golden = {"transformers": transformers.__version__, "torch": torch.__version__,
              "script": "tests/golden/make_goldens.py", "seed": seed, "prompts": prompts}
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


def write_storyteller_dynamic():
    """Texts that end before position 64 and behind it, and what follows them."""
    changes = {"max_position_embeddings": 64, "dtype": "float32", "eos_token_id": None,
               "rope_parameters": rope("dynamic", factor=8.0)}
    config = transformers.AutoConfig.from_pretrained(STORYTELLER, **changes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(STORYTELLER)
    answers = []
    for characters, count in ((80, 200), (700, 120)):
        text = TEXT.read_text()[:characters].rstrip()
        prompt = tokenizer(text, return_tensors="pt")["input_ids"]
        model = transformers.AutoModelForCausalLM.from_pretrained(
            STORYTELLER, config=config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
                do_sample=False, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True)
        top = torch.cat(out.logits).topk(2).values
        margin = (top[:, 0] - top[:, 1]).min().item()
        assert margin > 0.01, f"{margin}: too near to be the same everywhere"
        answers.append({"text": text, "prompt_tokens": prompt.shape[1],
                        "ids": out.sequences[0].tolist()})
    golden = {"transformers": transformers.__version__, "torch": torch.__version__,
              "script": "tests/golden/make_goldens.py", "arithmetic": "f32",
              "config": changes, "answers": answers}
    (HERE / "storyteller_dynamic.json").write_text(json.dumps(golden) + "\n")


def main():
    torch.set_num_threads(1)
    if "storyteller_dynamic" in sys.argv[1:] or len(sys.argv) == 1:
        write_storyteller_dynamic()
    for seed, (name, (config, old_keys)) in enumerate(cases().items(), start=1):
        if name in sys.argv[1:] or len(sys.argv) == 1:
            write_case(name, config, old_keys, seed)
            print(name)


if __name__ == "__main__":
    main()
