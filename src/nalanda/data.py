"""Read → tokenise → pack → batch; every iterator can say where it is and go on from there."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np
import torch

from nalanda.corpus import DocumentStream, open_corpus
from nalanda.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


@dataclass
class TokenizerConfig:
    """`tokenizer:` of a recipe, either `path` or `train`; a bare string is short for `{path: ...}`."""

    path: str | None = None  # a directory, a Hub id, a tokenizer.json, or a SentencePiece .model
    train: str | None = None  # on the training documents: "bpe", byte-level, or "words", between white space
    vocab_size: int | None = None  # of the trained one, special tokens included; null: bpe 4096, words all
    min_count: int = 1  # words: those that the training documents have less often are unknown

    def __post_init__(self) -> None:
        if self.vocab_size is None and self.train != "words":
            self.vocab_size = 4096

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if (self.path is None) == (self.train is None):
            raise InputError(
                "tokenizer: give either path (a directory, Hub id or file) or train: bpe or train: words"
            )
        if self.train not in (None, "bpe", "words"):
            raise InputError(f"tokenizer.train is {self.train!r}; there are 'bpe' and 'words'")
        if self.train == "bpe" and (self.vocab_size or 0) < 257:
            raise InputError(f"tokenizer.vocab_size is {self.vocab_size}; a byte-level BPE needs 257 or more")
        if self.train == "words" and self.vocab_size is not None and self.vocab_size < 4:
            raise InputError(f"tokenizer.vocab_size is {self.vocab_size}; <unk>, </s>, <s> and a word need 4")
        if self.min_count < 1:
            raise InputError(f"tokenizer.min_count is {self.min_count}; it must be 1 or more")
        if self.min_count > 1 and self.train != "words":
            raise InputError(f"tokenizer.min_count is {self.min_count}; only train: words counts words")


@dataclass
class DataConfig:
    """`data:` of a recipe.

    A local directory may hold `train/` and `validation/`, each with files at any depth (SlimPajama's layout).
    Where there is no validation part, `validation_share` of the training documents is held out: the hash of a
    text decides, so that the two parts are disjoint and stay the same when files are added.

    `documents: joined` is for a text whose rows are its lines, such as WikiText's: language models on it see
    one stream of tokens with an eos behind every line, blank ones too, cut into blocks (fairseq's
    `--sample-break-mode none`). Labels, state and attention then cross from row to row of the source, the
    order is the source's, and validation needs a part of its own.
    """

    source: str = (
        ""  # "python" (this interpreter's documentation and library), a path, a glob, or a Hub dataset id
    )
    validation_source: str | None = None  # a source of its own for validation
    validation_share: float = 0.02  # of the documents, held out where the source has no validation part
    max_validation_rows: int = 1024  # rows of seq_len tokens in a validation pass, at most
    seq_len: int = 2048  # tokens in a row
    text_field: str = "text"  # of .jsonl and .parquet files and of Hub datasets
    bos: bool = True  # a document begins with the tokenizer's bos token ...
    eos: bool = True  # ... and ends with its eos token
    documents: Literal["apart", "joined"] = "apart"  # joined: one text, in the files' order, blank lines kept
    shuffle_buffer: int = 1024  # documents; they are saved in checkpoints. 0: the order of the files
    name: str | None = None  # Hub: the dataset's configuration
    train_split: str = "train"  # Hub
    validation_split: str = "validation"  # Hub; held out of train_split where the dataset has none
    streaming: bool = True  # Hub: read while training, or download first

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if not self.source:
            raise InputError("data.source is missing; give python, a path, a glob, or a Hub dataset id")
        if self.seq_len < 2:
            raise InputError(f"data.seq_len is {self.seq_len}; a row needs at least 2 tokens")
        if not 0 < self.validation_share < 1:
            raise InputError(f"data.validation_share is {self.validation_share}; it must lie between 0 and 1")
        if self.max_validation_rows < 1:
            raise InputError(f"data.max_validation_rows is {self.max_validation_rows}; it must be at least 1")
        if self.documents not in ("apart", "joined"):
            raise InputError(f"data.documents is {self.documents!r}; there are 'apart' and 'joined'")
        if self.documents == "joined" and self.bos:
            raise InputError("data.bos: joined documents are the lines of one text; set data.bos: false")
        if self.shuffle_buffer < 0:
            raise InputError(f"data.shuffle_buffer is {self.shuffle_buffer}; it must be 0 or more")


# ------------------------------ tokenizer

END_OF_TEXT = "<|endoftext|>"
UNKNOWN, END_OF_LINE, BEGINNING = "<unk>", "</s>", "<s>"  # of words, as fairseq writes them
BPE_SAMPLE = 200_000_000  # characters of the training documents that a tokenizer is trained on, at most


def build_tokenizer(
    config: TokenizerConfig, data: DataConfig, directory: str | os.PathLike
) -> PreTrainedTokenizerBase:
    """The tokenizer that `config` names, or one trained on the training documents.

    A trained one is saved in `directory`, and read from there when it is already there, so that a resumed
    run has the same tokens. There is no padding token, because training pads nothing, and many collators
    mask a padding token that equals eos from the labels. With `data.bos` a trained tokenizer, or one from a
    SentencePiece model, puts bos in front of what it encodes, as training does: evaluation and generation see
    documents begin as training saw them.

    bpe: byte-level, so that every text has tokens and none is unknown; `<|endoftext|>`, id 0, is bos and eos.
    words: what stands between white space, from the most frequent on, equals in the order of their text;
    `<unk>` is 0, eos `</s>` 1 and, with `data.bos`, bos `<s>` 2. A line end inside a text is `</s>`; at the
    end of a text it is nothing, since `data.eos` is there. (Of WikiText-103's tokens fairseq's dictionary
    holds 267 744: 267 733 words, these three, `<pad>`, and 7 that no text has, up to a multiple of 8.)

    With several processes call it in the first one before the others.

    Raises:
        InputError: the tokenizer cannot be had.
    """
    from transformers import AutoTokenizer

    config.check()
    directory = Path(directory)
    if config.train:
        if not (directory / "tokenizer_config.json").exists():
            partial = directory.with_name(directory.name + ".partial")
            (_train_words if config.train == "words" else _train_bpe)(config, data).save_pretrained(partial)
            partial.replace(directory)  # a run killed while saving leaves no half tokenizer
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(directory))
    name = config.path or ""
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.suffix != ".json":
                return _load_sentencepiece(path, data.bos)
            if not (path.parent / "tokenizer_config.json").exists():
                return _load_tokenizer_json(path)
            path = path.parent
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path if path.is_dir() else name))
    except Exception as error:  # tokenizers, sentencepiece and huggingface_hub have no common one
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"tokenizer {name!r} cannot be loaded: give a directory, a Hub id, a tokenizer.json, "
            f"a SentencePiece model, or train: bpe or words ({reason})"
        ) from None


def _train_bpe(config: TokenizerConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size or 0,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(data), trainer)
    if data.bos:
        _put_in_front(backend, END_OF_TEXT)
    return _wrap(backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def _sample(data: DataConfig) -> Iterator[str]:
    characters = 0
    for text in _training_documents(data):
        yield text
        characters += len(text)
        if characters > BPE_SAMPLE:
            return


def _training_documents(data: DataConfig) -> DocumentStream:
    return DocumentStream(open_corpus(data, "train"), seed=0, buffer_size=0, epochs=1)


def _train_words(config: TokenizerConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    special = [UNKNOWN, END_OF_LINE, *([BEGINNING] if data.bos else [])]
    backend = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\n\z"), ""), normalizers.Replace("\n", f" {END_OF_LINE} ")]
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(
        vocab_size=1 << 40, min_frequency=config.min_count, show_progress=False
    )
    backend.train_from_iterator(_training_documents(data), trainer)
    # The trainer would give a special token that the text also spells two ids, and leave one of them empty.
    ranks = backend.get_vocab(with_added_tokens=False)
    words = special + sorted(ranks.keys() - set(special), key=ranks.__getitem__)
    vocabulary = {word: i for i, word in enumerate(words[: config.vocab_size])}
    backend.model = models.WordLevel(vocabulary, UNKNOWN)
    if data.bos:
        _put_in_front(backend, BEGINNING)
    roles = {"bos_token": BEGINNING} if data.bos else {}
    return _wrap(backend, unk_token=UNKNOWN, eos_token=END_OF_LINE, **roles)


def _wrap(backend: Tokenizer, **special_tokens: str) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def _load_tokenizer_json(path: Path) -> PreTrainedTokenizerBase:
    """A lone tokenizer.json does not say which token is which; the usual names do."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    usual = {
        "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]", END_OF_TEXT),
        "eos_token": ("</s>", "<|end_of_text|>", "<eos>", "[SEP]", END_OF_TEXT),
        "unk_token": ("<unk>", "[UNK]"),
        "pad_token": ("<pad>", "[PAD]", "<|pad|>"),
    }
    found = {role: [t for t in names if backend.token_to_id(t) is not None] for role, names in usual.items()}
    return _wrap(backend, **{role: names[0] for role, names in found.items() if names})


