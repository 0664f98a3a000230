"""The properties of a causal language model that boundaries break: packing, padding, batches, caches, losses.

A property is a function `(model, ids)` that computes one thing in two ways and returns both. `ids` `[2, 70]` are
two rows of tokens. The second way is the model's simplest: one row alone, without mask or cache. Its source is
the reproduction that a user gets, so it uses torch, transformers and the functions of this file alone.
"""

import copy
import inspect
import io
import os
import tempfile

import torch
import torch.nn.functional as F
from transformers import DataCollatorWithFlattening

# ------------------------------ what the properties use


def uncached(model, input_ids, **inputs):
    """Logits without a cache."""
    return model(input_ids, use_cache=False, **inputs).logits


def goes_on(model, ids, cache=None, **inputs):
    """Logits and cache of the next tokens."""
    names = ("cache", "past_key_values", "cache_params", "state")
    name = next(name for name in names if name in inspect.signature(model.forward).parameters)
    out = model(ids, use_cache=True, **{name: cache}, **inputs)
    # transformers may give the cache back under its older name.
    return out.logits, next(out[name] for name in names if name in out)


def in_pieces(model, ids, sizes):
    """Logits of pieces of the rows, each with the cache behind the piece before."""
    logits, cache = [], None
    for piece in ids.split(sizes, 1):
        out, cache = goes_on(model, piece, cache)
        logits.append(out)
    return torch.cat(logits, 1)


def documents(ids):
    """The tokens `[2, 70]` as six documents `[1, T]`: short ones, and some as long as a chunk."""
    return list(ids.reshape(1, -1).split([1, 2, 5, 64, 3, 65], 1))


def separate(model, ids):
    """Logits of each document alone, joined `[1, 140, V]`."""
    return torch.cat([uncached(model, document) for document in documents(ids)], 1)


