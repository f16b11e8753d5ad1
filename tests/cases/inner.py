"""Derivatives and vmaps in a model's own forward."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import grad
from torch.func import functional_call, grad_and_value, jacrev, vjp, vmap
from torch.func import grad as func_grad

from cases.case import Net, case, ids, param, wave

# older ones fix the size of the batch in torch.vmap
MAPPED = ("inner",) if torch.__version__ >= "2.13" else ("inner", "may_refuse")


def mlp(inputs, outputs=1):
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def slope(s, x):
    """The gradient of an energy in the positions."""
    x = x.requires_grad_()
    return grad(s.net(x).sum(), x, create_graph=True)[0]


def of(forward, x, net=None):
    return Net(forward, net=net or mlp(4)), x, None, wave


@case("inner")
def residual_of_a_differential_equation(b):
    """Burgers' equation, u_t + u u_x = u_xx / 100."""

    def forward(s, x):
        t, z = x[:, :1].requires_grad_(), x[:, 1:].requires_grad_()
        u = s.net(torch.cat([t, z], 1))
        u_t, u_z = grad(u, (t, z), torch.ones_like(u), create_graph=True)
        u_zz = grad(u_z, z, torch.ones_like(u_z), create_graph=True)[0]
        return u_t + u * u_z - 0.01 * u_zz

    return of(forward, torch.randn(b, 2), mlp(2))


@case("inner")
def energy_and_forces(b):
    """Forces that add up to nothing, whatever the parameters are."""

    def forward(s, kinds, places):
        places = places.requires_grad_()
        distances = (places[:, :, None] - places[:, None] + torch.eye(3)).norm(dim=-1)
        features = torch.cat([s.table(kinds), distances], -1)
        energy = s.net(features).sum((1, 2))
        return {"energy": energy, "forces": -grad(energy.sum(), places, create_graph=True)[0]}

    def loss(out, y):
        return wave(out["forces"]) + out["energy"].sin()

    net = Net(forward, table=nn.Embedding(5, 2), net=mlp(5))
    return net, (ids(b, 3, 5), torch.randn(b, 3, 3)), None, loss


@case("inner")
def slope_that_is_a_constant(b):
    def forward(s, x):
        for _ in range(2):
            x = x.detach().requires_grad_()
            x = x - 0.1 * grad(s.net(x).sum(), x)[0]
        return s.net(x)

    return of(forward, torch.randn(b, 4))


@case("inner")
def values_cut_off_beside_a_slope(b):
    def forward(s, x):
        with torch.no_grad():
            scale = s.net(x)
        h = s.net(x)
        return slope(s, x) * scale + h * h.detach() + h.data

    return of(forward, torch.randn(b, 4))


@case(*MAPPED)
def detached_inside_transforms(b):
    def forward(s, x):
        def energy(one):
            with torch.no_grad():
                scale = s.net(one)
            return (s.net(one) * s.net(one).detach() + scale).sum()

        return vmap(func_grad(energy))(x)

    return of(forward, torch.randn(b, 4))


@case("inner")
def slope_of_straight_through_and_inner_hooks(b):
    def forward(s, x):
        def energy(x):
            h = s.net[0](x)
            h = h + (h.round() - h).detach()
            h.register_hook(lambda g: 2 * g)
            return s.net[2](h.tanh()).sum()

        x = x.requires_grad_()
        return grad(energy(x), x, create_graph=True)[0]

    return of(forward, torch.randn(b, 4))


class Bent(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


@case("inner")
def slope_through_a_function_of_ones_own(b):
    def forward(s, x):
        def energy(x):
            return s.net[2](Bent.apply(s.net[0](x))).sum()

        x = x.requires_grad_()
        return grad(energy(x), x, create_graph=True)[0]

    return of(forward, torch.randn(b, 4))


bent = Bent.apply  # as torch's documentation has it


@case("inner")
def functions_bound_before(b):
    """In a model's own derivative, and beside it."""

    def forward(s, x):
        x = x.requires_grad_()
        energy = s.net[2](bent(s.net[0](x))).sum()
        return grad(energy, x, create_graph=True)[0] + s.net[2](bent(s.net[0](x)))

    return of(forward, torch.randn(b, 4))


@case("inner")
def detached_in_other_words(b):
    def forward(s, x):
        h = s.net(x)
        late = s.net(2 * x)
        late.detach_()
        return slope(s, x) * torch.detach(h) + late

    return of(forward, torch.randn(b, 4))


@case("inner")
def slope_with_hooks_that_come_and_go(b):
    def forward(s, x):
        h = s.net[0](x.requires_grad_())
        gone = h.register_hook(lambda g: 5 * g)
        gone.remove()
        h.register_hook(lambda g: g.clamp(max=0.1))
        h.register_hook(lambda g: 3 * g)
        return grad(s.net[2](h.tanh()).sum(), x, create_graph=True)[0]

    return of(forward, torch.randn(b, 4))


@case("inner")
def slope_of_a_checkpointed_net(b):
    def forward(s, x):
        x = x.requires_grad_()
        energy = torch.utils.checkpoint.checkpoint(s.net, x, use_reentrant=False)
        return grad(energy.sum(), x, create_graph=True)[0]

    return of(forward, torch.randn(b, 4))


@case("inner")
def score_of_convolutions(b):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 3, 2, stride=3), nn.Softplus(),
        nn.ConvTranspose2d(3, 2, 2, stride=2, output_padding=1), nn.Tanh(), nn.Flatten(), nn.LayerNorm(50), nn.Linear(50, 1),
    )  # fmt: skip
    return of(slope, torch.randn(b, 2, 6, 6), net)


