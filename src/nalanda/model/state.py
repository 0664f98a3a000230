"""The state of a model after reading a text: save, load, fork and continue it."""

import contextlib
import copy
import errno
import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .cache import NalandaCache

FORMAT = "nalanda-state-2"
UNSUMMED = "nalanda-state-1"
"""The format before, without a sum. Its files load, but damage within a tensor is not seen."""

SETTINGS = (
    *("mixer", "mixer_options", "feature_map", "feature_map_options", "num_heads", "conv_size"),
    *("norm_eps", "position_embedding", "scale_embeddings"),
)
"""Config keys that a state depends on and the fingerprint does not cover."""

CONTAINED = {
    "float64": ("float64", "float32", "bfloat16", "float16"),
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
}
"""For each dtype, those of which it has every number, widest first."""


def fingerprint(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over the weights' names, dtypes, shapes and values.

    dtype: precision to round to first, for a fingerprint that does not depend on the model's dtype.
    """

    def rounded(name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name} is offloaded; a state is saved and loaded with all weights on devices"
            )
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return _sum((name, rounded(name, tensor)) for name, tensor in _weights(model).items())[:16]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that the model computes with, by name.

    Without PEFT's adapters that are off; where all are, names are those of the model without PEFT.
    """
    tensors = model.state_dict(keep_vars=True)
    for path, module in model.named_modules():
        base = next(
            (name for name in ("base_layer", "original_module") if hasattr(module, name)), None
        )
        if base is None or not hasattr(module, "active_adapters"):
            continue
        on: Any = () if module.disable_adapters else module.active_adapters
        for name in [name for name in tensors if name.startswith(f"{path}.")]:
            first, *rest = name.removeprefix(f"{path}.").split(".")
            if first != base and not {first, *rest} & set(on):
                del tensors[name]
            elif first == base and not on:
                # Adapters are off, so the base layer gets the name that it has without PEFT.
                tensors[".".join([path, *rest])] = tensors.pop(name)
    return dict(sorted(tensors.items()))


class Trace:
    """What tells whether a model's weights have changed, without reading all of them.

    Tensors count writes, but not those of fused optimizers or through `.data`. So some values are kept too.
    Offloaded weights are new tensors in every call: only their names are compared.
    """

    SAMPLE = 16  # values of a tensor, at most

    def __init__(self, model: nn.Module):
        tensors = _weights(model)
        self.names = set(tensors)
        tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        self.tensors = weakref.WeakValueDictionary(tensors)
        self.writes = {name: 0 if x.is_inference() else x._version for name, x in tensors.items()}
        self.samples = self._samples(tensors.values())

    def _samples(self, tensors: Iterable[Tensor]) -> dict[tuple, Tensor]:
        """Bytes of some values, by dtype and device."""
        values: dict[tuple, list[Tensor]] = {}
        for tensor in tensors:
            if type(tensor) in (nn.Parameter, Tensor):  # others need not have values to index
                flat = tensor.detach().flatten()
                some = flat[:: len(flat) // self.SAMPLE + 1]  # at most 16, evenly spaced
                values.setdefault((tensor.dtype, tensor.device), []).append(some)
        return {key: torch.cat(some).view(torch.uint8) for key, some in values.items()}

    def matches(self, model: nn.Module) -> bool:
        """Whether the model has the same weights; it may have been moved, or cast to another dtype."""
        now = Trace(model)
        if (self.names, self.writes) != (now.names, now.writes):
            return False
        if any(self.tensors.get(name) is not tensor for name, tensor in now.tensors.items()):
            return False
        pairs = [
            (self.samples[key], now.samples[key])
            for key in self.samples.keys() & now.samples.keys()
        ]
        # Samples of another dtype or device have no key in common, and are not compared.
        return all(a.shape != b.shape or torch.equal(a, b) for a, b in pairs)


class State:
    """The result of `model.read(text)`, which `model.read` and `model.generate` can continue.

    A state never changes: both return new ones, so any number of threads can continue a state any number of
    times. The last token is not read yet, because reading it predicts the next one. So a continuation does
    not depend on how many pieces the text was read in.

    model: the model that read the text. cache: its cache without the last tokens. last: the last tokens,
    int64 `[B, 1]`.
    """

    def __init__(self, model: Any, cache: NalandaCache, last: Tensor):
        model.model.catch_up(cache)
        cache.release()  # graphs of one thread would write over what others read
        self.model, self.cache, self.last = model, cache, last
        self.trace = Trace(model)
        self.notes: dict[str, str] = {}  # the notes of `save`

    def __repr__(self) -> str:
        return f"State({self.batch_size} × {len(self)} tokens, {self.nbytes} bytes)"

    def __len__(self) -> int:
        """Tokens of the longest text."""
        return int(self.lengths.max())

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text, int64 `[B]`, on the host."""
        read = self.cache.lengths
        return torch.ones(self.batch_size, dtype=torch.int64) if read is None else read + 1

    @property
    def batch_size(self) -> int:
        return len(self.last)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.last.nbytes

    def check_weights(self) -> None:
        """Raises ValueError if the model has other weights than those that read the text."""
        if not self.trace.matches(self.model):
            raise ValueError(
                "the model's weights or adapters have changed: read the state's text again"
            )

    def fork(self) -> "State":
        """An independent state of the same text, which shares the tensors."""
        return copy.copy(self)

    def __reduce__(self) -> tuple:
        """For copies and pickles, whose tensors count writes from 0."""
        self.check_weights()
        return State, (self.model, self.cache.fork(), self.last), {"notes": self.notes}

    def __deepcopy__(self, memo: dict) -> "State":
        return self.fork()  # must not copy the model

    def resumed(
        self, model: Any, input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> tuple[NalandaCache, Tensor, Tensor | None]:
        """A cache, and the tokens to read into it next with their mask: the last tokens, then input_ids.

        Raises ValueError for another model's state, one of other weights, or one with other than 1 or the
        input's number of rows.
        """
        if model is not self.model:
            raise ValueError(
                "the state belongs to another model: save it, and load it for this one"
            )
        self.check_weights()
        cache, last = self.cache.fork(), self.last
        if input_ids is None:
            return cache, last, None
        check_prompt(input_ids, attention_mask, least=0)
        _warn_about_bos(input_ids, attention_mask, model.config.bos_token_id)
        rows = len(input_ids)
        if rows != self.batch_size:
            if self.batch_size != 1:
                raise ValueError(
                    f"the state holds {self.batch_size} texts, the input has {rows} rows"
                )
            cache.batch_repeat_interleave(rows)
            last = last.expand(rows, 1)
        if attention_mask is not None:
            # [B, 1 + T]: the state's last token is no padding.
            attention_mask = torch.cat([attention_mask.new_ones(rows, 1), attention_mask], 1)
        return cache, torch.cat([last.to(input_ids.device), input_ids], 1), attention_mask

    def save(self, path: str | Path, **notes: str) -> None:
        """Writes a safetensors file with the state, the notes, the weights' fingerprints and a sum.

        Raises ValueError if the weights have changed since the text was read, OSError if it cannot write.
        """
        self.check_weights()
        tensors = {"last": self.last, "lengths": self.lengths}
        for i, state in enumerate(self.cache.states):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in state.items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        dtype = _dtype(self.model)
        # Rounded fingerprints let a model of another dtype compare its weights.
        about = {
            "format": FORMAT,
            "fingerprint": fingerprint(self.model),
            "rounded": json.dumps(
                {
                    name: fingerprint(self.model, getattr(torch, name))
                    for name in CONTAINED.get(dtype, ())
                }
            ),
            "dtype": dtype,
            "model": _settings(self.model),
            "tokens": str(len(self)),
            "notes": json.dumps(notes),
        }
        _write(Path(path), tensors, about | {"sum": _file_sum(tensors, about)})

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "State":
        """Loads a state that this model saved onto the model's devices.

        Either may have any precision, except that bfloat16 and float16 cannot be compared.

        Raises ValueError for another kind of file, a damaged one, or other weights or settings.
        """
        about, tensors = _read(path)
        notes = _parsed(path, about, "notes")
        _check_settings(path, about, model)
        _check_fingerprint(path, about, model)
        last, lengths = _take_tokens(path, tensors, model.config.vocab_size)
        cache = NalandaCache(len(model.model.layers))
        # A text of one token has no state: nothing of it is read.
        begun = bool(tensors) or int(lengths.max()) > 1
        if begun:
            # The last token of each text is not read yet.
            cache.seen(int(lengths.max()) - 1, lengths - 1)
        for i, layer in enumerate(model.model.layers if begun else ()):
            device = next(layer.parameters()).device
            for name, (shape, dtype) in layer.mixer.state_spec(cache.seen_tokens).items():
                tensor = tensors.pop(f"layers.{i}.{name}", None)
                if tensor is None or tensor.shape != (len(last), *shape):
                    has = "nothing" if tensor is None else list(tensor.shape)
                    raise ValueError(
                        f"{path} has {has} for {name} of layer {i}, not {[len(last), *shape]}"
                    )
                if not tensor.is_floating_point():
                    raise _damaged(path, f"{name} of layer {i}")
                # A double model computes in float64 what others have in fp32.
                dtype = model.dtype if dtype is None else torch.promote_types(dtype, model.dtype)
                cache.states[i][name] = tensor.to(device, dtype)
        if tensors:
            raise ValueError(f"{path} has tensors that are not in the model: {', '.join(tensors)}")
        state = cls(model, cache, last.to(model.device))
        state.notes = notes
        return state


def check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise ValueError(
            f"state must be of model.read or model.load_state, not {type(state).__name__}"
        )


def check_prompt(
    tokens: Tensor, attention_mask: Tensor | None, *, least: int = 1, cached: bool = False
) -> None:
    """Raises ValueError unless the mask is of the tokens, ids `[B, T]` or embeddings `[B, T, D]`.

    least: tokens that there must be. cached: the mask may also be of tokens before, which a cache holds.
    """
    dims = 3 if tokens.is_floating_point() else 2
    if tokens.dim() != dims or len(tokens) == 0 or tokens.shape[1] < least:
        kind = str(tokens.dtype).removeprefix("torch.")
        raise ValueError(
            f"input_ids must be integers [batch, length] with a token, not {kind} {list(tokens.shape)}"
        )
    if attention_mask is None:
        return
    B, T = tokens.shape[:2]
    mask = list(attention_mask.shape)
    if mask != [B, T] and not (cached and len(mask) == 2 and mask[0] == B and mask[1] > T):
        raise ValueError(f"attention_mask must be [{B}, {T}{' or more' * cached}], got {mask}")


def _sum(tensors: Iterable[tuple[str, Tensor]], text: str = "") -> str:
    """SHA-256 over a text, and the names, dtypes, shapes and values of tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _file_sum(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    return _sum(sorted(tensors.items()), json.dumps(about, sort_keys=True))


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Whenever the machine stops, `path` has the old content or the new. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder; name a file", str(path))
    part = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, part, about)
        # The bytes reach the disk before the name does, and the name before the call returns.
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    except SafetensorError as error:
        raise OSError(f"{path}: not saved: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """fsync of a file, or of the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The texts and the tensors of a state file. Raises ValueError if it is none, or is damaged."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        about, tensors = {}, {}
    if about.get("format") not in (FORMAT, UNSUMMED):
        raise ValueError(f"{path} is not a state that this version can load")
    # The sum is over all other texts, as `save` computed it.
    written = about.pop("sum", None)
    if about["format"] == FORMAT and written != _file_sum(tensors, about):
        raise ValueError(f"{path} does not have the bytes that were written: read the text again")
    return about, tensors


def _damaged(path: str | Path, what: str) -> ValueError:
    return ValueError(f"{path} is damaged, its {what} is missing or wrong: read the text again")


def _parsed(path: str | Path, about: dict[str, str], name: str) -> dict[str, Any]:
    try:
        values = json.loads(about[name])
    except (KeyError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise _damaged(path, name)
    return values


def _check_settings(path: str | Path, about: dict[str, str], model: Any) -> None:
    saved = _parsed(path, about, "model")
    here = json.loads(_settings(model))  # as in the file: JSON has lists for tuples
    if saved != here:
        with contextlib.suppress(
            ValueError
        ):  # an older file may leave out defaults, as older configs do
            config = type(model.config).from_dict(model.config.to_dict() | saved)
            saved = json.loads(json.dumps({name: getattr(config, name) for name in saved}))
    different = [name for name in saved | here if saved.get(name) != here.get(name)]
    if different:
        values = ", ".join(
            f"{name} {saved.get(name)!r}, here {here.get(name)!r}" for name in different
        )
        raise ValueError(f"{path} was read with other settings: {values}; read the text again")


def _check_fingerprint(path: str | Path, about: dict[str, str], model: Any) -> None:
    """Compares the weights as saved, or else rounded to the widest dtype that both dtypes contain."""
    if "fingerprint" not in about:
        raise _damaged(path, "fingerprint")
    if about["fingerprint"] == fingerprint(model):
        return
    here = _dtype(model)
    saved = about.get("dtype", here)
    summed = about["format"] == FORMAT
    # The older format has one rounded fingerprint, in bf16.
    rounded = _parsed(path, about, "rounded") if summed else {"bfloat16": about.get("rounded")}
    shared = [x for x in CONTAINED.get(saved, ()) if x in CONTAINED.get(here, ()) and x in rounded]
    if saved != here and not shared:
        raise ValueError(
            f"{path} was read in {saved}, and this model is in {here}: their weights cannot be compared; "
            f"load the model in {saved}{' or float32' if summed else ''}"
        )
    if saved == here or rounded[shared[0]] != fingerprint(model, getattr(torch, shared[0])):
        raise ValueError(
            f"{path} was read with other weights, {about['fingerprint']} in {saved}, than this model has in "
            f"{here}: read the text again"
        )


def _take_tokens(
    path: str | Path, tensors: dict[str, Tensor], vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Removes the last tokens `[B, 1]` and the lengths `[B]` from the tensors, and returns them."""
    last, lengths = (tensors.pop(name, torch.empty(0)) for name in ("last", "lengths"))
    int64 = last.dtype == lengths.dtype == torch.int64
    shaped = lengths.dim() == 1 and len(lengths) > 0 and last.shape == (len(lengths), 1)
    if (
        not int64
        or not shaped
        or not bool((lengths > 0).all() & (last >= 0).all() & (last < vocab_size).all())
    ):
        raise _damaged(path, "last tokens or lengths")

    return last, lengths


def _warn_about_bos(ids: Tensor, mask: Tensor | None, bos: int | None) -> None:
    """Warns if a continuation starts with bos, which tokenizers add by default.

    bos is not removed, because it may be intended: where it equals eos, it also starts a new text.
    """
    if bos is None or ids.shape[1] == 0:
        return
    first = (
        ids[:, :1]
        if mask is None
        else ids.gather(1, mask.int().argmax(1, keepdim=True).to(ids.device))
    )
    if bool((first == bos).any()):
        warnings.warn(
            f"the continuation of a state begins with bos ({bos}), like a new text; tokenise it with "
            "add_special_tokens=False",
            stacklevel=4,
        )


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _settings(model: Any) -> str:
    return json.dumps({name: getattr(model.config, name) for name in SETTINGS})
