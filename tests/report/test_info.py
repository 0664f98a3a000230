"""Every recipe that ships builds with the published size, and `nalanda info` prints the right figures."""

import json
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from training import of_rows, one_a_mixer

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common.errors import InputError
from nalanda.common.text import size
from nalanda.config.load import load_config
from nalanda.config.model import build_model_config
from nalanda.config.schema import DataConfig
from nalanda.model import MIXERS
from nalanda.model.sequences import Sequences
from nalanda.report import info as estimates
from nalanda.report import recipes, tables
from nalanda.report.info import info, print_info
from nalanda.report.keys import key_rows, print_keys
from nalanda.train.estimate import activation_bytes, exchanged_bytes, logits_bytes, saved_bytes
from nalanda.train.log import UTILISATION
from nalanda.train.needs import needs_of, shards

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
MILLIONS = {
    "deltanet_340m": 374.4,
    "nala_deltanet_340m": 374.4,
    "gated_deltanet_340m": 379.9,
    "nala_gated_deltanet_340m": 379.9,
    "nala_deltanet_340m_equal": 374.1,
    "nala_gated_deltanet_340m_equal": 379.8,
    "nala_paper_deltanet_340m": 374.4,
    "nala_paper_gated_deltanet_340m": 379.9,
    "nala_angle_gated_deltanet_340m": 379.9,
    "nala_fixed_gated_deltanet_340m": 379.9,
    "gated_deltanet_340m_deploy": 380.1,
    "nala_gated_deltanet_340m_deploy": 380.1,
    "comba_340m": 379.9,
    "gated_deltanet2_340m": 375.8,
    "delta_product_340m": 375.0,
    "rwkv7_340m": 388.3,
    "mamba2_340m": 374.9,
    "mamba3_340m": 377.2,
    "kda_340m": 387.0,
    "kda_hybrid_340m": 380.6,
    "gated_deltanet2_hybrid_340m": 380.4,
    "delta_product_hybrid_340m": 381.0,
    "mamba2_hybrid_340m": 380.7,
    "hybrid_340m": 380.8,
    "nala_hybrid_340m": 380.8,
    "mamba_340m": 385.6,
    "transformer_340m": 373.9,
    "forgetting_340m": 374.3,
    "retnet_340m": 375.5,
    "gla_340m": 374.5,
    "linear_attention_340m": 374.2,
    "nala_340m": 399.4,
    "mala_340m": 374.2,
    "pola_340m": 399.4,
    "soft_340m": 350.5,
}
WIKITEXT = {
    "transnormer_t1_wikitext103": 155.99,
    "transnormer_t2_wikitext103": 155.99,
    "transformer_wikitext103": 155.99,
    "linear_attention_wikitext103": 155.99,
}


@cache
def figures_of(recipe: str) -> dict:
    return info(recipe, [], memory=False)


@pytest.fixture
def figures_once(monkeypatch):
    """The tables take the figures of recipes that another test has computed."""
    monkeypatch.setattr(estimates, "info", lambda recipe, *_, **__: figures_of(recipe))


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipes_build_at_the_literatures_size(recipe):
    figures = figures_of(str(recipe))
    if recipe.stem in MILLIONS:
        assert figures["parameters"] / 1e6 == pytest.approx(MILLIONS[recipe.stem], rel=1e-3)
        assert figures["tokens"] == 28672 * 524288
    if recipe.stem in WIKITEXT:
        assert figures["parameters"] / 1e6 == pytest.approx(WIKITEXT[recipe.stem], abs=0.01)
        assert figures["tokens"] == 100_000 * 128 * 512
    assert 0 < figures["parameters_without_embeddings"] < figures["parameters"]
    # 6 per weight in a matrix product, plus the recurrence
    flops = figures["training_flops_per_token"]
    assert 6 * figures["parameters_without_embeddings"] < flops < 12 * figures["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", one_a_mixer(RECIPES), ids=lambda p: p.stem)
def test_the_memory_of_recipes_is_counted(recipe):
    figures = info(str(recipe), [])
    if figures["mixer"] is None:  # a model of another library, which is not measured
        assert figures["activation_bytes"] is None
        return

    assert 0 < figures["activation_bytes"] < figures["memory_bytes_per_device"]


