"""What the commands print: --help, --json, progress on a terminal and elsewhere, and the numbers of
`inspect`. NIBBLE_BIN names the binary; run from the repository root."""

import json
import os
import pty
import re
import subprocess

import pytest

from cli_tools import (
    BINARY, HIDDEN, INTERMEDIATE, KINDS, ROOT, STORYTELLER, TINY_TENSORS, UNKNOWN_FAMILY, VOCAB,
    Model, fails, json_of, nibble, succeeds, write_safetensors)

ALL_BUT_EVAL = {
    "generate": ["MODEL", "--prompt", "--max-tokens", "--temperature", "--top-p", "--top-k",
                 "--min-p", "--repetition-penalty", "--seed", "--stop", "--json", "--isa",
                 "--exact-activations", "--threads", "--kv-cache-dtype"],
    "chat": ["MODEL", "--system", "--max-tokens", "--temperature", "--seed", "Ctrl-C", "/quit",
             "Ctrl-D", "/clear", "--url", "--text", "--history"],
    "quantize": ["SRC", "DST", "--scheme", "--ignore", "--include", "--scale-rule", "--json",
                 "--force", "--threads", "--rule", "--rules", "--memory", "--part", "--finish", "--min-snr",
                 "--dry-run", "--lm-head", "w8a8_int8", "w8a8_fp8", "w4a16_g32", "w4a16_g128", "w4a8",
                 "absmax7.5", "norms", "routers", "scheme, tensors, bytes_in, bytes_out"],
    "calibrate-kv": ["MODEL", "--calibrate", "--calibration-windows", "--seed", "--form", "--force",
                     "--threads", "--json", "centred+turned", "nibble_kv.json"],
    "sensitivity": ["MODEL", "--schemes", "--calibrate", "--text", "--measure", "--budget",
                    "--write-rules", "--json"],
    "inspect": ["PATH", "--context", "--concurrency", "--json"],
    "eval ppl": ["MODEL", "--text", "--window", "--protocol", "llama.cpp", "--json", "512", "perplexity, tokens, window"],
    "eval kld": ["BASE_MODEL", "--text", "--protocol", "--save-base", "--base-file", "--base-precision",
                 "--base-kv-cache-dtype", "--json", "kld, kld_error, same_top"],
    "eval tasks": ["MODEL", "--tasks", "--data-dir", "--limit", "--samples", "--json", "piqa"],
    "eval gsm8k": ["MODEL", "--data", "--examples", "--fewshot", "--limit", "--samples", "--json"],
    "serve": ["MODEL", "--host", "--port", "--api-key", "--max-model-len", "--kv-cache-dtype",
              "--max-num-seqs", "--exact-activations"],
    "bench offline": ["MODEL", "--batch", "--input-len", "--output-len", "--context", "--repeats",
                      "--json", "--threads", "--isa", "--exact-activations", "--kv-cache-dtype", "--seed",
                      "--max-num-batched-tokens", "prefill_tps, decode_tps, bytes_per_token"],
    "bench serve": ["--base-url", "--backend", "--dataset-name", "--random-range-semantics",
                    "--request-rate", "--max-concurrency", "--goodput", "--layout", "--sweep", "--compare",
                    "--report", "--json"],
    "bench kernels": ["--backend", "--isa", "--threads", "--pin", "--numa", "--scheme", "--m", "--n",
                      "--k", "--rest", "--json", "amx_int8_tops"],
    "make-dummy": ["--config", "--out", "--layers", "--seed", "--dtype", "--json", "--force"],
}


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


# --- help ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("command", ALL_BUT_EVAL)
def test_help_of_a_command(command):
    result = succeeds(*command.split(), "--help")
    assert result.stderr == ""
    for word in ALL_BUT_EVAL[command]:
        assert word in result.stdout, word
    assert "Exit codes:" in result.stdout


def test_help_names_every_command_and_exit_code():
    result = succeeds("--help")
    for command in ("generate", "chat", "quantize", "inspect", "eval", "serve", "bench", "make-dummy",
                    "calibrate-kv"):
        assert re.search(rf"^  {command} ", result.stdout, re.MULTILINE)
    for code in (0, *KINDS, 10, 70):
        assert re.search(rf"\b{code} [a-zI]", result.stdout), code
    assert re.fullmatch(r"nibble \d+\.\d+\.\d+\n", succeeds("--version").stdout)


@pytest.mark.parametrize("command", ALL_BUT_EVAL)
def test_help_is_true(command):
    """Every flag that help names is known to the parser."""
    flags = re.findall(r"^  (?:-h,)?(--[a-z-]+)", succeeds(*command.split(), "--help").stdout,
                       re.MULTILINE)
    assert len(flags) > 3
    for flag in flags:  # the first may be its value, the second ends the command
        result = nibble(*command.split(), flag, "--no-such-flag", "--no-such-flag")
        unknown = [line for line in result.stderr.splitlines() if "not expected" in line]
        assert not any(f": {flag}" in line for line in unknown), flag


