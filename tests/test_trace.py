"""One trace for each input signature, none for a new batch size, and what leads to another."""

from __future__ import annotations

import copy
import dataclasses
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, labels, wave
from oracle import assert_rows_equal, rows_of
from torch._higher_order_ops import while_loop

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )


def named(model):
    return dict(model.named_parameters())


def check(fn, model, x, y=None, loss=F.cross_entropy):
    assert_rows_equal(fn(named(model), x, y), rows_of(model, loss, x, y))


@pytest.mark.parametrize("first", [0, 1, 2, 5, 13])
def test_the_first_batch_may_have_any_size(first):
    """4 and 5 are sizes of other dimensions as well, and 13 is what a trace may take for an example."""
    model = cnn()
    fn = pexgrad.per_example_grad(model)
    for b in (first, 0, 1, 2, 3, 4, 5, 13):
        check(fn, model, torch.randn(b, 2, 5, 5), labels(b))
    assert fn.trace_count == 1


def test_another_shape_is_another_signature_and_the_old_one_is_kept():
    model = cnn()
    fn = pexgrad.per_example_grad(model)
    for size in (5, 6, 5, 6):
        check(fn, model, torch.randn(3, 2, size, size), labels(3))
    assert fn.trace_count == 2


def test_another_dtype_is_another_signature():
    model = nn.Linear(4, 5)
    fn = pexgrad.per_example_grad(model)
    check(fn, model, torch.randn(3, 4), labels(3))
    model.float()
    rows = fn(named(model), torch.randn(3, 4).float(), labels(3))
    assert rows["weight"].dtype == torch.float32
    assert fn.trace_count == 2


def test_training_flags_are_part_of_the_signature():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 5)).eval()
    fn = pexgrad.per_example_grad(model)
    check(fn, model, torch.randn(3, 2, 5), labels(3))
    with pytest.raises(pexgrad.PexgradError, match=r"(?i)batch.?norm"):
        fn(named(model.train()), torch.randn(3, 2, 5), labels(3))
    check(fn, model.eval(), torch.randn(3, 2, 5), labels(3))


def test_another_structure_is_another_signature():
    model = Net(lambda s, x, z=None: s.lin(x) if z is None else s.lin(x * z), lin=nn.Linear(4, 5))
    fn = pexgrad.per_example_grad(model)
    x, z = torch.randn(3, 4), torch.randn(3, 4)
    check(fn, model, (x, None), labels(3))
    check(fn, model, (x, z), labels(3))
    check(fn, model, {"x": x, "z": z}, labels(3))
    check(fn, model, x, labels(3))


def test_plain_values_among_the_inputs_are_part_of_the_signature():
    model = Net(lambda s, x, power: s.lin(x) ** power, lin=nn.Linear(4, 5))
    fn = pexgrad.per_example_grad(model, wave)
    for power in (2, 3, 2):
        check(fn, model, (torch.randn(3, 4), power), loss=wave)


def test_values_of_buffers_and_frozen_parameters_are_read_at_every_call():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh()).eval()
    model[0].bias.requires_grad_(False)
    fn = pexgrad.per_example_grad(model, wave)
    x = torch.randn(3, 2, 5)
    check(fn, model, x, loss=wave)
    model[1].running_mean.normal_()
    model[0].bias.data.normal_()
    check(fn, model, x, loss=wave)
    assert fn.trace_count == 1


@pytest.mark.parametrize("sizes", [(3, 8), (8, 3), (1, 8, 2)])
def test_a_branch_on_the_batch_size_is_noticed(sizes):
    def forward(s, x):
        return (
            s.b(torch.tanh(s.a(x)))
            if x.shape[0] < 5
            else s.b((s.a(x).exp() - (-s.a(x)).exp()) / (s.a(x).exp() + (-s.a(x)).exp()))
        )

    model = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 5))
    fn = pexgrad.per_example_grad(model)
    for b in sizes:
        check(fn, model, torch.randn(b, 4), labels(b))
    assert fn.trace_count == 2


