"""nibble_kv.json of another model of the same shape was used without a word, and beside latent attention one
was believed that nothing reads; quantize --calibrate-kv found out that latents need none when all was
done. Numbers near the end of F32 ended in logits that are none; refusals did not always say what to do."""

import json
import shutil

import pytest
from cli_tools import (CORRUPT, ROOT, STORYTELLER, UNSUPPORTED, fails, nibble, succeeds)
from test_kimi import make

TEXT = ROOT / "tests/data/text/the_black_cat.txt"
NAME = "nibble_kv.json"
RUN = ("--prompt", "Once", "--max-tokens", "3", "--device", "cpu")
OTHER = "field weights_xxh64"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv") / "model"
    shutil.copytree(STORYTELLER, folder)
    succeeds("calibrate-kv", folder, "--calibrate", TEXT, "--calibration-windows", "3",
             "--calibration-length", "200")
    return folder


@pytest.fixture
def model(calibrated, tmp_path):
    return shutil.copytree(calibrated, tmp_path / "model")


def edit(folder, change):
    sidecar = json.loads((folder / NAME).read_text())
    change(sidecar)
    (folder / NAME).write_text(json.dumps(sidecar))


@pytest.mark.parametrize("kv", ["int4", "int4_page", "int4_static"])
def test_other_weights_of_the_same_shape_are_warned_of(calibrated, tmp_path, kv):
    said = succeeds("generate", calibrated, *RUN, "--kv-cache-dtype", kv).stderr
    assert OTHER not in said
    other = tmp_path / "other"
    succeeds("quantize", STORYTELLER, other, "--scheme", "w4a16_g32")
    shutil.copy(calibrated / NAME, other)
    said = succeeds("generate", other, *RUN, "--kv-cache-dtype", kv).stderr
    assert said.count(f"{NAME}: {OTHER}") == 1 and "nibble calibrate-kv" in said
    edit(other, lambda sidecar: sidecar.pop("weights_xxh64"))  # a file of before there was the field
    assert OTHER not in succeeds("generate", other, *RUN, "--kv-cache-dtype", kv).stderr


@pytest.mark.parametrize("field, value, words", [
    ("nibble_kv", "1", "expected an integer, got a string"),
    ("kv_heads", 2**63, "9223372036854775808, which is too large"),
    ("kv_heads", None, "is missing"), ("layers", {}, "field layers"), ("weights_xxh64", 7, OTHER[6:]),
])
def test_every_refusal_says_what_to_do(model, field, value, words):
    edit(model, lambda sidecar: sidecar.update({field: value}))
    fails(CORRUPT, NAME, words, "calibrate-kv, or remove it",
          arguments=("generate", model, *RUN, "--kv-cache-dtype", "int4"))


@pytest.mark.parametrize("text", ["[]", "null", "", '{"nibble_kv": 1, "nibble_kv": 1}', '{"nibble_kv": 1'])
def test_texts_that_are_no_sidecar(model, text):
    (model / NAME).write_text(text)
    fails(CORRUPT, NAME, "calibrate-kv, or remove it",
          arguments=("generate", model, *RUN, "--kv-cache-dtype", "int4"))
    succeeds("generate", model, *RUN, "--kv-cache-dtype", "int8")


@pytest.mark.parametrize("kv, path", [("int4", ("mean",)), ("int4_static", ("ranges", "step")),
                                      ("int4_static", ("ranges", "mean"))])
def test_numbers_that_no_key_has(model, kv, path):
    def change(sidecar):
        half = sidecar["layers"][0]["keys"]
        half["form"] = "centred+turned"
        for member in path[:-1]:
            half = half[member]
        half[path[-1]] = [3e38] * 128
    edit(model, change)
    fails(CORRUPT, f"layers[0]: keys: {': field '.join(path) if len(path) > 1 else 'field ' + path[0]}[0]",
          "up to 1e+09", arguments=("generate", model, *RUN, "--kv-cache-dtype", kv))


def test_absent_members_may_be_null(model):
    def change(sidecar):
        for layer in sidecar["layers"]:
            layer["keys"].update(page_form=None, ranges=None)
    edit(model, change)
    succeeds("generate", model, *RUN, "--kv-cache-dtype", "int4_page")


def half_of(width):
    return {"form": "centred", "mean": [1.0] * width,
            "ranges": {"form": "plain", "mean": None, "step": [1.0] * width}}


@pytest.mark.parametrize("fits", [True, False])
def test_latent_attention_reads_none_and_says_so(tmp_path, fits):
    folder = make(tmp_path)
    plain = succeeds("generate", folder, *RUN, "--kv-cache-dtype", "int4")
    config = json.loads((folder / "config.json").read_text())["text_config"]
    heads = config["num_key_value_heads"]
    width = config["hidden_size"] // config["num_attention_heads"] if fits else 6
    layer = {"keys": half_of(heads * width), "values": half_of(heads * width)}
    (folder / NAME).write_text(json.dumps({
        "nibble_kv": 1, "kv_heads": heads, "head_dim": width, "calibration": None,
        "layers": [layer] * config["num_hidden_layers"]}))
    result = succeeds("generate", folder, *RUN, "--kv-cache-dtype", "int4")
    assert f"{NAME}: is not read" in result.stderr and "decides" not in result.stderr
    assert result.stdout == plain.stdout


def test_latents_are_not_calibrated_and_that_is_said_before_the_work(tmp_path):
    folder = make(tmp_path, "--dtype", "bf16")
    words = ("field kv_lora_rank", "nothing to calibrate", "--kv-cache-dtype")
    fails(UNSUPPORTED, *words, arguments=("calibrate-kv", folder, "--calibrate", TEXT))
    out = tmp_path / "out"
    command = ("quantize", folder, out, "--scheme", "w4a8", "--calibrate", TEXT,
               "--calibration-windows", "2", "--calibration-length", "64")
    fails(UNSUPPORTED, *words, arguments=(*command, "--calibrate-kv"))
    assert not out.exists() and not (folder / NAME).exists()
    assert nibble(*command).returncode == 0
