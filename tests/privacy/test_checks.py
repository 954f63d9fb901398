"""What private mode refuses: one line, the reason, the fix. And what it must not refuse."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from adp2sgd.errors import PrivacyError
from adp2sgd.models import build
from adp2sgd.models.norm import without_batchnorm
from adp2sgd.privacy.budget_checks import check_budget
from adp2sgd.privacy.checks import check_model, check_rows
from adp2sgd.task import cross_entropy

FEATURES, CLASSES = 6, 4
INPUTS, TARGETS = torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64)
BUDGET = {"records": 1000, "delta": 1e-5, "clip_norm": 1.0, "sample_rate": 0.1, "epsilon": 3.0, "noise_multiplier": 1.0}


class Wrapped(nn.Module):
    """Linear layers around a function of the hidden batch."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), function
        nn.init.zeros_(self.last.weight)

    def forward(self, inputs):
        return self.last(self.function(self.first(inputs)))


class Counting(nn.Module):
    """Keeps a running mean that it never uses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, inputs):
        self.mean += 0.1 * (inputs.detach().mean(0) - self.mean)
        return self.linear(inputs)


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(3, 3)

    def forward(self, inputs):
        return self.linear(inputs)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.lstm = nn.LSTM(5, 7, num_layers=2, dropout=0.4, bidirectional=True, batch_first=True)
        self.last = nn.Linear(14, CLASSES)
        self.register_buffer("shift", torch.ones(CLASSES))

    def forward(self, inputs):
        return self.last(self.lstm(self.embed(inputs))[0]) + self.shift


def image_model(norm):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 64, CLASSES)
    )


IMAGES, PHOTOS = torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 32, 32)
FINE = {
    "linear": (nn.Linear(FEATURES, CLASSES), cross_entropy, INPUTS, TARGETS),
    "images": (image_model(lambda n: nn.GroupNorm(2, n)), cross_entropy, IMAGES, TARGETS),
    "replaced": (without_batchnorm(image_model(nn.BatchNorm2d)), cross_entropy, IMAGES, TARGETS),
    "instance": (image_model(nn.InstanceNorm2d), cross_entropy, IMAGES, TARGETS),
    "sequences": (
        Recurrent(),
        cross_entropy,
        torch.zeros(2, 5, dtype=torch.int64),
        torch.zeros(2, 5, dtype=torch.int64),
    ),
    "regression": (nn.Linear(FEATURES, 1), lambda o, t: (o[:, 0] - t) ** 2, INPUTS, torch.zeros(2)),
    "many kinks": (build("mobilenet_v2", norm="group"), cross_entropy, PHOTOS, TARGETS),  # moves by 0.4 % in float32
    "double": (nn.Linear(FEATURES, CLASSES).double(), cross_entropy, INPUTS.double(), TARGETS),
}


@pytest.mark.parametrize("name", FINE)
def test_models_that_treat_records_one_by_one_pass(name):
    module, loss, inputs, targets = FINE[name]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    random, training = torch.get_rng_state(), module.training
    assert check_model(module, loss, inputs, targets) == []
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert module.training == training
    assert all(parameter.grad is None for parameter in module.parameters())


MIXING = {
    "centred": lambda h: h - h.mean(0),
    "weakly": lambda h: h + 1e-6 * h.mean(0),
    "attends": lambda h: functional.softmax(h @ h.T, dim=1) @ h,
    "looks back": lambda h: h.cumsum(0),
    "looks ahead": lambda h: h.flip(0).cumsum(0).flip(0),
    "functional batch norm": lambda h: functional.batch_norm(h, None, None, training=True),
    "random and mixing": lambda h: functional.dropout(h, 0.5) - h.mean(0),
}


@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_records_are_refused(name):
    with pytest.raises(PrivacyError, match="depends on the others in its batch; use norm = "):
        check_model(Wrapped(MIXING[name]), cross_entropy, INPUTS, TARGETS)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm2d])
def test_batchnorm_is_refused_by_name(norm):
    with pytest.raises(PrivacyError, match=r'1 \(\w*BatchNorm\w*\) mixes .*norm = "group".*without_batchnorm'):
        check_model(
            image_model(lambda n: norm() if "Lazy" in norm.__name__ else norm(n)), cross_entropy, IMAGES, TARGETS
        )


def test_what_depends_on_the_size_of_the_batch_is_refused():
    with pytest.raises(PrivacyError, match="alone differs"):
        check_model(Wrapped(lambda h: h * len(h)), cross_entropy, INPUTS, TARGETS)
    with pytest.raises(PrivacyError, match="alone differs"):
        check_model(Wrapped(torch.relu), lambda o, t: cross_entropy(o, t) / len(t), INPUTS, TARGETS)


def test_randomness_that_cannot_be_switched_off_is_a_warning():
    warnings = check_model(Wrapped(lambda h: functional.dropout(h, 0.5)), cross_entropy, INPUTS, TARGETS)
    assert len(warnings) == 1
    assert "random numbers" in warnings[0]


def test_a_model_that_insists_on_float32_is_probed_as_it_is():
    class Single(Wrapped):
        def forward(self, inputs):
            return super().forward(inputs.float())

    (warning,) = check_model(Single(torch.tanh), cross_entropy, INPUTS, TARGETS)
    assert "float64" in warning
    with pytest.raises(PrivacyError, match="depends on the others in its batch"):
        check_model(Single(lambda h: h + 0.1 * h.mean(0)), cross_entropy, INPUTS, TARGETS)


LOSSES = {
    "mean": (functional.cross_entropy, r"shape \(\); return one loss per record"),
    "per output": (lambda o, t: o**2, r"shape \(4, 4\); return one loss per record"),
    "softmax over records": (lambda o, t: -o.log_softmax(0).gather(1, t[:, None])[:, 0], "loss of a record depends"),
    "contrastive": (lambda o, t: (o @ o.T).logsumexp(1), "loss of a record depends"),
    "class weights": (
        lambda o, t: cross_entropy(o, t) / torch.bincount(t, minlength=2)[t],
        "loss of a record depends|alone differs",
    ),
    "detached": (lambda o, t: (o.sum(1) * 0).detach(), "could not be taken"),
    "not finite": (lambda o, t: cross_entropy(o, t) * math.inf, "no finite loss"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_couple_records_or_give_no_gradient_are_refused(name):
    loss, told = LOSSES[name]
    with pytest.raises(PrivacyError, match=told):
        check_model(Wrapped(torch.tanh), loss, INPUTS, TARGETS)


def test_running_state_is_refused_by_name():
    with pytest.raises(PrivacyError, match="buffer mean changes"):
        check_model(Counting(), cross_entropy, INPUTS, TARGETS)
    tracking = image_model(lambda n: nn.InstanceNorm2d(n, track_running_stats=True))
    with pytest.raises(PrivacyError, match=r"buffer 1\.running_mean changes"):
        check_model(tracking, cross_entropy, IMAGES, TARGETS)


def test_parameters_without_gradient_are_refused_unless_frozen():
    module = Idle()
    with pytest.raises(PrivacyError, match=r"unused\.weight gets no gradient .* freeze it"):
        check_model(module, cross_entropy, INPUTS, TARGETS)
    module.unused.requires_grad_(False)
    assert check_model(module, cross_entropy, INPUTS, TARGETS) == []
    with pytest.raises(PrivacyError, match="no trainable parameter"):
        check_model(module.requires_grad_(False), cross_entropy, INPUTS, TARGETS)


def test_a_model_that_needs_a_fixed_batch_is_refused_in_one_line():
    with pytest.raises(PrivacyError, match="synthetic batch of 4 could not be taken") as refusal:
        check_model(Wrapped(lambda h: h.view(3, -1)), cross_entropy, INPUTS, TARGETS)
    assert "\n" not in str(refusal.value)


def test_values_of_records_play_no_part():
    poisoned = torch.full_like(INPUTS, math.nan)
    assert check_model(nn.Linear(FEATURES, CLASSES), cross_entropy, poisoned, TARGETS - 100) == []


REFUSED = {
    "delta is missing": {"delta": None},
    "delta = 0.001 must be .* below 1/1000": {"delta": 1e-3},
    "delta = 0 must": {"delta": 0.0},
    "delta = nan must": {"delta": math.nan},
    "clip_norm = 0": {"clip_norm": 0.0},
    "clip_norm = -1": {"clip_norm": -1.0},
    "clip_norm = 1e-25": {"clip_norm": 1e-25},
    "clip_norm = inf": {"clip_norm": math.inf},
    "clip_norm = nan": {"clip_norm": math.nan},
    "noise_multiplier = 0": {"noise_multiplier": 0.0},
    "noise_multiplier = nan": {"noise_multiplier": math.nan},
    "sample_rate = 1.31 .* batch_size from 1 to 1000": {"sample_rate": 1.31},
    "sample_rate = 0 ": {"sample_rate": 0.0},
    "epsilon = -1": {"epsilon": -1.0},
    "epsilon = inf": {"epsilon": math.inf},
    "neither epsilon nor": {"epsilon": None, "noise_multiplier": None},
    "standardization is fitted on private": {"fitted": "standardization"},
    'sampler = "reshuffled"': {"sampler": "reshuffled"},
}


@pytest.mark.parametrize("told", REFUSED)
def test_settings_without_a_guarantee_are_refused(told):
    with pytest.raises(PrivacyError, match=told) as refusal:
        check_budget(**{**BUDGET, **REFUSED[told]})
    assert "\n" not in str(refusal.value)
    assert "use " in str(refusal.value) or "set " in str(refusal.value)


def test_sound_settings_pass_and_a_large_delta_warns():
    assert check_budget(**BUDGET) == []
    assert check_budget(**{**BUDGET, "noise_multiplier": None}) == []
    assert check_budget(**{**BUDGET, "epsilon": None, "sample_rate": 1.0}) == []
    (warning,) = check_budget(**{**BUDGET, "delta": 1e-4})
    assert "1e-04 or less" in warning
    assert check_budget(**{**BUDGET, "delta": 9.9e-5}) == []


class Batchwide(nn.Module):
    """Treats a batch as a whole where something unusual is in it."""

    def __init__(self, change):
        super().__init__()
        self.change, self.head = change, nn.Linear(FEATURES, 3)

    def forward(self, x):
        return self.head(self.change(x))


UNUSUAL = {
    "imputed by the batch's mean": lambda x: torch.where(x.isnan(), x.nanmean(0, keepdim=True).nan_to_num(), x),
    "without columns with gaps": lambda x: torch.where(x.isnan().any(0), 0 * x.nan_to_num(), x),
    "gaps filled by the batch's size": lambda x: x.nan_to_num(len(x)),
    "marks replaced by the mean": lambda x: torch.where(
        x == -1, (x * (x != -1)).sum(0) / (x != -1).sum(0).clamp(min=1), x
    ),
    "scaled where above 1": lambda x: x / x.abs().max().clamp(min=1),
    "turned where negative": lambda x: x if x.sum() > -1 else -x,
    "shifted where above 1": lambda x: x - torch.relu(x - 1).mean(0),
    "cut to three deviations": lambda x: torch.minimum(x, x.mean(0) + 3 * x.std(0, correction=0)),
    "centred where there are many": lambda x: x - x.mean(0) if len(x) > 8 else x,
    "copies shared out": lambda x: x / (x[:, None] == x).all(-1).sum(1, keepdim=True).clamp(min=1),
    "cut to the longest": lambda x: nn.functional.pad(y := x[:, : int((x != 0).sum(1).max().clamp(min=1))],
                                                      (0, FEATURES - y.shape[1]), value=float(y.shape[1])),
}  # fmt: skip


@pytest.mark.parametrize("how", UNUSUAL)
def test_what_a_batch_does_to_unusual_records_is_refused(how):
    inputs, targets = torch.rand(2, FEATURES), torch.zeros(2, dtype=torch.long)
    for _ in range(5):
        with pytest.raises(PrivacyError, match="others in its batch"):
            check_model(Batchwide(UNUSUAL[how]), cross_entropy, inputs, targets)
    with pytest.raises(PrivacyError, match="prepare mixes"):
        check_rows(lambda x: UNUSUAL[how](x) if len(x) else x, None, inputs)


def masked(keep):
    """A loss that leaves out those of a batch's records that `keep` does not choose by all losses."""
    return lambda outputs, targets: (losses := cross_entropy(outputs, targets)) * keep(losses)


