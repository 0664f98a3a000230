"""Folders for mlx-lm, which makes them from the formats of Qwen3.5 and KimiLinear."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError, explained
from nalanda.common.files import update_json
from nalanda.convert.engines import quiet

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "q8": None}
"""mlx's name of each dtype that weights may be stored in. q8: 8 bits in groups of 64, where the width of a
matrix allows it; the rest keeps its dtype."""

_DECAY = ("A_log", "dt_bias")  # stay fp32, as in ours
_ROUNDED = "rounded"
_OVERRULED = ("qwen3_5",)
"""Types of models whose tokenizer transformers replaces by Qwen's, with this one's vocabulary. It keeps the
tokenizer where tokenizer_config.json has an auto_map, even one that names no class."""


def check_mlx(folder: Path, foreign: dict[str, Any]) -> None:
    """Raises InputError if mlx-lm is not installed, or names what it cannot load."""
    try:
        import mlx_lm  # noqa: F401  # pyrefly: ignore[missing-import]  (an extra)
    except ModuleNotFoundError as error:
        raise explained(error) or error from None
    if not (folder / "tokenizer.json").is_file():
        raise InputError("no tokenizer.json in it, which mlx-lm needs")
    check_order(foreign)


def check_order(foreign: dict[str, Any]) -> None:
    """Raises InputError for layers in an order that mlx-lm has not."""
    if foreign.get("full_attention_interval", 1) is None:  # of Qwen3.5
        raise InputError(
            "this order of mixers cannot be expressed in mlx-lm: softmax must be every n-th layer"
        )


def to_mlx(folder: Path, dtype: str | None) -> tuple[str, Path] | None:
    """Turns a folder in either format into one of mlx-lm's, with the same weights.

    If dtype, one of DTYPES, rounds them, returns it with the folder of the rounded model, inside `folder`.
    """
    import mlx.core as mx  # pyrefly: ignore[missing-import]

    file = folder / "config.json"
    kind = json.loads(file.read_text(encoding="utf-8"))["model_type"].removesuffix("_text")
    config = update_json(file, model_type=kind)
    if kind in _OVERRULED:
        update_json(folder / "tokenizer_config.json", auto_map=["", ""])
    narrow = getattr(mx, (dtype != "fp32" and config.get("dtype")) or "float32")

    def narrowed(name: str, x: Any) -> Any:
        """Norms come in fp32. Like decays, they may have digits that the model's dtype has not."""
        y = x.astype(narrow)
        return y if mx.array_equal(y, x) else x

    with quiet(), mx.stream(mx.cpu):
        model, config = _load(folder)
        # The exact model takes the folder first: rounding starts from it, and both are compared.
        _save(_cast(model, narrowed), config, folder / "exact")
        _replace(folder, folder / "exact")
        if dtype in (None, "fp32"):
            return None

        rounded = folder / _ROUNDED
        shutil.copytree(folder, rounded, ignore=shutil.ignore_patterns("*.safetensors*", _ROUNDED))
        _save(*_rounded(folder, dtype), rounded)
    return dtype, rounded


def check_rounded(folder: Path, dtype: str, rounded: Path) -> None:
    """Raises InputError unless the weights of `rounded` are those of `folder`, rounded."""
    import mlx.core as mx  # pyrefly: ignore[missing-import]
    from mlx.utils import tree_flatten  # pyrefly: ignore[missing-import]

    stored: dict[str, Any] = {}
    with quiet(), mx.stream(mx.cpu):
        for file in rounded.glob("model*.safetensors"):
            stored.update(mx.load(str(file)))  # pyrefly: ignore[no-matching-overload]
        expected: Any = tree_flatten(_rounded(folder, dtype)[0].parameters())
        for name, x in expected:
            if not mx.array_equal(stored[name], x):
                raise InputError(
                    f"source and target differ: {name} is not the source's, rounded to {dtype}"
                )


def keep_rounded(folder: Path) -> None:
    """Leaves the rounded model in `folder`, instead of the exact one."""
    _replace(folder, folder / _ROUNDED)


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of a folder, whose weights are read when they are used, and its config."""
    from mlx_lm.utils import load_model  # pyrefly: ignore[missing-import]

    return load_model(folder, lazy=True)


def _cast(model: Any, cast: Callable[[str, Any], Any]) -> Any:
    """The model with its weights as `cast` returns them, by their names."""
    from mlx.utils import tree_map_with_path  # pyrefly: ignore[missing-import]

    model.update(tree_map_with_path(cast, model.parameters()))
    return model


def _rounded(folder: Path, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The rounded model of a folder, and its config."""
    import mlx.core as mx  # pyrefly: ignore[missing-import]
    from mlx_lm.utils import quantize_model  # pyrefly: ignore[missing-import]

    model, config = _load(folder)
    if dtype == "q8":
        return quantize_model(model, config, 64, 8)
    narrow = getattr(mx, DTYPES[dtype] or "")

    def rounded(name: str, x: Any) -> Any:
        return x if name.endswith(_DECAY) else x.astype(narrow)

    return _cast(model, rounded), config


def _save(model: Any, config: dict[str, Any], folder: Path) -> None:
    from mlx_lm.utils import save_config, save_model  # pyrefly: ignore[missing-import]

    save_model(folder, model)
    save_config(config, folder / "config.json")


def _replace(folder: Path, inner: Path) -> None:
    """Moves the files of `inner` into `folder`, over the model that is there."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    for new in inner.iterdir():
        if new.is_dir():
            shutil.rmtree(folder / new.name, ignore_errors=True)
        new.replace(folder / new.name)
    inner.rmdir()
