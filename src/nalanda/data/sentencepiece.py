"""A SentencePiece .model as a fast tokenizer, checked against SentencePiece itself.

transformers' converters ignore `add_dummy_prefix` and `remove_extra_whitespaces`, and give a special token's
id to a text that spells it. So the parts are put together here.

Two cuts of a text may be equally likely to 7 digits. A unigram model of tokenizers adds in float64 and may
then take the other one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nalanda.common.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNIGRAM, BPE = 1, 2
"""Kinds of models, as `trainer_spec.model_type` numbers them."""

NORMAL, SYMBOL, BYTE = 1, 4, 6
"""Types of pieces; a symbol is one of the trainer's `user_defined_symbols`."""

PROBES = (
    "def f(x):\n\n    return  x  # Größe 漢字\t",
    "",
    " ",
    "  two  spaces,\u00a0one\u3000wide\u200b \r\n\t end  ",
    "Ｆｕｌｌ　ｗｉｄｔｈ １２３, ﬁne ½ ① ㎏ e\u0301 A\u030a ｶﾞ 한국어 กำ",
    "unknown \u16a0\u16a1 \U0001f9ec\U0001f9ec\x00\u00ad.",
    "▁a ▁ b▁",
)
"""Texts that both must encode alike: odd spaces, full width, composed and unknown characters, spelt marks."""


