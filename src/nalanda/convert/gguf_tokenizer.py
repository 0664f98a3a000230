"""Tokenizers as llama.cpp runs them, from the fields of a tokenizer.json."""

import base64
import itertools
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from nalanda.common.errors import InputError
from nalanda.data.tokenizer import fast_backend
from nalanda.model import NalandaConfig

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""GGUF's types of tokens."""

_ENDS = ("eos", "eot", "eom")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|%s|\p{N}%s| ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPLITS = {
    None: "gpt-2",
    _WORDS % (_LETTERS, "{1,3}", r"\p{L}"): "llama-bpe",
    _WORDS % (_LETTERS, "", r"\p{L}"): "qwen2",
    _WORDS % (r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", "", r"\p{L}\p{M}"): "qwen35",
}
"""Patterns that cut a text into words before byte-level BPE, and llama.cpp's names; None: ByteLevel's own."""

Spec = dict[str, Any]


def add_tokenizer(  # noqa: C901, PLR0912
    writer: Any, tokenizer: PreTrainedTokenizerBase, config: NalandaConfig, ends: list[int]
) -> None:
    """Adds the tokenizer and its chat template to a `gguf.GGUFWriter`.

    Ids of the model that have no token become unused ones. bos stands in front of a text as in training.
    ends: the ids that end a text. llama.cpp stops at eos, at eot and at eom alike.

    Raises:
        InputError: names the step or setting of the tokenizer that llama.cpp lacks.
    """
    spec = json.loads(fast_backend(tokenizer).to_str())
    model, added = spec["model"], tokenizer.added_tokens_decoder

    # By id; those of a padded vocabulary stay unused.
    tokens = [f"[UNUSED{i}]" for i in range(config.vocab_size)]
    types = [UNUSED] * config.vocab_size
    for token, i in tokenizer.get_vocab().items():
        tokens[i], types[i] = token, NORMAL
        if i in added:
            types[i] = CONTROL if added[i].special else USER_DEFINED
        elif model.get("byte_fallback") and token in _BYTES:
            types[i] = BYTE
        if token == model.get("unk_token") or i == model.get("unk_id"):
            types[i] = UNKNOWN

    for token in added.values():
        # Flags by which a token takes the blanks around it, or must be a word of its own.
        for flag in ("lstrip", "rstrip", "single_word"):
            if getattr(token, flag):
                raise InputError(
                    f"llama.cpp's added tokens have no {flag}, which {str(token)!r} has: "
                    "set it to false in tokenizer.json if your texts need none"
                )

    # The steps before the model tell which of llama.cpp's tokenizers it is.
    normalizer = _steps(spec["normalizer"], "normalizers")
    pre_tokenizer = _steps(spec["pre_tokenizer"], "pretokenizers")
    byte_level = any(step["type"] == "ByteLevel" for step in pre_tokenizer)
    if model["type"] == "Unigram":
        add = _add_unigram
    elif model["type"] == "BPE" and byte_level:
        add = _add_byte_level
    elif model["type"] == "BPE" and model["byte_fallback"]:
        add = _add_sentencepiece
    else:
        raise InputError(f"llama.cpp has no tokenizer like this {model['type']}")
    add(writer, model, tokens, normalizer, pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)

    # Special tokens.
    if len(ends) > len(_ENDS):
        raise InputError(
            f"eos_token_id={ends}: GGUF has room for {len(_ENDS)} ids that end a text; keep those that your "
            "texts need in generation_config.json"
        )
    for role, i in zip(_ENDS, ends, strict=False):
        getattr(writer, f"add_{role}_token_id")(i)
    for role in ("bos", "unk", "pad"):
        if (i := getattr(tokenizer, f"{role}_token_id")) is not None:
            getattr(writer, f"add_{role}_token_id")(i)
    writer.add_add_bos_token(config.bos_token_id is not None and tokenizer.bos_token_id is not None)
    writer.add_add_eos_token(False)

    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


def _steps(stage: Spec | None, key: str) -> list[Spec]:
    """The steps of a stage of a tokenizer.json, which has several of them under `key`."""
    if not stage:
        return []
    return stage[key] if stage["type"] == "Sequence" else [stage]


def _refused(step: Spec) -> InputError:
    return InputError(f"llama.cpp's tokenizers have no step {_as_json(step)}")


def _as_json(step: Spec) -> str:
    return json.dumps(step, ensure_ascii=False)


def _add_byte_level(
    writer: Any, model: Spec, tokens: list[str], normalizer: list[Spec], pre_tokenizer: list[Spec]
) -> None:
    """BPE over bytes, as GPT-2's and Qwen's."""
    if normalizer:
        raise InputError(
            f"llama.cpp's byte-level BPE has no step {_as_json(normalizer[0])}: if your texts need none, "
            "remove it from tokenizer.json, with tokenizer_class: TokenizersBackend in tokenizer_config.json"
        )

    pattern, byte_level_splits = None, False
    for step in pre_tokenizer:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            byte_level_splits = step["use_regex"]
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and pattern is None:
            pattern = step["pattern"].get("Regex", "")
        else:
            raise _refused(step)

    pre = _SPLITS.get(pattern)
    # Exactly one of the two cuts a text into words: ByteLevel's own pattern, or a Split before it.
    splits_once = byte_level_splits == (pattern is None)
    if pre is None or not splits_once or model["ignore_merges"] != (pre == "llama-bpe"):
        raise _refused({"pre_tokenizer": pre_tokenizer, "ignore_merges": model["ignore_merges"]})
    if not model["merges"]:
        raise InputError("llama.cpp has no tokenizer like this BPE: it has no merges")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_merges([" ".join(pair) for pair in _merges(model)])


def _merges(model: Spec) -> list[tuple[str, ...]]:
    """The pairs that a BPE merges, in order. Older files have each as one string."""
    return [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]


def _add_sentencepiece(
    writer: Any, model: Spec, tokens: list[str], normalizer: list[Spec], pre_tokenizer: list[Spec]
) -> None:
    """SentencePiece's BPE with byte fallback, as Llama's and Mistral's: it merges by scores."""
    prefix, spaces = False, False
    for step in [*normalizer, *pre_tokenizer]:
        if step == {"type": "Prepend", "prepend": "▁"}:
            prefix = True
        elif step == {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            spaces = True
        elif step["type"] == "Metaspace" and step["replacement"] == "▁":
            prefix, spaces = prefix or step["prepend_scheme"] != "never", True
        else:
            raise _refused(step)

    merges = _merges(model)
    # The merges of one piece must follow one another, since a piece has one score.
    pieces = [piece for piece, _ in itertools.groupby(left + right for left, right in merges)]
    # SentencePiece merges the pair of the highest score first, so early merges score higher.
    scores = {piece: -float(i) for i, piece in enumerate(pieces)}

    # It joins any two pieces whose union is a token, so each such pair must be a merge.
    vocabulary, merged = model["vocab"], set(merges)
    pairs = ((piece[:i], piece[i:]) for piece in scores for i in range(1, len(piece)))
    missing = any(a in vocabulary and b in vocabulary and (a, b) not in merged for a, b in pairs)
    if missing or not spaces or len(scores) != len(pieces) or not vocabulary.keys() >= set(_BYTES):
        raise InputError(
            "llama.cpp has no tokenizer like this BPE: its merges, spaces or bytes are not SentencePiece's"
        )
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(token, 0.0) for token in tokens])
    writer.add_add_space_prefix(prefix)


