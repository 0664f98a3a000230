"""The state of a model after reading a text: save, load, fork and continue it."""

import contextlib
import copy
import errno
import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .cache import NalandaCache
from .precision import check_state_dtype, packed_spec

FORMAT = "nalanda-state-2"

LONGEST = 2**40
"""Tokens that no text has. A state file with more was not written here."""

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

    def rounded_weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _weights(model).items():
            if tensor.is_meta:
                raise ValueError(
                    f"{name} is offloaded; a state is saved and loaded with all weights on devices"
                )
            is_rounded = dtype is not None and tensor.is_floating_point()
            yield name, tensor.to(dtype) if is_rounded else tensor

    return _sum(rounded_weights())[:16]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that the model computes with, by name.

    Without PEFT's adapters that are off; where all are, names are those of the model without PEFT.
    """
    tensors = model.state_dict(keep_vars=True)
    for path, module in model.named_modules():
        base = "base_layer" if hasattr(module, "base_layer") else "original_module"
        if not hasattr(module, base) or not hasattr(module, "active_adapters"):
            continue

        active: Any = () if module.disable_adapters else module.active_adapters
        for name in [name for name in tensors if name.startswith(f"{path}.")]:
            first, *rest = name.removeprefix(f"{path}.").split(".")
            if first != base and not {first, *rest} & set(active):
                del tensors[name]
            elif first == base and not active:
                # Adapters are off, so the base layer gets the name that it has without PEFT.
                tensors[".".join([path, *rest])] = tensors.pop(name)
    return dict(sorted(tensors.items()))


class Trace:
    """A record of a model's weights that shows later changes, without reading all of them.

    Parameters count writes, but not those of fused optimizers or through `.data`. So it keeps some values too.
    A move or a cast makes new buffers, so only their values are compared. Offloaded weights are new tensors in every
    call: only their names are compared.
    """

    SAMPLE = 16  # values of a tensor, at most

    def __init__(self, model: nn.Module):
        tensors = _weights(model)
        self.names = set(tensors)
        tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        parameters = {name: x for name, x in tensors.items() if isinstance(x, nn.Parameter)}
        self.parameters = weakref.WeakValueDictionary(parameters)
        self.writes = {
            name: 0 if x.is_inference() else x._version for name, x in parameters.items()
        }
        self.samples = self._samples(tensors.values())

    def _samples(self, tensors: Iterable[Tensor]) -> dict[tuple, Tensor]:
        """Bytes of some values, by dtype and device."""
        values: dict[tuple, list[Tensor]] = {}
        for tensor in tensors:
            if type(tensor) in (nn.Parameter, Tensor):  # others need not have values to index
                flat = tensor.detach().flatten()
                sample = flat[:: len(flat) // self.SAMPLE + 1]  # at most SAMPLE, evenly spaced
                values.setdefault((tensor.dtype, tensor.device), []).append(sample)
        return {key: torch.cat(samples).view(torch.uint8) for key, samples in values.items()}

    def matches(self, model: nn.Module) -> bool:
        """Whether the model has the same weights; it may have been moved, or cast to another dtype."""
        now = Trace(model)
        if (self.names, self.writes) != (now.names, now.writes):
            return False
        if any(self.parameters.get(name) is not x for name, x in now.parameters.items()):
            return False

        # Samples of another dtype or device have no key in common, and are not compared.
        for key in self.samples.keys() & now.samples.keys():
            before, after = self.samples[key], now.samples[key]
            if before.shape == after.shape and not torch.equal(before, after):
                return False
        return True


class State:
    """The result of `model.read(text)`, which `model.read` and `model.generate` can continue.

    A state never changes: both return new ones, so any number of threads can continue a state any number of
    times. The last token is not read yet, because reading it predicts the next one. So a continuation does
    not depend on how many pieces the text was read in.

    model: the model that read the text. cache: its cache without the last tokens. last: the last tokens,
    int64 `[B, 1]`.
    """

    def __init__(self, model: Any, cache: NalandaCache, last: Tensor):
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
        if read is None:
            return torch.ones(self.batch_size, dtype=torch.int64)
        return read + 1

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
        """Makes a copy or an unpickled state record the weights anew: its tensors count writes from 0."""
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

        tokens = torch.cat([last.to(input_ids.device), input_ids], 1)  # [B, 1 + T]
        if attention_mask is not None:
            # [B, 1 + T]: the state's last token is no padding.
            attention_mask = torch.cat([attention_mask.new_ones(rows, 1), attention_mask], 1)
        return cache, tokens, attention_mask

    def save(
        self,
        path: str | Path,
        *,
        tokenizer: str | None = None,
        state_dtype: str | None = None,
        **notes: str,
    ) -> None:
        """Writes a safetensors file with the state, the notes, the weights' fingerprints and a sum.

        tokenizer: fingerprint of the text's tokenizer, `nalanda.data.tokenizer.tokenizer_fingerprint`.
        state_dtype: precision of matrices there, see `precision.py`; None: as the state has them.

        Raises ValueError if the weights have changed since the text was read, OSError if it cannot write.
        """
        self.check_weights()
        check_state_dtype(state_dtype, self.model.config)
        cache = self.cache.fork().convert(state_dtype)
        tensors = {"last": self.last, "lengths": self.lengths}
        for i, state in enumerate(cache.states):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in state.items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}

        # Rounded fingerprints let a model of another dtype compare its weights.
        weights, dtype = fingerprint(self.model), _dtype(self.model)
        kinds = {x.dtype for x in _weights(self.model).values() if x.is_floating_point()}
        rounded = {}
        for name in CONTAINED.get(dtype, ()):
            kind = getattr(torch, name)
            rounded[name] = weights if kinds == {kind} else fingerprint(self.model, kind)

        about = {
            "format": FORMAT,
            "fingerprint": weights,
            "rounded": json.dumps(rounded),
            "dtype": dtype,
            "state_dtype": cache.state_dtype,
            "model": _settings(self.model),
            "tokens": str(len(self)),
            "notes": json.dumps(notes),
        }
        if tokenizer is not None:
            about["tokenizer"] = tokenizer
        _write(Path(path), tensors, about | {"sum": file_sum(tensors, about)})

    @classmethod
    def load(cls, path: str | Path, model: Any, tokenizer: str | None = None) -> "State":
        """Loads a state that this model saved onto the model's devices.

        Either may have any precision, except that bfloat16 and float16 cannot be compared.

        tokenizer: fingerprint of the continuation's, as for `save`. Without one here or in the file, any will do.

        Raises ValueError for another kind of file, a damaged one, or other weights, settings or tokenizer.
        """
        about, tensors = _read(path)
        notes = _parsed(path, about, "notes")
        _check_settings(path, about, model)
        _check_fingerprint(path, about, model)
        _check_tokenizer(path, about, tokenizer)
        last, lengths = _take_tokens(path, tensors, model.config.vocab_size)

        # Older files have no other precision.
        cache = NalandaCache(len(model.model.layers), about.get("state_dtype", "float32"))
        check_state_dtype(cache.state_dtype, model.config)
        # A text of one token has no state: nothing of it is read.
        if tensors or int(lengths.max()) > 1:
            # The last token of each text is not read yet.
            cache.seen(int(lengths.max()) - 1, lengths - 1)
            for i, layer in enumerate(model.model.layers):
                spec = layer.mixer.state_spec(cache.seen_tokens)
                device = next(layer.parameters()).device
                for name, (shape, dtype) in packed_spec(spec, cache.state_dtype).items():
                    tensor = _take_layer_tensor(path, tensors, i, name, (len(last), *shape))
                    packed = (shape, dtype) != spec.get(name)
                    sound = tensor.dtype == dtype if packed else tensor.is_floating_point()
                    if not sound:
                        raise _damaged(path, f"{name} of layer {i}")
                    # A double model computes in float64 what others have in fp32.
                    widened = torch.promote_types(dtype or model.dtype, model.dtype)
                    cache.states[i][name] = tensor.to(device, dtype if packed else widened)
        if tensors:
            raise ValueError(f"{path} has tensors that are not in the model: {', '.join(tensors)}")

        state = cls(model, cache, last.to(model.device))
        state.notes = notes
        return state


def check_state(state: Any) -> None:
    """Raises ValueError for anything but a `State`."""
    if not isinstance(state, State):
        raise ValueError(
            f"state must be of model.read or model.load_state, not {type(state).__name__}"
        )


def check_prompt(
    tokens: Tensor, attention_mask: Tensor | None, *, least: int = 1, cached: bool = False
) -> None:
    """Raises ValueError unless the tokens are ids `[B, T]` or embeddings `[B, T, D]`, and the mask is theirs.

    least: smallest T. cached: the mask may also cover earlier tokens, which a cache holds.
    """
    if not isinstance(tokens, Tensor):
        raise ValueError(f"input_ids must be a tensor, got {type(tokens).__name__}")
    dims = 3 if tokens.is_floating_point() else 2
    if tokens.dim() != dims or len(tokens) == 0 or tokens.shape[1] < least:
        kind = str(tokens.dtype).removeprefix("torch.")
        raise ValueError(
            f"input_ids must be integers [batch, length] with a token, not {kind} {list(tokens.shape)}"
        )
    if attention_mask is None:
        return
    B, T = tokens.shape[:2]
    shape = list(attention_mask.shape)
    covers_cache = cached and len(shape) == 2 and shape[0] == B and shape[1] > T
    if shape != [B, T] and not covers_cache:
        raise ValueError(f"attention_mask must be [{B}, {T}{' or more' * cached}], got {shape}")


def _sum(tensors: Iterable[tuple[str, Tensor]], text: str = "") -> str:
    """SHA-256 over a text, and the names, dtypes, shapes and values of tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_sum(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    return _sum(sorted(tensors.items()), json.dumps(about, sort_keys=True))


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Writes a file that has the old content or the new, whenever the machine stops. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder; name a file", str(path))
    if path.exists() and not path.is_file():  # a file would take its place
        raise OSError(errno.EINVAL, "a device or a pipe; name a file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; make it", str(path))
    unfinished = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, unfinished, about)
        # The bytes reach the disk before the name does, and the name before the call returns.
        _sync(unfinished)
        os.replace(unfinished, path)
        _sync(path.parent)
    except SafetensorError as error:
        raise OSError(errno.EIO, f"not saved: {error}", str(path)) from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Reads the texts and the tensors of a state file.

    Raises ValueError for another kind of file, or a damaged one, and FileNotFoundError for none.
    """
    if not Path(path).exists():
        raise FileNotFoundError(errno.ENOENT, "no such file; write one with State.save", str(path))
    Path(path).open("rb").close()  # safe_open calls a file missing that may not be read
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        about, tensors = {}, {}
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a state that this version can load: read the text again with this version"
        )

    # The sum is over all other texts, as `save` computed it.
    saved_sum = about.pop("sum", None)
    if saved_sum != file_sum(tensors, about):
        raise ValueError(f"{path} does not have the bytes that were written: read the text again")
    return about, tensors


def _damaged(path: str | Path, what: str) -> ValueError:
    return ValueError(f"{path} is damaged, its {what} is missing or wrong: read the text again")


def _parsed(path: str | Path, about: dict[str, str], name: str) -> dict[str, Any]:
    """The table that a state file has as JSON under this name. Raises ValueError if it has none."""
    try:
        values = json.loads(about[name])
    except (KeyError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise _damaged(path, name)
    return values


def _check_settings(path: str | Path, about: dict[str, str], model: Any) -> None:
    """Raises ValueError if the file was read with other SETTINGS than the model's."""
    saved = _parsed(path, about, "model")
    current = json.loads(_settings(model))  # as in the file: JSON has lists for tuples
    if saved != current:
        # An older file may leave out defaults, as older configs do.
        with contextlib.suppress(ValueError):
            config = type(model.config).from_dict(model.config.to_dict() | saved)
            saved = json.loads(json.dumps({name: getattr(config, name) for name in saved}))

    differences = []
    for name in saved | current:
        if saved.get(name) != current.get(name):
            differences.append(f"{name} {saved.get(name)!r}, here {current.get(name)!r}")
    if differences:
        raise ValueError(
            f"{path} was read with other settings: {', '.join(differences)}; read the text again"
        )


