"""The table of cases: what each is, what becomes of it, and which records and weights it meets.

`expect` is what private mode does with a case: "fast" (one pass for the whole batch; an innocent model that loses this
is a finding), "vmap", "loop" (record by record), "refused", or "guarded": not a promise of which of these, but the
influence of a record stays below the clip norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import backward
import couplings
import honest
from adp2sgd.data.records import Records
from adp2sgd.task import Task
from backward import squared
from couplings import between
from honest import CLASSES, STEPS, VOCABULARY, WIDTH, Apply, pooled
from kinds import (
    IMAGES,
    LINES,
    ODD,
    RECORDS,
    ROWS,
    SEQUENCES,
    TALL,
    TOKENS,
    WORDS,
    Case,
    floats,
    gapped,
    regression,
    special,
)


def task(case: str) -> Task:
    """A case as a run's task."""
    made = CASES[case]
    data = Records(*made.records(RECORDS))
    held_out = data.take(torch.arange(ODD + 1, RECORDS))
    return Task(model=made.model, train=data, test=held_out, loss=made.loss, prepare=made.prepare)


def _fill(name: str, value: float) -> Callable[[Mapping[str, Tensor]], object]:
    return lambda weights: weights[name].fill_(value)


fast, loop, refused = (partial(Case, expect=what) for what in ("fast", "loop", "refused"))
by_vmap = partial(Case, expect="vmap")
LARGE_SIZES = (64, 65, 127, 130)

