"""Who gets in: certificates, names and runs that are refused, and what hostile connections can do (nothing)."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp2sgd.errors import ConfigError, RefusedError
from adp2sgd.exchange import listen, neighbours, wire
from adp2sgd.exchange.handshake import HELLO, WELCOME
from adp2sgd.exchange.listen import Limits
from certificates import Authority, Certified, consortium, identity, member, site
from sites import Site, close_all, dials, wait_linked
from worlds import wait_for

SAY_S = 5.0  # within which both ends say why


@pytest.fixture
def far() -> Iterator[Site]:
    """A healthy site that listens and knows site 0."""
    made = Site(1)
    made.know((0, None))
    yield made
    made.close()


def refused(near: Site, far: Site) -> tuple[list[str], list[str]]:
    """What each end says once both have refused or been refused."""
    wait_for(lambda: bool(near.reasons("refused") and far.reasons("refused")), SAY_S)
    assert not near.linked
    assert not far.linked
    assert not near.reasons("up")
    assert not far.reasons("up")
    assert far.exchange.learner.progress.total == 0
    return near.reasons("refused"), far.reasons("refused")


def names() -> list[str]:
    return [site(k) for k in range(3)]


def expired() -> Certified:
    return Certified(site(0), consortium(), names(), certificate=consortium().issue(site(0), days=-1))


def foreign() -> Certified:
    """Trusts the consortium, and is certified by another authority."""
    return Certified(site(0), consortium(), names(), certificate=Authority("elsewhere").issue(site(0)))


def other_consortium() -> Certified:
    return Certified(site(0), Authority("elsewhere"), names())


def unknown() -> Certified:
    return Certified("stranger", consortium(), [*names(), "stranger"])


def other_run() -> Certified:
    return identity(0, hello={"run": "another digest"})


@pytest.mark.parametrize(
    ("who", "near_says", "far_says"),
    [
        (expired, "expired", "certificate has expired"),
        (foreign, "does not know the authority", "unable to get local issuer certificate"),
        (other_consortium, "certificate is refused", "does not know the authority"),
        (unknown, "stranger is not in the roster", "stranger is not in the roster"),
        (other_run, "run differs", "run differs"),
    ],
)
def test_who_does_not_belong_is_refused_and_both_ends_say_why(
    far: Site, who: Callable[[], Certified], near_says: str, far_says: str
) -> None:
    """The dialler is the odd one. Under TLS 1.3 it sees a good handshake first, and must still learn why."""
    near = Site(0, who(), listen=False)
    try:
        near.know((1, far.address))
        here, there = refused(near, far)
        assert any(near_says in reason for reason in here)
        assert any(far_says in reason for reason in there)
    finally:
        near.close()


@pytest.mark.parametrize(
    ("who", "near_says", "far_says"),
    [
        (expired, "certificate has expired", "expired"),
        (other_consortium, "certificate is refused", "does not know the authority"),
        (unknown, "stranger is not in the roster", "stranger is not in the roster"),
    ],
)
def test_a_listener_that_does_not_belong_is_refused_too(
    who: Callable[[], Certified], near_says: str, far_says: str
) -> None:
    far, near = Site(0, who()), Site(1, listen=False)
    try:
        dials(near, far)
        here, there = refused(near, far)
        assert any(near_says in reason for reason in here)
        assert any(far_says in reason for reason in there)
    finally:
        close_all([near, far])


def test_an_address_that_another_member_answers_is_refused(far: Site) -> None:
    """A member with a good certificate cannot stand in for another one."""
    near = Site(0, listen=False)
    try:
        far.know((0, None), (2, None))
        near.know((2, far.address), (1, None))
        here, there = refused(near, far)
        assert any("address of site site-2 is answered by site site-1" in reason for reason in here)
        assert any("refuses this site" in reason for reason in there)
    finally:
        near.close()


def test_a_site_that_leaves_the_roster_loses_its_link_and_is_told(far: Site) -> None:
    near = Site(0, listen=False)
    try:
        near.know((1, far.address))
        wait_linked(near, far)
        far.carrier.verify_links()
        assert far.linked == {0}
        far.identity.roster.discard(site(0))
        far.carrier.verify_links()
        wait_for(lambda: bool(near.reasons("down") and far.reasons("down")), SAY_S)
        assert "site-0 is not in the roster" in near.reasons("down")[0]
        assert "site-0 is not in the roster" in far.reasons("down")[0]
        time.sleep(0.7)  # it dials again
        assert not near.linked
        assert "not in the roster" in near.carrier.status()[0].trouble
        far.identity.roster.add(site(0))
        wait_linked(near, far)  # until it is a member again
    finally:
        near.close()


def test_a_renewed_certificate_is_used_without_a_restart(far: Site) -> None:
    near = Site(0, expired(), listen=False)
    try:
        near.know((1, far.address))
        refused(near, far)
        near.identity.certificate = member(site(0))
        wait_linked(near, far)
    finally:
        near.close()


class Stranger:
    """A connection with a member's certificate that says whatever the test likes."""

    def __init__(self, far: Site, *, meets: bool = True) -> None:
        plain = socket.create_connection(far.address)
        self.tls = identity(0).client_context().wrap_socket(plain)
        self.tls.settimeout(SAY_S)
        if meets:
            self.say({"kind": HELLO, "session": "s", "hello": identity(0).hello()})
            self.say({"kind": WELCOME})
            assert [self.hear()["kind"] for _ in range(2)] == [HELLO, WELCOME]
            wait_for(lambda: far.linked == {0})

    def say(self, header: dict[str, object]) -> None:
        self.tls.sendall(wire.frame(header))

    def hear(self) -> dict[str, object]:
        header, _ = wire.lengths(self._read(wire.HEAD.size))
        return wire.parse(self._read(header))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.tls.recv(count - len(data))
            assert more, "closed without a word"
            data += more
        return data


