"""Waiting for a cluster from inside it: in tasks of workers with one thread, and on event loops."""

from __future__ import annotations

import asyncio
from threading import Thread, current_thread

import dask
import dask.array as da
import networkx as nx
import numpy as np
import pytest
import scipy.sparse.linalg
from distributed import Client, Event, get_client, get_worker, worker_client
from distributed.utils_test import gen_cluster

import dask_coded as coded
from dask_coded.linear_model import Logistic, minimize
from dask_coded.runtime.client.waiting import while_connected

THREE = [("127.0.0.1", 1)] * 3
MANY = 4  # more tasks that wait than there are threads in the cluster

rng = np.random.default_rng(0)
A = rng.standard_normal((60, 4))
Z = A @ [1.0, -1.0, 2.0, 0.0]
CYCLE = [(0, 1), (1, 2), (2, 0)]
RING = nx.cycle_graph(3)


def encode():
    return coded.encode(A, client=get_client()).shape == A.shape


def encode_without_naming_a_client():
    return coded.encode(A).shape == A.shape


def extend():
    C = coded.encode(A, coded.RandomLinear(n=2, k=2), get_client())
    return C.extend().code.n == 3


def compute():
    return np.allclose((coded.encode(A) @ np.ones(4)).compute(), A.sum(axis=1))


def wait_for_an_algorithm():
    future = coded.submit(lambda C: float((C @ np.ones(4)).sum()), coded.encode(A))
    return future.exception() is None and np.isclose(future.result(), A.sum())


def multiply_immediately():
    return np.allclose(coded.encode(A).as_linear_operator() @ np.ones(4), A.sum(axis=1))


def gram():
    return np.allclose(coded.gram(A).compute(), A.T @ A)


def pagerank():
    return np.allclose(list(coded.graph.pagerank(CYCLE).values()), 1 / 3)


def largest_singular_value():
    s = coded.linalg.randomized_svd(A, k=1, power_iterations=8, seed=0)[1]
    return np.allclose(s, np.linalg.norm(A, 2), rtol=1e-3)


def fit():
    pytest.importorskip("sklearn")
    y = da.from_array(Z, chunks=20)
    model = coded.linear_model.LinearRegression().fit(A, y, client=get_client())
    return np.allclose(model.coef_, [1.0, -1.0, 2.0, 0.0], atol=1e-4)


def train():
    def squares(w, X, y):
        error = X @ w - y
        return error @ error / 2, X.T @ error

    data = A, da.from_array(Z, chunks=20)
    found = coded.training.train(squares, np.zeros(4), data, steps=2, client=get_client())
    return found.parameters.shape == (4,)


def fit_within_worker_client():
    with worker_client() as client:
        C = coded.encode(A, client=client, transpose=True)
        found = coded.submit(minimize, C, np.sign(Z), Logistic(), max_iter=3, client=client)
        return found.result().rounds == 3


@pytest.mark.parametrize(
    "task",
    [
        encode,
        encode_without_naming_a_client,
        extend,
        compute,
        wait_for_an_algorithm,
        multiply_immediately,
        gram,
        pagerank,
        largest_singular_value,
        fit,
        train,
        fit_within_worker_client,
    ],
)
def test_tasks_that_occupy_all_threads_of_the_cluster_end(task):
    @gen_cluster(client=True, nthreads=THREE, timeout=120)
    async def many(c, s, *workers):
        futures = c.map(lambda _: task(), range(MANY), pure=False)
        assert await c.gather(futures) == [True] * MANY

    many()


@gen_cluster(client=True, nthreads=THREE, timeout=120)
async def test_an_array_sent_to_a_task_uses_the_client_of_its_worker(c, s, *workers):
    def solve(C):
        found = scipy.sparse.linalg.lsqr(C.T.as_linear_operator(), np.ones(4))
        return np.allclose(found[0], np.linalg.lstsq(A.T, np.ones(4))[0])

    C = await coded.encode(A, client=c, transpose=True)
    futures = [c.submit(lambda _, C=C: solve(C), i) for i in range(MANY)]
    assert await c.gather(futures) == [True] * MANY


@gen_cluster(client=True, nthreads=THREE, timeout=120)
async def test_a_fit_inside_an_algorithm_inside_a_task_ends(c, s, *workers):
    def outer():
        return coded.submit(lambda C: fit(), coded.encode(A)).result()

    pytest.importorskip("sklearn")
    assert await c.gather(c.map(lambda _: outer(), range(MANY), pure=False)) == [True] * MANY


@gen_cluster(client=True, nthreads=THREE, timeout=120)
async def test_a_task_that_has_waited_occupies_its_thread_again(c, s, *workers):
    """Otherwise a worker would compute more tasks at once than it has threads."""

    def task():
        coded.encode(A)
        return current_thread() in get_worker().executors["default"]._threads

    assert await c.gather(c.map(lambda _: task(), range(MANY), pure=False)) == [True] * MANY


ALGORITHMS = {
    "pagerank": lambda c: coded.graph.pagerank(CYCLE, client=c),
    "hits": lambda c: coded.graph.hits(CYCLE, client=c),
    "katz": lambda c: coded.graph.katz_centrality(CYCLE, client=c),
    "eigenvector": lambda c: coded.graph.eigenvector_centrality(CYCLE, client=c),
    "filter": lambda c: coded.graph.filter(RING, np.ones(3), coded.graph.Heat(1.0), client=c),
    "power": lambda c: coded.linalg.power_iteration(A.T @ A, tol=0, max_iter=2, client=c),
    "svd": lambda c: coded.linalg.randomized_svd(A, k=1, client=c),
    "train": lambda c: coded.training.train(len, np.zeros(4), (A, Z), steps=1, client=c),
    "costs": lambda c: coded.training.measure_costs(client=c),
    "ridge": lambda c: coded.linear_model.Ridge().fit(A, Z, client=c),
    "dask target": lambda c: coded.linear_model.Ridge().fit(A, da.ones(60), client=c),
}