def test_every_340m_recipe_has_its_literature_figure():
    assert {p.stem for p in RECIPES if "340m" in p.stem} == set(MILLIONS)
    wikitext = {p.stem for p in RECIPES if "wikitext" in p.stem and "_mlm_" not in p.stem}
    assert wikitext == set(WIKITEXT)


@pytest.mark.parametrize("plain", ["deltanet_340m", "gated_deltanet_340m"])
def test_twins_differ_in_the_map_alone(plain):
    """NaLa at the state and the parameters of the same mixer under SiLU."""
    rows = {row["recipe"]: row for row in recipes.recipe_rows()}
    ours, theirs = rows[f"nala_{plain}_equal"], rows[plain]
    assert ours["parameter count"] == pytest.approx(theirs["parameter count"], rel=2e-3)
    assert ours["state bytes"] == pytest.approx(theirs["state bytes"], rel=0.02)
    assert not ours["state"].endswith("×")
    assert rows[f"nala_{plain}"]["state"].endswith(", 2.0 ×")


@pytest.mark.slow
def test_state_is_what_generation_carries():
    figures = info("nala_gated_deltanet_340m", [])
    heads, features, values, channels = 6, 256, 256, 768 + 768 + 1536
    assert figures["state_bytes_per_sequence"] == 21 * (
        4 * heads * features * values + 2 * 3 * channels
    )


def test_vocabulary_of_words_that_are_not_counted_yet(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n{"text": "d e f"}\n{"text": "a g"}\n')
    words = [
        *(
            f"output_dir={tmp_path / 'run'}",
            "model={hidden_size: 64, num_hidden_layers: 1, num_heads: 1}",
        ),
        *(
            "tokenizer={train: words}",
            f"data.source={tmp_path}",
            f"data.validation_source={tmp_path}",
        ),
    ]

    def table(*overrides: str) -> int:
        figures = info("deltanet_340m", [*words, *overrides])
        return (figures["parameters"] - figures["parameters_without_embeddings"]) // (2 * 64)

    assert table() == 64  # 7 words and 3 special tokens, rounded up
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("nalanda.train.estimate.build_tokenizer", None)  # nothing is read
    assert table("tokenizer.vocab_size=1000") == 1024
    assert table("model.vocab_size=267744") == 267744
    assert (
        table(
            "model={auto: mamba, hidden_size: 64, tie_word_embeddings: false}",
            "tokenizer.vocab_size=99",
        )
        == 128
    )


def test_saved_bytes_are_counted():
    """A linear layer saves only its input; weights are not counted."""
    x = torch.empty(3, 5, 7, device="meta", requires_grad=True)

    class Block(torch.nn.Linear):
        def forward(self, x, seq):
            return super().forward(x)

    assert saved_bytes(Block(7, 11, device="meta"), x, Sequences()) == 3 * 5 * 7 * 4


def test_attention_keeps_no_matrix_of_probabilities():
    config = NalandaConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=1, num_heads=2, mixer="softmax"
    )
    counts = [activation_bytes(of_rows(1, T), config) for T in (512, 1024, 2048)]
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


def test_activations_grow_with_rows_and_shrink_with_checkpointing():
    config = NalandaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=4, num_heads=2)
    counts = [activation_bytes(of_rows(rows, 128), config) for rows in (1, 2, 3)]
    assert counts[1] - counts[0] == pytest.approx(counts[2] - counts[1], rel=0.01)
    assert activation_bytes(of_rows(2, 128, checkpointing=True), config) < counts[1]


def test_the_block_of_logits_is_no_larger_than_all_logits():
    config = NalandaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=4, num_heads=2)
    assert logits_bytes(config, 128) == 2 * 4 * 128 * 64
    assert logits_bytes(config, 2**30) == 2 * 4 * 2**26
    assert activation_bytes(of_rows(1, 128), config) < 2 * 4 * 2**26


