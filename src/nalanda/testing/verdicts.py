"""Judges a model by each property: how far the two ways differ, where, and a script that shows it."""

import bisect
import copy
import inspect
import re
import traceback
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from transformers import PreTrainedModel

from nalanda.common.errors import InputError, first_line
from nalanda.common.text import suggest
from nalanda.testing import properties
from nalanda.testing.properties import OPTIONAL, PROPERTIES, half_precision, uncached
from nalanda.testing.subject import Subject, kinds_of_layers

Verdict = Literal["holds", "rounding", "differs", "refused", "not offered", "fails"]

EXACT = 1e-9
"""Equal in float64: the largest difference, as a share of the largest value."""

ROUNDINGS = 100
"""A difference of so many roundings is still rounding. A leak moves the logits by 1e4 and more."""

HALF_ROUNDINGS = 10
"""In bf16 the activations are rounded too, which moves the logits by a few roundings of the weights."""

DOORS = {
    "attention_mask",
    "cu_seq_lens_q",
    "cu_seqlens",
    "labels",
    "num_items_in_batch",
    "position_ids",
    "seq_idx",
}
"""Inputs that a model may lack. One that swallows them by its `**kwargs` offers nothing, and says nothing."""

Property = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Finding:
    """One property of one model. difference: a share of the largest value. place: of the largest difference."""

    name: str
    says: str
    verdict: Verdict
    difference: float | None = None
    place: str = ""
    note: str = ""
    script: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("differs", "fails")

    @property
    def reason(self) -> str:
        """The place, the note, or both."""
        return ", ".join(text for text in (self.place, self.note) if text)


def find_properties(names: Iterable[str], option: str) -> list[Property]:
    """The properties of these names, whose words may stand apart. option: the name that messages begin with.

    Raises:
        InputError: there is no such property.
    """
    by_name: dict[str, Property] = {each.__name__: each for each in [*PROPERTIES, *OPTIONAL]}
    chosen = []
    for name in names:
        joined = name.replace(" ", "_")
        if joined not in by_name:
            raise InputError(f"{option} {name}: no such property{suggest(joined, by_name)}")
        chosen.append(by_name[joined])
    return chosen


def check(subject: Subject, chosen: Iterable[Property] = PROPERTIES) -> Iterator[Finding]:
    """Judges the model by each property in turn."""
    allowed = ROUNDINGS * rounding(subject.model, subject.ids, 2**-24)
    for holds in chosen:
        if holds is half_precision:
            yield judge_half_precision(subject)
        else:
            yield judge_property(subject, holds, allowed)


def judge_property(subject: Subject, holds: Property, allowed: float) -> Finding:
    """allowed: the largest difference that rounding explains, as a share of the largest value."""
    name, says = holds.__name__.replace("_", " "), inspect.getdoc(holds) or ""
    passed: set[str] = set()
    missing = DOORS - accepted(subject.model)
    hook = subject.model.register_forward_pre_hook(
        lambda _, __, inputs: passed.update(inputs), with_kwargs=True
    )
    try:
        actual, expected = both_ways(holds, subject.model, subject.ids)
    except Exception as error:  # anybody's code raises anything
        refused = re.findall(r"unexpected keyword argument '(\w+)'", str(error))
        return unable(name, says, error, passed & {*missing, *refused})
    finally:
        hook.remove()

    ignored = passed & missing
    difference = relative_difference(actual, expected)
    if difference <= EXACT:
        return Finding(name, says, "holds", difference)
    if difference <= allowed:
        return Finding(name, says, "rounding", difference)
    if ignored:
        return Finding(name, says, "not offered", note=f"ignores {', '.join(sorted(ignored))}")
    location = locate(actual, expected) + first_layer(subject, holds, allowed)
    return Finding(name, says, "differs", difference, location, script=script(subject, holds))