@case("inner", "slow")
def score_of_convolutions_over_other_dimensions(b):
    line = nn.Sequential(
        nn.Conv1d(2, 3, 3, padding="same", dilation=2), nn.Tanh(), nn.Conv1d(3, 2, 2, stride=2)
    )
    space = nn.Sequential(nn.Conv3d(1, 2, 2, stride=2), nn.Softplus())

    def forward(s, x, z):
        x, z = x.requires_grad_(), z.requires_grad_()
        energy = s.line(x).sin().sum() + s.space(z).sin().sum()
        return grad(energy, (x, z), create_graph=True)

    def loss(out, y):
        return wave(out[0]) + wave(out[1])

    net = Net(forward, line=line, space=space)
    return net, (torch.randn(b, 2, 7), torch.randn(b, 1, 5, 5, 5)), None, loss


@case("inner")
def slope_with_a_frozen_layer_and_one_in_place(b):
    net = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.PReLU(), nn.RMSNorm(5), nn.Linear(5, 1)
    )
    net[2].weight.requires_grad_(False)
    return of(slope, torch.randn(b, 4), net)


@case(*MAPPED)
def vmap_over_examples(b):
    return of(lambda s, x: vmap(s.net, out_dims=1)(x).T, torch.randn(b, 4))


@case(*MAPPED)
def vmap_over_positions_of_examples(b):
    return of(lambda s, x: vmap(vmap(s.net))(x) + vmap(s.net)(x), torch.randn(b, 3, 4))


@case(*MAPPED)
def vmap_over_members(b):
    def forward(s, x):
        return vmap(lambda w, v: torch.tanh(x @ w) @ v)(s.w, s.v).movedim(0, 1)

    return Net(forward, w=param(3, 4, 5), v=param(3, 5, 2)), torch.randn(b, 4), None, wave


@case(*MAPPED)
def adapted_to_each_task(b):
    """MAML: two steps on the support of a task, and a prediction for its query."""

    def forward(s, x, y, query):
        def task(x, y, query):
            params = dict(s.net.named_parameters())
            for _ in range(2):
                slopes = func_grad(lambda p: F.mse_loss(functional_call(s.net, p, (x,)), y))(params)
                params = {k: p - 0.1 * slopes[k] for k, p in params.items()}
            return functional_call(s.net, params, (query,))

        return vmap(task)(x, y, query)

    return (
        Net(forward, net=mlp(4)),
        (torch.randn(b, 5, 4), torch.randn(b, 5, 1), torch.randn(b, 2, 4)),
        None,
        wave,
    )


@case(*MAPPED)
def jacobian_and_products_with_it(b):
    def forward(s, x):
        jacobian = vmap(jacrev(s.net))(x)
        out, back = vjp(s.net, x)
        slopes, values = vmap(grad_and_value(lambda one: s.net(one)[0]))(x)
        return jacobian.flatten(1).sum(1) + back(torch.ones_like(out))[0].sum(1) + (slopes.T * values).sum(0)

    return of(forward, torch.randn(b, 4), mlp(4, 2))


@case(*MAPPED)
def second_derivatives_by_transforms(b):
    def forward(s, x):
        def bend(one):
            return func_grad(lambda t: func_grad(lambda u: s.net(torch.stack([u, one[1]]))[0])(t))(one[0])

        return vmap(bend)(x)

    return of(forward, torch.randn(b, 2), mlp(2))


@case("inner")
def jacobian_by_autograd(b):
    def forward(s, x):
        rows = torch.autograd.functional.jacobian(lambda z: s.net(z).sum(0), x, create_graph=True)
        return rows.movedim(1, 0)

    return of(forward, torch.randn(b, 4), mlp(4, 2))


@case("inner", "refused", match="they mix first in sum")
def slope_of_what_mixes(b):
    def forward(s, x):
        x = x.requires_grad_()
        return grad(s.net(x).sum().square(), x, create_graph=True)[0]

    return of(forward, torch.randn(b, 4))
