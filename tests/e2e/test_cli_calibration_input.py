"""Texts that say nothing, models that a method does not apply to, and other bad input of what reads a
text: `quantize --calibrate`, `calibrate-kv` and `sensitivity`."""

import json
import resource
import signal
import subprocess
import time

import pytest

from cli_tools import (
    BINARY, CORRUPT, EXHAUSTED, EXISTS, INVALID, NOT_FOUND, ROOT, STORYTELLER, TINY_TENSORS,
    UNSUPPORTED, Model, fails, succeeds)

TEXT = "it was a dark night and the wind was loud, and the cat sat by the fire. "
OPT = ROOT / "tests/golden/opt/config.json"


@pytest.fixture(name="model")
def make_model(tmp_path):
    model = Model(tmp_path / "model")
    model.write("text.txt", TEXT * 20)
    return model


def readers(model, text, *more):
    """Every command that reads a text for its sums."""
    out = model.folder.parent / "out"
    return {
        "quantize": ["quantize", model, out, "--scheme", "w4a16_g32", "--calibrate", text, *more],
        "rotate": ["quantize", model, out, "--scheme", "w4a16_g32", "--method", "smooth,gptq",
                   "--calibrate", text, *more],
        "budget": ["quantize", model, out, "--budget", "5bpw", "--schemes", "w4a16_g32",
                   "--calibrate", text, *more],
        "sensitivity": ["sensitivity", model, "--schemes", "w4a16_g32", "--measure", 0,
                        "--calibrate", text, *more],
        "calibrate-kv": ["calibrate-kv", model, "--calibrate", text, *more]}


