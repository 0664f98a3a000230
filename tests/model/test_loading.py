"""A checkpoint loads as it was saved: with its own code, through Auto classes, offloaded, with tied weights."""

import json
import os
import subprocess
import sys

import pytest
import torch
from covering import slow_but_for
from nalanda_kernels import use_backend
from tiny_models import VOCAB, build, close, ids, logits
from transformers import AutoModel, AutoModelForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.model import MIXERS
from nalanda.model.configuration import AUTO_MAP


def test_a_model_loads_by_the_keyword_of_transformers(small, tmp_path):
    small.save_pretrained(tmp_path)
    for load in (NalandaForCausalLM.from_pretrained, NalandaConfig.from_pretrained):
        assert load(pretrained_model_name_or_path=tmp_path)


@pytest.mark.slow
def test_loads_where_nalanda_is_not(small, tmp_path):
    """The checkpoint carries its code: a process that cannot import any of ours gives the same logits."""
    small.save_pretrained(tmp_path / "model")
    encoder = build("mala", is_decoder=False, dtype=torch.float32)
    encoder.save_pretrained(tmp_path / "encoder")
    with use_backend("torch"):  # there are no kernels there
        hidden = small(ids(2, 9), output_hidden_states=True).hidden_states
        torch.save((logits(small, ids(2, 9)), hidden), tmp_path / "expected.pt")
        torch.save(encoder(ids(2, 9)).logits, tmp_path / "encoded.pt")
    program = f"""
import sys
for name in ("nalanda", "nalanda_kernels", "nalanda_eval"):
    sys.modules[name] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers import AutoModelForSequenceClassification
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).eval()
assert "transformers_modules" in type(model).__module__
tokens = torch.randint(0, {VOCAB}, (2, 9), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    logits, hidden = torch.load({str(tmp_path / "expected.pt")!r})
    assert torch.equal(model(tokens).logits, logits)
    decoder = AutoModel.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).eval()
    assert "transformers_modules" in type(decoder).__module__
    assert torch.equal(decoder(tokens).last_hidden_state, hidden[-1])
    model.generate(tokens, max_new_tokens=3, attention_mask=torch.ones_like(tokens), pad_token_id=0)
    masked = AutoModelForMaskedLM.from_pretrained({str(tmp_path / "encoder")!r}, trust_remote_code=True)
    assert torch.equal(masked.eval()(tokens).logits, torch.load({str(tmp_path / "encoded.pt")!r}))
    for folder in ("model", "encoder"):
        folder = {str(tmp_path)!r} + "/" + folder
        head = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
        assert head(tokens, attention_mask=torch.ones_like(tokens)).logits.shape == (2, 2)
model.save_pretrained({str(tmp_path / "again")!r})
"""
    environment = {
        **os.environ,
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {p.name for p in (tmp_path / "again").glob("*.py")} >= {
        "decoder.py",
        "language.py",
        "ops.py",
        "mixers.py",
    }


def test_auto_model_is_the_decoder(small, tmp_path):
    """Its hidden states are transformers': the embeddings, then after each block, the last after the norm."""
    small.save_pretrained(tmp_path)
    names = {"AutoConfig": "configuration.NalandaConfig", **AUTO_MAP}
    del names["AutoModelForMaskedLM"], names["AutoModelForImageClassification"]
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == names
    decoder, tokens = (
        AutoModel.from_pretrained(tmp_path, output_hidden_states=True).eval(),
        ids(2, 9),
    )
    with torch.no_grad():
        out, head = decoder(tokens), small(tokens, output_hidden_states=True)
        assert len(out.hidden_states) == 1 + len(decoder.layers)
        assert torch.equal(out.hidden_states[0], decoder.embed_tokens(tokens))
        assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
        assert all(map(torch.equal, out.hidden_states, head.hidden_states))
        assert torch.equal(small.lm_head(out.last_hidden_state), head.logits)
        assert torch.equal(decoder(tokens, return_dict=False)[0], out.last_hidden_state)
    assert "hidden_states" not in AutoModel.from_pretrained(tmp_path)(tokens)
    decoder.save_pretrained(tmp_path / "decoder")
    again = AutoModel.from_pretrained(tmp_path / "decoder").eval()
    assert torch.equal(again(tokens).last_hidden_state, out.last_hidden_state)


def test_device_map(small, tmp_path):
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").eval()
    assert torch.equal(logits(again, ids(2, 9)), logits(small, ids(2, 9)))


QUICK = ("gated_deltanet", "kda", "delta_product", "mamba2", "pola", "gla", "softmax", "soft")


@pytest.mark.sampled
@pytest.mark.parametrize("mixer", slow_but_for(QUICK, MIXERS))
def test_offloaded_weights(mixer):
    """They are in memory only while the module that has them runs."""
    from accelerate import cpu_offload

    model, kwargs = build(mixer), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected, loss = (
            model.generate(ids(2, 9), **kwargs),
            model(ids(2, 9), labels=ids(2, 9)).loss,
        )
        cpu_offload(model, torch.device("cpu"))
        assert all(p.is_meta for p in model.parameters())
        assert torch.equal(model.generate(ids(2, 9), **kwargs), expected)
        close(model(ids(2, 9), labels=ids(2, 9)).loss, loss)


def test_tied_embeddings_stay_tied(tmp_path):
    model = build(dtype=torch.float32, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again, ids(2, 9)), logits(model, ids(2, 9)))