LABELS = {
    "outliers left out": masked(lambda losses: losses <= 10 * losses.median()),
    "the largest left out": masked(lambda losses: losses <= losses.mean() + 2 * losses.std(correction=0)),
    "a twentieth left out": masked(lambda losses: losses <= losses.nan_to_num().sort().values[-1 - len(losses) // 20]),
    "shared by those of the other classes": lambda o, t: cross_entropy(o, t) / (t > 1).sum().clamp(min=1),
    "doubled where the last class is present": lambda o, t: cross_entropy(o, t) * (1 + (t == CLASSES - 1).any()),
    "shared by those with a label": lambda o, t: (
        functional.cross_entropy(o, t, reduction="none", ignore_index=-100) * len(t) / (t != -100).sum().clamp(min=1)
    ),
}


@pytest.mark.parametrize("how", LABELS)
def test_losses_that_weigh_a_record_by_others_are_refused(how):
    for _ in range(10):
        with pytest.raises(PrivacyError, match=r"others in its batch|alone differs"):
            check_model(nn.Linear(FEATURES, CLASSES), LABELS[how], INPUTS, TARGETS)


def test_integers_of_a_batch_are_not_scaled_together():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight) / x.max().clamp(min=1))

    with pytest.raises(PrivacyError, match="others in its batch"):
        check_model(Scaled(FEATURES, CLASSES), cross_entropy, INPUTS.long(), TARGETS)
    for sound in (torch.int16, torch.int64):
        with pytest.raises(PrivacyError, match="prepare mixes"):
            check_rows(lambda x: x / x.abs().max().clamp(min=1) if len(x) else x.float(), None, INPUTS.to(sound))


