"""Folders for mlx-lm, which makes them from the formats of Qwen3.5 and KimiLinear."""

import json
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError, explained
from nalanda.convert.engines import quiet

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8": None}
"""What mlx-lm stores, with its name of the dtype. q8: 8 bits in groups of 64, where rows are such; the rest
keeps its dtype."""


def check_mlx(folder: Path, theirs: dict[str, Any], dtype: str | None) -> None:
    """Raises InputError if mlx-lm is not installed, or names what it cannot load or store."""
    try:
        import mlx_lm  # noqa: F401  # pyrefly: ignore[missing-import]  (an extra)
    except ModuleNotFoundError as error:
        raise explained(error) or error from None
    if dtype not in (None, *DTYPES):
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not (folder / "tokenizer.json").is_file():
        raise InputError("no tokenizer.json in it, which mlx-lm needs")
    if theirs.get("full_attention_interval", 1) is None:  # of Qwen3.5
        raise InputError(
            "this order of mixers cannot be expressed in mlx-lm: softmax must be every n-th layer"
        )


def to_mlx(folder: Path, dtype: str | None) -> None:
    """Turns a folder in either format into one of mlx-lm's; dtype: one of DTYPES, None keeps it."""
    import mlx.core as mx  # pyrefly: ignore[missing-import]
    import mlx_lm  # pyrefly: ignore[missing-import]

    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["model_type"] = config["model_type"].removesuffix("_text")
    file.write_text(json.dumps(config), encoding="utf-8")
    kept = config.get("dtype", "float32")  # norms are stored in fp32 there
    with quiet(), mx.stream(mx.cpu):
        mlx_lm.convert(
            str(folder),
            str(folder / "mlx"),
            dtype=(dtype and DTYPES[dtype]) or kept,
            quantize=dtype == "q8",
            q_bits=8,
        )
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    for new in (folder / "mlx").iterdir():
        new.replace(folder / new.name)
    (folder / "mlx").rmdir()
