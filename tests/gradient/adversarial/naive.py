"""Two clippers as they are commonly written. They trust the model; the suite counts how often that is a mistake."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from adp2sgd.task import Loss


def by_vmap(module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, clip_norm: float) -> Tensor:
    """`torch.func.vmap` of `grad`: per-record gradients, their norms, the clipped sum."""
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(module, parameters, (x[None],)), y[None]).sum()

    found = vmap(grad(one), in_dims=(None, 0, 0), randomness="different")(trained, inputs, targets)
    return _clipped([g.reshape(len(inputs), -1) for g in found.values()], clip_norm)


def by_hooks(module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, clip_norm: float) -> Tensor:
    """Hooks on every module that owns parameters: its input and the gradient at its output give each record's gradient,
    first axis first. Uses of a weight are taken one by one."""
    found: list[tuple[list[str], list[Tensor]]] = []
    seen: dict[nn.Module, list[Tensor]] = {}
    hooks: list[Any] = []
    names = {id(p): name for name, p in module.named_parameters()}
    twins = {part: copy.deepcopy(part) for part in module.modules()}  # without the hooks below
    for part in module.modules():
        if any(p.requires_grad for p in part.parameters(recurse=False)):
            seen[part] = []
            hooks.append(part.register_forward_hook(lambda m, given, _: seen[m].append(given[0].detach())))
            hooks.append(part.register_full_backward_hook(partial(_keep, seen, twins, names, found)))
    try:
        loss(module(inputs), targets).sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
        module.zero_grad(set_to_none=False)
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    return _clipped([_placed(sizes, *each) for each in found], clip_norm, added=True)


def _keep(seen: Any, twins: Any, names: Any, found: Any, part: nn.Module, _: Any, given: tuple[Tensor, ...]) -> None:
    own = {k: p.detach() for k, p in part.named_parameters(recurse=False) if p.requires_grad}

    def one(parameters: dict[str, Tensor], x: Tensor, g: Tensor) -> Tensor:
        return (functional_call(twins[part], parameters, (x[None],)) * g[None]).sum()

    gradients = vmap(grad(one), in_dims=(None, 0, 0))(own, seen[part].pop(), given[0])
    found.append(([names[id(getattr(part, k))] for k in own], [gradients[k].flatten(1) for k in own]))


def _placed(sizes: dict[str, int], names: list[str], parts: list[Tensor]) -> Tensor:
    """One use's gradients [n, size of the model]."""
    given = dict(zip(names, parts, strict=True))
    return torch.cat([given.get(name, parts[0].new_zeros(len(parts[0]), size)) for name, size in sizes.items()], 1)


def _clipped(parts: list[Tensor], clip_norm: float, *, added: bool = False) -> Tensor:
    """Σ factor · gradient. `added`: the parts are of the same parameters, else side by side."""
    norms = torch.stack([part.norm(dim=1) for part in parts]).norm(dim=0)
    factors = (clip_norm / (norms + 1e-6)).clamp(max=1)
    sums = [factors @ part for part in parts]
    return (torch.stack(sums).sum(0) if added else torch.cat(sums)).double()
