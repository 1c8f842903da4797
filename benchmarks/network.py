"""The network lab: worker processes on this machine, each behind its own link of a given rate.

Every host is a network namespace with one worker or more, real ``dask worker`` processes. A bridge
joins the namespaces, as a switch joins machines::

    with NetworkLab(workers=12, rate="100mbit") as lab:
        before = lab.traffic()
        train(..., workers=lab.workers)   # with the leader on lab.free
        print(lab.traffic().sent - before.sent)
        lab.limit(3, "10mbit")            # one link becomes slower
        lab.stop(4)                       # this worker answers no messages
        lab.kill(5)                       # and this one is gone

The kernel's token bucket (``tc tbf``) limits a link in both directions, with a queue like that of a
switch port. When many workers send to one at once, their packets wait in its queue, and packets
that find it full are dropped, as in a real incast. Scheduler and client run in this process, on a
link without a limit.

Each host has process ids of its own, too, so that workers of two hosts cannot read each other's
memory through ``/proc``, as they could not on two machines.

Namespaces need root on Linux with the programs of iproute2 and util-linux; `unavailable` returns
the reason if they cannot be used. Addresses are from 198.18.0.0/15, which is reserved for such
tests and not routed elsewhere; the namespaces have no route to the outside.

Nothing outlives the block, however it ends, and nothing needs to be cleaned up after a kill. Bridge
and links are in namespaces, which the kernel removes with the last process in them. These processes
exit, and kill their workers, when the pipe from this process is closed.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import psutil
from distributed import Client, LocalCluster
from numpy.typing import ArrayLike, NDArray

from benchmarks.lab import Kind, Throttle
from benchmarks.nursery import Nursery, nursery

#: Programs that must be installed, and their Debian packages.
_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}

#: Tries all that the lab needs from the kernel, in a namespace that ends with the shell.
_PROBE = """
ip link add bridge type bridge &&
ip link add one type veth peer name other &&
tc qdisc add dev one root tbf rate 1mbit burst 5kb limit 10kb
"""
_PROBE_DELAY = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"

_UNSHARE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

#: Bytes of a full packet on the wire: no bucket may be smaller.
_PACKET = 1514


@functools.cache
def unavailable(delay: bool = False) -> str | None:
    """Return why a network lab cannot run here, or None if it can.

    Parameters
    ----------
    delay
        Whether links should also have an additional latency.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "The network lab needs root on Linux."
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        packages = " ".join(sorted({_PROGRAMS[program] for program in missing}))
        return f"The network lab needs {' and '.join(missing)}: install {packages}."
    probes = {"namespaces, bridges, veth pairs and tbf queues": _PROBE}
    if delay:
        probes["netem queues (leave out 'delay' to do without)"] = _PROBE_DELAY
    for what, probe in probes.items():
        tried = subprocess.run([*_UNSHARE, "sh", "-c", probe], capture_output=True, text=True)
        if tried.returncode:
            return f"The network lab needs a kernel with {what}: {tried.stderr.strip()}"
    return None


