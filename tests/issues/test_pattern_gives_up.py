"""A tokenizer's regular expression that hit a limit of PCRE2 left wrong tokens and a warning."""

import json
import subprocess

import pytest

from cli_tools import BINARY, INVALID, Model, fails, succeeds
from test_openai import Server

# The steps of the first alternative double with every "a" that has no "b" after it.
PATTERN = "(?:a+)+b|."
HARD = "a" * 40
PLACE = ("tokenizer.json: pre_tokenizer.pretokenizers[0]: field pattern", "match limit", "near byte")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = Model(tmp_path_factory.mktemp("pattern") / "model")
    tokenizer = json.loads((folder.folder / "tokenizer.json").read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    folder.write_json("tokenizer.json", tokenizer)
    return folder


def test_commands_say_so(model):
    flags = ["--max-tokens", "1"]
    succeeds("generate", model, "--prompt", "aab and so on", *flags)
    fails(INVALID, *PLACE, "byte 4 ", arguments=["generate", model, "--prompt", "xaab" + HARD,
                                                 *flags])
    text = model.folder / "text.txt"
    text.write_text(HARD)
    fails(INVALID, *PLACE, str(text), arguments=["eval", "ppl", model, "--text", text,
                                                 "--window", "8"])
    chat = subprocess.run([BINARY, "chat", str(model)], input=HARD + "\n", text=True,
                          capture_output=True, timeout=120)
    assert chat.returncode == INVALID and all(word in chat.stderr for word in PLACE)


def test_the_server_refuses_the_text_and_answers_others(model):
    server = Server(model=model)
    try:
        chat = {"messages": [{"role": "user", "content": HARD}]}
        for path, body, param in [("/v1/completions", {"prompt": HARD}, "prompt"),
                                  ("/v1/completions", {"prompt": ["x", HARD]}, "prompt"),
                                  ("/v1/chat/completions", chat, "messages"),
                                  ("/tokenize", {"prompt": HARD}, "prompt"),
                                  ("/tokenize", chat, "messages")]:
            status, answer = server.post(path, json.dumps(body))
            assert status == 400, answer
            assert answer["error"]["param"] == param
            for word in PLACE:
                assert word in answer["error"]["message"]
        status, answer = server.post("/tokenize", json.dumps({"prompt": "aab"}))
        assert status == 200 and answer["count"] == 3
    finally:
        assert server.stop() == 0
