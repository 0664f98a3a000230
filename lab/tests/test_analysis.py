"""`nalanda-lab analyze`: its measures against hand computation, and tiny models, ours and transformers' own."""

import json
import math

import pytest
import torch
import yaml
from nalanda_kernels import keep_model_types, use_backend
from nalanda_lab import analysis
from nalanda_lab.analysis import (
    analyze,
    effective_rank,
    gradient_spread,
    layer_measures,
    local_score,
    measure_key_norms,
    measure_layer,
    measure_pairs,
    measure_signs,
    positive_entropy,
    relative_std,
    share_of_negatives,
)
from nalanda_lab.plots import print_analysis
from transformers import AutoConfig, AutoModelForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common.errors import InputError
from nalanda.model import MIXERS
from nalanda.model.sequences import Sequences

T = 6
PROSE = "Below the weir the water is slow, and the boats lie there in a row all winter. " * 12


def uniform(length: int) -> torch.Tensor:
    ones = torch.ones(length, length, dtype=torch.float64).tril()
    return ones / ones.sum(-1, keepdim=True)


def close(value, expected):
    torch.testing.assert_close(
        torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(expected).double()
    )


# ------------------------------ measures


def test_entropy_is_of_the_positive_entries_whatever_their_scale():
    close(positive_entropy(5.0 * uniform(T)), torch.arange(1, T + 1).log())
    row = torch.tensor([3.0, -7.0, 1.0, 0.0], dtype=torch.float64)
    close(positive_entropy(row), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert positive_entropy(-row.abs()).isnan()


def test_effective_rank():
    close(effective_rank(3 * torch.eye(T, dtype=torch.float64)), T)
    column = torch.arange(1.0, T + 1, dtype=torch.float64)
    close(effective_rank(torch.outer(column, column)), 1.0)
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    close(effective_rank(torch.diag(-4 * p)), 0.5**-0.5 * 0.3**-0.3 * 0.2**-0.2)


def test_negative_share_counts_the_causal_entries():
    weights = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 2.0, 0.0], [0.0, -0.5, 3.0]])
    close(share_of_negatives(weights), 2 / 6)
    close(share_of_negatives(torch.stack([weights, -weights])), [2 / 6, 3 / 6])


