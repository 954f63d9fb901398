"""What private mode refuses before a run starts. Each refusal is one line with the reason and the fix.

`check_rows` and `check_model` are called once per task. Neither looks at a record's values, because a refusal that
depends on them would reveal something about the data.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from adp2sgd import tree
from adp2sgd.errors import Adp2sgdError, PrivacyError
from adp2sgd.privacy.check_backward import refuse_coupled_backward, runs_own_code, sizes
from adp2sgd.privacy.probe_rows import FAILURES, SIZE, WATCHED, Trees
from adp2sgd.tree import Inputs

if TYPE_CHECKING:
    from adp2sgd.task import Loss

Result = TypeVar("Result")
Preparation = Callable[[Inputs], Inputs]
Augmentation = Callable[[Inputs, Generator], Inputs]

PROBES = 4  # synthetic records in a batch whose gradient is computed
MIDDLE = 1  # index of the watched record: others lie before and after it, and it is not in the centre
SEEDS = 16  # for code that mixes records at random: with one seed the watched record might not be mixed
_NO_BATCHNORM = 'use norm = "group", or adp2sgd.models.norm.without_batchnorm(model)'


def check_model(
    module: nn.Module, loss: Loss, inputs: Inputs, targets: Tensor, *, expected: float | None = None
) -> list[str]:
    """Refuse a model or loss in which one record touches another's gradient; returns warnings.

    Of `inputs` (as the model reads them) and `targets` only dtype, device and the shape of a row are used; the probe
    runs on synthetic rows and on a copy of the module in float64, where rounding cannot be taken for a coupling. It
    finds what moves a record's gradient by more than 1e-9 of its norm among ordinary others, or its loss by as much
    among unusual ones, or the gradient of a batch (of the run's size, if `expected` is the mean of it); it cannot prove
    that nothing does. The clippers prove that, or take records one by one (gradient/proof.py).
    """
    refuse_batchnorm(module)
    _refuse_coarse(module)
    warnings = []
    probe = _Probe.of(module, loss, inputs, targets, torch.float64)
    try:
        batch = probe.answer(probe.inputs, probe.targets)
    except PrivacyError:
        probe = _Probe.of(module, loss, inputs, targets, None)
        batch = probe.answer(probe.inputs, probe.targets)
        warnings = [
            "the model does not run in float64, so records that move each other's gradient by 1 % are unchecked"
        ]
    _refuse_idle_parameters(probe, batch)
    _refuse_changed_state(probe)
    warnings += _refuse_coupling(probe, batch)
    module, device = probe.module, targets.device
    warnings += _refuse_crowding(probe, SEEDS if batch.random else 1)
    if not batch.random and runs_own_code(module, loss):
        rows, tried = (probe.inputs, probe.targets), sizes(PROBES, expected)
        with torch.random.fork_rng([device] if targets.is_cuda else []):
            refuse_coupled_backward(module.to(device), loss, *rows, probe.tolerance, tried)
    _refuse_changed_state(probe)
    return warnings


def without_dropout(module: nn.Module) -> nn.Module:
    """The module with all dropout probabilities set to 0."""
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):  # recurrent layers and attention
            part.dropout = 0.0  # type: ignore[assignment]
    return module


def check_rows(prepare: Preparation, augment: Augmentation | None, stored: Inputs) -> list[str]:
    """Refuse a `prepare` or `augment` in which one record touches another's row; returns warnings.

    Like `check_model`, it uses only dtype, device and row shape of `stored` (records as they are kept) and probes with
    synthetic rows, on the CPU too. An empty batch must pass, because a crash would reveal that no record was drawn.
    """
    for count in (0, PROBES):
        batch = tree.take(_synthetic(stored, Generator().manual_seed(0), None), slice(count))
        if tree.rows(_told("prepare", prepare, batch)) != count:
            raise PrivacyError("the task's prepare returns more or fewer records than it gets; return a row for each")
    rows, generator = Trees.of(stored), Generator().manual_seed(0)
    ordinary = _told("prepare", prepare, rows.draw(0, PROBES, generator))
    rows = rows.widened(prepare)
    for kind in rows.kinds:
        watched = rows.watched(kind, generator)
        alone = _joined([_attempt(prepare, row) for row in tree.split(watched, 1)])
        crowds = [_attempt(prepare, rows.crowd(watched, other, generator)) for other in rows.kinds]
        _refuse_mixing("prepare", [alone, *(_seen(crowd) for crowd in crowds)])
        if augment is None:
            continue
        for seed in range(kind * SEEDS, (kind + 1) * SEEDS):
            drawn = partial(_augmented, augment, seed)
            if not _same(_told("augment", drawn, ordinary), drawn(ordinary)):
                raise PrivacyError("the task's augment draws numbers of its own; use the generator that it is given")
            _refuse_mixing("augment", [_seen(_attempt(drawn, crowd)) for crowd in crowds if crowd is not None])
    return []


def _augmented(augment: Augmentation, seed: int, rows: Inputs) -> Inputs:
    device = tree.tensors(rows)[0].device
    return augment(tree.each(Tensor.clone, rows), Generator(device).manual_seed(seed))


def _told(name: str, function: Preparation, batch: Inputs) -> Inputs:
    try:
        return function(batch)
    except FAILURES as error:
        reason = str(error).split("\n")[0]
        raise PrivacyError(
            f"the task's {name} fails on {tree.rows(batch)} synthetic records ({reason}); it must not"
        ) from error


def _attempt(function: Callable[[Inputs], Result], batch: Inputs) -> Result | None:
    """None where it fails: a failure on unusual records says nothing about others."""
    with contextlib.suppress(*FAILURES):
        return function(batch)
    return None


def _joined(parts: Sequence[Inputs | None]) -> Inputs | None:
    kept = [part for part in parts if part is not None]
    shapes = {tuple(tensor.shape for tensor in tree.tensors(part)) for part in kept}
    return tree.joined(kept) if len(kept) == len(parts) and len(shapes) == 1 else None


def _seen(batch: Inputs | None) -> Inputs | None:
    """The watched rows of a batch. If rows were dropped, all of them, so that the comparison fails."""
    if batch is None or any(part.shape[:1] != (SIZE,) for part in tree.tensors(batch)):
        return batch
    return tree.take(batch, torch.tensor(WATCHED))


def _refuse_mixing(name: str, rows: Sequence[Inputs | None]) -> None:
    """Compares the results for the same rows, alone and in batches."""
    if not _agree(rows):
        raise PrivacyError(f"the task's {name} mixes the records of a batch; treat each row by itself, with constants")


def _agree(rows: Sequence[Inputs | None], tolerance: float = 1e-5) -> bool:
    got = [row for row in rows if row is not None]
    return all(_same(got[0], row, tolerance) for row in got[1:])


def _same(left: Inputs, right: Inputs, tolerance: float = 1e-5) -> bool:
    pairs = list(zip(tree.tensors(left), tree.tensors(right), strict=True))
    return all(
        one.shape == other.shape
        and torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance / 10, equal_nan=True)
        for one, other in pairs
    )


@dataclass(frozen=True, eq=False)
class _Answer:
    """The watched record's output in a synthetic batch, and the gradient of its loss by parameter."""

    output: Tensor
    gradient: tuple[Tensor | None, ...]
    random: bool  # whether the forward pass drew random numbers


@dataclass(frozen=True, eq=False)
class _Probe:
    """A copy of the model in training mode without dropout, the loss, and two synthetic batches of PROBES records
    that share the watched record and nothing else."""

    module: nn.Module
    buffers: dict[str, Tensor]  # as they were before any forward pass
    parameters: dict[str, Tensor]  # likewise
    loss: Loss
    inputs: Inputs
    targets: Tensor
    tolerance: float  # of a gradient, relative to its norm

    @classmethod
    def of(cls, module: nn.Module, loss: Loss, inputs: Inputs, targets: Tensor, dtype: torch.dtype | None) -> _Probe:
        """In `dtype`, or as the module and its inputs are."""
        try:
            module = without_dropout(copy.deepcopy(module).train().to(dtype))
        except Exception as error:  # compiled code, say, cannot be
            reason = str(error).split("\n")[0]
            raise PrivacyError(f"the model cannot be copied ({reason}); keep no computed tensor in it") from error
        generator = Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():  # layers that start at zero would hide what lies behind them
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.01)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        rows, labels = (_synthetic(like, generator, dtype) for like in (inputs, targets))
        return cls(module, buffers, parameters, loss, rows, labels, 1e-2 if dtype is None else 1e-9)

    def answer(self, inputs: Inputs, targets: Tensor) -> _Answer:
        """Called again, a model that draws random numbers gets the same ones: the generators' states are put back."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not parameters:
            raise PrivacyError("the model has no trainable parameter; set requires_grad on those to be trained")
        try:
            with torch.random.fork_rng([targets.device] if targets.is_cuda else []), torch.enable_grad():
                before = _random_state(targets.device)
                outputs = tree.call(self.module, inputs)
                losses = self.loss(outputs, targets)
                refuse_shape(losses, len(targets))
                gradient = torch.autograd.grad(losses[min(MIDDLE, len(losses) - 1)], parameters, allow_unused=True)
                random = not torch.equal(before, _random_state(targets.device))
        except FAILURES as error:
            reason = str(error).split("\n")[0]
            raise PrivacyError(
                f"the gradient of a synthetic batch of {len(targets)} could not be taken ({reason}); "
                "private mode needs a model and a loss that take any number of records"
            ) from error
        if any(part is not None and part.is_sparse for part in gradient):
            raise PrivacyError("the gradient of a layer is sparse, which private mode does not read; use sparse=False")
        if not all(bool(tensor.isfinite().all()) for tensor in (losses, *gradient) if tensor is not None):
            raise PrivacyError("a synthetic record has no finite loss and gradient; check the model's initial weights")
        told = outputs if isinstance(outputs, Tensor) else losses  # whichever: it only chooses the words of a refusal
        return _Answer(told.detach()[min(MIDDLE, len(told) - 1)], gradient, random)


def _synthetic(like: Inputs, generator: Generator, dtype: torch.dtype | None) -> Inputs:
    """PROBES random rows of the shape of `like`, floats in `dtype`, between 0 and 1 and those of the watched row in the
    middle of it: it alone is neither the batch's largest nor its least. Integers are 0 or 1, which every vocabulary
    has."""

    def finished(rows: Tensor) -> Tensor:
        if not rows.is_floating_point():
            return rows.to(device)
        rows[MIDDLE] = 0.25 + rows[MIDDLE] / 2
        return rows.to(device, dtype or rows.dtype)

    device = tree.tensors(like)[0].device
    return tree.each(finished, Trees.of(like).draw(0, PROBES, generator))


def _with_others(batch: Tensor) -> Tensor:
    """The batch with every value changed in all records but the watched one, so that their mean, spread and extremes
    are others too: those of large random rows would hardly move."""
    others = 0.3 + (1 - batch) / 10 if batch.is_floating_point() else batch.logical_not().to(batch.dtype)
    others[MIDDLE] = batch[MIDDLE]
    return others


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def refuse_shape(losses: Tensor, count: int, error: type[Adp2sgdError] = PrivacyError) -> None:
    """A loss must be one number for each record."""
    if losses.shape != (count,):
        fix = 'return one loss per record, as torch losses do with reduction="none"'
        if losses.dim() > 1 and len(losses) == count:  # of pixels, frames or tokens
            fix = "return one loss per record: take the mean over the other dimensions, as in losses.flatten(1).mean(1)"
        raise error(f"the loss of {count} records has shape {tuple(losses.shape)}; {fix}")


def refuse_batchnorm(module: nn.Module) -> None:
    """Guarantee: no layer is BatchNorm, which computes statistics over the records of a batch."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            kind = type(part).__name__
            raise PrivacyError(f"{name or 'the model'} ({kind}) mixes the records of a batch; {_NO_BATCHNORM}")