def test_rare_mixing_is_found_in_models_and_augmentations():
    class Mixing(nn.Linear):
        def forward(self, x):
            return super().forward(x if torch.rand(()) > 0.4 else 0.7 * x + 0.3 * x[torch.randperm(len(x))])

    def sometimes(x, generator):
        return x if torch.rand((), generator=generator) < 0.9 else 0.7 * x + 0.3 * x.roll(1, 0)

    for _ in range(5):
        with pytest.raises(PrivacyError, match="others in its batch"):
            check_model(Mixing(FEATURES, CLASSES), cross_entropy, INPUTS, TARGETS)
    with pytest.raises(PrivacyError, match="augment mixes"):
        check_rows(torch.Tensor.float, sometimes, INPUTS)


def test_augmentations_draw_from_the_generator_that_they_are_given():
    with pytest.raises(PrivacyError, match="augment draws numbers of its own; use the generator"):
        check_rows(torch.Tensor.float, lambda x, generator: x + torch.randn_like(x), INPUTS)


def test_state_that_only_unusual_records_change_is_refused():
    class Largest(nn.Linear):
        def __init__(self):
            super().__init__(FEATURES, CLASSES)
            self.register_buffer("largest", torch.tensor(1.0))

        def forward(self, x):
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
            return super().forward(x)

    with pytest.raises(PrivacyError, match="buffer largest changes"):
        check_model(Largest(), cross_entropy, INPUTS, TARGETS)


