"""Optimizers of PyTorch that workers cannot make again are refused, instead of changed silently."""

from __future__ import annotations

import numpy as np
import pytest

from dask_coded import training

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.extras


class Boosted(torch.optim.SGD):
    """Keeps a number beside the options of its groups."""

    def __init__(self, params, lr=0.1, boost=1.0):
        super().__init__(params, lr)
        self.boost = boost


class Renamed(torch.optim.SGD):
    """Cannot be made from groups alone."""

    def __init__(self, params, rate):
        super().__init__(params, rate)


class Counts(torch.optim.SGD):
    """Counts its steps in its groups, as optimizers without a schedule do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def model():
    module = torch.nn.Linear(2, 1)
    return module, training.TorchModule(module, torch.nn.MSELoss(reduction="sum"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Boosted(p, boost=5.0), r"keeps \['boost'\] beside the options of its groups"),
        (lambda p: Renamed(p, 0.1), "A Renamed cannot be made from its groups alone"),
    ],
    ids=["attribute", "argument"],
)
def test_what_groups_and_state_do_not_hold_is_refused(make, message):
    module, flat = model()
    with pytest.raises(TypeError, match=message):
        flat.optimizer(make(module.parameters()))


def test_attributes_as_the_constructor_makes_them_are_no_reason_to_refuse():
    module, flat = model()
    flat.optimizer(Boosted(module.parameters(), lr=0.3))


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_are_refused(kind):
    module, flat = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = getattr(optimizer, f"register_step_{kind}_hook")(lambda *args: None)
    with pytest.raises(TypeError, match="SGD has hooks, which workers do not call"):
        flat.optimizer(optimizer)
    handle.remove()
    flat.optimizer(optimizer)


def test_options_that_a_step_changes_are_an_error_in_the_first_step():
    module, flat = model()
    optimizer = flat.optimizer(Counts(module.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"Counts changes the options \['k'\] of its groups"):
        optimizer.start(flat.parameters)


@pytest.mark.parametrize(
    "kind",
    ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD"],
)
def test_optimizers_of_pytorch_are_taken_with_a_scheduler_and_after_steps(kind):
    module, flat = model()
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for used in range(2):
        found = flat.optimizer(optimizer, scheduler if used else None)
        x = flat.parameters
        state = found.start(x)
        found.update(x, np.ones_like(x), state, 0)
        module(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        scheduler.step()


def test_an_optimizer_with_a_rate_in_a_tensor_is_taken():
    module, flat = model()
    rate = torch.tensor(0.1)
    optimizer = flat.optimizer(torch.optim.Adam(module.parameters(), lr=rate, capturable=False))
    optimizer.start(flat.parameters)