@pytest.mark.parametrize("size", [lambda x: len(x), lambda x: x.shape[0], lambda x: x.size()[0]])
def test_the_batch_size_in_a_shape(size):
    model = Net(lambda s, x: s.lin(x.view(size(x), -1)) + torch.ones(size(x), 1), lin=nn.Linear(6, 5))
    fn = pexgrad.per_example_grad(model)
    for b in (3, 4, 1, 7):
        check(fn, model, torch.randn(b, 2, 3), labels(b))


def measured(s, x):
    """Code that asks for the smallest of all sizes, and another one may be as small as a batch of one."""
    if min(x.shape) <= 0:
        raise ValueError("nothing to look at")
    return s.tell(x.flatten(1)) + s.locate(x.flatten(1))[:, :5]


def alone(s, x):
    return s.tell(x.flatten(1) * (3 if x.shape[0] == 1 else 2))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("align_corners", [True, False])
def test_a_spatial_transformer_has_one_graph_for_every_batch_size(dims, align_corners):
    """Torch's own `affine_grid` asks for the smallest of all sizes, the batch's among them."""

    def forward(s, x):
        theta = s.locate(x.flatten(1)).unflatten(1, (dims, dims + 1))
        grid = F.affine_grid(theta, x.shape, align_corners=align_corners)
        seen = s.look(F.grid_sample(x, grid, align_corners=align_corners).flatten(2)).flatten(1)
        return s.tell(seen)

    n = 4**dims
    layers = {
        "locate": nn.Linear(2 * n, dims * (dims + 1)),
        "look": nn.Conv1d(2, 3, 2),
        "tell": nn.Linear(3 * n - 3, 5),
    }
    model = Net(forward, **layers)
    fn = pexgrad.per_example_grad(model)
    for b in (5, 1, 2, 3, 0):
        check(fn, model, torch.randn(b, 2, *[4] * dims), labels(b))
    assert fn.trace_count == 1


def test_code_that_asks_for_a_plain_tensor():
    def forward(s, x):
        h = s.first(x).as_subclass(torch.Tensor)
        h.relu_()  # the view's memory is the value's own
        return s.last(h)

    model = Net(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 5))
    fn = pexgrad.per_example_grad(model)
    for b in (5, 1, 2):
        check(fn, model, torch.randn(b, 4), labels(b))
    assert fn.trace_count == 1 and "as_subclass" not in vars(torch.Tensor)


@pytest.mark.parametrize("forward", [measured, alone])
def test_one_example_that_no_trace_serves_is_its_own_definition(forward):
    model = Net(forward, locate=nn.Linear(16, 6), tell=nn.Linear(16, 5))
    params, x, y = named(model), torch.randn(1, 1, 4, 4), labels(1)
    want = rows_of(model, F.cross_entropy, x, y)
    fn = pexgrad.per_example_grad(model)
    out = {k: torch.empty_like(r) for k, r in want.items()}
    for _ in range(2):
        assert_rows_equal(fn(params, x, y), want)
        assert fn(params, x, y, out=out)["tell.weight"].data_ptr() == out["tell.weight"].data_ptr()
        assert_rows_equal(out, want)
    assert fn.trace_count == 0
    clipped = pexgrad.clipped_grad(model, max_norm=1e-2)(params, x, y)
    norm = pexgrad.per_example_jacobian(model)(params, x, y).norms()
    assert_rows_equal(clipped.grads, {k: r[0] * 1e-2 / norm for k, r in want.items()})
    lines = fn.explain(params, x, y).lines
    assert {(line.rule, line.rows) for line in lines} == {("naive", "loop")}
    with pytest.raises(pexgrad.TraceError, match="treats a batch of one in another way than larger ones"):
        fn.lower(params, x, y)


def test_a_last_chunk_of_one_example_that_no_trace_serves():
    model = Net(measured, locate=nn.Linear(16, 6), tell=nn.Linear(16, 5))
    x, y = torch.randn(5, 1, 4, 4), labels(5)
    for size in (2, 1, None):
        check(pexgrad.per_example_grad(model, chunk_size=size), model, x, y)


