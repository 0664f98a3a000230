"""Models whose heads transformers splits over processes, by the plan of their config, are the whole models.

torchrun starts this file itself: `worker` compares there one model after another with its results on one process.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_models import close, ids
from training import launched
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

from nalanda import NalandaConfig, NalandaForCausalLM, NalandaForMaskedLM
from nalanda.model import MIXERS
from nalanda.model.plans import ROWS, is_cut, style_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
VARIANTS = {
    "grouped": {
        "mixer": "softmax",
        "num_heads": 8,
        "mixer_options": {
            "num_kv_heads": 4,
            "qk_norm": True,
            "gate": "channel",
            "conv_size": 3,
            "window": 9,
        },
    },
    "grouped_forgetting": {
        "mixer": "forgetting",
        "num_heads": 8,
        "mixer_options": {"num_kv_heads": 4, "gate": "head"},
    },
    "value_heads": {
        "mixer": "gated_deltanet",
        "mixer_options": {"num_v_heads": 8, "norm_write": True, "norm_read": True},
        "value_conv": 3,
    },
    "kda_value_heads": {"mixer": "kda", "mixer_options": {"num_v_heads": 8}},
    "mamba2_groups": {"mixer": "mamba2", "mixer_options": {"num_v_heads": 8}, "value_conv": 3},
    "mamba3_groups": {"mixer": "mamba3", "mixer_options": {"num_v_heads": 8}, "use_gate": False},
    "three_steps": {
        "mixer": "delta_product",
        "mixer_options": {"num_householder": 3, "use_forget_gate": True, "num_v_heads": 8},
    },
    "relu": {"mixer": "diag_attention", "mixer_options": {"block_size": 5, "scores": "relu"}},
    "no_shift": {"mixer": "rwkv7", "mixer_options": {"token_shift": False}, "expand_v": 2.0},
    "polapp": {"mixer": "pola", "feature_map": "polapp"},
    "learned": {"mixer": "gated_deltanet", "feature_map": "nala_learned"},
    "shifted": {"mixer": "deltanet", "feature_map": "silu_shifted", "tie_word_embeddings": True},
    # Each mixer with projections whose names the other has too, for other columns.
    "kda_hybrid": {
        "mixer": ["kda", "softmax"],
        "mixer_options": {"softmax": {"num_heads": 8, "head_dim": 4, "gate": "channel"}},
    },
    "product_hybrid": {"mixer": ["softmax", "delta_product"]},
    "mamba3_hybrid": {"mixer": ["delta_product", "mamba3"]},
    "tied": {"tie_word_embeddings": True, "vocab_size": 63, "intermediate_size": 50},
    "biased": {"use_bias": True, "scale_embeddings": True, "position_embedding": "sinusoidal"},
}
"""Groups of heads, parameters and options beyond the table of mixers, and sizes that no degree divides."""

WHOLE = {
    "kda": ["g_proj.weight", "a_proj.weight"],
    "gated_deltanet2": ["g_proj.weight", "a_proj.weight"],
    "delta_product": ["k_conv1d.weight", "v_conv1d.weight"],
    "rwkv7": [
        *("g_proj.weight", "w_proj.weight", "a_proj.weight"),
        *(f"shift.x_{name}" for name in ("q", "k", "v", "gate", "w", "a")),
    ],
    "nala": ["o_norm.weight", "o_norm.bias"],
    "gla": ["gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias"],
    "mamba2": ["o_norm.weight"],
    "mamba3": ["angle_proj.weight"],
}
"""Parameters of mixers that each process has whole, with their whole gradients."""


def models(maps: tuple[str, ...]) -> dict[str, NalandaConfig]:
    """Every mixer with its own map and those of `maps` that it takes, and the variants."""
    found = {}
    for mixer, kind in MIXERS.items():
        own = kind.rule.map
        for feature_map in dict.fromkeys((own, *maps) if own else (None,)):
            signed = mixer == "linear_attention" and feature_map == "silu"
            options = {"denominator": False} if signed else {}
            fields = {"mixer": mixer, "feature_map": feature_map, "mixer_options": options}
            try:
                found[f"{mixer}-{feature_map}"] = NalandaConfig(
                    **SIZES, **fields, num_hidden_layers=1
                )
            except ValueError:  # a mixer without a choice of maps, or negative products
                assert feature_map != own
    for name, fields in VARIANTS.items():
        layers = len(fields.get("mixer", "")) if isinstance(fields.get("mixer"), list) else 1
        found[name] = NalandaConfig(**{**SIZES, "num_hidden_layers": layers, **fields})
    return found


def random_model(config: NalandaConfig) -> NalandaForCausalLM:
    """A float64 model, in which every parameter matters."""
    torch.manual_seed(0)
    model = NalandaForCausalLM(config).double()
    for parameter in model.parameters():
        spread = torch.randn_like(parameter)
        parameter.data.copy_(0.3 * spread if parameter.ndim > 1 else parameter.data + 0.1 * spread)
    return model


def results(model) -> dict[str, torch.Tensor]:
    """Logits, a loss and its gradients, and the greedy continuation of two texts, one of them padded."""
    tokens = ids(2, 21)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    model.eval()
    found = {"logits": model(tokens, attention_mask=mask).logits}
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    found["written"] = model.generate(tokens, attention_mask=mask, **options)

    model.train()
    found["loss"] = model(tokens, attention_mask=mask, labels=tokens).loss
    found["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: whole(x).detach() for name, x in (found | gradients).items()}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def compare(path: Path, saved: Path) -> None:
    """Raises if a model on all processes differs from its results on one. It saves the model where none is saved."""
    again = saved.exists()
    split = NalandaForCausalLM.from_pretrained(saved if again else path, tp_plan="auto")
    degree = dist.get_world_size()

    with torch.no_grad():
        states = split(ids(1, 7), use_cache=True).past_key_values.states
        for layer, held in zip(split.model.layers, states, strict=True):
            for name, (shape, _) in layer.mixer.state_spec(7).items():
                share = torch.Size(shape).numel() // (1 if layer.mixer.is_whole(name) else degree)
                assert held[name].numel() == share, name

    expected = load_file(path / "results.safetensors")
    for name, x in results(split).items():
        # Some parameters are fp32, and so are their gradients.
        limits = (
            {"rtol": 1e-9, "atol": 1e-10}
            if x.dtype == torch.float64
            else {"rtol": 1e-4, "atol": 1e-5}
        )
        torch.testing.assert_close(
            x, expected[name], **limits, msg=lambda text, name=name: f"{name}: {text}"
        )
    if not again:
        split.save_pretrained(saved)


def worker(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    faults = {}
    for name in names:
        try:
            compare(folder / name, folder / f"{name}-saved")
        except Exception as error:  # a process that ended here would leave the others waiting
            faults[name] = f"{type(error).__name__}: {error}"
    (folder / f"faults-{dist.get_world_size()}-{dist.get_rank()}").write_text(json.dumps(faults))


@pytest.mark.slow
def test_split_models_are_whole_models(tmp_path):
    """On two processes; some on four and on one too, from what the two have saved."""
    many = models(("nala",))
    few = ["gated_deltanet-nala", "softmax-None", "mamba3-None", "kda_hybrid", "tied"]
    for name, config in many.items():
        model = random_model(config)
        model.save_pretrained(tmp_path / name)
        expected = results(NalandaForCausalLM.from_pretrained(tmp_path / name))
        save_file(
            {key: x.contiguous() for key, x in expected.items()},
            tmp_path / name / "results.safetensors",
        )

    for processes, names in ((2, many), (4, few)):
        launched(__file__, str(tmp_path), *names, processes=processes, seconds=1200)
        for rank in range(processes):
            assert (tmp_path / f"faults-{processes}-{rank}").read_text() == "{}"

    for name in few:
        weights = NalandaForCausalLM.from_pretrained(tmp_path / name).state_dict()
        again = NalandaForCausalLM.from_pretrained(tmp_path / f"{name}-saved").state_dict()
        assert weights.keys() == again.keys()
        for key, x in weights.items():
            close(again[key], x, 0.0)


@pytest.mark.parametrize("mixer", MIXERS)
def test_plan_splits_or_shares_every_parameter(mixer):
    config = NalandaConfig(**SIZES, mixer=mixer, num_hidden_layers=1)
    with torch.device("meta"):
        model = NalandaForCausalLM(config)
    plan, module = model.tp_plan, model.model.layers[0].mixer
    names = [name for name, _ in module.named_parameters()]
    whole = [name for name in names if style_of(f"model.layers.0.mixer.{name}", plan) is None]
    assert whole == WHOLE.get(mixer, [])
    assert config.tensor_parallel_degrees == [1, 2, 4]

    # All of it names something, and the large matrices are cut.
    outside = [name for name, _ in model.named_parameters() if not is_cut(name, plan)]
    assert {"model.norm.weight", "model.layers.0.mlp_norm.weight"} <= {*outside}
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & {*outside}
    known = {name for name, _ in model.named_modules()} | {n for n, _ in model.named_parameters()}
    assert {name.replace("*", "0") for name in plan} <= known

    # Rows where heads and channels are summed.
    rows = {name.removeprefix("model.layers.*.") for name, style in plan.items() if style == ROWS}
    assert rows == {"mixer.o_proj", "mlp.down_proj"}


def test_heads_that_cannot_be_split_are_refused_before_weights_are_read():
    config = NalandaConfig(**SIZES, mixer="softmax", mixer_options={"num_kv_heads": 2})
    with torch.device("meta"):
        model = NalandaForCausalLM(config)
    with pytest.raises(
        ValueError, match=r"over 4 processes.* 2 head\(s\) of mixer 'softmax'.* take 1, 2$"
    ):
        model.maybe_distribute_model(model, DistributedConfig(tp_size=4), None)
    with pytest.raises(ValueError, match=r"pp_size=2: .* set it to 1"):
        model.maybe_distribute_model(model, DistributedConfig(pp_size=2), None)


def test_mixers_that_share_a_name_for_other_norms_are_refused():
    config = NalandaConfig(**SIZES, mixer=["nala", "gated_deltanet"], num_hidden_layers=2)
    assert config.base_model_tp_plan is None
    assert config.tensor_parallel_degrees == [1]
    with pytest.raises(ValueError, match=r"'nala' and 'gated_deltanet': .*o_norm.weight.*use FSDP"):
        config.check_tensor_parallel(2)


def test_a_tied_model_loads_where_transformers_adds_to_its_plan(monkeypatch):
    """As transformers 5.19 does, while it makes a config."""
    made = PreTrainedConfig.__post_init__

    def add(self, **kwargs):
        made(self, **kwargs)
        if self.tie_word_embeddings and self.base_model_tp_plan is not None:
            self.base_model_tp_plan = {}

    monkeypatch.setattr(PreTrainedConfig, "__post_init__", add)
    config = NalandaConfig(**SIZES, mixer="deltanet", num_hidden_layers=1, tie_word_embeddings=True)
    assert config.tie_word_embeddings
    assert config.base_model_tp_plan["embed_tokens"] == "embedding_rowwise"


def test_encoders_have_a_plan():
    config = NalandaConfig(**SIZES, mixer="linear_attention", is_decoder=False, num_hidden_layers=1)
    with torch.device("meta"):
        model = NalandaForMaskedLM(config)
    assert model.tp_plan["model.layers.*.mixer.q_proj"] == "colwise"


def test_mixers_from_outside_have_no_plan_but_their_own(monkeypatch):
    monkeypatch.setitem(MIXERS, "outside", type("Own", (MIXERS["deltanet"],), {"__module__": "x"}))
    config = NalandaConfig(**SIZES, mixer="outside", num_hidden_layers=1)
    assert config.base_model_tp_plan is None
    with pytest.raises(ValueError, match="Own has no plan; give it `tp_plan`"):
        config.check_tensor_parallel(2)
    MIXERS["outside"].tp_plan = lambda self: {"o_proj": "rowwise"}
    assert config.base_model_tp_plan["layers.*.mixer.o_proj"] == "rowwise"


if __name__ == "__main__":
    worker(Path(sys.argv[1]), sys.argv[2:])
