"""nibble_fmpq.safetensors of another calibration was read with the JSON beside it, tensors that no site
reads were passed over, and a JSON that contradicts config.json about the order of inputs was believed: all
ran, with other products than the weights are for. Damaged files were refused without the remedy."""

import json
import shutil

import pytest
from cli_tools import CORRUPT, INVALID, STORYTELLER, UNSUPPORTED, fails, succeeds
from test_fmpq import edit, fmpq_files, gathered, sidecar_of, some_eights

RUN = ("--prompt", "Once", "--max-tokens", "2", "--device", "cpu")
IGNORE = "--ignore-fmpq"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fmpq") / "weights"
    succeeds("quantize", STORYTELLER, folder, "--scheme", "w4a16_g32")
    return folder


@pytest.fixture
def model(weights, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(weights, folder)
    fmpq_files.write(folder, sidecar_of(folder, some_eights))
    return folder


def refused(code, model, *words):
    fails(code, *words, arguments=("generate", model, *RUN))
    succeeds("generate", model, *RUN, IGNORE)


def test_tensors_of_another_calibration(model):
    tensors = (model / fmpq_files.TENSORS).read_bytes()
    fmpq_files.write(model, sidecar_of(model, lambda blocks: [4] * blocks))
    (model / fmpq_files.TENSORS).write_bytes(tensors)
    refused(CORRUPT, model, "nibble_fmpq.json: field tensors_xxh64", fmpq_files.TENSORS, IGNORE)
    with pytest.raises(ValueError, match="another calibration"):
        fmpq_files.read(model)


def test_the_files_of_early_versions_have_no_hash_of_tensors(model):
    edit(model, lambda sidecar: sidecar.pop("tensors_xxh64"))
    assert "blocks of 32" in succeeds("generate", model, *RUN).stderr
    fmpq_files.read(model)


def test_tensors_that_no_site_reads(model):
    sidecar = fmpq_files.read(model)
    sidecar["sites"][1]["columns"] = list(reversed(range(sidecar["sites"][1]["inputs"])))
    fmpq_files.write(model, sidecar)
    refused(CORRUPT, model, "tensor sites.1.columns", 'permute is "none"', IGNORE)


def test_config_and_sidecar_contradict_each_other_about_the_order(model):
    plain = (model / "config.json").read_text()
    gathered(model)
    (model / "config.json").write_text(plain)
    refused(CORRUPT, model, "nibble_fmpq.json: field permute: says that inputs are gathered",
            "config.json: quantization_config", "take both files")
    gathered(model)
    fmpq_files.write(model, sidecar_of(model, some_eights))
    for more in ((), (IGNORE,)):
        fails(CORRUPT, "field permute", "not gathered", "input_activations", "take both files",
              arguments=("generate", model, *RUN, *more))


def test_a_config_that_names_another_file(model):
    config = json.loads((model / "config.json").read_text())
    config[fmpq_files.FIELD]["file"] = "other.json"
    (model / "config.json").write_text(json.dumps(config))
    fails(UNSUPPORTED, 'field nibble_fmpq: names the file "other.json"', "nibble_fmpq.json",
          arguments=("generate", model, *RUN))


def test_a_sidecar_that_config_does_not_announce_is_said_not_to_be_read(model):
    config = json.loads((model / "config.json").read_text())
    del config[fmpq_files.FIELD]
    (model / "config.json").write_text(json.dumps(config))
    said = succeeds("generate", model, *RUN).stderr
    assert "nibble_fmpq.json is there, but config.json has no field nibble_fmpq" in said
    assert "w4a16_g32" in said


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_tensors_that_are_cut_off(model, keep):
    path = model / fmpq_files.TENSORS
    path.write_bytes(path.read_bytes()[:keep])
    refused(CORRUPT, model, fmpq_files.TENSORS, IGNORE)


def test_other_files_in_place_of_tensors(model, weights):
    path = model / fmpq_files.TENSORS
    shutil.copy(sorted(weights.glob("*.safetensors"))[0], path)
    refused(CORRUPT, model, fmpq_files.TENSORS, IGNORE)
    path.unlink()
    path.mkdir()
    refused(INVALID, model, fmpq_files.TENSORS, "is a folder", IGNORE)


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"nibble_fmpq": 1, "nibble_fmpq": 1}',
                                  '{"nibble_fmpq": 1e99}', '{"nibble_fmpq": 9223372036854775808}'])
def test_a_json_that_is_none(model, text):
    (model / fmpq_files.NAME).write_text(text)
    refused(CORRUPT, model, fmpq_files.NAME, IGNORE)


@pytest.mark.parametrize("field, value", [("block", "32"), ("block", 10**30), ("parts", 2**62),
                                          ("weights_xxh64", None), ("sites", {}), ("form", 1)])
def test_fields_of_another_type_or_size(model, field, value):
    edit(model, lambda sidecar: sidecar.update({field: value}))
    refused(CORRUPT, model, "nibble_fmpq.json", field, IGNORE)


@pytest.mark.parametrize("field, value", [("clip", 0), ("clip", 1e300), ("clip", None),
                                          ("inputs", 2**62), ("inputs", 0), ("rows", 2), ("split", 1)])
def test_fields_of_a_site(model, field, value):
    edit(model, lambda sidecar: sidecar["sites"][0].update({field: value}))
    refused(CORRUPT, model, "sites", field, IGNORE)
