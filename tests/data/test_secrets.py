"""URLs with a password or a signature: neither is stored."""

import pytest
from corpora import lines, records

from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.config.schema import DataConfig
from nalanda.data.prepare import begin, prepare
from nalanda.data.urls import open_urls

RECIPE = """
output_dir: runs/x
model: {mixer: deltanet, hidden_size: 32, num_hidden_layers: 1, num_heads: 2, vocab_size: 300}
tokenizer: someone/tokens
data: {source: someone/texts, seq_len: 16, validation_share: 0.2, shuffle_buffer: 4, workers: 0}
train: {steps: 1, tokens_per_step: 32, micro_batch_size: 2}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return lambda *overrides: load_config(path, overrides)


def test_stored_files_have_no_password(recipe, tmp_path):
    url = "https://me:geheim@host/a.jsonl?X-Amz-Signature=geheim"
    config = recipe(f"data.source={url}")
    assert "geheim" not in config.to_yaml()
    assert config.data.source == url
    saved = tmp_path / "config.yaml"
    saved.write_text(config.to_yaml())
    again = load_config(saved)
    assert again.to_dict() == config.to_dict()  # so the run resumes, also with another signature
    with pytest.raises(InputError, match=r"never stored; give data.source as it was"):
        open_urls(again.data, again.data.source, "train")
    listed = recipe(f"data.source=['{url}', 'https://host/b.jsonl']")
    assert "geheim" not in listed.to_yaml()


def test_no_password_or_signature_is_stored(tmp_path, byte_tokenizer, server):
    server.files["a.jsonl"] = lines(records(60))
    url, out = (
        server.url("a.jsonl").replace("//", "//me:geheim@") + "?sig=geheim&part=1",
        tmp_path / "out",
    )
    data = DataConfig(source=[url])
    begin(data, byte_tokenizer, out)
    stored = [path for path in out.rglob("*") if path.is_file() and "geheim" in path.read_text()]
    assert [(path.name, path.stat().st_mode & 0o777) for path in stored] == [("urls.json", 0o600)]
    server.faults["a.jsonl"] = ["404"]
    with pytest.raises(InputError, match="404"):
        prepare(data, byte_tokenizer, out)
    assert not stored[0].exists()
    data.source = [url.replace("sig=geheim", "sig=anew")]
    prepare(data, byte_tokenizer, out, workers=2)
    assert not [
        path for path in out.rglob("*") if path.is_file() and b"geheim" in path.read_bytes()
    ]
    data.source = [url.replace("part=1", "part=2")]
    with pytest.raises(InputError, match="was prepared with") as caught:
        prepare(data, byte_tokenizer, out)
    assert "geheim" not in str(caught.value)