def bits_per_second(rate: str) -> float:
    """Read a rate as ``tc`` writes it: a number and ``kbit``, ``mbit`` or ``gbit``.

    Examples
    --------
    >>> bits_per_second("100mbit")
    100000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or not float(match[1]):
        raise ValueError(f"Argument 'rate' must be like '100mbit' or '1gbit', it is {rate!r}.")
    return float(match[1]) * _UNITS[match[2]]


class Traffic(NamedTuple):
    """Bytes that the links have carried so far, headers included.

    Parameters
    ----------
    sent, received : ndarray of int, shape (hosts + 1,)
        Bytes of each host; that of the free worker comes last.
    """

    sent: NDArray[np.int64]
    received: NDArray[np.int64]


class NetworkLab:
    """A cluster whose workers have links of given rates, for as long as a ``with`` block lasts.

    Parameters
    ----------
    workers
        Number of workers with limited links; the lab has one more.
    per_host
        How many of them share a host and its link; a divisor of their number.
    rate
        Rate of every worker's link in each direction, such as ``"100mbit"`` or ``"1gbit"``; None
        means no limit.
    free_rate
        Rate of the link of the additional worker, which the leader of a training runs on. No limit
        by default; pass the workers' rate if the leader's link should count.
    delay
        Seconds that each link adds to every packet; two workers are twice that apart. Needs a
        kernel with netem.
    buffer
        Bytes that can wait at either end of a link before packets are dropped.
    share
        Share of a core for each worker, see `benchmarks.lab.Throttle`; not limited by default.
    kind
        How to hold workers to their shares; see `benchmarks.lab.Throttle`.

    Attributes
    ----------
    client
        Client of the cluster.
    workers
        Addresses of the workers with limited links, host by host.
    free
        Address of the additional worker, for a leader, whose processor time is not limited.
    pids
        Process ids of the workers, as this process sees them; that of the free one comes last.

    Raises
    ------
    OSError
        If a network lab cannot run here, see `unavailable`.

    Examples
    --------
    ::

        with NetworkLab(workers=4, rate="100mbit") as lab:
            lab.client.submit(sum, [1, 2], workers=[lab.workers[0]]).result()
    """

    client: Client
    workers: list[str]
    free: str
    pids: list[int]

    def __init__(
        self,
        workers: int,
        rate: str | None = "100mbit",
        *,
        per_host: int = 1,
        free_rate: str | None = None,
        delay: float | None = None,
        buffer: int = 512 * 1024,
        share: float = math.inf,
        kind: Kind | None = None,
    ) -> None:
        if not 1 <= workers <= 200:
            raise ValueError(f"A network lab has 1 to 200 workers, not {workers}.")
        if per_host < 1 or workers % per_host:
            raise ValueError(f"Hosts of {per_host} workers cannot have {workers} together.")
        for asked in (rate, free_rate):
            if asked is not None:
                bits_per_second(asked)
        self._rates = [rate] * (workers // per_host) + [free_rate]
        # The numbers of the workers on each host.
        self._on_host = [
            range(first, min(first + per_host, workers)) for first in range(0, workers, per_host)
        ] + [range(workers, workers + 1)]
        self._delay = delay
        self._buffer = buffer
        self._share = share
        self._kind = kind

    def __enter__(self) -> Self:
        if reason := unavailable(delay=bool(self._delay)):
            raise OSError(reason)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="network-lab-")))
            self._hub = stack.enter_context(_namespace(folder, "hub"))
            subnet = stack.enter_context(self._network())
            cluster: Any = stack.enter_context(
                LocalCluster(
                    n_workers=0,
                    host=f"{subnet}.1",
                    dashboard_address=None,
                    processes=True,  # the scheduler stays here; comms cross processes
                )
            )
            self.client = stack.enter_context(Client(cluster))
            self._scheduler = cluster.scheduler
            # All before the first is needed, because they spend seconds on imports.
            self._holders = [
                stack.enter_context(_namespace(folder, f"host-{i}"))
                for i in range(len(self._on_host))
            ]
            self._arguments = [
                _arguments(cluster.scheduler_address, f"{subnet}.{10 + i}", w, folder)
                for i, there in enumerate(self._on_host)
                for w in there
            ]
            for i, holder in enumerate(self._holders):
                self._link(i, holder, f"{subnet}.{10 + i}")
            self.pids = [
                pid
                for holder, there in zip(self._holders, self._on_host)
                for pid in holder.start([self._arguments[w] for w in there])
            ]
            *self.workers, self.free = self._wait_for_workers()
            self._dead: set[int] = set()
            # This ends before the cluster closes, because slow workers would close slowly.
            unlimited = dict.fromkeys(self.pids[:-1], math.inf)
            self._throttle = stack.enter_context(Throttle(unlimited, kind=self._kind))
            self._shares = np.full(len(self.workers), math.inf)
            self.set_shares(self._share)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.__exit__(*error)

    def traffic(self) -> Traffic:
        """Return the bytes that each host's link has carried, from the bridge's interfaces."""
        links = {
            link["ifname"]: link["stats64"]
            for link in json.loads(_run_in(self._hub, "ip -json -stats link show"))
        }
        # What a worker sends is what the bridge receives.
        sent = [links[f"worker{i}"]["rx"]["bytes"] for i in range(len(self._rates))]
        received = [links[f"worker{i}"]["tx"]["bytes"] for i in range(len(self._rates))]
        return Traffic(np.array(sent), np.array(received))

    def limit(self, i: int, rate: str | None) -> None:
        """Change the rate of the link of host ``i``, in both directions; -1 is the free one.

        Packets in its queues are dropped, and TCP sends them again.
        """
        if rate is not None:
            bits_per_second(rate)
        i = range(len(self._rates))[i]
        for namespace, device in ((self._hub, f"worker{i}"), (self._holders[i], "eth0")):
            if self._rates[i] is not None or self._delay:
                _run_in(namespace, f"tc qdisc del dev {device} root")
            self._shape(namespace, device, rate)
        self._rates[i] = rate

    def set_shares(self, shares: ArrayLike) -> None:
        """Change the workers' shares of a core.

        Parameters
        ----------
        shares : array_like, broadcast to shape (workers,)
            0 stops a worker; ``math.inf`` does not limit it.
        """
        self._shares = np.broadcast_to(np.asarray(shares, dtype=float), len(self.workers)).copy()
        for i, share in enumerate(self._shares.tolist()):
            if i not in self._dead:
                self._throttle.set_share(self.pids[i], share)

    def stop(self, i: int) -> None:
        """Stop worker ``i`` (SIGSTOP): it answers no messages, and the scheduler gets no notice."""
        self._throttle.set_share(self.pids[i], 0.0)

    def resume(self, i: int) -> None:
        """Continue worker ``i`` after `stop`."""
        self._throttle.set_share(self.pids[i], float(self._shares[i]))

    def kill(self, i: int) -> None:
        """Kill worker ``i`` permanently (SIGKILL), and wait until the scheduler has removed it."""
        os.kill(self.pids[i], signal.SIGKILL)
        self._dead.add(i)
        while self.workers[i] in self._scheduler.workers:
            time.sleep(0.01)

    def start(self, i: int) -> None:
        """Start a new worker in the place of worker ``i``, which was killed; do not wait for it."""
        host = next(h for h, there in enumerate(self._on_host) if i in there)
        (self.pids[i],) = self._holders[host].start([self._arguments[i]])
        self._dead.discard(i)

    def cut_off(self, i: int) -> None:
        """Drop all packets from and to host ``i``, without a notice to either end."""
        _run_in(self._hub, f"ip link set worker{i} down")

    def reconnect(self, i: int) -> None:
        """Let packets pass again after `cut_off`."""
        _run_in(self._hub, f"ip link set worker{i} up")

    # -- links ---------------------------------------------------------------------------------

    @contextmanager
    def _network(self) -> Iterator[str]:
        """Create the bridge and this process's link to it; yield the prefix of the addresses."""
        for number in range(256):
            name = f"dask-coded-{number}"
            try:
                _run(f"ip link add {name} type veth peer name owner netns {self._hub.pid}")
            except OSError as error:
                if "exists" not in str(error) or number == 255:
                    raise
            else:
                break  # no other lab has this name
        try:
            # Without a forward delay a bridge forwards packets from the start.
            _run_in(self._hub, "ip link add bridge type bridge forward_delay 0 mcast_snooping 0")
            _run_in(self._hub, "ip link set bridge up")
            _run_in(self._hub, "ip link set owner master bridge up")
            _run(f"ip address add 198.18.{number}.1/24 dev {name}")
            _run(f"ip link set {name} up")
            yield f"198.18.{number}"
        finally:
            # The kernel would remove it with the bridge's namespace, but only some time later.
            _run(f"ip link delete {name}")

    def _link(self, i: int, holder: Nursery, address: str) -> None:
        """Join a worker's namespace to the bridge."""
        name = f"worker{i}"
        _run_in(self._hub, f"ip link add {name} type veth peer name eth0 netns {holder.pid}")
        _run_in(self._hub, f"ip link set {name} master bridge up")
        _run_in(holder, f"ip address add {address}/24 dev eth0")
        _run_in(holder, "ip link set eth0 up")
        _run_in(holder, "ip link set lo up")
        self._shape(self._hub, name, self._rates[i])
        self._shape(holder, "eth0", self._rates[i])

    def _shape(self, namespace: Nursery, device: str, rate: str | None) -> None:
        """Limit one end of a link: the packets that leave through a device."""
        where = "root"
        if self._delay:
            microseconds = round(self._delay * 1e6)
            netem = f"handle 1: netem delay {microseconds}us limit 100000"
            _run_in(namespace, f"tc qdisc add dev {device} root {netem}")
            where = "parent 1:1"
        if rate is not None:
            # A burst lasts half a millisecond, so that small messages are limited like large ones.
            burst = max(3 * _PACKET, round(bits_per_second(rate) / 8 * 5e-4))
            # The kernel would cut segments larger than a burst into single packets, each of which
            # costs as much as a segment. With many workers that took longer than the transfers.
            _run_in(namespace, f"ip link set {device} gso_max_size {min(burst * 3 // 4, 65536)}")
            tbf = f"tbf rate {rate} burst {burst} limit {self._buffer}"
            _run_in(namespace, f"tc qdisc add dev {device} {where} {tbf}")

    def _wait_for_workers(self, timeout: float = 90.0) -> list[str]:
        """Wait for the workers, and return their addresses in the order of their links."""
        due = time.monotonic() + timeout
        while len(self._scheduler.workers) < len(self.pids):
            if time.monotonic() > due or not all(map(_runs, self.pids)):
                raise OSError(f"Not all workers started. {self._last_words()}")
            time.sleep(0.05)
        by_number = {int(state.name): state.address for state in self._scheduler.workers.values()}
        return [by_number[i] for i in range(len(self.pids))]

    def _last_words(self) -> str:
        there = {int(state.name) for state in self._scheduler.workers.values()}
        for i, holder in enumerate(self._holders):
            if not there.issuperset(self._on_host[i]):
                return f"Host {i} wrote: {holder.log.read_text(errors='replace')[-1000:]}"
        return ""


def _namespace(folder: Path, name: str) -> AbstractContextManager[Nursery]:
    """Create a namespace; it lasts as long as the nursery in it."""
    return nursery(folder / f"{name}.log", _UNSHARE)


def _run_in(namespace: Nursery, command: str) -> str:
    """Run a short system command in a namespace, and return its output."""
    return _run(f"nsenter --net=/proc/{namespace.pid}/ns/net {command}")


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"Command {command!r} failed: {done.stderr.strip()}")
    return done.stdout


def _arguments(scheduler: str, host: str, name: int, folder: Path) -> list[str]:
    options = f"--host {host} --name {name} --nthreads 1 --memory-limit 0 --no-nanny --no-dashboard"
    return [
        *(scheduler, *options.split()),
        *("--local-directory", str(folder), "--death-timeout", "120"),
    ]
