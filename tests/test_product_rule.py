"""The rules for matrix products and einsum: random shapes, the batch in any place, against a loop."""

from __future__ import annotations

import pytest
import torch
from cases.case import Net, param, wave
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_rows_equal, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def check(forward, x, w):
    """`w` is a parameter of `forward(w, x)`, whose output has its batch first."""
    net = Net(lambda s, x: forward(s.w, x), w=w)
    fn = pexgrad.per_example_grad(net, wave, verify=False)
    got = fn({"w": net.w}, x)
    assert_rows_equal(got, rows_of(net, wave, x, None))
    assert all(line.rule != "fallback" for line in fn.explain({"w": net.w}, x).lines)


@st.composite
def products(draw):
    """Leading dimensions of both sides, some repeated, and where the batch is."""
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    own = [n if draw(st.booleans()) else 1 for n in lead[draw(st.integers(0, len(lead))) :]]
    other = [n if n > 1 and draw(st.booleans()) else 1 for n in lead] if own else lead
    side = draw(st.sampled_from(["left", "right"]))
    m, i, o = (draw(st.integers(1, 3)) for _ in range(3))
    vector = not own and draw(st.booleans())
    w = (i,) if vector else (*own, i, o) if side == "right" else (*own, m, i)
    x = [*other, m, i] if side == "right" else [*other, i, o]
    free = [d for d in range(len(x)) if d != len(x) - (1 if side == "right" else 2)]
    covered = len(other) - len(own)  # a leading dimension of the parameter's own is not the batch
    at = draw(st.sampled_from([d for d in free if d >= len(other) or d < covered or own[d - covered] == 1]))
    return side, w, tuple(x), at


@given(config=products(), b=st.integers(1, 3))
def test_matmul(config, b):
    side, w, x, at = config
    sizes = list(x)
    sizes[at] = b
    out_at = at - len(sizes)  # from the right
    if len(w) == 1:
        out_at = (at if side == "right" else at if at < len(sizes) - 2 else at - 1) - (len(sizes) - 1)

    def forward(p, v):
        v = v.movedim(0, at)
        return (v @ p if side == "right" else p @ v).movedim(out_at, 0)

    check(forward, torch.randn(sizes).movedim(at, 0), param(*w))


@st.composite
def equations(draw):
    """Each letter in the parameter, the input, the output, or any two or three; the batch in the last two."""
    kinds = st.sampled_from(["po", "io", "pi", "pio", "pio", "p", "i"])
    places = {c: draw(kinds) for c in "acde"[: draw(st.integers(1, 4))]}
    places["a"] = draw(st.sampled_from(["po", "pi", "pio", "p"]))
    places["b"] = "io"

    def letters(place):
        return "".join(draw(st.permutations([c for c, where in places.items() if place in where])))

    sizes = {c: draw(st.integers(1, 3)) for c in places}
    return letters("p"), letters("i"), letters("o"), sizes, draw(st.booleans())


@given(config=equations())
def test_einsum(config):
    p, i, o, sizes, swapped = config
    at = i.index("b")

    def forward(w, x):
        x = x.movedim(0, at)
        out = torch.einsum(f"{i},{p}->{o}", x, w) if swapped else torch.einsum(f"{p},{i}->{o}", w, x)
        return out.movedim(o.index("b"), 0)

    check(forward, torch.randn([sizes[c] for c in i]).movedim(at, 0), param(*(sizes[c] for c in p)))


@pytest.mark.parametrize("alpha", [1, 0.5])
def test_addmm_on_either_side(alpha):
    check(lambda w, x: torch.addmm(torch.ones(5), x, w, alpha=alpha), torch.randn(3, 4), param(4, 5))
    check(lambda w, x: torch.addmm(torch.ones(5, 1), w, x.T, alpha=alpha).T, torch.randn(3, 4), param(5, 4))


def test_bmm_with_heads_of_the_parameter():
    check(lambda w, x: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), torch.randn(3, 2, 4), param(2, 4, 5))
    check(
        lambda w, x: torch.bmm(w, x.permute(1, 2, 0)).permute(2, 0, 1), torch.randn(3, 2, 4), param(2, 5, 4)
    )


def test_indexing_a_parameter():
    ids = torch.tensor([[0, 2, 2], [-1, 0, 1]])
    check(lambda w, i: w[i], ids, param(3, 2, 2))
    check(lambda w, i: w[i.t()].movedim(1, 0), ids, param(3, 2))
    check(lambda w, i: w.index_select(0, i), torch.tensor([1, 1, 0]), param(3, 2))