def test_a_batch_of_one_treated_in_another_way_than_larger_ones():
    """Then the definition is not what the model does with a batch."""
    model = Net(alone, tell=nn.Linear(16, 5))
    with pytest.raises(pexgrad.VerificationError, match="treats a batch of one"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(5, 1, 4, 4), labels(5))


@pytest.mark.parametrize("size", [2, 5, 13])
def test_a_batch_that_is_as_large_as_a_shape_is_compared_with(size):
    """Python compares `(B, 5) == (5,)` number by number, and what one example is told decides."""
    centre = torch.randn(size)

    def forward(s, x):
        h = s.a(x)
        h = h * centre if h.shape != centre.shape else h
        return s.b(h * 3 if h.shape == (size, size, 7) or len(x) == size else torch.tanh(h))

    model = Net(forward, a=nn.Linear(4, size), b=nn.Linear(size, 5))
    fn = pexgrad.per_example_grad(model)
    for b in (size, size + 1, size, 1, 0):
        check(fn, model, torch.randn(b, 4), labels(b))
    assert fn.trace_count == 1


def test_a_batch_size_made_a_plain_number_is_refused_with_the_line():
    model = Net(lambda s, x: s.lin(x.view(int(x.shape[0]), -1)), lin=nn.Linear(6, 5))
    with pytest.raises(pexgrad.TraceError, match=r"test_trace\.py:\d+\) turns .* plain number"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(3, 2, 3), labels(3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: torch.kron(s.lin(x), torch.ones(1, 2)),
        lambda s, x: torch.stack([s.lin(row) for row in x]),
        lambda s, x: torch.stack([s.lin(row) for row in x.unbind()]),
    ],
    ids=["kron", "iteration", "unbind"],
)
def test_a_function_of_torch_that_fixes_the_batch_size(forward):
    model = Net(forward, lin=nn.Linear(6, 5))
    match = (
        r"a function of torch that the model calls \(at .*test_trace.py:\d+\) turns .* loop over the examples"
    )
    with pytest.raises(pexgrad.TraceError, match=match):
        pexgrad.per_example_grad(model)(named(model), torch.randn(3, 6), labels(3))


def test_a_batch_size_written_into_the_code():
    """A model that only works at one batch size is no model of one example."""
    model = Net(lambda s, x: s.lin(x.view(3, 4)), lin=nn.Linear(4, 5))
    with pytest.raises(pexgrad.PexgradError):
        pexgrad.per_example_grad(model)(named(model), torch.randn(3, 4), labels(3))


def test_what_a_forward_keeps_on_the_module_is_no_part_of_the_trace():
    def forward(s, x):
        if s.table is None:
            s.table = s.lin.weight.detach().abs().sum(0)
        s.calls.append(x.shape)
        return s.lin(x * s.table)

    model = Net(forward, lin=nn.Linear(4, 5), table=None, calls=[])
    fn = pexgrad.per_example_grad(model)
    rows = fn(named(model), torch.randn(3, 4), labels(3))
    assert all(type(r) is torch.Tensor for r in rows.values())
    model(torch.randn(2, 4)).sum().backward()
    assert all(type(n) is int for shape in model.calls for n in shape)


def test_autocast_is_part_of_the_signature():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).float()
    x, y = torch.randn(3, 4).float(), labels(3)
    fn = pexgrad.per_example_grad(model)
    full = fn(named(model), x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = fn(named(model), x, y)
        want = rows_of(model, F.cross_entropy, x, y)
    assert_rows_equal(half, want, 0.02)
    assert all(r.dtype == torch.float32 for r in half.values())
    assert any((half[k] - full[k]).abs().max() > 1e-6 for k in full)
    assert fn.trace_count == 2


def test_the_model_may_be_changed_between_calls():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    fn = pexgrad.per_example_grad(model)
    x, y = torch.randn(3, 4), labels(3)
    check(fn, model, x, y)
    model[2] = nn.Linear(6, 7)
    check(fn, model, x, y)


def test_an_error_in_the_model_is_not_swallowed():
    def forward(s, x):
        raise KeyError("vocabulary")

    model = Net(forward, lin=nn.Linear(4, 5))
    with pytest.raises(Exception, match="vocabulary"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(3, 4), labels(3))


def test_the_global_state_of_torch_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 5))
    before = len, torch.Tensor.register_hook, torch.is_grad_enabled(), torch.get_default_dtype()
    pexgrad.per_example_grad(model)(named(model), torch.randn(3, 4), labels(3))
    assert before == (len, torch.Tensor.register_hook, torch.is_grad_enabled(), torch.get_default_dtype())


