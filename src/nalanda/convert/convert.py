"""Converts model folders between our format and those of other libraries."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import custom_object_save

from nalanda.common.errors import InputError
from nalanda.config.model_folder import weight_files
from nalanda.convert import fla, llama
from nalanda.convert.formats import Config
from nalanda.data.hub import is_hub_id
from nalanda.model import NalandaConfig
from nalanda.train.export import hub_errors, new_folder, pad_batches

LIBRARIES = {"fla": fla.FORMATS, "llama": llama.FORMATS}
"""Other libraries' formats by `model_type`, under the name of the library for `--to`."""

FORMATS = {kind: format for formats in LIBRARIES.values() for kind, format in formats.items()}

_SIDE_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "additional_chat_templates", "generation_config.json", "LICENSE*", "NOTICE*"),
)
_COMPUTED = re.compile(r"rotary(_emb)?\.inv_freq$")  # saved by older releases, derived from rope_theta


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
            return tensors.get_slice(self.name)[self.rows] if self.rows else tensors.get_tensor(self.name)


def _stored(folder: Path) -> dict[str, Stored]:
    """The tensors of a model folder, by name.

    Raises:
        InputError: there are no safetensors files, or some are missing.
    """
    files = weight_files(folder)
    if not files:
        if pickles := [*folder.glob("*.bin"), *folder.glob("*.pth")]:
            raise InputError(f"{pickles[0].name} is a pickle, which may run code: save it as safetensors")
        run = (folder / "manifest.json").is_file()
        raise InputError("no model.safetensors in it" + "; make a model folder with nalanda export" * run)
    found = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                found[name] = Stored(file, name, tuple(tensors.get_slice(name).get_shape()))
    return found


def _split_glu(stored: dict[str, Stored], width: int) -> None:
    """Splits gate_proj as flash-linear-attention first stored it: with up_proj's rows after its own."""
    for name, both in list(stored.items()):
        up = name.replace(".gate_proj.", ".up_proj.")
        if up != name and up not in stored and both.shape[0] == 2 * width:
            half = dataclasses.replace(both, shape=(width, *both.shape[1:]))
            stored[name] = dataclasses.replace(half, rows=slice(0, width))
            stored[up] = dataclasses.replace(half, rows=slice(width, None))


def _matched(
    stored: dict[str, Stored], config: NalandaConfig, theirs: Callable[[str], str]
) -> dict[str, Stored]:
    """The stored tensors by our names; `theirs` maps our names to those in the files.

    Raises:
        InputError: a tensor is missing, unknown, or has the wrong shape.
    """
    stored = {name: tensor for name, tensor in stored.items() if not _COMPUTED.search(name)}
    _split_glu(stored, config.intermediate_size)
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
        head, embedding = (stored.get(theirs(n)) for n in ("lm_head.weight", "model.embed_tokens.weight"))
        if head and embedding:
            if not torch.equal(head.read(), embedding.read()):
                raise InputError(f"tie_word_embeddings=True, but {head.name} and {embedding.name} differ")
            del stored[head.name]
    found = {}
    for name, shape in shapes.items():
        tensor = stored.pop(theirs(name), None)
        if tensor is None:
            raise InputError(f"tensor {theirs(name)} is missing")
        if tensor.shape != shape:
            raise InputError(f"tensor {theirs(name)} is {list(tensor.shape)}, the config says {list(shape)}")
        found[name] = tensor
    if stored:
        raise InputError(f"{len(stored)} tensors have no counterpart, {min(stored)} for one")
    return found


def _save(tensors: dict[str, Stored], folder: Path) -> None:
    """Writes the renamed tensors, keeping the names of the files and which tensors each holds."""
    files: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.file.name, {})[name] = tensor
    total = 0
    for file, group in sorted(files.items()):  # one file in memory at a time
        content = {name: tensor.read().contiguous() for name, tensor in group.items()}
        save_file(content, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in content.values())
    if set(files) != {"model.safetensors"}:
        places = {name: tensor.file.name for name, tensor in sorted(tensors.items())}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def convert(source: str, destination: str, to: str | None = None) -> Path:
    """Converts the model of `source` to another format and returns its folder, `destination`.

    Args:
        source: a model folder or a Hugging Face hub id, in our format or one of FORMATS.
        destination: a new folder, which appears only when complete.
        to: nalanda, fla or llama; required where more than one is possible.

    Weights keep their dtype and shards. The tokenizer and generation config are copied, see `pad_batches`.

    Raises:
        InputError: names what the target format cannot express; nothing is written.
    """
    out, folder = Path(destination), _folder(source)
    if os.path.lexists(out):
        raise InputError(f"{out} exists; choose another folder")
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no readable config.json ({error})") from None
    kind = given.get("model_type")
    if kind not in FORMATS and kind != "nalanda":
        raise InputError(f"{folder}: model_type {kind!r} is not one of nalanda, {', '.join(FORMATS)}")
    target = ""
    try:
        config = NalandaConfig.from_pretrained(folder) if kind == "nalanda" else FORMATS[kind].ours(given)
        target = _target(kind, config, to)
        theirs = {} if target == "nalanda" else FORMATS[target].theirs(config)
        found = _matched(_stored(folder), config, _names(kind, given))
    except ValueError as error:
        arrow = f", {kind} to {target}" if target else ""
        raise InputError(f"{folder}{arrow}: {error}") from None
    dtype = given.get("dtype", given.get("torch_dtype"))
    names = _names(target, theirs)
    with new_folder(out) as part:
        if target == "nalanda":
            _save_config(config, dtype, part)
        else:
            about = {"model_type": target, "architectures": [FORMATS[target].architecture]}
            about |= {"dtype": dtype} if dtype else {}
            text = json.dumps(theirs | about, indent=2, sort_keys=True)
            (part / "config.json").write_text(text + "\n", encoding="utf-8")
        _save({names(name): tensor for name, tensor in found.items()}, part)
        for side in (path for pattern in _SIDE_FILES for path in folder.glob(pattern)):
            (shutil.copytree if side.is_dir() else shutil.copy)(side, part / side.name)
        pad_batches(part)
    return out


def _folder(source: str) -> Path:
    if Path(source).is_dir() or not is_hub_id(source):
        return Path(source).expanduser()
    with hub_errors(f"there is no folder {source}"):
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", *_SIDE_FILES]))


def _target(kind: str, config: NalandaConfig, to: str | None) -> str:
    """The model_type to write: `to`, or the only one possible."""
    mixers = set(config.layer_mixers)
    kinds = {"nalanda": "nalanda"} | {
        library: name
        for library, formats in LIBRARIES.items()
        for name, format in formats.items()
        if mixers == {format.mixer}
    }
    kinds = {library: name for library, name in kinds.items() if name != kind}
    if to is None and (kind != "nalanda" or len(kinds) == 1):
        to = next(iter(kinds))
    if to not in kinds:
        which = "choose one with --to" if to is None and kinds else f"not {to or 'another kind'}"
        raise InputError(f"mixer {config.mixer!r} can become {' or '.join(kinds) or 'nothing else'}: {which}")
    return kinds[to]


def _names(kind: str, config: Config) -> Callable[[str], str]:
    return (lambda name: name) if kind == "nalanda" else (lambda name: FORMATS[kind].tensor(name, config))


def _save_config(config: NalandaConfig, dtype: str | None, folder: Path) -> None:
    """Writes config.json and the model's code as `save_pretrained` does."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config = model.config
    config.architectures, config.dtype = [type(model).__name__], dtype
    custom_object_save(model, folder, config=config)  # pyrefly: ignore[bad-argument-type]
    config.save_pretrained(folder)
