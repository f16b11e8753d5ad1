"""What objects hold that a model holds, or is given: it may change between calls, wherever the code that reads it stands."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import math
import types
import weakref
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows_equal, rows_of
from torch.overrides import TorchFunctionMode

import pexgrad
from pexgrad.calls import traces

pytestmark = pytest.mark.usefixtures("double")

LEVEL = contextvars.ContextVar("LEVEL", default=1.0)
OUTSIDE = types.ModuleType("outside")
OUTSIDE.inner = types.ModuleType("inner")
PARTS = types.ModuleType("parts")


class Scale:
    """Read through the syntax of Python alone, and no part of the settings, since it holds a tensor."""

    def __init__(self):
        self.k, self.table, self.steps = 1.0, torch.ones(3), 0
        self.inner = types.SimpleNamespace(k=1.0, table=torch.ones(3))

    def __call__(self, h):
        return h * self.k * self.table

    def __getitem__(self, i):
        return self.table[i] * self.k

    def __len__(self):
        return int(self.k)

    def __float__(self):
        return self.k

    def __iter__(self):
        return iter([self.k])

    def __mul__(self, h):
        return self.k * h

    def __enter__(self):
        return self.k

    def __exit__(self, *_):
        pass

    def __bool__(self):
        return self.k == 1.0

    def __contains__(self, k):
        return k == self.k

    @functools.cached_property
    def cached(self):
        return self.k

    @classmethod
    def of(cls, scale):
        return scale.k

    def through_inner(self):
        return self.inner.k

    def count(self):
        self.steps += 1


def entered(scale, h):
    with scale as k:
        return h * k


def helped(model, h):
    return h * model.scale.k


def level(h):
    return h * level.k


class Helper:
    def __init__(self, scale):
        self.scale = scale

    def run(self, h):
        return h * self.scale.k


def change_of_k(model):
    model.scale.k = 3.0


def change_of_inner(model):
    model.scale.inner.k = 3.0


READS = {
    "call": lambda m, h: m.scale(h),
    "item": lambda m, h: h * m.scale[2],
    "len": lambda m, h: h * len(m.scale),
    "float": lambda m, h: h * float(m.scale),
    "iterator": lambda m, h: h * next(iter(m.scale)),
    "operator": lambda m, h: m.scale * h,
    "with": lambda m, h: entered(m.scale, h),
    "bool": lambda m, h: h if m.scale else -2 * h,
    "in": lambda m, h: h if 1.0 in m.scale else -2 * h,
    "class method": lambda m, h: h * Scale.of(m.scale),
    "helper": helped,
    "another object": lambda m, h: Helper(m.scale).run(h),
    "text": lambda m, h: h * getattr(m.scale, "k"),  # noqa: B009
}  # fmt: skip


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.lin, self.scale, self.read = nn.Linear(4, 3), Scale(), read
        self.act, self.outside = nn.Tanh(), OUTSIDE.inner

    def forward(self, x):
        return self.act(self.read(self, self.lin(x)))


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(OUTSIDE.inner, "k", 1.0, raising=False)
    level.k = 1.0


@pytest.mark.parametrize("read", READS)
def test_by_the_code_of_an_object(read):
    assert_noticed(Reading(READS[read]), change_of_k)


OTHERS = {
    "an object in an object": (lambda m, h: h * m.scale.through_inner(), change_of_inner),
    "a module in a package": (lambda m, h: h * OUTSIDE.inner.k, lambda m: setattr(OUTSIDE.inner, "k", 3.0)),
    "a module of settings": (lambda m, h: h * m.outside.k, lambda m: setattr(OUTSIDE.inner, "k", 3.0)),
    "an attribute of a function": (lambda m, h: level(h), lambda m: setattr(level, "k", 3.0)),
    "a context variable": (lambda m, h: h * LEVEL.get(), lambda m: LEVEL.set(3.0)),
    "another class": (lambda m, h: h, lambda m: setattr(m.act, "__class__", nn.Sigmoid)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_elsewhere(kind):
    read, change = OTHERS[kind]
    context = contextvars.copy_context()
    context.run(lambda: assert_noticed(Reading(read), change))


def assert_noticed(model, change):
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    fn, params = pexgrad.per_example_grad(model), dict(model.named_parameters())
    before = fn(params, x, y)
    assert_rows_equal(before, rows_of(model, F.cross_entropy, x, y))
    model.scale.count()  # which no forward reads
    fn(params, x, y)
    assert fn.trace_count == 1
    change(model)
    after = fn(params, x, y)
    assert_rows_equal(after, rows_of(model, F.cross_entropy, x, y))
    assert not torch.allclose(after["lin.weight"], before["lin.weight"]), "the change changes the gradient"


class Schedule:
    """Nothing but a number, so that it is looked into as settings are; its methods read more."""

    rate = 1.0

    def __init__(self):
        self.start = 1.0

    def of_global(self):
        return self.start * level.k

    @property
    def read(self):
        return self.start * level.k

    @staticmethod
    def static():
        return level.k

    @classmethod
    def of_class(cls):
        return cls.rate


SCHEDULES = {
    "a method": (lambda s: s.of_global(), lambda: setattr(level, "k", 3.0)),
    "a property": (lambda s: s.read, lambda: setattr(level, "k", 3.0)),
    "a static method": (lambda s: s.static(), lambda: setattr(level, "k", 3.0)),
    "a class method": (lambda s: s.of_class(), lambda: setattr(Schedule, "rate", 3.0)),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_the_methods_of_settings_read(kind, monkeypatch):
    monkeypatch.setattr(Schedule, "rate", 1.0)
    read, change = SCHEDULES[kind]
    model = Reading(lambda m, h: h * read(m.schedule))
    model.schedule = Schedule()
    assert_noticed(model, lambda _: change())


def k_of(scale):
    return scale.k


HANDED_ON = {
    "partial": lambda scale: functools.partial(k_of, scale),
    "partial by name": lambda scale: functools.partial(k_of, scale=scale),
    "partial of a method": lambda scale: functools.partial(Scale.__float__, scale),
    "partial in a list": lambda scale: [functools.partial(k_of, scale)],
}


@pytest.mark.parametrize("kind", HANDED_ON)
def test_an_object_that_a_partial_gives_on(kind):
    scale = Scale()
    model = Reading(lambda m, h: h * (m.held[0] if isinstance(m.held, list) else m.held)())
    model.held = HANDED_ON[kind](scale)
    assert_noticed(model, lambda _: setattr(scale, "k", 3.0))


def first_in(held):
    while not callable(held):
        held = held[0] if isinstance(held, list) else (held if isinstance(held, dict) else vars(held))["r"]
    return held


READERS = {"list": [k_of], "dict": {"r": k_of}, "namespace": types.SimpleNamespace(r=[k_of])}


@pytest.mark.parametrize("kind", READERS)
def test_an_object_that_is_read_by_a_function_in_a_container(kind):
    model = Reading(lambda m, h: h * first_in(m.readers)(m.scale))
    model.readers = READERS[kind]
    assert_noticed(model, change_of_k)


def test_an_object_that_is_read_in_two_places():
    """By other attributes in each, one before the other."""
    scale = Scale()

    def first(h):
        return h * scale.table

    def second(h):
        return h * scale.k

    model = Reading(lambda m, h: second(first(h)))
    model.scale = scale
    assert_noticed(model, change_of_k)
    loss_scale = Scale()
    table = lambda losses: losses * loss_scale.table.sum()  # noqa: E731
    factor = lambda losses: losses * loss_scale.k  # noqa: E731

    def loss(o, y):
        return factor(table(F.cross_entropy(o, y, reduction="none")))

    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    fn, params = pexgrad.per_example_grad(model, loss), dict(model.named_parameters())
    stacked = {k: torch.stack([p.detach()] * 2) for k, p in params.items()}
    for loss_scale.k in (1.0, 3.0):
        rows = torch.func.vmap(lambda p: fn(p, x, y))(stacked)
        assert_rows_equal({k: r[0] for k, r in rows.items()}, rows_of(model, loss, x, y))


def test_an_object_that_is_a_hook():
    class Hook:
        def __init__(self):
            self.k, self.table = 1.0, torch.ones(3)

        def __call__(self, module, given, h):
            return h * self.k

    model, hook = Reading(lambda m, h: h), Hook()
    model.lin.register_forward_hook(hook)
    assert_noticed(model, lambda _: setattr(hook, "k", 3.0))


@pytest.mark.parametrize("change", ["k", "table", "table in place"])
def test_an_object_with_a_tensor_among_the_inputs(change):
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x, scale):
            return self.lin(x) * scale.k * scale.table

    model, x, y, scale = Given(), torch.randn(5, 4), torch.arange(5) % 3, Scale()
    fn, params = pexgrad.per_example_grad(model), dict(model.named_parameters())
    fn(params, (x, scale), y)
    if change == "k":
        scale.k = 3.0
    elif change == "table":
        scale.table = torch.arange(3.0)
    else:
        scale.table.mul_(2)
    want = pexgrad.per_example_grad(model, strategy="naive")(params, (x, scale), y)
    assert_rows_equal(fn(params, (x, scale), y), want)


class Rounded(TorchFunctionMode):
    """Another arithmetic for linear layers."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            args = ((args[0] * self.steps).round() / self.steps, *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_a_mode_of_the_users_is_part_of_the_signature(first):
    model, x, y = (
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)),
        torch.randn(5, 4),
        torch.arange(5) % 3,
    )
    fn, params = pexgrad.per_example_grad(model), dict(model.named_parameters())
    if first == "outside":
        fn(params, x, y)
    for steps in (8, 8, 2):
        with Rounded(steps):
            assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    assert fn.trace_count == 2 + (first == "outside"), "equal modes are one"
    assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))


