"""Puts recurrent mixers in place of a pretrained transformer's attention.

The transformer, the teacher, is read as one of our models whose mixers are all `softmax`. `hybrid_config`
describes a hybrid that keeps all tensors but those of the replaced mixers. These begin with the teacher's
projections, and `fit.py` fits them to its outputs.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from nalanda.common.errors import InputError
from nalanda.common.files import new_folder
from nalanda.config.load import differences
from nalanda.config.model import written_out
from nalanda.convert.convert import (
    FORMATS,
    Part,
    copy_side_files,
    find_leading_bos,
    match_tensors,
    read_config,
    refuse_unknown,
    stored_tensors,
    tensors_of,
)
from nalanda.convert.formats import resolved
from nalanda.model import MIXERS, NalandaConfig

DEFAULT = {"pattern": ["gated_deltanet", "gated_deltanet", "gated_deltanet", "softmax"]}
"""`model.mixer` of a recipe without one: three recurrent layers to one that stays."""

OF_THE_TEACHER = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim"),
    *("intermediate_size", "norm_eps", "use_bias", "tie_word_embeddings"),
    *("position_embedding", "scale_embeddings"),
)
"""Keys of a model that a recipe may repeat, and not change."""


@dataclass(frozen=True)
class Transformer:
    """A pretrained transformer whose tensors are not read yet."""

    folder: Path
    config: NalandaConfig
    parts: dict[str, Part]
    """Its stored tensors by our names."""

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model, for reading only."""
        model: Any = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        tensors = {name: stored.read() for name, stored in self.parts.items()}
        # A tied head is stored once.
        model.load_state_dict(tensors, strict=not self.config.tie_word_embeddings)
        return model.to(device).eval().requires_grad_(False)


def open_transformer(folder: Path) -> Transformer:
    """Opens a Llama, Qwen3 or SmolLM2 folder, or one of ours with softmax attention in every layer.

    Raises:
        InputError: names the setting, or the tensor, that our softmax attention cannot express.
    """
    settings = read_config(folder)
    kind = str(settings.get("model_type"))
    try:
        refuse_unknown(kind, settings)
        ours = kind == "nalanda"
        config = NalandaConfig.from_pretrained(folder) if ours else FORMATS[kind].ours(settings)
        others = [name for name in config.layer_mixers if name != "softmax"]
        if others:
            raise InputError(f"mixer {others[0]!r}: only softmax attention is replaced")
        window = resolved(config)["mixer_options"]["softmax"]["window"]
        if window is not None:
            raise InputError(f"window={window}: only attention over the whole text is replaced")
        config.bos_token_id = find_leading_bos(folder, config)
        # Shapes come from the files' headers.
        parts = match_tensors(stored_tensors(folder), config, tensors_of(kind, settings))
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from None
    return Transformer(folder, config, parts)


def hybrid_config(teacher: NalandaConfig, keys: dict[str, Any]) -> NalandaConfig:
    """The config of the hybrid that `keys`, of a recipe's `model`, make of the teacher.

    `mixer` names the mixers of the layers; those called softmax keep the teacher's attention.

    Raises:
        InputError: names the key that differs from the teacher's, or that no mixer takes.
    """
    fixed = {name: getattr(teacher, name) for name in OF_THE_TEACHER}
    attention = resolved(teacher)["mixer_options"]["softmax"]
    options = keys.get("mixer_options") or {}
    repeated = {name: keys.get(name, value) for name, value in fixed.items()}
    changes = differences(
        fixed | {"mixer_options": {"softmax": attention}},
        repeated | {"mixer_options": {"softmax": attention | options.get("softmax", {})}},
    )
    for key, (value, chosen) in changes.items():
        # Files may hold a number that was rounded to fp32.
        if not (isinstance(value, float) and math.isclose(chosen, value, rel_tol=1e-6)):
            raise InputError(
                f"model.{key}: {chosen!r}, but the teacher has {value!r}; leave it out"
            )

    values = written_out(teacher) | {"mixer": DEFAULT} | keys | fixed
    for name in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
        values[name] = getattr(teacher, name)
    try:
        # First without the options, to learn the layers' mixers.
        names = NalandaConfig(**values | {"mixer_options": {}}).layer_mixers
        # Options stand under the names of mixers, or are for all new ones.
        named = MIXERS.keys() & options.keys()
        by_name = {name: options.get(name, {}) if named else options for name in names}
        if "softmax" in by_name:
            # The teacher's attention keeps its options, and its sizes.
            sizes = {"num_heads": teacher.num_heads, "head_dim": teacher.head_dim}
            stored = teacher.mixer_options
            by_name["softmax"] = stored.get("softmax", stored) | sizes
        return NalandaConfig(**values | {"mixer_options": by_name})
    except (TypeError, ValueError) as error:
        raise InputError(f"model: {error}") from None


def build_hybrid(config: NalandaConfig, model: Any) -> Any:
    """The hybrid in fp32, before any fitting. model: the teacher's, in fp32 on the CPU; None: copies nothing."""
    hybrid: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if model is None:
        return hybrid
    replaced = replaced_layers(config)
    shared = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not any(name.startswith(f"model.layers.{i}.mixer.") for i in replaced)
    }
    hybrid.load_state_dict(shared, strict=False)
    for i in replaced:
        take_projections(hybrid.model.layers[i].mixer, model.model.layers[i].mixer)
    return hybrid


def replaced_layers(config: NalandaConfig) -> list[int]:
    """The numbers of the layers whose attention was replaced."""
    return [i for i, name in enumerate(config.layer_mixers) if name != "softmax"]


@torch.no_grad()
def take_projections(mixer: Any, attention: Any) -> None:
    """Copies q, k, v and o of the teacher's attention where shapes allow; convolutions become the identity.

    Query heads that share keys and values each get a copy of them, where the mixer has as many heads of both.
    """
    group = attention.num_heads // attention.num_v_heads
    for name in ("q", "k", "v", "o"):
        source, target = (getattr(m, f"{name}_proj", None) for m in (attention, mixer))
        if target is None:
            continue
        for kind in ("weight", "bias"):
            taken, ours = getattr(source, kind), getattr(target, kind)
            if taken is None:
                continue
            if name in ("k", "v") and len(ours) == group * len(taken):
                # [heads · K, …] to [heads, K, …], each head repeated for its group
                heads = taken.unflatten(0, (attention.num_v_heads, -1))
                taken = heads.repeat_interleave(group, 0).flatten(0, 1)
            if taken.shape == ours.shape:
                ours.copy_(taken)

    for name in ("q", "k", "v"):
        conv: Any = getattr(mixer, f"{name}_conv1d", None)
        if conv is not None:
            # The last tap is the token itself.
            nn.init.zeros_(conv.weight)[..., -1] = 1
    if mixer.rule.value_conv:
        nn.init.zeros_(mixer.dwc.weight)  # added to the output, where the teacher has nothing


def write_hybrid(hybrid: Any, teacher: Transformer, out: Path) -> Path:
    """Writes the hybrid as a model folder, with the teacher's tokenizer and generation config."""
    with new_folder(out, replace=True) as staging:
        hybrid.save_pretrained(staging)
        copy_side_files(teacher.folder, staging)
    return out
