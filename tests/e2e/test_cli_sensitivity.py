"""`nibble sensitivity`: what rounding costs each matrix, and schemes for a budget that
`nibble quantize` takes."""

import json

import pytest

from cli_tools import (INVALID, NOT_FOUND, ROOT, STORYTELLER, UNSUPPORTED, fails, json_of, succeeds)

STORY = ROOT / "tests/data/text/the_black_cat.txt"
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 512,
           "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
           "num_experts_per_tok": 2, "max_position_embeddings": 256, "bos_token_id": 1,
           "eos_token_id": 2, "dtype": "bfloat16"}
SCHEMES = "w4a16_channel,w4a16_g32,w8a16_channel"


@pytest.fixture(scope="module", name="texts")
def make_texts(tmp_path_factory):
    """One to calibrate with, one to measure over."""
    folder = tmp_path_factory.mktemp("texts")
    story = STORY.read_bytes()
    (folder / "calibration.txt").write_bytes(story[:8000])
    (folder / "text.txt").write_bytes(story[8000:12000])
    return folder


def sensitivity(folder, *arguments):
    """What the command writes as JSON, and its table."""
    out = folder / "found.json"
    table = succeeds("sensitivity", STORYTELLER, *arguments, "--json", out).stdout
    return json.loads(out.read_text()), table


def test_every_matrix_worst_first(tmp_path, texts):
    found, table = sensitivity(tmp_path, "--schemes", SCHEMES, "--measure", "0.05", "--calibrate",
                               texts / "calibration.txt", "--text", texts / "text.txt")
    matrices = found["matrices"]
    assert len(matrices) == 56
    worst = [max(matrix["errors"].values()) for matrix in matrices]
    assert worst == sorted(worst, reverse=True)
    for matrix in matrices:
        assert matrix["by"] == "outputs"
        errors = matrix["errors"]
        assert errors["w8a16_channel"] < 0.02 * errors["w4a16_g32"]
        assert matrix["bits_per_weight"]["w4a16_g32"] == 4.5
    measured = [matrix for matrix in matrices if "kld" in matrix]
    assert measured[:3] == matrices[:3]
    layers = {(matrix["kind"], matrix["name"].split(".")[2]) for matrix in measured}
    assert {(kind, layer) for kind, _ in layers for layer in "01357"} <= layers
    lines = table.splitlines()
    assert lines[1].endswith(matrices[0]["name"]) and lines[41] == "and 16 better ones"


def test_divergences_are_those_of_a_folder(tmp_path, texts):
    """A matrix that is replaced in memory does what it does in a folder of its own."""
    text = texts / "text.txt"
    found, _ = sensitivity(tmp_path, "--schemes", "w4a8", "--format", "compressed-tensors",
                           "--measure", "0.01", "--measure-tokens", 100000, "--text", text)
    matrix = found["matrices"][0]
    assert matrix["by"] == "weights"
    succeeds("quantize", STORYTELLER, tmp_path / "one", "--scheme", "w4a8", "--format",
             "compressed-tensors", "--rule", f"{matrix['name']}=w4a8", "--rule",
             "re:model.layers.*_proj$=keep")
    alone = json_of("eval", "kld", STORYTELLER, tmp_path / "one", "--text", text)
    assert found["measured_tokens"] == alone["tokens"]
    assert matrix["kld"] == alone["kld"] > 0


def test_experts_of_a_layer_are_one(tmp_path):
    """In memory as in a folder; and the choice names them by one pattern."""
    model, config = tmp_path / "model", tmp_path / "config.json"
    config.write_text(json.dumps(MIXTRAL))
    succeeds("make-dummy", "--config", config, "--out", model)
    text = tmp_path / "text"
    text.write_text("it was a dark night and the wind was loud. " * 30)
    out, rules = tmp_path / "found.json", tmp_path / "rules"
    succeeds("sensitivity", model, "--schemes", "w4a16_g32,w8a16_channel", "--text", text,
             "--calibrate", text, "--measure", 1, "--measure-tokens", 100000, "--budget", "6bpw",
             "--write-rules", rules, "--json", out)
    found = json.loads(out.read_text())
    experts = [matrix for matrix in found["matrices"] if matrix["kind"] == "experts"]
    assert len(experts) == 2
    assert {matrix["by"] for matrix in found["matrices"]} == {"outputs"}
    one = experts[0]
    assert one["weights"] == 4 * 3 * 64 * 96
    succeeds("quantize", model, tmp_path / "one", "--scheme", "w4a16_g32", "--rule",
             f"{one['name']}=w4a16_g32", "--rule", "*.layers.*=keep")
    assert one["kld"] == json_of("eval", "kld", model, tmp_path / "one", "--text", text)["kld"] > 0
    scheme = found["choice"]["scheme"]
    succeeds("quantize", model, tmp_path / "mix", "--scheme", scheme, "--rules", rules, "--format",
             "compressed-tensors")
    size = sum(path.stat().st_size for path in (tmp_path / "mix").glob("*.safetensors"))
    assert size == found["choice"]["bytes"]


