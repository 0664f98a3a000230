"""The model. `save_pretrained` copies these files: they stay flat, with sibling-relative imports only."""

import importlib

import transformers

from . import ops
from .base import Mixer
from .cache import NalandaCache
from .configuration import AUTO_MAP, NalandaConfig
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

transformers.AutoConfig.register("nalanda", NalandaConfig)
NalandaConfig.register_for_auto_class()
for _auto, _name in AUTO_MAP.items():
    _file, _, _class = _name.partition(".")
    _model = getattr(importlib.import_module(f".{_file}", __name__), _class)
    getattr(transformers, _auto).register(NalandaConfig, _model)
    # `save_pretrained` then copies these files, so that checkpoints load elsewhere with trust_remote_code.
    _model.register_for_auto_class(_auto)

__all__ = [
    "FEATURE_MAPS",
    "MIXERS",
    "Decoder",
    "FeatureMap",
    "Int8Config",
    "Mixer",
    "NalandaCache",
    "NalandaConfig",
    "NalandaForCausalLM",
    "NalandaForImageClassification",
    "NalandaForMaskedLM",
    "NalandaForMultipleChoice",
    "NalandaForQuestionAnswering",
    "NalandaForSequenceClassification",
    "NalandaForTokenClassification",
    "State",
    "build_feature_map",
    "choose_decoder",
    "ops",
    "register_feature_map",
    "register_mixer",
]
