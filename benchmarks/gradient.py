"""Private gradients against a plain step, and against other ways to take them, in one run on one machine.

    python benchmarks/gradient.py --model resnet18 --batch 32 --device cpu --threads 2 --json

Every clipper does a whole step: forward, backward, per-record clipping where it is private, SGD update; no noise.
Steps are interleaved and each figure is a median over the rounds; `ratio` is the median of the rounds' own ratios to
the plain step. `peak_mb` is measured in a process of its own: on a GPU the allocator's peak, on CPU the growth of the
resident set from just before the first step (so without weights, inputs and libraries) to its highest mark.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adp2sgd import task, tree
from adp2sgd.device import SETTLED, CapturedGraphs, keep_memory
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import convolution
from adp2sgd.gradient.choose import Automatic, build
from adp2sgd.gradient.convolution import Convolution
from adp2sgd.gradient.tape import Tape
from adp2sgd.models import MODELS
from adp2sgd.tree import Inputs

Step = Callable[[], object]
Batch = tuple[Inputs, Tensor]
MOST_ROUNDS = 101
WAYS = ("patches", "side_by_side")


class Transformer(nn.Module):
    """A small language model: 4 layers of width 256 over 64 tokens of a vocabulary of 4,096."""

    repeatable = True  # may be captured as a CUDA graph

    def __init__(self, vocabulary: int = 4096, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return out


class Own(nn.Module):
    """The layers of "mlp" in a module that the package does not know, so every pass of it is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["mlp"](inputs=64, classes=10)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.inner(rows)
        return out


def rows(batch: int) -> Batch:
    return torch.randn(batch, 64), torch.randint(0, 10, (batch,))


def images(batch: int) -> Batch:
    return torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))


def words(batch: int) -> Batch:
    """Sentences of up to 64 tokens and their padding; the targets are tokens."""
    ids = torch.randint(1, 2048, (batch, 64))
    mask = (torch.arange(64) < torch.randint(32, 65, (batch, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}, torch.randint(0, 2048, (batch, 64))


def classes(batch: int) -> Batch:
    return words(batch)[0], torch.randint(0, 10, (batch,))


def pairs(batch: int) -> Batch:
    inputs, targets = words(batch)
    return inputs | {"decoder_input_ids": torch.randint(1, 2048, (batch, 64))}, targets


def pixels(batch: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}, torch.randint(0, 10, (batch,))


def hugging_face(name: str) -> Callable[[], nn.Module]:
    """A model of transformers with random weights: 4 layers of width 128; nothing is downloaded."""

    def make() -> nn.Module:
        import transformers as hf

        sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
        text = sizes | {"vocab_size": 2048, "max_position_embeddings": 128, "pad_token_id": 0}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        rotary = text | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
        made: nn.Module
        if name.startswith("bert"):
            made = hf.BertForSequenceClassification(hf.BertConfig(**text, **off, num_labels=10))
        elif name == "gpt2":
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            shape = {"vocab_size": 2048, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128}
            made = hf.GPT2LMHeadModel(hf.GPT2Config(**shape, **dropout, bos_token_id=1, eos_token_id=2))
        elif name == "llama":
            made = hf.LlamaForCausalLM(hf.LlamaConfig(**rotary))
        elif name == "qwen":
            made = hf.Qwen3ForCausalLM(hf.Qwen3Config(**rotary, head_dim=32, tie_word_embeddings=True))
        elif name == "vit":
            made = hf.ViTForImageClassification(
                hf.ViTConfig(**sizes, **off, image_size=32, patch_size=4, num_channels=3, num_labels=10)
            )
        else:
            shape = {"vocab_size": 2048, "d_model": 128, "d_ff": 512, "d_kv": 32, "num_layers": 4, "num_heads": 4}
            made = hf.T5ForConditionalGeneration(hf.T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0))
        return _with_lora(made) if name.endswith("lora") else made

    return make


def _with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=8, lora_dropout=0.0, target_modules=["query", "value"], task_type="SEQ_CLS")
    adapted: nn.Module = get_peft_model(model, settings)  # type: ignore[arg-type]
    return adapted


