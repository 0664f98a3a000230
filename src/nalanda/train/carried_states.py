"""Carried states: recurrent states that pass from one training step to the next (stateful truncated BPTT).

A slot is a row's place in the global batch of a step, the same for any number of processes. A document longer
than a row continues in the same slot at the next step. In batches, `slots` names the rows' slots and `carried`
marks the rows that continue a document.
"""

from collections.abc import Container, Mapping
from itertools import chain
from pathlib import Path
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
    # A step's rows are dealt to the ranks in turn: a slot means the same for any number of them.
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
        self._caches: dict[int, tuple[list[int], NalandaCache]] = {}
        """The slots of each micro-batch, and the cache of its rows."""
        self._forgotten = False

    def before(self, i: int, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The model's arguments for micro-batch i. batch: `slots` int64 `[B]` and `carried` bool `[B]`.

        Raises ValueError if a row continues a document and there is no state for its slot.
        """
        slots, carried = batch["slots"].tolist(), batch["carried"]
        saved_slots, cache = self._caches.get(i, (None, None))
        if saved_slots is None and self._forgotten:
            carried = torch.zeros_like(carried)

        # The cache is of other rows: only those that begin a document can do without it.
        if saved_slots != slots:
            cache = None
            if continued := batch["slots"][carried].tolist():
                held = f"slots {saved_slots}"
                if saved_slots is None:
                    held = "no states: load those of the checkpoint"
                raise ValueError(
                    f"slot {continued[0]} continues a document, but micro-batch {i} holds {held}"
                )

        return {"carried_cache": cache, "carried": carried, "return_carried_cache": True}

    def after(self, i: int, out: Any, batch: Mapping[str, Tensor]) -> None:
        """Keeps the final states of the rows of micro-batch i."""
        self._caches[i] = (batch["slots"].tolist(), out.carried_cache)

    def forget(self) -> None:
        """Empties every slot after a bad step or a rollback, whose states may be wrong: documents are cut there.

        So are those of slots that have no state yet.
        """
        self._forgotten = True
        for _, cache in self._caches.values():
            cache.states = [
                {name: torch.zeros_like(x) for name, x in state.items()} for state in cache.states
            ]
            cache.lengths = torch.zeros(cache.batch_size, dtype=torch.int64)  # [B]

    def state_tensors(self) -> dict[str, Tensor]:
        """States of this rank on the host, by slot: `slot.SLOT.LAYER.NAME` and `slot.SLOT.length`."""
        tensors = {}
        for slots, cache in self._caches.values():
            for layer, state in enumerate(cache.states):
                for name, rows in state.items():  # [B, …]
                    for slot, row in zip(slots, rows.cpu(), strict=True):
                        tensors[f"slot.{slot}.{layer}.{name}"] = row.clone()

            assert cache.lengths is not None
            for slot, length in zip(slots, cache.lengths, strict=True):
                tensors[f"slot.{slot}.length"] = length.clone()
        return tensors

    def load(
        self, checkpoint: Path, slots: list[list[int]], device: torch.device | str = "cpu"
    ) -> None:
        """Restores the `state_tensors` that any number of ranks saved in a checkpoint.

        slots: those of this rank, by micro-batch. Raises InputError if a slot has no state.
        """
        self._caches = {}
        saved = read_slots(checkpoint, set(chain(*slots)))
        if not saved:
            return  # saved before the first step

        for i, slots_of_batch in enumerate(slots):
            for slot in slots_of_batch:
                if slot not in saved:
                    raise InputError(
                        f"the checkpoint has no state for slot {slot}, only for {len(saved)} slots; resume "
                        "with as many rows a step as it was saved with"
                    )
            # The ranks that saved may be others: slots are gathered from all their files.
            rows = [saved[slot] for slot in slots_of_batch]
            self._caches[i] = slots_of_batch, _stacked(rows, device)


def _stacked(rows: list[dict[str, Tensor]], device: torch.device | str) -> NalandaCache:
    """The cache of B rows, from the saved tensors of each."""
    fields = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}  # [B, …]
    lengths = fields.pop("length")

    cache = NalandaCache(1 + max(int(name.split(".")[0]) for name in fields))
    for name in sorted(fields):
        layer, key = name.split(".", 1)
        cache.states[int(layer)][key] = fields[name].to(device)

    # lengths [B]; the columns of a call are those of its longest row
    cache.seen(int(lengths.max()), lengths)
    return cache


def read_slots(checkpoint: Path, wanted: Container[int]) -> dict[int, dict[str, Tensor]]:
    """The slots that all ranks saved in a checkpoint, those `wanted` with their tensors by `LAYER.NAME` or `length`."""
    saved: dict[int, dict[str, Tensor]] = {}
    # `lanes-R` is the earlier name.
    for file in (*checkpoint.glob("slots-*"), *checkpoint.glob("lanes-*")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                _, slot, name = key.split(".", 2)  # the first is "slot", in `lanes-R` it is "lane"
                tensors = saved.setdefault(int(slot), {})
                if int(slot) in wanted:
                    tensors[name] = opened.get_tensor(key)
    return saved