@pytest.mark.slow
def test_a_context_divides_activations_and_sends_states():
    """U alone over two processes, M and U over more, and three columns of q, k and v for the convolutions."""
    shape = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2}
    config = NalandaConfig(mixer="gated_deltanet", **shape)
    HV, F, V = 2, 32, 32

    def sent(T: int, parts: int, checkpointing: bool = False) -> int:
        return exchanged_bytes(of_rows(1, T, "fp32", checkpointing, parts), config)

    halo = 3 * 3 * HV * F * 4
    assert sent(512, 1) == 0
    assert sent(512, 2) == sent(1024, 2) == 2 * 2 * (HV * F * V * 4 + halo) - 2 * HV * F * V * 4
    assert sent(512, 4) == 2 * 2 * 3 * (HV * F * (F + V) * 4 + halo)
    assert sent(512, 4, True) == 1.5 * sent(512, 4)
    whole, half, fourth = (
        activation_bytes(of_rows(1, 4096, parts=parts), config) for parts in (1, 2, 4)
    )
    assert whole / 2 < half < 0.65 * whole
    assert whole / 4 < fourth < 0.4 * whole


@pytest.mark.parametrize(
    "mixer", [name for name, kind in MIXERS.items() if kind.rule.cut and kind.rule.write != "rows"]
)
def test_a_recurrence_sends_as_much_for_any_length(mixer):
    config = NalandaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_heads=2, mixer=mixer
    )
    short, long = (exchanged_bytes(of_rows(1, T, parts=4), config) for T in (512, 1024))
    assert 0 < short == long


@pytest.mark.slow
def test_time_is_flops_over_a_share_of_the_peak():
    figures = info("gla_340m", [], 8, memory=False, device="H100")
    low, high = UTILISATION
    for seconds, share in zip(figures["seconds"], (high, low), strict=True):
        assert seconds == pytest.approx(figures["training_flops"] / (8 * share * 989e12))
    slow = info("gla_340m", ["train.precision=fp32"], 8, memory=False, device="h100")
    assert slow["seconds"][0] == pytest.approx(figures["seconds"][0] * 989 / 67)
    assert info("gla_340m", [], memory=False)["seconds"] is None
    assert info("gla_340m", [], memory=False, device="cpu")["peak_flops_per_device"] > 1e8
    with pytest.raises(InputError, match=r"--device: no data sheet of B100; did you mean \w100\?"):
        info("gla_340m", [], memory=False, device="B100")


def test_the_disk_of_a_recipe(capsys, monkeypatch):
    figures = info("gla_340m", ["checkpoint.keep_every=null"], memory=False)
    n, kept = figures["parameters"], 3
    assert figures["checkpoint_bytes"] == 12 * n
    assert figures["final_bytes"] == 4 * n
    assert figures["disk_bytes"] == (kept + 1) * 12 * n
    monkeypatch.setenv("COLUMNS", "120")
    print_info(figures)
    printed = capsys.readouterr().out
    assert re.search(r"disk +16\.7 GiB +at most; checkpoints 4 of 4\.2 GiB", printed)


def test_weights_and_moments_by_how_they_are_shared():
    def held(*overrides: str, processes: int = 1) -> int:
        return info("gla_340m", list(overrides), processes, memory=False)[
            "weights_and_optimizer_bytes"
        ]

    n = info("gla_340m", [], memory=False)["parameters"]
    assert held() == 16 * n
    assert held(processes=4) == 20 * n  # DDP's buckets
    muon = held("optim.name=muon")
    assert (
        12 * n < muon < 13 * n + 4 * 2 * 32000 * 1024
    )  # one moment, except for embedding and head
    once = "train.tokens_per_step=65536"  # one micro-batch a step
    split = held("train.parallel=fsdp", once, processes=4)
    assert 4 * n < split < 8 * n
    assert (
        held("train.parallel=fsdp", processes=4) == split + 4 * n
    )  # whole gradients, until they are reduced
    hybrid = held("train.parallel=hybrid", "train.shard_size=2", once, processes=4)
    assert split < hybrid < 16 * n
    config = load_config("gla_340m", ["train.parallel=hybrid"])
    assert [shards(config, processes) for processes in (4, 32)] == [4, 8]  # a node's
    assert shards(load_config("gla_340m", ["train.parallel=fsdp"]), 32) == 32


