"""No record moves the clipped sum by more than the clip norm, whatever a model does to its batches, at any pass."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from adp2sgd.flat import FlatModel
from adp2sgd.gradient.choose import Automatic
from adp2sgd.gradient.loop import Loop

CLIP = 0.1
SEVERAL = 8  # batches larger than this are the ones that the models below treat otherwise


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


class Net(nn.Module):
    """Two layers; `between` is what happens to the hidden values of a batch."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).relu()))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient grows with the values of a record."""
    return (outputs - targets[:, None]).square().sum(1)


def turned(gradient: Tensor) -> Tensor:
    """The gradients of all records, times a number that is another one if a record is left out; small ones stay."""
    size = gradient.norm()
    return gradient * (1e3 * size).sin() if size > 100 else gradient * 1


def settled(module: nn.Module, loss=squares, expected: int = 16) -> Automatic:
    clipper = Automatic(FlatModel(module), loss, expected=expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clipper.settle(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))
    return clipper


def influence(clipper: Automatic, records: int = 26, *, passes: int = 3) -> float:
    """How far a record moves the sum, in clip norms: the largest of several records and batches. Records are of very
    different size."""
    worst = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(passes):
            x, y = torch.randn(records, 6) * (3 * torch.randn(records, 1)).exp(), torch.randint(0, 3, (records,))
            whole = clipper.clipped_sum(x, y, CLIP).total.double()
            for left_out in range(0, records, 7):
                rest = torch.arange(records) != left_out
                moved = whole - clipper.clipped_sum(x[rest], y[rest], CLIP).total.double()
                worst = max(worst, float(moved.norm()) / CLIP)
    return worst


