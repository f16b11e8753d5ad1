"""Products with a parameter on either side, and other operations that take one."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from cases.case import Net, case, labels, param, wave


def of(forward, x, **members):
    return Net(forward, **members), x, None, wave


@case("product")
def parameter_on_the_right(b):
    return of(lambda s, x: torch.tanh(x @ s.w), torch.randn(b, 2, 3, 4), w=param(4, 5))


@case("product")
def parameter_on_the_left(b):
    return of(lambda s, x: torch.tanh(s.w @ x), torch.randn(b, 3, 4), w=param(5, 3))


@case("product")
def parameter_vector_on_either_side(b):
    return of(
        lambda s, x: torch.stack([x @ s.u, (s.v @ x)[:, :3]], 1), torch.randn(b, 3, 4), u=param(4), v=param(3)
    )


@case("product")
def parameter_with_a_batch_of_its_own(b):
    """Heads of weights: (H, i, o) against (B, H, t, i)."""
    return of(lambda s, x: torch.tanh(x @ s.w), torch.randn(b, 2, 3, 4), w=param(2, 4, 5))


@case("product")
def addmm_and_mm(b):
    return of(
        lambda s, x: torch.addmm(s.c, x, s.w, beta=0.5) @ s.v,
        torch.randn(b, 4),
        w=param(4, 5),
        v=param(5, 3),
        c=param(5),
    )


@case("product")
def mm_with_the_batch_on_the_right(b):
    return of(
        lambda s, x: (s.w @ torch.tanh(s.v @ x.t())).t(), torch.randn(b, 4), w=param(5, 3), v=param(3, 4)
    )


@case("product")
def bmm_with_an_expanded_parameter(b):
    return of(lambda s, x: torch.bmm(x, s.w.expand(x.shape[0], -1, -1)), torch.randn(b, 3, 4), w=param(4, 5))


@case("product")
def baddbmm_with_a_parameter_to_add(b):
    return of(
        lambda s, x: torch.baddbmm(s.c.expand(x.size(0), -1, -1), x, x.mT).tanh(),
        torch.randn(b, 3, 4),
        c=param(3, 3),
    )


@case("product")
def products_with_a_sum(b):
    def forward(s, x):
        h = torch.baddbmm(s.c, x, s.w.expand(x.shape[0], -1, -1), beta=0.5, alpha=2)
        return (
            h.tanh() + torch.addmv(s.d, x[:, 0], s.u, alpha=3)[:, None, None] * x[:, 1].mv(s.u)[:, None, None]
        )

    return of(forward, torch.randn(b, 2, 4), c=param(2, 5), w=param(4, 5), d=param(1), u=param(4))


@case("product")
def baddbmm_over_heads_of_a_parameter(b):
    def forward(s, x):
        return torch.baddbmm(s.c, x.transpose(0, 1), s.w, beta=0.5, alpha=2).transpose(0, 1).tanh()

    return of(forward, torch.randn(b, 2, 4), c=param(2, 1, 5), w=param(2, 4, 5))


@case("product")
def addbmm_over_heads_of_a_parameter(b):
    def forward(s, x):
        return torch.addbmm(s.c, x.transpose(0, 1), s.w, beta=0.5, alpha=2).tanh()

    return of(forward, torch.randn(b, 2, 4), c=param(5), w=param(2, 4, 5))


@case("product")
def einsum_with_an_ellipsis(b):
    def forward(s, x):
        h = torch.einsum("...i,io->...o", x, s.w).tanh()
        return torch.einsum("...to, s t", h, s.mix)

    return of(forward, torch.randn(b, 2, 3, 4), w=param(4, 5), mix=param(3, 3))


@case("product")
def einsum_of_four(b):
    return of(
        lambda s, x: torch.einsum("bti,ir,r,ro->bto", x, s.down, s.scale, s.up).tanh(),
        torch.randn(b, 3, 4),
        down=param(4, 2),
        scale=param(2),
        up=param(2, 5),
    )


@case("product")
def einsum_with_a_parameter(b):
    def forward(s, x):
        h = torch.einsum("bti,hio->bhto", x, s.w)
        return torch.einsum("hst,bhto->bso", s.mix, torch.tanh(h))

    return of(forward, torch.randn(b, 3, 4), w=param(2, 4, 5), mix=param(2, 3, 3))


@case("product")
def distances_to_points(b):
    """From either side, of one position and of several, and to a point that is met."""

    def forward(s, x):
        h = torch.cdist(x, s.codes).square() + torch.cdist(s.codes[None], x).mT + torch.cdist(x, s.codes, p=1)
        met = torch.cdist(torch.cat([s.codes[:1].detach().expand(x.shape[0], 1, 4), x], 1), s.codes)
        return h.sin() + met[:, 1:] + torch.cdist(x[:, 0].contiguous(), s.codes)[:, None].cos()

    return of(forward, torch.randn(b, 3, 4), codes=param(5, 4))


@case("product")
def einsum_with_letters_in_another_order(b):
    """Rows in an order that no outer product has, the same along one dimension, and of two uses of one parameter."""

    def forward(s, x):
        basis = torch.stack([x.sin(), x.cos(), x], -1)
        h = torch.einsum("big,iog->bo", basis, s.first).tanh()
        h = h + torch.einsum("big,iog->bo", 1 + basis.square(), s.first)
        return torch.einsum("bo,pok->bp", h, s.second) * torch.einsum("btog,gopt->bp", s.grid(h), s.third)

    model = of(
        forward, torch.randn(b, 4), first=param(4, 5, 3), second=param(2, 5, 3), third=param(3, 5, 2, 6)
    )
    model[0].grid = lambda h: (
        torch.stack([(i + h).sin() for i in range(18)], -1).unflatten(-1, (6, 3)).transpose(1, 2)
    )
    return model


@case("product")
def einsum_with_a_parameter_twice(b):
    return of(lambda s, x: torch.einsum("bi,ij,bj->b", x, s.a, x), torch.randn(b, 4), a=param(4, 4))


@case("product")
def tensordot_and_outer_products(b):
    def forward(s, x):
        return torch.tensordot(x, s.w, dims=([1, 2], [0, 1])) + (x.sum((1, 2))[:, None] * s.v[None])

    return of(forward, torch.randn(b, 3, 4), w=param(3, 4, 5), v=param(5))


@case("product")
def bilinear(b):
    net = Net(lambda s, x, y: s.bil(x, y), bil=nn.Bilinear(3, 4, 5))
    return net, (torch.randn(b, 2, 3), torch.randn(b, 2, 4)), None, wave


@case("product")
def prelu(b):
    net = nn.Sequential(nn.Conv1d(2, 4, 2), nn.PReLU(4), nn.Conv1d(4, 3, 1), nn.PReLU())
    return net, torch.randn(b, 2, 5), None, wave


@case("product")
def prelu_and_bilinear_of_vectors(b):
    net = Net(lambda s, x: s.bil(s.act(x), x), act=nn.PReLU(4), bil=nn.Bilinear(4, 4, 5, bias=False))
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("product")
def complex_weight_through_real_views(b):
    """A spectral layer: multiply the Fourier modes by complex weights kept as real pairs."""

    def forward(s, x):
        modes = torch.fft.rfft(x, dim=-1)
        return torch.fft.irfft(torch.einsum("bik,iok->bok", modes, torch.view_as_complex(s.w)), n=x.shape[-1])

    return of(forward, torch.randn(b, 2, 6), w=param(2, 3, 4, 2))


@case("product")
def prototypes_by_distance(b):
    return of(
        lambda s, x: torch.exp(-torch.cdist(s.lin(x), s.centres)),
        torch.randn(b, 2, 4),
        lin=nn.Linear(4, 3),
        centres=param(5, 3),
    )


@case("product")
def prototypes_by_cosine(b):
    def forward(s, x):
        return F.linear(F.normalize(x), F.normalize(s.w)) / s.temperature.exp()

    net = Net(forward, w=param(5, 4), temperature=nn.Parameter(torch.tensor(0.1)))
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("product")
def linear_system_with_a_parameter(b):
    def forward(s, x):
        a = s.a @ s.a.T + torch.eye(4)
        return torch.linalg.solve(a, x.mT).mT + x @ torch.linalg.matrix_exp(s.a)

    return of(forward, torch.randn(b, 3, 4), a=param(4, 4))


@case("product", "may_refuse", "retraces")
def warp_with_learned_shift(b):
    def forward(s, x):
        theta = torch.eye(2, 3).to(x.dtype) + 0.1 * s.theta.view(2, 3)
        grid = F.affine_grid(theta.expand(x.shape[0], -1, -1), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    return of(forward, torch.randn(b, 2, 4, 5), theta=param(6))


@case("product")
def sorted_and_selected_features(b):
    def forward(s, x):
        h = s.lin(x).sort(-1).values
        return s.out(torch.cat([h.topk(2, -1).values, h.cumsum(-1), h.max(-1, keepdim=True).values], -1))

    return of(forward, torch.randn(b, 4), lin=nn.Linear(4, 5), out=nn.Linear(8, 3))


@case("product")
def mixture_density(b):
    def forward(s, x):
        return torch.logsumexp(s.weights.log_softmax(0) - 0.5 * (x[:, None] - s.means).square().sum(-1), 1)

    return of(forward, torch.randn(b, 4), weights=param(3), means=param(3, 4))


@case("product", "may_refuse")
def convolution_with_kernels_of_the_example(b):
    """Conditional convolution: the batch becomes the groups of one convolution."""

    def forward(s, x):
        routing = torch.sigmoid(s.route(x.mean((2, 3))))
        kernels = torch.einsum("be,eoikl->boikl", routing, s.experts)
        out = F.conv2d(x.reshape(1, -1, *x.shape[2:]), kernels.flatten(0, 1), groups=x.shape[0])
        return out.view(x.shape[0], -1, *out.shape[2:])

    return of(forward, torch.randn(b, 2, 4, 5), route=nn.Linear(2, 3), experts=param(3, 4, 2, 2, 2))


@case("product")
def einsum_that_repeats(b):
    """A letter of size 1 in one operand stands for all of the other's."""
    return of(
        lambda s, x: torch.einsum("bti,io->bto", torch.einsum("bti,bij->btj", x, s.w).tanh(), s.v),
        torch.randn(b, 2, 4),
        w=param(1, 4, 3),
        v=param(1, 5),
    )