def convert_sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The fast tokenizer of a unigram or BPE model, and its special tokens, `{"bos_token": "<s>", …}`.

    Raises:
        InputError: it would encode some texts otherwise than SentencePiece does; names one cause.
    """
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyrefly: ignore[missing-module-attribute]
    from tokenizers import AddedToken, Tokenizer, decoders

    model = SentencePieceProcessor(model_file=str(path))
    proto = ModelProto.FromString(path.read_bytes())
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise _not_converted(proto)

    special = [i for i in range(len(model)) if model.is_control(i) or model.is_unknown(i)]
    names = [proto.pieces[i].piece for i in special]
    symbols = [piece.piece for piece in proto.pieces if piece.type == SYMBOL]

    # Algorithm, normaliser, cuts and decoder, as the model's own settings say.
    backend = Tokenizer(_build_algorithm(proto, special))
    backend.normalizer = _build_normalizer(proto.normalizer_spec, symbols)
    if proto.trainer_spec.model_type == UNIGRAM:
        backend.pre_tokenizer = _cut_spelt_tokens(proto, names)

    steps: list[Any] = [decoders.Replace("▁", " ")]
    # <0x0A> → its byte. Without these pieces unknown characters are lost, and `text_bytes` counts no bytes.
    if proto.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)

    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    backend.add_tokens([AddedToken(symbol, normalized=True) for symbol in symbols])

    backend.encode_special_tokens = True  # as documents are: a special token's name is text there
    for probe in _make_probes(proto, names, symbols):
        if backend.encode(probe, add_special_tokens=False).ids != model.encode(probe):
            raise _not_converted(proto)
    backend.encode_special_tokens = False

    # An id of -1: the model has no such token.
    roles = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    return backend, {role: model.id_to_piece(i) for role, i in roles.items() if i >= 0}


def _build_algorithm(proto: Any, special: list[int]) -> Any:
    """The model's pieces, as one of tokenizers' models."""
    from tokenizers import models

    trainer = proto.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if trainer.model_type == UNIGRAM:
        # tokenizers would take a special token or a byte's piece where a text spells its name. SentencePiece takes
        # the pieces of the name, which score higher than this even one character at a time.
        longest = max(len(pieces[i][0]) for i in special)
        barred = min(score for _, score in pieces) * (longest + len("<0x41>"))
        for i, piece in enumerate(proto.pieces):
            if i in special or piece.type == BYTE:
                pieces[i] = (piece.piece, barred)
        return models.Unigram(pieces, trainer.unk_id, trainer.byte_fallback)

    vocabulary = {piece: i for i, (piece, _) in enumerate(pieces)}
    # A piece is the merge of every pair of pieces that it can be cut into; the best score comes first.
    merges = []
    for i, (piece, score) in enumerate(pieces):
        if i in special or proto.pieces[i].type in (SYMBOL, BYTE):
            continue
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(-score, i, a, b) for a, b in pairs if a in vocabulary and b in vocabulary]

    return models.BPE(
        vocabulary,
        [(left, right) for _, _, left, right in sorted(merges)],
        unk_token=pieces[trainer.unk_id][0],
        fuse_unk=True,
        byte_fallback=True,
    )


def _build_normalizer(spec: Any, symbols: list[str]) -> Any:
    """The model's character map and spaces.

    A text gets one ▁ in front, also before a user-defined symbol. The symbol alone gets none: tokenizers
    normalises it to look for it.
    """
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    # tokenizers looks up whole graphemes of up to 5 bytes in the map: a mapped character would take the marks
    # behind it along, and \r\n would be one space.
    if spec.name.startswith("nmt"):
        steps.append(normalizers.Replace("\r\n", "\n\n"))
    if spec.name.removesuffix("_cf") in ("nfkc", "nmt_nfkc"):
        steps.append(normalizers.NFKC())
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))

    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))

    if spec.add_dummy_prefix and not symbols:
        steps.append(normalizers.Prepend("▁"))
    elif spec.add_dummy_prefix:
        alone = "|".join(map(re.escape, symbols))
        steps.append(normalizers.Replace(Regex(rf"\A(?=[\s\S])(?!(?:{alone})\z)"), "▁"))

    steps.append(normalizers.Replace(" ", "▁"))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"▁+\z"), ""))
    return normalizers.Sequence(steps)


def _cut_spelt_tokens(proto: Any, names: list[str]) -> Any:
    """Cuts where a text spells a special token or a byte's piece with a character that is unknown; None for no cuts.

    Only an unknown character scores less than these tokens, which tokenizers would then take. No piece has it, so
    a cut beside it breaks none.
    """
    from tokenizers import Regex, pre_tokenizers

    characters = {
        x for piece in proto.pieces if piece.type in (NORMAL, SYMBOL) for x in piece.piece
    }
    cuts = []
    for name in [*names, *(f"<0x{byte:02X}>" for byte in range(256))]:
        unknown = [i for i, character in enumerate(name) if character not in characters]
        if unknown and name[1:]:
            # Before the first of them, or behind it where the name begins with it.
            cut = max(1, unknown[0])
            behind, last, ahead = map(re.escape, (name[: cut - 1], name[cut - 1], name[cut:]))
            cuts.append(f"(?<={behind}){last}(?={ahead})" if behind else f"{last}(?={ahead})")
    return pre_tokenizers.Split(Regex("|".join(cuts)), "merged_with_previous") if cuts else None


def _make_probes(proto: Any, names: list[str], symbols: list[str]) -> list[str]:
    """`PROBES`, and texts of the model's own pieces, special tokens and symbols."""
    words = [
        piece.piece.replace("▁", " ") for piece in proto.pieces if piece.type in (NORMAL, SYMBOL)
    ]
    # About a thousand pieces, spread over the vocabulary.
    text_of_pieces = "".join(words[:: len(words) // 1000 + 1])
    spelt = [f"a {name} b{name}" for name in [*names[:100], *symbols[:100], "<0x41>"]]
    return [*PROBES, PROBES[0] + text_of_pieces, *spelt]


def _not_converted(proto: Any) -> InputError:
    """The error that names the first property of the model that may be the reason for other tokens."""
    trainer = proto.trainer_spec
    spec = proto.normalizer_spec
    kind = type(trainer).ModelType.Name(trainer.model_type).lower()
    causes = {
        f"model_type={kind}": trainer.model_type not in (UNIGRAM, BPE),
        "treat_whitespace_as_suffix=true": trainer.treat_whitespace_as_suffix,
        "escape_whitespaces=false": not spec.escape_whitespaces,
        f"user_defined_symbols={','.join(trainer.user_defined_symbols[:3])}": trainer.user_defined_symbols,
        f"normalization_rule_name={spec.name}": spec.precompiled_charsmap,
        "remove_extra_whitespaces=true": spec.remove_extra_whitespaces,
        "add_dummy_prefix=false": not spec.add_dummy_prefix,
    }
    present = [name for name, is_set in causes.items() if is_set]
    cause = present[0] if present else f"model_type={kind}"
    return InputError(
        f"trained with {cause}, which is not converted; train it without, or give its tokenizer.json"
    )