@gen_cluster(client=True, nthreads=THREE)
async def test_algorithms_refuse_to_wait_on_the_event_loop(c, s, *workers):
    pytest.importorskip("sklearn")
    for algorithm in ALGORITHMS.values():
        with pytest.raises(
            RuntimeError, match=r"call it in a thread, as `await asyncio\.to_thread"
        ):
            algorithm(c)


@gen_cluster(client=True, nthreads=THREE)
async def test_products_of_an_operator_refuse_to_wait_on_the_event_loop(c, s, *workers):
    C = await coded.encode(A, coded.MDS(3, 2), c)
    operator = C.as_linear_operator()
    with pytest.raises(RuntimeError, match="call it in a thread"):
        operator @ np.ones(4)
    found = await asyncio.to_thread(operator.dot, np.ones(4))
    np.testing.assert_allclose(found, A.sum(axis=1))


@gen_cluster(client=True, nthreads=THREE, timeout=120)
async def test_an_asynchronous_client_serves_threads(c, s, *workers):
    ranks = await asyncio.to_thread(ALGORITHMS["pagerank"], c)
    assert ranks == pytest.approx(dict.fromkeys(range(3), 1 / 3))


@gen_cluster(client=True, nthreads=THREE)
async def test_an_asynchronous_client_that_nobody_has_awaited(c, s, *workers):
    other = Client(s.address, asynchronous=True)
    try:
        C = await coded.encode(A, coded.MDS(3, 2), other)
        np.testing.assert_allclose(await other.compute(C @ np.ones(4)), A.sum(axis=1))
    finally:
        await other.close()


def test_under_a_running_event_loop_as_in_a_notebook_and_in_a_thread(client: Client):
    async def cell():
        return ALGORITHMS["pagerank"](client)

    expected = pytest.approx(dict.fromkeys(range(3), 1 / 3))
    assert asyncio.run(cell()) == expected
    found: list = []
    thread = Thread(target=lambda: found.append(ALGORITHMS["pagerank"](client)))
    thread.start()
    thread.join()
    assert found == [expected]


def configure(least):
    dask.config.set({"coded.linear-model.minimum-size": least})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The code that was chosen")  # for two workers
def test_a_grid_search_by_joblib_ends_wherever_its_fits_run(processes):
    pytest.importorskip("sklearn")
    joblib = pytest.importorskip("joblib")
    from sklearn.model_selection import GridSearchCV

    processes.add(2)
    client = processes.client
    for least in (10**7, 0):
        client.run(configure, least)
        search = GridSearchCV(coded.linear_model.Ridge(), {"alpha": [0.1, 1.0, 10.0]}, cv=2)
        with client.as_current(), joblib.parallel_backend("dask"):
            assert search.fit(A, Z).best_params_ == {"alpha": 0.1}


# -- clients whose scheduler or cluster is gone ------------------------------------------------


@gen_cluster(client=True, nthreads=[])
async def test_scheduler_ends_while_a_client_waits(c, s):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(while_connected(c, work()))
    await begun.wait()
    await s.close()
    with pytest.raises(ConnectionError, match=f"no connection to the scheduler at {s.address}"):
        await task
    assert ended.is_set()


@pytest.mark.slow
def test_scheduler_dies_while_an_array_is_encoded(processes):
    processes.add(2)
    client = processes.client

    def endless(chunk):
        Event("begun").set()
        Event("never").wait()

    source = da.ones((4, 4), chunks=2).map_blocks(endless, meta=np.ones((0, 0)))

    def kill() -> None:
        Event("begun", client=client).wait()
        processes.kill_scheduler()

    killer = Thread(target=kill)
    killer.start()
    with pytest.raises(ConnectionError, match="no connection to the scheduler"):
        coded.encode(source, coded.MDS(2, 1), client)
    killer.join()
    with pytest.raises(ConnectionError, match="no connection to the scheduler"):
        coded.gram(np.eye(3), code=coded.Polynomial(2, 1, 1), client=client)


@pytest.mark.slow
def test_arrays_from_before_a_restart_of_the_scheduler(processes):
    processes.add(2)
    client = processes.client
    C = coded.encode(np.eye(4), coded.MDS(2, 1), client)
    processes.kill_scheduler()
    processes.restart_scheduler()
    processes.add(2)
    with pytest.raises(RuntimeError, match=r"not prepared .* again if the scheduler was restarted"):
        client.compute(C @ np.ones(4)).result()
    coded.encode(np.eye(4), coded.MDS(2, 1), client)
    with pytest.raises(coded.CodedDataLostError, match=r"or the cluster was restarted. Encode it"):
        client.compute(C @ np.zeros(4)).result()


def test_arrays_of_a_client_that_is_closed():
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False}
    with Client(**options, dashboard_address=None) as client:
        C = coded.encode(np.eye(4), coded.MDS(2, 1), client)
        y = C @ np.ones(4)
    with pytest.raises(RuntimeError, match=r"no client is the current one or it is closed.*again"):
        y.compute()
    for call in (
        lambda: coded.linalg.power_iteration(C),
        lambda: coded.submit(np.linalg.norm, C),
        lambda: C.as_linear_operator() @ np.ones(4),
        lambda: coded.encode(np.eye(4), client=client),
    ):
        with pytest.raises(RuntimeError, match=r"client is closed, and the arrays .* released"):
            call()