def test_equal_numbers_are_no_change():
    model, x, y = Reading(lambda m, h: h * m.k * m.n), torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(model)
    for step in range(4):
        model.k, model.n = 0.1 * (1 + 0 * step), int(f"{1000}")
        rows = fn(dict(model.named_parameters()), x, y)
    assert fn.trace_count == 1
    model.k = -0.0
    assert not fn(dict(model.named_parameters()), x, y)["lin.weight"].any()
    assert fn.trace_count == 2 and rows["lin.weight"].any()


EQUAL = {
    "device": lambda: torch.device("cpu", 0),
    "range": lambda: range(1, 7, 2),
    "path": lambda: Path("a") / "b",
    "fraction": lambda: Fraction(1, 3),
    "number of NumPy's": lambda: np.float64(0.1),
    "array": lambda: np.arange(3.0),
    "settings": lambda: types.SimpleNamespace(k=1.0),
    "lambda": lambda: lambda h: h.tanh(),
    "partial": lambda: functools.partial(F.leaky_relu, negative_slope=0.1),
    "nan": lambda: float("nan"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_objects_are_no_change(name):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x, given):
            return self.lin(x) * (1 if self.held is None else 2)

    model, x, y = Holds(), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    fn, params = pexgrad.per_example_grad(model, verify=False), dict(model.named_parameters())
    for _ in range(3):
        model.held, given = EQUAL[name](), EQUAL[name]()
        fn(params, (x, given), y)
    assert fn.trace_count == 1


ARRAYS = {
    "numpy": lambda: np.ones(3),
    "array": lambda: array.array("d", [1.0, 1.0, 1.0]),
    "bytearray": lambda: bytearray([1, 1, 1]),
    "ctypes": lambda: (ctypes.c_double * 3)(1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_changes_in_place(name):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.factors = nn.Linear(4, 3), ARRAYS[name]()

        def forward(self, x):
            return self.lin(x) * float(self.factors[1])

    model, x, y = Holds(), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    fn = pexgrad.per_example_grad(model)
    for factor in (1, 3, 1):
        model.factors[1] = factor
        assert_rows_equal(fn(dict(model.named_parameters()), x, y), rows_of(model, F.cross_entropy, x, y))
    assert fn.trace_count == 2


def test_zeros_of_both_signs_among_the_inputs():
    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x, zero):
            return self.lin(x) * math.copysign(1.0, zero)

    model, x, y = Signed(), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    fn = pexgrad.per_example_grad(model)
    rows = [fn(dict(model.named_parameters()), (x, zero), y)["lin.weight"] for zero in (0.0, -0.0)]
    assert not torch.equal(*rows)


def test_a_number_that_is_read_at_every_step_does_not_pile_up_traces(monkeypatch):
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)
            self.register_buffer("level", torch.tensor(0.5))

        def forward(self, x):
            return self.lin(x) * float(self.level)

    monkeypatch.setattr(traces, "_MOST", 2)
    model, x, y = Read(), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    fn = pexgrad.per_example_grad(model, verify=False)
    for _ in range(4):
        assert_rows_equal(fn(dict(model.named_parameters()), x, y), rows_of(model, F.cross_entropy, x, y))
        model.level.mul_(1.1)
    assert fn.trace_count == 2


def test_what_a_hook_of_all_modules_reads():
    scale = {"k": 1.0}

    def hook(module, args, output):
        return output * scale["k"] if isinstance(module, nn.Linear) else None

    model, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    fn = pexgrad.per_example_grad(model)
    for scale["k"] in (1.0, 2.0, 2.0):
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            got = fn(dict(model.named_parameters()), x, y)
            assert_rows_equal(got, rows_of(model, F.cross_entropy, x, y))
        finally:
            handle.remove()
    assert fn.trace_count == 2


def test_a_recurrent_layer_beside_a_number_is_not_traced_at_every_step():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.level = nn.LSTM(4, 3, batch_first=True), torch.tensor(0.5)

        def forward(self, x):
            return self.lstm(x)[0][:, -1] * float(self.level)

    model, x, y = Read(), torch.randn(5, 2, 4), torch.tensor([0, 2, 1, 1, 0])
    fn = pexgrad.per_example_grad(model)
    for _ in range(3):
        assert_rows_equal(fn(dict(model.named_parameters()), x, y), rows_of(model, F.cross_entropy, x, y))
        with torch.no_grad():
            model.lstm.weight_hh_l0.mul_(1.1)
    assert fn.trace_count == 1


def test_data_that_an_object_holds_is_not_gone_through():
    class Data:
        def __init__(self):
            self.items, self.looked_at = Items(range(5000)), 0

    class Items(list):
        looked_at = 0

        def __iter__(self):
            Items.looked_at += 1
            return super().__iter__()

    model, x, y = Reading(lambda m, h: h), torch.randn(5, 4), torch.arange(5) % 3
    model.data = Data()
    fn = pexgrad.per_example_grad(model)
    fn(dict(model.named_parameters()), x, y)
    before = Items.looked_at
    fn(dict(model.named_parameters()), x, y)
    assert Items.looked_at == before


TABLE, CLASSES = {}, {}
INSIDE, NAMESPACE, EXTERNAL = (
    {"scales": TABLE},
    types.SimpleNamespace(scales=TABLE),
    types.ModuleType("external"),
)
EXTERNAL.scales = TABLE


class Registry:
    def __init__(self):
        self.scales, self.unread = TABLE, CLASSES

    def scale(self, module):
        return self.scales.get(module, 1.0)

    def everywhere(self, module):
        return TABLE.get(module, 1.0)


REGISTRY = Registry()
WEAK = weakref.WeakKeyDictionary()


class Registered(nn.Module):
    table = CLASSES

    def __init__(self, read):
        super().__init__()
        self.lin, self.read, self.own = nn.Linear(4, 3), read, {}

    def forward(self, x):
        return self.lin(x) * self.read(self)

    def unused(self):
        return CLASSES[self]


TABLES = {
    "by module": (lambda m: TABLE.get(m, 1.0), lambda m: TABLE.update({m: 3.0})),
    "by id": (lambda m: TABLE.get(id(m), 1.0), lambda m: TABLE.update({id(m): 3.0})),
    "of one inside": (lambda m: TABLE[m.lin], lambda m: TABLE.update({m.lin: 3.0})),
    "in another": (lambda m: INSIDE["scales"].get(m, 1.0), lambda m: TABLE.update({m: 3.0})),
    "in a namespace": (lambda m: NAMESPACE.scales.get(m, 1.0), lambda m: TABLE.update({m: 3.0})),
    "of a Python module": (lambda m: EXTERNAL.scales.get(m, 1.0), lambda m: TABLE.update({m: 3.0})),
    "of an object": (lambda m: REGISTRY.scales.get(m, 1.0), lambda m: TABLE.update({m: 3.0})),
    "by a method": (lambda m: REGISTRY.scale(m), lambda m: TABLE.update({m: 3.0})),
    "by a method that reads a global": (lambda m: REGISTRY.everywhere(m), lambda m: TABLE.update({m: 3.0})),
    "weak": (lambda m: WEAK.get(m, 1.0), lambda m: WEAK.update({m: 3.0})),
    "its own, by id": (lambda m: m.own.get(id(m), 1.0), lambda m: m.own.update({id(m): 3.0})),
    "of its class": (lambda m: m.table.get(m, 1.0), lambda m: CLASSES.update({m: 3.0})),
}


@pytest.fixture
def _empty_tables():
    yield
    for table in (TABLE, WEAK, CLASSES):
        table.clear()


@pytest.mark.usefixtures("_empty_tables")
@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_modules_outside_is_refused(kind, strategy):
    read, put = TABLES[kind]
    model = Registered(read)
    put(model)
    fn = pexgrad.per_example_grad(model, strategy=strategy)
    with pytest.raises(pexgrad.TraceError, match="a table with the mod"):
        fn(dict(model.named_parameters()), torch.randn(5, 4), torch.arange(5) % 3)


@pytest.mark.usefixtures("_empty_tables")
def test_a_table_of_modules_that_is_copied_or_not_read_is_none_of_that():
    model, others = Registered(lambda m: m.own[m] * TABLE.get(m, 1.0)), nn.Linear(4, 3)
    model.own[model], TABLE[others], CLASSES[model] = 3.0, 2.0, 2.0
    names = {m: n for n, m in model.named_modules()}
    model.lin.register_forward_hook(lambda m, given, h: h * len(names[m]))
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    rows = pexgrad.per_example_grad(model)(dict(model.named_parameters()), x, y)
    want = [
        torch.autograd.grad(F.cross_entropy(model(x[b : b + 1]), y[b : b + 1]), model.lin.weight)[0]
        for b in range(5)
    ]
    torch.testing.assert_close(rows["lin.weight"], torch.stack(want))