def test_the_memory_before_a_run(tmp_path):
    config = load_config("demo", ["model.vocab_size=4096"])
    model = NalandaForCausalLM(build_model_config(config))
    before = torch.get_rng_state()
    text = needs_of(config, model, 1).describe_memory()
    assert torch.equal(before, torch.get_rng_state())  # the run draws from it next
    assert "of the peak" not in text  # the first steps tell the time
    assert (
        f"{size(16 * model.num_parameters())} a device for weights, gradients and moments" in text
    )
    assert "for activations" in text


def test_stages_and_averages_count(capsys):
    stages = (
        "stages={anneal: {after_step: 300, schedule: {name: linear}}, "
        "long: {after_step: 400, data: {seq_len: 1024}, train: {tokens_per_step: 4096}}}"
    )
    plain, long = (
        info("demo", []),
        info("demo", ["data.seq_len=1024", "train.tokens_per_step=4096"]),
    )
    staged = info("demo", [stages, "train.ema=[0.9, 0.99]"])
    assert staged["tokens"] == 400 * 2048 + 112 * 4096
    assert staged["activation_bytes"] == long["activation_bytes"] > plain["activation_bytes"]
    flops = [figures["training_flops_per_token"] for figures in (plain, long)]
    assert staged["training_flops"] == 400 * 2048 * flops[0] + 112 * 4096 * flops[1]

    # Two averages in fp32: beside the weights, in each checkpoint, and as models.
    averages = 2 * 4 * plain["parameters"]
    for key in ("weights_and_optimizer_bytes", "checkpoint_bytes", "final_bytes"):
        assert staged[key] == plain[key] + averages
    print_info(staged)
    printed = " ".join(capsys.readouterr().out.split())
    assert "stage long after 400 112 steps; data.seq_len 1024" in printed


def test_printed(capsys):
    print_info(info("deltanet_340m", []))
    printed = capsys.readouterr().out
    for figure in ("374.4 M", "308.8 M", "15.032 B", "12.4 MiB", "28,672", "sequences torch, a"):
        assert figure in printed
    assert [size(n) for n in (5, 2048, 3 << 20, 5 << 40)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "5,120.0 GiB",
    ]


def test_every_key_of_a_recipe_is_explained():
    assert [row["key"] for row in key_rows() if not row["meaning"]] == []
    found = {row["key"]: row for row in key_rows()}
    assert found["data.seq_len"]["default"] == str(DataConfig().seq_len)
    assert found["model.conv_size"]["type"] == "int | null"
    assert found["optim.groups[].match"]["default"] == "required"
    own = {
        f"model.{f.name}" for f in fields(NalandaConfig) if f.name in NalandaConfig.__annotations__
    }
    assert own - {"model.model_type"} <= found.keys()
    assert [row["key"] for row in key_rows(r"^data\.seq")] == ["data.seq_len"]
    with pytest.raises(InputError, match="regular expression"):
        key_rows("(")


def test_a_key_is_printed_with_its_default_or_as_required(capsys):
    print_keys("(seq_len|match)$")
    printed = capsys.readouterr().out
    assert f"data.seq_len: int = {DataConfig().seq_len}\n" in printed
    assert "optim.groups[].match: str required\n" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("figures_once")
@pytest.mark.parametrize("page", tables.TABLES)
def test_the_tables_of_a_page_are_the_codes(page):
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    assert tables.updated(page, text) == text, (
        f"{page}: its tables are not the code's; run `make tables`"
    )
    stale = re.sub(r"(-->\n\|.*\n\|.*\n)\|.*\n", r"\1| `old` |\n", text)
    assert stale != text
    assert tables.updated(page, stale) == text
    with pytest.raises(ValueError, match="needs one place"):
        tables.updated(page, "# Title")


@pytest.mark.slow
@pytest.mark.usefixtures("figures_once")
def test_the_stored_table_of_recipes_is_the_codes(tmp_path, monkeypatch):
    stored = recipes.STORED.read_text(encoding="utf-8")
    monkeypatch.setattr(recipes, "STORED", tmp_path / "recipes.json")
    recipes.store_rows()
    assert recipes.STORED.read_text(encoding="utf-8") == stored, (
        "recipes.json: not the code's; run `make tables`"
    )


