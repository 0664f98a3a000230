"""The loss is cross-entropy, in blocks and in half precision, as transformers and its Trainer count it."""

import nalanda_kernels
import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, build, close, ids, logits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from nalanda.model import MIXERS
from nalanda.model.loss import Distillation, linear_cross_entropy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blockwise_loss_is_cross_entropy(dtype):
    h, w = torch.randn(150, 8, dtype=dtype), torch.randn(VOCAB, 8, dtype=dtype)
    labels = torch.randint(0, VOCAB, (150,))
    labels[::7] = -100
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.2}[dtype]
    from nalanda.model.loss import _LinearCrossEntropy

    grads = []
    for one_go in (False, True):
        a, b = h.clone().requires_grad_(), w.clone().requires_grad_()
        if one_go:
            loss = F.cross_entropy((a @ b.T).double(), labels, reduction="sum")
        else:
            loss = _LinearCrossEntropy.apply(a, b, labels, 64)
        (loss / 3).backward()
        grads.append((loss.detach().double(), a.grad, b.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=tolerance
        )
    assert linear_cross_entropy(h, w, torch.full((150,), -100)) == 0


@pytest.mark.parametrize("count", [3, 37, 1000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "autocast"])
def test_half_precision_gradients_are_not_scaled_by_a_rounded_divisor(dtype, count):
    """1/count rounded to bf16 would scale the gradient of all layers below the head by up to 0.4 %."""
    torch.manual_seed(0)
    half = torch.float16 if dtype == "float16" else torch.bfloat16
    h, w = torch.randn(1500, 64).to(half), (torch.randn(VOCAB, 64) / 10).to(half)
    labels, gradients = torch.randint(VOCAB, (1500,)), []
    for kind in (half, torch.float32):
        inputs = [
            x.to(torch.float32 if dtype == "autocast" else kind).detach().clone() for x in (h, w)
        ]
        a, b = (x.requires_grad_() for x in inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast" and kind is half):
            (linear_cross_entropy(a, b, labels) / count).backward()
        gradients.append([a.grad.double(), b.grad.double()])
    for rounded, exact in zip(*gradients, strict=True):
        assert (rounded * exact).sum() / exact.square().sum() == pytest.approx(1, abs=3e-4)


WITHOUT_A_LABEL = {
    "ignored": {"labels": torch.full((2, 6), -100)},
    "no items": {"num_items_in_batch": 0, "labels": torch.full((2, 6), -100)},
    "no items, a tensor": {
        "num_items_in_batch": torch.tensor(0),
        "labels": torch.full((2, 6), -100),
    },
    "z_loss": {"z_loss": 0.5, "labels": torch.full((2, 6), -100)},
    "a token a row": {"attention_mask": F.pad(torch.ones(2, 1), (0, 5))},
    "padding alone": {"attention_mask": torch.zeros(2, 6)},
    "a token a document": {"cu_seqlens": torch.arange(13)},
    "a column": {"input_ids": ids(2, 1), "labels": ids(2, 1)},
}
"""Batches in which no token has a target."""


@pytest.mark.sampled
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_batch_without_a_label_changes_no_weight(mixer):
    model = build(mixer, dtype=torch.float32).train()
    for name, described in WITHOUT_A_LABEL.items():
        model.zero_grad()
        loss = model(**{"input_ids": ids(2, 6), "labels": ids(2, 6), **described}).loss
        loss.backward()
        assert loss == 0, name
        changed = [
            n
            for n, p in model.named_parameters()
            if p.grad is not None and bool((p.grad != 0).any())
        ]
        assert not changed, name


@pytest.mark.parametrize(
    "count", [-1, True, torch.tensor(-1), torch.tensor(True), torch.tensor([3, 4])]
)
def test_a_number_of_labels_that_is_none_is_refused(small, count):
    with pytest.raises(ValueError, match="num_items_in_batch"):
        small(ids(2, 6), labels=ids(2, 6), num_items_in_batch=count)


def test_z_loss_is_in_the_gradient_alone(small):
    """Against float64 autograd over all logits, in several blocks, rows left out."""
    from nalanda.model.loss import _LinearCrossEntropy
    from nalanda.train.loss import summed_loss

    torch.manual_seed(0)
    labels = torch.randint(0, 31, (150,)).masked_fill(torch.rand(150) < 0.2, -100)
    h, w = torch.randn(150, 8, dtype=torch.float64), 2 * torch.randn(31, 8, dtype=torch.float64)
    (a, b), (c, d) = ([x.clone().requires_grad_() for x in (h, w)] for _ in range(2))
    everything = a @ b.T
    plain = F.cross_entropy(everything, labels, reduction="sum")
    term = 0.3 * everything.logsumexp(-1)[labels != -100].square().sum()
    ((plain + term) / 7).backward()
    value = _LinearCrossEntropy.apply(c, d, labels, 64, True, 0.3)
    (value / 7).backward()
    close(value, plain, 1e-12)
    close(c.grad, a.grad, 1e-12)
    close(d.grad, b.grad, 1e-12)

    # The model hands it on, and the trainer does the same for models that are not ours.
    tokens, weight = ids(2, 11), small.lm_head.weight
    small.train()
    grads = []
    for z_loss in (0.0, 0.5):
        small.zero_grad()
        loss = small(tokens, labels=tokens, num_items_in_batch=1, z_loss=z_loss).loss
        loss.backward()
        grads.append((loss.detach(), weight.grad.clone()))
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    batch = {
        "input_ids": tokens % 31,
        "labels": (tokens % 31).masked_fill(torch.rand(2, 11) < 0.2, -100),
    }
    batch |= {"position_ids": torch.arange(11).repeat(2, 1), "cu_seqlens": torch.arange(3) * 11}
    for z_loss in (0.0, 0.5):
        llama.zero_grad()
        loss = summed_loss(llama, batch, torch.device("cpu"), z_loss)
        loss.backward()
        grads.append((loss.detach(), llama.lm_head.weight.grad.clone()))
    for (without, plain), (with_term, both) in (grads[:2], grads[2:]):
        assert with_term == without
        assert (both - plain).norm() > 0.1 * plain.norm()
    llama.zero_grad()
    logits = llama(batch["input_ids"]).logits[:, :-1][batch["labels"][:, 1:] != -100]
    (0.5 * logits.logsumexp(-1).square()).sum().backward()
    close(llama.lm_head.weight.grad, grads[3][1] - grads[2][1], 1e-4)


def test_loss_follows_transformers(small):
    tokens, labels = ids(2, 11), ids(2, 11)
    labels[0, :6] = -100
    expected = F.cross_entropy(
        logits(small, tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    count = (labels[:, 1:] != -100).sum()
    out = small(tokens, labels=labels)
    close(out.loss, expected.sum() / count, 1e-5)
    assert out.logits.shape == (2, 11, VOCAB)
    small.train()
    out = small(tokens, labels=labels, num_items_in_batch=40)
    close(out.loss, expected.sum() / 40, 1e-5)
    assert out.logits is None
    close(small(tokens, labels=labels, num_items_in_batch=torch.tensor([40])).loss, out.loss)
    assert small(tokens).logits.shape == (2, 11, VOCAB)


def test_a_loss_that_somebody_sets_is_called_as_in_llama(small):
    """By its setter or in a subclass, in training and evaluation, with the keywords of transformers."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, intermediate_size=8, **sizes))
    tokens, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 3] = -100  # padding predicts it in Llama
    batches = [
        {"labels": labels, "attention_mask": mask},
        {"labels": labels, "num_items_in_batch": 5},
        {"labels": labels, "shift_labels": F.pad(labels[:, 1:], (0, 1), value=-100)},
    ]
    calls = []
    for model in (small, llama):
        of_model = []

        def loss(of_model=of_model, **keywords):
            logits = keywords.pop("logits")
            of_model.append(keywords | {"logits": logits.shape})
            return logits.sum() * 0 + 7

        model.loss_function = loss
        for training in (True, False):
            for batch in batches:
                out = model.train(training)(tokens, **batch)
                assert out.loss == 7
                assert out.logits.shape == (2, 9, VOCAB)
        model(tokens)
        assert len(of_model) == 6
        calls.append(of_model)
    for mine, right in zip(*calls, strict=True):
        assert mine.keys() == right.keys()
        torch.testing.assert_close(mine, right)

    small.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in small.parameters())
    with pytest.raises(ValueError, match="z_loss: the loss_function that was set does not take it"):
        small(tokens, labels=tokens, z_loss=0.1)


def test_the_loss_of_a_subclass_knows_no_padding_or_other_document(small):
    """Labels that nothing predicts are −100 to it too."""
    calls = []

    class Summed(type(small)):
        def loss_function(self, logits, labels, vocab_size, **_):
            calls.append(vocab_size)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    tokens, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    packed = {"cu_seqlens": torch.tensor([0, 4, 9, 11, 18])}
    expected = [small(tokens, labels=tokens, **x).loss for x in ({"attention_mask": mask}, packed)]
    small.__class__ = Summed
    for described, right in zip(({"attention_mask": mask}, packed), expected, strict=True):
        close(small.train()(tokens, labels=tokens, **described).loss, right, 1e-6)
    assert calls == [VOCAB] * 2


def test_labels_may_be_shifted_already(small):
    """As trainers that cut rows over processes send them; transformers' loss then reads no other labels."""
    tokens, labels = ids(2, 11), ids(2, 11, seed=1)
    labels[0, 3:6] = -100
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=0)).loss_function
    for count in (None, 40):
        expected = theirs(
            logits(small, tokens), labels, VOCAB, num_items_in_batch=count, shift_labels=labels
        )
        for mode in (small.train(), small.eval()):
            for others in ({}, {"labels": tokens}):
                out = mode(tokens, shift_labels=labels, num_items_in_batch=count, **others)
                close(out.loss, expected, 1e-5)
                assert (out.logits is None) == mode.training


def test_loss_is_that_of_the_texts_alone(small):
    """Nothing predicts a text's first token, nor padding: on either side, or packed."""
    texts = [ids(5, seed=1), ids(9, seed=2)]
    total = sum(small(row[None], labels=row[None]).loss * (len(row) - 1) for row in texts)
    for side in ((4, 0), (0, 4)):
        rows = torch.stack([F.pad(texts[0], side), texts[1]])
        mask = torch.stack([F.pad(torch.ones_like(texts[0]), side), torch.ones_like(texts[1])])
        close(small(rows, attention_mask=mask, labels=rows).loss, total / 12, 1e-5)
        close(
            small(rows, attention_mask=mask, labels=rows, num_items_in_batch=3).loss,
            total / 3,
            1e-5,
        )
    row = torch.cat(texts)[None]
    bounds, places = (
        torch.tensor([0, 5, 5, 14, 14]),
        torch.cat([torch.arange(5), torch.arange(9)])[None],
    )
    for described in ({"cu_seqlens": bounds}, {"position_ids": places}):
        close(small(row, labels=row, **described).loss, total / 12, 1e-5)
    whole = torch.stack([row[0], row[0]])
    close(small(whole, labels=whole, position_ids=places).loss, total / 12, 1e-5)


def test_loss_is_that_of_the_heads_call(small, tmp_path):
    """Not of its bare weight, where a hook changes the result or the weight is not in memory."""
    tokens = ids(2, 9)
    expected = small(tokens, labels=tokens).loss
    small.save_pretrained(tmp_path)
    places = {"model": "cpu", "lm_head": "disk"}
    away = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "off"
    )
    close(away.eval()(tokens, labels=tokens).loss, expected, 1e-5)
    small.lm_head.register_forward_hook(lambda module, inputs, out: 0 * out)
    close(small(tokens, labels=tokens).loss, torch.tensor(float(VOCAB)).log(), 1e-5)


def test_evaluation_forms_no_gradient(small):
    from torch.utils.flop_counter import FlopCounterMode

    h = torch.randn(10, 24)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(h, small.lm_head.weight, torch.arange(10))
    assert counter.get_total_flops() == 2 * 10 * 24 * VOCAB


def test_transformers_trainer_trains(small, tmp_path):
    rows = [{"input_ids": ids(12, seed=i), "labels": ids(12, seed=i)} for i in range(4)]
    before = small.lm_head.weight.clone()
    arguments = TrainingArguments(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    trainer = Trainer(model=small, args=arguments, train_dataset=rows, eval_dataset=rows)
    assert trainer.train().training_loss > 0
    assert not torch.equal(before, small.lm_head.weight)
    expected = small.eval()(**{name: torch.stack([r[name] for r in rows]) for name in rows[0]}).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item())


def test_gradient_checkpointing_changes_nothing(small):
    small.train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            small.gradient_checkpointing_enable()
        small.zero_grad()
        small(ids(2, 9), labels=ids(2, 9), cu_seqlens=torch.tensor([0, 4, 18])).loss.backward()
        grads.append([p.grad.clone() for p in small.parameters()])
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-6)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_second_derivative_is_refused(small, backend):
    """It would lack what passes the loss, norms and recurrences: `torch.autograd.grad` leaves that out in silence."""
    tokens, weights = ids(2, 9), [*small.parameters()]
    with nalanda_kernels.use_backend(backend):
        losses = small(tokens, labels=tokens).loss, small(tokens).logits.square().sum()
        for loss in losses:
            torch.autograd.grad(loss, weights, retain_graph=True)
            with pytest.raises(RuntimeError, match="has no derivative; take the difference"):
                torch.autograd.grad(loss, weights, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_gradient_beside_a_teacher_is_that_of_the_formula(temperature):
    """(1 − w)·cross-entropy + w·τ²·KL, in blocks; the value stays the cross-entropy."""
    torch.manual_seed(0)
    h, weight = torch.randn(70, 8, dtype=torch.float64), torch.randn(2**16, 8, dtype=torch.float64)
    theirs, head = torch.randn(70, 6, dtype=torch.float64), torch.randn(2**16, 6).double()
    labels = torch.randint(2**16, (70,))
    labels[::7] = -100
    h.requires_grad_()
    weight.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    teacher = Distillation(theirs, head, weight=0.3, temperature=temperature, divergence=total)
    value = linear_cross_entropy(h, weight, labels, teacher=teacher)
    found = torch.autograd.grad(value, (h, weight))

    logits, real = h @ weight.T, labels != -100
    entropy = F.cross_entropy(logits, labels, reduction="sum")
    log_p = (logits / temperature).log_softmax(-1)
    log_q = (theirs @ head.T / temperature).log_softmax(-1)
    divergence = (log_q.exp() * (log_q - log_p)).sum(-1)[real].sum()
    objective = 0.7 * entropy + 0.3 * temperature**2 * divergence
    torch.testing.assert_close(found, torch.autograd.grad(objective, (h, weight)))
    torch.testing.assert_close(value, entropy)
    torch.testing.assert_close(total, divergence)


class Largest(TorchDispatchMode):
    """Notes the most numbers of a tensor that an operator returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


def test_logits_of_few_rows_are_in_memory_at_a_time():
    """A row has 70,000 of them here; with all 300 rows the loss would hold 21 million."""
    h, labels = torch.randn(300, 2, requires_grad=True), torch.arange(300)
    weight = torch.randn(70_000, 2, requires_grad=True)
    with Largest() as largest:
        linear_cross_entropy(h, weight, labels).backward()
    assert largest.numbers <= 2**22 + 70_000 * 64
