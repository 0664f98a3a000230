"""A model to check: a folder, a Hub id, or the config of a type, made narrow and short, with random weights."""

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nalanda_kernels import keep_fla_off_cpus
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nalanda.common.errors import InputError, first_line

WIDTH = 128
"""Default of the narrowed hidden size."""

LEAST_HEAD = 8
"""A narrowed head keeps at least so many dimensions: rotary embeddings and gates need some."""

_WIDTHS = re.compile(r"(^d_model|^n_embd|_dim|_size|_rank|_width|^mamba_d_(ssm|head))$")
"""Fields that grow with the width. Counts of heads, groups and kernels stay."""

_FIXED = re.compile(r"vocab|kernel|conv|chunk|window|patch|batch|block|state|image|vision|audio")


@dataclass(frozen=True)
class Subject:
    """model: in float64 where it can be cast, else fp32, in evaluation mode. ids: `[2, 70]`. source: the lines of
    Python that make both."""

    name: str
    model: PreTrainedModel
    ids: torch.Tensor
    source: str


def make(
    name: str,
    *,
    layers: int | None = None,
    width: int | None = None,
    changes: dict[str, Any] | None = None,
    imports: Iterable[str] = (),
    trust_remote_code: bool = False,
    seed: int = 0,
) -> Subject:
    """Makes the model `name`: a folder, a Hub id, or a type that transformers or a module of `imports` knows.

    A folder with weights is loaded as it is. Otherwise the weights are random and the model is cut to `layers` (by
    default the fewest that have every kind) and narrowed to about `width`. changes: fields of the config.

    Raises:
        InputError: the model cannot be made, is no causal language model, or computes nothing on a CPU.
    """
    lines = ["import torch", "from transformers import AutoConfig, AutoModelForCausalLM"]
    if not torch.cuda.is_available() and "fla" not in imports and importlib.util.find_spec("fla"):
        # transformers takes its kernels where it is installed, and they need a GPU.
        lines[:0] = ["import sys", 'sys.modules["fla"] = None']
    for module in imports:
        importlib.import_module(module)
    lines += [f"import {module}" for module in imports] + [f"torch.manual_seed({seed})"]
    remote = ", trust_remote_code=True" if trust_remote_code else ""
    known = name in CONFIG_MAPPING
    narrowed = layers is not None or width is not None or bool(changes)

    try:
        torch.manual_seed(seed)
        if not narrowed and list(Path(name).glob("*.safetensors")):
            lines.append(f"model = AutoModelForCausalLM.from_pretrained({name!r}{remote})")
            model = AutoModelForCausalLM.from_pretrained(
                name, trust_remote_code=trust_remote_code, dtype=torch.float32
            )
        else:
            call = f"for_model({name!r}" if known else f"from_pretrained({name!r}{remote}"
            config = _config(name, known, trust_remote_code)
            fields = narrow(config, layers, width) | (changes or {})
            config = _config(name, known, trust_remote_code, **fields)
            arguments = "".join(f", {key}={value!r}" for key, value in fields.items())
            lines.append(f"config = AutoConfig.{call}{arguments})")
            lines.append(f"model = AutoModelForCausalLM.from_config(config{remote})")
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # configs and remote code raise anything
        raise InputError(f"{name}: the model cannot be made ({first_line(error)})") from error

    return around(model, name, lines)


def around(model: PreTrainedModel, name: str = "", lines: Sequence[str] = ()) -> Subject:
    """The subject of a model that is there. lines: the Python that makes it.

    The model is cast to float64, or to fp32 where it cannot compute in float64.
    """
    keep_fla_off_cpus(sys.modules[type(model).__module__])
    table: Any = model.get_input_embeddings()
    count = min(len(table.weight), 1000)
    ids = torch.randint(3, count, (2, 70), generator=torch.Generator().manual_seed(0))
    problem = Exception()
    for dtype in ("double", "float"):
        getattr(model, dtype)().eval()
        try:
            with torch.no_grad():
                model(ids, use_cache=False).logits  # noqa: B018
        except Exception as error:
            problem = error
            continue
        drawn = (
            f"ids = torch.randint(3, {count}, (2, 70), generator=torch.Generator().manual_seed(0))"
        )
        source = "\n".join([*lines, f"model = model.{dtype}().eval()", drawn])
        return Subject(name or type(model).__name__, model, ids, source)
    raise InputError(f"{name}: it computes nothing here ({first_line(problem)})")


def _config(name: str, known: bool, remote: bool, **fields: Any) -> PretrainedConfig:
    if known:
        return AutoConfig.for_model(name, **fields)
    return AutoConfig.from_pretrained(name, trust_remote_code=remote, **fields)


def narrow(config: PretrainedConfig, layers: int | None, width: int | None) -> dict[str, Any]:
    """The fields that make a model of `config` short and narrow.

    Dimensions, sizes and ranks are divided by one power of two; the counts of heads stay, and with them
    all that must divide. Experts become few, the vocabulary small.
    """
    fields = {k: v for k, v in config.to_dict().items() if v is not None}
    found: dict[str, Any] = {}

    sizes = {
        key: value
        for key, value in fields.items()
        if type(value) is int and _WIDTHS.search(key) and not _FIXED.search(key)
    }
    hidden = next(sizes[k] for k in ("hidden_size", "d_model", "n_embd") if k in sizes)
    heads = next((fields[k] for k in ("num_attention_heads", "n_head") if fields.get(k)), 1)
    least = min([value for key, value in sizes.items() if "head" in key] or [hidden // heads])
    factor = 1
    while hidden // factor > (width or WIDTH) and least // factor >= 2 * LEAST_HEAD:
        factor *= 2
    found |= {key: value // factor for key, value in sizes.items() if value % factor == 0}

    for key, value in fields.items():
        if re.search(r"num(_local|_routed)?_experts$|n_routed_experts$", key) and value:
            found[key] = min(value, 8)
        elif (
            re.search(r"(experts_per_tok|top_?k(_experts)?)$", key) and type(value) is int and value
        ):
            found[key] = min(value, 2)
    found |= {"vocab_size": 512} | {
        key: index for index, key in enumerate(("pad_token_id", "bos_token_id", "eos_token_id"))
    }
    count = layers or fewest_layers(config)
    for key, value in fields.items():
        if key in ("num_hidden_layers", "n_layer", "num_blocks"):
            found[key] = count
        elif isinstance(value, list | str) and len(value) == config.num_hidden_layers:
            found[key] = value[:count]
    return found


def fewest_layers(config: PretrainedConfig) -> int:
    """The shortest beginning of the layers that has every kind of layer, at least two."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    return max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])