def test_repeated_flags_do_not_swallow_positionals(model):
    output = model.folder.parent / "output"
    succeeds("quantize", "--ignore", "re:.*[qk]_proj", "--ignore", "re:.*v_proj", model, output,
             "--scheme", "w4a8")
    succeeds("inspect", "--context", "16,32", model)


# --- json ----------------------------------------------------------------------------------------

def test_generate_json(model):
    prompt = ["--prompt", "Once upon a time", "--max-tokens", 5]
    value = json_of("generate", model, *prompt)
    assert {"text", "tokens", "prompt_tokens", "finish_reason", "ttft_ms", "tpot_ms"} <= set(value)
    assert isinstance(value["text"], str) and len(value["tokens"]) == 5
    assert value["finish_reason"] == "length" and value["prompt_tokens"] > 1
    assert value["ttft_ms"] > 0 and value["tpot_ms"] > 0
    plain = succeeds("generate", model, *prompt)
    assert plain.stdout == value["text"] + "\n"
    assert "first token" in plain.stderr


def test_eval_json(model):
    text = model.folder / "text.txt"
    text.write_text("The king and the queen went to the sea. " * 8)
    value = json_of("eval", "ppl", model, "--text", text, "--window", 16)
    assert {"perplexity", "tokens", "window", "seconds"} <= set(value)
    assert value["window"] == 16 and value["seconds"] > 0
    # Random weights know nothing: every token is about as likely as any other.
    assert VOCAB / 2 < value["perplexity"] < VOCAB * 2
    whole = json_of("eval", "ppl", model, "--text", text, "--window", 64)
    assert value["tokens"] % 15 == 0 and whole["tokens"] % 63 == 0
    assert value["tokens"] // 15 >= whole["tokens"] // 63 * 4  # four small windows make a large one


def test_quantize_json(model):
    output = model.folder.parent / "output"
    value = json_of("quantize", model, output, "--scheme", "w4a16_g32")
    assert {"scheme", "tensors", "bytes_in", "bytes_out", "seconds", "peak_rss_bytes",
            "snr_db"} <= set(value)
    assert value["scheme"] == "w4a16_g32" and value["tensors"] == 7
    assert value["bytes_in"] == sum(len(data) for _, _, data in TINY_TENSORS.values())
    assert value["bytes_out"] == (output / "model.safetensors").stat().st_size
    assert set(value["snr_db"]) == {"mean", "min"}
    ranking = [tensor["snr_db"] for tensor in value["worst_first"]]
    assert ranking == sorted(ranking) and len(ranking) == 7
    assert ranking[0] == value["snr_db"]["min"]
    assert abs(sum(ranking) / 7 - value["snr_db"]["mean"]) < 1e-9
    assert 15 < value["snr_db"]["min"] < 30


def test_inspect_json(model):
    value = json_of("inspect", model, "--context", "16,4096", "--concurrency", "1,3")
    assert value["architecture"] == "LlamaForCausalLM" and value["scheme"] == "f32"
    parameters = (VOCAB * HIDDEN + 3 * HIDDEN + 2 * HIDDEN * 32 + 2 * HIDDEN * 16
                  + 3 * HIDDEN * INTERMEDIATE)
    assert value["parameters"] == parameters and value["bytes"] == 4 * parameters
    assert value["bytes_by_kind"] == {
        "attention": 4 * (2 * 32 * 32 + 2 * 16 * 32), "embeddings and head": 4 * VOCAB * HIDDEN,
        "mlp": 4 * 3 * HIDDEN * INTERMEDIATE, "norms": 4 * 3 * HIDDEN}
    memory = {(row["kv"], row["context"], row["concurrency"]): row for row in value["memory"]}
    assert len(memory) == 7 * 2 * 2  # the model's context is 64, so 4096 becomes that
    assert memory["bf16", 64, 3]["kv_bytes"] == 2 * 1 * 16 * 2 * 64 * 3
    assert memory["f32", 16, 1]["kv_bytes"] == 2 * 1 * 16 * 4 * 16
    assert memory["int8", 16, 1]["kv_bytes"] < memory["bf16", 16, 1]["kv_bytes"]
    assert memory["f32", 16, 1]["total_bytes"] == value["bytes"] + 2 * 16 * 4 * 16


def test_inspect_knows_the_scheme_and_counts_parameters_not_words(model):
    plain = json_of("inspect", model)
    for scheme in ("w4a16_g32", "w8a8_int8", "w8a8_fp8", "w4a8"):
        output = model.folder.parent / scheme
        succeeds("quantize", model, output, "--scheme", scheme)
        value = json_of("inspect", output)
        assert value["scheme"] == scheme
        assert value["parameters"] == plain["parameters"]
        assert value["bytes"] < plain["bytes"]


