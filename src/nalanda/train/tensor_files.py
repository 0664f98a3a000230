"""Reads and writes tensors: a safetensors file, or a folder with one part per process.

Parts have the Hugging Face format of `torch.distributed.checkpoint`: safetensors whose header says where in
its tensor each part begins; torch's `HuggingFaceStorageReader` reads them too. Any number of processes,
sharded or not, loads either kind of checkpoint. torch's own writer is not used: it copies the file in memory,
communicates while it writes, and hides the disk's errors.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from nalanda.common.errors import InputError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors."""

Content = list[bytes | torch.Tensor]
"""A file's contents, in pieces."""

Tensors = dict[str, torch.Tensor]
"""Tensors by their names."""

Shapes = dict[str, tuple[torch.Size, torch.dtype]]
"""Unsharded shapes and dtypes of tensors, by their names."""


def tensor_source(path: Path, name: str) -> Path:
    """The folder of parts, or the file, of a checkpoint's `model`, `optimizer` or `ema-D`."""
    return folder if (folder := path / name).is_dir() else path / f"{name}.safetensors"


def shapes(source: Path) -> Shapes:
    """The tensors of a safetensors file or a folder of parts."""
    kinds: Shapes = {}
    for name, offsets, values in open_parts(source):
        # A part ends at most where the tensor does.
        ends = [o + n for o, n in zip(offsets, values.get_shape(), strict=True)]
        before = kinds[name][0] if name in kinds else ends
        kinds[name] = torch.Size(map(max, ends, before)), DTYPES[values.get_dtype()]
    return kinds


def iterate_tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, values) of every tensor of a safetensors file or part of a folder."""
    for name, _, values in open_parts(source):
        yield name, values[...]


def read_weights(path: Path, name: str = "model") -> Tensors:
    """A checkpoint's unsharded weights, in host memory. name: of `tensor_source`, for averages of them."""
    source = tensor_source(path, name)
    weights = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes(source).items()
    }
    read_tensors(source, weights)
    return weights


@torch.no_grad()
def read_tensors(source: Path, targets: Tensors) -> None:
    """Fills `targets` from a safetensors file or a folder of parts. Of a DTensor it fills this process's part.

    Raises `InputError` if values are missing.
    """
    # Values still to come. Saved parts do not overlap, so counting suffices.
    missing = {name: local_part(target)[0].numel() for name, target in targets.items()}
    for name, offsets, saved in open_parts(source):
        if name in targets:
            missing[name] -= copy_overlap(saved, offsets, *local_part(targets[name]))
    if short := [name for name, count in missing.items() if count]:
        raise InputError(f"{source}: it lacks parts of {short[0]}")


def copy_overlap(saved: Any, saved_start: list[int], local: torch.Tensor, start: list[int]) -> int:
    """Copies the values that the part `saved` and the part `local` of a tensor share; returns their number.

    saved: a safetensors slice. saved_start, start: where the parts begin in the unsharded tensor.
    """
    # Bounds of the overlap, in coordinates of the unsharded tensor.
    saved_ends = [s + n for s, n in zip(saved_start, saved.get_shape(), strict=True)]
    ends = [s + n for s, n in zip(start, local.shape, strict=True)]
    low = list(map(max, saved_start, start))
    high = list(map(min, saved_ends, ends))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return 0

    # The same box, in coordinates of each of the two parts.
    target = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
    index = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, saved_start, strict=True))
    values = saved[index] if index else saved[...]  # a tensor without dimensions
    # copy_ converts the dtype too, and moves to the device.
    local[target].copy_(values)
    return values.numel()


def open_parts(source: Path) -> Iterator[tuple[str, list[int], Any]]:
    """Yields (name, offset of the part in each dimension, safetensors slice) for each tensor of a safetensors file
    or part of a folder."""
    for file in sorted(source.glob("*.safetensors")) if source.is_dir() else [source]:
        try:
            with safe_open(file, framework="pt") as stream:
                offsets = json.loads((stream.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in stream.keys():  # noqa: SIM118  not a dict
                    values = stream.get_slice(name)
                    start = [0] * len(values.get_shape())
                    # Without offsets the file holds whole tensors.
                    if offsets:
                        start = offsets[name]["saved_offsets"]
                    yield name, start, values
        except (SafetensorError, ValueError, KeyError) as error:
            raise InputError(
                f"{file}: not a safetensors file of a checkpoint, and was not loaded: {error}"
            ) from None


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Returns this process's part of a tensor, and its offset in each dimension."""
    if not isinstance(tensor, DTensor):
        return tensor, [0] * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # torch.distributed.checkpoint's
    return tensor.to_local(), list(chunk.offsets)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether each process has only a part of the weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def is_writer(tensor: torch.Tensor, rank: int) -> bool:
    """Whether this process saves its part. Only the first of several replicas does, and no empty part is saved."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    # Along a mesh dimension without shards all processes have the same values; the first one saves them.
    coordinate = tensor.device_mesh.get_coordinate() or []
    first = all(
        placement.is_shard() or at == 0
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    # Rank 0 writes an empty part too, so that no tensor is without a name in the files.
    return first and (tensor.to_local().numel() > 0 or rank == 0)


def safetensors_content(tensors: Tensors, sharded: bool = False) -> Content:
    """A safetensors file of this process's parts of the tensors. sharded: whether it says where each part begins."""
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    metadata = {"format": "pt"}
    if sharded:
        starts = {name: {"saved_offsets": offsets} for name, (_, offsets) in sorted(parts.items())}
        metadata |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts)}
    # The format: 8 bytes with the header's length, the header in JSON, then the tensors' bytes.
    header: dict[str, Any] = {"__metadata__": metadata}
    codes = {dtype: code for code, dtype in DTYPES.items()}

    # The widest dtype first: every value is then aligned to its size.
    order = sorted(parts.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
    values, end = [], 0
    for name, (tensor, _) in order:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        values.append(tensor.detach())

    text = json.dumps(header, separators=(",", ":")).encode()
    # Blanks behind the JSON align the first value to 8 bytes.
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *values]


def copied(content: Content) -> Content:
    """The same file, with its tensors in host memory of their own."""
    # copy=True: a tensor on the CPU would not be copied otherwise.
    return [x.to("cpu", copy=True) if isinstance(x, torch.Tensor) else x for x in content]


def bytes_of(files: dict[str, Content]) -> int:
    """The size of files with these contents."""
    pieces = [piece for content in files.values() for piece in content]
    return sum(piece.nbytes if isinstance(piece, torch.Tensor) else len(piece) for piece in pieces)


def write_file(file: Path, content: Content) -> dict[str, Any]:
    """Writes and syncs a file. Returns its entry in the manifest, made from `content`, not read back."""
    digest, count = hashlib.sha256(), 0
    with file.open("wb") as stream:
        for piece in content:
            if isinstance(piece, torch.Tensor):
                # As bytes, since NumPy has no bf16.
                piece = piece.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            digest.update(piece)
            count += len(piece)
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": count, "sha256": digest.hexdigest()}
