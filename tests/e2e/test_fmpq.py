"""Models whose activations have blocks of 4 and 8 bits: nibble_fmpq.json beside INT4 weights."""

import json
import pathlib
import random
import shutil
import sys

import pytest

from cli_tools import CORRUPT, INVALID, NOT_FOUND, ROOT, STORYTELLER, UNSUPPORTED, fails, json_of, succeeds

sys.path.insert(0, str(ROOT / "tests/interop"))
import fmpq_files  # noqa: E402  (the independent reader and writer)

TEXT = ROOT / "tests/data/text/the_black_cat.txt"
BLOCK = 32


def sites_of(model, eights):
    """Every input of every layer; `eights(blocks)` says which blocks have 8 bits."""
    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * (config.get("head_dim") or hidden // config["num_attention_heads"])
    sites = []
    for layer in range(config["num_hidden_layers"]):
        for names, k, split in ((("q_proj", "k_proj", "v_proj"), hidden, False), (("o_proj",), heads, True),
                                (("gate_proj", "up_proj"), hidden, False), (("down_proj",), width, True)):
            part = "mlp" if names[0] in ("gate_proj", "down_proj") else "self_attn"
            sites.append({"modules": [f"model.layers.{layer}.{part}.{name}" for name in names], "inputs": k,
                          "clip": 0.9, "split": split, "bits": eights(k // BLOCK), "columns": []})
    return sites


def sidecar_of(model, eights):
    return {"nibble_fmpq": 1, "form": "block", "block": BLOCK, "permute": "none", "parts": 1,
            "calibration": None, "kv": None, "sites": sites_of(model, eights)}


def some_eights(blocks):
    return [8 if block % 4 == 1 else 4 for block in range(blocks)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """INT4 weights in groups of 32, and a sidecar that this test wrote."""
    folder = tmp_path_factory.mktemp("fmpq") / "model"
    succeeds("quantize", STORYTELLER, folder, "--scheme", "w4a16_g32")
    shutil.copytree(folder, folder.parent / "weights")
    fmpq_files.write(folder, sidecar_of(folder, some_eights))
    return folder


@pytest.fixture
def model(made, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(made, folder)
    return folder


def divergence(model, *flags):
    return json_of("eval", "kld", STORYTELLER, model, "--text", TEXT, "--device", "cpu", *flags, "--json")["kld"]


def edit(folder, change):
    path = folder / fmpq_files.NAME
    sidecar = json.loads(path.read_text())
    change(sidecar)
    path.write_text(json.dumps(sidecar))


def refused(code, model, *words):
    message = fails(code, *words, arguments=["generate", model, "--prompt", "Once"])
    assert "--ignore-fmpq" in message
    succeeds("generate", model, "--prompt", "Once", "--max-tokens", "2", "--ignore-fmpq")


def test_the_reader_reads_what_was_written(made):
    sidecar = fmpq_files.read(made)
    assert sidecar["sites"][3]["bits"] == some_eights(sidecar["sites"][3]["inputs"] // BLOCK)


def test_it_runs_and_says_so(model):
    result = succeeds("generate", model, "--prompt", "Once upon a time", "--max-tokens", "8")
    assert "blocks of 32" in result.stderr
    assert "w4ax_b32" in result.stderr
    ignored = succeeds("generate", model, "--prompt", "Once upon a time", "--max-tokens", "8", "--ignore-fmpq")
    assert "w4a16_g32" in ignored.stderr


def test_bits_decide_what_is_lost(model):
    weights = model.parent / "plain"
    shutil.copytree(pathlib.Path(model), weights)
    plain = divergence(weights, "--ignore-fmpq")
    assert plain == divergence(json_free(weights))
    mixed = divergence(model)
    fmpq_files.write(model, sidecar_of(model, lambda blocks: [8] * blocks))
    eight = divergence(model)
    fmpq_files.write(model, sidecar_of(model, lambda blocks: [4] * blocks))
    four = divergence(model)
    assert plain < 1.1 * eight and eight < mixed < four, (plain, eight, mixed, four)


def json_free(folder):
    """The folder without sidecar, as other programs see it."""
    (folder / fmpq_files.NAME).unlink()
    config = json.loads((folder / "config.json").read_text())
    del config[fmpq_files.FIELD]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_all_instruction_sets_give_the_same_bits(model):
    expected = None
    for isa in ("avx2", "avx512", "amx"):
        if isa in available():
            result = json_of("eval", "ppl", model, "--text", TEXT, "--device", "cpu", "--isa", isa, "--json")
            expected = expected or result["perplexity"]
            assert result["perplexity"] == expected, isa


def available():
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    return [isa for isa, flag in (("avx2", " avx2 "), ("avx512", " avx512_vnni "), ("amx", " amx_int8 "))
            if flag in flags]


def gathered(folder):
    """Columns of o_proj of the first layer in another order, which the sidecar undoes."""
    sidecar = fmpq_files.read(folder)
    site = sidecar["sites"][1]
    columns = list(range(site["inputs"]))
    random.Random(1).shuffle(columns)
    site["columns"] = columns
    sidecar["permute"] = "gather"
    fmpq_files.write(folder, sidecar)
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "nibble_fmpq_gather",
                                      "dynamic": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_gathered_weights_need_their_sidecar(model):
    gathered(model)
    assert "gathered" in succeeds("generate", model, "--prompt", "Once", "--max-tokens", "2").stderr
    both = succeeds("generate", model, "--prompt", "Once", "--max-tokens", "2", "--ignore-fmpq")
    assert "but for the order of inputs" in both.stderr
    fails(UNSUPPORTED, "inputs are gathered",
          arguments=["quantize", model, model.parent / "again", "--scheme", "w4a8"])
    (model / fmpq_files.NAME).unlink()
    fails(NOT_FOUND, fmpq_files.NAME, arguments=["generate", model, "--prompt", "Once", "--ignore-fmpq"])


def test_a_missing_sidecar_is_refused(model):
    (model / fmpq_files.TENSORS).unlink()
    refused(NOT_FOUND, model, "nibble_fmpq.safetensors: is missing")
    (model / fmpq_files.NAME).unlink()
    refused(NOT_FOUND, model, "nibble_fmpq.json: is missing, which config.json announces")


def test_another_version_is_refused(model):
    edit(model, lambda sidecar: sidecar.update(nibble_fmpq=4))
    refused(UNSUPPORTED, model, "field nibble_fmpq: is version 4, not 1 to 3")


def test_other_weights_are_refused(model):
    shutil.rmtree(model)
    succeeds("quantize", STORYTELLER, model, "--scheme", "w4a16_g32", "--scale-rule", "absmax")
    other = model.parent / "other"
    shutil.copytree(model, other)
    fmpq_files.write(other, sidecar_of(other, some_eights))
    edit(other, lambda sidecar: sidecar.update(weights_xxh64="0123456789abcdef"))
    refused(CORRUPT, other, "belongs to other weights")
    with pytest.raises(ValueError, match="other weights"):
        fmpq_files.read(other)


def test_an_index_that_is_no_permutation_is_refused(model):
    sidecar = fmpq_files.read(model)
    sidecar["permute"] = "gather"
    sidecar["sites"][0]["columns"] = [0] * sidecar["sites"][0]["inputs"]
    fmpq_files.write(model, sidecar)
    refused(CORRUPT, model, "sites[0]", "field columns: is no permutation", "entry 1 is 0")
    with pytest.raises(ValueError, match="no permutation"):
        fmpq_files.read(model)


def test_a_map_of_another_length_is_refused(model):
    sidecar = fmpq_files.read(model)
    sidecar["sites"][2]["bits"].append(4)
    fmpq_files.write(model, sidecar)
    refused(CORRUPT, model, "sites.2.bits", "field bits: is U8")


def test_inputs_that_are_no_multiple_of_the_block_are_refused(model):
    edit(model, lambda sidecar: sidecar["sites"][0].update(inputs=250))
    refused(CORRUPT, model, "sites[0]: field inputs: 250 is no multiple of the block 32")


def test_another_block_than_the_weights_groups_is_refused(model):
    sidecar = fmpq_files.read(model)
    sidecar["block"] = 64
    for site in sidecar["sites"]:
        site["bits"] = [4] * (site["inputs"] // 64)
    fmpq_files.write(model, sidecar)
    refused(CORRUPT, model, "field block: 64 beside weights in groups of 32")


def test_a_config_of_another_type_is_refused(model):
    config = json.loads((model / "config.json").read_text())
    config[fmpq_files.FIELD] = 1
    (model / "config.json").write_text(json.dumps(config))
    fails(CORRUPT, "config.json: field nibble_fmpq", arguments=["generate", model, "--prompt", "Once"])


def test_quantize_without_text_is_refused(tmp_path):
    fails(INVALID, "w4ax", "--calibrate TEXT",
          arguments=["quantize", STORYTELLER, tmp_path / "out", "--scheme", "w4ax"])


def test_a_copy_in_another_scheme_has_no_sidecar(model):
    out = model.parent / "again"
    succeeds("quantize", model, out, "--scheme", "w8a16_channel")
    assert not (out / fmpq_files.NAME).exists() and not (out / fmpq_files.TENSORS).exists()
    assert fmpq_files.FIELD not in json.loads((out / "config.json").read_text())
