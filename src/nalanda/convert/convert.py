"""Converts model folders between our format and those of other libraries."""

import contextlib
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import custom_object_save

from nalanda.common.errors import InputError
from nalanda.common.files import copy_contents, new_folder, refuse_existing, update_json
from nalanda.common.number_formats import choose_format
from nalanda.common.text import suggest
from nalanda.config.model_folder import check_hub, weight_files
from nalanda.convert import fla, kimi_linear, llama, qwen3_5
from nalanda.convert.certificate import Certificate, card, compare, unchecked
from nalanda.convert.engines import tokenizer_of
from nalanda.convert.formats import Config, Tensors, attention_interval, unsupported
from nalanda.convert.mlx import DTYPES as MLX_DTYPES
from nalanda.convert.mlx import check_mlx, check_order, check_rounded, keep_rounded, to_mlx
from nalanda.data.hub import is_hub_id
from nalanda.model import NalandaConfig
from nalanda.train.export import export, hub_errors, pad_batches
from nalanda.train.resolve import resolve

LIBRARIES = {
    "fla": fla.FORMATS,
    "llama": llama.LLAMA,
    "qwen3": llama.QWEN3,
    "qwen3_5": qwen3_5.FORMATS,
    "kimi_linear": kimi_linear.FORMATS,
    "mlx": qwen3_5.FORMATS | kimi_linear.FORMATS,
}
"""Other libraries' formats by `model_type`, under the name of the library for `--to`. mlx-lm makes its own of
Qwen3.5's and KimiLinear's."""

FORMATS = {kind: format for formats in LIBRARIES.values() for kind, format in formats.items()}

_MULTIMODAL = {"qwen3_5": "qwen3_5_text"}  # its text model alone is read

_APART = {
    "olmo_hybrid": "layer_types: its full_attention layers norm their output, ours their input",
    "rwkv7": "v_lora: its later layers mix in the first one's values, and its feed-forward layers shift tokens",
    "mamba2": "use_conv_bias: its convolutions have a bias and no GLU follows its mixers, unlike here",
    "mamba3": "is_mimo: no GLU follows its mixers, which may be MIMO, unlike here",
}
"""Models of mixers like ours that differ elsewhere."""

_SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
# Saved by older releases, derived from rope_theta.
_COMPUTED = re.compile(r"rotary(_emb)?\.inv_freq$")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    name: str
    """Name in the file."""
    shape: tuple[int, ...]
    rows: slice | None = None
    """Rows that belong to it; None: all."""

    def read(self) -> torch.Tensor:
        with safe_open(self.file, "pt") as tensors:
            if self.rows is None:
                return tensors.get_tensor(self.name)
            return tensors.get_slice(self.name)[self.rows]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a model folder, by name.

    Raises:
        InputError: there are no safetensors files, some are missing, or they are mlx-lm's.
    """
    files = weight_files(folder)
    if not files:
        if pickles := [*folder.glob("*.bin"), *folder.glob("*.pth")]:
            raise InputError(
                f"{pickles[0].name} is a pickle, which may run code: save it as safetensors"
            )
        run = (folder / "manifest.json").is_file()
        raise InputError(
            "no model.safetensors in it" + "; make a model folder with nalanda export" * run
        )
    stored = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            if (tensors.metadata() or {}).get("format") == "mlx":
                raise InputError(
                    "a folder of mlx-lm, which is a target only; convert the model that it was made from"
                )
            for name in tensors.keys():  # noqa: SIM118  not a dict
                # Shapes come from the header: no value is read yet.
                stored[name] = Stored(file, name, tuple(tensors.get_slice(name).get_shape()))
    return stored


def _split_glu(stored: dict[str, Stored], width: int) -> None:
    """Splits gate_proj as flash-linear-attention first stored it: with up_proj's rows after its own."""
    # A copy of the items, since the loop adds to the table.
    for name, gate_and_up in list(stored.items()):
        up = name.replace(".gate_proj.", ".up_proj.")
        if up != name and up not in stored and gate_and_up.shape[0] == 2 * width:
            # Only the rows of each are named; the values are read when they are written.
            half = dataclasses.replace(gate_and_up, shape=(width, *gate_and_up.shape[1:]))
            stored[name] = dataclasses.replace(half, rows=slice(0, width))
            stored[up] = dataclasses.replace(half, rows=slice(width, None))


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of ours within a stored one."""

    stored: Stored
    layout: Tensors
    """All of ours that the stored one holds."""
    lengths: list[int]
    """Their sizes along dim 0."""
    index: int
    """The number of this one among them."""

    def read(self) -> torch.Tensor:
        return self.layout.split(self.stored.read(), self.lengths)[self.index]


def _shapes(config: NalandaConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of our tensors by name."""
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def match_tensors(
    stored: dict[str, Stored],
    config: NalandaConfig,
    tensors: Callable[[Iterable[str]], list[Tensors]],
) -> dict[str, Part]:
    """The stored tensors by our names. tensors: maps our names to the stored ones.

    Raises:
        InputError: a tensor is missing, unknown, or has the wrong shape.
    """
    stored = {name: tensor for name, tensor in stored.items() if not _COMPUTED.search(name)}
    _split_glu(stored, config.intermediate_size)
    shapes = _shapes(config)
    tied = config.tie_word_embeddings
    # Of all names at once: a layer without any is a null layer.
    layouts = tensors([*shapes, *["lm_head.weight"] * tied])
    if tied:
        # A file may have a tied matrix twice; then both must be equal, and one is dropped.
        by_names = {layout.ours: layout for layout in layouts}
        matrices = by_names["lm_head.weight",], by_names["model.embed_tokens.weight",]
        layouts.remove(matrices[0])
        head, embedding = (stored.get(layout.foreign) for layout in matrices)
        if head and embedding:
            if not torch.equal(head.read(), embedding.read()):
                raise InputError(
                    f"tie_word_embeddings=True, but {head.name} and {embedding.name} differ"
                )
            del stored[head.name]

    parts = {}
    for layout in layouts:
        tensor = stored.pop(layout.foreign, None)
        if tensor is None:
            raise InputError(f"tensor {layout.foreign} is missing")

        # A stored tensor has all of ours that it holds, along dim 0.
        lengths = [shapes[name][0] for name in layout.ours]
        shape = layout.shape or (sum(lengths), *shapes[layout.ours[0]][1:])
        if tensor.shape != shape:
            raise InputError(
                f"tensor {layout.foreign} is {list(tensor.shape)}, the config says {list(shape)}"
            )
        for i, name in enumerate(layout.ours):
            parts[name] = Part(tensor, layout, lengths, i)
    # A stored tensor that is left would be lost.
    if stored:
        raise InputError(f"{len(stored)} tensors have no counterpart, {min(stored)} for one")
    return parts


