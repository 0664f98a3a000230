"""The demo's baselines and its recipe; the demo itself at small size."""

import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pages
import pytest
import torch
from nalanda_eval.baselines import Bigram, measure_perplexity, zeroed_mixers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, Qwen3NextConfig

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.config.load import load_config

RECIPES = Path(__file__).parents[2] / "recipes"
SHAPES = {
    NalandaConfig: {"num_heads": 2},
    LlamaConfig: {"num_attention_heads": 2, "intermediate_size": 32},
    MambaConfig: {},
    GPT2Config: {"num_attention_heads": 2},
    Qwen3NextConfig: {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "moe_intermediate_size": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "intermediate_size": 32,
        "shared_expert_intermediate_size": 16,
        "num_experts_per_tok": 1,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def packed(*documents: list[int]) -> dict[str, torch.Tensor]:
    """Documents in one row, as `PackedBatches` gives them."""
    ids = torch.tensor([[token for document in documents for token in document]])
    labels = ids.clone()
    starts = np.cumsum([0, *map(len, documents)])
    labels[0, starts[:-1]] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
        "position_ids": torch.tensor([[i for document in documents for i in range(len(document))]]),
    }


def test_bigram_by_hand():
    # Pairs 01 ×2, 12, 10, 20 ×3, 03: counts [2, 1, 1, 3, 1], three ones and one two, so d = 3/5. Tokens have
    # 2, 1, 1 and 1 predecessors (0 from 1 and 2): three ones, one two again, e = 3/5. Five bigrams, V = 5.
    bigram = Bigram([packed([0, 1, 2, 0], [0, 1, 0, 3]), packed([2, 0], [2, 0])], vocab_size=5)
    lower = {
        0: (2 - 0.6) / 5 + 0.6 * 4 / 5 / 5,
        3: (1 - 0.6) / 5 + 0.6 * 4 / 5 / 5,
        4: 0.6 * 4 / 5 / 5,
    }
    expected = [
        (2 - 0.6) / 3
        + 0.6 * 2 / 3 * ((1 - 0.6) / 5 + 0.6 * 4 / 5 / 5),  # 1 after 0: c(01) = 2 of c(0) = 3
        0.6 * 2 / 3 * lower[0],  # 0 after 0: unseen, 0 has two followers
        (3 - 0.6) / 3 + 0.6 * 1 / 3 * lower[0],  # 0 after 2
        0.6 * 2 / 3 * lower[4],  # 4 was never seen
        lower[3],  # nothing was ever seen after 3
    ]
    found = bigram.probabilities(np.array([0, 0, 2, 0, 3]), np.array([1, 0, 0, 4, 3]))
    assert found == pytest.approx(expected)

    row = packed([0, 1], [3, 3])
    assert bigram.perplexity([row]) == pytest.approx(
        math.exp(-np.log([expected[0], expected[4]]).mean())
    )


def test_bigram_sums_to_one():
    ids = torch.randint(0, 9, (4, 64), generator=torch.Generator().manual_seed(0))
    bigram = Bigram([{"input_ids": ids, "labels": ids}], vocab_size=11)
    second = np.arange(11)
    for first in range(11):
        assert bigram.probabilities(np.full(11, first), second).sum() == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [NalandaConfig, LlamaConfig, MambaConfig, GPT2Config, Qwen3NextConfig]
)
def test_zeroing_is_undone_and_isolates_tokens(kind):
    torch.manual_seed(0)
    config = kind(
        vocab_size=31, hidden_size=32, num_hidden_layers=2, initializer_range=0.5, **SHAPES[kind]
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([[1, 2, 3, 4], [4, 2, 3, 4]])  # they differ in the first token
    batch = packed([1, 2, 3, 4, 5, 6], [4, 3, 2, 1])
    with torch.no_grad():
        whole, ppl = model(ids).logits[:, -1], measure_perplexity(model, [batch])
        with zeroed_mixers(model):
            alone, zeroed_ppl = model(ids).logits[:, -1], measure_perplexity(model, [batch])
    assert torch.allclose(alone[0], alone[1], rtol=1e-4, atol=1e-3)
    assert not torch.allclose(whole[0], whole[1], rtol=1e-2)
    assert ppl != pytest.approx(zeroed_ppl, rel=1e-2)
    with torch.no_grad():
        assert torch.equal(model(ids).logits[:, -1], whole)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_token_mixers_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.config = NalandaConfig(num_hidden_layers=1)
    with pytest.raises(ValueError, match="none of mixer, self_attn"), zeroed_mixers(model):
        pass


def test_perplexity_of_packed_documents():
    torch.manual_seed(0)
    model = NalandaForCausalLM(
        NalandaConfig(vocab_size=31, hidden_size=32, num_hidden_layers=1, num_heads=2)
    ).eval()
    documents = [1, 2, 3, 4, 5], [6, 7, 8]
    nll = []
    for document in documents:
        ids = torch.tensor([document])
        logp = model(ids).logits.log_softmax(-1)
        nll += (-logp[0, :-1].gather(-1, ids[0, 1:, None])).flatten().tolist()
    assert measure_perplexity(model, [packed(*documents)]) == pytest.approx(
        math.exp(np.mean(nll)), rel=1e-5
    )


def test_recipe_is_whole_and_builds():
    from nalanda.config.model import build_model_config

    config = load_config(RECIPES / "demo.yaml")
    assert config.model["feature_map"] == "nala"
    assert config.model["mixer"] == "gated_deltanet"
    config.model["vocab_size"] = config.tokenizer.vocab_size
    with torch.device("meta"):
        model = NalandaForCausalLM(build_model_config(config))
    assert 2e6 < model.num_parameters() < 4e6


@pytest.mark.slow
def test_the_demo_runs(tmp_path):
    pages.write_corpus(tmp_path / "corpus")
    command = ["python", str(RECIPES / "demo.py"), *pages.TINY.split(), "output_dir=run"]
    code, printed = pages.run(command, tmp_path, {})
    assert code == 0, printed[-3000:]
    titles = ["train", "evaluate", "compare", "generate", "type next"]
    assert re.findall(r"─ ([a-z ]+) ─", printed) == titles

    # The two bits a byte stand in the panel, each with its text.
    panel = printed.split("─ compare ─")[1].split("─ generate ─")[0]
    assert "These bits a byte are of whole documents." in panel
    assert "python_docs_perplexity, above, are of the first lines of each." in panel

    # The last screen has the continuation, and ends with the commands to type next.
    end = printed.split("─ generate ─")[1]
    assert re.search(r'^def read_lines\(path\):\n    """Return.+', end, re.MULTILINE)
    assert len(end.splitlines()) < 24
    assert end.endswith('\nnalanda generate run "def main("\nnalanda report run\n')

    rows = re.findall(r"([\d.]+) +\d\.\d{3} +│$", printed, re.MULTILINE)
    model, bigrams, zeroed = map(float, rows)
    assert 1 < bigrams < model < 600
    assert model != zeroed

    # For the run's page, and the scores for the model's card.
    baselines = json.loads((tmp_path / "run" / "baselines.json").read_text())
    assert baselines["bigrams"]["val_ppl"] == pytest.approx(bigrams, abs=0.06)
    assert baselines["mixers zeroed"]["val_ppl"] == pytest.approx(zeroed, abs=0.06)
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "| python_docs_cloze | acc | 0." in card
    for file in ("final/model.safetensors", "metrics.jsonl", "eval/results.md", "loss.png"):
        assert (tmp_path / "run" / file).is_file()


def test_a_folder_of_others_is_refused_with_the_command_for_another(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    main = runpy.run_path(str(RECIPES / "demo.py"))["main"]
    with pytest.raises(SystemExit) as stop:
        main([f"output_dir={tmp_path}"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "choose another output_dir, such as python recipes/demo.py output_dir=" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "argument",
    ["runs/demo", "a b", "it's", 'def f():\n\t"""It\'s \\n', "data.source=*.txt", "é$HOME"],
)
def test_a_command_that_is_shown_does_what_the_demo_did(argument):
    typed = runpy.run_path(str(RECIPES / "demo.py"))["quote"](argument)
    assert "\n" not in typed
    shell = subprocess.run(["bash", "-c", f"printf %s {typed}"], capture_output=True, text=True)
    assert shell.stdout == argument


def test_the_next_commands_activate_an_environment_that_is_not_active(monkeypatch):
    next_commands = runpy.run_path(str(RECIPES / "demo.py"))["next_commands"]
    monkeypatch.setattr(sys, "prefix", str(Path("a b").absolute()))
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    generate, report = next_commands(Path("runs/my demo"))
    assert generate == "nalanda generate 'runs/my demo' \"def main(\""
    assert report == "nalanda report 'runs/my demo'"

    monkeypatch.delenv("VIRTUAL_ENV")
    assert next_commands(Path("runs/my demo")) == [". 'a b/bin/activate'", generate, report]

    monkeypatch.setattr(sys, "prefix", sys.base_prefix)  # no environment
    assert next_commands(Path("runs/my demo")) == [generate, report]