def test_local_score_by_hand():
    weights = torch.tensor(
        [[2.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [-3, 0, 0, 1]], dtype=torch.float64
    )
    # A row of zeros does not count; the last row's 3/4 lies three tokens back, inside r·T = 3 and not 2.
    close(
        local_score(weights, (0.0, 0.25, 0.5, 0.75, 1.0)), [1.75 / 3, 2.25 / 3, 2.25 / 3, 1.0, 1.0]
    )


@pytest.mark.parametrize("length", [1, 7, 50])
def test_local_score_rises_to_one(length):
    weights = torch.rand(
        2, 3, length, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    score = local_score(weights.tril())
    assert (score.diff(dim=-1) >= 0).all()
    close(score[..., -1], torch.ones(2, 3))
    assert length == 1 or (score[..., 0] < 0.9).all()


def test_relative_std():
    close(relative_std(torch.full((4, 2), 3.0)), [0.0, 0.0])
    close(relative_std(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)), 0.5)


def test_a_layer_is_measured_by_head():
    weights = torch.stack([uniform(T), -uniform(T) + 2 * torch.eye(T, dtype=torch.float64)])[None]
    found = measure_layer(weights.expand(3, -1, -1, -1))
    entropy = torch.arange(1, T + 1).log().mean()
    close(found["heads"]["entropy"], [entropy, 0.0])
    close(found["entropy"], entropy / 2)
    close(found["heads"]["negative_share"], [0.0, 15 / 21])
    close(found["negative_share"], 7.5 / 21)
    assert len(found["local_score"]) == len(analysis.WINDOWS)
    assert found["heads"]["effective_rank"][0] < found["heads"]["effective_rank"][1] <= T


def test_signs_of_strong_pairs_by_hand():
    q = torch.tensor([[1.0, -1, 1, -1], [-2, -2, 2, 2], [1, 1, 1, 1]]).double()[None, None]
    k = torch.tensor([[1.0, -1, -1, 1], [-1, 3, 1, -1], [1, -1, -1, -1]]).double()[None, None]
    weights = torch.tensor([[[[1.0, 0, 0], [0.7, 0.3, 0], [-0.9, 0.3, 0.2]]]]).double()
    found = measure_signs(q, k, weights)
    # The keys of the largest weights: 0, 0, 1; of equal signs are 2, 2, 2 entries of 4.
    close(found["equal in strong pairs"], 6 / 12)
    # Entries 1 of query 0, and 1 of query 1.
    close(found["both negative in strong pairs"], 2 / 12)
    close(found["equal in all pairs"], (2 + 2 + 2 + 2 + 2 + 1) / 24)


def test_lengths_of_keys_by_hand():
    lengths = torch.tensor([1.0, 2, 3, 6], dtype=torch.float64)
    k = (lengths[:, None] * torch.tensor([0.6, 0.8], dtype=torch.float64))[None, :, None]
    spreads, correlation = measure_key_norms(k, 2 * k)
    spread = lengths.std() / lengths.mean()
    close([*spreads.values(), correlation], [spread, spread, 1.0])
    unit = k / k.norm(dim=-1, keepdim=True)
    close(measure_key_norms(k, unit)[0]["spread of ‖φ(k)‖"], 0.0)
    close(measure_key_norms(k, unit * (7 - lengths[:, None, None]))[1], -1.0)


def test_a_mixers_pairs_are_those_of_its_weights():
    """Softmax weights are the products of q and k, so strong pairs agree in more signs than others."""
    model, rows = ours(mixer="softmax", mixer_options={"num_kv_heads": 1}), tokens(2, 24)
    x = model.model.layers[0].mixer_norm(model.model.embed_tokens(rows)).detach()
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.q_proj.weight *= 30
        weights = mixer.weights(x)
        found = measure_pairs(mixer, x, weights)
        inputs, _ = mixer.inputs(x, Sequences(), None)
    q, k = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2)
    close((q @ k.mT / q.shape[-1] ** 0.5).tril().argmax(-1)[..., -1], weights.argmax(-1)[..., -1])
    assert found["signs"] == measure_signs(q, k.expand_as(q), weights)
    assert found["signs"]["equal in strong pairs"] > 0.05 + found["signs"]["equal in all pairs"]
    assert found["key_norm_correlation"] > 0.9999  # no map


# ------------------------------ models


def ours(**keys) -> NalandaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "bos_token_id": 0,
    }
    return NalandaForCausalLM(NalandaConfig(**sizes, intermediate_size=32, **keys)).eval()


def theirs(kind: str, **keys):
    torch.manual_seed(0)
    keep_model_types()
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **keys)).eval()


def llama():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    return theirs("llama", **sizes, max_position_embeddings=64)


def saved(model, tokenizer, directory):
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def prose(tmp_path):
    path = tmp_path / "prose.md"
    path.write_text(PROSE)
    return str(path)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 320, shape, generator=torch.Generator().manual_seed(0))