def _check_fingerprint(path: str | Path, about: dict[str, str], model: Any) -> None:
    """Raises ValueError if the file was read with other weights than the model's.

    Compares the weights as saved, or else rounded to the widest dtype that both dtypes contain.
    """
    if "fingerprint" not in about:
        raise _damaged(path, "fingerprint")
    if about["fingerprint"] == fingerprint(model):
        return

    dtype = _dtype(model)
    saved_dtype = about.get("dtype", dtype)
    rounded = _parsed(path, about, "rounded")

    contained = CONTAINED.get(dtype, ())
    shared = [x for x in CONTAINED.get(saved_dtype, ()) if x in contained and x in rounded]
    if saved_dtype != dtype and not shared:
        raise ValueError(
            f"{path} was read in {saved_dtype}, and this model is in {dtype}: their weights cannot be "
            f"compared; load the model in {saved_dtype} or float32"
        )

    widest = shared[0] if saved_dtype != dtype else None
    if widest is None or rounded[widest] != fingerprint(model, getattr(torch, widest)):
        raise ValueError(
            f"{path} belongs to a model with other weights ({about['fingerprint']} in {saved_dtype}; this "
            f"model is in {dtype}); load that model, or read the text again"
        )


def _check_tokenizer(path: str | Path, about: dict[str, str], tokenizer: str | None) -> None:
    """Raises ValueError if both fingerprints are known, and are of two tokenizers."""
    if tokenizer is not None and about.get("tokenizer", tokenizer) != tokenizer:
        raise ValueError(
            f"{path} was read with another tokenizer, whose ids mean other text: give the model that one, or "
            "go on without this check (`nalanda generate --force`)"
        )


