"""`--a8-share nan` ended in an internal error, `--max-kld nan` was passed over, and limits were printed with
300 digits: the checks of CLI11 let NaN pass."""

import pytest
from cli_tools import INVALID, ROOT, STORYTELLER, fails

TEXT = ROOT / "tests/data/text/the_black_cat.txt"
W4AX = ("quantize", STORYTELLER, "OUT", "--scheme", "w4ax", "--calibrate", TEXT)


@pytest.mark.parametrize("command, flag, wanted", [
    (W4AX, "--a8-share", "a number between 0 and 1"),
    (W4AX, "--max-kld", "a number above 0"),
    (("sensitivity", STORYTELLER, "--schemes", "w4a8,w8a16_channel"), "--measure", "between 0 and 1"),
    (("serve", STORYTELLER, "--port", "0"), "--request-timeout", "a number of at least 0"),
    (("serve", STORYTELLER, "--port", "0"), "--shutdown-timeout", "a number of at least 0"),
    (("bench", "kernels"), "--a4-share", "between 0 and 1"),
    (("bench", "kernels"), "--rest", "between 0 and 100"),
    (("bench", "serve"), "--burstiness", "a number above 0"),
    (("bench", "serve"), "--connect-timeout", "a number above 0"),
])
@pytest.mark.parametrize("number", ["nan", "-nan", "inf", "-1", "1e999", "x"])
def test_they_are_refused_with_what_is_wanted(tmp_path, command, flag, wanted, number):
    arguments = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    message = fails(INVALID, flag, wanted, arguments=[*arguments, f"{flag}={number}"], timeout=30)
    assert len(message) < 200
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--temperature", "--top-p"])
@pytest.mark.parametrize("number", ["nan", "-1", "inf"])
def test_sampling_refuses_them_too(flag, number):
    fails(INVALID, flag.strip("-").replace("-", "_"),
          arguments=["generate", STORYTELLER, "--prompt", "Once", "--max-tokens", "2", f"{flag}={number}"])
