"""The source of noise and batch membership: a cryptographic keystream for one learner and one start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Generator, Tensor

from adp2sgd.errors import PrivacyError, RunError

PIECE = 1 << 16  # words per pass on a CPU: its temporaries stay in the cache (benchmarks/noise.py)
DEVICE_PIECE = 1 << 22  # likewise on a GPU: 32 MiB per temporary
GRID_BITS = 16
SPARE = 16  # bytes: the cipher asks for room for one block more than it writes
_ZEROS = bytes(8 * PIECE)
_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class NoiseSource:
    """AES-256 in counter mode; `fresh()` for privacy, `from_seed()` for research (then `seeded` is true).

    Guarantee: two sources from `fresh()` never share output, in whatever process, start or machine they live. A source
    cannot be pickled, copied or used after a fork, so no draw is repeated. It cannot detect a restored snapshot of the
    whole machine: restart the learner after one.
    Normals are 64-bit floating point, not an exact discrete Gaussian. `add_normal` reduces what the least significant
    bits can reveal (Mironov 2012), but this is not a proof: ε is that of real-valued noise.
    Not thread-safe.
    """

    def __init__(self, key: bytes, origin: str, *, seeded: bool) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        # A key serves one stream, so the counter may start at zero.
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self._origin = origin
        self._process = (os.getpid(), _forks)
        self._device_generators: dict[torch.device, Generator] = {}
        self.seeded = seeded

    @classmethod
    def fresh(cls) -> NoiseSource:
        """Keyed with 256 bits of the operating system's entropy, which are stored nowhere else."""
        return cls(secrets.token_bytes(32), "operating-system entropy", seeded=False)

    @classmethod
    def from_seed(cls, seed: int, learner: int | str, purpose: str) -> NoiseSource:
        """The same draws for the same three values. For research only: ε then describes the mechanism, not this run."""
        label = json.dumps(["adp2sgd noise, version 1", seed, learner, purpose])
        return cls(hashlib.sha256(label.encode()).digest(), f"fixed seed {seed} (research only)", seeded=True)

    @property
    def name(self) -> str:
        """The generator of the normals drawn so far, as the result prints it. Never contains the key."""
        return self.name_on(next(iter(self._device_generators), "cpu"))

    def name_on(self, device: torch.device | str) -> str:
        """Where normals on `device` come from, in words."""
        device = torch.device(device)
        normals = f"; normals by the {device.type} generator, 64-bit seed from that keystream"
        return f"AES-256-CTR, {self._origin}{'' if device.type == 'cpu' else normals}"

    def normal(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        """`size` independent N(0, 1) in float64. On a CPU they reach 9.49 σ, on a GPU about 8.5 σ."""
        out = torch.empty(size, dtype=torch.float64, device=device)
        scratch = _Scratch(out)
        with _one_thread():
            for part in out.split(scratch.piece):
                self._fill(part, scratch)
        return out

    @torch.no_grad()
    def add_normal(self, vector: Tensor, scale: float, *, out: Tensor | None = None, divisor: float = 1.0) -> None:
        """Add N(0, scale²) to each element of a vector, in one pass; temporaries stay below 4 MiB on a CPU.

        The noisy values over `divisor` go to `out`, by default in place.

        The sum is taken in float64 and rounded once, onto multiples of a power of two near scale / 2^16. That grid is
        the same for every input, and about 2^36 noise values lead to each of its points, so the last bits of a released
        value do not show which inputs are possible. Rounding a noisy sum is post-processing and costs no privacy. Its
        error is below 2^-16 of the noise.
        """
        if not 0 < scale < math.inf:
            raise PrivacyError(
                f"noise scale = {scale} is no noise; make noise_multiplier and clip_norm positive and finite"
            )
        out = vector if out is None else out
        grid = math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)
        scratch = _Scratch(vector)
        with _one_thread():
            for part, place in zip(vector.split(scratch.piece), out.split(scratch.piece), strict=True):
                noisy, exact = scratch.noisy[: len(part)], scratch.exact[: len(part)].copy_(part)
                self._fill(noisy, scratch)
                place.copy_(noisy.mul_(scale / grid).add_(exact, alpha=1 / grid).round_().mul_(grid / divisor))

    def bernoulli(self, n: int, rate: float) -> Tensor:
        """The indices of a Poisson batch: each of 0 … n-1 on its own with probability `rate`, to within 2^-64."""
        return torch.nonzero(self.members(n, rate)).view(-1)

    def members(self, n: int, rate: float) -> Tensor:
        """Which of 0 … n-1 are in such a batch, as n booleans."""
        if not 0 <= rate <= 1:
            raise PrivacyError(f"sample_rate = {rate} is no probability; lower batch_size to at most the shard's size")
        if rate == 1:
            return torch.ones(n, dtype=torch.bool)
        threshold = int(rate * 2.0**64) - 2**63  # exact: a float times a power of two
        return self._words(n) < threshold

    def below(self, limits: Tensor) -> Tensor:
        """For each of the positive `limits` a whole number from 0 to limit − 1, uniform to within limit · 2^-64."""
        return torch.remainder(self._words(len(limits)), limits)

    def permutation(self, n: int) -> Tensor:
        """A uniform order of 0 … n-1, for the reshuffled batches of paper mode."""
        return torch.argsort(self._words(n))  # two equal 64-bit keys have probability n²/2^65

    def torch_generator(self, device: torch.device | str = "cpu") -> Generator:
        """A generator of torch with a new 64-bit seed, for augmentation. Never for noise on a CPU: it keeps 32 bits."""
        return Generator(device).manual_seed(int(self._words(1).item()))

    def seed_layers(self, device: torch.device) -> None:
        """Reseed torch's own generator, which layers such as dropout draw from. By default learners of one process
        share its state, and on a GPU its seed is public."""
        torch.default_generator.manual_seed(int(self._words(1).item()))
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(self._words(1).item()))

    def _words(self, n: int) -> Tensor:
        """The next n words of the keystream: uniform over all 64-bit integers, signed."""
        buffer = bytearray(8 * n + SPARE)
        self._next_bytes(memoryview(buffer))
        return torch.frombuffer(buffer, dtype=torch.int64)[:n]

    def _next_bytes(self, out: memoryview) -> None:
        """Overwrite all but the last SPARE bytes of `out` with the keystream."""
        if self._process != (os.getpid(), _forks):
            raise RunError(
                "a fork copied this noise source, which would repeat noise; use NoiseSource.fresh() in the child"
            )
        end = len(out) - SPARE
        for start in range(0, end, len(_ZEROS)):
            self._cipher.update_into(memoryview(_ZEROS)[: end - start], out[start:])

    def _fill(self, out: Tensor, scratch: _Scratch) -> None:
        """Overwrite `out`, of at most `scratch.piece` elements, with N(0, 1)."""
        if out.device.type == "cpu":
            self._box_muller(out, scratch)
            return
        if out.device not in self._device_generators:
            self._device_generators[out.device] = self.torch_generator(out.device)
        self._next_bytes(memoryview(bytearray(SPARE)))  # draws nothing, but raises an error in a forked copy
        out.normal_(generator=self._device_generators[out.device])

    def _box_muller(self, out: Tensor, scratch: _Scratch) -> None:
        half = (len(out) + 1) // 2
        self._next_bytes(scratch.bytes[: 16 * half + SPARE])
        radius, angle = scratch.uniform[: 2 * half].copy_(scratch.words[: 2 * half]).view(2, half)
        negative = torch.lt(radius, 0, out=out[:half])
        radius.add_(negative, alpha=2.0**64)  # signed → unsigned; small values keep all their bits
        radius.add_(0.5).mul_(2.0**-64).log_().mul_(-2).sqrt_()  # of at least 2^-65, so never log(0)
        angle.mul_(math.pi * 2.0**-63)
        for function, part in zip((torch.cos, torch.sin), out.split(half), strict=False):
            function(angle[: len(part)], out=part)
            part.mul_(radius[: len(part)])

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RunError(
            "a noise source cannot be copied, pickled or checkpointed; make NoiseSource.fresh() at each start"
        )

    def __repr__(self) -> str:
        return f"NoiseSource({self.name})"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """On pieces this small two threads are not faster, and ten times slower where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Scratch:
    """Temporaries of one call, reused for each piece: new memory for each would triple the time."""

    def __init__(self, like: Tensor) -> None:
        on_cpu = like.device.type == "cpu"
        self.piece = PIECE if on_cpu else DEVICE_PIECE
        size = min(self.piece, like.numel() + 1)
        stream = bytearray(8 * size + SPARE if on_cpu else SPARE)
        self.bytes = memoryview(stream)
        self.words = torch.frombuffer(stream, dtype=torch.int64)
        self.uniform = torch.empty(size if on_cpu else 0, dtype=torch.float64)
        self.noisy = torch.empty(size, dtype=torch.float64, device=like.device)
        self.exact = torch.empty_like(self.noisy)
