"""Facts about real clusters: in this process, and of processes."""

from __future__ import annotations

import json

import dask
import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Worker
from distributed.utils_test import gen_cluster

import dask_coded as coded
from dask_coded import cli
from dask_coded.cli import steps
from dask_coded.diagnosis import remote
from dask_coded.diagnosis.collect import collect
from dask_coded.diagnosis.facts import Reply
from dask_coded.diagnosis.findings import findings
from dask_coded.runtime.spec import NAME

FOUR = [("127.0.0.1", 1)] * 4


def errors(facts):
    return {f.address: f.text for f in findings(facts) if f.severity == "error"}


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_cluster_where_nothing_was_encoded(c, s, *workers):
    facts = await collect(c, timeout=60, peers=16)
    assert errors(facts) == {}
    assert facts.plugins == ()
    assert facts.client_versions["dask-coded"] == coded.__version__
    everyone = {w.address for w in workers}
    for worker in facts.workers:
        others = everyone - {worker.address}
        assert worker.reply is Reply.ANSWERS
        assert worker.plugins == ()
        assert worker.versions == facts.client_versions
        assert {a for a, link in worker.links.items() if link.seconds > 0} == others
        assert {a for a, readable in worker.readable.items() if readable} == others
        assert worker.product > 0
        assert worker.speed is None
    # Nothing was installed.
    assert NAME not in s.extensions
    assert not any(name in w.extensions for w in workers for name in (NAME, "coded-exchange"))
    assert not s.worker_plugins.keys() - {"shuffle"}


@gen_cluster(client=True, nthreads=FOUR)
async def test_plugins_and_speeds_are_known_after_rounds(c, s, a, b, *others):
    C = await coded.encode(np.eye(40), coded.MDS(4, 3), client=c)
    plugin = s.extensions[NAME]
    plugin.speeds.record({a.address: 4.0, b.address: 1.0})
    state = plugin.arrays[C.encoded.spec.id]
    state.planned, state.seconds = [a.address, b.address], 0.001
    facts = await collect(c, timeout=60, peers=16)
    assert {worker.speed for worker in facts.workers} == {None}  # of rounds this short none is told
    state.seconds = 1.0
    facts = await collect(c, timeout=60, peers=16)
    assert errors(facts) == {}
    assert facts.plugins == ("rounds",)
    assert all(worker.plugins == ("rounds",) for worker in facts.workers)
    speeds = {worker.address: worker.speed for worker in facts.workers}
    assert speeds == {a.address: 1.0, b.address: 0.25} | {w.address: None for w in others}
    C.encoded.release()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 6)
async def test_peers_are_spread_evenly(c, s, *workers):
    facts = await collect(c, timeout=60, peers=2)
    tried = [peer for worker in facts.workers for peer in worker.links]
    assert sorted(tried) == sorted([w.address for w in workers] * 2)


@gen_cluster(client=True, nthreads=FOUR)
async def test_workers_of_other_environments_are_named(c, s, a, b, w, x):
    def other(**changed):
        def versions(packages=()):
            found = Worker.versions(a, packages=packages)
            return {**found, "packages": {**found["packages"], **changed}}

        return versions

    b.handlers["versions"] = other(dask_coded=None)
    w.handlers["versions"] = other(dask_coded="99.0")
    # An installer may have noted another version than runs, or none on a shared file system.
    assert not errors(await collect(c, timeout=60, peers=16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_coded.diagnosis.collect._RUNNING", "None")
        found = errors(await collect(c, timeout=60, peers=16))
    assert found.keys() == {b.address, w.address}
    assert f"Worker {b.address}" in found[b.address]
    assert "has no dask-coded: install version" in found[b.address]
    assert "has dask-coded 99.0" in found[w.address]


@gen_cluster(client=True, nthreads=FOUR)
async def test_a_worker_that_peers_cannot_connect_to_is_named(c, s, a, b, w, x):
    original = remote.connect

    async def connect(address, **options):
        if address == x.address:
            raise OSError("Timed out") from OSError("[Errno 113] No route to host")
        return await original(address, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "connect", connect)
        found = errors(await collect(c, timeout=60, peers=16))
    assert found.keys() == {x.address}
    assert (
        "none of the workers that tried can connect to it ([Errno 113] No route"
        in (found[x.address])
    )


@gen_cluster(client=True, nthreads=FOUR[:2])
async def test_a_worker_that_the_scheduler_cannot_connect_to_is_named(c, s, a, b):
    async with Worker(s.address, contact_address="tcp://127.0.0.1:1") as behind:
        # Longer than from one heartbeat to the next one.
        facts = await collect(c, timeout=3, peers=16)
    found = errors(facts)
    assert found.keys() == {behind.address}
    assert "sends heartbeats but does not answer the scheduler" in found[behind.address]


@gen_cluster(client=True, nthreads=FOUR[:2])
async def test_memory_that_is_switched_off_is_said(c, s, a, b):
    with dask.config.set({"coded.shared-memory": False}):
        facts = await collect(c, timeout=60, peers=16)
    texts = [f.text for f in findings(facts) if "shared-memory" in f.text]
    assert len(texts) == 2
    assert errors(facts) == {}


# -- the command, with processes ---------------------------------------------------------------


def check(*options):
    return CliRunner().invoke(cli.coded, ["check", *map(str, options)])


@pytest.mark.slow
def test_the_command_names_a_stopped_worker(processes):
    addresses = processes.add(3)
    scheduler = processes.client.scheduler.address
    result = check(scheduler, "--timeout", 60)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"Scheduler {scheduler}, 3 workers. Versions here: dask-coded ")
    assert lines[1].split()[0] == "worker"
    assert {line.split()[0] for line in lines[2:5]} == set(addresses)
    assert lines[-1] == "All workers can take part in coded rounds."
    with processes.stopped(addresses[1]):
        result = check(scheduler, "--timeout", 5, "--json")
    assert result.exit_code == 1, result.output
    written = json.loads(result.stdout)
    assert written["fit"] is False
    named = {f["address"]: f["text"] for f in written["findings"] if f["severity"] == "error"}
    assert "does not answer and sends no heartbeats" in named[addresses[1]]


def test_a_cluster_that_cannot_be_reached_is_exit_code_2(monkeypatch):
    monkeypatch.setattr(steps, "_CONNECT_SECONDS", 0.05)
    result = check("tcp://127.0.0.1:1")
    assert result.exit_code == 2
    assert "No scheduler answered at tcp://127.0.0.1:1" in result.stderr
