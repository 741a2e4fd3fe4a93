"""nibble calibrate-kv, and what commands do with its file."""

import json
import re
import shutil

import pytest

from cli_tools import (
    CORRUPT, EXISTS, INVALID, NOT_FOUND, ROOT, STORYTELLER, UNSUPPORTED, fails, json_of, succeeds)

TEXT = ROOT / "tests/data/text/the_black_cat.txt"
FEW = ["--calibration-windows", "3", "--calibration-length", "200"]
FORMS = ("plain", "centred", "turned", "centred+turned")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The storyteller with a sidecar, and what the command said."""
    folder = tmp_path_factory.mktemp("kv") / "model"
    shutil.copytree(STORYTELLER, folder)
    report = json_of("calibrate-kv", folder, "--calibrate", TEXT, *FEW, "--json")
    return folder, report


@pytest.fixture
def model(calibrated, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(calibrated[0], folder)
    return folder


def edit(folder, change):
    path = folder / "nibble_kv.json"
    sidecar = json.loads(path.read_text())
    change(sidecar)
    path.write_text(json.dumps(sidecar))


def all_of(form):
    def change(sidecar):
        for layer in sidecar["layers"]:
            layer["keys"]["form"] = layer["values"]["form"] = form
    return change


def divergence(model):
    return json_of("eval", "kld", STORYTELLER, model, "--text", TEXT, "--kv-cache-dtype", "int4",
                   "--base-kv-cache-dtype", "bf16", "--device", "cpu", "--json")["kld"]


def test_it_reports_forms_and_errors(calibrated):
    folder, report = calibrated
    sidecar = json.loads((folder / "nibble_kv.json").read_text())
    assert sidecar["nibble_kv"] == 1
    assert sidecar["calibration"]["tokens"] == report["tokens"] == 600
    assert len(sidecar["layers"]) == 8
    for layer in sidecar["layers"]:
        for half in (layer["keys"], layer["values"]):
            assert len(half["mean"]) == sidecar["kv_heads"] * sidecar["head_dim"] == 128
            assert half["form"] == min(half["errors"], key=half["errors"].get)
    for half in ("keys", "values"):
        assert sorted(report["errors"][half]) == sorted(FORMS)
    assert report["file"].endswith("model/nibble_kv.json")
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [p.name for p in STORYTELLER.iterdir()] + ["nibble_kv.json"])


def test_int4_caches_lose_less(model):
    best = divergence(model)
    by_form = {}
    for form in FORMS:
        edit(model, all_of(form))
        by_form[form] = divergence(model)
    # Of the plain cache's; with means of 16,384 tokens 0.42, 0.69 and 0.54 are measured.
    assert by_form["centred+turned"] < 0.55 * by_form["plain"]
    assert by_form["centred"] < 0.95 * by_form["plain"]
    assert by_form["turned"] == divergence(STORYTELLER) < 0.7 * by_form["plain"]
    assert best < 0.55 * by_form["plain"]


def test_commands_say_so(model):
    prompt = ["generate", model, "--prompt", "Once", "--max-tokens", "3", "--device", "cpu"]
    said = "nibble_kv.json: decides how keys and values enter the int4 cache: keys centred"
    assert said in succeeds(*prompt, "--kv-cache-dtype", "int4").stderr
    assert "nibble_kv" not in succeeds(*prompt).stderr


@pytest.mark.parametrize("code, field, change", [
    (UNSUPPORTED, "nibble_kv", lambda s: s.update(nibble_kv=7)),
    (CORRUPT, "kv_heads", lambda s: s.update(kv_heads=4)),
    (CORRUPT, "layers", lambda s: s["layers"].pop()),
    (CORRUPT, "layers[2]: keys: field mean", lambda s: s["layers"][2]["keys"]["mean"].pop()),
    (CORRUPT, "layers[0]: values: field form", lambda s: s["layers"][0]["values"].update(form="x")),
])
def test_a_damaged_file_is_refused(model, code, field, change):
    edit(model, change)
    for command in (["generate", model, "--prompt", "Once", "--max-tokens", "3"],
                    ["eval", "ppl", model, "--text", TEXT]):
        fails(code, "nibble_kv.json", field, "calibrate-kv",
              arguments=[*command, "--device", "cpu", "--kv-cache-dtype", "int4"])
    succeeds("generate", model, "--prompt", "Once", "--max-tokens", "3", "--device", "cpu",
             "--kv-cache-dtype", "int8")


def test_an_existing_file_is_replaced_if_told(model):
    before = (model / "nibble_kv.json").read_text()
    command = ["calibrate-kv", model, "--calibrate", TEXT, *FEW]
    fails(EXISTS, "nibble_kv.json", "--force", arguments=command)
    assert (model / "nibble_kv.json").read_text() == before
    printed = succeeds(*command, "--force", "--form", "centred").stdout
    assert "keys centred in 8 layers; values centred in 8 layers" in printed


def test_bad_input(tmp_path):
    fails(NOT_FOUND, "none.txt", arguments=["calibrate-kv", STORYTELLER, "--calibrate",
                                            tmp_path / "none.txt"])
    fails(INVALID, "--calibration-length",
          arguments=["calibrate-kv", STORYTELLER, "--calibrate", TEXT, "--calibration-length", "999999"])
    fails(INVALID, "--calibrate-kv", "--calibrate",
          arguments=["quantize", STORYTELLER, tmp_path / "out", "--scheme", "w4a8", "--calibrate-kv"])
    assert not (STORYTELLER / "nibble_kv.json").exists()


def test_quantize_makes_one_of_the_output(model, tmp_path):
    plain = tmp_path / "plain"
    succeeds("quantize", model, plain, "--scheme", "w4a16_g32")
    assert not (plain / "nibble_kv.json").exists()  # that of the source is not of these weights
    out = tmp_path / "out"
    command = ["quantize", STORYTELLER, out, "--scheme", "w4a16_g32", "--calibrate", TEXT, *FEW,
               "--calibrate-kv"]
    assert "nibble_kv.json: keys centred" in succeeds(*command).stderr
    sidecar = (out / "nibble_kv.json").read_text()
    succeeds("verify", STORYTELLER, out)
    (out / "nibble_kv.json").unlink()
    succeeds(*command)  # the weights are there already
    assert (out / "nibble_kv.json").read_text() == sidecar


def outside(model, *more):
    """What the log says of numbers outside of ranges while a prompt of known length is read."""
    run = succeeds("generate", model, "--prompt", "Once upon a time there was a cat", "--max-tokens", 3,
                   "--kv-cache-dtype", "int4_static", "--device", "cpu", "--json", *more)
    counts = [int(number) for number in re.findall(
        r"(\d+) keys and values so far lay far outside of the int4_static", run.stderr)]
    return json.loads(run.stdout), counts


def narrowed(by):
    def change(sidecar):
        for layer in sidecar["layers"]:
            for half in (layer["keys"], layer["values"]):
                half["ranges"]["step"] = [step / by for step in half["ranges"]["step"]]
    return change


def test_numbers_far_outside_of_static_ranges_are_counted_and_warned_of(model):
    edit(model, narrowed(0.01))  # wide enough for anything
    assert outside(model)[1] == []
    edit(model, narrowed(1e8))  # for nothing
    answer, counts = outside(model)
    numbers = answer["prompt_tokens"] * 2 * 128  # of keys and values of a layer
    assert counts[0] == numbers  # the first layer's
    assert counts == sorted(counts) and len(counts) >= 2
    for before, after in zip(counts, counts[1:]):  # a power of ten lies between two warnings
        assert len(str(after)) > len(str(before))
    assert counts[-1] <= 8 * (answer["prompt_tokens"] + 3) * 2 * 128


def test_a_few_numbers_outside_are_counted_alone(model):
    def change(sidecar):  # one channel of one head of one layer
        sidecar["layers"][2]["values"]["ranges"]["step"][5] /= 1e8
    edit(model, narrowed(0.01))
    edit(model, change)
    answer, counts = outside(model)
    assert counts[0] == answer["prompt_tokens"]
