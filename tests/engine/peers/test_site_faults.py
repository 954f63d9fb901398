"""What goes wrong at one site, or on one link, does not slow the others: padded steps, so that two cores suffice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hospitals import NAMES, Hospitals, fixture_hospitals, fixture_made_data, until  # noqa: F401

from adp2sgd.privacy.ledger import read as read_ledger

PATH = {"graph": "edges", "edges": [[0, 1], [1, 2], [2, 3]]}
PRIVATE = {"mode": "private", "epsilon": 3.0, "delta": 1e-4, "headroom": 2.0}
VICTIM = "va"
SURVIVORS = NAMES[:3]


def killed(made: Hospitals, pause_s: float) -> None:
    made.start()
    until(lambda: made.steps(VICTIM) >= 5, 150, made.told)
    made.kill(VICTIM)
    until(lambda: VICTIM in made.codes(), 10)
    time.sleep(pause_s)
    made.start(VICTIM)
    made.wait(timeout_s=240)
    assert made.result(VICTIM).learners[3].restarts == 1


def cut(made: Hospitals, pause_s: float) -> None:
    assert made.proxy is not None
    made.start()
    until(lambda: made.linked("switzerland", VICTIM) and made.steps(VICTIM) >= 3, 150, made.told)
    made.proxy.cut()
    assert made.proxy.cuts > 0
    until(lambda: not made.linked("switzerland", VICTIM), 30, made.told)
    time.sleep(pause_s)
    before = made.steps(VICTIM)
    made.proxy.mend()
    until(lambda: made.linked("switzerland", VICTIM), 150, made.told)
    assert made.steps(VICTIM) >= before > 3, "it trained on"
    made.wait(timeout_s=240)


def slow(made: Hospitals, pause_s: float) -> None:
    made.start()
    made.wait(timeout_s=240)
    steps = [made.result("cleveland").learners[number].steps for number in range(4)]
    assert steps[3] < min(steps[:3]) / 4
    assert made.result(VICTIM).learners[3].exchanges > 0


def late(made: Hospitals, pause_s: float) -> None:
    made.start(*SURVIVORS)
    until(lambda: made.steps("cleveland") >= 10, 150, made.told)
    made.start(VICTIM)
    made.wait(timeout_s=240)
    run = made.result(VICTIM)
    assert any("and copied a model" in note for note in run.notes), run.notes
    assert run.learners[3].steps > 0


FAULTS = {each.__name__: each for each in (killed, cut, slow, late)}


def suffers(
    hospitals: Callable[..., Hospitals], fault: str, *, step_s: float, epochs: float, pause_s: float, **run: object
) -> Hospitals:
    speeds: dict[str, object] = {"step_s": step_s, "pad": True}
    if fault == "slow":
        speeds |= {"kind": "list", "values": [1, 1, 1, 9]}
    if fault == "cut":
        run |= {"topology": PATH}
    # The only way between switzerland and va is the proxy: nobody dials switzerland, and va's address is the proxy's.
    made = hospitals(proxied=VICTIM, outward=("switzerland",), speeds=speeds, epochs=epochs, **run)
    FAULTS[fault](made, pause_s)
    assert made.apart() < 5e-3
    for name in SURVIVORS:
        assert made.rate(name) >= 0.95 / step_s, f"{name}: {made.rate(name):.2f} steps/s"
        assert sum(each.steps for each in made.result(name).learners) == made.result(name).global_steps
    return made


@pytest.mark.integration
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_one_site_slows_no_other_and_the_run_ends_well(
    hospitals: Callable[..., Hospitals], fault: str
) -> None:
    suffers(hospitals, fault, step_s=0.2, epochs=8, pause_s=1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_long_private_runs_with_a_fault(hospitals: Callable[..., Hospitals], fault: str) -> None:
    """A link cut for 30 s, a site away for 30 s; steps of 0.3 s; every ledger is right."""
    made = suffers(hospitals, fault, step_s=0.3, epochs=20, pause_s=30.0, privacy=PRIVATE)
    for number, name in enumerate(NAMES):
        run = made.result(name)
        account = read_ledger(made.authority.site_folder(name) / "ledger" / f"heart-{name}.jsonl")
        assert account.policy is not None
        counted = sum(count for _, count in account.spent().parts)
        assert run.guarantee is not None
        assert run.learners[number].steps <= counted == run.guarantee.steps
        assert run.guarantee.epsilon_spent == pytest.approx(account.policy.spent(account.spent()).epsilon)
        assert run.guarantee.epsilon_spent <= run.guarantee.epsilon <= 3.0
