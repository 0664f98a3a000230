"""Nalanda's models in vLLM: each mixer and map, from the folder that training or transformers wrote.

vLLM calls `register_with_vllm` in each of its processes; it finds it by the entry point `vllm.general_plugins`.
"""

MODELS = {
    "NalandaRecurrentForCausalLM": "states of constant size alone",
    "NalandaHybridForCausalLM": "such states, and softmax layers whose cache grows",
    "NalandaAttentionForCausalLM": "softmax layers alone",
}
"""vLLM asks a class, not a config, which caches a model needs. So there is a class for each kind of model."""


def register_with_vllm() -> None:
    """Lets vLLM read Nalanda's configs and build its models."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from .architecture import Architecture, CheckedConfig, CheckedMambaConfig

    MODEL_ARCH_CONFIG_CONVERTORS["nalanda"] = Architecture
    for name in MODELS:
        ModelRegistry.register_model(name, f"nalanda.serve.vllm.model:{name}")
        attention = name == "NalandaAttentionForCausalLM"
        MODELS_CONFIG_MAP[name] = CheckedConfig if attention else CheckedMambaConfig