def _add_unigram(
    writer: Any, model: Spec, tokens: list[str], normalizer: list[Spec], pre_tokenizer: list[Spec]
) -> None:
    """SentencePiece's unigram model: the most probable pieces."""
    if model["byte_fallback"]:
        raise InputError("llama.cpp's unigram tokenizer has no byte_fallback")
    charsmap, squeeze, prefix = b"", False, None
    for step in [*normalizer, *pre_tokenizer]:
        if step["type"] == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
        elif (
            step["type"] == "Replace"
            and step["pattern"] == {"Regex": " {2,}"}
            and step["content"] in (" ", "▁")
        ):
            squeeze = True
        elif step["type"] == "Metaspace" and step["replacement"] == "▁":
            prefix = step["prepend_scheme"] != "never"
        else:
            raise _refused(step)
    # Without this step blanks would not become ▁, as llama.cpp makes them.
    if prefix is None:
        raise InputError("llama.cpp's unigram tokenizer needs the step Metaspace")
    # The vocabulary is a list of pairs (piece, log-probability).
    scores = dict(model["vocab"])
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(token, 0.0) for token in tokens])
    writer.add_add_space_prefix(prefix)
    writer.add_remove_extra_whitespaces(squeeze)
    if charsmap:
        writer.add_precompiled_charsmap(charsmap)
