"""A `dtype` that does not exist ("bfloat17") was taken for float32 in silence: the model ran, in
another precision than its author meant."""

import pytest

from cli_tools import CORRUPT, UNSUPPORTED, Model, fails, succeeds


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path / "model")


def generate(model):
    return ["generate", model, "--prompt", "hi", "--max-tokens", 2]


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value,code", [
    ("bfloat17", UNSUPPORTED), ("auto", UNSUPPORTED), ("", UNSUPPORTED), ("float64", UNSUPPORTED),
    (3, CORRUPT), (["bf16"], CORRUPT)])
def test_unknown_types_are_refused_by_name(model, field, value, code):
    model.edit_json("config.json", **{field: value})
    text = f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')
    for arguments in (generate(model), ["serve", model, "--port", 0], ["chat", model]):
        fails(code, "config.json", f"field {field}: {text}", "bfloat16", "float16", "float32",
              arguments=arguments)


@pytest.mark.parametrize("fields", [
    {}, {"dtype": None}, {"dtype": "float32"}, {"torch_dtype": "bfloat16"}, {"dtype": "float16"},
    {"torch_dtype": "torch.bfloat16"}])
def test_known_types_run(model, fields):
    model.edit_json("config.json", **fields)
    succeeds(*generate(model))
