"""States that documents longer than a row take along from one training step to the next."""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nalanda.common.errors import InputError
from nalanda.model.cache import NalandaCache


def check(model: Any) -> None:
    """Raises `InputError` for a model whose state cannot be carried from row to row."""
    kind = model.config.model_type
    if kind != "nalanda":
        raise InputError(f"data.long_documents: carry needs a model of Nalanda's own, not {kind}; take cut")
    try:
        model.get_decoder().check_carries()
    except ValueError as error:
        raise InputError(f"data.long_documents: carry: {error}") from None


def slots_of(rank: int, world_size: int, micro_batches: int, rows: int) -> list[list[int]]:
    """The global lanes of a rank's rows, `rows` in each micro-batch of a step, as its batches state them."""
    return [[(i * rows + row) * world_size + rank for row in range(rows)] for i in range(micro_batches)]


class RowStates:
    """What the rows of one rank's last step ended in, by micro-batch of the step.

    A lane is a row's place in the global batch of a step, the same for every number of processes; documents
    go on in their lane. A step of gradient accumulation runs, for each micro-batch i,

        out = model(tokens, cu_seqlens=…, **states.before(i, batch))
        states.after(i, out, batch)

    Between steps `state_tensors` of all ranks are what a checkpoint keeps, and `load` goes on from them.
    """

    def __init__(self):
        self._kept: dict[int, tuple[list[int], NalandaCache]] = {}

    def before(self, i: int, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The model's arguments for micro-batch i, which has `lanes` int64 `[B]` and `carried` bool `[B]`.

        Raises ValueError where a row goes on and nothing is known of its lane.
        """
        lanes, carried = batch["lanes"].tolist(), batch["carried"]
        known, states = self._kept.get(i, (None, None))
        if known != lanes:
            states = None
            if going_on := batch["lanes"][carried].tolist():
                raise ValueError(
                    f"lane {going_on[0]} goes on with a document, and micro-batch {i} holds "
                    + ("no states: load those of the checkpoint" if known is None else f"lanes {known}")
                )
        return {"row_states": states, "carried": carried, "return_row_states": True}

    def after(self, i: int, out: Any, batch: Mapping[str, Tensor]) -> None:
        """Keeps what the rows of micro-batch i ended in."""
        self._kept[i] = (batch["lanes"].tolist(), out.row_states)

    def forget(self) -> None:
        """Every lane begins empty, after a step whose states are not to be trusted: documents are cut."""
        for _, states in self._kept.values():
            states.states = [{k: torch.zeros_like(x) for k, x in state.items()} for state in states.states]
            states.lengths = torch.zeros(states.batch_size, dtype=torch.int64)

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's states, on the host, a lane's alone: `lane.LANE.LAYER.NAME` and `lane.LANE.length`."""
        tensors = {}
        for lanes, states in self._kept.values():
            for layer, state in enumerate(states.states):
                for name, rows in state.items():
                    found = zip(lanes, rows.cpu(), strict=True)
                    tensors |= {f"lane.{lane}.{layer}.{name}": row.clone() for lane, row in found}
            assert states.lengths is not None
            found = zip(lanes, states.lengths, strict=True)
            tensors |= {f"lane.{lane}.length": length.clone() for lane, length in found}
        return tensors

    def load(
        self, tensors: Mapping[str, Tensor], lanes: list[list[int]], device: torch.device | str = "cpu"
    ) -> None:
        """Goes on from `state_tensors` of any number of ranks: `lanes` are this one's, by micro-batch.

        Raises InputError where the states of a lane are missing.
        """
        self._kept = {}
        if not tensors:
            return  # saved before the first step
        names: dict[int, set[str]] = {}
        for key in tensors:
            _, lane, name = key.split(".", 2)
            names.setdefault(int(lane), set()).add(name)
        for i, some in enumerate(lanes):
            for lane in some:
                if lane not in names:
                    raise InputError(
                        f"the checkpoint has no state for lane {lane}, only for {len(names)} lanes: go on "
                        "with as many rows a step as it was saved with"
                    )
            fields = {
                name: torch.stack([tensors[f"lane.{lane}.{name}"] for lane in some])
                for name in names[some[0]]
            }
            lengths = fields.pop("length")
            states = NalandaCache(1 + max(int(name.split(".")[0]) for name in fields))
            for name in sorted(fields):
                layer, own = name.split(".", 1)
                states.states[int(layer)][own] = fields[name].to(device)
            states.seen(int(lengths.max()), lengths)
            self._kept[i] = (some, states)


def read_slots(files: Iterable[str | PathLike], lanes: list[list[int]]) -> dict[str, Tensor]:
    """Of the safetensors files in which ranks have stored their `state_tensors`, those of `lanes` alone."""
    wanted, tensors = {lane for some in lanes for lane in some}, {}
    for file in files:
        with safe_open(file, "pt") as opened:
            found = [key for key in opened.keys() if int(key.split(".")[1]) in wanted]  # noqa: SIM118
            tensors |= {key: opened.get_tensor(key) for key in found}
    return tensors
