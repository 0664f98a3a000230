"""Exponential moving averages of the weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from nalanda.common.errors import InputError
from nalanda.train.tensor_files import Tensors, local_part, read_tensors, shapes, tensor_source


def name_of(decay: float) -> str:
    """`ema-0.999`: the file of an average in a checkpoint, and the end of its model's folder."""
    return f"ema-{decay}"


class Averages:
    """Averages A of the weights W, one for each decay d of `train.ema`, in the weights' fp32.

    Update n, counted from 0, is A ← d_n A + (1 − d_n) W with d_n = min(d, (1 + n) / (10 + n)). The second term keeps
    the untrained weights, with which A begins, out of the average (TensorFlow's ExponentialMovingAverage). FSDP
    shards an average as it shards the weights.
    """

    def __init__(self, model: nn.Module, decays: Sequence[float]):
        # An evaluation may have left parameters whole, in memory that FSDP frees; a state dict has the shards.
        tensors = model.state_dict()
        self.weights = {name: tensors[name] for name, _ in model.named_parameters()}
        self.averages = {decay: self._copy() for decay in decays}
        self.updates = dict.fromkeys(decays, 0)

    def _copy(self) -> Tensors:
        return {name: weight.clone() for name, weight in self.weights.items()}

    def update(self) -> None:
        """Takes in the weights, after each update of theirs."""
        if not self.averages:
            return
        weights = [local_part(weight)[0] for weight in self.weights.values()]
        for decay, average in self.averages.items():
            n = self.updates[decay]
            update = get_ema_multi_avg_fn(min(decay, (1 + n) / (10 + n)))
            # torch updates the list in place, by one call of its foreach kernels.
            update([local_part(tensor)[0] for tensor in average.values()], weights, None)
            self.updates[decay] = n + 1

    def tensors(self) -> dict[str, Tensors]:
        """The averages by the names of their files in a checkpoint."""
        return {name_of(decay): average for decay, average in self.averages.items()}

    def state_dict(self) -> dict[str, int]:
        """The updates of each average, by the name of its file."""
        return {name_of(decay): count for decay, count in self.updates.items()}

    def load(self, checkpoint: Path, updates: dict[str, int]) -> None:
        """Takes the averages of a checkpoint. One that it lacks begins with the weights, which are loaded already.

        updates: `state_dict`. Raises `InputError` for averages of another model.
        """
        for decay, average in self.averages.items():
            name = name_of(decay)
            self.updates[decay] = updates.get(name, 0)
            if name not in updates:
                self.averages[decay] = self._copy()
                continue
            source = tensor_source(checkpoint, name)
            check_average(source, average)
            read_tensors(source, average)


def check_average(source: Path, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises `InputError` unless a saved average has the names and shapes of a model's parameters."""
    saved = {name: shape for name, (shape, _) in shapes(source).items()}
    if saved != {name: parameter.shape for name, parameter in parameters.items()}:
        raise InputError(f"{source}: the average of another model; take its decay out of train.ema")
