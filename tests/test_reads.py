"""What code of a model or a loss reads beside its arguments may change between calls; it is noticed, and nothing else is."""

from __future__ import annotations

import array
import dataclasses
import functools
import sys
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows_equal, rows_of, rows_of_function
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

import pexgrad
from pexgrad.inputs.walk import snapshot

pytestmark = pytest.mark.usefixtures("double")

SCALE, SETTINGS, TENSOR, ACTIVATION = 1.0, {"scale": [1.0]}, torch.ones(3), F.relu
EXTERNAL = types.ModuleType("external")
EXTERNAL.scale, EXTERNAL.steps, EXTERNAL.factor = 1.0, 0, lambda: EXTERNAL.scale


class Namespace:
    scale = 1.0


class Meta(type):
    base = 1.0

    @property
    def scale(cls):
        return cls.base


class Made(metaclass=Meta):
    pass


class Trainer:
    def __init__(self):
        self.scale, self.steps, self.model = 1.0, 0, nn.Linear(2, 2)

    def factor(self):
        return self.scale

    def forward(self, p, x):
        return x @ p["w"] * self.factor()

    def loss(self, output, y):
        return self.scale * F.cross_entropy(output, y, reduction="none")


TRAINER = Trainer()


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.0
    other: object = None


class Hidden:
    base = 1.0

    def __init__(self):
        self._scale, self.other = 1.0, nn.Linear(1, 1)

    @property
    def scale(self):
        return self._scale


class Inherits(Hidden):
    pass


class Doubled(Hidden):
    @property
    def scale(self):
        return 2 * super().scale


class Callable_:
    def __init__(self):
        self.scale, self.other = 1.0, nn.Linear(1, 1)

    def __call__(self, p, x):
        return x @ p["w"] * self.scale


def helper():
    return SCALE


def set_global(name, value):
    return lambda: globals().__setitem__(name, value)


def of_an_object(held, change, name="scale"):
    return (lambda p, x: x @ p["w"] * held.scale) if name == "scale" else (
        lambda p, x: x @ p["w"] * held.base
    ), change


def of_a_namespace():
    held = types.SimpleNamespace(scale=1.0, other=nn.Linear(1, 1))
    return of_an_object(held, lambda: setattr(held, "scale", 3.0))


def of_slots():
    held = Slots(other=nn.Linear(1, 1))
    return of_an_object(held, lambda: setattr(held, "scale", 3.0))


def of_a_property():
    held = Hidden()
    return of_an_object(held, lambda: setattr(held, "_scale", 3.0))


def of_a_property_of_a_base_class():
    held = Doubled()
    return of_an_object(held, lambda: setattr(held, "_scale", 3.0))


def of_a_base_class():
    return of_an_object(Inherits(), lambda: setattr(Hidden, "base", Hidden.base + 2.0), "base")


def of_a_callable_object():
    held = Callable_()
    return held, lambda: setattr(held, "scale", 3.0)


def scaled_by_first(numbers, p, x):
    return x @ p["w"] * numbers[0]


def in_a_cell():
    scale = 1.0

    def f(p, x):
        return x @ p["w"] * scale

    def change():
        nonlocal scale
        scale = 3.0

    return f, change


def in_a_cell_of_a_comprehension():
    scale = 1.0

    def f(p, x):
        return sum([x @ p["w"] * scale * by for by in (1, 2)])

    def change():
        nonlocal scale
        scale = 3.0

    return f, change


def in_a_default():
    def f(p, x, scale=1.0):
        return x @ p["w"] * scale

    return f, lambda: setattr(f, "__defaults__", (3.0,))


def in_a_keyword_default():
    """In code without a single name."""

    def f(p, x, *, scales=[1.0]):  # noqa: B006
        return x @ p["w"] * scales[0]

    return f, lambda: f.__kwdefaults__["scales"].__setitem__(0, 3.0)


def of_an_import(p, x):
    import external

    return x @ p["w"] * external.scale


def of_a_name_that_is_imported(p, x):
    from external import scale

    return x @ p["w"] * scale