def test_the_weights_measured_are_those_of_the_layers_own_input():
    """Layer by layer against a forward that stops there; a hook on the wrong tensor would not agree."""
    # A layer's norm alone is torch's: so are all others here.
    with use_backend("torch"):
        model, rows = ours(mixer="gated_deltanet", feature_map="nala"), tokens(2, 24)
        hidden = model(rows, output_hidden_states=True).hidden_states
        found = layer_measures(model, rows)
        for layer, x, measured in zip(model.model.layers, hidden, found, strict=False):
            weights = layer.mixer.weights(layer.mixer_norm(x))
            pairs = measure_pairs(layer.mixer, layer.mixer_norm(x), weights)
            assert measured == measure_layer(weights) | pairs
        assert measured["negative_share"] > 0
    assert not any(layer.mixer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_can_be_measured(mixer):
    model, rows = ours(mixer=mixer), tokens(2, 20)
    for measured, spread in zip(
        layer_measures(model, rows), gradient_spread(model, rows), strict=True
    ):
        assert 0 < measured["entropy"] <= math.log(20)
        assert 0 <= measured["negative_share"] < 1 < measured["effective_rank"] < 20 + 1e-5
        assert abs(measured["local_score"][-1] - 1) < 1e-5
        assert all(0 < share < 1 for share in measured["signs"].values())
        assert all(0 <= spread < 2 for spread in measured["key_norms"].values())
        assert all(0 < value < 2 for value in spread.values())


def test_a_transformers_weights_are_its_attentions():
    model, rows = llama(), tokens(2, 24)
    found = layer_measures(model, rows)
    attentions = model(rows, output_attentions=True).attentions
    assert found == [measure_layer(attention.detach()) for attention in attentions]
    assert [measured["negative_share"] for measured in found] == [0.0, 0.0]
    assert len(found[0]["heads"]["entropy"]) == 4


def test_gradients_spread_over_batches():
    model, rows = ours(), tokens(3, 16)
    same = gradient_spread(model, rows[:1].expand(3, -1))
    assert all(abs(value) < 1e-5 for layer in same for value in layer.values())
    found = gradient_spread(model, rows)
    norms = []
    for row in rows:
        model.zero_grad()
        model(row[None], labels=row[None]).loss.backward()
        layer = model.model.layers[1]
        norms.append([p.grad.norm() ** 2 for p in layer.mixer.parameters()])
    norms = torch.tensor(norms).sum(1).sqrt()
    close(found[1]["mixer_parameters"], norms.std() / norms.mean())
    assert (
        found[1]["other_parameters"] != found[1]["mixer_parameters"] != found[1]["mixer_output"] > 0
    )


KEYS = {
    "model",
    "model_type",
    "text",
    "length",
    "rows",
    "gradient_batches",
    "seed",
    "versions",
    "notes",
    "windows",
    "uniform",
    "layers",
    "figures",
}
OF_WEIGHTS = {"entropy", "negative_share", "local_score", "effective_rank_weights"}
OF_PAIRS = {"signs_of_pairs", "key_norms"}
OF_ALL = {"effective_rank_projections", "gradient_relative_std"}


def test_analyze_a_checkpoint(tokenizer, tmp_path, prose, capsys):
    model = ours(mixer="deltanet", feature_map="silu")
    name = saved(model, tokenizer, tmp_path / "run" / "final")
    found, directory = analyze(name, text=prose, length=32, rows=3)
    assert directory == tmp_path / "run" / "analysis"
    assert json.loads((directory / "analysis.json").read_text()) == found
    assert set(found) == KEYS
    rows = analysis.text_rows(model, tokenizer, prose, length=32, rows=3, seed=0)
    assert found["gradient_batches"] == len(rows) == 8
    close(found["layers"][1]["entropy"], layer_measures(model, rows[:3])[1]["entropy"])
    assert [layer["mixer"] for layer in found["layers"]] == ["deltanet", "deltanet"]
    assert set(found["layers"][0]["projections"]) == {"q_proj", "k_proj", "v_proj"}
    assert "both signs" in " ".join(found["notes"])
    close(found["uniform"]["entropy"], torch.arange(1, 33).log().mean())
    for figure in OF_WEIGHTS | OF_PAIRS | OF_ALL:
        for suffix, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
            assert f"{figure}.{suffix}" in found["figures"]
            assert (directory / f"{figure}.{suffix}").read_bytes().startswith(magic)
    print_analysis(found, directory)
    text = capsys.readouterr().out
    assert f"{found['layers'][1]['entropy']:.2f}" in text
    assert f"{found['layers'][1]['local_score'][5]:.1%}" in text  # r = 0.1


def test_analyze_models_of_transformers(tokenizer, tmp_path, prose, blank):
    name = saved(llama(), tokenizer, tmp_path / "llama")
    found, _ = analyze(name, text=prose, length=32, output=str(tmp_path / "a"))
    assert found["notes"] == []
    assert found["layers"][0]["mixer"] == "LlamaAttention"
    with pytest.raises(InputError, match=r"--length 65: is more than the model's 64 positions"):
        analyze(name, text=prose, length=65)

    name = saved(theirs("mamba", state_size=4), tokenizer, tmp_path / "mamba")
    found, directory = analyze(name, text=prose, length=32, output=str(tmp_path / "b"))
    assert found["notes"] == ["no attention weights in any layer: only gradients and projections"]
    assert {path.stem for path in directory.glob("*.p*")} == OF_ALL
    assert set(found["layers"][0]) == {"layer", "mixer", "projections", "gradients"}
    assert set(found["layers"][0]["projections"]) == {"in_proj", "x_proj", "dt_proj", "out_proj"}
    print_analysis(found, directory)


def test_a_recipe_stands_for_its_runs_model_or_an_untrained_one(tokenizer, tmp_path, prose, blank):
    saved(ours(), tokenizer, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").unlink()  # or transformers takes it for a model
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "mixer": "deltanet"}
    recipe = {
        "output_dir": str(tmp_path / "run"),
        "model": sizes,
        "tokenizer": str(tmp_path / "tokenizer"),
        "data": {"source": "python", "seq_len": 32},
        "train": {"steps": 100, "tokens_per_step": 64, "micro_batch_size": 2},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(recipe))
    options = {"text": prose, "length": 16}

    found, directory = analyze(str(path), **options)
    assert found["model"] == "small (untrained, seed 0)"
    assert directory == tmp_path / "run-untrained" / "analysis"
    assert not (tmp_path / "run").exists()  # a run would refuse to begin there
    assert len(found["layers"]) == 1
    assert analyze(str(path), **options)[0] == found
    assert analyze(str(path), seed=1, **options)[0]["layers"] != found["layers"]

    saved(ours(), tokenizer, tmp_path / "run" / "final")
    trained, directory = analyze(str(path), **options)
    assert trained["model"] == str(tmp_path / "run" / "final")
    assert directory == tmp_path / "run" / "analysis"
    assert len(trained["layers"]) == 2
    changed, _ = analyze(str(path), ["model.feature_map=relu"], **options)
    assert changed["model"] == "small model.feature_map=relu (untrained, seed 0)"


def test_rows_are_beginnings_first_and_begin_with_bos(tokenizer, tmp_path):
    path = tmp_path / "three.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("a" * 20, "b" * 20, "c" * 3))
    )
    rows = analysis.text_rows(ours(), tokenizer, str(path), length=6, rows=3, seed=0)
    assert (rows[:, 0] == tokenizer.bos_token_id).all()
    texts = tokenizer.batch_decode(rows[:, 1:].tolist())
    assert sorted(texts[:2]) == ["aaaaa", "bbbbb"]
    assert len(texts) == 8
    assert "c" not in "".join(texts)


