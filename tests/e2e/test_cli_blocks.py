"""`nibble quantize` to schemes whose activations are in blocks of two precisions."""

import json
import os
import pathlib
import sys

import pytest

from cli_tools import INVALID, ROOT, UNSUPPORTED, Model, fails, json_of, succeeds

sys.path.insert(0, str(ROOT / "tests/interop"))
import fmpq_files  # noqa: E402  (the independent reader)

SHARED = pathlib.Path(os.environ.get("NIBBLE_SHARED", ROOT.parent / "shared"))

MODEL = "models/storyteller"
TEXT = "tests/data/text/the_black_cat.txt"
CALIBRATION = ["--calibrate", TEXT, "--calibration-windows", "4", "--calibration-length", "200"]
SCHEME = ["--scheme", "w4ax", "--block", "32"]


def perplexity(folder, *more):
    return json_of("eval", "ppl", folder, "--text", TEXT, "--window", "64", *more)["perplexity"]


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_a_model_says_which_blocks_have_8_bits(tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    printed = succeeds("quantize", MODEL, out, *SCHEME, *CALIBRATION).stdout
    assert "W4A4: 84." in printed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    recipe = json.loads((out / "quantization_recipe.json").read_text())
    assert recipe["scheme"] == "w4ax_b32"
    chosen = recipe["calibration"]["blocks"]
    assert recipe["calibration"]["method"] == "permute,gptq"
    assert chosen["permute"] == "fold" and chosen["a8_share"] == 0.16
    assert 0.84 <= chosen["a4_share"] < 0.86
    sidecar = json.loads((out / "nibble_fmpq.json").read_text())
    assert sidecar["permute"] == "fold" and sidecar["parts"] == 4
    assert abs(sidecar["a4_share"] - chosen["a4_share"]) < 1e-9
    base = perplexity(MODEL)
    assert perplexity(out) < 1.3 * base
    assert perplexity(out, "--ignore-fmpq") < perplexity(out)  # W4A16
    succeeds("quantize", MODEL, again, "--recipe", out / "quantization_recipe.json", "--calibrate",
             TEXT, "--threads", "1")
    assert weights(out) == weights(again)
    for name in ("nibble_fmpq.json", "nibble_fmpq.safetensors"):
        assert (out / name).read_bytes() == (again / name).read_bytes()


def test_gathered_channels_are_another_programs_error(tmp_path):
    out = tmp_path / "out"
    report = json_of("quantize", MODEL, out, *SCHEME, *CALIBRATION, "--permute", "gather",
                     "--a8-share", "0.3")
    assert report["blocks"]["permute"] == "gather"
    assert 0.7 <= report["blocks"]["a4_share"] < 0.72
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["input_activations"]["strategy"] for group in groups.values()] == \
        ["nibble_fmpq_gather"]
    assert perplexity(out) < 1.3 * perplexity(MODEL)


def test_a_divergence_decides_the_share(tmp_path):
    def chosen(name, most):
        return json_of("quantize", MODEL, tmp_path / name, *SCHEME, *CALIBRATION, "--max-kld", most,
                       "--measure-tokens", "500")["blocks"]

    loose = chosen("loose", 10)
    assert loose["a4_share"] == 1
    strict = chosen("strict", 0.8 * loose["kld"])
    assert strict["kld"] <= 0.8 * loose["kld"]
    assert 0 < strict["a4_share"] < 1
    fails(INVALID, "--max-kld 0.001", "already",
          arguments=["quantize", MODEL, tmp_path / "none", *SCHEME, *CALIBRATION, "--max-kld",
                     "0.001", "--measure-tokens", "500"])


def test_refusals_say_what_to_do(tmp_path):
    out = tmp_path / "out"
    fails(INVALID, "--calibrate", arguments=["quantize", MODEL, out, *SCHEME])
    fails(INVALID, "--a8-share 0.0001", "cannot be reached", "0.00",
          arguments=["quantize", MODEL, out, *SCHEME, *CALIBRATION, "--a8-share", "0.0001"])
    fails(INVALID, "--a8-share and --max-kld",
          arguments=["quantize", MODEL, out, *SCHEME, *CALIBRATION, "--a8-share", "0.1",
                     "--max-kld", "0.1"])
    fails(INVALID, "--permute", "blocks",
          arguments=["quantize", MODEL, out, "--scheme", "w4a8", "--permute", "fold"])
    fails(UNSUPPORTED, "--lm-head",
          arguments=["quantize", MODEL, out, *SCHEME, *CALIBRATION, "--lm-head", "w4ax"])
    fails(UNSUPPORTED, "--schemes", "w4ax",
          arguments=["sensitivity", MODEL, "--schemes", "w4ax,w8a16_channel"])
    few = tmp_path / "few.txt"
    few.write_text("Once upon a time there was a cat.")
    fails(INVALID, "tokens", arguments=["quantize", MODEL, out, *SCHEME, "--calibrate", few])
    model = Model(tmp_path / "model")
    fails(UNSUPPORTED, "multiple",
          arguments=["quantize", model.folder, out, "--scheme", "w4ax", *CALIBRATION[:4],
                     "--calibration-length", "60"])
    assert not out.exists()


@pytest.mark.parametrize("family", ["storyteller-oss", "storyteller-moe"])
def test_experts_have_one_order_for_up_and_each_its_own_for_down(tmp_path, family):
    model = SHARED / "data/models" / family
    if not model.exists():
        pytest.skip(f"no {family} in the shared data; set NIBBLE_SHARED to its folder")
    base = perplexity(model)
    for name, more in (("fold", []), ("gather", ["--permute", "gather"])):
        out = tmp_path / name
        report = json_of("quantize", model, out, *SCHEME, *CALIBRATION, *more)
        sidecar = fmpq_files.read(out)  # by the page in docs alone
        assert sidecar["nibble_fmpq"] == 2
        share = fmpq_files.share_of_bits(out, sidecar)
        assert abs(share - report["blocks"]["a4_share"]) < 1e-9
        assert abs(share - sidecar["a4_share"]) < 1e-9 and 0.84 <= share < 0.86
        config = json.loads((model / "config.json").read_text())
        experts = config.get("n_routed_experts") or config["num_local_experts"]
        ups = [site for site in sidecar["sites"] if "gate_proj" in site["modules"][0]]
        downs = [site for site in sidecar["sites"] if "down_proj" in site["modules"][0]]
        layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
        assert len(ups) == layers and len(downs) == layers * experts
        assert all(len(site["modules"]) == 2 * experts and
                   abs(site["rows"] - config["num_experts_per_tok"] / experts) < 1e-9 for site in ups)
        assert abs(sum(site["rows"] for site in downs) -
                   layers * config["num_experts_per_tok"]) < 1e-9
        orders = {tuple(site["columns"]) for site in downs}
        assert len(orders) == (len(downs) if name == "gather" else 1)
        assert base < perplexity(out) < 1.2 * base
        assert perplexity(out, "--ignore-fmpq") < perplexity(out)


def test_experts_in_two_schemes_are_refused(tmp_path):
    model = SHARED / "data/models/storyteller-oss"
    if not model.exists():
        pytest.skip("no storyteller-oss in the shared data; set NIBBLE_SHARED to its folder")
    fails(INVALID, "experts", "must be stored alike",
          arguments=["quantize", model, tmp_path / "out", *SCHEME, *CALIBRATION, "--rule",
                     "*layers.2*experts.3.down_proj=keep"])
