"""Parameters are scored on other data while a training goes on."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded.aggregation import Ring, Squeeze, Star
from dask_coded.loop import Loop
from dask_coded.training import SGD, Checkpoint, Step, Validation, train
from dask_coded.training.runtime.leader import History

X = np.random.default_rng(0).normal(size=(90, 4))
Y = X @ np.arange(1.0, 5.0) + np.sin(np.arange(90))
DATA, OTHER = (X[:60], Y[:60]), (X[60:], Y[60:])


def squares(w, samples, targets):
    return samples.T @ (samples @ w - targets)


def error(w, samples, targets):
    return np.square(samples @ w - targets).sum()


def trained(client, steps, **options):
    options = {"optimizer": SGD(0.05), "client": client, **options}
    return train(squares, np.zeros(4), DATA, steps=steps, **options)


@pytest.mark.parametrize("aggregation", [Squeeze(units=4), Ring(), Star()], ids=repr)
def test_scores_are_of_the_parameters_at_that_time(client, aggregation):
    found = trained(
        client, 25, validation=Validation(error, OTHER, every=10), aggregation=aggregation
    )
    assert 25 in found.scores
    assert found.scores.keys() <= {10, 20, 25}  # those that come too fast are left out
    for steps, score in found.scores.items():
        then = trained(client, steps, aggregation=Squeeze(units=4)).parameters
        assert score == pytest.approx(error(then, *OTHER) / 30, rel=1e-5)
        assert found.history[steps - 1].score == score


def test_a_callback_sees_scores_and_may_end_the_training(client):
    seen = []

    def enough(progress):
        seen.append(progress.score)
        return progress.score is not None

    found = trained(client, 10**6, validation=Validation(error, OTHER, every=5), callback=enough)
    assert found.steps < 10**6
    assert seen[-1] in found.scores.values()
    assert found.scores[found.steps] == pytest.approx(error(found.parameters, *OTHER) / 30)


@pytest.mark.parametrize(
    ("score", "raised", "message"),
    [
        (lambda w, samples, targets: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda w, samples, targets: samples, TypeError, r"must be a number.*is \(30, 4\)"),
    ],
    ids=["raises", "array"],
)
def test_a_score_that_fails_ends_the_training(client, score, raised, message):
    with pytest.raises(raised, match=message) as caught:
        trained(client, 20, validation=Validation(score, OTHER, every=5))
    assert "in the validation of the training, on worker" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("every", [10, 7])
def test_a_training_that_had_ended_is_scored_and_written(client, tmp_path, every):
    done = tmp_path / "done"
    trained(client, 10, aggregation=Ring(), checkpoint=Checkpoint(done))
    found = trained(
        client,
        10,
        aggregation=Ring(),
        resume=done,
        checkpoint=Checkpoint(tmp_path / "again", every=10),
        validation=Validation(error, OTHER, every=every),
    )
    assert found.scores == {10: pytest.approx(error(found.parameters, *OTHER) / 30)}
    assert (tmp_path / "again").exists()


def test_wrong_validations(client):
    with pytest.raises(TypeError, match="'score' must be a function, it is 5"):
        Validation(5, OTHER)
    with pytest.raises(ValueError, match="'every' must be a whole number of at least 1"):
        Validation(error, OTHER, every=0)
    with pytest.raises(ValueError, match="there are 30 samples and 29 targets"):
        trained(client, 5, validation=Validation(error, (OTHER[0], OTHER[1][1:])))


def test_another_leader_knows_the_scores_that_were_kept():
    class Kept(Loop):
        def resume(self, state):
            return [Step(0, 3.0), Step(1, 2.0, score=0.5), Step(2, 1.0)]

    history = History(Kept(), steps=5)
    history.scorer(5)(0.75)
    found = history.of([3.0, 2.0, 1.0, 0.5, 0.25])
    assert [step.score for step in found] == [None, 0.5, None, None, 0.75]


def test_scores_of_parameters_that_are_lost_are_forgotten():
    history = History(Loop(), steps=9)
    history.scorer(2)(0.5)
    history.scorer(6)(0.75)
    third, seventh = history.scorer(3), history.scorer(7)  # they are being computed
    history.go_back(4)
    third(0.6)
    seventh(0.8)
    found = [step.score for step in history.of([2.0] * 9)]
    assert found == [None, 0.5, 0.6, *[None] * 6]
    history.scorer(7)(0.7)
    assert history.of([2.0] * 9)[6].score == 0.7


def test_another_leader_hears_of_no_score_of_parameters_that_are_lost():
    class Kept(Loop):
        def report(self, progress, state, last):
            self.state = state

        def resume(self, state):
            return getattr(self, "state", state)

    loop = Kept()
    history = History(loop, steps=9)
    for i in range(3):
        history.ended(Step(i, 1.0), norm=1.0)
    history.scorer(2)(0.5)
    history.go_back(1)
    history.ended(Step(1, 1.0), norm=1.0)
    assert [step.score for step in History(loop, steps=9).of([1.0] * 3)] == [None] * 3