def _save_tensors(parts: dict[str, Part], tensors: list[Tensors], folder: Path) -> None:
    """Writes `tensors`, made of ours (`parts`). Files keep their names and their tensors."""
    files: dict[str, list[Tensors]] = {}
    last = max(tensor.stored.file.name for tensor in parts.values())
    for tensor in tensors:
        # A constant comes from no file, and goes into the last.
        file = parts[tensor.ours[0]].stored.file.name if tensor.ours else last
        files.setdefault(file, []).append(tensor)

    total, file_of = 0, {}
    for file, group in sorted(files.items()):  # one file in memory at a time
        content = {}
        for tensor in group:
            ours = [parts[name].read() for name in tensor.ours]
            content[tensor.foreign] = tensor.join(ours).contiguous()
            file_of[tensor.foreign] = file
        save_file(content, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in content.values())
    if set(files) != {"model.safetensors"}:
        weight_map = dict(sorted(file_of.items()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def convert(
    source: str,
    destination: str,
    to: str | None = None,
    check: bool = True,
    dtype: str | None = None,
) -> Path:
    """Converts the model of `source` to another format and returns its folder, `destination`.

    Args:
        source: a model folder or a Hugging Face hub id, in our format or one of FORMATS.
        destination: a new folder, which appears only when complete.
        to: nalanda, fla, llama, qwen3, qwen3_5, kimi_linear or mlx; required where more than one is possible.
        check: compare both models, see `certificate.compare`; one is in memory at a time, in fp32.
        dtype: of mlx's weights, see `mlx.DTYPES`; None and elsewhere they keep theirs.

    Shards stay. The tokenizer and generation config are copied, see `pad_batches`. Our config names the
    bos token that the tokenizer puts in front of a text, or none.
    The model card, README.md, has the certificate of the comparison; stderr gets it too. Keys of the config
    without an effect are not read, and the certificate lists them.

    Raises:
        InputError: names what the target format cannot express, or how far the models differ; nothing is
            written.
    """
    # Settings and shapes are checked before the first file is written.
    dtype = check_target(to, dtype)
    out, folder = Path(destination), local_folder(source)
    refuse_existing(out)
    settings = read_config(folder)
    kind = str(settings.get("model_type"))
    kind = _MULTIMODAL.get(kind, kind)
    target, unread = "", []
    try:
        refuse_unknown(kind, settings)
        stored = stored_tensors(folder)
        # The source in our terms, whatever its format.
        if kind == "nalanda":
            config = NalandaConfig.from_pretrained(folder)
        else:
            settings, stored = FORMATS[kind].text_model(settings, stored)
            config = FORMATS[kind].ours(settings)
            unread = FORMATS[kind].unread(settings)
        # The target's config, and the tensors of the source by our names.
        target = _choose_target(kind, config, to)
        stored_as = settings.get("dtype", settings.get("torch_dtype"))
        foreign = {} if target == "nalanda" else FORMATS[target].foreign(config)
        if to == "mlx":
            check_mlx(folder, foreign)
        if target == "nalanda":
            config.bos_token_id = find_leading_bos(folder, config)
        parts = match_tensors(stored, config, tensors_of(kind, settings))
    except ValueError as error:
        arrow = f", {kind} to {target}" if target else ""
        raise InputError(f"{folder}{arrow}: {error}") from None
    # Written and compared under another name: a failure leaves no folder behind.
    with new_folder(out) as staging:
        # Config, tensors, and the files beside them.
        if target == "nalanda":
            _save_config(config, stored_as, staging)
        else:
            _save_foreign_config(target, foreign, stored_as, staging)
        _save_tensors(
            parts, tensors_of(target, foreign | {"dtype": stored_as})(_shapes(config)), staging
        )
        copy_side_files(folder, staging)
        rounded = to_mlx(staging, dtype) if to == "mlx" else None
        # Proof that both compute the same.
        libraries = [_library_of(kind), to if to == "mlx" else _library_of(target)]
        proof = unchecked("asked for with --no-check")
        if check and rounded:
            check_rounded(staging, *rounded)
        if check:
            proof = compare(folder, staging, libraries, rounded)
        if rounded:
            # Only now: the comparison needs the exact model in the folder.
            keep_rounded(staging)
        if unread:
            proof = Certificate(
                proof.facts | {"not read": f"{', '.join(unread)}: no effect on the model"}
            )
        print(proof, file=sys.stderr)
        (staging / "README.md").write_text(
            card(out.name, source, libraries, proof), encoding="utf-8"
        )
    return out


def check_target(to: str | None, dtype: str | None) -> str | None:
    """The format of mlx's weights under its own name. Raises `InputError` for an unknown one, or target."""
    if to not in (None, "nalanda", "gguf", *LIBRARIES):
        raise InputError(f"--to {to}: unknown{suggest(str(to), ['nalanda', 'gguf', *LIBRARIES])}")
    if to == "mlx" and dtype is not None:
        return choose_format(dtype, list(MLX_DTYPES), "--dtype")
    return dtype


def find_leading_bos(folder: Path, config: NalandaConfig) -> int | None:
    """The bos token that the tokenizer puts in front of a text.

    Other libraries' configs name one that it never writes, ours only one that it does.
    """
    tokenizer = tokenizer_of(folder)
    if tokenizer is None:
        return config.bos_token_id
    bos = tokenizer.bos_token_id
    return bos if tokenizer("a").input_ids[:1] == [bos] else None


def copy_side_files(folder: Path, staging: Path) -> None:
    """Copies the tokenizer, see `pad_batches` and `keep_tokenizer`, and other files beside the weights."""
    copy_contents(folder, staging, _SIDE_FILES)
    pad_batches(staging)
    keep_tokenizer(folder, staging)


def keep_tokenizer(folder: Path, staging: Path) -> None:
    """Names the class that the tokenizer of `folder` has, where the type of the model decides it."""
    file = staging / "tokenizer_config.json"
    tokenizer = tokenizer_of(folder)
    if tokenizer is None or not file.is_file():
        return

    settings = json.loads(file.read_text(encoding="utf-8"))
    name = type(tokenizer).__name__
    # transformers may choose the class by model_type, which the conversion changes.
    declared = settings.get("tokenizer_class") or ""
    if name not in ("TokenizersBackend", declared.removesuffix("Fast")):
        update_json(file, tokenizer_class=name)


def read_config(folder: Path) -> Config:
    """A model folder's config.json. Raises InputError."""
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such folder; name a model's folder, or OWNER/NAME on the hub"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = "; name its model, " + str(folder / "final") if (folder / "final").is_dir() else ""
        raise InputError(f"{folder}: no config.json in it{inside}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no readable config.json ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{folder}: config.json is not a table of settings")
    if config.get("quantization_config"):
        raise InputError(
            f"{folder}: its weights are rounded (quantization_config); convert the folder that they came from"
        )
    return config


def local_folder(source: str) -> Path:
    """The folder of a model, downloaded if `source` is a hub id."""
    if Path(source).is_dir() or not is_hub_id(source):
        return Path(source).expanduser()
    patterns = ["*.json", "*.safetensors", *_SIDE_FILES]
    check_hub(source)
    with hub_errors(f"there is no folder {source}"):
        return Path(snapshot_download(source, allow_patterns=patterns))


@contextlib.contextmanager
def source_folder(name: str) -> Iterator[str]:
    """The model folder or hub id that `name` means; a checkpoint of a run is exported for the time."""
    resolved = resolve(name)
    if resolved.tokenizer == resolved.model or resolved.run is None:
        yield resolved.model
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield str(export(Path(resolved.model), Path(scratch) / resolved.run.name))


def _choose_target(kind: str, config: NalandaConfig, to: str | None) -> str:
    """The model_type to write: `to`, or the only one possible.

    Where no library can express the model, the first that has its mixers says why.
    """
    mixers = set(config.layer_mixers)
    # The model_type that each library has for these mixers, but the library that the model is of.
    kinds = {"nalanda": "nalanda"}
    for library, formats in LIBRARIES.items():
        for name, format in formats.items():
            if format.takes(mixers):
                kinds[library] = name
    kinds.pop(_library_of(kind), None)
    if to in kinds:
        return kinds[to]

    # Those that can express the model itself, not only its mixers.
    able = [library for library, name in kinds.items() if _expresses(library, name, config)]
    if to is None and (kind != "nalanda" or (kinds and len(able) < 2)):
        return kinds[[*able, *kinds][0]]
    # `write_gguf` makes GGUF files, of the same models as Qwen3.5's.
    if to is None and "qwen3_5" in able and _expresses("gguf", "", config):
        able.append("gguf")
    which = "choose one with --to" if to is None and kinds else f"not {to or 'another kind'}"
    raise InputError(
        f"mixer {config.mixer!r} can become {' or '.join(able) or 'nothing else'}: {which}"
    )


def _expresses(library: str, kind: str, config: NalandaConfig) -> bool:
    """Whether a library has the model of this config, as its model_type `kind`."""
    try:
        if library == "gguf":
            attention_interval(config)
        elif kind != "nalanda":
            foreign = FORMATS[kind].foreign(config)
            if library == "mlx":
                check_order(foreign)
    except InputError:
        return False
    return True


def tensors_of(kind: str, config: Config) -> Callable[[Iterable[str]], list[Tensors]]:
    """The stored tensors of a model of that kind and config, for the names of ours."""
    if kind == "nalanda":
        return lambda names: [Tensors(name, (name,)) for name in names]
    return lambda names: FORMATS[kind].tensors(names, config)


def _library_of(kind: str) -> str:
    """The library of a model_type."""
    return next((library for library, formats in LIBRARIES.items() if kind in formats), kind)


def refuse_unknown(kind: str, settings: Config) -> None:
    """Raises InputError for a kind of model that is not in FORMATS."""
    if kind in FORMATS or kind == "nalanda":
        return
    # Experts first: they say more than an unknown type.
    for config in (settings, settings.get("text_config") or {}):
        if config.get("num_experts"):
            raise unsupported("num_experts", config["num_experts"])
    if kind in _APART:
        raise InputError(_APART[kind])
    raise InputError(f"model_type {kind!r} is not one of nalanda, {', '.join(FORMATS)}")


def _save_foreign_config(kind: str, config: Config, dtype: str | None, folder: Path) -> None:
    about = {"model_type": kind, "architectures": [FORMATS[kind].architecture]}
    if dtype:
        about["dtype"] = dtype
    text = json.dumps(config | about, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _save_config(config: NalandaConfig, dtype: str | None, folder: Path) -> None:
    """Writes config.json and the model's code as `save_pretrained` does."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config = model.config
    config.architectures, config.dtype = [type(model).__name__], dtype
    custom_object_save(model, folder, config=config)  # pyrefly: ignore[bad-argument-type]
    config.save_pretrained(folder)
