"""`nalanda check`: judges anybody's causal language model by the properties of `nalanda.testing.properties`."""

import contextlib
import copy
import io
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from nalanda import NalandaForCausalLM
from nalanda.check.options import CheckOptions
from nalanda.common.errors import InputError, first_line
from nalanda.common.progress import Progress
from nalanda.convert.certificate import compare
from nalanda.convert.convert import convert
from nalanda.convert.gguf import write_gguf
from nalanda.testing.properties import PROPERTIES
from nalanda.testing.subject import Subject, make
from nalanda.testing.verdicts import Finding, Property, check, find_properties
from nalanda.train.resolve import resolve

LIBRARIES = {
    "transformers": ["qwen3_5", "kimi_linear", "qwen3", "llama"],
    "llama.cpp": ["gguf"],
    "mlx": ["mlx"],
    "fla": ["fla"],
}
"""Formats of the libraries that may compute a model of ours."""


def check_named(name: str, changes: dict, options: CheckOptions) -> tuple[Subject, list[Finding]]:
    """Makes the model `name` and judges it. changes: fields of its config.

    Raises:
        InputError: the model cannot be made, or an option names no property or library.
    """
    chosen = choose_properties(options)
    for library in options.against or []:
        if library not in [*LIBRARIES, "vllm"]:
            libraries = ", ".join(LIBRARIES)
            raise InputError(f"--against {library}: no such library; take {libraries}, vllm")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # of saving and loading
    subject = make(
        name if name in CONFIG_MAPPING else resolve(name).model,
        layers=options.layers,
        width=options.width,
        changes=changes,
        imports=options.plugin or [],
        trust_remote_code=options.trust_remote_code,
        seed=options.seed,
    )
    rows = []
    with Progress("checking", len(chosen)) as progress:
        for row in check(subject, chosen):
            progress.call(row.name)
            rows.append(row)
    rows += [against(subject, library) for library in options.against or []]
    return subject, rows


def choose_properties(options: CheckOptions) -> Sequence[Property]:
    """The properties that the options ask for, in their order."""
    names = list(options.only or [each.__name__ for each in PROPERTIES])
    names += ["compiled_is_eager"] * options.compile
    names += ["tensor_parallel_is_whole"] * options.tensor_parallel
    return find_properties(names, "--only")


def against(subject: Subject, library: str) -> Finding:
    """Converts the model to another library's format, and compares what both compute."""
    name, says = f"against {library}", "The model, converted to another library, computes the same."
    if library == "vllm":
        why = "vLLM computes the model itself by our plugin, see docs/deploying.md"
        return Finding(name, says, "not offered", note=why)
    formats = LIBRARIES[library]
    if library == "transformers" and not isinstance(subject.model, NalandaForCausalLM):
        formats = ["nalanda"]  # the model is transformers' own
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        copy.deepcopy(subject.model).float().save_pretrained(source)
        for file in Path(subject.name).glob("*token*.json"):  # a tokenizer, which some formats need
            shutil.copy(file, source)
        note = ""
        for form in formats:
            try:
                if form == "gguf":
                    result = write_gguf(source, target, "fp32", False)
                else:
                    # Its output says that nothing was compared.
                    with contextlib.redirect_stderr(io.StringIO()):
                        result = convert(str(source), str(target), form, check=False)
                proof = compare(source, result, ["", form])
            except InputError as error:
                note = first_line(error).replace(str(source), subject.name)
                if "differ" in note:
                    return Finding(name, says, "differs", note=note)
                continue
            facts = proof.facts.get("largest difference of log-probabilities")
            if facts is None:
                return Finding(name, says, "not offered", note=str(proof))
            return Finding(name, says, "rounding", float(facts.split(",")[0]), note=facts)
    return Finding(name, says, "refused", note=note)
