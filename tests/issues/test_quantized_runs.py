"""quantize ended with 0 where generate then refused the result: Quark's words of eight codes with
an input width that is no multiple of eight, and sources that did not run either."""

import random
import shutil

import pytest

from cli_tools import CONFIG, Model, nibble, tiny_tensors, write_safetensors

SCHEMES = ["w8a8_int8", "w8a8_fp8", "w8a8_fp8_expert", "w8a8_fp8_block", "w4a16_g32", "w4a16_g128",
           "w8a16_channel", "w4a16_channel", "w4a16_g32_asym", "w4a16_g128_asym", "w4a8", "w4a8_g64",
           "w4a8_g128", "mxfp4", "mxfp4_fp8"]
WIDTHS = [1, 2, 7, 8, 9, 15, 31, 32, 33, 63, 64, 96, 100, 120, 127, 128, 129, 130]
FORMATS = {"w4a8": ["compressed-tensors"], "w8a8_fp8_block": ["compressed-tensors"]}


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def shape_to(model, hidden, intermediate):
    write_safetensors(model.weights, tiny_tensors(hidden, intermediate))
    model.write_json("config.json", {**CONFIG, "hidden_size": hidden,
                                     "intermediate_size": intermediate})


def outcome(model, scheme, *flags):
    """'refused', 'said' (that it does not run) or 'runs'; anything else is the fault."""
    out = model.folder.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    made = nibble("quantize", model, out, "--scheme", scheme, *flags)
    if made.returncode != 0:
        assert not out.exists()
        assert made.stderr.count("nibble: ") == 1
        return "refused"
    ran = nibble("generate", out, "--prompt", "hi", "--max-tokens", 2, "--temperature", 0)
    said = "does not run it" in made.stdout.splitlines()[-1]
    assert (ran.returncode == 0) != said, f"{made.stdout}\n{ran.stderr}"
    return "said" if said else "runs"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_quantized_runs_or_is_said_not_to(model, scheme):
    generator = random.Random(scheme)
    shapes = [(128, 128)]  # what every group size divides
    for width in WIDTHS:
        other = generator.choice(WIDTHS)
        shapes.append((width, other) if width % 2 else (other, width))
    seen = set()
    for hidden, intermediate in shapes:
        shape_to(model, hidden, intermediate)
        seen.add(outcome(model, scheme, "--ignore", "*.o_proj"))  # its width is 32
        for form in FORMATS.get(scheme, []):
            seen.add(outcome(model, scheme, "--format", form))
    assert seen & {"runs", "said"}, seen


def test_the_widths_of_words_are_refused_with_the_format_that_stores_them(model):
    shape_to(model, 120, 100)
    refused = nibble("quantize", model, model.folder.parent / "out", "--scheme", "w4a8")
    assert refused.returncode != 0 and "--format compressed-tensors" in refused.stderr
    assert outcome(model, "w4a8", "--format", "compressed-tensors") == "runs"