def test_inspect_table(model):
    text = succeeds("inspect", model).stdout
    for word in ("LlamaForCausalLM", "f32", "million", "attention", "concurrency", "int4"):
        assert word in text


def test_inspect_the_embedded_model():
    value = json_of("inspect", STORYTELLER)
    assert value["scheme"] == "bf16" and value["max_context"] == 1024
    assert value["bytes"] == 2 * value["parameters"]


# --- what is quantized ---------------------------------------------------------------------------

def test_quantize_leaves_embeddings_norms_routers_and_heads(tmp_path):
    model = Model(tmp_path / "model")
    tensors = dict(TINY_TENSORS)
    matrix = TINY_TENSORS["model.layers.0.self_attn.q_proj.weight"]
    router, head = "model.layers.0.mlp.gate.weight", "lm_head.weight"
    tensors[router] = tensors[head] = matrix
    write_safetensors(model.weights, tensors)
    model.write_json("config.json", UNKNOWN_FAMILY)
    output = tmp_path / "output"
    value = json_of("quantize", model, output, "--scheme", "w8a8_int8")
    names = {tensor["name"] for tensor in value["worst_first"]}
    assert not names & {"model.layers.0.mlp.gate", "lm_head", "model.embed_tokens", "model.norm"}
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"model.layers.0.mlp.gate", "lm_head"} <= set(ignored)
    told = json_of("quantize", model, tmp_path / "told", "--scheme", "w8a8_int8",
                   "--include", "model.layers.0.mlp.gate", "--include", "lm_head",
                   "--ignore", "re:.*[qkv]_proj")
    names = {tensor["name"] for tensor in told["worst_first"]}
    assert {"model.layers.0.mlp.gate", "lm_head"} <= names
    assert "model.layers.0.self_attn.q_proj" not in names
    fails(2, "--include model.norm", arguments=["quantize", model, tmp_path / "norm", "--scheme",
                                               "w8a8_int8", "--include", "model.norm"])


# --- progress ------------------------------------------------------------------------------------

def on_terminal(*arguments):
    """Runs with stderr on a pseudo-terminal; returns stdout and what the terminal showed."""
    main, side = pty.openpty()
    with subprocess.Popen([BINARY, *map(str, arguments)], cwd=ROOT, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=side, text=True) as process:
        os.close(side)
        shown = b""
        while True:
            try:
                block = os.read(main, 4096)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            shown += block
        output = process.stdout.read()
    os.close(main)
    assert process.returncode == 0, shown
    return output, shown.decode()


QUANTIZE_DETAIL = r", \d+/74 tensors(, worst \d+\.\d dB [\w.]+)?"


def progress_commands(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king. " * 200)
    return {
        "quantize": (["quantize", STORYTELLER, tmp_path / "output", "--scheme", "w4a8", "--json"],
                     "quantized", r"(?:\d+\.\d MB/s|\d+\.\d\d GB/s)", QUANTIZE_DETAIL),
        "eval": (["eval", "ppl", STORYTELLER, "--text", text, "--window", 128, "--json"],
                 "evaluated", r"\d+ tokens/s", ""),
    }


@pytest.mark.parametrize("command", ["quantize", "eval"])
def test_progress_on_a_terminal(terminals, tmp_path, command):
    arguments, _, rate, detail = progress_commands(tmp_path)[command]
    output, shown = on_terminal(*arguments)
    assert isinstance(json.loads(output), dict)
    bars = re.findall(r"\r\[[#.]{30}\] +(\d+)% ([^\x1b]*)\x1b", shown)
    percents = [int(percent) for percent, _ in bars]
    assert percents == sorted(percents) and percents[-1] == 100
    assert re.fullmatch(rate + r", \d+:\d\d left" + detail, bars[0][1]), bars[0]
    assert re.fullmatch(rate + r", took \d+:\d\d" + detail, bars[-1][1]), bars[-1]


@pytest.mark.parametrize("command", ["quantize", "eval"])
def test_progress_elsewhere_is_plain_lines(tmp_path, command):
    arguments, verb, rate, detail = progress_commands(tmp_path)[command]
    result = succeeds(*arguments)
    assert isinstance(json.loads(result.stdout), dict)
    assert "\r" not in result.stderr and "\x1b" not in result.stderr
    lines = re.findall(
        rf"^({verb} (\d+)%.*, {rate}, (?:\d+:\d\d left|took \d+:\d\d){detail})$",
        result.stderr, re.MULTILINE)
    assert 2 <= len(lines) <= 10 and lines[-1][1] == "100"
