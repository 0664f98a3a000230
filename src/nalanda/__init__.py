"""Pretraining for linear-attention language models.

Importing this registers Nalanda's config and model with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained` loads its checkpoints without remote code.
"""

import importlib
import sys
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


# Importing the model registers it and takes seconds. A command line does not wait for it: each of its functions
# imports what it needs.
if "nalanda_typer" not in sys.modules:
    importlib.import_module(".model", __name__)
