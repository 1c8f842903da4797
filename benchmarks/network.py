"""The network lab: worker processes behind links of their own, each as thin as wanted.

Every worker is a real ``dask worker`` process in a network namespace of its own, and all namespaces
are joined by a bridge, as machines are by a switch::

    with NetworkLab(workers=12, rate="100mbit") as lab:
        before = lab.traffic()
        train(..., workers=lab.workers)   # with the leader on lab.free
        print(lab.traffic().sent - before.sent)
        lab.limit(3, "10mbit")            # one link becomes thinner
        lab.stop(4)                       # a worker that answers nobody
        lab.kill(5)                       # and one that is gone

A link is limited in both directions by the kernel's token bucket (``tc tbf``), with a queue like a
switch port's: what many send at once to one waits there, and what finds it full is dropped, as in a
real incast. Scheduler and client live in this process, on a link without a limit.

Namespaces need root on Linux with the programs of iproute2 and util-linux: ask `unavailable` for
the reason why not. Addresses are of 198.18.0.0/15, which is set aside for such tests and leads
nowhere else; the namespaces have no way out.

Nothing outlives the block, however it ends, and there is nothing to tidy up after a kill: bridge
and links live in namespaces, which the kernel clears away with the last process in them, and those
processes end, and kill their workers, when the pipe from this process is closed.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import psutil
from distributed import Client, LocalCluster
from numpy.typing import ArrayLike, NDArray

from benchmarks.lab import Kind, Throttle

#: What must be installed, and the Debian package that has it.
_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}

#: Everything that the lab wants of the kernel, tried out in a namespace that ends with the shell.
_PROBE = """
ip link add bridge type bridge &&
ip link add one type veth peer name other &&
tc qdisc add dev one root tbf rate 1mbit burst 5kb limit 10kb
"""
_PROBE_DELAY = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"

# Holds a namespace open, and a worker in it once it is told to go on: up to the end of its standard
# input, which comes when its owner ends, be it by SIGKILL.
_HOLDER = """
import subprocess, sys
print("ready", flush=True)
if sys.stdin.readline():
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    print(process.pid, flush=True)
    sys.stdin.read()
    process.kill()
    process.wait()