def _load_sentencepiece(path: Path, bos: bool) -> PreTrainedTokenizerBase:
    """A BPE model such as Llama's or Mistral's as a fast tokenizer, checked against SentencePiece itself."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    model = SentencePieceProcessor(model_file=str(path))
    pieces = [model.id_to_piece(i) for i in range(len(model))]
    special = [i for i in range(len(model)) if model.is_control(i) or model.is_unknown(i)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        if i not in special and not model.is_byte(i):
            pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
            merges += [
                (-model.get_score(i), i, a, b) for a, b in pairs if a in vocabulary and b in vocabulary
            ]
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for _, _, left, right in sorted(merges)],
            unk_token=pieces[model.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(pieces[i], normalized=False) for i in special])

    words = [
        pieces[i].replace("▁", " ") for i in range(len(model)) if i not in special and not model.is_byte(i)
    ]
    probe = "def f(x):\n\n    return  x  # Größe 漢字\t" + "".join(words[:: len(words) // 1000 + 1])
    if backend.encode(probe, add_special_tokens=False).ids != model.encode(probe):
        raise ValueError(
            "unigram models, normalisers and user-defined symbols are not converted; give its tokenizer.json"
        )

    roles = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    tokens = {role: pieces[i] for role, i in roles.items() if i >= 0}
    if bos and "bos_token" in tokens:
        _put_in_front(backend, tokens["bos_token"])
    return _wrap(backend, **tokens)


def _put_in_front(backend: Tokenizer, bos: str) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises `InputError` where the tokenizer has ids that a model of `vocab_size` has no embedding for."""
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed > vocab_size:
        raise InputError(
            f"the tokenizer has {needed} tokens and the model's vocab_size is {vocab_size}; "
            f"set model.vocab_size to {needed} or more"
        )