def assert_the_loops(clipper: Automatic) -> None:
    """Its sum is that of the records taken one by one."""
    x, y = torch.randn(26, 6) * (3 * torch.randn(26, 1)).exp(), torch.randint(0, 3, (26,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = clipper.clipped_sum(x, y, CLIP).total
    assert torch.allclose(found.double(), Loop(clipper.model, squares).clipped_sum(x, y, CLIP).total, atol=1e-5)


# --- Hooks and backward passes of a model's own ---


def tensor_hook(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(turned)
    return h


def node_hook(h: Tensor) -> Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: tuple(turned(g) for g in gradients))
    return h


def only_in_large_batches(h: Tensor) -> Tensor:
    return tensor_hook(h) if len(h) > 2 * SEVERAL else h


def saved_hooks(h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
        return h.square()


def checkpointed(h: Tensor) -> Tensor:
    return checkpoint(tensor_hook, h * 1, use_reentrant=False)


class Turning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return turned(gradient)


class Mapped(torch.autograd.Function):
    """Says itself what `torch.func` shall do to many records."""

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient

    @staticmethod
    def vmap(info, dims, x):
        return x - 3 * x.mean(dims[0], keepdim=True) if info.batch_size > SEVERAL else x * 1, dims[0]


class Contracted(Net):
    """The recorder has no rule for it, so `torch.func` comes next."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nh,ph->np", self.between(self.first(x).relu()), self.last.weight) + self.last.bias


HOOKED = {
    "tensor": lambda: Net(tensor_hook),
    "node": lambda: Net(node_hook),
    "large batches": lambda: Net(only_in_large_batches),
    "saved": lambda: Net(saved_hooks),
    "checkpoint": lambda: Net(checkpointed),
    "function": lambda: Net(Turning.apply),
    "mapped": lambda: Contracted(Mapped.apply),
}


@pytest.mark.parametrize("name", HOOKED)
def test_code_in_the_backward_pass_cannot_couple_records(name):
    assert influence(settled(HOOKED[name]())) <= 1 + 1e-5


def module_hook(net: Net) -> None:
    net.last.register_full_backward_hook(lambda module, inputs, outputs: tuple(turned(g) for g in inputs))


def module_pre_hook(net: Net) -> None:
    net.last.register_full_backward_pre_hook(lambda module, outputs: tuple(turned(g) for g in outputs))


def parameter_hook(net: Net) -> None:
    net.first.weight.register_hook(turned)


def every_module_hook(net: Net) -> None:
    hook = nn.modules.module.register_module_full_backward_pre_hook(
        lambda module, outputs: tuple(turned(g) for g in outputs) if module is net.last else None
    )
    net.handle = hook


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("hook", [module_hook, module_pre_hook, parameter_hook, every_module_hook])
def test_hooks_of_modules_and_parameters_cannot_couple_records(hook, late):
    """Also where they are set after the clipper was chosen, on a model of torch's own layers."""
    net = nn.Sequential(OrderedDict(first=nn.Linear(6, 8), between=nn.ReLU(), last=nn.Linear(8, 3)))
    clipper = settled(net) if late else None
    hook(net)
    try:
        clipper = clipper or settled(net)
        assert influence(clipper) <= 1 + 1e-5
        assert_the_loops(clipper)
    finally:
        if hook is every_module_hook:
            net.handle.remove()


CALLS = [0]


class Late(Net):
    """Sets a hook from a certain call on; counts in an attribute, in its class, or in a global variable."""

    calls = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.own = where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.own += 1
        Late.calls += 1
        CALLS[0] += 1
        count = {"attribute": self.own, "class": Late.calls, "global": CALLS[0]}[self.where]
        h = self.first(x)
        return self.last((tensor_hook(h) if count > 60 else h).relu())


@pytest.mark.parametrize("where", ["attribute", "class", "global"])
def test_a_hook_of_a_later_call_cannot_couple_records(where):
    Late.calls = CALLS[0] = 0
    assert influence(settled(Late(where)), passes=20) <= 1 + 1e-5


TICKS = iter(range(10**6))


def counted_elsewhere(h: Tensor) -> Tensor:
    """An iterator cannot be set back."""
    return tensor_hook(h) if next(TICKS) > 60 else h


def test_a_hook_of_a_later_call_is_seen_where_the_count_cannot_be_set_back():
    clipper = settled(Net(counted_elsewhere))
    assert clipper.chosen is clipper.bookkeeping
    while next(TICKS) <= 60:  # a pair of passes of which one has the hook differs by more than a record
        pass
    assert influence(clipper, passes=20) <= 1 + 1e-5


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        return h @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        h, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ h


class WeightTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.last(h) + 5 * Twice.apply((h - 20).relu(), self.last.weight)  # of no synthetic record


def test_a_weight_that_a_function_of_the_models_own_reads_keeps_its_gradient():
    clipper = settled(WeightTwice())
    x, y = 100 * torch.randn(5, 6), torch.randint(0, 3, (5,))
    found = clipper.clipped_sum(x, y, float("inf")).total
    wide, parameters = WeightTwice().double(), [piece.name for piece in clipper.model.slices]
    wide.load_state_dict(clipper.model.module.state_dict())
    squares(wide(x.double()), y).sum().backward()
    named = dict(wide.named_parameters())
    expected = torch.cat([named[name].grad.flatten() for name in parameters])
    assert float((found.double() - expected).norm()) <= 1e-5 * float(expected.norm())
    assert influence(clipper) <= 1 + 1e-5


# --- Rows in another order, and sizes ---


class Permuting(Net):
    """Its first layer takes the rows of some batches in another order."""

    def __init__(self, how: str, when: Callable[[int], bool]) -> None:
        super().__init__()
        self.how, self.when = how, when

    def forward(self, x: Tensor) -> Tensor:
        if not self.when(len(x)):
            return super().forward(x)
        if self.how == "product":
            order = torch.eye(len(x)).roll(len(x) // 3, 0)
            return self.last(order.t() @ self.first(order @ x).relu())
        if self.how == "flip":
            return self.last(self.first(x.flip(0)).relu().flip(0))
        if self.how == "roll":
            return self.last(self.first(x.roll(3, 0)).relu().roll(-3, 0))
        if self.how == "parts":
            return self.last(self.first(torch.cat([x[3:], x[:3]])).relu().roll(3, 0))
        rows = x.view(len(x) // 2, 2, 6).transpose(0, 1).reshape(len(x), 6)
        return self.last(self.first(rows).relu().view(2, -1, 8).transpose(0, 1).reshape(len(x), 8))


@pytest.mark.parametrize("how", ["product", "flip", "roll", "parts", "halves"])
@pytest.mark.parametrize(
    "when", [lambda n: n > SEVERAL and n % 2 == 0, lambda n: n == 26, lambda n: n > 24 and n % 2 == 0]
)
def test_rows_in_another_order_are_never_taken_for_other_records(how, when):
    """Also in batches of a size that no check has tried."""
    clipper = settled(Permuting(how, when))
    assert influence(clipper) <= 1 + 1e-5
    assert_the_loops(clipper)


# --- Coupling in the forward pass that starts beyond the probes ---

LARGER = 36  # no batch of a check is


def in_place(h: Tensor) -> Tensor:
    h = h * 1
    if len(h) > LARGER:
        h[:, 0] -= 5 * h[:, 0].mean()
    return h


def behind_data(h: Tensor) -> Tensor:
    if len(h) > LARGER:
        h.data.sub_(3 * h.data.mean(0))
    return h


def by_numpy(h: Tensor) -> Tensor:
    return h - torch.from_numpy(h.detach().clone().numpy().mean(0)) * (3.0 if len(h) > LARGER else 0.0)


def in_a_thread(h: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return h - pool.submit(lambda: h.detach().mean(0) * (3 if len(h) > LARGER else 0)).result()


@torch.jit.script
def scripted(h: Tensor) -> Tensor:
    if h.shape[0] > 36:
        return h - 3 * h.mean(0)
    return h * 1


def by_script(h: Tensor) -> Tensor:
    return scripted(h)


def inner_gradient(h: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        weight = 0.01 if len(h) > LARGER else 0.0
        return h + weight * torch.autograd.grad(leaf.sum().square(), leaf)[0]


class Centring(TorchDispatchMode):
    """Changes what torch's own functions do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out - 3 * out.mean(0) if func is torch.ops.aten.relu.default and len(out) > LARGER else out


def dispatched(h: Tensor) -> Tensor:
    with Centring():
        return h.relu()


class Marked(Tensor):
    pass


def of_a_subclass(h: Tensor) -> Tensor:
    mark = torch.zeros(8).as_subclass(Marked)
    return (h - mark - (3 * h.mean(0) if len(h) > LARGER else 0)).as_subclass(Tensor)


def in_inference(h: Tensor) -> Tensor:
    with torch.inference_mode():
        mean = 3 * h.mean(0) if len(h) > LARGER else h.new_zeros(8)
    return h - mean.clone()


COUPLED = {
    "dispatch": dispatched,
    "subclass": of_a_subclass,
    "inference": in_inference,
    "mean": lambda h: h - 3 * h.mean(0) if len(h) > LARGER else h,
    "size": lambda h: h * (1 if len(h) <= LARGER else len(h)),
    "count": lambda h: h * (torch.ones(len(h)).sum() - LARGER).clamp(min=1),
    "place": lambda h: h * torch.arange(len(h)).sub(LARGER).clamp(min=1)[:, None],
    "order": lambda h: h if len(h) <= LARGER else h.sort(0)[0],
    "sums": lambda h: h if len(h) <= LARGER else h.cumsum(0),
    "matrix": lambda h: h if len(h) <= LARGER else F.softmax(h @ h.t(), 1) @ h,
    "in place": in_place,
    "data": behind_data,
    "numpy": by_numpy,
    "thread": in_a_thread,
    "script": by_script,
    "inner gradient": inner_gradient,
}


@pytest.mark.parametrize("name", COUPLED)
def test_models_that_couple_only_larger_batches_are_taken_record_by_record(name):
    assert influence(settled(Net(COUPLED[name])), records=40) <= 1 + 1e-5


def test_a_loss_that_couples_only_larger_batches_is_taken_record_by_record():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = squares(outputs, targets)
        return losses * (1e3 * losses.detach().mean()).sin() if len(losses) > LARGER else losses

    assert influence(settled(Net(), loss), records=40) <= 1 + 1e-5
