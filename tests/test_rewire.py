"""Code that reaches parts of the model past `self`: every strategy runs it around the parameters that it is given."""

from __future__ import annotations

import copy
import functools
import threading
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.utils.parametrize as parametrize
from oracle import assert_rows_equal, rows_of
from torch.func import functional_call

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

STRATEGIES = ["crb", "multi", "naive"]
EVERYWHERE = {}


def squares(output, y):
    return output.square().flatten(1).sum(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.head(self.first(x).tanh())


def wrapped(f):
    @functools.wraps(f)
    def forward(*args):
        return f(*args)

    return forward


def of_class(model, forward):
    model.__class__ = type("Reaching", (Net,), {"forward": forward})


def by_a_decorator(model):
    model.first.forward = wrapped(model.first.forward)


def by_autocast(model):
    model.forward = torch.autocast("cpu", enabled=False)(model.forward)


def by_a_partial(model):
    model.first.forward = functools.partial(model.first.forward)


def by_a_list(model):
    layers = [model.first]
    of_class(model, lambda self, x: self.head(layers[0](x).tanh()))


def by_a_dict(model):
    layers = {"first": model.first}
    of_class(model, lambda self, x: self.head(layers["first"](x).tanh()))


def by_a_bound_call(model):
    call = model.first.__call__
    of_class(model, lambda self, x: self.head(call(x).tanh()))


def by_a_default(model):
    def forward(self, x, *, first=model.first):
        return self.head(first(x).tanh())

    of_class(model, forward)


def by_a_global(model):
    EVERYWHERE["first"] = model.first
    of_class(model, lambda self, x: self.head(EVERYWHERE["first"](x).tanh()))


def by_a_global_in_a_global(model):
    EVERYWHERE["layers"] = {"by name": types.SimpleNamespace(first=model.first)}
    of_class(model, lambda self, x: self.head(EVERYWHERE["layers"]["by name"].first(x).tanh()))


def by_a_namespace(model):
    layers = types.SimpleNamespace(first=model.first)
    of_class(model, lambda self, x: self.head(layers.first(x).tanh()))


def by_a_list_of_partials(model):
    calls = [functools.partial(lambda layer, x: layer(x), model.first)]
    of_class(model, lambda self, x: self.head(calls[0](x).tanh()))


def by_a_global_call(model):
    EVERYWHERE["call"] = model.first.forward
    model.first.forward = lambda x: EVERYWHERE["call"](x)


def by_a_hook(model):
    EVERYWHERE["model"] = model
    of_class(model, lambda self, x: self.head(x))
    model.head.register_forward_pre_hook(lambda module, given: EVERYWHERE["model"].first(*given).tanh())


class Program:
    """What trains a model, and holds it beside what has no copy."""

    def __init__(self, model):
        self.model, self.lock = model, threading.Lock()

    def hook(self, module, given):
        return self.model.first(*given).tanh()


def by_an_object(model):
    of_class(model, lambda self, x: self.head(x))
    model.head.register_forward_pre_hook(Program(model).hook)


def by_a_global_object(model):
    EVERYWHERE["program"] = Program(model)
    of_class(model, lambda self, x: self.head(EVERYWHERE["program"].hook(self, (x,))))


def by_a_function_of_functions(model):
    def inner(x):
        return model.first(x)

    def outer(x):
        return inner(x) if x.dim() else outer(x[None])

    of_class(model, lambda self, x: self.head(outer(x).tanh()))


WAYS = [
    by_a_decorator, by_autocast, by_a_partial, by_a_list, by_a_dict, by_a_bound_call, by_a_default, by_a_global,
    by_a_global_call, by_a_global_in_a_global, by_a_namespace, by_a_list_of_partials, by_a_hook, by_an_object, by_a_global_object,
    by_a_function_of_functions,
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_other_values_for_what_is_reached(way, frozen, strategy):
    model, x = Net(), torch.randn(5, 4)
    model.first.requires_grad_(not frozen)
    params = {k: torch.randn_like(p) for k, p in model.named_parameters()}
    plain = Net()
    plain.first.requires_grad_(not frozen)
    want = pexgrad.per_example_grad(plain, squares, strategy="naive")(params, x)
    way(model)
    torch.testing.assert_close(functional_call(model, params, (x,)), functional_call(plain, params, (x,)))
    assert_rows_equal(pexgrad.per_example_grad(model, squares, strategy=strategy)(params, x), want)


def kept_by_a_closure(model):
    model.kept = {}
    model.first.register_forward_hook(lambda module, given, out: model.kept.update(out=out))


def kept_by_a_method(model):
    model.kept = {}
    model.keep = lambda module, given, out: model.kept.update(out=out)
    model.first.register_forward_hook(model.keep)


def kept_by_a_factory(model):
    model.kept = {}

    def hook(name, kept):
        return lambda module, given, out: kept.update({name: out})

    model.first.register_forward_hook(hook("out", model.kept))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("keep", [kept_by_a_closure, kept_by_a_method, kept_by_a_factory])
def test_hooks_that_keep_activations(keep, before, strategy):
    model, x = Net(), torch.randn(5, 4)
    keep(model)
    of_class(model, lambda self, x: self.head(self.first(x).tanh() + self.kept["out"]))
    if before:
        model(x)
    held = dict(model.kept)
    rows = pexgrad.per_example_grad(model, squares, strategy=strategy)(dict(model.named_parameters()), x)
    assert model.kept.keys() == held.keys() and all(model.kept[k] is v for k, v in held.items())
    assert_rows_equal(rows, rows_of(model, squares, x, torch.zeros(5)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wrapped_forward_leaves_the_model_as_it_is(strategy):
    model, x = Net(), torch.randn(5, 4)
    plain = model.forward

    def forward(x):
        model.calls += 1
        return plain(x)

    model.forward = forward
    pexgrad.per_example_grad(model, squares, strategy=strategy)(dict(model.named_parameters()), x)
    assert model.calls == 0 and model.forward is forward


class Distilled(nn.Module):
    """With a teacher that is none of its modules."""

    def __init__(self, hide):
        super().__init__()
        self.lin = nn.Linear(4, 3)
        teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
        object.__setattr__(self, "hidden", hide(teacher))

    def forward(self, x):
        hidden = getattr(self.hidden, "module", self.hidden)
        with torch.no_grad():
            target = (hidden[0] if isinstance(hidden, list) else hidden)(x)
        return self.lin(x) - target


class Holder:
    def __init__(self, module):
        self.module = module


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hide", [lambda t: t, lambda t: [t], Holder], ids=["attribute", "list", "object"])
def test_a_module_that_is_hidden(hide, strategy):
    model, x = Distilled(hide), torch.randn(5, 4)
    rows = pexgrad.per_example_grad(model, squares, strategy=strategy)(dict(model.named_parameters()), x)
    assert_rows_equal(rows, rows_of(model, squares, x, torch.zeros(5)))


class Scaled(Net):
    """With a scale that its copies are to go without."""

    def __init__(self):
        super().__init__()
        self.table = {"scale": 3.0}

    def forward(self, x):
        return super().forward(x) * self.table.get("scale", 1.0)


class Forgetful(Scaled):
    def __getstate__(self):
        return {**vars(self), "table": {}}


class Remade(Scaled):
    def __deepcopy__(self, memo):
        other = Remade()
        other.first, other.head = copy.deepcopy((self.first, self.head), memo)
        other.table.clear()
        return other


class Single(Scaled):
    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [Forgetful, Remade, Single])
def test_classes_with_ways_of_their_own_to_be_copied(kind, inside, strategy):
    model, x = kind(), torch.randn(5, 4)
    model = nn.Sequential(nn.Linear(4, 4), model) if inside else model
    rows = pexgrad.per_example_grad(model, squares, strategy=strategy)(dict(model.named_parameters()), x)
    assert_rows_equal(rows, rows_of(model, squares, x, torch.zeros(5)))
    assert all(m.table for m in model.modules() if isinstance(m, Scaled))


class Scale:
    """What a module holds beside its layers, with a table that copies are to go without."""

    def __init__(self):
        self.table = {"scale": 3.0}

    def __call__(self, x):
        return x * self.table.get("scale", 1.0)


class ForgetfulScale(Scale):
    def __getstate__(self):
        return {"table": {}}


class RemadeScale(Scale):
    def __deepcopy__(self, memo):
        other = RemadeScale()
        other.table.clear()
        return other


class LockedScale(Scale):
    """What it leaves out has no copy."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __getstate__(self):
        return {"table": self.table}


class Holder:
    def __init__(self, scale):
        self.scale = scale


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [ForgetfulScale, RemadeScale, LockedScale])
def test_objects_with_ways_of_their_own_to_be_copied(kind, inside, strategy):
    model, x = Net(), torch.randn(5, 4)
    model.held = Holder(kind()) if inside else kind()
    scale = (lambda self: self.held.scale) if inside else (lambda self: self.held)
    of_class(model, lambda self, x: scale(self)(self.head(self.first(x).tanh())))
    rows = pexgrad.per_example_grad(model, squares, strategy=strategy)(dict(model.named_parameters()), x)
    assert_rows_equal(rows, rows_of(model, squares, x, torch.zeros(5)))
    assert scale(model).table


class Tanh(nn.Module):
    def forward(self, w):
        return w.tanh()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_while_parametrizations_are_cached(strategy):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(5, 4)
    parametrize.register_parametrization(model[0], "weight", Tanh())
    params = dict(model.named_parameters())
    fn = pexgrad.per_example_grad(model, squares, strategy=strategy)
    with parametrize.cached():
        held = model[0].weight
        rows = fn(params, x)
        assert model[0].weight is held, "the caller's own is still there"
    assert_rows_equal(rows, rows_of(model, squares, x, torch.zeros(5)))
