"""A file of a model that was a FIFO hung every command until somebody wrote to it, and a tokenizer
that was one was passed over; a link to /dev/zero, a socket or a folder was not called what it is."""

import os
import socket

import pytest

from cli_tools import INVALID, Model, fails, nibble, succeeds

TIMEOUT = 20  # seconds; each command takes well under one
RUNNING = ("generate", "chat", "eval", "serve", "bench")
EVERY = (*RUNNING, "quantize", "verify", "inspect")
TEXT = ("generate", "chat", "eval", "serve", "quantize", "verify")  # what reads tokenizers


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # addresses of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def make_link_to_device(path):
    path.symlink_to("/dev/zero")


def make_folder(path):
    path.mkdir()


KINDS = {"a pipe": make_fifo, "a socket": make_socket, "a device": make_link_to_device,
         "a folder": make_folder}


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def commands(model):
    parent = model.folder.parent
    (parent / "text.txt").write_text("Once upon a time there was a king.")
    return {
        "generate": ["generate", model, "--prompt", "hi", "--max-tokens", 2],
        "chat": ["chat", model],
        "eval": ["eval", "ppl", model, "--text", parent / "text.txt", "--window", 16],
        "serve": ["serve", model, "--port", 0],
        "bench": ["bench", "offline", model, "--input-len", 4, "--output-len", 2],
        "quantize": ["quantize", model, parent / "output", "--scheme", "w4a16_g32"],
        "verify": ["verify", model, model],
        "inspect": ["inspect", model],
    }


def refused(model, path, kind, names):
    for name in names:
        fails(INVALID, str(path), f"is {kind}", arguments=commands(model)[name], timeout=TIMEOUT)
        assert not (model.folder.parent / "output").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file,names", [
    ("model.safetensors", EVERY), ("config.json", EVERY), ("model.safetensors.index.json", EVERY),
    ("generation_config.json", (*RUNNING, "quantize", "verify")), ("tokenizer.json", TEXT),
    ("tokenizer_config.json", TEXT), ("chat_template.jinja", ("chat", "quantize", "verify"))])
def test_files_of_a_model(model, kind, file, names):
    path = model.folder / file
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    if kind == "a folder":  # others may lie in a model's folder; nobody copies them
        needed = file in ("model.safetensors", "config.json", "model.safetensors.index.json")
        names = [name for name in names if needed or name not in ("quantize", "verify")]
    refused(model, path, kind, names)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard(model, kind):
    shard = model.folder / model.shard()[1]
    shard.unlink()
    KINDS[kind](shard)
    refused(model, shard, kind, EVERY)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a folder"])
def test_the_path_itself(model, kind):
    path = model.folder.parent / "thing"
    KINDS[kind](path)
    fails(INVALID, f"{path}: is {kind}", arguments=["inspect", path], timeout=TIMEOUT)
    for name, arguments in commands(path_as_model(model, path)).items():
        result = nibble(*arguments, timeout=TIMEOUT)
        assert result.returncode in (2, 3) and str(path) in result.stderr, (name, result.stderr)


def path_as_model(model, path):
    class Path:
        folder = model.folder

        def __str__(self):
            return str(path)

    return Path()


def test_links_to_regular_files_are_followed(model):
    store = model.folder.parent / "blobs"
    store.mkdir()
    for file in list(model.folder.iterdir()):
        file.rename(store / file.name)
        file.symlink_to(os.path.relpath(store / file.name, model.folder))
    for name in ("generate", "eval", "quantize", "inspect", "bench"):
        succeeds(*commands(model)[name])


def test_texts_from_pipes_are_refused_and_redirected_files_are_not(model):
    text = model.folder.parent / "text.txt"
    arguments = commands(model)["eval"]
    arguments[arguments.index("--text") + 1] = "/dev/stdin"
    read, write = os.pipe()
    os.close(write)
    fails(INVALID, "/dev/stdin: is a pipe", "save its content", arguments=arguments,
          timeout=TIMEOUT, stdin=read)
    os.close(read)
    with text.open() as opened:
        succeeds(*arguments, stdin=opened)