def test_a_changed_recipe_and_a_new_one_are_counted(tmp_path, monkeypatch):
    demo = next(file for file in RECIPES if file.stem == "demo")
    text = demo.read_text(encoding="utf-8").replace("num_hidden_layers: ", "num_hidden_layers: 1")
    files = {"demo": tmp_path / "demo.yaml", "mine": tmp_path / "mine.yaml"}
    for file in files.values():
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(recipes, "recipe_files", lambda: files)
    changed, new = recipes.recipe_rows()
    counted = f"{info(str(files['demo']), [], memory=False)['parameters'] / 1e6:.1f} M"
    assert changed == new | {"recipe": "demo"}
    assert changed["parameters"] == counted
    stored = json.loads(recipes.STORED.read_text(encoding="utf-8"))
    assert stored["demo"]["row"]["parameters"] != counted


@pytest.mark.usefixtures("figures_once")
def test_tables_fit_a_terminal_and_cut_no_word(capsys, monkeypatch):
    rows = tables.all_rows()
    monkeypatch.setenv("COLUMNS", "400")
    tables.print_tables(rows)
    words = set(capsys.readouterr().out.split())
    monkeypatch.setenv("COLUMNS", "80")
    tables.print_tables(rows)
    out = capsys.readouterr().out
    assert "κ(Z, Z)" in out
    assert "[relu(x)^p;" in out  # brackets are not markup
    assert "transnormer_t1_wikitext103" in out
    assert all(cell_len(line) <= 80 for line in out.splitlines())
    assert {word for word in out.split() if "─" not in word} <= words

    # A narrower one gets the first columns.
    monkeypatch.setenv("COLUMNS", "40")
    tables.print_tables(rows)
    narrow = capsys.readouterr().out
    assert all(cell_len(line) <= 40 for line in narrow.splitlines())
    assert {word for word in narrow.split() if "─" not in word} <= words


@pytest.mark.usefixtures("figures_once")
@pytest.mark.parametrize(("width", "more"), [(80, False), (120, True)])
def test_the_recipes_have_mixer_and_map_at_any_width(capsys, monkeypatch, width, more):
    rows = recipes.recipe_rows()
    monkeypatch.setenv("COLUMNS", str(width))
    recipes.print_recipes(rows)
    out = capsys.readouterr().out
    assert all(cell_len(line) <= width for line in out.splitlines())
    assert "…" not in out
    assert ("tokens" in out) == more
    for row in rows:
        first, *others = row["mixer"].split(", ")
        line = next(line for line in out.splitlines() if line.startswith(f" {row['recipe']} "))
        assert f" {first} " in line
        assert f" {row['feature map']} " in line
        # A larger state is marked.
        state = "–" if row["state bytes"] is None else f"{row['state bytes'] / 2**20:.1f}"
        state += "*" * row["state"].endswith("×")
        assert f" {state} " in line
        assert all(f" {other} " in out for other in others)


def test_the_folder_of_a_run_names_its_recipe(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(
        InputError, match=f"a folder, not a recipe; its recipe is {tmp_path / 'config.yaml'}"
    ):
        info(str(tmp_path), [])


def test_what_each_tensor_parallel_process_holds(capsys):
    """A model of 1.3 B parameters on 64 processes, 8 to a copy of the heads."""
    wide = ["model.hidden_size=2048", "model.num_heads=16", "model.num_hidden_layers=23"]
    wide.append("train.micro_batch_size=4")
    figures = info("gated_deltanet_340m", wide, 64, memory=False, tp=8)
    assert figures["tensor_parallel_degrees"] == [1, 2, 4, 8, 16]
    share = figures["tensor_parallel"]
    assert 1.3e9 < figures["parameters"] < 1.4e9
    assert figures["parameters"] / 8 < share["parameters"] < figures["parameters"] / 7.9
    assert share["state_bytes"] * 8 == figures["state_bytes_per_sequence"]
    assert share["whole"] == [
        *("mixer_norm.weight", "mixer.o_norm.weight", "mlp_norm.weight", "norm.weight")
    ]
    print_info(figures)
    assert "tensor parallelism" in capsys.readouterr().out

    with pytest.raises(InputError, match=r"--tp 3: .* 16 head\(s\) of mixer 'gated_deltanet'"):
        info("gated_deltanet_340m", wide, memory=False, tp=3)
