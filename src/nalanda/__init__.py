"""Pretraining for linear-attention language models.

Importing this registers Nalanda's config and model with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained` loads its checkpoints without remote code.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .model import Decoder, NalandaCache, NalandaConfig, NalandaForCausalLM, State, ops

AutoConfig.register("nalanda", NalandaConfig)
AutoModel.register(NalandaConfig, Decoder)
AutoModelForCausalLM.register(NalandaConfig, NalandaForCausalLM)

__version__ = "0.1.0"
__all__ = ["NalandaCache", "NalandaConfig", "NalandaForCausalLM", "State", "ops"]