def chosen(tmp_path, texts, budget, *more):
    """The choice for a budget, quantized: what was said, its divergence and its bytes."""
    rules = tmp_path / f"rules-{budget}"
    found, table = sensitivity(tmp_path, "--schemes", SCHEMES + ",keep", "--calibrate",
                               texts / "calibration.txt", "--measure-tokens", 256, "--budget",
                               budget, "--write-rules", rules, *more)
    choice = found["choice"]
    assert f"--scheme {choice['scheme']} --format compressed-tensors --rules {rules}" in table
    made = tmp_path / f"made-{budget}"
    succeeds("quantize", STORYTELLER, made, "--scheme", choice["scheme"], "--format",
             "compressed-tensors", "--rules", rules)
    kld = json_of("eval", "kld", STORYTELLER, made, "--text", texts / "text.txt")["kld"]
    size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
    assert size == choice["bytes"]
    return found, kld, size


def test_budgets_are_kept_and_more_bits_lose_less(tmp_path, texts):
    losses = []
    for bits in (4.2, 4.5, 6):
        found, kld, _ = chosen(tmp_path, texts, f"{bits}bpw")
        choice = found["choice"]
        assert bits - 0.1 < choice["bits_per_weight"] <= bits
        assert choice["bound"] <= choice["predicted"] < 1.05 * choice["bound"]
        assert 0.4 * choice["predicted"] < kld < 2.5 * choice["predicted"]
        losses.append(kld)
        schemes = choice["schemes"]
        for matrix in found["matrices"]:  # what loaders fuse is stored alike
            layer = matrix["name"].rsplit(".", 1)[0]
            tied = {"q_proj": "k_proj", "k_proj": "v_proj", "gate_proj": "up_proj"}
            if matrix["kind"] in tied:
                assert schemes[matrix["name"]] == schemes[f"{layer}.{tied[matrix['kind']]}"]
    assert losses == sorted(losses, reverse=True)
    _, _, size = chosen(tmp_path, texts, "6000000")
    assert 5_900_000 < size <= 6_000_000


def test_a_choice_can_be_calibrated(tmp_path, texts):
    """--rules beside --calibrate: the rules go into the recipe."""
    rules = tmp_path / "rules"
    rules.write_text("# a comment\n*.down_proj=w8a16_channel\n\n")
    flags = ["--scheme", "w4a16_g32", "--calibrate", texts / "calibration.txt"]
    succeeds("quantize", STORYTELLER, tmp_path / "a", *flags, "--rules", rules)
    succeeds("quantize", STORYTELLER, tmp_path / "b", *flags, "--rule", "*.down_proj=w8a16_channel")
    for name in ("model.safetensors", "quantization_recipe.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_is_refused(tmp_path, texts):
    text = texts / "calibration.txt"
    for arguments, words in [
            (["--schemes", "w4a16_g32,w5"], ["--schemes", "w5"]),
            (["--schemes", "keep"], ["no scheme"]),
            (["--schemes", "w4a16_g32", "--budget", "4bwp"], ["--budget 4bwp", "4.5bpw"]),
            (["--schemes", "w4a16_g32", "--budget", "4bpw"], ["4.500bpw"]),
            (["--schemes", "w4a16_g32", "--budget", "1MB"], ["--budget", "bytes"]),
            (["--schemes", "w4a16_g32", "--write-rules", tmp_path / "r"], ["--budget"]),
            (["--schemes", "w4a16_g32", "--calibrate", text, "--calibration-length", 5000],
             ["--calibration-length 5000"])]:
        fails(INVALID, *words, arguments=["sensitivity", STORYTELLER, *arguments])
    fails(UNSUPPORTED, "quark", "w4a16_g32", arguments=[
        "sensitivity", STORYTELLER, "--schemes", "w4a8,w4a16_g32", "--format", "quark"])
    fails(NOT_FOUND, arguments=["sensitivity", STORYTELLER, "--schemes", "w4a8", "--calibrate",
                                tmp_path / "none.txt"])
    assert not (tmp_path / "r").exists()