# ------------------------------ packing

# Characters that are tokenised and whose rows are shuffled at a time; states lie where a group begins.
STREAM_GROUP = 1 << 19  # ready in a second
PERMUTED_GROUP = 1 << 24  # of corpora whose documents need no buffer: a small one as a whole
READ_AHEAD = 4  # batches
IGNORED = -100  # transformers' label for positions without loss


class Row(NamedTuple):
    """`seq_len` tokens of one or more documents."""

    tokens: np.ndarray  # [T], fewer in the last row of a validation pass
    starts: np.ndarray  # where a document begins, 0 included
    state: dict  # of the iterator once this row is delivered


class PackedBatches:
    """One rank's micro-batches of packed documents, and the place in them.

    Documents follow one another, `[bos] tokens [eos]`, cut into rows of `seq_len` tokens. A document longer
    than what is left of a row goes on in the next one as a segment of its own, since no state crosses rows.
    With `data.documents: joined` a row is one segment and begins with the last token of the row before, the
    first one with an eos, so that every token of the text is predicted once.
    The rows and their order depend on the corpus, the tokenizer and the seed alone. Micro-step s takes the
    rows [s·B·W, (s+1)·B·W); rank r of W takes every W-th of them, so that any number of ranks sees the same.
    Every rank reads and tokenises all of it.

    Each item is a dict of CPU tensors:
        input_ids: [B, T] int64.
        labels: [B, T] int64, unshifted; -100 at the first token of a segment and on padding.
        position_ids: [B, T] int64, from 0 in every segment.
        cu_seqlens: [N+1] int32, where the N segments begin in the B·T positions, every row start among them,
            and B·T.

    Training goes on for `epochs` (without end by default) and never pads: what is left of the last epoch and
    fills no micro-step is dropped. Validation is one pass, always in the same order, over at most
    `data.max_validation_rows`; the last row is filled up, and rows of padding are added until every rank has
    the same number of full batches. A batch may therefore have no label at all: add up losses and counts of
    labels, do not average means.

    Iterating starts where the state is; after the end it begins again. Reading and tokenising happen in a
    thread, which an error, `close`, or the end of the object or of the process stops.

    Args:
        data: what to read.
        tokenizer: a fast one.
        split: "train" or "validation".
        batch_size: B, rows of this rank's batch.
        seed: of the order.
        rank, world_size: which rows.
        epochs: passes over the training documents; None: no end.
    Raises:
        InputError: settings, files or tokenizer cannot work; while iterating, a shard cannot be read.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        split: str,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
    ):
        data.check()
        if split not in ("train", "validation"):
            raise ValueError(f"split is {split!r}; there are 'train' and 'validation'")
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_size {batch_size}, rank {rank} of {world_size}: no such batch")
        self.data, self.training = data, split == "train"
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.corpus = open_corpus(data, split)
        self.seed = seed if self.training else 0
        self.epochs = epochs if self.training else 1
        self.encode = _encoder(tokenizer, data)
        self.padding = tokenizer.eos_token_id or 0
        vocabulary = repr(sorted(tokenizer.get_vocab().items()))
        self.identity = {
            "split": split,
            "seed": self.seed,
            "seq_len": data.seq_len,
            "shuffle_buffer": data.shuffle_buffer,
            "bos": data.bos,
            "eos": data.eos,
            "documents": data.documents,
            "corpus": self.corpus.fingerprint,
            "tokenizer": blake2b(vocabulary.encode(), digest_size=8).hexdigest(),
        }
        carried = int(data.documents == "joined")  # the eos before the text
        self._start = {"documents": self._documents().state_dict(), "carried": carried, "done": 0, "rows": 0}
        self._state, self._ended = self._start, False
        self._reader: _ReadAhead | None = None

    def __iter__(self) -> PackedBatches:
        if self._ended:
            self._state, self._ended = self._start, False
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._ended:
            raise StopIteration
        reader = self._reader = self._reader or _ReadAhead(self._batches())
        try:
            batch, self._state = next(reader)
        except BaseException as stop:
            self.close()
            self._ended = isinstance(stop, StopIteration)
            raise
        return batch

    def state_dict(self) -> dict:
        """The place behind the last batch that was delivered, in plain JSON, shuffle buffer included.

        It is the same on every rank and good for any number of ranks and any batch size.
        """
        return {**self._state, "identity": self.identity}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from `state`: reads on in the shard where it stands, not from the beginning of the corpus.

        Raises:
            InputError: the state belongs to other data or settings.
        """
        for key, value in self.identity.items():
            saved = state["identity"].get(key)
            if saved != value:
                raise InputError(
                    f"the data changed since the checkpoint was saved: {key} was {saved!r} and is {value!r}; "
                    "restore it, or start a new run from the checkpoint's weights with model.init_from"
                )
        self.close()
        self._state = {key: value for key, value in state.items() if key != "identity"}
        self._ended = False

    def close(self) -> None:
        """Stops the thread; iterating again starts another one at the same place."""
        if self._reader:
            self._reader.close()
            self._reader = None

    def _documents(self) -> DocumentStream:
        buffer = self.data.shuffle_buffer if self.training else 0
        return DocumentStream(self.corpus, seed=self.seed, buffer_size=buffer, epochs=self.epochs)

    def _batches(self) -> Iterator[tuple[dict[str, torch.Tensor], dict]]:
        documents = self._documents()
        rows = _pack(
            documents,
            self.encode,
            self.data.seq_len,
            self._state,
            whole=self.training,
            joined=self.data.documents == "joined",
            before=self.padding,
        )
        if not self.training:
            rows = itertools.islice(rows, self.data.max_validation_rows - self._state["rows"])
        return _batch(
            rows, self.data.seq_len, self.batch_size, self.rank, self.world_size, self.padding, self.training
        )


