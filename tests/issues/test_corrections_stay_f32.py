"""Transforms wrote the biases by which experts are chosen in the model's BF16, where they are stored in F32:
close ones became equal, so that other experts were chosen than by the model."""

import pytest
from cli_tools import ROOT, succeeds
from test_kimi import CORRECTION, make
from test_opt import stored

TEXT = ("--calibrate", ROOT / "tests/data/text/the_black_cat.txt", "--calibration-windows", "2",
        "--calibration-length", "64")


@pytest.mark.parametrize("method", ["smooth", "permute"])
def test_corrections_are_those_of_the_source(tmp_path, method):
    model = make(tmp_path, "--dtype", "bf16")
    said = succeeds("quantize", model, tmp_path / "q", "--scheme", "w4a8", "--method", method, *TEXT)
    assert "stored as BF16" not in said.stderr
    before, after = stored(model), stored(tmp_path / "q")
    assert before[CORRECTION][0] == "F32" and after[CORRECTION] == before[CORRECTION]
    kept = [name for name in after if name.endswith("norm.weight")]
    assert kept and all(after[name][0] == before[name][0] for name in kept)