def both_ways(holds: Property, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Both ways of a property."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.set_grad_enabled(needs_gradients(holds)):
        warnings.simplefilter("ignore")
        actual, expected = holds(model, ids)
    return actual.detach(), expected.detach()


def accepted(model: nn.Module) -> set[str]:
    """The keywords that `forward` names, itself or by the type of its `**kwargs`."""
    parameters = inspect.signature(model.forward).parameters
    names, hint = set(parameters), parameters.get("kwargs")
    for unpacked in typing.get_args(hint.annotation) if hint else ():
        names |= getattr(unpacked, "__annotations__", {}).keys()
    return names


def unable(name: str, says: str, error: Exception, ignored: Iterable[str] = ()) -> Finding:
    """The row of a model that raised: it lacks the input or the method, refuses in words, or fails."""
    # A method that is missing raises where the property asks for it, not in the model.
    asked_by = [frame.filename for frame in traceback.extract_tb(error.__traceback__)[-2:]]
    message = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, ProcessRaisedException):
        message = str(error).strip().splitlines()[-1]
    missing = isinstance(error, AttributeError | KeyError | StopIteration)
    missing |= "unexpected keyword" in str(error)
    verdict: Verdict = "fails"
    if ignored or (missing and properties.__file__ in asked_by):
        verdict = "not offered"
    elif isinstance(error, ValueError | NotImplementedError) or message.startswith("ValueError"):
        verdict = "refused"
    return Finding(name, says, verdict, note=message)


def needs_gradients(holds: Property) -> bool:
    return "gradients" in holds.__code__.co_names


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value; NaN and other shapes differ infinitely."""
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def locate(actual: Tensor, expected: Tensor) -> str:
    """Row and token of the first difference that is half of the largest."""
    if actual.ndim < 2 or actual.shape != expected.shape:
        return ""
    difference = (actual - expected).abs().nan_to_num(torch.inf)
    if difference.ndim == 3:
        difference = difference.amax(-1)  # [B, T]
    row, token = (difference >= difference.max() / 2).nonzero()[0].tolist()
    return f"row {row}, token {token}"


def first_layer(subject: Subject, holds: Property, allowed: float) -> str:
    """The first layer that makes the difference: the model is cut behind it, by halves."""
    model: Any = subject.model
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList))
    # The outermost one comes first: a layer may have as many experts.
    name, layers = next(((n, m) for n, m in lists if len(m) == count), ("", []))

    def differs(count: int) -> bool:
        model.set_submodule(name, layers[:count])
        return relative_difference(*both_ways(holds, model, subject.ids)) > allowed

    try:
        layer = bisect.bisect_left(range(1, len(layers)), True, key=differs)
    except Exception:  # a model that cannot be cut names no layer
        return ""
    finally:
        if layers:
            model.set_submodule(name, layers)
    kinds = kinds_of_layers(model.config) or [model.config.model_type] * len(layers)
    return f", layer {layer} ({kinds[layer]})" if layers else ""


@torch.no_grad()
def rounding(model: PreTrainedModel, ids: Tensor, unit: float) -> float:
    """How far the logits move if every weight moves by its rounding of `unit`, as a share of the largest."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for p in moved.parameters():
        if p.is_floating_point():  # codes of quantized weights stay
            p.mul_(1 + unit * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return relative_difference(uncached(moved, ids), uncached(model, ids))


def judge_half_precision(subject: Subject) -> Finding:
    """The row of bf16. Its note says the difference in roundings of the weights to bf16."""
    unit = rounding(subject.model, subject.ids, 2**-9)
    row = judge_property(subject, half_precision, HALF_ROUNDINGS * unit)
    if row.difference is None or unit == 0:
        return row
    return replace(row, note=f"{row.difference / unit:.1f} × its rounding of the weights")


def script(subject: Subject, holds: Property) -> str:
    """The shortest program that shows a difference; it needs torch and transformers alone."""
    used: dict[str, str] = {}

    def collect(function: Callable) -> None:
        source = inspect.getsource(function)
        used[function.__name__] = re.sub(r'\n    """.*?"""', "", source, count=1, flags=re.S)
        for name in function.__code__.co_names:
            helper: Any = getattr(properties, name, None)
            if getattr(helper, "__module__", "") == properties.__name__ and name not in used:
                collect(helper)

    collect(holds)
    body = "\n".join(reversed(used.values()))
    imports = [
        line
        for line in inspect.getsource(properties).splitlines()
        if re.match("import|from", line)
        and line not in subject.source
        and re.search(rf"\b{line.split()[-1]}\b", body)
    ]
    return "\n".join(
        [
            f'"""{inspect.getdoc(holds)} Here they differ."""',
            subject.source,
            *imports,
            *([] if needs_gradients(holds) else ["torch.set_grad_enabled(False)"]),
            "",
            body,
            f"found, expected = {holds.__name__}(model, ids)",
            'print("largest difference", float((found - expected).abs().max()))',
            'print("largest value", float(expected.abs().max()))',
        ]
    )