def _encoder(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Callable[[list[str]], list[np.ndarray]]:
    """Texts → tokens, `[bos] tokens [eos]`. What looks like a special token in a text is read as text."""
    ends = {"bos": (data.bos, tokenizer.bos_token_id), "eos": (data.eos, tokenizer.eos_token_id)}
    for name, (wanted, token) in ends.items():
        if wanted and token is None:
            raise InputError(f"the tokenizer has no {name} token; set data.{name}: false")
    if not tokenizer.is_fast:
        raise InputError("the tokenizer has no fast version (tokenizer.json); convert it first")
    # A copy: the tokenizer itself may be at work in another thread, and refuses two users at a time.
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    first, last = ([token] if wanted else [] for wanted, token in ends.values())

    def encode(texts: list[str]) -> list[np.ndarray]:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(first + encoding.ids + last, dtype=np.int32) for encoding in encodings]

    return encode


def _pack(
    documents: DocumentStream,
    encode: Callable,
    seq_len: int,
    state: dict,
    *,
    whole: bool,
    joined: bool,
    before: int,
) -> Iterator[Row]:
    """Rows from `state` on. `whole`: only full ones. `joined`: of one text with token `before` in front.

    Documents are tokenised in groups. In training a group's rows come in an order of their own: the rows of
    one long document would otherwise fill batches by themselves, which costs a small model a fifth of its
    perplexity. The state of a row is the stream's before its group, the number of tokens carried over from
    earlier groups, and how many rows of the group are done: restoring tokenises one group again. The carried
    tokens themselves lie in its first row, which is given first and so is done in every state.
    """
    documents.load_state_dict(state["documents"])
    done, rows = state["done"], state["rows"]
    tokens, starts = np.full(state["carried"], before, np.int32), np.zeros(0, np.int64)
    stride = seq_len - joined
    for begun, group in _groups(documents):
        begun = {"documents": begun, "carried": len(tokens)}
        encoded = [ids for ids in encode(group) if len(ids)]
        lengths = [len(tokens), *map(len, encoded)]
        tokens = np.concatenate([tokens, *encoded])
        starts = starts if joined else np.concatenate([starts, np.cumsum(lengths[:-1])])
        count = (len(tokens) - joined) // stride
        bounds = np.searchsorted(starts, np.arange(count + 1) * stride)
        order = list(range(count))
        if whole:
            first = rows - done
            order[1:] = sorted(order[1:], key=lambda index: documents.draw("row", first + index))
        for place, index in enumerate(order[done:], done + 1):
            rows += 1
            yield Row(
                tokens[index * stride : index * stride + seq_len],
                _from_zero(starts[bounds[index] : bounds[index + 1]] - index * stride),
                {**begun, "done": place, "rows": rows},
            )
        tokens, starts, done = tokens[count * stride :], starts[bounds[count] :] - count * stride, 0
    if len(tokens) > joined and not whole and not done:
        begun = {"documents": documents.state_dict(), "carried": len(tokens)}
        yield Row(tokens, _from_zero(starts), {**begun, "done": 1, "rows": rows + 1})


