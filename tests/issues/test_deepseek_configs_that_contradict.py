"""Fields of DeepSeek's config.json that no weights fit were taken: other routers, factors of 0 and below,
rotations said twice, or without their type; a count of further layers in the millions was walked through."""

import pytest
from cli_tools import CORRUPT, UNSUPPORTED, fails, succeeds
from test_kimi import RUN, YARN, make, with_text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("kimi"))


@pytest.mark.parametrize("changes, code, words", [
    ({"topk_method": "group_limited_greedy"}, UNSUPPORTED, ("topk_method", "noaux_tc")),
    ({"routed_scaling_factor": 0}, CORRUPT, ("field routed_scaling_factor: 0 is not above 0",)),
    ({"routed_scaling_factor": -2.5}, CORRUPT, ("field routed_scaling_factor: -2.5", "published")),
    ({"routed_scaling_factor": 1e300}, CORRUPT, ("field routed_scaling_factor: 1e+300",)),
    ({"num_nextn_predict_layers": 16_000_000}, CORRUPT, ("num_nextn_predict_layers: 16000000",)),
    ({"rope_scaling": {"factor": 64.0}}, CORRUPT, ("rope_scaling: field rope_type is missing",)),
    ({"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 32.0}}, CORRUPT,
     ("field beta_fast: 1 is below beta_slow 32",)),
    ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, CORRUPT,
     ("rope_parameters and rope_scaling contradict each other", "remove")),
])
def test_fields_that_fit_no_weights(model, tmp_path, changes, code, words):
    broken = with_text(model, tmp_path / "b", **changes)
    fails(code, "config.json", *words, arguments=("generate", broken, *RUN), timeout=30)
    if code == CORRUPT:  # what is merely unknown is quantized all the same
        for command in (("inspect", broken),
                        ("quantize", broken, tmp_path / "q", "--scheme", "w8a8_fp8")):
            fails(code, "config.json", *words, arguments=command, timeout=30)
        assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("changes", [
    {"topk_method": None}, {"rope_scaling": {**YARN, "beta_fast": 1.0}},
    {"rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 50000.0}},
    {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
])
def test_what_is_published_is_taken(model, tmp_path, changes):
    succeeds("generate", with_text(model, tmp_path / "b", **changes), *RUN)


def test_two_stages_of_queries_beside_a_config_of_one(model, tmp_path):
    """`inspect` and `quantize` said no more than that a tensor is missing."""
    broken = with_text(model, tmp_path / "b", q_lora_rank=None)
    for command in (("inspect", broken),
                    ("quantize", broken, tmp_path / "q", "--scheme", "w8a8_fp8")):
        fails(CORRUPT, "q_a_proj.weight", "field q_lora_rank", "two stages", arguments=command)