@case("product")
def addmm_with_a_complex_alpha(b):
    def forward(s, x):
        x, w, c = torch.complex(x, x.sin()), torch.view_as_complex(s.w), torch.view_as_complex(s.c)
        return torch.view_as_real(torch.addmm(c, x, w, alpha=1 + 2j)).flatten(1)

    return of(forward, torch.randn(b, 4), w=param(4, 3, 2), c=param(3, 2))


@case("product")
def transposes_that_are_summed_over(b):
    """No rows of one operand and columns of the other."""

    def forward(s, x):
        inner = torch.einsum("bij,ij->b", x, s.v.T)[:, None, None]
        return torch.tanh(inner * torch.einsum("b,ij->bij", x[:, 0, 0], s.v.T)).sum(1)

    return Net(forward, v=param(5, 3)), torch.randn(b, 3, 5), labels(b, 5), F.cross_entropy


@case()
def products_of_many_matrices(b):
    net = Net(
        lambda s, x: torch.linalg.multi_dot([x, s.u, s.v, s.q]) + x @ torch.linalg.multi_dot([s.u, s.v, s.q]),
        u=param(4, 3), v=param(3, 5), q=param(5),
    )  # fmt: skip
    return net, torch.randn(b, 4), None, wave


@case()
def operands_broadcast_together(b):
    def forward(s, x):
        u, v = torch.broadcast_tensors(s.u, s.v)
        rows, columns = torch.meshgrid(s.u, s.u, indexing="ij")
        (q,) = torch.atleast_2d([s.q])
        return (x[:, None] * u).sum(1) + v.sum(0) + x @ (rows - 2 * columns) + q

    return Net(forward, u=param(4), v=param(3, 1), q=param(4)), torch.randn(b, 4), None, wave