def _refuse_coarse(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise PrivacyError(
                f"parameter {name} is {parameter.dtype}, too coarse to clip in; keep parameters in float32 (with "
                'precision = "bfloat16" layers run in bfloat16)'
            )


def _refuse_idle_parameters(probe: _Probe, batch: _Answer) -> None:
    trained = [name for name, parameter in probe.module.named_parameters() if parameter.requires_grad]
    for name, part in zip(trained, batch.gradient, strict=True):
        if part is None:
            raise PrivacyError(f"parameter {name} gets no gradient of a record; use it in forward or freeze it")


def _refuse_changed_state(probe: _Probe) -> None:
    for name, part in probe.module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and "prim::SetAttr" in str(getattr(part, "inlined_graph", "")):
            raise PrivacyError(f"{name} is compiled code that keeps state between its calls; leave it in Python")
        if getattr(part, "max_norm", None) is not None:  # of rows that synthetic records may not reach
            raise PrivacyError(f"{name} has max_norm, which changes its weights by the records it reads; leave it out")
        if isinstance(part, torch.jit.ScriptModule) and _sets_attributes(part):
            raise PrivacyError(
                f"{name or 'the model'} is scripted and sets its attributes, by records; leave them constant"
            )
    for name, parameter in probe.module.named_parameters():
        if not torch.equal(probe.parameters[name].to(parameter.device), parameter):
            raise PrivacyError(f"parameter {name} changes in a forward pass, by values of records; leave it constant")
    for name, buffer in probe.module.named_buffers():
        if name not in probe.buffers or not torch.equal(probe.buffers[name].to(buffer.device), buffer):
            raise PrivacyError(
                f"buffer {name} changes in a forward pass, by values of records without noise; make it constant, or "
                "use a module without running state"
            )


def _sets_attributes(part: torch.jit.ScriptModule) -> bool:
    """Whether compiled code of the module writes to attributes, which nothing could put back."""
    return any("prim::SetAttr" in str(part._c._get_method(name).graph) for name in part._c._method_names())


def _refuse_coupling(probe: _Probe, batch: _Answer) -> list[str]:
    """By a record's gradient, among ordinary others and alone."""
    others = probe.answer(tree.each(_with_others, probe.inputs), _with_others(probe.targets))
    if not _same_gradient(batch, others, probe.tolerance):
        if not _same(batch.output, others.output, probe.tolerance):
            raise PrivacyError(f"the model's output for a record depends on the others in its batch; {_NO_BATCHNORM}")
        raise PrivacyError("the loss of a record depends on the others in its batch; make it a function of that record")
    if batch.random:
        return [
            "the model draws random numbers in its forward pass, so whether the size of a batch matters is unchecked"
        ]
    middle = slice(MIDDLE, MIDDLE + 1)
    alone = probe.answer(tree.take(probe.inputs, middle), probe.targets[middle])
    if not _same_gradient(batch, alone, probe.tolerance):
        raise PrivacyError(
            "a record's gradient alone differs from its gradient in a batch; make model and loss independent of the "
            "batch's size"
        )
    return []


def _refuse_crowding(probe: _Probe, seeds: int) -> list[str]:
    """By a record's loss in crowds, and alone unless there are several `seeds`, of a model that draws numbers.

    On the CPU, where an integer out of range is an error and not the end of the device.
    """
    module, loss = partial(tree.call, probe.module.cpu()), probe.loss
    inputs, targets = (Trees.of(rows) for rows in (probe.inputs, probe.targets))
    outputs = _attempt(partial(_drawn, 0, module), inputs.draw(0, 1, Generator()))
    if outputs is None or _attempt(partial(loss, outputs), targets.draw(0, 1, Generator())) is None:
        return ["the model does not run on the CPU without gradients, so what unusual records do is unchecked"]
    inputs, targets = inputs.widened(partial(_drawn, 0, module)), targets.widened(partial(loss, outputs))
    for seed in range(seeds):
        generator = Generator().manual_seed(seed)

        def told(outputs: Any, labels: Tensor, seed: int = seed) -> Tensor | None:
            return _attempt(partial(_drawn, seed, partial(loss, outputs)), labels)

        for kind in inputs.kinds:
            watched = inputs.watched(kind, generator)
            batches = [*tree.split(watched, 1), *(inputs.crowd(watched, other, generator) for other in inputs.kinds)]
            outputs = [_attempt(partial(_drawn, seed, module), batch) for batch in batches]
            alone, crowds = outputs[: len(WATCHED)], outputs[len(WATCHED) :]
            for mark in targets.kinds:
                labels = targets.watched(mark, generator)
                losses = [_joined([told(*each) for each in zip(alone, labels.split(1), strict=True)])]
                for crowd, other in itertools.product(crowds, targets.kinds):
                    losses.append(_seen(told(crowd, targets.crowd(labels, other, generator))))
                if not _agree(losses[seeds > 1 :], probe.tolerance):
                    raise PrivacyError(
                        "the loss of a record depends on the others in its batch where some are unusual (missing, "
                        "extreme, short or repeated); treat each record by itself"
                    )
    return []


@torch.no_grad()
def _drawn(seed: int, function: Callable[[Inputs], Result], batch: Inputs) -> Result:
    """With the numbers of a seed, where it draws any."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return function(batch)


def _same_gradient(left: _Answer, right: _Answer, tolerance: float) -> bool:
    # Over all parameters together: a part that is zero but for rounding has no scale of its own.
    difference = largest = 0.0
    for pair in zip(left.gradient, right.gradient, strict=True):
        one, other = (torch.zeros(()) if part is None else part for part in pair)
        difference += float((one - other).square().sum())
        largest += max(float(one.square().sum()), float(other.square().sum()))
    return difference <= tolerance**2 * largest
