"""What a normal costs: the keystream's noise beside torch's and numpy's generators, none of which is cryptographic.

    python benchmarks/noise.py [--size 11173962] [--threads 2] [--repeat 5] [--json]

Nanoseconds per normal, best of the repeats, taken in turns in one run; ratios to `torch.randn float32`.
The default size is a ResNet-18.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from adp2sgd.randomness.noise import PIECE, NoiseSource


def candidates(size: int) -> dict[str, Callable[[], object]]:
    """Each puts `size` normals into memory, or adds them to a vector that is there."""
    source, generator = NoiseSource.fresh(), np.random.default_rng()
    single, double = torch.zeros(size), torch.zeros(size, dtype=torch.float64)
    return {
        "NoiseSource.add_normal to float32": lambda: source.add_normal(single, 2.0),
        "NoiseSource.add_normal to float64": lambda: source.add_normal(double, 2.0),
        "NoiseSource.normal": lambda: source.normal(size),
        "torch.randn float32": lambda: torch.randn(size),
        "torch.randn float64": lambda: torch.randn(size, dtype=torch.float64),
        "numpy standard_normal float64": lambda: generator.standard_normal(size),
        "AES-256-CTR keystream alone": keystream(Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))), size),
        "ChaCha20 keystream alone": keystream(Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), None), size),
    }


def keystream(cipher: Cipher[Any], size: int) -> Callable[[], object]:
    """8 bytes per normal, in the pieces that `NoiseSource` takes."""
    encryptor, zeros, out = cipher.encryptor(), bytes(8 * PIECE), bytearray(8 * PIECE + 64)

    def run() -> None:
        for _ in range(0, size, PIECE):
            encryptor.update_into(zeros, out)

    return run


def measure(size: int, repeat: int) -> dict[str, float]:
    """Best nanoseconds per normal of each candidate."""
    best: dict[str, float] = {}
    functions = candidates(size)
    for _ in range(repeat):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            best[name] = min(best.get(name, float("inf")), (time.perf_counter() - began) / size * 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=11_173_962)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    best = measure(options.size, options.repeat)
    base = best["torch.randn float32"]
    rows = [
        {"name": name, "ns_per_normal": ns, "seconds": ns * options.size / 1e9, "ratio": ns / base}
        for name, ns in best.items()
    ]
    if options.json:
        print(json.dumps({"size": options.size, "threads": options.threads, "rows": rows}, indent=2))
        return
    print(f"{options.size} normals, {options.threads} threads")
    for row in rows:
        print(f"{row['name']:36} {row['ns_per_normal']:7.2f} ns {row['seconds']:7.3f} s {row['ratio']:6.2f} ×")


if __name__ == "__main__":
    main()
