"""Real learners on one machine, in one run and as ratios.

    python benchmarks/engine.py [--json] [--only NAME …] [--learners 8] [--seconds 8]
    python benchmarks/engine.py --only gpu_with_exchange            (on a machine with a GPU: 16 learners, ResNet-18)

case1_of_ideal      speed-up over SYNC over the ideal one, 50 ms sleeping steps, a random learner 2 times slower
case2_of_ideal      the same, one learner 10 times slower
rate_with_exchange  step rate with an exchange at every step over the rate without; an exchange takes a third of a step
exchange_over_copy  a pair exchange of 165 MiB between two processes over a bare copy (memcpy) of the bytes involved:
                    each of the two models is written to shared memory once and read from it once, four times 165 MiB
vs_ddp              samples per second over torch DDP's, same model, batch and number of processes, no straggler
gpu_with_exchange   the step rate of learners that share a GPU over that of the same processes without any exchange
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from adp2sgd.config import Config, Optimizer, Speeds
from adp2sgd.data.records import Records
from adp2sgd.engine import simulate, train
from adp2sgd.engine.setup import prepare
from adp2sgd.exchange.protocol import Exchange
from adp2sgd.exchange.shared import Post, SharedCarrier, make_mail
from adp2sgd.exchange.slots import SLOTS, Layout
from adp2sgd.exchange.thread import ExchangeThread
from adp2sgd.run_folder import Run
from adp2sgd.task import Task, cross_entropy

MIB = 1 << 20


class Vector(nn.Module):
    """A model that is nothing but weights."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(length))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.weights[:1]


def vector(*, length: int) -> Task:
    """A task whose exchange is large and whose step is small."""
    records = Records(torch.zeros(64, 1), torch.zeros(64, dtype=torch.int64))
    return Task(model=lambda: Vector(length), train=records, test=records, loss=lambda y, _: y.square().sum(1))


def dense(*, inputs: int = 256, hidden: int = 1024, records: int = 4096) -> Task:
    """A task whose step is real work."""
    stream = torch.Generator().manual_seed(0)
    whole = Records(torch.randn(records, inputs, generator=stream), torch.randint(10, (records,), generator=stream))
    few = whole.take(torch.arange(64))
    return Task(model=lambda: dense_model(inputs, hidden), train=whole, test=few, loss=cross_entropy)


def dense_model(inputs: int, hidden: int) -> nn.Module:
    layers = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*layers)


def resnet(*, records: int = 8192) -> Task:
    """ResNet-18 on images of CIFAR's size; the pixels do not matter here."""
    from adp2sgd import models

    stream = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (records, 3, 32, 32), generator=stream, dtype=torch.uint8)
    whole = Records(pixels, torch.randint(10, (records,), generator=stream))
    few = whole.take(torch.arange(64))
    return Task(model=lambda: models.build("resnet18"), train=whole, test=few, prepare=lambda x: x.float() / 128 - 1)


def steps_per_second(run: Run) -> float:
    return run.global_steps / run.seconds


# ---------------------------------------------------------------- stragglers


def sleepy(learners: int, speeds: Speeds, rounds: int) -> Config:
    """`rounds` steps per learner on average."""
    return Config(
        task="quadratic",
        learners=learners,
        epochs=rounds * learners * 8 / 400,
        batch_size=8,
        seed=0,
        device="cpu",
        evaluate_every=1e6,
        checkpoint_every=0,
        options={"records": 400, "dimension": 10},
        optimizer=Optimizer(lr=0.01),
        speeds=speeds,
    )


