"""Every recipe's architecture, made tiny: it learns, and only its mixers connect tokens."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training import one_a_mixer
from transformers import AutoConfig, AutoModelForCausalLM, Mamba2Config, MambaConfig

from nalanda.config.load import load_config
from nalanda.config.model import build_model_config, config_source, is_encoder, language_model
from nalanda.config.schema import OptimConfig
from nalanda.train.loss import packed_logits
from nalanda.train.optim import build_optimizer

RECIPES = sorted(p for p in Path("recipes").glob("*.yaml") if p.stem != "demo")
VOCAB, PATTERN, T, ROWS, STEPS = 16, 4, 20, 24, 44
LEARNT = 2.3  # nats a token, where training may end: no step sees a pattern of an earlier one


def twin(recipe: Path):
    """The recipe's model at small sizes."""
    config = load_config(recipe)
    keys = config.model | {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}
    keys["initializer_range"] = 0.12  # 0.02, for 1024 channels, would take more steps here
    small = {"num_heads": 2, "num_attention_heads": 2, "head_dim": 32, "intermediate_size": 64}
    keys |= {name: size for name, size in small.items() if name in keys}
    if keys.get("auto") == "mamba":  # without its kernels the scan is a Python loop over the tokens
        keys |= {"num_hidden_layers": 1, "state_size": 4}
    if "mixer" in keys:
        keys["max_position_embeddings"] = 64  # room for a block
    mixer = keys.get("mixer")
    if (
        names := mixer["pattern"]
        if isinstance(mixer, dict)
        else mixer
        if isinstance(mixer, list)
        else []
    ):
        keys["mixer"] = [names[0], names[-1]]
    own = {"num_heads": 2, "num_kv_heads": 1, "num_v_heads": 4, "head_dim": 32, "rotary_dim": 16}
    options = keys.get("mixer_options") or {}
    for table in (options, *(table for table in options.values() if isinstance(table, dict))):
        table |= {name: size for name, size in own.items() if name in table}
    config.model = keys
    config.data.seq_len = T
    torch.manual_seed(0)
    model_config = build_model_config(config)
    return language_model(model_config).from_config(model_config, dtype=torch.float32)


def repeated(step: int) -> torch.Tensor:
    """Rows of one random pattern each, repeated: looking back tells the next token."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (ROWS, PATTERN), generator=generator).repeat(1, T // PATTERN)


def loss_after_training(model) -> float:
    """Nats a token on new patterns, from the second repetition on."""
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2))

    def loss(step: int) -> torch.Tensor:
        tokens = repeated(step)
        if is_encoder(model.config):  # of hidden tokens
            hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(step)) < 0.3
            labels = tokens.where(hidden, -100)
            return model(input_ids=tokens.masked_fill(hidden, 0), labels=labels).loss
        logits = model(input_ids=tokens, use_cache=False).logits[:, PATTERN:-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, PATTERN + 1 :].flatten())

    model.train()
    for step in range(STEPS):
        value = loss(step)
        if value < LEARNT:
            break
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return loss(STEPS).item()


class Nothing(nn.Module):
    """Returns zeros in place of a mixer's output."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.ours = mixer.__class__.__module__.startswith("nalanda")

    def forward(self, x: torch.Tensor, *args, **kwargs):
        return (torch.zeros_like(x), None) if self.ours else torch.zeros_like(x)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", one_a_mixer(RECIPES), ids=lambda p: p.stem)
def test_twin_learns_by_its_mixers(recipe):
    model = twin(recipe)
    assert loss_after_training(model) < 2.6  # without looking back: ln 16 = 2.77 nats
    for layer in (getattr(model, "model", None) or model.backbone).layers:
        layer.mixer = Nothing(layer.mixer)
    first, second = repeated(0)[:4], repeated(1)[:4]
    second[:, -1] = first[:, -1]
    with torch.no_grad():
        a, b = (model(input_ids=tokens, use_cache=False).logits for tokens in (first, second))
    torch.testing.assert_close(
        a[:, -1], b[:, -1]
    )  # without mixers nothing earlier reaches the last token
    assert not torch.allclose(a[:, -2], b[:, -2])


@pytest.mark.parametrize(
    "recipe", [p for p in RECIPES if "wikitext103" in p.stem], ids=lambda p: p.stem
)
def test_transnormers_setting_does_not_clip(recipe):
    assert load_config(recipe).optim.max_grad_norm == 0


PEERS = sorted(Path("recipes/fla").glob("*.yaml"))


@pytest.mark.parametrize("recipe", PEERS, ids=lambda p: p.stem)
def test_models_of_flash_linear_attention_have_our_shapes(recipe):
    """Their recipes differ from ours in the model's library only, and have as many parameters."""
    pytest.importorskip("fla")
    theirs, ours = load_config(f"fla/{recipe.stem}"), load_config(recipe.stem)
    sizes = []
    for config in (theirs, ours):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(build_model_config(config))
        sizes.append(sum(p.numel() for p in model.parameters()))
    assert sizes[0] == sizes[1]
    assert f"{sizes[0] / 1e6:.1f} M parameters" in recipe.read_text()
    for name in ("tokenizer", "data", "optim", "schedule", "train", "seed"):
        assert getattr(theirs, name) == getattr(ours, name)


def test_flash_linear_attention_leaves_transformers_models_alone():
    """Its import takes "mamba" and "mamba2" for models of its own."""
    models = pytest.importorskip("fla.models")
    AutoConfig.register("mamba", models.MambaConfig, exist_ok=True)  # what its first import does
    assert config_source({"auto": "mamba"}) is MambaConfig
    assert config_source({"auto": "mamba2"}) is Mamba2Config
    assert isinstance(AutoConfig.for_model("gated_deltanet"), models.GatedDeltaNetConfig)


def test_packed_documents_reach_flash_linear_attention_as_bounds(monkeypatch):
    calls = []

    class Model(nn.Module):
        def forward(self, input_ids, **options):
            calls.append(options)
            return SimpleNamespace(logits=input_ids[..., None].float())

    tokens, positions = (
        torch.arange(12).view(2, 6),
        torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]),
    )
    bounds = torch.tensor([0, 4, 6, 12])
    for module, keys in (("fla.models", {"cu_seqlens"}), ("transformers.models", {"position_ids"})):
        monkeypatch.setattr(Model, "__module__", module)
        logits = packed_logits(Model(), tokens, positions, bounds)
        assert torch.equal(logits[..., 0], tokens.float())  # `[B, T]` again
        assert calls[-1].keys() == keys | {"use_cache"}
    assert torch.equal(calls[0]["cu_seqlens"], bounds)