CASES: dict[str, Case] = {
    # --- innocent, and fast ---
    "logistic": fast(about="one layer", model=lambda: nn.Linear(WIDTH, CLASSES), sizes=LARGE_SIZES),
    "mlp": fast(about="two layers and a ReLU", model=honest.mlp, sizes=LARGE_SIZES),
    "regression": fast(about="a target of a million", model=honest.mlp, records=TALL, loss=squared),
    "convolution": fast(about="a small CNN", records=IMAGES, model=lambda: pooled(nn.Conv2d(2, 4, 3)), sizes=(65,)),
    "grouped": fast(about="groups of channels", records=IMAGES, model=lambda: pooled(nn.Conv2d(2, 4, 3, groups=2))),
    "depthwise": fast(
        about="a channel each, then all channels at one place", records=IMAGES,
        model=lambda: pooled(nn.Conv2d(2, 4, 3, groups=2, padding=1), nn.Conv2d(4, 4, 1)),
    ),
    "dilated": fast(
        about="a line, with steps and gaps", records=LINES,
        model=lambda: pooled(nn.Conv1d(2, 4, 3, dilation=2, stride=2), nn.Conv1d(4, 4, 2, padding="same")),
    ),
    "volume": fast(about="three axes", records=floats(2, 3, 3, 3, odd=9.0), model=lambda: pooled(nn.Conv3d(2, 4, 2))),
    "group_norm": fast(
        about="normalized within a record", records=IMAGES,
        model=lambda: pooled(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), sizes=(65,),
    ),
    "layer_norm": fast(
        about="normalized at each place", records=SEQUENCES,
        model=lambda: Apply(nn.LayerNorm(WIDTH), lambda h: h.mean(1), nn.Linear(WIDTH, CLASSES)),
    ),
    "standardized": fast(
        about="the weight is computed from the parameter", records=IMAGES,
        model=lambda: pooled(honest.Standardized(2, 4, 3)),
    ),
    "weight_norm": fast(about="the weight is computed from two parameters", model=honest.weight_normed),
    "frozen": fast(about="a frozen layer below, a frozen bias between", model=honest.frozen_part),
    "gains": fast(about="parameters outside of layers", model=honest.Gains),
    "in_place": fast(about="operations in place", model=honest.InPlace),
    "repeated": fast(about="one layer used four times", model=lambda: honest.Repeated(4), sizes=(65,)),
    "shared": fast(about="four modules with one Parameter", model=honest.SharedWeight),
    "embedding": fast(about="a table", records=WORDS, model=honest.Language),
    "padded": fast(about="padding has no gradient", records=WORDS, model=lambda: honest.Language(pad=0)),
    "tied": fast(
        about="one table as embedding and as output layer", records=WORDS, model=lambda: honest.Language(tied=True),
        sizes=(65,),
    ),
    "tied_padded": fast(
        about="tied, and padding has no gradient as input but one as output", records=WORDS,
        model=lambda: honest.Language(tied=True, pad=0),
    ),
    "masked_mean": fast(about="the mean of the tokens that are there", records=TOKENS, model=honest.MaskedMean),
    "lstm": fast(about="an LSTM", records=SEQUENCES, model=lambda: honest.Recurrent(nn.LSTM)),
    "lstm_time_first": fast(
        about="an LSTM with the steps in front", records=SEQUENCES,
        model=lambda: honest.Recurrent(nn.LSTM, first=False),
    ),
    "lstm_both_ways": fast(
        about="two layers in both directions", records=SEQUENCES,
        model=lambda: honest.Recurrent(nn.LSTM, both=True, layers=2, last=False),
    ),
    "attention": fast(about="self-attention", records=SEQUENCES, model=honest.Attention),
    "attention_causal": fast(
        about="each place sees those before", records=SEQUENCES, model=lambda: honest.Attention("causal")
    ),
    "vision": fast(about="class token, transformer layer", records=SEQUENCES, model=honest.Vision, sizes=(65,)),
    "folded": fast(
        about="places folded into rows, record by record", records=SEQUENCES,
        model=lambda: Apply(nn.Linear(WIDTH, 4), lambda h: h.tanh().mean(1), nn.Linear(4, CLASSES)),
    ),
    # --- innocent, by vmap or one by one ---
    "attention_padded": Case(
        about="padding masks from the records", records=SEQUENCES, model=lambda: honest.Attention("padding")
    ),
    "attention_time_first": Case(
        about="attention with the steps in front", records=SEQUENCES, model=lambda: honest.Attention(first=False)
    ),
    "einsum": by_vmap(
        about="a product that no rule covers",
        model=lambda: honest.Own(torch.randn(WIDTH, CLASSES), lambda x, w: torch.einsum("nd,dp->np", x, w)),
    ),
    "prelu": by_vmap(about="a slope is trained", model=lambda: honest.mlp(nn.PReLU())),
    "rms_norm": fast(about="RMSNorm", model=lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, CLASSES))),
    "instance_norm": fast(
        about="normalized within a record and channel", records=IMAGES,
        model=lambda: pooled(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)),
    ),
    "transposed": by_vmap(
        about="a transposed convolution", records=IMAGES, model=lambda: pooled(nn.ConvTranspose2d(2, 4, 3))
    ),
    "time_first": Case(about="a layer over [steps, records, width]", records=SEQUENCES, model=honest.TimeFirst),
    "two_views": Case(about="all records, then their mirror images", model=honest.TwoViews),
    "in_parts": Case(about="batches in parts of 32", model=honest.InParts, sizes=(31, 33, 64, 65)),
    "sorted": by_vmap(about="rows in the order of their lengths, and back", model=honest.SortedByLength),
    "gru": loop(about="a GRU", records=SEQUENCES, model=lambda: honest.Recurrent(nn.GRU)),
    "rnn": loop(about="an Elman network", records=SEQUENCES, model=lambda: honest.Recurrent(nn.RNN)),
    "packed": loop(about="packed sequences", records=floats(STEPS, WIDTH, odd=9.0), model=honest.Packed),
    "gru_cell": Case(
        about="a cell for each step", records=SEQUENCES, model=lambda: honest.StepByStep(nn.GRUCell(WIDTH, 4))
    ),
    "bag": Case(about="an EmbeddingBag", records=TOKENS, model=lambda: nn.EmbeddingBag(VOCABULARY, CLASSES)),
    "checkpointed": Case(about="layers run again backwards", model=lambda: honest.Checkpointed(reentrant=False)),
    "reentrant": Case(about="the older way to do so", model=lambda: honest.Checkpointed(reentrant=True)),
    "straight_through": Case(
        about="rounding whose gradient passes", model=between(honest.Round.apply), records=floats(WIDTH, odd=1.0)
    ),
    "compiled": Case(
        about="a compiled part",
        model=lambda: nn.Sequential(torch.compile(honest.mlp(nn.Tanh()), backend="eager"), nn.Linear(3, 3)),
    ),
    "scripted": Case(about="a scripted model", model=lambda: torch.jit.script(honest.mlp(nn.Tanh()))),
    "fake_quantized": Case(
        about="8 bits on a fixed scale", records=floats(WIDTH, odd=1.0),
        model=between(lambda h: torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127)),
    ),
    # --- numbers at the ends of their range ---
    "nan": fast(about="a record of NaN contributes nothing", model=honest.mlp, records=special(math.nan), sizes=(65,)),
    "infinite": fast(about="a record of infinities", model=honest.mlp, records=special(math.inf, -math.inf)),
    "greatest": fast(about="a record of 3e38", model=honest.mlp, records=special(3e38, -3e38), exact=False),
    "smallest": fast(about="a record of denormal numbers", model=honest.mlp, records=special(1e-42)),
    "exploding": fast(
        about="exponentials", records=floats(WIDTH, odd=300.0), model=between(torch.exp), sizes=(65,)
    ),
    "root": fast(
        about="the slope of a root at zero is infinite", records=special(0.0),
        model=lambda: Apply(nn.Linear(WIDTH, 8, bias=False), lambda h: h.square().sqrt(), nn.Linear(8, CLASSES)),
    ),
    "unit": fast(
        about="a record of zeros over its norm", records=special(0.0),
        model=lambda: Apply(nn.Identity(), lambda x: x / x.norm(dim=1, keepdim=True), nn.Linear(WIDTH, CLASSES)),
    ),
    "steep": fast(
        about="a gradient of 1e30, whose square float32 cannot hold", records=regression(WIDTH, odd=1e30),
        model=honest.mlp, loss=squared, sizes=(65,), exact=False,
    ),
    "flat": Case(
        about="gradients below the smallest normal number", records=regression(WIDTH, odd=1.0),
        model=honest.mlp, loss=lambda o, t: squared(o, t) * 1e-38,
    ),
    "cancelling": fast(
        about="a weight's gradients at two places all but cancel", records=SEQUENCES,
        model=lambda: Apply(nn.Linear(WIDTH, 8, bias=False), lambda h: h[:, 0] - h[:, 1], nn.Linear(8, CLASSES)),
    ),
    "rounding": fast(
        about="weights that leave nothing but rounding", records=floats(WIDTH, odd=1.0),
        model=honest.linear_pair, weights=honest.cancelled, sizes=(4, 7, 65, 130), exact=False,
    ),
    # --- the backward pass couples records ---
    "tensor_hook": Case(
        about="a hook skips exploding gradients", model=between(backward.tensor_hook), records=TALL, loss=squared,
        sizes=(65,),
    ),
    "normalizing_hook": Case(
        about="a hook normalizes gradients over the batch", model=between(backward.normalizing_hook), records=TALL,
        loss=squared,
    ),
    "node_hook": Case(about="a hook of a graph's node", model=between(backward.node_hook), records=TALL, loss=squared),
    "node_prehook": Case(
        about="a hook before a graph's node", model=between(backward.node_prehook), records=TALL, loss=squared
    ),
    "multi_grad_hook": Case(
        about="a hook of several tensors writes in place", model=between(backward.multi_grad_hook), records=TALL,
        loss=squared,
    ),
    "module_hook": Case(
        about="a module's backward hook", model=backward.hooked_module("full"), records=TALL, loss=squared
    ),
    "module_prehook": Case(
        about="a hook before a module's backward pass", model=backward.hooked_module("pre"), records=TALL, loss=squared
    ),
    "skipping_function": Case(
        about="a Function skips exploding gradients", model=between(backward.SkipBackward.apply), records=TALL,
        loss=squared, sizes=(65,),
    ),
    "centering_function": Case(
        about="one that centers large gradients", model=between(backward.Centered.apply), records=TALL, loss=squared
    ),
    "vmap_rule": Case(
        about="one with a vmap rule of its own", model=between(backward.VmapRule.apply), records=TALL, loss=squared
    ),
    "compressed": Case(about="activations kept in 8 bits of one scale", model=backward.Compressed, sizes=(65,)),
    "weight_inside": Case(about="a weight counts inside a Function too", model=backward.WeightTwice),
    "hooked_loss": Case(about="the loss sets the hook", model=honest.mlp, records=TALL, loss=backward.hooked_loss),
    "custom_loss": Case(about="the loss is such a Function", model=honest.mlp, records=TALL, loss=backward.custom_loss),
    # --- the forward pass couples records ---
    **{
        name: Case(about=about, model=between(attack), records=ROWS, sizes=(65,) if name == "rescaled" else ())
        for name, about, attack in (
            ("rescaled", "all are scaled by the largest", couplings.rescaled),
            ("summed", "a large sum over the batch is added", couplings.summed),
            ("centered", "large batches lose their mean", couplings.centered),
            ("running", "a running sum of large values", couplings.running),
            ("neighbours", "a record sees the one before", couplings.neighbours),
            ("shifted", "the same, by slices in place", couplings.shifted),
            ("similar", "records that are alike are mixed", couplings.similar),
            ("over_records", "softmax over the batch", couplings.over_records),
            ("normed_over_records", "normalized over the batch", couplings.normed_over_records),
            ("convolved_over_records", "a convolution along the batch", couplings.convolved_over_records),
            ("reread", "the batch read as a table", couplings.reread),
            ("gathered", "gather along the batch", couplings.gathered),
            ("table_of_records", "the batch as the table of an embedding", couplings.table_of_records),
            ("taken_along", "take_along_dim along the batch", couplings.taken_along),
            ("shared_memory", "two views of one memory", couplings.shared_memory),
            ("bucketed", "others are the boundaries of buckets", couplings.bucketed),
            ("pairwise", "compared with all others", couplings.pairwise),
            ("reshaped", "rows and columns exchanged", couplings.reshaped),
            ("through_numpy", "a branch by numpy's copy of the batch", couplings.through_numpy),
            ("through_text", "a branch by the text of a value", couplings.through_text),
            ("scripted_branch", "a branch in scripted code", couplings.scripted),
            ("quantized", "8 bits on the batch's scale", couplings.quantized),
        )
    },
    # --- rows in another order ---
    "flipped_above_64": Case(about="flipped above 64", model=lambda: couplings.FlippedAbove(64), sizes=LARGE_SIZES),
    "reversed_above_4": Case(
        about="reversed above 4 records, row by row", model=lambda: couplings.Permuted(couplings.reversed_above(4))
    ),
    "rotated_when_odd": Case(
        about="rotated at odd sizes", model=lambda: couplings.Permuted(couplings.rotated_when_odd), sizes=(65, 127)
    ),
    "even_then_odd": Case(
        about="every second row first", model=lambda: couplings.Permuted(couplings.even_then_odd_above(8)), sizes=(65,)
    ),
    "looked_at_again": Case(
        about="records with large values are read in another order too",
        model=lambda: couplings.Permuted(couplings.reversed_above(1), gated=True), sizes=(65,),
    ),
    "door_mixes": Case(
        about="a weight opens a coupling", model=lambda: couplings.Door(mixed=True), weights=_fill("door", 2.0)
    ),
    "door_permutes": Case(
        about="a weight opens another order of rows", model=lambda: couplings.Door(mixed=False),
        weights=_fill("door", 2.0),
    ),
    "steps_in_front_above_4": Case(
        about="steps in front", records=SEQUENCES, model=lambda: couplings.FoldedAbove(4), sizes=(65,)
    ),
    "two_halves": Case(about="even batches as two halves", model=lambda: couplings.TwoHalves(4), sizes=(64, 130)),
    # --- state ---
    "running_mean": refused(about="a running mean in an attribute", model=lambda: couplings.Stateful("mean")),
    "call_count": refused(about="the number of calls matters", model=lambda: couplings.Stateful("count")),
    "remembered": Case(stateful=True, about="outliers stay in a list", model=lambda: couplings.Stateful("list")),
    "flagged": Case(stateful=True, about="an outlier sets a flag", model=lambda: couplings.Stateful("flag")),
    "buffered": Case(stateful=True, about="an outlier sets a buffer", model=lambda: couplings.Stateful("buffer")),
    "buffered_data": Case(
        stateful=True, about="a buffer, by its data", model=lambda: couplings.Stateful("data")
    ),
    "frozen_data": Case(
        stateful=True, about="a frozen parameter, by its data", model=lambda: couplings.Stateful("frozen")
    ),
    "scripted_buffer": Case(
        stateful=True, about="a buffer, in scripted code", model=lambda: torch.jit.script(couplings.Scripted())
    ),
    "scripted_attribute": refused(
        stateful=True, about="an attribute, in scripted code",
        model=lambda: torch.jit.script(couplings.ScriptedAttribute()),
    ),
    "global": Case(stateful=True, about="an outlier stays in a global variable", model=couplings.Global),
    "changed_input": Case(about="the batch is changed in place", model=couplings.ChangesItsInput, records=gapped),
    "leaky_input": fast(
        about="an activation in place, on the batch", records=special(math.nan), sizes=(65, 130),
        model=lambda: nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(WIDTH, CLASSES)),
    ),
    "spectral_norm": refused(about="a buffer follows the weights", model=honest.spectral_normed),
    # --- layers that are known to couple ---
    "batch_norm": refused(
        about="BatchNorm", records=IMAGES, model=lambda: pooled(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    ),
    "functional_batch_norm": refused(
        about="BatchNorm as a function", model=between(lambda h: F.batch_norm(h, None, None, training=len(h) > 1))
    ),
    "mixed_up": refused(about="each record is mixed with its mirror", model=between(lambda h: h + 0.3 * h.flip(0))),
    "max_norm": refused(about="weights are changed", records=WORDS, model=lambda: honest.Language(max_norm=1.0)),
    "by_frequency": refused(
        about="gradients over the token's count in the batch", records=WORDS,
        model=lambda: honest.Language(scale_grad_by_freq=True),
    ),
    "sparse": refused(about="sparse gradients", records=WORDS, model=lambda: honest.Language(sparse=True)),
    "half": refused(about="parameters in half precision", model=lambda: honest.mlp().half(), widens=False),
    # --- losses ---
    "hardest": refused(about="the hardest record counts twice", model=honest.mlp, loss=backward.hardest),
    "against_mean": refused(about="against the batch's mean", model=honest.mlp, loss=backward.against_mean),
    "weighted_by_class": refused(about="classes by their share", model=honest.mlp, loss=backward.weighted_by_class),
    "contrastive": refused(about="each against all others", model=honest.mlp, loss=backward.contrastive),
    "over_size": refused(about="over the batch's size", model=honest.mlp, loss=backward.over_size),
    "odd_size": Case(about="odd batches count the other way", model=honest.mlp, loss=backward.odd_size, sizes=(64, 65)),
    "scaled_by_worst": Case(
        about="all are scaled by the worst", model=honest.mlp, records=TALL, loss=backward.scaled_by_worst, clip=50.0
    ),
    "flipped_by_worst": Case(
        about="all count the other way beside a bad one", model=honest.mlp, records=TALL, loss=backward.flipped_by_worst
    ),
}  # fmt: skip
