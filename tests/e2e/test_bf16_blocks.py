"""Models whose activations have blocks of 8 bits and blocks in BF16."""

import json
import pathlib
import shutil
import struct
import sys

import pytest

from cli_tools import CORRUPT, INVALID, NOT_FOUND, ROOT, STORYTELLER, fails, json_of, succeeds

sys.path.insert(0, str(ROOT / "tests/interop"))
import fmpq_files  # noqa: E402  (the independent reader and writer)

TEXT = ROOT / "tests/data/text/the_black_cat.txt"
CALIBRATION = ["--calibrate", TEXT, "--calibration-windows", "4", "--calibration-length", "200"]
SCHEME = ["--scheme", "w4a8_bf16", "--block", "32"]
OUTLIERS = {5: 5, 400: 6}  # channels in front of down, and so many powers of two


def quantized(out, *more, source=STORYTELLER):
    return json_of("quantize", source, out, *SCHEME, *CALIBRATION, *more)


def with_outliers(folder):
    """The storyteller with a few large channels in front of down, which makes up for them: the same function."""
    shutil.copytree(STORYTELLER, folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        (size,) = struct.unpack_from("<Q", data)
        for name, entry in json.loads(data[8:8 + size]).items():
            if not name.endswith(("up_proj.weight", "down_proj.weight")):
                continue
            (rows, columns), begin = entry["shape"], 8 + size + entry["data_offsets"][0]
            for channel, power in OUTLIERS.items():
                up = name.endswith("up_proj.weight")
                for place in range(channel * columns, (channel + 1) * columns) if up else \
                        range(channel, rows * columns, columns):
                    (bits,) = struct.unpack_from("<H", data, begin + 2 * place)
                    if bits & 0x7fff:  # BF16, its exponent from bit 7 on
                        struct.pack_into("<H", data, begin + 2 * place, bits + (power if up else -power) * 128)
        path.write_bytes(data)
    return folder


def perplexity(folder, *more):
    return json_of("eval", "ppl", folder, "--text", TEXT, "--window", "64", "--device", "cpu", *more)["perplexity"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16_blocks") / "model"
    quantized(folder, "--outlier-share", "0.1")
    return folder


@pytest.fixture
def model(made, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(made, folder)
    return folder


def test_the_share_decides_which_blocks_are_in_bf16(made, tmp_path):
    recipe = json.loads((made / "quantization_recipe.json").read_text())
    chosen = recipe["calibration"]["blocks"]
    assert recipe["scheme"] == "w4a8_bf16" and recipe["calibration"]["method"] == "permute,gptq"
    assert chosen["permute"] == "fold" and chosen["outlier_share"] == 0.1
    sidecar = fmpq_files.read(made)  # by the page in docs alone
    assert sidecar["nibble_fmpq"] == 3 and sidecar["form"] == "bf16" and sidecar["permute"] == "fold"
    share = fmpq_files.share_of_bits(made, sidecar, 16)
    assert abs(share - chosen["bf16_share"]) < 1e-9 and abs(share - sidecar["bf16_share"]) < 1e-9
    assert 0.08 < share <= 0.1
    assert sum(site["bits"].count(16) for site in sidecar["sites"]) == chosen["blocks_in_bf16"]
    again = tmp_path / "again"
    succeeds("quantize", STORYTELLER, again, "--recipe", made / "quantization_recipe.json", "--calibrate", TEXT,
             "--threads", "1")
    for name in ("model.safetensors", fmpq_files.NAME, fmpq_files.TENSORS):
        assert (made / name).read_bytes() == (again / name).read_bytes(), name


def test_it_runs_and_says_so(model):
    said = succeeds("generate", model, "--prompt", "Once upon a time", "--max-tokens", "8").stderr
    assert "% of their multiply-adds with BF16 activations" in said and "w4a8_bf16" in said
    ignored = succeeds("generate", model, "--prompt", "Once upon a time", "--max-tokens", "8", "--ignore-fmpq").stderr
    assert "w4a16_channel" in ignored


def test_all_instruction_sets_give_the_same_bits(model):
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    isas = [isa for isa, flag in (("avx2", " avx2 "), ("avx512", " avx512_vnni "), ("amx", " amx_int8 "))
            if flag in flags]
    assert len({perplexity(model, "--isa", isa) for isa in isas}) == 1


def test_blocks_in_bf16_take_outliers_their_harm(tmp_path):
    source = with_outliers(tmp_path / "outliers")
    assert abs(perplexity(source) / perplexity(STORYTELLER) - 1) < 1e-3
    lost = {}
    for share in ("0", "0.1"):
        quantized(tmp_path / share, "--outlier-share", share, source=source)
        lost[share] = perplexity(tmp_path / share) / perplexity(tmp_path / share, "--ignore-fmpq")
    assert lost["0.1"] - 1 < 0.5 * (lost["0"] - 1), lost


def test_a_gathered_order_and_a_divergence(tmp_path):
    report = quantized(tmp_path / "gathered", "--permute", "gather", "--outlier-share", "0.2")["blocks"]
    assert report["permute"] == "gather" and 0.18 < report["bf16_share"] <= 0.2
    assert any(site["columns"] for site in fmpq_files.read(tmp_path / "gathered")["sites"])
    assert perplexity(tmp_path / "gathered") < 1.2 * perplexity(STORYTELLER)
    loose = quantized(tmp_path / "loose", "--max-kld", "10", "--measure-tokens", "500")["blocks"]
    assert loose["bf16_share"] == 0 and loose["max_kld"] == 10


def refused(code, model, *words):
    message = fails(code, *words, arguments=["generate", model, "--prompt", "Once"])
    assert "--ignore-fmpq" in message
    succeeds("generate", model, "--prompt", "Once", "--max-tokens", "2", "--ignore-fmpq")


def changed(model, change):
    sidecar = fmpq_files.read(model)
    change(sidecar)
    fmpq_files.write(model, sidecar)
    return model


def test_a_map_that_cannot_be_is_refused(model):
    def first_bits(bits):
        return lambda sidecar: sidecar["sites"][2].update(bits=bits(sidecar["sites"][2]["bits"]))

    good = model.parent / "good"
    shutil.copytree(model, good)
    refused(CORRUPT, changed(model, first_bits(lambda bits: [4, *bits[1:]])),
            "sites[2]", "field bits: block 0 has 4, which is neither 8 nor 16")
    shutil.rmtree(model)
    shutil.copytree(good, model)
    refused(CORRUPT, changed(model, first_bits(lambda bits: [*bits, 8])), "sites.2.bits", "field bits: is U8")
    shutil.rmtree(model)
    shutil.copytree(good, model)
    refused(CORRUPT, changed(model, lambda sidecar: sidecar.update(form="class")),
            "which is neither 4 nor 8")
    (good / fmpq_files.NAME).unlink()
    refused(NOT_FOUND, good, "nibble_fmpq.json: is missing, which config.json announces")


def test_weights_in_groups_are_refused(tmp_path):
    model = tmp_path / "model"
    succeeds("quantize", STORYTELLER, model, "--scheme", "w4a16_g32")
    down = "model.layers.0.mlp.down_proj"
    fmpq_files.write(model, {"nibble_fmpq": 3, "form": "bf16", "block": 32, "permute": "none", "parts": 1,
                             "calibration": None, "kv": None, "sites": [
                                 {"modules": [down], "inputs": 768, "clip": 1.0, "split": True, "bits": [8] * 24,
                                  "columns": []}]})
    refused(CORRUPT, model, down, "one scale for each output channel, not groups of 32")


def test_refusals_say_what_to_do(tmp_path):
    out = tmp_path / "out"
    fails(INVALID, "w4a8_bf16", "--calibrate TEXT", arguments=["quantize", STORYTELLER, out, *SCHEME])
    fails(INVALID, "--outlier-share", "blocks of two precisions",
          arguments=["quantize", STORYTELLER, out, "--scheme", "w4a8", "--outlier-share", "0.1"])
    fails(INVALID, "--outlier-share 0.0001", "cannot be reached", "BF16",
          arguments=["quantize", STORYTELLER, out, *SCHEME, *CALIBRATION, "--outlier-share", "0.0001"])
    fails(INVALID, "--outlier-share and --max-kld",
          arguments=["quantize", STORYTELLER, out, *SCHEME, *CALIBRATION, "--outlier-share", "0.1", "--max-kld", "0.1"])
    assert not out.exists()
