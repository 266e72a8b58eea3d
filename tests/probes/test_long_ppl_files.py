"""The JSON file of key tokens: a round trip loses nothing; anything else is an error naming file and field."""

import json
import math

import numpy as np
import pytest

from probes.long_ppl import KeyTokens, load_key_tokens, save_key_tokens


def example() -> KeyTokens:
    long = np.array([np.nan, -0.1234, -0.5, -3.0, -0.25, 0.0])
    short = np.array([np.nan, np.nan, -4.0, -9.0, -7.5, -0.125])
    return KeyTokens(
        evaluator="an evaluator",
        context=2,
        stride=3,
        alpha=2.0,
        beta=-2.0,
        bos=False,
        token_ids_sha256="ab",
        text_sha256="cd",
        n_characters=17,
        offsets=np.array([[0, 2], [2, 5], [6, 9], [9, 9], [9, 14], [14, 17]]),
        log_p_long=long,
        log_p_short=short,
    )


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "document.json"
    save_key_tokens(example(), path)
    return path


def test_round_trip(stored, tmp_path):
    found = load_key_tokens(stored)
    for name, value in vars(example()).items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)
    assert found.intervals == ((6, 14),)
    save_key_tokens(found, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == stored.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "document.json"]


def test_a_context_longer_than_the_text_has_no_short_values(tmp_path):
    long = np.full(6, -1.0)
    whole = KeyTokens(**{**vars(example()), "context": 9, "log_p_long": long, "log_p_short": np.full(6, np.nan)})
    save_key_tokens(whole, tmp_path / "whole.json")
    assert load_key_tokens(tmp_path / "whole.json").n_key == 0


def test_code_in_a_file_is_not_run(tmp_path):
    """The PyPI package hands every piece of its key file to eval()."""
    mark = tmp_path / "was_run"
    path = tmp_path / "key.txt"
    path.write_text(f"[0, 3];open({str(mark)!r}, 'w').write('x')")
    with pytest.raises(ValueError, match=r"key\.txt is not JSON"):
        load_key_tokens(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(format="other"), "expected format 'hybridscope.key_tokens' version 1"),
        (dict(version=2), "expected format 'hybridscope.key_tokens' version 1"),
        (dict(alpha="2"), "alpha is '2', expected float"),
        (dict(alpha=True), "alpha is True, expected float"),
        (dict(context=0), "context is 0, expected at least 1"),
        (dict(stride=2.0), "stride is 2.0, expected int"),
        (dict(bos=1), "bos is 1, expected bool"),
        (dict(n_tokens=5), "starts has 6 values, expected a list of 5 integers"),
        (dict(widths=[2, 3, 3, 0, 5]), "widths has 5 values"),
        (dict(widths=[2, 3, 3, 0, 5, "3"]), "widths has 6 values, expected a list of 6 integers"),
        (dict(widths=[2, 3, 3, 0, 5, -3]), "no increasing character offsets"),
        (dict(starts=[0, 2, 6, 9, 8, 14]), "no increasing character offsets"),
        (dict(n_characters=16), "no increasing character offsets"),
        (dict(log_p_long=[None, -0.1234, -0.5, -3.0, -0.25, 1.0]), "log_p_long holds 1.0, expected log prob"),
        (dict(log_p_short=[-4.0, -9.0]), "log_p_short has 2 values, expected a list of 4 numbers or null"),
        (dict(intervals=[[6, 9]]), "intervals do not follow"),
        (dict(beta=-0.3), "intervals do not follow"),
        (dict(surprise=1), "unknown fields ['surprise']"),
    ],
)
def test_a_wrong_field_is_named(stored, change, message):
    fields = {**json.loads(stored.read_text()), **change}
    stored.write_text(json.dumps(fields))
    with pytest.raises(ValueError) as error:
        load_key_tokens(stored)
    assert message in str(error.value)
    assert str(stored) in str(error.value)


def test_a_missing_field_is_named(stored):
    fields = json.loads(stored.read_text())
    del fields["stride"]
    stored.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"missing fields \['stride'\]"):
        load_key_tokens(stored)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "-1e999"])
def test_numbers_that_are_not_finite_are_refused(stored, number):
    stored.write_text(stored.read_text().replace("-0.1234", number))
    with pytest.raises(ValueError, match=r"document\.json"):
        load_key_tokens(stored)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"3", b'{"format": ', b"\xff\xfe\x00", b"null"])
def test_files_of_other_kinds_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.json"):
        load_key_tokens(path)


def test_absent_file_and_directory_are_refused(tmp_path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            load_key_tokens(path)


def test_undefined_values_are_null_not_nan(stored):
    assert json.loads(stored.read_text(), parse_constant=lambda name: pytest.fail(name))["log_p_long"][0] is None
    assert math.isnan(load_key_tokens(stored).log_p_long[0])
