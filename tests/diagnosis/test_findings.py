"""What is said about facts of a cluster; no cluster is needed for that."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_coded.diagnosis import tables
from dask_coded.diagnosis.facts import ClusterFacts, Link, Reply, WorkerFacts
from dask_coded.diagnosis.findings import findings

OURS = {"dask-coded": "0.3.0", "python": "3.12.1", "dask": "2026.8.0", "numpy": "2.1.0"}
SCHEDULER = "tcp://10.0.0.1:8786"
A, B, C = (f"tcp://10.0.0.{i}:4000" for i in (2, 3, 4))
OPEN, SHUT = Link(0.001), Link(None, "Connection refused")


def worker(address, **facts):
    return WorkerFacts(address, **({"versions": OURS, "asked": True, "plugins": ()} | facts))


def cluster(*workers, **facts):
    known = {"client_versions": OURS, "scheduler_versions": OURS, "plugins": ()} | facts
    return ClusterFacts(SCHEDULER, workers=workers, **known)


def found(*workers, **facts):
    return [(f.severity, f.address, f.text) for f in findings(cluster(*workers, **facts))]


def linked(address, **links):
    names = {"a": A, "b": B, "c": C}
    return worker(address, links={names[name]: link for name, link in links.items()})


def test_nothing_is_said_of_a_good_cluster():
    ring = [linked(A, b=OPEN, c=OPEN), linked(B, a=OPEN, c=OPEN), linked(C, a=OPEN, b=OPEN)]
    assert found(*ring) == []
    assert tables.summary([]) == "All workers can take part in coded rounds."


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"dask-coded": None}, "has no dask-coded: install version 0.3.0 there"),
        ({"dask-coded": "0.2.0"}, "has dask-coded 0.2.0, this client has 0.3.0: install the same"),
        ({"python": "3.11.9"}, "has Python 3.11.9, this client has 3.12.1"),
    ],
)
def test_a_worker_or_scheduler_of_another_environment_is_an_error(versions, expected):
    theirs = {k: v for k, v in (OURS | versions).items() if v}
    [(severity, address, text)] = found(worker(A, name="left", versions=theirs), worker(B))
    assert (severity, address) == ("error", A)
    assert text.startswith(f"Worker {A} (left) {expected}")
    [(severity, address, text)] = found(worker(A), scheduler_versions=theirs)
    assert (severity, address) == ("error", SCHEDULER)
    assert text.startswith(f"The scheduler at {SCHEDULER} {expected}")


def test_other_versions_of_other_packages_are_advice():
    theirs = OURS | {"numpy": "2.0.0", "python": "3.12.9"}
    del theirs["dask"]
    [(severity, _, text)] = found(worker(A, versions=theirs))
    assert severity == "advice"
    assert "dask missing (here 2026.8.0), numpy 2.0.0 (here 2.1.0)" in text


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply.SILENT, "does not answer and sends no heartbeats"),
        (Reply.UNREACHABLE, "sends heartbeats but does not answer the scheduler"),
    ],
)
def test_of_a_worker_without_answers_only_that_is_said(reply, expected):
    [(severity, address, text)] = found(WorkerFacts(A, reply=reply), worker(B))
    assert (severity, address) == ("error", A)
    assert expected in text


def test_a_refused_plugin_and_a_failed_question_are_errors():
    texts = [text for _, _, text in found(worker(A, refused="ImportError('x')", error="OSError()"))]
    assert any("has refused dask-coded's plugin: ImportError('x')" in text for text in texts)
    assert any("cannot be examined: OSError()" in text for text in texts)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"memory_wanted": False}, "`coded.shared-memory` is false"),
        ({"memory_wanted": True, "memory_offered": False}, "`memfd_create`"),
        ({"memory_wanted": True, "memory_offered": True}, f"cannot read that of {B}"),
    ],
)
def test_workers_of_a_host_without_shared_memory_get_advice(facts, expected):
    [(severity, address, text)] = found(worker(A, readable={B: False}, **facts))
    assert (severity, address) == ("advice", A)
    assert expected in text
    assert found(worker(A, **facts)) == []  # it is alone on its host


def test_a_worker_that_no_other_reaches_is_named():
    [(severity, address, text)] = found(
        linked(A, b=OPEN, c=SHUT), linked(B, a=OPEN, c=SHUT), linked(C, a=OPEN, b=OPEN)
    )
    assert (severity, address) == ("error", C)
    assert "none of the workers that tried can connect to it (Connection refused)" in text


def test_a_worker_that_reaches_no_other_is_named():
    [(severity, address, text)] = found(
        linked(A, b=OPEN, c=OPEN), linked(B, a=OPEN, c=OPEN), linked(C, a=SHUT, b=SHUT)
    )
    assert (severity, address) == ("error", C)
    assert "can connect to none of the 2 workers that it tried" in text


def test_a_single_link_that_is_shut_is_named_with_both_ends():
    [(_, address, text)] = found(
        linked(A, b=OPEN, c=SHUT), linked(B, a=OPEN, c=OPEN), linked(C, a=OPEN, b=OPEN)
    )
    assert address == C
    assert f"{A} cannot connect to it" in text
    [(_, address, text)] = found(linked(A, b=SHUT), linked(B, a=OPEN))
    assert address == B
    assert f"{A} cannot connect to it" in text


def test_a_worker_at_the_end_of_all_links_that_are_shut_is_named_alone():
    D = "tcp://10.0.0.5:4000"
    free = worker(D, links={A: OPEN, B: OPEN, C: OPEN})
    [(severity, address, text)] = found(
        linked(A, b=OPEN, c=SHUT), linked(B, a=OPEN, c=SHUT), linked(C, a=SHUT, b=SHUT), free
    )
    assert (severity, address) == ("error", C)
    assert f"connections between it and {A}, {B} fail (Connection refused)" in text


def test_workers_that_all_cannot_connect_are_one_error():
    [(severity, address, text)] = found(linked(A, b=SHUT), linked(B, a=SHUT))
    assert (severity, address) == ("error", SCHEDULER)
    assert text.startswith("No worker can connect to any other (Connection refused)")


@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_some_error_is_said_if_and_only_if_a_link_is_shut(open_links):
    ab, ac, ba, bc, ca, cb = (OPEN if is_open else SHUT for is_open in open_links)
    errors = found(linked(A, b=ab, c=ac), linked(B, a=ba, c=bc), linked(C, a=ca, b=cb))
    assert bool(errors) == (not all(open_links))


def test_slow_workers_get_advice_and_errors_come_first():
    speeds = [1.0, 0.9, 1.0, 0.3]
    workers = [worker(f"{A}{i}", speed=speed, product=0.01) for i, speed in enumerate(speeds)]
    silent = WorkerFacts(B, reply=Reply.SILENT)
    error, advice = found(*workers, silent)
    assert (error[:2], advice[:2]) == (("error", B), ("advice", f"{A}3"))
    assert "30% of the fastest worker's speed in its last rounds, but not in a small" in advice[2]
    products = [0.01, 0.01, 0.05]
    workers = [worker(f"{A}{i}", product=seconds) for i, seconds in enumerate(products)]
    [(_, address, text)] = found(*workers)
    assert address == f"{A}2"
    assert "20% of the fastest worker's speed in a small product" in text


def test_a_paused_worker_gets_advice():
    [(severity, _, text)] = found(worker(A, status="paused"))
    assert severity == "advice"
    assert "is paused" in text


# -- the table ---------------------------------------------------------------------------------


def test_the_table_shows_what_is_known():
    one = worker(
        A,
        plugins=("rounds", "training"),
        threads=4,
        memory=2**30,
        readable={B: True, C: False},
        product=0.01,
        speed=0.5,
        links={B: OPEN},
    )
    two = worker(B, versions=OURS | {"numpy": "2.0.0"}, product=0.02, links={A: Link(0.002)})
    silent = WorkerFacts(C, reply=Reply.SILENT)
    more = ("100%", "50%", "4", "1.00 GiB")
    assert tables.rows(cluster(one, two, silent)) == [
        (A, "as here", "rounds, training", "1 of 2", "1 of 1", "2.0 ms", *more),
        (B, "numpy 2.0.0", "none", "-", "1 of 1", "1.0 ms", "50%", "-", "1", "no limit"),
        (C, "silent", "-", "-", "-", "-", "-", "-", "1", "no limit"),
    ]
    assert len(tables.COLUMNS) == 10


def test_json_has_facts_and_findings():
    facts = cluster(worker(A, links={B: SHUT}), WorkerFacts(B, reply=Reply.SILENT))
    written = json.loads(json.dumps(tables.as_json(facts, findings(facts))))
    assert written["fit"] is False
    assert written["workers"][0]["links"] == {B: {"seconds": None, "error": "Connection refused"}}
    assert written["workers"][1]["reply"] == "silent"
    assert {finding["severity"] for finding in written["findings"]} == {"error"}
