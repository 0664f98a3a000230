"""The model. `save_pretrained` copies these files: they stay flat, with sibling-relative imports only."""

# ruff: noqa: F401  (type checkers read the names here, Python in FILES)

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import ops
    from .base import Mixer
    from .cache import NalandaCache
    from .configuration import NalandaConfig
    from .decoder import Decoder
    from .decoding import choose_decoder
    from .feature_maps import FEATURE_MAPS, FeatureMap, build_feature_map, register_feature_map
    from .heads import (
        NalandaForMaskedLM,
        NalandaForMultipleChoice,
        NalandaForQuestionAnswering,
        NalandaForSequenceClassification,
        NalandaForTokenClassification,
    )
    from .int8 import Int8Config
    from .language import NalandaForCausalLM
    from .mixers import MIXERS, register_mixer
    from .state import State
    from .vision import NalandaForImageClassification

FILES = {
    "FEATURE_MAPS": "feature_maps",
    "MIXERS": "mixers",
    "Decoder": "decoder",
    "FeatureMap": "feature_maps",
    "Int8Config": "int8",
    "Mixer": "base",
    "NalandaCache": "cache",
    "NalandaConfig": "configuration",
    "NalandaForCausalLM": "language",
    "NalandaForImageClassification": "vision",
    "NalandaForMaskedLM": "heads",
    "NalandaForMultipleChoice": "heads",
    "NalandaForQuestionAnswering": "heads",
    "NalandaForSequenceClassification": "heads",
    "NalandaForTokenClassification": "heads",
    "State": "state",
    "build_feature_map": "feature_maps",
    "choose_decoder": "decoding",
    "ops": "ops",
    "register_feature_map": "feature_maps",
    "register_mixer": "mixers",
}
"""Public names, and the files that are imported when somebody asks for one."""

__all__ = list(FILES)


def __getattr__(name: str) -> Any:
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = importlib.import_module(f".{FILES[name]}", __name__)
    return file if name == "ops" else getattr(file, name)