TRANSFORMERS = {
    "bert": classes, "bert-lora": classes, "gpt2": words, "llama": words, "qwen": words, "vit": pixels, "t5": pairs
}  # fmt: skip
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "mlp": (lambda: MODELS["mlp"](inputs=64, classes=10), rows),
    "own-mlp": (Own, rows),
    "cnn": (lambda: MODELS["cnn"](size=32, channels=3, norm="group"), images),
    "resnet18": (lambda: MODELS["resnet18"](norm="group"), images),
    "mobilenetv2": (lambda: MODELS["mobilenet_v2"](norm="group"), images),
    "lstm": (MODELS["lstm"], lambda n: (torch.randn(n, 21, 260), torch.randint(0, 32000, (n, 21)))),
    "transformer": (Transformer, lambda n: (torch.randint(0, 4096, (n, 64)), torch.randint(0, 4096, (n, 64)))),
} | {name: (hugging_face(name), data) for name, data in TRANSFORMERS.items()}


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of each record; outputs may be a `ModelOutput`."""
    return task.cross_entropy(getattr(outputs, "logits", outputs), targets)


class CrossEntropy(nn.CrossEntropyLoss):
    """For Opacus: the mean over the batch, and over the positions of sequences."""

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        outputs = getattr(outputs, "logits", outputs)
        return super().forward(outputs.transpose(1, 2) if outputs.dim() == 3 else outputs, targets)


def plain(module: nn.Module, batch: Batch, options: argparse.Namespace) -> Step:
    model = FlatModel(module, options.device)

    def step() -> None:
        model.grad.zero_()
        with torch.autocast(options.device, torch.bfloat16, enabled=options.bf16):
            loss = cross_entropy(tree.call(model.module, batch[0]), batch[1]).mean()
        loss.backward()
        model.weights.add_(model.grad, alpha=-1e-3)

    return step


def captured(module: nn.Module, batch: Batch, options: argparse.Namespace) -> Step:
    """The plain step as one CUDA graph: what it costs without the launching, which ours is rid of as well."""
    if options.device != "cuda":
        raise RuntimeError("captured steps need a GPU")
    model = FlatModel(module, options.device)

    def work(inputs: Tensor, targets: Tensor) -> None:
        model.grad.zero_()
        with torch.autocast(options.device, torch.bfloat16, enabled=options.bf16):
            loss = cross_entropy(model.module(inputs), targets).mean()
        loss.backward()
        model.weights.add_(model.grad, alpha=-1e-3)

    step = CapturedGraphs(work)
    return lambda: step(*batch)


def ours(clipper: str) -> Callable[[nn.Module, Batch, argparse.Namespace], Step]:
    def make(module: nn.Module, batch: Batch, options: argparse.Namespace) -> Step:
        model = FlatModel(module, options.device)
        autocast = torch.bfloat16 if options.bf16 else None
        expected = float(options.batch) if options.device == "cpu" else None
        taken = build(model, cross_entropy, clipper=clipper, autocast=autocast, expected=expected)
        if isinstance(taken, Automatic):
            taken.settle(*batch)  # once in a run, before its first step

        def step() -> None:
            model.weights.add_(taken.clipped_sum(*batch, 1.0).total, alpha=-1e-3 / len(batch[1]))

        return step

    return make


def opacus(mode: str) -> Callable[[nn.Module, Batch, argparse.Namespace], Step]:
    def make(module: nn.Module, batch: Batch, options: argparse.Namespace) -> Step:
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator
        from torch.utils.data import DataLoader, TensorDataset

        module = ModuleValidator.fix(module.train()).to(options.device)
        loader = DataLoader(TensorDataset(*tree.tensors(batch[0]), batch[1]), batch_size=len(batch[1]))
        made = PrivacyEngine().make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1e-3), data_loader=loader,
            noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode,
            criterion=CrossEntropy(),
        )  # fmt: skip
        private, optimizer = made[0], made[1]
        loss = made[2] if mode == "ghost" else CrossEntropy()

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(options.device, torch.bfloat16, enabled=options.bf16):
                found = loss(tree.call(private, batch[0]), batch[1])
            found.backward()
            optimizer.step()

        return step

    return make


CLIPPERS: dict[str, Callable[[nn.Module, Batch, argparse.Namespace], Step]] = {
    "plain": plain,
    "plain-captured": captured,
    "ours": ours("auto"),
    "opacus-hooks": opacus("hooks"),
    "opacus-ghost": opacus("ghost"),
    "opacus-functorch": opacus("functorch"),
    "opacus-ew": opacus("ew"),
    "torch.func": ours("functional"),
    "loop": ours("loop"),
}


def prepare(name: str, options: argparse.Namespace) -> Step:
    """One clipper on its own copy of the model, ready to step; the first step is part of it."""
    torch.manual_seed(0)
    module, data = WORKLOADS[options.model]
    batch = data(options.batch)
    batch = (tree.each(lambda part: part.to(options.device), batch[0]), batch[1].to(options.device))
    network = copy.deepcopy(module()).to(options.device)
    if options.channels_last and isinstance(batch[0], Tensor) and batch[0].dim() == 4:
        batch = (batch[0].contiguous(memory_format=torch.channels_last), batch[1])
    return CLIPPERS[name](network, batch, options)


def seconds(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def race(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All clippers, a step of each in turn."""
    steps, rows = {}, []
    for name in ["plain"] + [e for e in options.clippers if e != "plain"]:
        try:
            step = prepare(name, options)
            for _ in range(options.warmup):
                step()
            steps[name] = step
        except Exception as error:
            rows.append({"clipper": name, "skipped": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"})
    times: dict[str, list[float]] = {name: [] for name in steps}
    until = time.perf_counter() + 10
    while (done := len(times["plain"])) < options.rounds or (done < MOST_ROUNDS and time.perf_counter() < until):
        for name, step in steps.items():
            times[name].append(seconds(step, options.device))
    for name, taken in times.items():
        ratio = statistics.median(t / p for t, p in zip(taken, times["plain"], strict=True))
        row = {"clipper": name, "ms": round(1e3 * statistics.median(taken), 2), "ratio": round(ratio, 3)}
        rows.append(row | {"peak_mb": None if options.no_memory else peak_elsewhere(name, options)})
    return sorted(rows, key=lambda row: row.get("ms", float("inf")))


@torch.no_grad()  # as in a backward pass; the passes themselves switch it on
def layers(options: argparse.Namespace) -> None:
    """Milliseconds of every way to take norm and sum of each convolution: what the constants of the cost rest on."""
    seen: dict[str, Convolution] = {}
    settle = Tape._settle

    def watch(self: Tape, name: str, use: Any) -> None:
        if isinstance(use, Convolution):
            seen[name] = use
        settle(self, name, use)

    Tape._settle = watch  # type: ignore[method-assign]
    prepare("ours", options)()
    for name, use in reversed(seen.items()):
        factors = torch.ones(use.n, device=options.device)
        ways: dict[str, Step] = {"sum": lambda use=use, f=factors: use.weighted(f)}  # type: ignore[misc]
        formed = WAYS if use.geometry.groups > 1 else (*WAYS, "in_portions")
        ways |= {w: lambda use=use, w=w: getattr(Convolution, f"_{w}")(use) for w in formed}  # type: ignore[misc]
        rule, use.rule = use.rule, "ghost"
        grams = (use.fold * math.prod(use.grid)) ** 2 * use.n * use.geometry.groups * 4
        if grams < 1 << 30:
            ways["ghost"] = use.measure
        taken = {}
        for way, step in ways.items():
            step()
            taken[way] = 1e3 * min(seconds(step, options.device) for _ in range(options.rounds))
        figures = " ".join(f"{way} {ms:.3f}" for way, ms in taken.items())
        shape = f"{list(use.inputs.shape)} → {list(use.outputs.shape[1:])}, groups {use.geometry.groups}"
        print(f"{name:38}{shape:52}{rule:11}{figures}", flush=True)


def peak(name: str, options: argparse.Namespace) -> float:
    """MiB that steps need beyond weights and inputs. On a GPU: all that is taken from it, captured graphs included."""
    step = prepare(name, options)
    if options.device == "cuda":
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        for _ in range(2 * SETTLED):
            step()
        return (torch.cuda.memory_reserved() - held) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # what the preparation freed is not to be found again
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
    before = resident("VmRSS")
    step(), step()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """MiB, from the kernel's account of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def peak_elsewhere(name: str, options: argparse.Namespace) -> float | None:
    given = ["--model", options.model, "--batch", str(options.batch), "--device", options.device, "--peak-of", name]
    given += ["--threads", str(options.threads)]
    given += ["--repeat", str(options.repeat)] if options.repeat else []
    flags = ("bf16", "tf32", "strict", "channels-last")
    given += [f"--{flag}" for flag in flags if getattr(options, flag.replace("-", "_"))]
    done = subprocess.run([sys.executable, str(Path(__file__)), *given], capture_output=True, text=True, check=False)
    return round(float(done.stdout.split()[-1]), 1) if done.returncode == 0 else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=WORKLOADS, default="resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clippers", nargs="+", choices=CLIPPERS, default=list(CLIPPERS))
    parser.add_argument("--rounds", type=int, default=7, help="at least; quick steps get ten seconds' worth")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the first that counts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast, for every clipper")
    parser.add_argument(
        "--tf32", action="store_true", help="TF32 for matrix products too (convolutions have it by default)"
    )
    parser.add_argument("--strict", action="store_true", help="no TF32 anywhere, as in private runs")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", action="store_true", help="time the rules of each convolution, nothing else")
    parser.add_argument("--repeat", type=float, help="what they are taken to cost, in plain weight gradients")
    parser.add_argument("--peak-of", choices=CLIPPERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    keep_memory()
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.allow_tf32 = not options.strict
    if options.repeat:
        convolution.REPEAT[options.device] = options.repeat
    if options.peak_of:
        print(peak(options.peak_of, options))
        return
    if options.layers:
        layers(options)
        return
    rows = race(options)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} CPU threads"
    if options.json:
        print(json.dumps({"model": options.model, "batch": options.batch, "machine": machine, "rows": rows}, indent=1))
        return
    print(f"{options.model}, batch {options.batch}, {machine}")
    for row in rows:
        figures = f"{row['ms']:10.2f} ms {row['ratio']:7.2f}× {row['peak_mb']} MiB" if "ms" in row else row["skipped"]
        print(f"{row['clipper']:18}{figures}")


if __name__ == "__main__":
    main()
