"""The model: flat files, sibling-relative imports only: `save_pretrained` copies them with the weights."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from . import ops
from .base import Mixer
from .cache import NalandaCache
from .configuration import NalandaConfig
from .feature_maps import FEATURE_MAPS, FeatureMap, build_feature_map, register_feature_map
from .mixers import MIXERS, register_mixer
from .modeling import Decoder, NalandaForCausalLM
from .state import State

AutoConfig.register("nalanda", NalandaConfig)
AutoModel.register(NalandaConfig, Decoder)
AutoModelForCausalLM.register(NalandaConfig, NalandaForCausalLM)

# For `save_pretrained`: checkpoints carry these files, and load elsewhere with trust_remote_code.
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
    "ops",
    "register_feature_map",
    "register_mixer",
]