"""

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

#: Bytes of a full packet on the wire: no bucket may be smaller.
_PACKET = 1514


@functools.cache
def unavailable(delay: bool = False) -> str | None:
    """Say why there can be no network lab here; None if there can.

    Parameters
    ----------
    delay
        Whether links are to have a latency of their own, too.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "The network lab needs root on Linux."
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        packages = " ".join(sorted({_PROGRAMS[program] for program in missing}))
        return f"The network lab needs {' and '.join(missing)}: install {packages}."
    probes = {"namespaces, bridges, veth pairs and tbf queues": _PROBE}
    if delay:
        probes["netem queues, or leave out 'delay',"] = _PROBE_DELAY
    for what, probe in probes.items():
        tried = subprocess.run(
            ["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True
        )
        if tried.returncode:
            return f"The network lab needs a kernel with {what} here: {tried.stderr.strip()}"
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
    """Bytes that went over the links so far, headers included.

    Parameters
    ----------
    sent, received : ndarray of int, shape (workers + 1,)
        By each worker; the last is the free one.
    """

    sent: NDArray[np.int64]
    received: NDArray[np.int64]


class NetworkLab:
    """A cluster whose workers have links of given rates, for as long as a ``with`` block lasts.

    Parameters
    ----------
    workers
        How many have limited links; there is one more.
    rate
        Of every worker's link, in each direction: ``"100mbit"``, ``"1gbit"``. None: no limit.
    free_rate
        Of the link of the one more, which the leader of a training lives on. Without a limit by
        default; give it the workers' rate where the master's link is to count.
    delay
        Seconds that each link adds to every packet, so that workers are twice as many apart. Needs
        a kernel with netem.
    buffer
        Bytes that wait at either end of a link before packets are dropped.
    share
        Of a core for each worker, see `benchmarks.lab.Throttle`; not limited by default.
    kind
        How to hold workers to their shares; see `benchmarks.lab.Throttle`.

    Attributes
    ----------
    client
        Of the cluster.
    workers
        Addresses of the workers with limited links.
    free
        Address of one more worker, free for a leader, with all the processor that it can get.

    Raises
    ------
    OSError
        If there can be no network lab here, see `unavailable`.

    Examples
    --------
    ::

        with NetworkLab(workers=4, rate="100mbit") as lab:
            lab.client.submit(sum, [1, 2], workers=[lab.workers[0]]).result()
    """

    client: Client
    workers: list[str]
    free: str

    def __init__(
        self,
        workers: int,
        rate: str | None = "100mbit",
        *,
        free_rate: str | None = None,
        delay: float | None = None,
        buffer: int = 512 * 1024,
        share: float = math.inf,
        kind: Kind | None = None,
    ) -> None:
        if not 1 <= workers <= 200:
            raise ValueError(f"A network lab has 1 to 200 workers, not {workers}.")
        for asked in (rate, free_rate):
            if asked is not None:
                bits_per_second(asked)
        self._rates = [rate] * workers + [free_rate]
        self._delay = delay
        self._buffer = buffer
        self._share = share
        self._kind = kind

    def __enter__(self) -> Self:
        if reason := unavailable(delay=bool(self._delay)):
            raise OSError(reason)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="network-lab-")))
            self._hub = stack.enter_context(_namespace([], folder / "hub.log"))
            subnet = stack.enter_context(self._network())
            cluster: Any = stack.enter_context(
                LocalCluster(
                    n_workers=0,
                    host=f"{subnet}.1",
                    dashboard_address=None,
                    processes=True,  # with scheduler here, and comms that cross processes
                )
            )
            self.client = stack.enter_context(Client(cluster))
            self._scheduler = cluster.scheduler
            # All at once: most of the time until they are there is spent on imports.
            self._holders = [
                stack.enter_context(
                    _namespace(
                        _worker_command(cluster.scheduler_address, f"{subnet}.{10 + i}", i, folder),
                        folder / f"worker-{i}.log",
                    )
                )
                for i in range(len(self._rates))
            ]
            for i, holder in enumerate(self._holders):
                self._link(i, holder, f"{subnet}.{10 + i}")
            self._pids = [holder.start() for holder in self._holders]
            *self.workers, self.free = self._wait_for_workers()
            self._dead: set[int] = set()
            # Left before the cluster is closed: slow workers would be slow to end.
            unlimited = dict.fromkeys(self._pids[:-1], math.inf)
            self._throttle = stack.enter_context(Throttle(unlimited, kind=self._kind))
            self._shares = np.full(len(self.workers), math.inf)
            self.set_shares(self._share)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.__exit__(*error)

    def traffic(self) -> Traffic:
        """Bytes that each link has carried until now, counted by the bridge's interfaces."""
        links = {
            link["ifname"]: link["stats64"]
            for link in json.loads(self._hub.run("ip -json -stats link show"))
        }
        # What a worker sends is what the bridge receives.
        sent = [links[f"worker{i}"]["rx"]["bytes"] for i in range(len(self._rates))]
        received = [links[f"worker{i}"]["tx"]["bytes"] for i in range(len(self._rates))]
        return Traffic(np.array(sent), np.array(received))

    def limit(self, i: int, rate: str | None) -> None:
        """Change the rate of the link of worker ``i``, in both directions; -1 is the free one.

        What waits in its queues is dropped, and sent again by TCP.
        """
        if rate is not None:
            bits_per_second(rate)
        i = range(len(self._rates))[i]
        for namespace, device in ((self._hub, f"worker{i}"), (self._holders[i], "eth0")):
            if self._rates[i] is not None or self._delay:
                namespace.run(f"tc qdisc del dev {device} root")
            self._shape(namespace, device, rate)
        self._rates[i] = rate

    def set_shares(self, shares: ArrayLike) -> None:
        """Change the shares of a core that the workers have.

        Parameters
        ----------
        shares : array_like, broadcast to shape (workers,)
            0 stops a worker; one with ``math.inf`` is not limited.
        """
        self._shares = np.broadcast_to(np.asarray(shares, dtype=float), len(self.workers)).copy()
        for i, share in enumerate(self._shares.tolist()):
            if i not in self._dead:
                self._throttle.set_share(self._pids[i], share)

    def stop(self, i: int) -> None:
        """Stop worker ``i`` (SIGSTOP): it answers nobody, and nobody is told."""
        self._throttle.set_share(self._pids[i], 0.0)

    def resume(self, i: int) -> None:
        """Continue a worker that was stopped."""
        self._throttle.set_share(self._pids[i], float(self._shares[i]))

    def kill(self, i: int) -> None:
        """Kill worker ``i`` for good (SIGKILL), and wait until the scheduler knows."""
        os.kill(self._pids[i], signal.SIGKILL)
        self._dead.add(i)
        while self.workers[i] in self._scheduler.workers:
            time.sleep(0.01)

    # -- links ---------------------------------------------------------------------------------

    @contextmanager
    def _network(self) -> Iterator[str]:
        """Make the bridge and this process's own link to it; yield the addresses' beginning."""
        for number in range(256):
            name = f"dask-coded-{number}"
            try:
                _run(f"ip link add {name} type veth peer name owner netns {self._hub.pid}")
            except OSError as error:
                if "exists" not in str(error) or number == 255:
                    raise
            else:
                break  # none of another lab
        try:
            # Without a forward delay a bridge lets packets through from the first second.
            self._hub.run("ip link add bridge type bridge forward_delay 0 mcast_snooping 0")
            self._hub.run("ip link set bridge up")
            self._hub.run("ip link set owner master bridge up")
            _run(f"ip address add 198.18.{number}.1/24 dev {name}")
            _run(f"ip link set {name} up")
            yield f"198.18.{number}"
        finally:
            # It would go with the bridge's namespace, but only when the kernel finds the time.
            _run(f"ip link delete {name}")

    def _link(self, i: int, holder: _Holder, address: str) -> None:
        """Join a worker's namespace to the bridge."""
        name = f"worker{i}"
        self._hub.run(f"ip link add {name} type veth peer name eth0 netns {holder.pid}")
        self._hub.run(f"ip link set {name} master bridge up")
        holder.run(f"ip address add {address}/24 dev eth0")
        holder.run("ip link set eth0 up")
        holder.run("ip link set lo up")
        self._shape(self._hub, name, self._rates[i])
        self._shape(holder, "eth0", self._rates[i])

    def _shape(self, namespace: _Holder, device: str, rate: str | None) -> None:
        """Limit one end of a link: what leaves by a device."""
        where = "root"
        if self._delay:
            microseconds = round(self._delay * 1e6)
            netem = f"handle 1: netem delay {microseconds}us limit 100000"
            namespace.run(f"tc qdisc add dev {device} root {netem}")
            where = "parent 1:1"
        if rate is not None:
            # Half a millisecond's worth may go at once: small messages are limited like large ones.
            burst = max(3 * _PACKET, round(bits_per_second(rate) / 8 * 5e-4))
            # What comes in pieces larger than that the kernel would cut into single packets, each
            # of which costs it as much as a piece: with many workers that took longer than links.
            namespace.run(f"ip link set {device} gso_max_size {min(burst * 3 // 4, 65536)}")
            tbf = f"tbf rate {rate} burst {burst} limit {self._buffer}"
            namespace.run(f"tc qdisc add dev {device} {where} {tbf}")

    def _wait_for_workers(self, timeout: float = 90.0) -> list[str]:
        """Addresses of the workers, in the order of their links."""
        due = time.monotonic() + timeout
        while len(self._scheduler.workers) < len(self._rates):
            if time.monotonic() > due or not all(map(_runs, self._pids)):
                raise OSError(f"Not all workers came up. {self._last_words()}")
            time.sleep(0.05)
        by_number = {int(state.name): state.address for state in self._scheduler.workers.values()}
        return [by_number[i] for i in range(len(self._rates))]

    def _last_words(self) -> str:
        there = {int(state.name) for state in self._scheduler.workers.values()}
        for i, holder in enumerate(self._holders):
            if i not in there:
                return f"Number {i} wrote: {holder.log.read_text(errors='replace')[-1000:]}"
        return ""


