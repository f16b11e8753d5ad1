"""Settings every test shares: one thread per process, float64, properties that fail the same way each run."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import HealthCheck, settings

from pexgrad.factors import norm_cost

settings.register_profile(
    "pexgrad",
    max_examples=25,
    deadline=None,  # the first call of a function traces, the next does not
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pexgrad")

# torch notes every step of a trace for whoever listens; pytest would listen
logging.getLogger("torch.__trace").propagate = False

torch.set_num_threads(1)  # pytest-xdist gives every core its own process


SMALL, norm_cost.SMALL = norm_cost.SMALL, 0  # norms of the tests' small layers go the ways of large ones


@pytest.fixture(scope="module")
def double():
    """float64 by default for the tests of a module, so that 1e-9 means something."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def small(monkeypatch):
    """Rows are small where users find them so."""
    monkeypatch.setattr(norm_cost, "SMALL", SMALL)