def straggler(name: str, speeds: Speeds, ideal: float, learners: int, seconds: float) -> dict[str, float]:
    """Real and simulated speed-up of ADPSGD over SYNC, by the time per step of all learners together."""
    sync_round = speeds.step_s * speeds.factor
    config = sleepy(learners, speeds, max(8, int(seconds / sync_round)))
    real = steps_per_second(train(config.replace(epochs=config.epochs * ideal)))
    real /= steps_per_second(train(config.replace(algorithm="sync")))
    simulated = steps_per_second(simulate(config)) / steps_per_second(simulate(config.replace(algorithm="sync")))
    return {
        f"{name}_of_ideal": real / ideal,
        f"{name}_real": real,
        f"{name}_simulated": simulated,
        f"{name}_ideal": ideal,
    }


def case_1(learners: int, seconds: float) -> dict[str, float]:
    speeds = Speeds(kind="random-slow", factor=2.0, step_s=0.05, pad=True)
    return straggler("case1", speeds, 2 / (1 + 1 / learners), learners, seconds)


def case_2(learners: int, seconds: float) -> dict[str, float]:
    speeds = Speeds(kind="one-slow", factor=10.0, step_s=0.05, pad=True)
    return straggler("case2", speeds, (learners - 1 + 0.1) / (learners / 10), learners, seconds)


# ---------------------------------------------------------------- exchange


def pair_seconds(length: int, repeat: int) -> float:
    """Median time of an exchange between two processes, until both sides have mixed."""
    layout, mail = Layout(length, torch.float32), make_mail()
    descriptors = [layout.create(k) for k in range(2)]
    setup = prepare(Config(task="engine:vector", learners=2, batch_size=1, device="cpu", options={"length": length}))

    def side(number: int) -> ExchangeThread:
        learner = setup.learner(number, Path())
        thread = ExchangeThread(Exchange(learner, SharedCarrier(learner, Post(mail, str(number)), descriptors)))
        thread.start()
        return thread

    child = os.fork()
    if not child:
        side(1)
        threading.Event().wait()
    try:
        times = []
        mine = side(0)
        while len(times) < repeat + 2:
            done, began = mine.exchange.tally.completed, time.perf_counter()
            mine.want(1)
            while mine.exchange.tally.completed == done or mine.exchange.carrier.room < SLOTS:
                time.sleep(0.0002)
                if not mine.exchange.occupied and time.perf_counter() - began > 2:
                    break  # the other side had not come up yet
            if mine.exchange.tally.completed > done:
                times.append(time.perf_counter() - began)
            time.sleep(0.05)
        mine.close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        shutil.rmtree(mail)
    return statistics.median(times[2:])


def copy_seconds(length: int, repeat: int) -> float:
    """Median time of one memcpy of the vector."""
    source, target = np.ones(length, np.float32), np.ones(length, np.float32)
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def exchange(learners: int, seconds: float) -> dict[str, float]:
    length = 165 * MIB // 4
    torch.set_num_threads(1)
    took, copy = pair_seconds(length, 10), copy_seconds(length, 20)
    return {"exchange_over_copy": took / (4 * copy), "exchange_165mib_s": took, "copy_165mib_s": copy}


def rate(learners: int, seconds: float) -> dict[str, float]:
    """Two learners with 40 MiB, whose sleeping step is three exchanges long; in turns, the better of each."""
    length = 40 * MIB // 4
    torch.set_num_threads(1)
    step_s = 3 * pair_seconds(length, 10)
    config = Config(
        task="engine:vector",
        learners=2,
        epochs=2 * seconds / step_s / 64,
        batch_size=1,
        seed=0,
        device="cpu",
        evaluate_every=1e6,
        checkpoint_every=0,
        options={"length": length},
        speeds=Speeds(step_s=step_s, pad=True),
    )
    return {**with_and_without("rate", config), "rate_step_s": step_s}


def with_and_without(name: str, config: Config) -> dict[str, float]:
    """Step rate with exchange over the rate without, in turns, the better of each."""
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for _ in range(2):
        for exchange, found in runs.items():
            found.append(train(config, exchange=exchange))
    rates = {exchange: max(map(steps_per_second, found)) for exchange, found in runs.items()}
    met = sum(each.exchanges for each in runs[True][0].learners) / 2 / runs[True][0].global_steps
    return {
        f"{name}_with_exchange": rates[True] / rates[False],
        f"{name}_steps_per_s": rates[True],
        f"{name}_exchanges_per_step": met,
    }