@pytest.mark.parametrize("name", ["m[lr=1]", "odd[/b]", "a|b", ":smile:"])
def test_names_of_models_are_no_markup(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    facts = {"layers": [{"layer": 0, "mixer": name}], "uniform": {}, "windows": [0.1]}
    facts |= {"model": name, "rows": 1, "length": 8, "notes": [], "figures": []}
    print_analysis(facts, "d")
    assert capsys.readouterr().out.count(name) == 2


def test_a_recipes_name_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "recipe.yaml").write_text("")
    names = ("demo", "mine", "other", "runs/demo", "runs/recipe.yaml", "owner/name")
    found = [name for name in names if analysis.is_model(name)]
    assert found == ["mine", "runs/demo", "owner/name"]


def test_bad_input_is_one_line(tokenizer, tmp_path, prose):
    model = saved(ours(), tokenizer, tmp_path / "model")
    binary = tmp_path / "binary.bin"
    binary.write_bytes(b"\xff\xfe\xfa")
    for arguments, options, message in (
        ((model,), {"length": 1}, "at least 2 tokens"),
        ((model,), {"rows": 0}, "1 row"),
        ((model, ["model.mixer=deltanet"]), {}, "settings change a recipe"),
        ((model,), {"text": str(tmp_path / "nowhere.md")}, "nowhere.md. does not exist"),
        ((model,), {"text": str(binary)}, "not UTF-8"),
        ((model,), {"text": prose, "length": 512}, "has 1 of the 4 rows of 512 tokens"),
        ((model,), {"text": prose, "output": prose}, "--output"),
        (("nowhere.yaml",), {}, "no such recipe or file"),
        (("recipes/nowhere.yaml",), {}, "no such recipe or file"),
        (("demmo",), {}, "did you mean demo"),
        ((str(tmp_path / "nothing"),), {}, "no such model"),
    ):
        with pytest.raises(InputError, match=message) as error:
            analyze(*arguments, **options)
        assert "\n" not in str(error.value)