def test_gradients_switched_off_and_left_off_are_refused():
    def forward(s, x):
        h = s.lin(x)
        torch.set_grad_enabled(False)
        return h

    model = Net(forward, lin=nn.Linear(4, 5))
    with pytest.raises(pexgrad.TraceError, match=r"leaves them off"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(3, 4), labels(3))
    assert torch.is_grad_enabled()


def test_equal_plain_values_of_other_types_are_other_signatures():
    model = Net(lambda s, x, flag: s.lin(x) if flag is True else 2 * s.lin(x), lin=nn.Linear(4, 5))
    fn = pexgrad.per_example_grad(model, wave)
    for flag in (True, 1, 1.0):
        check(fn, model, (torch.randn(3, 4), flag), loss=wave)


class Settings:
    def __init__(self):
        self.scale = 2.0


KEPT = {  # kept on the module, and how it is changed there
    "dict": (lambda: {"scale": 2.0}, lambda m: m.kept.update(scale=3.0), lambda kept: kept["scale"]),
    "key": (lambda: {2.0: None}, lambda m: m.kept.update({2.0: None, 3.0: None}), lambda kept: sum(kept)),
    "list": (lambda: [2.0], lambda m: m.kept.append(3.0), sum),
    "nested": (lambda: {"a": [{"b": 2.0}]}, lambda m: m.kept["a"][0].update(b=3.0), lambda kept: kept["a"][0]["b"]),
    "object": (Settings, lambda m: setattr(m.kept, "scale", 3.0), lambda kept: kept.scale),
    "tensor": (lambda: torch.tensor(2.0), lambda m: setattr(m, "kept", torch.tensor(3.0)), lambda kept: kept),
    "tensor in place": (lambda: torch.tensor(2.0), lambda m: m.kept.fill_(3.0), lambda kept: kept),
    "tensor in a list": (lambda: [torch.tensor(2.0)], lambda m: m.kept.__setitem__(0, torch.tensor(3.0)), lambda kept: kept[0]),
}  # fmt: skip


@pytest.mark.parametrize("how", KEPT)
def test_what_is_kept_on_the_module_may_be_changed_between_calls(how):
    make, change, read = KEPT[how]
    model = Net(lambda s, x: s.lin(x) * read(s.kept), lin=nn.Linear(4, 5))
    model.kept = make()
    params, x, y = dict(model.named_parameters()), torch.randn(3, 4), labels(3)
    fn = pexgrad.per_example_grad(model)
    for _ in range(2):
        assert_rows_equal(fn(params, x, y), rows_of(model, torch.nn.functional.cross_entropy, x, y))
        change(model)


def test_tensors_that_a_forward_replaces_and_does_not_read_lead_to_no_new_trace():
    """Caches of attention maps, the weight that weight norm leaves behind."""

    def forward(s, x):
        s.kept = [s.lin(x)]
        return s.kept[0]

    model = Net(forward, lin=nn.Linear(4, 5))
    params, x, y = dict(model.named_parameters()), torch.randn(3, 4), labels(3)
    fn = pexgrad.per_example_grad(model)
    model(x)
    fn(params, x, y)
    model.kept[0] = torch.randn(3, 5)
    fn(params, x, y)
    assert fn.trace_count == 1