# ---------------------------------------------------------------- peers


def ddp_main(rank: int, world: int, batch: int, seconds: float, rendezvous: str) -> None:
    """One process of the same job on torch DDP; rank 0 prints samples per second of all."""
    from torch import distributed

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(rendezvous, world)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    task = dense()
    model = nn.parallel.DistributedDataParallel(task.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stream, steps, began = torch.Generator().manual_seed(rank), 0, 0.0
    going = torch.ones(1)
    while going.item():
        if steps == 20:
            began = time.perf_counter()
        rows = torch.randint(len(task.train), (batch,), generator=stream)
        optimizer.zero_grad()
        task.loss(model(task.train.inputs[rows]), task.train.targets[rows]).mean().backward()
        optimizer.step()
        steps += 1
        if steps % 20 == 0:
            going.fill_(float(steps == 20 or time.perf_counter() - began < seconds))
            distributed.broadcast(going, 0)
    if rank == 0:
        print((steps - 20) * batch * world / (time.perf_counter() - began))
    distributed.destroy_process_group()


def ddp_rate(world: int, batch: int, seconds: float) -> float:
    """Samples per second of torch DDP."""
    program = [sys.executable, __file__, "--ddp"]
    with tempfile.TemporaryDirectory() as folder:
        facts = world, batch, seconds, f"{folder}/store"
        ranks = [
            subprocess.Popen([*program, *map(str, (k, *facts))], stdout=subprocess.PIPE, text=True)
            for k in range(world)
        ]
        rate = float(ranks[0].communicate()[0])
        ranks[1].wait()
    return rate


def ddp(learners: int, seconds: float) -> dict[str, float]:
    """K=2 on CPU cores, in turns, the better of each."""
    world, batch, ours, theirs = 2, 64, 0.0, 0.0
    for _ in range(2):
        theirs = max(theirs, ddp_rate(world, batch, seconds))
        config = Config(
            task="engine:dense",
            learners=world,
            epochs=max(2.0, seconds * theirs / 4096),
            batch_size=batch,
            seed=0,
            device="cpu",
            evaluate_every=1e6,
            checkpoint_every=0,
            optimizer=Optimizer(lr=0.01),
        )
        ours = max(ours, steps_per_second(train(config)) * batch)
    return {"vs_ddp": ours / theirs, "samples_per_s": ours, "ddp_samples_per_s": theirs}


def gpu(learners: int, seconds: float) -> dict[str, float]:
    """ResNet-18, batch 32, all learners on one GPU; in turns, the better of each."""
    if not torch.cuda.is_available():
        return {}
    config = Config(
        task="engine:resnet",
        learners=16,
        epochs=16,
        batch_size=32,
        seed=0,
        device="cuda",
        evaluate_every=1e6,
        checkpoint_every=0,
        optimizer=Optimizer(lr=0.01),
    )
    return with_and_without("gpu", config)


BENCHMARKS: dict[str, Callable[[int, float], dict[str, float]]] = {
    "exchange_over_copy": exchange,
    "rate_with_exchange": rate,
    "vs_ddp": ddp,
    "case1_of_ideal": case_1,
    "case2_of_ideal": case_2,
    "gpu_with_exchange": gpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name in options.only:
        found = BENCHMARKS[name](options.learners, options.seconds)
        figures |= found
        if not options.json:
            print(*(f"{key:<24}{value:10.4g}" for key, value in found.items()), sep="\n", flush=True)
    if options.json:
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ddp"]:
        ddp_main(*map(int, sys.argv[2:5]), float(sys.argv[5]), sys.argv[6])
    else:
        main()