def message(kind: str, **changes: object) -> bytes:
    fields = {"kind": kind, "sender": 0, "receiver": 1, "initiator": 0, "number": 1, "progress": []}
    return wire.frame({**fields, **changes})


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\xff" * 64, "no site of this version sends"),
        (wire.HEAD.pack(0, 0), "no site of this version sends"),
        (wire.HEAD.pack(20, wire.CHUNK + 1) + b"x" * 20, "no site of this version sends"),
        (wire.HEAD.pack(9, 0) + b"not JSON!", "not JSON"),
        (wire.HEAD.pack(200_000, 0) + b"[" * 200_000, "not JSON"),
        (wire.HEAD.pack(2, 0) + b"[]", "without a kind"),
        (wire.frame({"kind": "note"}, 4) + b"body", "a body in a frame"),
        (wire.frame({"kind": "chunk", "stream": 1, "offset": 0}), "without numbers"),
        (message("Request", sender=2), "on the link of 0"),
        (message("Request", receiver=0), "on the link of 0"),
        (message("Request", number=-1), "malformed message"),
        (message("Request", number=True), "malformed message"),
        (message("Request", progress=[[1, 2, 3]]), "malformed step counts"),
        (message("Commit", snapshot={"length": 3}), "a model in a Commit"),
    ],
)
def test_what_no_site_would_send_ends_the_link_with_a_reason(far: Site, said: bytes, reason: str) -> None:
    stranger = Stranger(far)
    stranger.tls.sendall(said)
    wait_for(lambda: not far.linked)
    assert reason in far.reasons("down")[0]
    told = stranger.hear()
    assert told["kind"] == "REFUSED"
    assert reason in str(told["reason"])
    stranger.tls.close()


def test_a_snapshot_that_nobody_asked_for_is_dropped_without_taking_memory(far: Site) -> None:
    stranger, state = Stranger(far), far.learner.state.clone()
    numbers = state.numpy().tobytes()
    for kind in ("Answer", "Offer", "Model"):
        shape = {"length": 3, "dtype": "float64", "stream": 9}
        stranger.tls.sendall(message(kind, snapshot=shape))
        stranger.tls.sendall(wire.frame({"kind": "chunk", "stream": 9, "offset": 0}, len(numbers)) + numbers)
    stranger.tls.sendall(message("Commit"))
    wait_for(lambda: far.tally.ignored == 1)
    assert far.carrier.neighbours.links[0].reader.dropped == 3
    assert far.carrier._vectors.room == 4
    assert (far.learner.state == state).all()
    stranger.tls.close()