def test_a_backward_hook_that_is_added_later_is_refused_too():
    model = nn.Sequential(nn.Linear(4, 5))
    params, x, y = dict(model.named_parameters()), torch.randn(3, 4), labels(3)
    fn = pexgrad.per_example_grad(model)
    fn(params, x, y)
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(pexgrad.TraceError, match="backward hook"):
        fn(params, x, y)


def test_functional_calls_of_the_same_module_in_between_lead_to_no_new_trace():
    """`functional_call` gives a recurrent layer new lists of the same weights."""
    model = Net(lambda s, x: s.lstm(x)[0], lstm=nn.LSTM(4, 3, batch_first=True))
    params, x = named(model), torch.randn(2, 5, 4)
    fn = pexgrad.per_example_grad(model, wave)
    for _ in range(3):
        assert_rows_equal(fn(params, x), rows_of(model, wave, x, None))
        torch.func.functional_call(model, {k: p.detach() for k, p in params.items()}, (x,))
    assert fn.trace_count == 1


def test_equal_containers_are_the_same_setting():
    model = Net(lambda s, x: s.lin(x) * s.kept["scale"][0], lin=nn.Linear(4, 5))
    x, y = torch.randn(3, 4), labels(3)
    fn = pexgrad.per_example_grad(model)
    for _ in range(2):
        model.kept = {"scale": [2], "none": {}}
        check(fn, model, x, y)
    model.kept = {"scale": [2], "none": {"other": 1}}
    check(fn, model, x, y)
    assert fn.trace_count == 2


def test_buffers_are_told_apart_by_name():
    model = Net(lambda s, x: s.lin(x) * s.a + s.lin(x) ** 2 * s.b, lin=nn.Linear(4, 5))
    model.register_buffer("a", torch.full((5,), 2.0))
    model.register_buffer("b", torch.full((5,), 3.0))
    x, y = torch.randn(3, 4), labels(3)
    fn = pexgrad.per_example_grad(model)
    check(fn, model, x, y)
    a = model.a
    del model.a
    model.register_buffer("a", a)  # now the last one
    check(fn, model, x, y)


@pytest.mark.parametrize("flat", [lambda x: x.contiguous().view(-1, 4), lambda x: x.reshape(-1, 4)])
@pytest.mark.parametrize("first", ["dense", "strided"])
def test_a_batch_that_is_laid_out_otherwise(flat, first):
    """In a trace, whose batch is dense, both are views; of every second example they are copies."""
    model = Net(lambda s, x: s.lin(flat(x)).view(x.shape[0], -1), lin=nn.Linear(4, 2))
    fn = pexgrad.per_example_grad(model, wave)
    batches = {"dense": torch.randn(5, 3, 4), "strided": torch.randn(10, 3, 4)[::2]}
    for kind in (first, "dense", "strided"):
        check(fn, model, batches[kind], None, wave)


def test_another_default_dtype_is_another_signature():
    """Of numbers that the code makes."""
    model = Net(lambda s, x: s.linear(x) * torch.tensor(0.1), linear=nn.Linear(4, 5))
    fn = pexgrad.per_example_grad(model)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            check(fn, model, torch.randn(3, 4, dtype=torch.float64), labels(3))
    finally:
        torch.set_default_dtype(torch.float64)
    assert fn.trace_count == 2


def test_a_tensor_that_the_model_writes_to():
    """What is in no buffer is written to where the model's own code runs, in a trace, and by no later call."""
    model = Net(lambda s, x: s.linear(x) + 0 * s.calls.add_(1).sum(), linear=nn.Linear(4, 5))
    model.calls = torch.zeros(2)
    fn = pexgrad.per_example_grad(model)
    check(fn, model, torch.randn(3, 4), labels(3))
    before = model.calls.clone()
    for b in (3, 5):
        fn(named(model), torch.randn(b, 4), labels(b))
    assert torch.equal(model.calls, before) and fn.trace_count == 1
    model = Net(lambda s, x: s.linear(x) * s.calls.add_(1), linear=nn.Linear(4, 5))
    model.calls = torch.zeros(5)
    with pytest.raises(pexgrad.VerificationError):
        pexgrad.per_example_grad(model)(named(model), torch.randn(3, 4), labels(3))


