"""The tokenizer of a run: loaded, converted from SentencePiece, or trained on the training documents."""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nalanda.common.errors import InputError, explained, first_line, no_room
from nalanda.common.files import new_folder, verify_manifest, write_manifest
from nalanda.config.model_folder import check_hub
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.corpus import Corpus
from nalanda.data.sentencepiece import convert_sentencepiece
from nalanda.data.sources import open_corpus
from nalanda.data.workers import Encoder
from nalanda.storage.remote import copy_here, is_store

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


END_OF_TEXT = "<|endoftext|>"

MASK = "<mask>"

MISTRAL = ("mistral", "mistral-common")

UNKNOWN, END_OF_LINE, BEGINNING = "<unk>", "</s>", "<s>"
"""Special tokens of a word tokenizer, spelt as in fairseq."""

USUAL = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]", END_OF_TEXT),
    "eos_token": ("</s>", "<|end_of_text|>", "<eos>", "[SEP]", END_OF_TEXT),
    "unk_token": ("<unk>", "[UNK]"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>"),
    "mask_token": ("<mask>", "[MASK]"),
}
"""Usual names of special tokens by role, for tokenizers that name none."""

BPE_SAMPLE = 200_000_000
"""Most characters of the training documents that a BPE is trained on."""


def build_tokenizer(
    config: TokenizerConfig,
    data: DataConfig,
    directory: str | os.PathLike,
    open_texts: Callable[[], Corpus] | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer that `config` names, or one trained on the training documents.

    It is what `save_pretrained` and loading give back (`as_saved`): prepared sets, runs and exported models
    have the same one.

    A trained one is saved in `directory` and, if it is already there, loaded from it, so a resumed run has
    the same tokens. It has no padding token: training pads nothing, and many collators mask a padding token
    that equals eos from the labels. (An exported model's has one, see `export.pad_batches`.) With `data.bos`
    a trained tokenizer, or one from a SentencePiece model, puts bos in front of each text. So evaluation and
    generation see documents begin as in training.

    bpe: byte-level, so no text has unknown tokens; `<|endoftext|>`, id 0, is bos and eos. `<mask>` comes
        after the special tokens, if wanted; eos is then put between the texts of a pair.
    words: white-space separated, by falling frequency, ties in the order of their text; `<unk>` is 0, eos
    `</s>` 1 and, with `data.bos`, bos `<s>` 2. A line end inside a text is `</s>`; at the end of a text it is
    dropped, since `data.eos` stands there. (fairseq's dictionary of WikiText-103 has 267 744 entries: 267 733
    words, these three, `<pad>`, and 7 unused ones up to a multiple of 8.)

    With several processes, call it in the first one before the others.

    Args:
        open_texts: gives the training documents if they are open already.

    Raises:
        InputError: the tokenizer cannot be loaded or trained.
    """
    config.check()
    directory = Path(directory)
    if config.train:
        if not is_whole(directory):
            train = _train_words if config.train == "words" else _train_bpe
            corpus = open_texts() if open_texts else open_corpus(data, "train")
            save_tokenizer(train(config, data, corpus), directory)
        try:
            # Loaded, not the one just trained: a new run and a resumed one have the same.
            return load_tokenizer(directory)
        except Exception as error:  # saved by an older version, without sums
            raise InputError(
                f"{directory}: damaged ({first_line(error)}); delete it to train again"
            ) from None

    name = config.path or ""
    path = Path(name).expanduser()
    if name in MISTRAL and not path.exists():
        path = mistral_model()
    is_path = name.startswith(("~", "/", ".")) or path.suffix in (".json", ".model")
    if is_path and not path.exists() and not is_store(name):
        raise InputError(f"tokenizer: {name} does not exist; give a folder, a file or a hub id")

    try:
        with tempfile.TemporaryDirectory() as folder:
            if is_store(name):
                path = copy_here(name, Path(folder), data.retries)
            return as_saved(_load_named(name, path, data))
    except ModuleNotFoundError as error:
        raise explained(error) or error from None
    except InputError as error:
        raise type(error)(f"tokenizer: {name!r}: {error}") from None
    except Exception as error:  # tokenizers, sentencepiece and huggingface_hub share no base class
        if no_room(error):
            raise
        raise InputError(
            f"tokenizer: {name!r} cannot be loaded ({first_line(error)}); give mistral, a directory, a Hub "
            "id, a tokenizer.json, a SentencePiece model, or train: bpe or words"
        ) from None


def _load_named(name: str, path: Path, data: DataConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a file, a directory or a Hub id, with bos and eos if the data need them."""
    # By what is there: a SentencePiece model, a lone tokenizer.json, a folder, or else a Hub id.
    if path.is_file() and path.suffix != ".json":
        return _load_sentencepiece(path, data.bos)
    if path.is_file() and not (path.parent / "tokenizer_config.json").exists():
        return _load_tokenizer_json(path)

    if path.is_file():  # a tokenizer.json with its settings beside it
        path = path.parent
    if not path.is_dir():
        check_hub(name)
    tokenizer = load_tokenizer(path if path.is_dir() else name)
    # Some tokenizers name no bos or eos though their vocabulary has them.
    for role, wanted in (("bos_token", data.bos), ("eos_token", data.eos)):
        if wanted and getattr(tokenizer, role) is None:
            setattr(tokenizer, role, _find_usual(role, tokenizer.get_vocab()))
    return tokenizer


def as_saved(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer that `save_pretrained` and loading give back.

    Llama's older form, `"legacy": true`, is one that changes: transformers does not save that setting, and
    then no longer puts ▁ behind a special token. Saved again, a tokenizer stays the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        saved = load_tokenizer(folder)
    saved.name_or_path = tokenizer.name_or_path
    return saved


def load_tokenizer(path: str | os.PathLike) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or a Hub id."""
    from transformers import AutoTokenizer

    return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Writes the tokenizer to `directory` with its sums, synced, or leaves `directory` unchanged."""
    with new_folder(directory, replace=True) as folder:
        tokenizer.save_pretrained(folder)
        write_manifest(folder)


def is_whole(directory: Path) -> bool:
    """Whether `directory` holds the bytes that `save_tokenizer` wrote, or a tokenizer of an older version,
    without sums. Prints what is damaged."""
    if not directory.is_dir() or not (directory / "manifest.json").exists():
        return (directory / "tokenizer_config.json").exists()
    if problem := verify_manifest(directory):
        print(f"{directory}: damaged, made again: {problem}", flush=True)
    return problem is None


def mistral_model() -> Path:
    """Mistral 7B's SentencePiece model in the package mistral-common, without importing it.

    Raises:
        InputError: it is not installed.
    """
    package = importlib.util.find_spec("mistral_common")
    folders = (package.submodule_search_locations if package else None) or []
    for folder in folders:
        path = Path(folder) / "data" / "tokenizer.model.v1"
        if path.is_file():
            return path
    raise InputError(
        "tokenizer: mistral needs the package mistral-common; pip install 'nalanda[mistral]', "
        "or give a directory, a Hub id or a file"
    )


def _train_bpe(
    config: TokenizerConfig, data: DataConfig, corpus: Corpus
) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    masks = {"mask_token": MASK} if config.mask else {}

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()

    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size or 0,
        special_tokens=[END_OF_TEXT, *masks.values()],
        # Every byte has a token, whatever the training text holds.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_sample_texts(corpus), trainer)

    if data.bos:
        _put_in_front(backend, END_OF_TEXT, END_OF_TEXT if masks else "")
    return _as_transformers(backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, **masks)


def _sample_texts(corpus: Corpus) -> Iterator[str]:
    characters = 0
    for text in corpus.once().texts():
        yield text
        characters += len(text)
        if characters > BPE_SAMPLE:
            return


def _train_words(
    config: TokenizerConfig, data: DataConfig, corpus: Corpus
) -> PreTrainedTokenizerBase:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    roles = {"bos_token": BEGINNING} if data.bos else {}
    roles |= {"mask_token": MASK} if config.mask else {}
    special = [UNKNOWN, END_OF_LINE, *roles.values()]

    backend = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\n\z"), ""), normalizers.Replace("\n", f" {END_OF_LINE} ")]
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # All words for now: the vocabulary is cut below, with the special tokens in front.
    trainer = trainers.WordLevelTrainer(
        vocab_size=1 << 40, min_frequency=config.min_count, show_progress=False
    )
    backend.train_from_iterator(corpus.once().texts(), trainer)

    # The trainer gives a special token that the text also spells two ids, one of them unused.
    ranks = backend.get_vocab(with_added_tokens=False)
    words = special + sorted(ranks.keys() - set(special), key=ranks.__getitem__)
    vocabulary = {word: i for i, word in enumerate(words[: config.vocab_size])}
    backend.model = models.WordLevel(vocabulary, UNKNOWN)
    if data.bos:
        _put_in_front(backend, BEGINNING, END_OF_LINE if config.mask else "")
    return _as_transformers(backend, unk_token=UNKNOWN, eos_token=END_OF_LINE, **roles)


def _as_transformers(backend: Tokenizer, **special_tokens: str) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def _load_tokenizer_json(path: Path) -> PreTrainedTokenizerBase:
    """A lone tokenizer.json, whose special tokens are recognised by their usual names."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    vocabulary = backend.get_vocab()
    roles = {role: _find_usual(role, vocabulary) for role in USUAL}
    return _as_transformers(backend, **{role: token for role, token in roles.items() if token})


def _find_usual(role: str, vocabulary: dict[str, int]) -> str | None:
    """The token that has one of the usual names of this role, or None."""
    return next((name for name in USUAL[role] if name in vocabulary), None)


def _load_sentencepiece(path: Path, bos: bool) -> PreTrainedTokenizerBase:
    backend, tokens = convert_sentencepiece(path)
    if bos and "bos_token" in tokens:
        _put_in_front(backend, tokens["bos_token"])
    return _as_transformers(backend, **tokens)


def _put_in_front(backend: Tokenizer, bos: str, between: str = "") -> None:
    """Puts bos in front of a text, and `between` between the two texts of a pair."""
    from tokenizers import processors

    special = {name: backend.token_to_id(name) for name in (bos, between) if name}
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=" ".join(filter(None, (bos, "$A", between, "$B"))),
        special_tokens=[*special.items()],
    )


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills rows: eos or another special one, which `Masking` never chooses; else 0."""
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return next(iter(tokenizer.all_special_ids), 0)


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id plus one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises `InputError` if the tokenizer has ids without an embedding in a model of `vocab_size`."""
    needed = vocabulary_of(tokenizer)
    if needed > vocab_size:
        raise InputError(
            f"model.vocab_size: the tokenizer has {needed} tokens and the model's vocab_size is "
            f"{vocab_size}; set {needed} or more"
        )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides the tokens of a text: vocabulary, merges, normaliser, special tokens.

    Truncation and padding, settings of a call, are left out. It is the same in every process and after
    `save_pretrained`.

    Raises:
        InputError: the tokenizer has no fast version.
    """
    backend = fast_backend(tokenizer)
    return blake2b(backend.to_str().encode(), digest_size=16).hexdigest()


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The facts that decide the tokens of documents. Raises `InputError` as `tokenizer_fingerprint`.

    The fingerprint does not say which token is bos or eos, so their ids are added, and the vocabulary's size.
    """
    return {
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "vocab_size": vocabulary_of(tokenizer),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
    }


def fast_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the fast version, without truncation and padding.

    (The tokenizer itself may be in use in another thread, and refuses two users at a time.)

    Raises:
        InputError: the tokenizer has no fast version.
    """
    if not tokenizer.is_fast:
        raise InputError("tokenizer: no fast version (tokenizer.json); convert it first")
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    return backend


def encoder(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Encoder:
    """Texts → tokens, `[bos] tokens [eos]`. Raises `InputError` if the tokenizer lacks bos or eos."""
    ends = {"bos": (data.bos, tokenizer.bos_token_id), "eos": (data.eos, tokenizer.eos_token_id)}
    missing = [name for name, (wanted, token) in ends.items() if wanted and token is None]
    if missing:
        settings = " ".join(f"data.{name}=false" for name in missing)
        raise InputError(f"tokenizer: no {' and no '.join(missing)} token; set {settings}")
    first, last = ([token] if wanted else [] for wanted, token in ends.values())
    return Encoder(fast_backend(tokenizer), first, last)