def _groups(documents: DocumentStream) -> Iterator[tuple[dict, list[str]]]:
    """The stream's state before a group of documents, and their texts; a group ends with the epoch."""
    characters = PERMUTED_GROUP if documents.permuted or documents.ordered else STREAM_GROUP
    while not documents.ended:
        texts = documents.rest_of_epoch()
        while True:
            before = documents.state_dict()
            if not (group := _take(texts, characters)):
                break
            yield before, group


def _take(texts: Iterator[str], characters: int) -> list[str]:
    group = []
    while characters > 0 and (text := next(texts, None)) is not None:
        group.append(text)
        characters -= len(text)
    return group


def _from_zero(starts: np.ndarray) -> np.ndarray:
    """What is left of a document at the beginning of a row is a segment."""
    return starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])


def _batch(
    rows: Iterator[Row],
    seq_len: int,
    batch_size: int,
    rank: int,
    world_size: int,
    padding: int,
    training: bool,
) -> Iterator[tuple[dict[str, torch.Tensor], dict]]:
    block = batch_size * world_size
    while chunk := list(itertools.islice(rows, block)):
        state = chunk[-1].state
        if len(chunk) < block:
            if training:
                return
            empty = Row(np.zeros(0, np.int32), np.zeros(0, np.int64), state)
            chunk += [empty] * (block - len(chunk))
        yield _collate(chunk[rank::world_size], seq_len, padding), state


