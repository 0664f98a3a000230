"""The state of a model after reading a text: save, load, fork and continue it."""

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .cache import NalandaCache

FORMAT = "nalanda-state-1"
SETTINGS = (
    *("mixer", "mixer_options", "feature_map", "feature_map_options", "num_heads", "conv_size"),
    *("norm_eps", "position_embedding", "scale_embeddings"),
)
"""Config keys that a state depends on and the fingerprint does not cover."""


def fingerprint(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over the weights' names, dtypes, shapes and values.

    dtype: precision to round to first, for a fingerprint that does not depend on the model's dtype.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is offloaded; a state is saved and loaded with all weights on devices")
        tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


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

    def fork(self) -> "State":
        """An independent state of the same text, which shares the tensors."""
        return State(self.model, self.cache.fork(), self.last)

    def __deepcopy__(self, memo: dict) -> "State":
        return self.fork()  # must not copy the model

    def resumed(
        self, model: Any, input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> tuple[NalandaCache, Tensor, Tensor | None]:
        """A cache, and the tokens to read into it next with their mask: the last tokens, then input_ids.

        Raises ValueError for another model's state, or one with other than 1 or the input's number of rows.
        """
        if model is not self.model:
            raise ValueError("the state belongs to another model: save it, and load it for this one")
        cache, last = self.cache.fork(), self.last
        if input_ids is None:
            return cache, last, None
        _warn_about_bos(input_ids, attention_mask, model.config.bos_token_id)
        rows = len(input_ids)
        if rows != self.batch_size:
            if self.batch_size != 1:
                raise ValueError(f"the state holds {self.batch_size} texts, the input has {rows} rows")
            cache.batch_repeat_interleave(rows)
            last = last.expand(rows, 1)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask.new_ones(rows, 1), attention_mask], 1)
        return cache, torch.cat([last.to(input_ids.device), input_ids], 1), attention_mask

    def save(self, path: str | Path, **notes: str) -> None:
        """Writes a safetensors file with the state, the notes and the fingerprint of the weights."""
        tensors = {"last": self.last, "lengths": self.lengths}
        for i, state in enumerate(self.cache.states):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in state.items()}
        about = {
            "format": FORMAT,
            "fingerprint": fingerprint(self.model),
            "rounded": fingerprint(self.model, torch.bfloat16),
            "dtype": _dtype(self.model),
            "model": _settings(self.model),
            "tokens": str(len(self)),
            "notes": json.dumps(notes),
        }
        part = Path(f"{path}.part")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, about)
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "State":
        """Loads a state that this model saved, at any precision of either, onto the model's devices.

        Raises ValueError for another kind of file, other weights or settings, or shapes that do not match.
        """
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            about, tensors = {}, {}
        if about.get("format") != FORMAT:
            raise ValueError(f"{path} is not a state that this version can load")
        if about["fingerprint"] != fingerprint(model):
            saved, here = about.get("dtype", "an unknown dtype"), _dtype(model)
            if saved == here or about.get("rounded") != fingerprint(model, torch.bfloat16):
                raise ValueError(
                    f"{path} was read with other weights, {about['fingerprint']} in {saved}, than this model "
                    f"has in {here}: {about['model']}"
                )
        if json.loads(about["model"]) != json.loads(_settings(model)):  # keys may be in any order
            raise ValueError(f"{path} was read with other settings: {about['model']}")
        last, lengths = tensors.pop("last"), tensors.pop("lengths")
        cache = NalandaCache(len(model.model.layers))
        if tensors:
            cache.seen(int(lengths.max()) - 1, lengths - 1)
        for i, layer in enumerate(model.model.layers if tensors else ()):
            device = next(layer.parameters()).device
            for name, (shape, dtype) in layer.mixer.state_spec(cache.seen_tokens).items():
                tensor = tensors.pop(f"layers.{i}.{name}", None)
                if tensor is None or tensor.shape != (len(last), *shape):
                    has = "nothing" if tensor is None else list(tensor.shape)
                    raise ValueError(f"{path} has {has} for {name} of layer {i}, not {[len(last), *shape]}")
                if tensor.is_floating_point():  # a double model computes in float64 what others have in fp32
                    dtype = model.dtype if dtype is None else torch.promote_types(dtype, model.dtype)
                cache.states[i][name] = tensor.to(device, dtype)
        if tensors:
            raise ValueError(f"{path} has tensors that are not in the model: {', '.join(tensors)}")
        state = cls(model, cache, last.to(model.device))
        state.notes = json.loads(about["notes"])
        return state


def _warn_about_bos(ids: Tensor, mask: Tensor | None, bos: int | None) -> None:
    """Warns if a continuation starts with bos, which tokenizers add by default.

    bos is not removed, because it may be intended: where it equals eos, it also starts a new text.
    """
    if bos is None or ids.dim() != 2 or ids.shape[1] == 0:
        return
    first = ids[:, :1] if mask is None else ids.gather(1, mask.int().argmax(1, keepdim=True).to(ids.device))
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
