"""`nalanda-lab states`: its arms are the product's caches, and the product serves what its records allow."""

import json
import tarfile

import pytest
import torch
from nalanda_lab import states
from nalanda_lab.states import (
    ARMS,
    HELD_NATS,
    HELD_RECALL,
    SIZES,
    START,
    draw_stream,
    holds,
    plan,
    read_stream,
    state_table,
)
from pages import ROOT

from nalanda.model import MIXERS, NalandaCache, NalandaConfig, NalandaForCausalLM
from nalanda.model.precision import LOSES, MEASURED, STATE_DTYPES


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["deltanet", "soft"])  # in C++, and in Python
def test_each_arm_reads_as_a_cache_of_its_precision(mixer):
    torch.manual_seed(0)
    model = NalandaForCausalLM(NalandaConfig(**SIZES, mixer=mixer)).eval()
    ids, _ = draw_stream(torch.arange(2000) % 256, torch.Generator().manual_seed(0), 12, 20)
    nats, hits = read_stream(model, ids)
    assert nats.shape == hits.shape == (len(ARMS), len(ids) - 1)
    whole = model(ids[None, :-1]).logits[0].log_softmax(-1)
    exact = -whole.gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(nats[0], exact, atol=1e-4, rtol=0)
    for arm, state_dtype in enumerate(STATE_DTYPES):
        cache = NalandaCache(len(model.model.layers))
        own = torch.zeros(len(ids) - 1)
        for t, token in enumerate(ids[:-1]):
            logits = model(token.view(1, 1), past_key_values=cache).logits[0, 0]
            cache.convert(state_dtype).convert("float32")
            own[t] = -logits.log_softmax(-1)[ids[t + 1]]
        # Sums of another order round elsewhere now and then, which grows with the text.
        assert (own - nats[arm]).abs().mean() <= 0.1 * (own - exact).abs().mean() + 1e-5


def test_a_stream_asks_for_what_it_has_said():
    text = torch.arange(5000) % 256
    ids, kinds = draw_stream(text, torch.Generator().manual_seed(0), 1000, 30, needles=8)
    assert len(ids) == len(kinds) == 1000
    said = {}
    for t, (token, kind) in enumerate(zip(ids.tolist(), kinds.tolist(), strict=True)):
        if kind in (2, 3):
            assert said[int(ids[t - 1])] == token
        elif token >= 256 + 32:
            said[int(ids[t - 1])] = token
    assert int((kinds == 3).sum()) == 8


def test_a_record_is_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(states, "PAIR_STEPS", 1)
    monkeypatch.setattr(states, "TEXT_STEPS", 1)
    states.states(["gla"], 2048 // 8, str(tmp_path))
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert record["arms"]["int8"]["state_bytes"] < record["arms"]["float32"]["state_bytes"] / 2
    monkeypatch.setattr(states, "measure", None)
    states.states(["gla"], 256, str(tmp_path))
    assert "| gla | " in capsys.readouterr().out


def read_records():
    """The records of the repository by their names, in the order of the plan."""
    with tarfile.open(ROOT / "lab/records/states.tar.xz") as archive:
        names = [name for name in plan() if f"{name}.json" in archive.getnames()]
        return {name: json.load(archive.extractfile(f"{name}.json")) for name in names}


def test_the_page_has_the_records_and_their_rule():
    page = (ROOT / "lab/pages/serving.md").read_text()
    assert state_table(read_records()).split("\n", 2)[2] in page
    rule = f"✗ marks a loss of over {HELD_NATS} nats, there or in the first {START:,} tokens, or of over one point"
    assert rule in " ".join(page.split())
    assert HELD_RECALL == 0.01


def test_the_product_serves_what_was_measured_to_hold():
    records = {}
    for name, record in read_records().items():
        options = plan()[name]
        pair = (options["mixer"], options.get("feature_map", MIXERS[options["mixer"]].rule.map))
        records[pair] = record
    measured = {(mixer, name) for mixer, names in MEASURED.items() for name in names}
    assert measured == records.keys()
    for state_dtype, pairs in LOSES.items():
        assert pairs == {p for p, record in records.items() if not holds(record, state_dtype)}
