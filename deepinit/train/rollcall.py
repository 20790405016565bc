"""The roll call before a start of many processes: who is there, and whether all were started alike.

Process 0 listens at the coordinator's address; every other one says its number and its facts, and waits for the word to
go on. Whoever is missing or different is named, on every process, within the time limit. It needs no jax, and the
address is free again for jax's own service once it is over.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from deepinit.errors import ConfigError
from deepinit.train.cluster import Place

Facts = Mapping[str, Any]
LONGEST = 1 << 22  # bytes of one greeting


class Absent(RuntimeError):
    """A process did not come in time. The message is one line that names it."""


def call(place: Place, facts: Facts, timeout: float, began: float | None = None) -> None:
    """Return on all processes once all have come with equal facts.

    Raises:
      Absent: somebody did not come within `timeout` seconds since `began`.
      ConfigError: facts differ; the line names the first difference and the processes.
    """
    end = deadline(timeout, began, time.monotonic())
    verdict = lead(place, facts, end, timeout) if place.index == 0 else follow(place, facts, end, timeout)
    if verdict.get("absent"):
        raise Absent(verdict["absent"])
    if verdict.get("wrong"):
        raise ConfigError(verdict["wrong"])


def deadline(timeout: float, began: float | None, now: float) -> float:
    """Until when to wait. What the process did before, such as importing, is part of the limit, up to half of it."""
    return now + timeout if began is None else max(began + timeout, now + timeout / 2)


def lead(place: Place, facts: Facts, deadline: float, timeout: float) -> dict[str, str]:
    """What process 0 does: collect everybody, judge, tell everybody."""
    port = int(place.coordinator.rpartition(":")[2])
    came: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    strangers = []
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as e:
            raise ConfigError(f"--coordinator: port {port} cannot be used here: {e.strerror}") from None
        server.listen(place.count)
        while len(came) < place.count - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer, address = server.accept()
            except TimeoutError:
                break
            hello = receive(peer, min(deadline, time.monotonic() + 5))
            if not isinstance(hello, dict) or not isinstance(hello.get("process"), int):
                peer.close()  # nobody of ours
            elif hello["process"] in came or not 0 < hello["process"] < place.count or hello["count"] != place.count:
                strangers.append(
                    f"--process: a process at {address[0]} says that it is process {hello['process']} of "
                    f"{hello['count']}, but {place} "
                    + ("already has one of that number" if hello["process"] in came else "expects others")
                )
                tell(peer, {"wrong": strangers[-1]})
            else:
                came[hello["process"]] = (peer, hello)
    verdict = judge(place, facts, {i: hello for i, (_, hello) in came.items()}, timeout)
    if strangers:
        verdict = {"wrong": strangers[0]}
    for peer, _ in came.values():
        tell(peer, verdict)
    return verdict


def judge(place: Place, facts: Facts, came: Mapping[int, dict[str, Any]], timeout: float) -> dict[str, str]:
    """Nothing where all is well; else what is wrong."""
    if missing := [i for i in range(1, place.count) if i not in came]:
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        several = "process" if len(missing) == 1 else "processes"
        hosts = {hello["host"] for hello in came.values()} | {socket.gethostname()}
        return {
            "absent": f"{several} {shown} of {place.count} did not come to {place.coordinator} within {timeout:g} s; "
            f"{len(came) + 1} came, from {', '.join(sorted(hosts)[:8])}"
        }
    for i in sorted(came):
        theirs = came[i]["facts"]
        for name in [*facts, *(k for k in theirs if k not in facts)]:
            ours, other = (json.loads(json.dumps(f.get(name))) for f in (facts, theirs))
            if ours != other:
                return {"wrong": f"{name}: process 0 has {ours!r}, process {i} on {came[i]['host']} has {other!r}"}
    return {}


def follow(place: Place, facts: Facts, deadline: float, timeout: float) -> dict[str, str]:
    """What every other process does: find process 0, greet it, wait for its word."""
    host, _, port = place.coordinator.rpartition(":")
    hello = {"process": place.index, "count": place.count, "host": socket.gethostname(), "facts": dict(facts)}
    absent = {"absent": f"process 0 of {place.count} was not at {place.coordinator} within {timeout:g} s"}
    while (left := deadline - time.monotonic()) > 0:
        try:
            server = socket.create_connection((host, int(port)), timeout=left)
        except OSError:  # not there yet; or its name is not yet known
            time.sleep(min(0.2, left))
            continue
        with server:
            if not send(server, hello):
                continue
            # process 0 may have started later: its own limit ends after ours
            verdict = receive(server, time.monotonic() + 2 * timeout)
        if isinstance(verdict, dict):
            return verdict
        time.sleep(0.2)  # it went away without a word, as a process does that is being restarted
    return absent


# ---------------------------------------------------------------------------------------------- a line of JSON


def send(peer: socket.socket, message: Any) -> bool:
    """Whether it went out."""
    try:
        peer.settimeout(5)
        peer.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def tell(peer: socket.socket, message: Any) -> None:
    """Send a last message and let the other side hang up first, so that our port is free at once."""
    with peer:
        if send(peer, message):
            receive(peer, time.monotonic() + 5)


def receive(peer: socket.socket, deadline: float) -> Any:
    """One message; None where the other side hung up, said something else, or was too slow."""
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < LONGEST:
            peer.settimeout(max(deadline - time.monotonic(), 0.01))
            piece = peer.recv(1 << 16)
            if not piece:
                return None
            text += piece
        return json.loads(text)
    except (OSError, ValueError):
        return None
