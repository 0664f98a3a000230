"""Carried states: recurrent states that pass from one training step to the next (stateful truncated BPTT).

A batch slot is a row's place in the global batch of a step, the same for any number of processes. A
document longer than a row continues in the same slot at the next step. In batches, `slots` has the slots and
`carried` marks the rows that continue a document.
"""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nalanda.common.errors import InputError
from nalanda.model.cache import NalandaCache


def check_carries(model: Any) -> None:
    """Raises `InputError` for a model whose state cannot pass from row to row."""
    kind = model.config.model_type
    if kind != "nalanda":
        raise InputError(
            f"data.long_documents: carry needs one of Nalanda's own models, not {kind}; set cut"
        )
    try:
        model.get_decoder().check_carries()
    except ValueError as error:
        raise InputError(f"data.long_documents: carry: {error}") from None


def slots_of(rank: int, world_size: int, micro_batches: int, rows: int) -> list[list[int]]:
    """The batch slots of a rank, by micro-batch of a step with `rows` rows each."""
    return [
        [(i * rows + row) * world_size + rank for row in range(rows)] for i in range(micro_batches)
    ]


class CarriedStates:
    """Final states of one rank's rows of the last step, by micro-batch. For each micro-batch i of a step:

        out = model(tokens, cu_seqlens=…, **carried_states.before(i, batch))
        carried_states.after(i, out, batch)

    Checkpoints save the `state_tensors` of all ranks; `load` restores them.
    """

    def __init__(self):
        self._kept: dict[int, tuple[list[int], NalandaCache]] = {}

    def before(self, i: int, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The model's arguments for micro-batch i. batch: `slots` int64 `[B]` and `carried` bool `[B]`.

        Raises ValueError if a row continues a document and there is no state for its slot.
        """
        slots, carried = batch["slots"].tolist(), batch["carried"]
        known, states = self._kept.get(i, (None, None))
        if known != slots:
            states = None
            if continued := batch["slots"][carried].tolist():
                held = (
                    "no states: load those of the checkpoint" if known is None else f"slots {known}"
                )
                raise ValueError(
                    f"slot {continued[0]} continues a document, but micro-batch {i} holds {held}"
                )
        return {"carried_cache": states, "carried": carried, "return_carried_cache": True}

    def after(self, i: int, out: Any, batch: Mapping[str, Tensor]) -> None:
        """Keeps the final states of the rows of micro-batch i."""
        self._kept[i] = (batch["slots"].tolist(), out.carried_cache)

    def forget(self) -> None:
        """Empties every slot after a bad step, whose states may be wrong: documents are cut there."""
        for _, states in self._kept.values():
            states.states = [
                {k: torch.zeros_like(x) for k, x in state.items()} for state in states.states
            ]
            states.lengths = torch.zeros(states.batch_size, dtype=torch.int64)

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's states on the host, by slot: `lane.SLOT.LAYER.NAME` and `lane.SLOT.length`."""
        tensors = {}
        for slots, states in self._kept.values():
            for layer, state in enumerate(states.states):
                for name, rows in state.items():
                    found = zip(slots, rows.cpu(), strict=True)
                    tensors |= {f"lane.{slot}.{layer}.{name}": row.clone() for slot, row in found}
            assert states.lengths is not None
            found = zip(slots, states.lengths, strict=True)
            tensors |= {f"lane.{slot}.length": length.clone() for slot, length in found}
        return tensors

    def load(
        self,
        tensors: Mapping[str, Tensor],
        slots: list[list[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        """Restores `state_tensors` of any number of ranks. slots: those of this rank, by micro-batch.

        Raises InputError if a slot has no state.
        """
        self._kept = {}
        if not tensors:
            return  # saved before the first step
        names: dict[int, set[str]] = {}
        for key in tensors:
            _, slot, name = key.split(".", 2)
            names.setdefault(int(slot), set()).add(name)
        for i, own in enumerate(slots):
            for slot in own:
                if slot not in names:
                    raise InputError(
                        f"the checkpoint has no state for slot {slot}, only for {len(names)} slots; resume "
                        "with as many rows a step as it was saved with"
                    )
            fields = {
                name: torch.stack([tensors[f"lane.{slot}.{name}"] for slot in own])
                for name in names[own[0]]
            }
            lengths = fields.pop("length")
            states = NalandaCache(1 + max(int(name.split(".")[0]) for name in fields))
            for name in sorted(fields):
                layer, key = name.split(".", 1)
                states.states[int(layer)][key] = fields[name].to(device)
            states.seen(int(lengths.max()), lengths)
            self._kept[i] = (own, states)


def read_slots(files: Iterable[str | PathLike], slots: list[list[int]]) -> dict[str, Tensor]:
    """The states of `slots`, by micro-batch, from the ranks' saved `state_tensors`."""
    wanted, tensors = {slot for own in slots for slot in own}, {}
    for file in files:
        with safe_open(file, "pt") as opened:
            found = [key for key in opened.keys() if int(key.split(".")[1]) in wanted]  # noqa: SIM118
            tensors |= {key: opened.get_tensor(key) for key in found}
    return tensors
