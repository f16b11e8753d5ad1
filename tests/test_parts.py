"""Steps of recurrent layers, whose cotangents are parts of that of the input's map; and sums that only look like them."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from cases.case import Net
from oracle import assert_rows_equal, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def net(forward, **modules):
    return Net(forward, inner=nn.Linear(3, 4), state=nn.Linear(4, 4), **modules)


def loop(step):
    """A recurrence in which `step` joins a part of the input's map with the state's."""

    def forward(s, x):
        h = torch.zeros(len(x), 4)
        for part in s.inner(x).unbind(1):
            h = torch.tanh(step(s, part, h))
        return h

    return forward


def two_uses_of_the_state(s, part, h):
    mapped = s.state(h)
    return part + mapped + mapped.square()


def parts_again(s, x):
    parts, h = s.inner(x).unbind(1), torch.zeros(len(x), 4)
    for part in parts:
        h = torch.tanh(part + s.state(h))
    return h + parts[1]


def map_again(s, x):
    mapped, h = s.inner(x), torch.zeros(len(x), 4)
    for part in mapped.unbind(1):
        h = torch.tanh(part + s.state(h))
    return h + mapped.sum(1)


def map_as_output(s, x):
    mapped, h = s.inner(x), torch.zeros(len(x), 4)
    for part in mapped.unbind(1):
        h = torch.tanh(part + s.state(h))
    return torch.cat([h, mapped.flatten(1)], 1)


def written_part(s, x):
    first, *parts = s.inner(x).clone().unbind(1)
    h = torch.tanh(first + s.state(torch.zeros(len(x), 4)))
    for part in parts:
        h = torch.tanh((part * 1).add_(1) + s.state(h))
    return h


def written_sum(s, part, h):
    return (part + s.state(h)).mul_(2)


def written_map(s, part, h):
    return s.state(h).add_(1) + part


def without_gradient(s, x):
    h = torch.zeros(len(x), 4)
    for i, part in enumerate(s.inner(x).unbind(1)):
        with torch.set_grad_enabled(i > 0):
            h = torch.tanh(part + s.state(h))
    return h


def taken_apart_without_gradient(s, x):
    mapped, h = s.inner(x), torch.zeros(len(x), 4)
    with torch.no_grad():
        parts = mapped.unbind(1)
    for part in parts:
        h = torch.tanh(part + s.state(h))
    return h + mapped.detach().sum(1)


def hooked(s, x):
    mapped, h = s.inner(x), torch.zeros(len(x), 4)
    mapped.register_hook(lambda g: 2 * g)
    for part in mapped.unbind(1):
        total = s.state(h)
        total.register_hook(lambda g: 3 * g)
        h = torch.tanh(part + total)
    return h


FORWARD = {
    "plain": loop(lambda s, part, h: part + s.state(h)),
    "state_first": loop(lambda s, part, h: s.state(h) + part),
    "scaled": loop(lambda s, part, h: torch.add(part, s.state(h), alpha=2)),
    "two_uses_of_the_state": loop(two_uses_of_the_state),
    "twice": loop(lambda s, part, h: s.state(h) + s.state(h) + part),
    "written_sum": loop(written_sum),
    "written_map": loop(written_map),
    "detached": loop(lambda s, part, h: part.detach() + s.state(h)),
    "backwards": lambda s, x: loop(lambda s, part, h: part + s.state(h))(s, x.flip(1)),
    "parts_again": parts_again,
    "map_again": map_again,
    "map_as_output": map_as_output,
    "written_part": written_part,
    "without_gradient": without_gradient,
    "taken_apart_without_gradient": taken_apart_without_gradient,
    "hooked": hooked,
}
# steps whose cotangents are parts; none of the others
PARTS = {
    "plain": 5,
    "state_first": 5,
    "backwards": 5,
    "written_sum": 5,
    "parts_again": 4,
}


def loss(output, y):
    return output.flatten(1).square().sum(1)


@pytest.mark.parametrize("name", FORWARD)
def test_sums_with_parts(name):
    model, x = net(FORWARD[name]), torch.randn(3, 5, 3)
    params = {k: p.detach() for k, p in model.named_parameters()}
    want = rows_of(model, loss, x, None)
    fn = pexgrad.per_example_grad(model, loss)
    assert_rows_equal(fn(params, x), want)
    (pipeline,) = fn._traces
    assert len(pipeline.program.parts) == PARTS.get(name, 0)
    J = pexgrad.per_example_jacobian(model, loss)(params, x)
    assert_rows_equal(J.norms(per_param=True), {k: r.flatten(1).norm(dim=1) for k, r in want.items()})
    assert_rows_equal(J.vjp(torch.ones(3)), {k: r.sum(0) for k, r in want.items()})


def test_a_part_of_another_shape():
    """The sum is larger than its parts: each part's cotangent is a sum over what it was expanded to."""

    def forward(s, x):
        h = torch.zeros(len(x), 2, 4)
        for part in s.inner(x).unbind(1):
            h = torch.tanh(part[:, None].unbind(1)[0].unsqueeze(1) + s.state(h))
        return h

    model, x = net(forward), torch.randn(3, 5, 3)
    params = {k: p.detach() for k, p in model.named_parameters()}
    assert_rows_equal(pexgrad.per_example_grad(model, loss)(params, x), rows_of(model, loss, x, None))


def test_maps_that_are_frozen():
    for frozen in ("inner", "state"):
        model, x = net(FORWARD["plain"]), torch.randn(3, 5, 3)
        getattr(model, frozen).requires_grad_(False)
        params = {k: p.detach() for k, p in model.named_parameters()}
        got = pexgrad.per_example_grad(model, loss)(params, x)
        assert not any(k.startswith(frozen) for k in got)
        assert_rows_equal(got, rows_of(model, loss, x, None))


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_cotangents_of_steps_are_there_once(kind, bidirectional):
    """Those of the input's map and those of the steps are the same memory, and nothing is copied to join the steps."""
    layer = getattr(nn, kind)(3, 4, bidirectional=bidirectional, batch_first=True)
    model, x = Net(lambda s, x: s.layer(x)[0], layer=layer), torch.randn(2, 5, 3)
    J = pexgrad.per_example_jacobian(model, loss)({k: p.detach() for k, p in model.named_parameters()}, x)
    of_input, of_state = (
        {name(t): t.factor.g for t in J.terms if kind in name(t)} for kind in ("weight_ih_", "weight_hh_")
    )
    assert len(of_input) == len(of_state) == (2 if bidirectional else 1)
    for k, g in of_state.items():
        assert (
            g.untyped_storage().data_ptr() == of_input[k.replace("_hh_", "_ih_")].untyped_storage().data_ptr()
        )
        assert g.shape[1] == 5


def name(term):
    (only,) = term.params
    return only


def test_steps_in_half_precision_are_added_in_single():
    def forward(s, x):
        h, outputs = x.new_zeros(len(x), 4), []
        for part in s.inner(x).unbind(1):
            h = torch.tanh(part + s.state(h))
            outputs.append(h)
        return torch.stack(outputs, 1)

    model, x = net(forward).float(), torch.rand(3, 100, 3, dtype=torch.float32)
    params = {k: p.detach() for k, p in model.named_parameters()}
    scaled = lambda output, y: 2_000 * output.float().flatten(1).sum(1)  # noqa: E731
    with torch.autocast("cpu", dtype=torch.float16):
        rows = pexgrad.per_example_grad(model, scaled, verify=False)(params, x)
    assert (
        rows["state.bias"].isfinite().all()
        and rows["state.bias"].abs().max() > torch.finfo(torch.float16).max
    )
