"""A model to check: a folder, a Hub id, or the config of a type, made narrow and short, with random weights."""

import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nalanda_kernels import keep_fla_off_cpus, keep_model_types
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nalanda.common.errors import InputError, first_line
from nalanda.testing.properties import causal

WIDTH = 128
"""Default of the narrowed hidden size."""

LARGEST = 100_000_000
"""A model of a config has at most so many parameters, unless `layers` or `width` ask for more."""

_HIDDEN = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|num_blocks)$")

_HEAD_SIZES = re.compile(r"head_?dim$|d_head$|kv_channels$")
_HEAD_COUNTS = re.compile(r"heads?$|num_query_groups$")
_WIDTHS = re.compile(r"d_model$|n_embd$|n_inner$|_dim$|_size$|_rank$|_width$|d_ssm$")
_FIXED = re.compile(r"kernel|conv|group|patch|batch|image|vision|audio")

_MOST = {
    "vocab_size(_per_layer_input)?$": 512,
    "state_size$|d_state$": 16,
    "(^|_)chunk_size$|^block_size$": 16,  # 70 tokens cross the edges of chunks
    "window(_size)?$": 32,
    "experts$": 4,
    "experts_per_tok(en)?$|top_?k(_experts)?$|moe_k$": 2,
    "n_groups?$|ngroups$|expert_group$": 2,
    "topk_group$": 1,
}
"""The largest values of fields that do not grow with the width."""


@dataclass(frozen=True)
class Subject:
    """model: in float64 where it can compute and pad in it, else fp32, in evaluation mode. ids: `[2, 70]`. source: the
    lines of Python that make both."""

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
        InputError: a module cannot be imported, or the model cannot be made, is no causal language model, or
            computes nothing on a CPU.
    """
    lines = ["import torch", "from transformers import AutoConfig, AutoModelForCausalLM"]
    if not torch.cuda.is_available() and "fla" not in imports and importlib.util.find_spec("fla"):
        # transformers takes its kernels where it is installed, and they need a GPU.
        lines[:0] = ["import sys", 'sys.modules["fla"] = None']
    for module in imports:
        try:
            importlib.import_module(module)
        except Exception as error:  # anybody's code
            why = first_line(error)
            raise InputError(f"module {module}: it cannot be imported ({why})") from error
    if "fla" not in imports:
        keep_model_types()  # an earlier model may have imported it
    lines += [f"import {module}" for module in imports] + [f"torch.manual_seed({seed})"]
    remote = ", trust_remote_code=True" if trust_remote_code else ""
    load = f"for_model({name!r}" if name in CONFIG_MAPPING else f"from_pretrained({name!r}{remote}"
    is_sized = layers is not None or width is not None
    changes = changes or {}
    problems: list[Exception] = []

    try:
        if not is_sized and not changes and list(Path(name).glob("*.safetensors")):
            loaded = f"model = AutoModelForCausalLM.from_pretrained({name!r}{remote})"
            return around(_run([loaded])["model"], name, [*lines, loaded])
        config = _run([_config_line(load, changes)])["config"]
        text = config.get_text_config()
        if text is not config:  # the text model of one that sees or hears too
            load = f"for_model(**AutoConfig.{load}).get_text_config().to_dict()"
        narrower = narrowings(text, layers, width)
    except Exception as error:  # configs and remote code raise anything
        why = first_line(error).removeprefix(f"{name}: ")
        raise InputError(f"{name}: the model cannot be made ({why})") from error

    for fields in narrower:
        experts = any("experts" in key for key in fields)  # the default has no float64
        options = remote + ', experts_implementation="batched_mm"' * experts
        construction = [
            _config_line(load, fields | changes),
            f"model = AutoModelForCausalLM.from_config(config{options})",
        ]
        try:
            with torch.device("meta"):
                count = _run(construction)["model"].num_parameters()
            if count > LARGEST and not is_sized:
                raise InputError(f"{count:,} parameters; take --width, --layers")
            torch.manual_seed(seed)
            return around(_run(construction)["model"], name, [*lines, *construction])
        except Exception as error:
            problems.append(error)
            if "Unrecognized configuration class" in str(error) or ENCODER in str(error):
                break
    why = first_line(problems[0]).removeprefix(f"{name}: ")
    raise InputError(f"{name}: the model cannot be made ({why})")


def _config_line(load: str, fields: dict[str, Any]) -> str:
    if load.startswith("for_model(**"):
        return f"config = AutoConfig.{load} | {fields!r})"
    # As a dict, whose keys are quoted: they are the config's own, and the line is run.
    return f"config = AutoConfig.{load}, **{fields!r})"


def _run(lines: Sequence[str]) -> dict[str, Any]:
    """The variables that lines of a reproduction set: the model is made by the text that users get."""
    names = {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    exec("\n".join(lines), names)
    return names


def around(model: PreTrainedModel, name: str = "", lines: Sequence[str] = ()) -> Subject:
    """The subject of a model that is there. lines: the Python that makes it.

    The model is cast to float64, or to fp32 where it cannot compute or pad in float64.

    Raises:
        InputError: it is an encoder, or computes nothing, NaN or infinity.
    """
    name = name or type(model).__name__
    keep_fla_off_cpus(sys.modules[type(model).__module__])
    table: Any = model.get_input_embeddings()
    count = min(len(table.weight), 1000)
    drawn = f"ids = torch.randint(3, {count}, (2, 70), generator=torch.Generator().manual_seed(0))"
    ids = _run(["import torch", drawn])["ids"]
    problem = Exception()
    for dtype in ("double", "float"):
        getattr(model, dtype)().eval()
        try:
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits
        except Exception as error:
            problem = error
            continue
        if not bool(logits.isfinite().all()):
            raise InputError(f"{name}: its logits are NaN or infinite; mend its weights")
        refuse_encoder(model, ids)
        if dtype == "double" and not pads(model, ids) and pads(model.float(), ids):
            dtype = "float"
        getattr(model, dtype)()
        source = "\n".join([*lines, f"model = model.{dtype}().eval()", drawn])
        return Subject(name, model, ids, source)
    raise InputError(f"{name}: it computes nothing here ({first_line(problem)})")


def pads(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Whether a left-padded row has finite logits, or the model refuses one.

    A softmax in fp32 makes −∞ of the least number of float64, with which transformers masks. A row of padding is NaN
    then, in float64 alone.
    """
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    try:
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, use_cache=False).logits
    except Exception:  # the property of padding says so
        return True
    return bool(logits[0, 30:].isfinite().all())