BAD_TEXTS = {
    "empty.txt": (b"", INVALID, ["empty.txt", "is empty"]),
    "zeros.txt": (b"once\0upon", INVALID, ["zeros.txt", "zero bytes"]),
    "lines.jsonl": (b'{"text": "a"}\n\n{"test": "b"}\n', INVALID, ["lines.jsonl", "line 3", "text"]),
    "number.jsonl": (b'{"text": 5}\n', INVALID, ["line 1", "text"]),
    "torn.jsonl": (b'{"text": "a"}\n{"text": "b', CORRUPT, ["torn.jsonl", "line 2"]),
    "none.jsonl": (b"\n\n", INVALID, ["none.jsonl", "is empty"]),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_texts_that_are_none(model, name):
    content, code, words = BAD_TEXTS[name]
    (model.folder / name).write_bytes(content)
    before = sorted(model.folder.iterdir())
    for command in readers(model, model.folder / name).values():
        fails(code, *words, arguments=command)
    assert sorted(model.folder.iterdir()) == before
    assert sorted(path.name for path in model.folder.parent.iterdir()) == ["model"]


def test_a_binary_text_without_zero_bytes(model):
    (model.folder / "binary.txt").write_bytes(bytes(range(128, 256)) * 8)
    for command in readers(model, model.folder / "binary.txt").values():
        fails(INVALID, "binary.txt", "UTF-8", arguments=command)


def test_a_text_that_does_not_exist(model):
    for command in readers(model, model.folder / "nowhere.txt").values():
        fails(NOT_FOUND, "nowhere.txt", arguments=command)


def test_a_short_text_is_refused_or_warned_of(model):
    """The widest matrix has 64 columns."""
    (model.folder / "short.txt").write_text("it was a dark night")
    out = model.folder.parent / "out"
    command = ["quantize", model, out, "--scheme", "w4a16_g32", "--calibrate"]
    fails(INVALID, "short.txt", "64 columns", "at least 16", "256 are better",
          arguments=[*command, model.folder / "short.txt"])
    assert not out.exists()
    text = [model.folder / "text.txt", "--calibration-length", 10, "--calibration-windows"]
    said = succeeds(*command, *text, 2).stderr
    assert "20 tokens are fewer than the 64 columns" in said and "give 256" in said
    assert "columns" not in succeeds(*command, *text, 7, "--force").stderr


def test_a_tokenizer_of_another_model(model):
    model.edit_json("config.json", vocab_size=100)
    dtype, shape, data = TINY_TENSORS["model.embed_tokens.weight"]
    model.write_tensors(embed_tokens=(dtype, [100, shape[1]], data[:100 * shape[1] * 4]))
    for command in readers(model, model.folder / "text.txt").values():
        fails(INVALID, "text.txt", "token id", "100", "another model", arguments=command)
    fails(INVALID, "token id", "100", arguments=[
        "sensitivity", model, "--schemes", "w4a16_g32", "--text", model.folder / "text.txt"])


def test_windows_longer_than_the_context(model):
    for command in readers(model, model.folder / "text.txt", "--calibration-length", 65).values():
        fails(INVALID, "--calibration-length 65", "64", arguments=command)


def limit_files():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk(model):
    """Hidden states, the choice of a budget, a transformed model: none find room."""
    text = model.folder / "text.txt"
    out = model.folder.parent / "out"
    commands = readers(model, text)
    fails(EXHAUSTED, "out.partial", "write", arguments=commands["quantize"], preexec_fn=limit_files)
    assert not out.exists()
    succeeds(*commands["quantize"])
    whole = (out / "model.safetensors").read_bytes()
    fails(EXHAUSTED, "write", arguments=[*commands["quantize"], "--force", "--seed", 1],
          preexec_fn=limit_files)
    assert (out / "model.safetensors").read_bytes() == whole
    fails(EXHAUSTED, "write", arguments=commands["sensitivity"], preexec_fn=limit_files)
    fails(EXHAUSTED, "out.transformed-1", "write", arguments=[*commands["rotate"], "--force"],
          preexec_fn=limit_files)
    succeeds(*commands["rotate"], "--force")
    assert sorted(path.name for path in out.parent.iterdir()) == ["model", "out"]


def test_rotation_needs_norms_of_squares(tmp_path):
    config = json.loads(OPT.read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    succeeds("make-dummy", "--config", tmp_path / "config.json", "--out", tmp_path / "opt")
    fails(UNSUPPORTED, "rotate", "mean", "leave rotate out", arguments=[
        "quantize", tmp_path / "opt", tmp_path / "out", "--scheme", "w4a8", "--method", "rotate"])
    assert not (tmp_path / "out").exists()


def test_rotation_says_that_the_head_is_no_longer_the_embeddings(model):
    said = succeeds("quantize", model, model.folder.parent / "out", "--scheme", "w4a16_g32",
                    "--method", "rotate").stderr
    assert "the head is no longer the embeddings' table" in said
    config = json.loads((model.folder.parent / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_nothing_is_centred_beside_sinks(tmp_path):
    config = json.loads((ROOT / "tests/golden/gpt_oss/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    succeeds("make-dummy", "--config", tmp_path / "config.json", "--out", tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 5)
    said = succeeds("calibrate-kv", tmp_path / "model", "--calibrate", tmp_path / "text.txt",
                    "--form", "centred", "--calibration-length", 32).stderr
    assert "sinks" in said and "nothing is centred" in said
    layers = json.loads((tmp_path / "model/nibble_kv.json").read_text())["layers"]
    assert {layer[half]["form"] for layer in layers for half in ("keys", "values")} == {"plain"}


@pytest.mark.parametrize("change", [["--seed", 1], ["--method", "gptaq"], ["--method", "imatrix"],
                                    ["--calibration-windows", 63], "text"])
def test_other_options_do_not_continue(tmp_path, change):
    """A run that was killed goes on with the same text, method and seed alone."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text((ROOT / "tests/data/text/the_black_cat.txt").read_text())
    command = ["quantize", STORYTELLER, out, "--scheme", "w4a16_g32", "--calibrate", text,
               "--calibration-length", 100]
    journal = tmp_path / "out.partial" / "journal-1-of-1.jsonl"
    with subprocess.Popen([BINARY, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 100
        while time.monotonic() < end and process.poll() is None and (
                not journal.exists() or journal.read_text().count("\n") < 3):
            time.sleep(0.005)
        process.kill()
    assert not out.exists()
    if change == "text":
        text.write_text(text.read_text() + "The end.")
        change = []
    fails(INVALID, "out.partial", "other options", arguments=[*command, *change])
    assert journal.exists()


def test_existing_outputs_are_found_before_any_work(model):
    out = model.folder.parent / "out"
    out.mkdir()
    for name in ("quantize", "rotate", "budget"):
        fails(EXISTS, str(out), "--force", arguments=readers(model, model.folder / "text.txt")[name])
    assert not list(out.iterdir())