class _Holder:
    """A process that holds a network namespace, and perhaps runs a command in it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self.pid = process.pid
        self.log = log

    def start(self) -> int:
        """Run the command, and return its process id."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def run(self, command: str) -> str:
        """Run a short command of the system in the namespace, and return what it printed."""
        return _run(f"nsenter --net=/proc/{self.pid}/ns/net {command}")


@contextmanager
def _namespace(command: Sequence[str], log: Path) -> Iterator[_Holder]:
    """A network namespace, and in it a command that is run when `_Holder.start` is called."""
    with (
        log.open("w") as file,
        subprocess.Popen(
            ["unshare", "--net", sys.executable, "-I", "-S", "-c", _HOLDER, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=_environment(),
            # Ctrl-C is for us alone: the block ends, and with it all the rest, in its order.
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            if not process.stdout.readline():
                raise OSError(f"No network namespace can be made: {log.read_text().strip()}")
            yield _Holder(process, log)
        finally:
            process.stdin.close()
            process.wait()


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"Command {command!r} failed: {done.stderr.strip()}")
    return done.stdout


def _worker_command(scheduler: str, host: str, name: int, folder: Path) -> list[str]:
    options = f"--host {host} --name {name} --nthreads 1 --memory-limit 0 --no-nanny --no-dashboard"
    return [
        *(sys.executable, "-m", "dask", "worker", scheduler, *options.split()),
        *("--local-directory", str(folder), "--death-timeout", "120"),
    ]


def _environment() -> dict[str, str]:
    """One thread per kernel, as a nanny sets it, and this process's modules."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    return {**os.environ, **threads, "PYTHONPATH": path}