ENCODER = "an encoder, whose tokens see later ones; take is_decoder=true"


@torch.no_grad()
def refuse_encoder(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raises `InputError` for a model that is no decoder by its config and its logits."""
    decodes = getattr(model.config, "is_decoder", True)  # False of GPT-NeoX too
    if decodes is False and not torch.allclose(*causal(model, ids)):
        raise InputError(ENCODER)


def narrowings(
    config: PretrainedConfig, layers: int | None, width: int | None
) -> list[dict[str, Any]]:
    """The fields that make a model of `config` short and narrow, the smallest model first.

    Not every class can take the smallest: some tie layers to each other, some round their sizes.
    """
    fields = {k: v for k, v in config.to_dict().items() if v is not None}
    hidden = next((fields[key] for key in _HIDDEN if key in fields), 1)
    widths = [width or WIDTH]
    while widths[-1] < hidden:
        widths.append(2 * widths[-1])
    return [
        narrow_fields(fields, hidden, each) | cut
        for cut in layer_choices(config, fields, layers)
        for each in widths
    ]


def narrow_fields(fields: dict[str, Any], hidden: int, width: int) -> dict[str, Any]:
    """The fields of a model whose hidden size is about `width`.

    Counts of heads are divided by one number, down to four of attention, and the heads' sizes by another. All other
    widths are divided by both, so that equal sizes and multiples stay so.
    """
    heads = next((fields[key] for key in _HEADS if fields.get(key)), 1)
    fewer = max(
        [n for n in range(1, heads // 4 + 1) if heads % (2 * n) == 0 and n * width <= hidden],
        default=1,
    )
    smaller = 1
    while hidden // (fewer * smaller) > width and hidden % (2 * fewer * smaller) == 0:
        smaller *= 2

    narrowed: dict[str, Any] = {}
    has_experts = any("experts" in key for key in fields)
    for key, value in fields.items():
        if type(value) is not int or value <= 0 or key.endswith("token_id"):
            continue
        most = next((most for pattern, most in _MOST.items() if re.search(pattern, key)), None)
        if most:
            narrowed[key] = min(value, most)
        elif _HEAD_SIZES.search(key):
            narrowed[key] = max(1, value // smaller)
        elif _HEAD_COUNTS.search(key):
            least = 2 if re.search("key_value|kv", key) else 1
            narrowed[key] = max(value // fewer if value % fewer == 0 else 0, min(value, least))
        elif _WIDTHS.search(key) and not _FIXED.search(key):
            narrowed[key] = max(1, value // (fewer * smaller))
            if has_experts and key.endswith("intermediate_size"):
                narrowed[key] = min(narrowed[key], 64)  # each token gathers its experts' weights
    narrowed |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {key: value for key, value in narrowed.items() if value != fields.get(key)}


def layer_choices(
    config: PretrainedConfig, fields: dict[str, Any], layers: int | None
) -> Iterator[dict[str, Any]]:
    """The fields of a model of fewer layers: one of each kind, else the first ones that have every kind, else more."""
    count = getattr(config, "num_hidden_layers", 1)
    of_layers = {
        key: value
        for key, value in fields.items()
        if (isinstance(value, list) or (isinstance(value, str) and "pattern" in key))
        and len(value) == count > 1
    }
    names = [value for value in of_layers.values() if isinstance(value[0], str)]
    rows: list[Any] = [*zip(*names, strict=True)] or [*kinds_of_layers(config)] or [None] * count

    def cut(chosen: Sequence[int]) -> dict[str, Any]:
        cut_fields: dict[str, Any] = {key: len(chosen) for key in fields if _LAYERS.search(key)}
        for key, value in of_layers.items():
            picked = [value[i] for i in chosen]
            cut_fields[key] = "".join(picked) if isinstance(value, str) else picked
        if by_number := fields.get("per_layer_config"):  # such as {"05": {"head_dim": 512}}
            by_layer = {int(i): value for i, value in by_number.items()}
            cut_fields["per_layer_config"] = {
                n: by_layer[i] for n, i in enumerate(chosen) if i in by_layer
            }
        return cut_fields

    if layers:
        yield cut(range(min(layers, count)))
        return
    first = [rows.index(row) for row in dict.fromkeys(rows)]
    if names and len(first) > 1:
        yield cut(first)
    least = max(2, first[-1] + 1)
    while least < count:
        yield cut(range(least))
        least *= 2
    yield {}


def kinds_of_layers(config: PretrainedConfig) -> list[str]:
    """The kind of each layer, where the config names it."""
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