def test_a_snapshot_out_of_place_ends_the_link_and_one_too_long_does_too(far: Site) -> None:
    """A member begins an exchange as it should and then sends parts that do not fit."""
    for offset, count in ((8, 8), (0, 32)):
        stranger = Stranger(far)
        stranger.tls.sendall(message("Request"))
        while stranger.hear()["kind"] != "Accept":
            pass
        stranger.tls.sendall(message("Offer", snapshot={"length": 3, "dtype": "float64", "stream": 1}))
        stranger.tls.sendall(wire.frame({"kind": "chunk", "stream": 1, "offset": offset}, count) + b"\0" * count)
        wait_for(lambda: not far.linked)
        wait_for(lambda: not far.exchange.under_way)
        assert "out of place" in far.reasons("down")[-1]
        assert far.carrier._vectors.room == 4
        stranger.tls.close()
    assert far.tally.completed == 0


def test_whoever_says_nothing_or_no_tls_is_dropped_in_time(far: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "MEET_S", 0.5)
    silent, http = (socket.create_connection(far.address) for _ in range(2))
    http.sendall(b"GET / HTTP/1.1\r\nHost: site\r\n\r\n")
    greeted = Stranger(far, meets=False)  # TLS, and then nothing
    began = time.monotonic()
    for each in (silent, http):
        each.settimeout(3.0)
        while each.recv(1000):
            pass
    assert greeted.hear()["kind"] == HELLO
    assert not greeted.tls.recv(1000)
    assert time.monotonic() - began < 2.5
    wait_for(lambda: not far.carrier.neighbours.listener.limits._pending)
    assert any("does not speak TLS" in reason for reason in far.reasons("refused"))


def test_tls_12_is_refused(far: Site) -> None:
    context = identity(0).client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError), socket.create_connection(far.address) as plain:
        context.wrap_socket(plain)
    wait_for(lambda: any("does not speak TLS 1.3" in reason for reason in far.reasons("refused")))


def test_a_flood_from_one_address_keeps_nobody_else_out(far: Site) -> None:
    flood = []
    for _ in range(100):
        flood.append(socket.create_connection(far.address, source_address=("127.0.0.9", 0)))
    wait_for(lambda: far.carrier.neighbours.listener.limits.turned_away > 50)
    near = Site(0, listen=False)
    try:
        near.know((1, far.address))
        wait_linked(near, far)
    finally:
        near.close()
        for each in flood:
            each.close()


def test_limits_hold_for_one_address_and_for_all_and_end() -> None:
    now = [0.0]
    limits = Limits(lambda: now[0])
    assert [limits.enter("a") for _ in range(20)].count(True) == listen.MOST_PENDING_OF_ONE
    assert [limits.enter(f"b{k}") for k in range(40)].count(True) == listen.MOST_PENDING - listen.MOST_PENDING_OF_ONE
    for _ in range(listen.MOST_PENDING_OF_ONE):
        limits.leave("a")
    entered = 0
    while limits.enter("a"):
        limits.leave("a")
        entered += 1
    assert entered == listen.MOST_IN_WINDOW - listen.MOST_PENDING_OF_ONE
    now[0] = listen.WINDOW_S + 1
    assert limits.enter("a")


def test_an_address_in_use_is_one_clear_error(far: Site) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{far.address[1]}"):
        listen.Listener([far.address], lambda *_: None)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    for parse in (lambda: wire.lengths(data[:8].ljust(8, b"\0")), lambda: wire.decode(wire.parse(data))):
        with contextlib.suppress(RefusedError):
            parse()


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=4))


@given(st.dictionaries(st.sampled_from(["sender", "receiver", "initiator", "number", "progress", "snapshot"]), JSON))
def test_any_json_is_a_message_or_refused(fields: dict[str, object]) -> None:
    for kind in ("Request", "Offer", "Message", "no kind"):
        with contextlib.suppress(RefusedError):
            wire.decode({"kind": kind, **fields})
