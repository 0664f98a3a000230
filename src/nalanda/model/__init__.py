"""The model. `save_pretrained` copies these files: they stay flat, with sibling-relative imports only."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from . import ops
from .base import Mixer
from .cache import NalandaCache
from .configuration import NalandaConfig
from .feature_maps import FEATURE_MAPS, FeatureMap, build_feature_map, register_feature_map
from .graphs import decoding_graphs
from .mixers import MIXERS, register_mixer
from .modeling import Decoder, NalandaForCausalLM
from .state import State

AutoConfig.register("nalanda", NalandaConfig)
AutoModel.register(NalandaConfig, Decoder)
AutoModelForCausalLM.register(NalandaConfig, NalandaForCausalLM)

# `save_pretrained` then copies these files, so that checkpoints load elsewhere with trust_remote_code.
NalandaConfig.register_for_auto_class()
Decoder.register_for_auto_class("AutoModel")
NalandaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "FEATURE_MAPS",
    "MIXERS",
    "Decoder",
    "FeatureMap",
    "Mixer",
    "NalandaCache",
    "NalandaConfig",
    "NalandaForCausalLM",
    "State",
    "build_feature_map",
    "decoding_graphs",
    "ops",
    "register_feature_map",
    "register_mixer",
]