def of_a_function_that_is_imported(p, x):
    from external import factor

    return x @ p["w"] * factor()


def of_a_module():
    """The usual way to make a function of a module: its flags and what it holds count too."""
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.LeakyReLU(0.1))
    return lambda p, x: functional_call(net, {"0.weight": p["w"].T}, (x,)), lambda: setattr(
        net[1], "negative_slope", 0.7
    )


def of_a_frozen_module():
    net = nn.Linear(4, 4)
    return lambda p, x: net(x) @ p["w"], lambda: setattr(net, "weight", nn.Parameter(torch.eye(4)))


FUNCTIONS = {
    "cell": in_a_cell,
    "cell in a comprehension": in_a_cell_of_a_comprehension,
    "default": in_a_default,
    "keyword default": in_a_keyword_default,
    "import": lambda: (of_an_import, lambda: setattr(EXTERNAL, "scale", 3.0)),
    "imported name": lambda: (of_a_name_that_is_imported, lambda: setattr(EXTERNAL, "scale", 3.0)),
    "imported function": lambda: (of_a_function_that_is_imported, lambda: setattr(EXTERNAL, "scale", 3.0)),
    "namespace": of_a_namespace,
    "slots": of_slots,
    "property": of_a_property,
    "base class": of_a_base_class,
    "property of a base class": of_a_property_of_a_base_class,
    "callable object": of_a_callable_object,
    "module": of_a_module,
    "frozen module": of_a_frozen_module,
    "global": lambda: (lambda p, x: x @ p["w"] * SCALE, set_global("SCALE", 3.0)),
    "global of a helper": lambda: (lambda p, x: x @ p["w"] * helper(), set_global("SCALE", 3.0)),
    "global in a nested function": lambda: (lambda p, x: (lambda: x @ p["w"] * SCALE)(), set_global("SCALE", 3.0)),
    "global in a comprehension": lambda: (lambda p, x: sum([x @ p["w"] * SCALE for _ in "ab"]), set_global("SCALE", 3.0)),
    "global dict": lambda: (lambda p, x: x @ p["w"] * SETTINGS["scale"][0], lambda: SETTINGS["scale"].__setitem__(0, 3.0)),
    "global function": lambda: (lambda p, x: ACTIVATION(x @ p["w"]), set_global("ACTIVATION", torch.tanh)),
    "global tensor": lambda: (lambda p, x: x @ p["w"] * TENSOR, set_global("TENSOR", torch.full((3,), 2.0))),
    "global tensor in place": lambda: (lambda p, x: x @ p["w"] * TENSOR, lambda: TENSOR.mul_(3)),
    "number of a global tensor": lambda: (lambda p, x: x @ p["w"] * TENSOR[0].item(), lambda: TENSOR.mul_(3)),
    "attribute of a class": lambda: (lambda p, x: x @ p["w"] * Namespace.scale, lambda: setattr(Namespace, "scale", 3.0)),
    "property of a metaclass": lambda: (lambda p, x: x @ p["w"] * Made.scale, lambda: setattr(Meta, "base", Meta.base + 2.0)),
    "attribute of another module": lambda: (lambda p, x: x @ p["w"] * EXTERNAL.scale, lambda: setattr(EXTERNAL, "scale", 3.0)),
    "attribute of an object": lambda: (lambda p, x: x @ p["w"] * TRAINER.scale, lambda: setattr(TRAINER, "scale", 3.0)),
    "attributes in a list": lambda: (
        lambda p, x: sum([x @ p["w"] * getattr(TRAINER, n) for n in ("scale", "steps")]), lambda: setattr(TRAINER, "steps", 3)
    ),
    "method of an object": lambda: (lambda p, x: x @ p["w"] * TRAINER.factor(), lambda: setattr(TRAINER, "scale", 3.0)),
    "bound method": lambda: (TRAINER.forward, lambda: setattr(TRAINER, "scale", 3.0)),
    "partial": lambda: (functools.partial(scaled_by_first, SETTINGS["scale"]), lambda: SETTINGS["scale"].insert(0, 3)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    for name, value in (
        ("SCALE", 1.0),
        ("SETTINGS", {"scale": [1.0]}),
        ("TENSOR", torch.ones(3)),
        ("ACTIVATION", F.relu),
    ):
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(Namespace, "scale", 1.0)
    monkeypatch.setattr(EXTERNAL, "scale", 1.0)
    monkeypatch.setitem(sys.modules, "external", EXTERNAL)
    monkeypatch.setitem(globals(), "TRAINER", Trainer())


GENERIC = """
class Scaled[T]:
    base: T = 1.0

    def __init__(self, scale: T):
        self.scale = scale

    def by[S](self, x: S, times: int = 1) -> S:
        return sum([x * self.scale * self.base * times for _ in "ab"])


def f[T: dict](p: T, x):
    type Rows = list[T]
    return held.by(x @ p["w"])
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
@pytest.mark.parametrize("change", ["object", "class"])
def test_what_code_with_type_parameters_reads(change):
    exec(GENERIC, space := {"__name__": "script"})
    held = space["held"] = space["Scaled"](1.0)
    params, x, y = {"w": torch.randn(4, 3)}, torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(space["f"])
    for number in (1.0, 3.0):
        setattr(*((held, "scale") if change == "object" else (type(held), "base")), number)
        assert_rows_equal(fn(params, x, y), rows_of_function(space["f"], params, F.cross_entropy, x, y))
    assert fn.trace_count == 2


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_a_function_reads(kind):
    f, change = FUNCTIONS[kind]()
    params, x, y = {"w": torch.randn(4, 3)}, torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(f)
    before = fn(params, x, y)
    assert_rows_equal(before, rows_of_function(f, params, F.cross_entropy, x, y))
    fn(params, x, y)
    assert fn.trace_count == 1
    change()
    after = fn(params, x, y)
    assert_rows_equal(after, rows_of_function(f, params, F.cross_entropy, x, y))
    assert not torch.allclose(after["w"], before["w"]), "the change changes the gradient"


def test_what_it_does_not_read_leads_to_no_new_trace():
    other = {"unread": 0}

    def f(p, x):
        return x @ p["w"] * TRAINER.scale * EXTERNAL.scale

    params, x, y = {"w": torch.randn(4, 3)}, torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(f)
    for step in range(3):
        other["unread"] = TRAINER.steps = EXTERNAL.steps = step
        TRAINER.model = nn.Linear(2, 2)
        fn(params, x, y)
    assert fn.trace_count == 1


class Flagged(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.lin, self.hidden, self.flag = nn.Linear(4, 3), [nn.LeakyReLU(0.1)], torch.tensor(1.0)
        self.hides, self.slots = Hidden(), Slots(other=nn.Linear(1, 1))

    class Settings:
        """What is named through the class."""

        scale = 1.0

    def forward(self, x):
        by = self.hides.scale * self.slots.scale * Flagged.Settings.scale
        return self.hidden[0](self.lin(x)) * SCALE * self.scale * self.flag.item() * helper() * by

    def training_step(self):  # no part of the forward
        self.hides.steps += 1


MODULES = {
    "global": lambda m: set_global("SCALE", 3.0)(),
    "attribute of the class": lambda m: setattr(Flagged, "scale", 3.0),
    "number of a tensor": lambda m: m.flag.fill_(3.0),
    "number of a tensor, by its data": lambda m: m.flag.data.mul_(3),
    "another tensor": lambda m: setattr(m, "flag", torch.tensor(3.0)),
    "an object": lambda m: setattr(m.hides, "_scale", 3.0),
    "an object with slots": lambda m: setattr(m.slots, "scale", 3.0),
    "a class in the class": lambda m: setattr(Flagged.Settings, "scale", 3.0),
    "a module in a list": lambda m: setattr(m.hidden[0], "negative_slope", 0.7),
}


@pytest.mark.parametrize("change", MODULES)
def test_what_a_module_reads(change, monkeypatch):
    monkeypatch.setattr(Flagged, "scale", 1.0)
    monkeypatch.setattr(Flagged.Settings, "scale", 1.0)
    model, x, y = Flagged(), torch.randn(5, 4), torch.arange(5) % 3
    params, fn = dict(model.named_parameters()), pexgrad.per_example_grad(model)
    for step in range(2):
        model.hides.steps = step  # which is not read
        assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    assert fn.trace_count == 1
    MODULES[change](model)
    assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))


@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: float(t), lambda t: 2.0 if t > 2 else 1.0,
                                  lambda t: (t * 2).item(), lambda t: t.tolist(), lambda t: float(t.numpy()),
                                  lambda t: 1.0 if (t == 1).all() else 2.0])  # fmt: skip
def test_every_way_to_a_number(read):
    flag = torch.tensor(1.0)

    def f(p, x):
        return x @ p["w"] * read(flag)

    params, x, y = {"w": torch.randn(4, 3)}, torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(f)
    for value in (1.0, 4.0):
        flag.fill_(value)
        assert_rows_equal(fn(params, x, y), rows_of_function(f, params, F.cross_entropy, x, y))


LOSSES = {
    "smoothing": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "label_smoothing", 0.3)),
    "weight": (lambda: nn.CrossEntropyLoss(reduction="sum"), lambda loss: setattr(loss, "weight", torch.tensor([1.0, 2.0, 3.0]))),
    "reduction": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "reduction", "sum")),
    "forward": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "forward", lambda o, y: 3 * F.cross_entropy(o, y))),
    "hook": (nn.CrossEntropyLoss, lambda loss: loss.register_forward_hook(lambda m, a, out: 3 * out)),
    "partial": (lambda: functools.partial(F.cross_entropy, label_smoothing=0), lambda f: f.keywords.update(label_smoothing=0.3)),
    "global": (lambda: lambda o, y: SCALE * F.cross_entropy(o, y, reduction="none"), lambda loss: set_global("SCALE", 3.0)()),
    "object": (lambda: TRAINER.loss, lambda loss: setattr(TRAINER, "scale", 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("through", ["call", "vmap", "often"])
@pytest.mark.parametrize("kind", LOSSES)
def test_what_a_loss_reads(kind, through, monkeypatch):
    """At each call, and by graphs that have the loss written into them."""
    monkeypatch.setattr(pexgrad.calls.repeats, "OFTEN", 1)
    monkeypatch.setattr(pexgrad.calls.repeats, "_seconds", lambda *_: 0.0)
    loss, change = LOSSES[kind][0](), LOSSES[kind][1]
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    params, fn = dict(model.named_parameters()), pexgrad.per_example_grad(model, loss)

    def answer():
        if through == "vmap":
            stacked = {k: torch.stack([p.detach(), p.detach()]) for k, p in params.items()}
            rows = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y)
            return {k: r[1] for k, r in rows.items()}
        return [fn(params, x, y) for _ in range(1 if through == "call" else 4)][-1]

    before = answer()
    assert_rows_equal(before, rows_of(model, loss, x, y))
    change(loss)
    after = answer()
    assert_rows_equal(after, rows_of(model, loss, x, y))
    same = all(map(torch.allclose, tree_leaves(after), tree_leaves(before)))
    assert same == (kind == "reduction"), "of one example, the sum is the mean"


def test_what_a_clip_function_reads():
    model, x, y, bound = nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3, [0.5]
    fn = pexgrad.clipped_grad(model, clip=lambda norms: bound[0] / norms)
    params = {k: p.detach() for k, p in model.named_parameters()}
    stacked = {k: torch.stack([p, p]) for k, p in params.items()}
    before = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y).grads
    bound[0] = 1.0
    after = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y).grads
    for k, g in fn(params, x, y).grads.items():
        torch.testing.assert_close(after[k][1], g)
        torch.testing.assert_close(2 * before[k][1], g)


@pytest.mark.parametrize("read", [float, lambda t: t.item(), lambda t: t.tolist()])
@pytest.mark.parametrize("where", ["loss", "clip"])
def test_numbers_that_a_loss_or_a_clip_function_takes_out_of_a_tensor(read, where):
    model, x, y, flag = nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3, torch.tensor(1.0)
    loss = lambda o, y: read(flag) * F.cross_entropy(o, y, reduction="none")  # noqa: E731
    clip = lambda norms: torch.full_like(norms, read(flag))  # noqa: E731
    fn = (
        pexgrad.clipped_grad(model, clip=clip)
        if where == "clip"
        else pexgrad.clipped_grad(model, loss, clip=torch.ones_like)
    )
    stacked = {k: torch.stack([p.detach()] * 2) for k, p in model.named_parameters()}
    for value in (1.0, 4.0):
        flag.fill_(value)
        got = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y).grads
        for k, g in fn(dict(model.named_parameters()), x, y).grads.items():
            torch.testing.assert_close(got[k][1], g)


class Setting:
    def __init__(self):
        self.scale, self.more = 1.0, {"scales": [1.0]}


@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (Setting, lambda s: s.scale, lambda s: setattr(s, "scale", 3.0)),
        (Setting, lambda s: s.more["scales"][0], lambda s: s.more["scales"].__setitem__(0, 3.0)),
        (lambda: array.array("d", [1.0]), lambda a: a[0], lambda a: a.__setitem__(0, 3.0)),
    ],
)
@pytest.mark.parametrize("through", ["call", "vmap"])
def test_objects_among_the_inputs(make, read, change, through):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x, setting):
            return self.lin(x) * read(setting)

    model, x, y, setting = Scaled(), torch.randn(5, 4), torch.arange(5) % 3, make()
    fn, params = pexgrad.per_example_grad(model), dict(model.named_parameters())
    stacked = {k: torch.stack([p.detach()] * 2) for k, p in params.items()}
    for _ in range(2):
        if through == "call":
            rows = fn(params, (x, setting), y)
        else:
            rows = {k: r[1] for k, r in torch.func.vmap(lambda p: fn(p, (x, setting), y))(stacked).items()}
        naive = pexgrad.per_example_grad(model, strategy="naive")(params, (x, setting), y)
        assert_rows_equal(rows, naive)
        change(setting)


def test_code_that_is_reloaded():
    """As notebooks do: a function gets other code, a class another method."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x):
            return self.scaled(self.lin(x))

        def scaled(self, h):
            return h

    def doubled(self, h):
        return 2 * h

    def tripled(self, h):
        return 3 * h

    model, x, y = Net(), torch.randn(5, 4), torch.arange(5) % 3
    params, fn = dict(model.named_parameters()), pexgrad.per_example_grad(model)
    assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    Net.scaled.__code__ = doubled.__code__
    assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    Net.scaled = tripled
    assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    assert fn.trace_count == 3


def test_a_loss_whose_code_is_reloaded(monkeypatch):
    monkeypatch.setattr(pexgrad.calls.repeats, "OFTEN", 1)
    monkeypatch.setattr(pexgrad.calls.repeats, "_seconds", lambda *_: 0.0)

    def loss(o, y):
        return F.cross_entropy(o, y, reduction="none")

    def doubled(o, y):
        return 2 * F.cross_entropy(o, y, reduction="none")

    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(model, loss)
    for code in (loss.__code__, doubled.__code__):
        loss.__code__ = code
        for _ in range(4):
            assert_rows_equal(fn(dict(model.named_parameters()), x, y), rows_of(model, loss, x, y))


def test_a_program_that_a_library_has_started(monkeypatch):
    """A prompt of Python 3.13 or a profiler gives `__main__` its own file."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", dataclasses.__file__, raising=False)

    class Net(nn.Linear):
        __module__, scale = "__main__", 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model, x, y = Net(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    params, fn = dict(model.named_parameters()), pexgrad.per_example_grad(model)
    for Net.scale in (1.0, 3.0):
        assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))


def test_what_annotations_name_is_not_read():
    class Net(nn.Linear):
        def __annotate_func__(format):  # as Python 3.14 makes it of `trainer: TRAINER.scale`
            return {"trainer": TRAINER.scale}

    model, x, y = Net(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    params, fn = dict(model.named_parameters()), pexgrad.per_example_grad(model)
    for TRAINER.scale in (1.0, 3.0):
        fn(params, x, y)
    assert fn.trace_count == 1


def test_a_counter_on_the_model_is_warned_of():
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(model)

    def count_up():
        for model.steps in range(12):
            fn(dict(model.named_parameters()), x, y)

    with pytest.warns(UserWarning, match="traced 8 times for inputs of one kind") as seen:
        count_up()
    assert len(seen) == 1


def test_a_global_that_is_only_stored_is_not_read():
    class Storing(nn.Linear):
        def forward(self, x):
            global LAST
            LAST = float(x.shape[1])
            return super().forward(x)

    model = Storing(3, 4)
    fn, params = pexgrad.per_example_grad(model), dict(model.named_parameters())
    for number in range(3):
        globals()["LAST"] = float(number)
        fn(params, torch.randn(4, 3), torch.randint(4, (4,)))
    assert fn.trace_count == 1


def test_a_global_with_the_name_of_an_attribute_is_another_thing():
    """As in a script: `self.out(x)` in the model, and `out = fn(params, x, y)` in the loop."""
    space = {"__name__": "script", "nn": nn, "torch": torch, "SCALE": 2.0}
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        class Scaled:
            by = SCALE
        return [self.out(x) * Scaled.by for _ in range(1)][0]
"""
    exec(code, space)
    model = space["Model"]()
    params, x, y = dict(model.named_parameters()), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    fn = pexgrad.per_example_grad(model)
    for i in range(3):
        space["out"] = space["x"] = float(i), fn(params, x, y)
    assert fn.trace_count == 1
    space["SCALE"] = 3.0
    assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    assert fn.trace_count == 2


class WithoutLength(tuple):
    def __len__(self):
        raise NotImplementedError


class WithoutItems(dict):
    def items(self):
        raise KeyError

    values = __iter__ = items


class WithoutIteration(list):
    def __iter__(self):
        raise OSError


@pytest.mark.parametrize("held", [WithoutLength((1, 2)), WithoutItems(a=1), WithoutIteration([1])])
def test_objects_that_refuse_to_be_gone_through(held):
    model = nn.Linear(4, 3)
    model.held = held
    x, y = torch.randn(4, 4), torch.arange(4) % 3
    rows = pexgrad.per_example_grad(model)(dict(model.named_parameters()), x, y)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


def test_what_is_reached_through_other_objects():
    """Of those, too, what the code names; and nothing else."""
    inner, outer = Hidden(), Hidden()
    inner.beta, inner.other, outer.inner = 1.0, nn.Linear(1, 1), inner

    class Scaled:
        def __init__(self):
            self.outer = outer

        def loss(self, o, y):
            return self.outer.inner.beta * F.cross_entropy(o, y, reduction="none")

    scaled, model, x, y = Scaled(), nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    params = dict(model.named_parameters())
    through = {
        "a function": pexgrad.per_example_grad(lambda p, x: F.linear(x, p["weight"]) * outer.inner.beta),
        "a method": pexgrad.per_example_grad(model, scaled.loss),
    }
    given = {"a function": {"weight": model.weight}, "a method": params}
    for inner.steps in range(2):  # which is not read
        first = {k: fn(given[k], x, y) for k, fn in through.items()}
    assert [fn.trace_count for fn in through.values()] == [1, 1]
    inner.beta = 3.0
    want = rows_of_function(
        lambda p, x: 3 * F.linear(x, p["weight"]), given["a function"], F.cross_entropy, x, y
    )
    assert_rows_equal(through["a function"](given["a function"], x, y), want)
    rows = through["a method"](params, x, y)
    assert_rows_equal(rows, {k: 3 * r for k, r in first["a method"].items()})


def test_functions_that_read_nothing_but_functions_are_known_as_such():
    def losses(output, y):
        return F.cross_entropy(output, y, reduction="none")

    def scaled(output, y):
        return losses(output, y) * scale

    def through(output, y):
        return losses(output, y)

    scale = 2.0
    assert [snapshot(f).is_code() for f in (through, scaled)] == [True, False]
