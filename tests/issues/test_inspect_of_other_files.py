"""`nibble inspect config.json` said "header of 7165896756295633531 bytes exceeds the limit": any file
was taken for safetensors, whatever it was."""

import io
import pickle
import struct
import zipfile

import pytest

from cli_tools import CORRUPT, NOT_FOUND, STORYTELLER, Model, fails


def zipped_checkpoint():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    return file.getvalue()


FILES = {
    "list.json": (b"[1, 2, 3, 4]", "a JSON file"),
    "model.safetensors.index.json": (b'{"weight_map": {}}', "the index of a model"),
    "pytorch_model.bin": (zipped_checkpoint(), "PyTorch's pickle format"),
    "old.pt": (pickle.dumps({"a": list(range(100))}, protocol=2), "PyTorch's pickle format"),
    "pointer.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                            "git lfs pull"),
    "page.safetensors": (b"<!DOCTYPE html>\n<html></html>", "a web page"),
    "notes.txt": (b"Once upon a time there was a king.", "a text file"),
}


@pytest.mark.parametrize("name,meaning", [
    ("config.json", "the config.json of a model; give the folder that it is in"),
    ("tokenizer.json", "tokenizer; give the folder that it is in")])
def test_files_of_a_model(name, meaning):
    fails(CORRUPT, name, "not a safetensors file", meaning,
          arguments=["inspect", STORYTELLER / name])


@pytest.mark.parametrize("command", [
    ["generate", "FILE", "--prompt", "hi"], ["eval", "ppl", "FILE", "--text", "README.md"],
    ["quantize", "FILE", "OUTPUT", "--scheme", "w8a8_int8"], ["serve", "FILE", "--port", 0]])
def test_commands_that_need_the_folder_say_so(tmp_path, command):
    file = STORYTELLER / "config.json"
    places = {"FILE": file, "OUTPUT": tmp_path / "output"}
    fails(NOT_FOUND, f"{file} is no folder; give the folder",
          arguments=[places.get(word, word) for word in command])


@pytest.mark.parametrize("name", FILES)
def test_other_files(tmp_path, name):
    content, meaning = FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    fails(CORRUPT, name, "not a safetensors file", meaning, arguments=["inspect", path])


def test_a_gguf_file_without_a_model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    fails(CORRUPT, "model.gguf", "general.architecture", arguments=["inspect", path])


def test_a_pointer_in_place_of_the_weights(tmp_path):
    model = Model(tmp_path / "model")
    model.weights.write_bytes(FILES["pointer.safetensors"][0])
    for command in (["generate", model, "--prompt", "hi"], ["inspect", model],
                    ["quantize", model, tmp_path / "output", "--scheme", "w8a8_int8"]):
        fails(CORRUPT, "model.safetensors", "git lfs pull", arguments=command)
