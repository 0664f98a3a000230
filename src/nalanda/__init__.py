"""Pretraining for linear-attention language models.

Importing this registers Nalanda's config and models with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained` loads its checkpoints without remote code. Neither torch nor transformers is
imported before it is needed: that takes seconds.
"""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import (
        NalandaCache,
        NalandaConfig,
        NalandaForCausalLM,
        NalandaForMaskedLM,
        NalandaForMultipleChoice,
        NalandaForQuestionAnswering,
        NalandaForSequenceClassification,
        NalandaForTokenClassification,
        State,
        ops,
        register_feature_map,
        register_mixer,
    )

__version__ = "0.1.0"
__all__ = [
    "NalandaCache",
    "NalandaConfig",
    "NalandaForCausalLM",
    "NalandaForMaskedLM",
    "NalandaForMultipleChoice",
    "NalandaForQuestionAnswering",
    "NalandaForSequenceClassification",
    "NalandaForTokenClassification",
    "State",
    "ops",
    "register_feature_map",
    "register_mixer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".model", __name__), name)


AUTO_CONFIG = "transformers.models.auto.configuration_auto"


class RegisterWithAutoConfig(MetaPathFinder):
    """Registers Nalanda's config as soon as the module of transformers' AutoConfig is loaded.

    Every Auto class reads a config before it looks for a model. The first config registers the models.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)  # by the finders that remain
        loader: Any = spec and spec.loader
        load = loader.exec_module

        def load_and_register(module: Any) -> None:
            load(module)
            register_config()

        loader.exec_module = load_and_register
        return spec


def register_config() -> None:
    config = importlib.import_module(".model.configuration", __name__).NalandaConfig
    sys.modules[AUTO_CONFIG].AutoConfig.register("nalanda", config)


if AUTO_CONFIG in sys.modules:
    register_config()
else:
    sys.meta_path.insert(0, RegisterWithAutoConfig())
