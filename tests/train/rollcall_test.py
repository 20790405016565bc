"""Who came, and whether all were started alike: real sockets, a thread for each process."""

import socket
import threading
import time

import pytest

from deepinit.errors import ConfigError
from deepinit.train import rollcall
from deepinit.train.cluster import Place


def free():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def calls(count, facts=lambda i: {}, timeout=20.0, who=None, delay=lambda i: 0.0):
    """What the call ended with, by process: None where all is well."""
    address, ended = free(), {}

    def call(i):
        time.sleep(delay(i))
        try:
            ended[i] = rollcall.call(Place(address, count, i), facts(i), timeout)
        except (rollcall.Absent, ConfigError) as e:
            ended[i] = e

    threads = [threading.Thread(target=call, args=(i,)) for i in (range(count) if who is None else who)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return ended


def test_all_came_alike():
    assert calls(4, lambda i: {"seed": 1, "betas": (0.9, 0.95)}) == dict.fromkeys(range(4))


def test_the_port_is_free_at_once():
    address = free()
    for _ in range(2):
        threads = [threading.Thread(target=rollcall.call, args=(Place(address, 2, i), {}, 20)) for i in (0, 1)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("", int(address.rpartition(":")[2])))


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_process_is_waited_for(late):
    assert calls(2, delay=lambda i: 1.0 * (i == late)) == {0: None, 1: None}


# case B79
def test_who_did_not_come_is_named_on_all():
    ended = calls(4, timeout=1.0, who=(0, 2))
    for e in ended.values():
        assert isinstance(e, rollcall.Absent)
        assert "processes 1, 3 of 4 did not come" in str(e)


# case B79
def test_the_limit_counts_from_the_start_of_the_command():
    assert rollcall.deadline(20.0, None, now=108.0) == 128.0
    assert rollcall.deadline(20.0, 100.0, now=108.0) == 120.0
    assert rollcall.deadline(6.0, 100.0, now=108.0) == 111.0  # slower to import than to wait: there is time to come


def test_nobody_at_the_coordinator():
    (e,) = calls(2, timeout=0.5, who=(1,)).values()
    assert isinstance(e, rollcall.Absent)
    assert "process 0 of 2 was not at 127.0.0.1" in str(e)


# case B50
def test_another_seed_is_refused_on_all():
    ended = calls(3, lambda i: {"model.d_model": 8, "train.seed": int(i == 2)})
    for e in ended.values():
        assert isinstance(e, ConfigError)
        assert "train.seed: process 0 has 0, process 2 on" in str(e)


def test_two_with_one_number():
    address, ended = free(), []

    def call(i):
        try:
            rollcall.call(Place(address, 3, i), {}, 3.0)
        except (rollcall.Absent, ConfigError) as e:
            ended.append(str(e))

    threads = [threading.Thread(target=call, args=(i,)) for i in (0, 1, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(ended) == 3
    assert all("already has one of that number" in e for e in ended)


def test_a_stranger_is_ignored():
    address, ended = free(), {}
    host, _, port = address.rpartition(":")
    leader = threading.Thread(target=lambda: ended.update({0: rollcall.call(Place(address, 2, 0), {}, 20)}))
    leader.start()
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"", b'{"process": "x"}\n'):
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port)), 1) as s:
                    s.sendall(text)
                break
            except OSError:
                time.sleep(0.02)
    rollcall.call(Place(address, 2, 1), {}, 20)
    leader.join()
    assert ended == {0: None}


def test_a_port_in_use():
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        with pytest.raises(ConfigError, match="cannot be used here: Address already in use"):
            rollcall.call(Place(f"127.0.0.1:{s.getsockname()[1]}", 2, 0), {}, 1)
