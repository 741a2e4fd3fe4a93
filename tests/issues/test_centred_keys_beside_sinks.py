"""Keys of an INT4 cache were centred where attention has sinks: scores moved by the mean, the sinks'
logits did not, so every head weighed its sink otherwise than the model does."""

import json

from cli_tools import ROOT, UNSUPPORTED, fails, succeeds

TEXT = "Once upon a time there was a king who had a daughter. " * 6


def test_keys_beside_sinks_are_not_centred(tmp_path):
    config = json.loads((ROOT / "tests/golden/gpt_oss/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    model, text = tmp_path / "model", tmp_path / "text.txt"
    succeeds("make-dummy", "--config", tmp_path / "config.json", "--out", model)
    text.write_text(TEXT)
    evaluation = ["eval", "ppl", model, "--text", text, "--window", 32, "--kv-cache-dtype", "int4"]
    succeeds("calibrate-kv", model, "--calibrate", text, "--calibration-length", 32)
    succeeds(*evaluation)
    sidecar = json.loads((model / "nibble_kv.json").read_text())
    assert all(layer[half]["mean"] is None for layer in sidecar["layers"]
               for half in ("keys", "values"))

    keys = sidecar["layers"][0]["keys"]
    keys["form"] = "centred"
    keys["mean"] = [1.0] * (sidecar["kv_heads"] * sidecar["head_dim"])
    (model / "nibble_kv.json").write_text(json.dumps(sidecar))
    fails(UNSUPPORTED, "nibble_kv.json", "layers[0]: keys: field form: cannot be centred", "sinks",
          arguments=evaluation)
