"""Directories with Python files of their own: refused unless trusted; when trusted, their own numbers, offline."""

import json
import socket

import pytest
import torch

import models
from models.huggingface.tokenizer import load_tokenizer
from models.safetensors_files import CheckpointError

TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class XTokenizer(PreTrainedTokenizerFast):
    own = True
"""


def change(path, **fields):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))


def test_untrusted_code_is_refused_and_not_run(remote_code):
    (remote_code / "configuration_x.py").write_text("raise SystemExit('was run')")
    for device in ("cpu", "meta"):
        with pytest.raises(CheckpointError) as error:
            models.load(remote_code, device=device)
        said = str(error.value)
        assert said.startswith(f"{remote_code / 'config.json'}: model_type is 'x_llama'")
        assert "configuration_x.XConfig, modeling_x.XForCausalLM" in said
        assert "expected a model type that transformers has code for" in said
        assert "--trust-remote-code" in said
    assert not (remote_code.parent / "modules").exists()


def test_trusted_code_is_run_offline_and_gives_its_own_numbers(remote_code, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a name was looked up"))
    described = models.load(remote_code, device="meta", trust_remote_code=True)
    assert [layer.kind for layer in described.layers] == ["full", "full"]
    model = models.load(remote_code, device="cpu", trust_remote_code=True)
    assert type(model.hf).__name__ == "XForCausalLM"
    assert type(model.hf).__module__.startswith("transformers_modules.")
    assert list((remote_code.parent / "modules").rglob("modeling_x.py")), "the copies lie in the cache given"
    ids = torch.arange(40, 60)[None]
    change(remote_code / "config.json", model_type="llama", auto_map={})
    with torch.no_grad():
        plain, tanh = (
            LlamaForCausalLM.from_pretrained(remote_code, **more).eval()(ids).logits
            for more in ({}, {"hidden_act": "tanh"})
        )
        torch.testing.assert_close(model(ids), tanh, rtol=1e-5, atol=1e-5)
    assert (plain - tanh).abs().max() > 0.1


def test_a_family_of_transformers_needs_no_trust(remote_code):
    change(remote_code / "config.json", model_type="llama")
    (remote_code / "modeling_x.py").write_text("raise SystemExit('was run')")
    assert type(models.load(remote_code, device="cpu").hf).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_another_repository_is_refused(remote_code, trusted, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a name was looked up"))
    change(remote_code / "config.json", auto_map={"AutoConfig": "someone/else--configuration_x.XConfig"})
    with pytest.raises(CheckpointError, match="'someone/else--configuration_x.XConfig', code of another repository"):
        models.load(remote_code, device="cpu", trust_remote_code=trusted)


def test_code_that_lacks_a_file_or_a_package_is_named(remote_code):
    (remote_code / "modeling_x.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(CheckpointError, match="no_such_package_at_all"):
        models.load(remote_code, device="cpu", trust_remote_code=True)
    (remote_code / "modeling_x.py").unlink()
    with pytest.raises(CheckpointError, match=r"modeling_x\.py"):
        models.load(remote_code, device="cpu", trust_remote_code=True)


@pytest.fixture
def own_tokenizer(tmp_path, remote_code):
    """A directory with a tokenizer class of its own."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(remote_code)
    (remote_code / "tokenization_x.py").write_text(TOKENIZER)
    auto_map = {"AutoTokenizer": [None, "tokenization_x.XTokenizer"]}
    change(remote_code / "tokenizer_config.json", tokenizer_class="XTokenizer", auto_map=auto_map)
    return remote_code


def test_a_tokenizer_that_needs_its_own_code(own_tokenizer):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .*tokenization_x\.XTokenizer.*--trust"):
        load_tokenizer(own_tokenizer)
    tokenizer = load_tokenizer(own_tokenizer, trust_remote_code=True)
    assert tokenizer.backend.own
    assert tokenizer.encode("b") == [1]
    assert models.load(own_tokenizer, device="cpu", trust_remote_code=True).tokenizer.backend.own
    change(own_tokenizer / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "some/one--tokenization_x.X"]})
    for trusted in (False, True):
        with pytest.raises(CheckpointError, match="some/one--tokenization_x"):
            load_tokenizer(own_tokenizer, trust_remote_code=trusted)


def test_a_released_format_runs_no_model_code_even_if_trusted(remote_code):
    """Its own configuration file would break AutoTokenizer, and is not needed for a plain tokenizer."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.save(str(remote_code / "tokenizer.json"))
    (remote_code / "configuration_x.py").write_text("raise SystemExit('was run')")
    assert load_tokenizer(remote_code, trust_remote_code=True, foreign=True).encode("b") == [1]
