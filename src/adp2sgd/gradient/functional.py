"""Per-record gradients by `torch.func`: for any module that vmap understands, in chunks that bound the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OperatorBase, OpOverloadPacket
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from adp2sgd import tree
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.clip import AT_ONCE, clip_factors, finite_or_infinite
from adp2sgd.gradient.clipper import Clipped
from adp2sgd.gradient.hooks import eager, refuse_hooks
from adp2sgd.gradient.rounding import squares
from adp2sgd.gradient.rules import UnsupportedError
from adp2sgd.gradient.state import Memory
from adp2sgd.task import Loss
from adp2sgd.tree import Inputs

CHUNK_BYTES = 1 << 30


class Functional:
    """Clipper that materializes the gradients of `chunk` records at a time (for about 1 GiB).

    The model sees one record, and torch maps it over the others. Code that could look at more than one (hooks, and
    functions that say themselves how they are mapped) is an `UnsupportedError`, at every call.
    """

    def __init__(self, model: FlatModel, loss: Loss, *, copies: int = 1) -> None:
        self.model, self.loss, self.copies = model, loss, copies
        size = model.weights.numel() * model.weights.element_size()
        self._memory = Memory(model.module, loss)
        self.chunk = min(AT_ONCE[model.device.type], max(1, CHUNK_BYTES // max(1, 3 * size)))

    def clipped_sum(self, inputs: Inputs, targets: Tensor, clip_norm: float, records: int | None = None) -> Clipped:
        """See `Clipper.clipped_sum`. Rows i·copies … of the inputs are the copies of record i."""
        dtype = self.model.weights.dtype
        refuse_hooks(self.model.module, self.model.module.parameters())
        total = torch.zeros_like(self.model.weights, dtype=torch.float64)
        norms = [self.model.weights.new_zeros(0)]
        rows = self.chunk * self.copies
        for start in range(0, len(targets), rows):
            x, y = (tree.each(Tensor.clone, tree.take(t, slice(start, start + rows))) for t in (inputs, targets))
            with self._memory.kept(), eager(), Mapped():
                gradients = self._gradients(x, y)
            norms.append(finite_or_infinite(sum((squares(g) for g in gradients.values()), total.new_zeros(1)), dtype))
            factors = clip_factors(norms[-1], clip_norm, dtype)
            if records is not None:
                factors = factors * (torch.arange(len(factors), device=factors.device) < records - start // self.copies)
            views = self.model.named_views(total)
            for name, gradient in gradients.items():
                safe = torch.where(_along(factors, gradient) > 0, gradient, torch.zeros_like(gradient))
                # A matrix-vector product: unlike others it is never taken in TF32.
                views[name].add_(torch.mv(safe.reshape(len(safe), -1).t(), factors).view(safe.shape[1:]))
        return Clipped(total, torch.cat(norms))

    def _gradients(self, inputs: Inputs, targets: Tensor) -> dict[str, Tensor]:
        module = self.model.module
        trained = {piece.name for piece in self.model.slices}
        parameters = {k: v.detach() for k, v in module.named_parameters() if k in trained}
        frozen = {k: v.detach() for k, v in module.named_parameters() if k not in trained} | dict(
            module.named_buffers()
        )

        def loss(parameters: dict[str, Tensor], x: Inputs, y: Tensor) -> Tensor:
            def run(*args: Any, **named: Any) -> Any:
                return functional_call(module, (parameters, frozen), args, named)

            return self.loss(tree.call(run, x), y).mean()

        x, y = (tree.each(lambda part: part.unflatten(0, (-1, self.copies)), t) for t in (inputs, targets))
        gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(parameters, x, y)
        return gradients


GETTERS = [vars(torch._C.TensorBase)[name].__get__ for name in ("grad_fn", "data")]
"""A node of the graph takes hooks; data are changed without a trace."""


class Mapped(TorchFunctionMode):
    """Refuses what could see more than one of the records that a function is mapped over."""

    REFUSED = (
        "register_hook",
        "retain_grad",
        "backward",
        "numpy",
        "data_ptr",
        "untyped_storage",
        "__dlpack__",
        "storage",
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        foreign = isinstance(func, OperatorBase) and getattr(func, "namespace", "") != "aten"
        if isinstance(func, OpOverloadPacket):
            foreign = not str(func).startswith("aten.")
        name = getattr(func, "__name__", "")
        if foreign or name in self.REFUSED or func in GETTERS:
            raise UnsupportedError(f"{name or func} could see more than one record")
        if torch._C._len_torch_dispatch_stack():
            raise UnsupportedError("a dispatch mode of the model's own could see more than one record")
        return func(*args, **(kwargs or {}))


def _along(factors: Tensor, like: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (like.dim() - 1))
