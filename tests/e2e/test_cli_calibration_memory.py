"""`--memory` with --calibrate: what is too little is refused with what is needed, and that is enough,
whatever the number of layers."""

import json
import re

import pytest

from cli_tools import INVALID, ROOT, fails, json_of, succeeds

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
          "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
          "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
          "eos_token_id": 2, "dtype": "bfloat16", "tie_word_embeddings": False}
TEXT = ROOT / "tests/data/text/the_black_cat.txt"
MEGA = 1 << 20


@pytest.fixture(scope="module", name="models")
def make_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for layers in (2, 6):
        config = folder / "config.json"
        config.write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        succeeds("make-dummy", "--config", config, "--out", folder / str(layers))
    return folder


def command(models, layers, out, *more):
    return ["quantize", models / str(layers), out, "--scheme", "w4a16_g128", "--calibrate", TEXT,
            "--calibration-length", 128, "--calibration-windows", 8, "--threads", 2, *more]


@pytest.mark.parametrize("method", ["gptq", "gptaq"])
def test_what_is_needed_is_said_and_enough(models, tmp_path, method):
    peaks, needs = [], []
    for layers in (2, 6):
        out = tmp_path / str(layers)
        said = fails(INVALID, "--memory 30 MiB", "MiB", arguments=command(
            models, layers, out, "--method", method, "--memory", "30MiB"))
        needs.append(int(re.search(r"needs (\d+) MiB", said)[1]))
        assert not list(tmp_path.glob(f"{layers}*"))
        found = json_of(*command(models, layers, out, "--method", method, "--memory",
                                 f"{needs[-1]}MiB"), timeout=600)
        peaks.append(found["peak_rss_bytes"])
        assert peaks[-1] <= needs[-1] * MEGA
    assert abs(needs[0] - needs[1]) <= 4
    assert abs(peaks[1] / peaks[0] - 1) < 0.05


def test_transforms_read_what_they_need(models, tmp_path):
    """Pages of weights are let go once they are read: 3 MB a layer, twice as much once it is
    transformed."""
    peaks = [json_of(*command(models, layers, tmp_path / str(layers), "--method", "smooth,rtn"),
                     timeout=600)["peak_rss_bytes"] for layers in (2, 6)]
    assert peaks[1] < 1.1 * peaks[0]