class Cached(nn.Module):
    """With room for so many examples."""

    def __init__(self, room):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(room, 4))

    def forward(self, x):
        self.cache[: x.shape[0]] = self.lin(x)
        return self.cache[: x.shape[0]] * 2


def test_room_for_fewer_examples_than_a_trace_pretends_to_see():
    model = Cached(8)
    fn = pexgrad.per_example_grad(model)
    for b in (5, 3, 8, 1):
        x, y = torch.randn(b, 4), labels(b, 4)
        assert_rows_equal(fn(named(model), x, y), rows_of(copy.deepcopy(model), F.cross_entropy, x, y))
    assert fn.trace_count == 1
    assert not model.cache.any()


def branching(ask):
    """A model whose branch torch's own `if` takes."""

    def forward(s, x):
        return torch.cond(ask(s, x), s.one, lambda h: -s.other(h) * h.new_ones(3), (x,))

    return Net(forward, one=nn.Linear(4, 3), other=nn.Linear(4, 3), flag=torch.tensor(True))


@pytest.mark.parametrize(
    "ask",
    [
        lambda s, x: torch.tensor(True),
        lambda s, x: s.flag,
        lambda s, x: (s.other.weight.shape[0] > 5) | s.flag.logical_not(),
        lambda s, x: x.dim() == 2,
    ],
)
def test_branches_of_torch_itself(ask):
    model, x, y = branching(ask), torch.randn(5, 4), labels(5, 3)
    fn = pexgrad.per_example_grad(model)
    for flag in (True, False, True):
        model.flag.fill_(flag)
        for b in (5, 2, 7):
            x, y = torch.randn(b, 4), labels(b, 3)
            assert_rows_equal(fn(named(model), x, y), rows_of(model, F.cross_entropy, x, y))
    multi = pexgrad.per_example_grad(model, strategy="multi")(named(model), x, y)
    assert_rows_equal(multi, rows_of(model, F.cross_entropy, x, y))


def test_a_branch_of_torch_itself_by_data_is_refused():
    model = branching(lambda s, x: x.sum() > 0)
    with pytest.raises(pexgrad.TraceError, match=r"reads a number from floating inputs \(at .*test_trace.py"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(5, 4), labels(5, 3))


def repeated(until, step):
    """A model that takes steps in a loop of torch's own."""

    def forward(s, x):
        return while_loop(
            lambda i, h: (i < 3) & until(h), lambda i, h: (i + 1, step(h)), (torch.tensor(0), s.lin(x))
        )[1]

    return Net(forward, lin=nn.Linear(4, 3))


def always(h):
    return torch.tensor(True)


@pytest.mark.filterwarnings("ignore")  # of a prototype
def test_loops_of_torch_itself():
    model, x, y = repeated(always, torch.sin), torch.randn(5, 4), labels(5, 3)
    fn = pexgrad.per_example_grad(model)
    for b in (5, 2, 7):
        x, y = torch.randn(b, 4), labels(b, 3)
        assert_rows_equal(fn(named(model), x, y), rows_of(model, F.cross_entropy, x, y))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("until", "step", "through"),
    [
        (lambda h: h.abs().max() > -1, torch.sin, "max"),
        (always, lambda h: h + (h.sum(0) - 99).relu(), "sum"),
    ],
)
def test_examples_that_mix_inside_a_loop(until, step, through):
    """Of no effect on numbers such as these."""
    model = repeated(until, step)
    with pytest.raises(pexgrad.MixedExamplesError, match=f"in while_loop.* depends on {through}"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(5, 4), labels(5, 3))