def flattened(ids, **options):
    """The documents as one row, by transformers' collator."""
    rows = [{"input_ids": document[0].tolist()} for document in documents(ids)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(rows)
    batch.pop("labels")
    return batch


def padded(model, ids, side):
    """Logits of a row of 40 tokens beside one of 70, and those of the 40 alone."""
    gap = torch.zeros(1, 30, dtype=ids.dtype)
    short = torch.cat([gap, ids[:1, :40]] if side == "left" else [ids[:1, :40], gap], 1)
    tokens = torch.cat([short, ids[1:]])
    mask = torch.ones_like(tokens)
    real = slice(30, 70) if side == "left" else slice(0, 40)
    mask[0] = 0
    mask[0, real] = 1

    # As `generate` counts: positions begin at the first token.
    places = {}
    if side == "left" and "position_ids" in inspect.signature(model.forward).parameters:
        places["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    logits = uncached(model, tokens, attention_mask=mask, **places)
    return torch.cat([logits[:1, real], logits[1:, :40]]), uncached_rows(model, ids)[:, :40]


def uncached_rows(model, ids):
    """Logits of each row alone."""
    return torch.cat([uncached(model, row) for row in ids.split(1)])


def gradients(model, loss):
    """The gradients of all parameters as one vector."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    by_parameter = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, by_parameter, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])


def label_loss(model, ids, labels):
    """The sum of −log p of each label but −100, written out."""
    logits = uncached(model, ids)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def written(model, ids, **options):
    """The tokens that `generate` adds greedily."""
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return model.generate(ids, **(settings | options))[:, ids.shape[1] :]


def loaded(model, folder, **options):
    """The model that `folder` holds of it."""
    experts = model.get_experts_implementation()  # not saved
    again = type(model).from_pretrained(folder, experts_implementation=experts, **options)
    return again.to(model.dtype).eval()


def saved(model):
    """The model after a save and a load."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return loaded(model, folder)


def part(rank, model, ids, folder):
    """Writes the logits of the model that is split over two processes, of which this is number `rank`."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with torch.no_grad():
        torch.save(uncached(loaded(model, folder, tp_plan="auto"), ids), f"{folder}/{rank}")
    # Left open, gloo's threads abort some processes at their end.
    torch.distributed.destroy_process_group()


# ------------------------------ rows and documents


def causal(model, ids):
    """Logits do not depend on later tokens."""
    changed = torch.cat([ids[:, :66], ids[:, 66:].flip(0, 1)], 1)
    return uncached(model, changed)[:, :66], uncached(model, ids)[:, :66]


def batch_is_rows(model, ids):
    """Each row of a batch is the row alone."""
    return uncached(model, ids), uncached_rows(model, ids)


def order_of_rows(model, ids):
    """Rows in another order have the same logits."""
    return uncached(model, ids.flip(0)).flip(0), uncached(model, ids)


def left_padded_is_alone(model, ids):
    """A row padded on its left, with mask and positions as `generate` makes them, is the row alone."""
    return padded(model, ids, "left")


def right_padded_is_alone(model, ids):
    """A row padded on its right, with a mask, is the row alone."""
    return padded(model, ids, "right")


def packed_by_positions(model, ids):
    """Documents in one row, whose positions begin again at 0, are each document alone."""
    return uncached(model, **flattened(ids)), separate(model, ids)


def packed_by_lengths(model, ids):
    """The same with `cu_seq_lens_q` and `seq_idx`, as transformers' collator makes them."""
    batch = flattened(ids, return_flash_attn_kwargs=True, return_seq_idx=True)
    return uncached(model, **batch), separate(model, ids)


def packed_by_cu_seqlens(model, ids):
    """The same with `cu_seqlens`, as flash-linear-attention and Nalanda take them."""
    bounds = torch.tensor([0, 1, 3, 8, 72, 75, 140], dtype=torch.int32)
    return uncached(model, ids.reshape(1, -1), cu_seqlens=bounds), separate(model, ids)


# ------------------------------ caches


def token_by_token(model, ids):
    """A token at a time, by the cache, is all at once."""
    return in_pieces(model, ids, 1), uncached(model, ids)


def piece_by_piece(model, ids):
    """Pieces of 1, 2, 63, 1 and 3 tokens, by the cache, are all at once."""
    return in_pieces(model, ids, [1, 2, 63, 1, 3]), uncached(model, ids)


def copied_cache(model, ids):
    """A copy of a cache goes on as the cache did, whatever came after it."""
    _, cache = goes_on(model, ids[:, :60])
    copied = copy.deepcopy(cache)
    goes_on(model, ids[:, 60:].flip(0, 1)[:, :1], cache)
    return goes_on(model, ids[:, 60:61], copied)[0], uncached(model, ids)[:, 60:61]


def saved_cache(model, ids):
    """A cache that was written and read again goes on as the cache does."""
    _, cache = goes_on(model, ids[:, :60])
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    return goes_on(model, ids[:, 60:61], read)[0], uncached(model, ids)[:, 60:61]


def reordered_cache(model, ids):
    """A cache whose rows changed places goes on with the other rows' tokens."""
    _, cache = goes_on(model, ids[:, :60])
    cache.reorder_cache(torch.tensor([1, 0]))
    return goes_on(model, ids[:, 60:61].flip(0), cache)[0].flip(0), uncached(model, ids)[:, 60:61]


def cropped_cache(model, ids):
    """A cache without its last three tokens goes on as one that never had them."""
    _, cache = goes_on(model, ids[:1, :50])
    if not getattr(cache, "is_croppable", True):
        raise NotImplementedError("this cache cannot be cropped")
    if hasattr(cache, "activate_past_recording"):  # else convolutions keep their last tokens alone
        cache.activate_past_recording()
    _, cache = goes_on(model, ids[:1, 50:60], cache)
    cache.crop(-3)
    return goes_on(model, ids[:1, 57:58], cache)[0], uncached(model, ids[:1])[:, 57:58]


def greedy_search(model, ids):
    """`generate` writes the same tokens with a cache and without."""
    return written(model, ids[:, :20]), written(model, ids[:, :20], use_cache=False)


def padded_greedy_search(model, ids):
    """`generate` continues a left-padded prompt as the prompt alone."""
    prompts = torch.cat([F.pad(ids[:1, :9], (11, 0)), ids[1:, :20]])
    mask = torch.ones_like(prompts)
    mask[0, :11] = 0
    rows = [written(model, ids[:1, :9]), written(model, ids[1:, :20])]
    return written(model, prompts, attention_mask=mask), torch.cat(rows)


def beam_search(model, ids):
    """Beam search writes the same tokens with a cache and without."""
    options = {"num_beams": 3, "length_penalty": 0.0}
    return written(model, ids[:, :20], **options), written(
        model, ids[:, :20], use_cache=False, **options
    )


def assisted_search(model, ids):
    """Tokens guessed from the prompt and checked at once are those of greedy search."""
    prompt = ids[:1, :12].repeat(1, 3)  # a repetition, so that guesses are made
    return written(model, prompt, prompt_lookup_num_tokens=4), written(model, prompt)


# ------------------------------ losses and gradients


def loss_of_labels(model, ids):
    """The loss is the mean −log p of the next tokens, without those labelled −100."""
    labels = torch.where(ids % 3 == 0, -100, ids)
    loss = model(ids, labels=labels, use_cache=False).loss
    return loss, label_loss(model, ids, labels) / (labels[:, 1:] != -100).sum()


def loss_of_parts(model, ids):
    """With `num_items_in_batch`, the losses of a batch's parts add up to the batch's."""
    count = torch.tensor(ids[:, 1:].numel())
    parts = [
        model(row, labels=row, use_cache=False, num_items_in_batch=count).loss
        for row in ids.split(1)
    ]
    return torch.stack(parts).sum(), label_loss(model, ids, ids) / count


def gradient_checkpointing(model, ids):
    """Gradients with checkpointing are those without."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(0)  # of dropout
    plain = gradients(model, label_loss(model, ids, ids))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(0)
    return gradients(model, label_loss(model, ids, ids)), plain


def padded_gradients(model, ids):
    """The gradient of a row beside a longer one is that of the row alone."""
    tokens, mask = torch.stack([F.pad(ids[0, :40], (0, 30)), ids[1]]), torch.ones_like(ids)
    mask[0, 40:] = 0
    labels = torch.stack(
        [torch.where(mask[0] == 0, -100, tokens[0]), torch.full_like(ids[1], -100)]
    )
    loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
    return gradients(model, loss), gradients(
        model, label_loss(model, ids[:1, :40], ids[:1, :40]) / 39
    )


# ------------------------------ files and programs


def saved_is_loaded(model, ids):
    """A model that was saved and loaded has the same logits."""
    return uncached(saved(model), ids), uncached(model, ids)


def tied_stays_tied(model, ids):
    """After a save and a load, embedding and head share a tensor if the config says so."""

    def tied(model):
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        return torch.tensor(float(head is not None and head.weight is table.weight))

    return tied(saved(model)), torch.tensor(float(bool(model.config.tie_word_embeddings)))


def exported_is_eager(model, ids):
    """The program of `torch.export` has the model's logits."""
    few = ids[:, :20]  # each token of a loop is traced
    exported = torch.export.export(copy.deepcopy(model), (few,), {"use_cache": False}, strict=False)
    return exported.module()(few, use_cache=False).logits, uncached(model, few)


def compiled_is_eager(model, ids):
    """`torch.compile` has the model's logits."""
    return uncached(torch.compile(model), ids), uncached(model, ids)


def tensor_parallel_is_whole(model, ids):
    """Two processes, which share the heads by transformers' `tp_plan="auto"`, have the model's logits."""
    if not model.tp_plan:
        raise NotImplementedError("the model has no base_model_tp_plan")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        arguments = (model, ids, folder)
        torch.multiprocessing.start_processes(part, arguments, 2, start_method="fork")
        return torch.load(f"{folder}/0"), uncached(model, ids)


def half_precision(model, ids):
    """Logits in bf16 are as near as roundings of the weights to bf16 are."""
    return uncached(copy.deepcopy(model).bfloat16(), ids).double(), uncached(model, ids)


OPTIONAL = [compiled_is_eager, tensor_parallel_is_whole]

PROPERTIES = [
    causal,
    batch_is_rows,
    order_of_rows,
    left_padded_is_alone,
    right_padded_is_alone,
    packed_by_positions,
    packed_by_lengths,
    packed_by_cu_seqlens,
    token_by_token,
    piece_by_piece,
    copied_cache,
    saved_cache,
    reordered_cache,
    cropped_cache,
    greedy_search,
    padded_greedy_search,
    beam_search,
    assisted_search,
    loss_of_labels,
    loss_of_parts,
    gradient_checkpointing,
    padded_gradients,
    saved_is_loaded,
    tied_stays_tied,
    exported_is_eager,
    half_precision,
]