def test_models_that_cannot_be_probed_are_refused_in_one_line():
    tokens = torch.zeros(2, 4, dtype=torch.long)
    kept = nn.Linear(FEATURES, CLASSES)
    kept.last = kept(INPUTS)
    sparse = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(12, CLASSES))
    for module, inputs, words in ((kept, INPUTS, "cannot be copied"), (sparse, tokens, "use sparse=False")):
        with pytest.raises(PrivacyError, match=words) as refusal:
            check_model(module, cross_entropy, inputs, TARGETS)
        assert "\n" not in str(refusal.value)


def test_a_model_that_needs_gradients_to_answer_is_a_warning():
    class Slope(nn.Linear):
        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0] @ self.weight.T

    (warning,) = check_model(Slope(FEATURES, CLASSES, bias=False), cross_entropy, INPUTS, TARGETS)
    assert "without gradients" in warning


def test_models_that_insist_on_ordinary_values_pass():
    class Strict(nn.Linear):
        def forward(self, x):
            assert x.min() >= 0, "no negative values"
            assert x.max() <= 1, "no large values"
            return super().forward(x)

    assert check_model(Strict(FEATURES, CLASSES), cross_entropy, INPUTS, TARGETS) == []


def test_forward_passes_that_change_weights_are_refused():
    tokens, targets = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, dtype=torch.long)

    class Kept(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.table, self.head = nn.Embedding(50, 8, **options), nn.Linear(8, 3)

        def forward(self, x):
            if not self.table.max_norm:
                self.head.weight.data.mul_(0.99)
            return self.head(self.table(x).sum(1))

    for options, words in (({"max_norm": 1.0}, "table has max_norm"), ({}, "parameter head.weight changes")):
        with pytest.raises(PrivacyError, match=words):
            check_model(Kept(**options), cross_entropy, tokens, targets)


@pytest.mark.parametrize("extreme", [torch.max, torch.min, torch.std])
@pytest.mark.parametrize("stored", [torch.zeros(2, 3, 64, 64, dtype=torch.uint8), torch.rand(2, 3, 128, 128)])
def test_rows_that_are_scaled_by_the_batchs_extremes_are_refused(stored, extreme):
    with pytest.raises(PrivacyError, match="prepare mixes"):
        check_rows(lambda x: x.float() / (1 + extreme(x.float())) if len(x) else x.float(), None, stored)


def test_rows_with_gaps_are_not_left_out():
    with pytest.raises(PrivacyError, match="prepare mixes"):
        check_rows(lambda x: x[~x.isnan().any(1)], None, INPUTS)
    with pytest.raises(PrivacyError, match="others in its batch"):
        check_model(nn.Linear(FEATURES, CLASSES), lambda o, t: cross_entropy(o[t >= 0], t[t >= 0]), INPUTS, TARGETS)


def test_rows_of_codes_may_have_few_values():
    table = torch.randn(10, 3)
    assert check_rows(lambda x: table[x.long()], None, torch.zeros(2, 5, dtype=torch.uint8)) == []
    with pytest.raises(PrivacyError, match="prepare mixes"):
        check_rows(lambda x: table[x.long()] + x.float().mean(), None, torch.zeros(2, 5, dtype=torch.uint8))


@pytest.mark.parametrize("order", [lambda x: x.flip(0), lambda x: x.roll(1, 0), lambda x: x.roll(-1, 0)])
def test_rows_that_are_blended_with_their_mirror_image_or_neighbour_are_refused(order):
    stored = torch.rand(2, FEATURES)
    with pytest.raises(PrivacyError, match="augment mixes"):
        check_rows(torch.Tensor.float, lambda x, generator: 0.5 * x + 0.5 * order(x), stored)
    with pytest.raises(PrivacyError, match="prepare mixes"):
        check_rows(lambda x: 0.5 * x + 0.5 * order(x), None, stored)


class Threshold(torch.autograd.Function):
    """Scales the gradient of a batch where that is large."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm() if gradient.norm() > 5 else gradient


def hooked(hidden):
    hidden = hidden * 1
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / gradient.norm() if gradient.norm() > 5 else gradient)
    return hidden


@pytest.mark.parametrize("function", [Threshold.apply, hooked])
def test_backward_passes_that_scale_a_batch_beyond_a_threshold_are_refused(function):
    module = Wrapped(function)
    nn.init.normal_(module.last.weight)
    with pytest.raises(PrivacyError, match="is not the sum of their gradients"):
        check_model(module, cross_entropy, INPUTS, TARGETS)


def test_hooks_that_treat_records_one_by_one_pass():
    def reversed_gradient(hidden):
        hidden = hidden * 1
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: -gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1))
        return hidden

    assert check_model(Wrapped(reversed_gradient), cross_entropy, INPUTS, TARGETS) == []


def test_what_couples_only_batches_of_the_runs_size_is_refused():
    module = Wrapped(lambda hidden: hidden - hidden.mean(0) if len(hidden) > 60 else hidden)
    assert check_model(module, cross_entropy, INPUTS, TARGETS) == []
    with pytest.raises(PrivacyError, match="of 86 synthetic records"):
        check_model(module, cross_entropy, INPUTS, TARGETS, expected=56)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(FEATURES, CLASSES), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_code_that_keeps_state_is_refused():
    with pytest.raises(PrivacyError, match="keeps state between its calls"):
        check_model(nn.Sequential(torch.jit.script(Counts())), cross_entropy, INPUTS, TARGETS)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_that_cannot_be_copied_is_refused_in_one_line():
    with pytest.raises(PrivacyError, match="cannot be copied"):
        check_model(Wrapped(torch.jit.script(doubled)), cross_entropy, INPUTS, TARGETS)


def doubled(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 2