def test_modules_moved_in_another_thread():
    """While one is traced, in which `to` means something else."""
    moved, started, done = [], threading.Event(), threading.Event()

    def move():
        started.wait()
        moved.append(nn.Linear(2, 2).to(torch.float16))
        done.set()

    def forward(s, x):
        started.set()
        assert done.wait(60)
        return s.lin(x)

    thread = threading.Thread(target=move)
    thread.start()
    model = Net(forward, lin=nn.Linear(4, 3))
    check(pexgrad.per_example_grad(model), model, torch.randn(5, 4), labels(5, 3))
    thread.join()
    assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float16 for p in moved[0].parameters())


@dataclasses.dataclass
class Batch:
    x: torch.Tensor

    def __post_init__(self):
        self.scale, self.mask = 2.0, self.x > 0


@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
def test_a_dataclass_with_more_than_its_fields(strategy):
    model, x, y = (
        Net(lambda s, b: s.lin(b.x * b.mask) * b.scale, lin=nn.Linear(4, 3)),
        torch.randn(5, 4),
        labels(5, 3),
    )
    plain = Net(lambda s, x: s.lin(x.relu()) * 2, lin=model.lin)
    rows = pexgrad.per_example_grad(model, strategy=strategy)(named(model), Batch(x), y)
    assert_rows_equal(rows, rows_of(plain, F.cross_entropy, x, y))


# --- TorchScript ------------------------------------------------------------------------------------

ITS_OWN_WARNING = pytest.mark.filterwarnings("ignore:`torch.jit")


def gate(x, scale: float = 2.0):
    return torch.tanh(x) * scale + x.shape[0] * 0


class Scripted(nn.Module):
    """A function of TorchScript's behind a gate, which may be closed for all examples of a batch."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 5), nn.Linear(5, 3), function

    def forward(self, x, opened):
        return self.b(opened[:, None] * self.function(self.a(x)))


@ITS_OWN_WARNING
@pytest.mark.parametrize("script", [torch.jit.script, lambda f: torch.jit.trace(f, torch.randn(6, 5))])
@pytest.mark.parametrize("opened", [0.0, 1.0])
def test_functions_of_torchscript_that_have_run_before(script, opened):
    model = Scripted(script(gate))
    x, y = (torch.randn(6, 4), torch.full((6,), opened)), labels(6, 3)
    for _ in range(3):  # from then on TorchScript runs a graph of its own
        F.cross_entropy(model(*x), y).backward()
    fn, params = pexgrad.per_example_grad(model), dict(model.named_parameters())
    fn(params, x, y)
    for b in (6, 2):
        x, y = (torch.randn(b, 4), torch.ones(b)), labels(b, 3)
        assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    assert fn.trace_count == 1


@ITS_OWN_WARNING
def test_torchscript_without_its_code_is_refused():
    function = torch._C._create_function_from_graph("loaded", torch.jit.script(gate).graph)
    model = Scripted(lambda h: function(h, 2.0))
    with pytest.raises(
        pexgrad.TraceError, match=r"'loaded' \(at .*test_trace.py:\d+\) is TorchScript without"
    ):
        pexgrad.per_example_grad(model)(
            dict(model.named_parameters()), (torch.randn(6, 4), torch.ones(6)), labels(6, 3)
        )


def test_an_operation_of_which_torch_knows_no_shape():
    def forward(s, x):
        return torch._fake_quantize_learnable_per_tensor_affine(
            s.lin(x), s.scale.float(), s.scale.float(), 0, 7, 1.0
        )

    model = Net(forward, lin=nn.Linear(4, 3), scale=nn.Buffer(torch.ones(1)))
    with pytest.raises(
        pexgrad.TraceError, match=r"torch knows no shape of its result: use strategy=\"naive\""
    ):
        pexgrad.per_example_grad(model)(named(model), torch.randn(2, 4), labels(2, 3))


def test_a_key_made_of_the_batch_size():
    def forward(s, x):
        return s.lin(x) * s.scales.setdefault(x.shape, torch.ones(3))

    model = Net(forward, lin=nn.Linear(4, 3), scales={})
    with pytest.raises(pexgrad.TraceError, match=r"test_trace.py:\d+\); .* cannot be in the key of a dict"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(2, 4), labels(2, 3))
