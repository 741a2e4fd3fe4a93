"""Added tokens that contradict the vocabulary or each other were taken in silence."""

import json

import pytest

from cli_tools import CORRUPT, Model, fails, succeeds


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def lists_of(model):
    tokenizer = json.loads((model.folder / "tokenizer.json").read_text())
    return tokenizer, tokenizer["model"]["vocab"], tokenizer["added_tokens"]


def command(model):
    return ["generate", model, "--prompt", "Once", "--max-tokens", "1"]


def test_an_id_that_another_piece_has(model):
    tokenizer, vocab, added = lists_of(model)
    piece = next(piece for piece, number in vocab.items() if number == 300)
    added.append({"id": 300, "content": "<|mine|>", "special": True})
    model.write_json("tokenizer.json", tokenizer)
    fails(CORRUPT, f"tokenizer.json: added_tokens[{len(added) - 1}]: ", "'<|mine|>'", "300",
          f"'{piece}'", "release", arguments=command(model))


def test_a_piece_that_has_another_id(model):
    tokenizer, vocab, added = lists_of(model)
    piece = next(piece for piece, number in vocab.items() if number == 300)
    added.append({"id": 4096, "content": piece, "special": True})
    model.write_json("tokenizer.json", tokenizer)
    fails(CORRUPT, "tokenizer.json", f"'{piece}'", "4096", "300", arguments=command(model))


@pytest.mark.parametrize("number, content", [("300", "<|mine|>"), ("0", "<|mine|>"),
                                             ("4096", "<|end_of_text|>")])
def test_tokenizer_config_contradicts_tokenizer_json(model, number, content):
    model.edit_json("tokenizer_config.json", added_tokens_decoder={
        number: {"content": content, "special": True}})
    fails(CORRUPT, "tokenizer_config.json: field added_tokens_decoder", f"'{content}'", number,
          arguments=command(model))


def test_the_same_in_all_lists_is_what_real_files_have(model):
    tokenizer, vocab, added = lists_of(model)
    for token in added:
        vocab[token["content"]] = token["id"]
    model.write_json("tokenizer.json", tokenizer)
    model.edit_json("tokenizer_config.json", added_tokens_decoder={
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in added})
    succeeds(*command(model))
