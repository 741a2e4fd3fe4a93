"""`quantize` refused a text that is too short, and shares and divergences that cannot be reached, after the
transforms were made, and left these (4 bytes a weight) and an empty DST.partial."""

import os

import pytest
from cli_tools import INVALID, ROOT, STORYTELLER, UNSUPPORTED, fails, nibble
from test_kimi import make

TEXT = ROOT / "tests/data/text/the_black_cat.txt"
SHORT = ("--calibrate", TEXT, "--calibration-windows", "2", "--calibration-length", "64")
LONG = ("--calibrate", TEXT, "--calibration-windows", "4", "--calibration-length", "200")
BLOCKS = ("--scheme", "w4ax", "--block", "32")


def refused(code, out, *flags, words=(), model=STORYTELLER):
    fails(code, *words, arguments=("quantize", model, out, *flags))
    assert not [name for name in os.listdir(out.parent) if name.startswith(out.name)]


@pytest.mark.parametrize("flags", [("--scheme", "w4a8"), ("--scheme", "w4a8", "--method", "smooth"),
                                   ("--scheme", "w4a8", "--method", "rotate,gptq"), BLOCKS])
def test_too_few_tokens(tmp_path, flags):
    refused(INVALID, tmp_path / "out", *flags, *SHORT, words=(
        "128 tokens in windows of 64 say too little", "at least 192 are needed",
        "--calibration-windows"))


def test_they_are_counted_before_the_transforms(tmp_path):
    said = nibble("quantize", STORYTELLER, tmp_path / "out", "--scheme", "w4a8", "--method", "smooth", *SHORT)
    assert "say too little" in said.stderr and "smooth into" not in said.stderr


@pytest.mark.parametrize("flags, words", [
    (("--a8-share", "0.0001"), ("--a8-share 0.0001", "cannot be reached")),
    (("--max-kld", "0.0001", "--measure-tokens", "300"), ("--max-kld 0.0001", "already")),
])
def test_blocks_that_cannot_be_chosen(tmp_path, flags, words):
    refused(INVALID, tmp_path / "out", *BLOCKS, *LONG, *flags, words=words)


def test_a_method_that_a_model_cannot_have(tmp_path):
    model = make(tmp_path / "kimi", "--dtype", "bf16")
    refused(UNSUPPORTED, tmp_path / "out", "--scheme", "w4a8", "--method", "permute,rotate,gptq", *SHORT,
            words=("rotate",), model=model)