def _take_tokens(
    path: str | Path, tensors: dict[str, Tensor], vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Removes the last tokens `[B, 1]` and the lengths `[B]` from the tensors, and returns them.

    Raises ValueError if one is missing, or is not of that shape, int64 and in range.
    """
    last, lengths = (tensors.pop(name, torch.empty(0)) for name in ("last", "lengths"))
    sound = (
        last.dtype == lengths.dtype == torch.int64
        and lengths.dim() == 1
        and len(lengths) > 0
        and last.shape == (len(lengths), 1)
        and bool(
            (lengths > 0).all()
            & (lengths < LONGEST).all()
            & (last >= 0).all()
            & (last < vocab_size).all()
        )
    )
    if not sound:
        raise _damaged(path, "last tokens or lengths")
    return last, lengths


def _take_layer_tensor(
    path: str | Path, tensors: dict[str, Tensor], i: int, name: str, shape: tuple[int, ...]
) -> Tensor:
    """Removes a tensor of layer `i` from the tensors, and returns it.

    Raises ValueError if it is missing or has another shape.
    """
    tensor = tensors.pop(f"layers.{i}.{name}", None)
    if tensor is None or tensor.shape != shape:
        has = "nothing" if tensor is None else list(tensor.shape)
        raise ValueError(f"{path} has {has} for {name} of layer {i}, not {list(shape)}")
    return tensor


def _warn_about_bos(ids: Tensor, mask: Tensor | None, bos: int | None) -> None:
    """Warns if a continuation `[B, T]` starts with bos, which tokenizers add by default.

    bos is not removed, because it may be intended: where it equals eos, it also starts a new text.
    """
    if bos is None or ids.shape[1] == 0:
        return
    first = ids[:, :1]  # [B, 1]
    if mask is not None:
        # The maximum's first place is the first token that is no padding.
        begins = mask.int().argmax(1, keepdim=True)  # [B, 1]
        first = ids.gather(1, begins.to(ids.device))
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