def _collate(rows: list[Row], seq_len: int, padding: int) -> dict[str, torch.Tensor]:
    input_ids = torch.full((len(rows), seq_len), padding)
    labels = torch.full_like(input_ids, IGNORED)
    starts = []
    for index, row in enumerate(rows):
        length = len(row.tokens)
        input_ids[index, :length] = labels[index, :length] = torch.from_numpy(row.tokens).long()
        ends = [length] if length < seq_len else []  # padding is a segment
        starts += [index * seq_len + start for start in (*row.starts.tolist(), *ends)]
    labels.view(-1)[starts] = IGNORED
    cu_seqlens = torch.tensor([*starts, input_ids.numel()], dtype=torch.int32)
    lengths = cu_seqlens.diff().long()
    positions = torch.arange(input_ids.numel()) - cu_seqlens[:-1].long().repeat_interleave(lengths)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": positions.view_as(input_ids),
        "cu_seqlens": cu_seqlens,
    }


class _ReadAhead:
    """Runs an iterator in one thread, a few items ahead of the consumer. Errors reach the consumer."""

    def __init__(self, items: Iterator):
        self._queue: queue.Queue = queue.Queue(READ_AHEAD)
        stop = threading.Event()
        # The thread must not hold `self`, or the object would never be collected and the thread never end.
        thread = threading.Thread(
            target=_produce, args=(items, self._queue, stop), name="nalanda-data", daemon=True
        )
        # Also runs when the interpreter exits: a daemon thread inside a tokenizer must not outlive it.
        self.close = weakref.finalize(self, _stop, thread, self._queue, stop)
        thread.start()

    def __next__(self):
        item, error = self._queue.get()
        if error:
            raise error
        return item


def _produce(items: Iterator, out: queue.Queue, stop: threading.Event) -> None:
    try:
        for item in items:
            out.put((item, None))
            if stop.is_set():
                return
        out.put((None, StopIteration()))
    except BaseException as error:
        out.put((None, error))


def _stop(thread: threading.Thread, out: queue.Queue, stop: threading.Event) -> None:
    stop.set()
    patience = 500  # a read from the network may not return; such a thread is left behind
    while thread.is_alive() and thread is not threading.current_thread() and patience:
        patience -= 1
        with contextlib.suppress(queue.Empty):
            out.get_nowait()  # room for a `put` that waits
        thread.join(0.01)
