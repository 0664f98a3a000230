"""What several tests of models use."""

import pytest
import torch
from tiny_models import build

from nalanda import NalandaForCausalLM


@pytest.fixture
def small() -> NalandaForCausalLM:
    return build(dtype=torch.float32)
