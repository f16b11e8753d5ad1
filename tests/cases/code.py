"""Code that people write in a forward: in place, without gradient, with backwards of their own."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from einops.layers.torch import Rearrange
from torch.utils.checkpoint import checkpoint

from cases.case import Net, case, labels, param, wave


def two(forward, b, n=4, **members):
    """Two linears of one width, `a` and `b`, and a forward around them."""
    return Net(forward, a=nn.Linear(n, n), b=nn.Linear(n, n), **members), torch.randn(b, n), None, wave


# --- in place -------------------------------------------------------------------------------------


@case("inplace")
def relu_and_residual_in_place(b):
    def forward(s, x):
        h = F.relu_(s.a(x))
        h = s.b(h)
        h += x
        return F.relu(h, inplace=True)

    return two(forward, b)


@case("inplace", "conv", "norm")
def activations_in_place_after_conv_and_norm(b):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.SiLU(inplace=True),
        nn.Conv2d(4, 3, 2), nn.LeakyReLU(inplace=True), nn.Flatten(), nn.Linear(27, 5),
        nn.Hardtanh(inplace=True),
    )  # fmt: skip
    return net, torch.randn(b, 2, 5, 5), labels(b), F.cross_entropy


@case("inplace")
def column_added_to(b):
    def forward(s, x):
        h = s.a(x)
        h[:, 0] += 3
        return s.b(torch.tanh(h))

    return two(forward, b)


@case("inplace")
def columns_written(b):
    def forward(s, x):
        h = s.a(x)
        h[:, 0] = s.p
        h[:, 1:3] = h[:, 2:4].tanh()
        h[..., -1].mul_(s.p)
        return s.b(h)

    return two(forward, b, p=nn.Parameter(torch.tensor(0.7)))


@case("inplace")
def parameter_multiplied_in_place(b):
    def forward(s, x):
        h = s.a(x)
        h *= s.p
        h -= s.q
        h.div_(2).add_(s.q, alpha=0.5).tanh_()
        return s.b(h)

    return two(forward, b, p=param(4), q=param(4))


@case("inplace")
def output_written_in_place_more_than_once(b):
    def forward(s, x):
        h = s.a(x)
        h.mul_(2)
        g = h.view(-1, 2, 2)
        g[:, 0].add_(1)
        return s.b(torch.tanh_(h))

    return two(forward, b)


@case("inplace")
def input_written_in_place(b):
    def forward(s, x):
        x[:, 0] += 3
        x *= s.p
        return s.a(x) + s.b(x)

    return two(forward, b, p=param(4))


@case("inplace")
def new_tensor_filled_piece_by_piece(b):
    def forward(s, x):
        out = x.new_zeros(x.shape[0], 3, 4)
        out[:, 0] = s.a(x)
        out[:, 1] = s.b(out[:, 0].tanh())
        out[:, 2, 1:] += s.p
        return out

    return two(forward, b, p=param(3))


@case("inplace")
def masked_by_data(b):
    def forward(s, x):
        h = s.a(x)
        h[x > 0] = 0.5
        h = h.masked_fill(x < -1, -1.0)
        h.clamp_(min=-2)
        return s.b(h)

    return two(forward, b)


@case("inplace")
def list_of_states_updated(b):
    def forward(s, x):
        h = s.a(x)
        keep = h.clone()
        keep.copy_(keep * x)
        h.index_add_(1, torch.tensor([0, 2]), s.b(x)[:, :2])
        h.scatter_add_(1, torch.zeros(x.shape[0], 1, dtype=torch.long), keep[:, :1])
        return h * keep

    return two(forward, b)


@case("inplace", "embedding")
def embedding_written_in_place(b):
    def forward(s, i):
        h = s.emb(i)
        h += s.pos[: i.shape[1]]
        h[:, 0] = s.start
        return s.out(h.tanh_())

    net = Net(forward, emb=nn.Embedding(7, 4), pos=param(6, 4), start=param(4), out=nn.Linear(4, 2))
    return net, torch.arange(b * 5).view(b, 5) % 7, None, wave


# --- behind autograd's back -------------------------------------------------------------------------


@case("inplace", "conv")
def kernel_held_to_a_norm(b):
    """As in EEGNet: the gradient is that of what is used, and goes to what it was made of as it is."""

    def forward(s, x):
        s.conv.weight.data = torch.renorm(s.conv.weight.data, p=2, dim=0, maxnorm=0.5)
        return s.head(s.conv(x).tanh().flatten(1))

    net = Net(forward, conv=nn.Conv1d(2, 3, 2), head=nn.Linear(12, 4))
    return net, torch.randn(b, 2, 5), None, wave


@case("inplace")
def weight_that_is_its_signs_for_a_while(b):
    def forward(s, x):
        real = s.a.weight.data
        s.a.weight.data = real.sign()
        h = s.a(x)
        s.a.weight.data = real
        return s.b(h) + s.a(x)

    return two(forward, b)


@case("inplace")
def values_that_are_given_other_data(b):
    def forward(s, x):
        x.data = x.data.round()
        h = s.a(x)
        with torch.no_grad():
            h.data = h.clamp(-0.5, 0.5)
        return s.b(h)

    return two(forward, b)


@case("inplace")
def weights_clamped_and_masked(b):
    def forward(s, x):
        s.a.weight.data.clamp_(-0.2, 0.2)
        s.a.bias.data[1:].zero_()
        s.b.weight.data *= s.mask
        return s.b(s.a(x).tanh())

    return two(forward, b, mask=nn.Buffer(torch.tensor([1.0, 0.0, 1.0, 1.0])))


# --- without gradient -----------------------------------------------------------------------------


@case("detach")
def detached_target(b):
    return two(lambda s, x: (s.a(x) - s.b(s.a(x).detach())).square() + s.b(x).detach() * x, b)


@case("detach")
def detached_weight(b):
    return two(lambda s, x: s.a(x) * F.linear(x, s.b.weight.detach(), s.b.bias), b)


@case("detach")
def data_of_a_weight(b):
    return two(lambda s, x: s.a(x) * (x @ s.b.weight.data.T) + s.b(x), b)


@case("detach")
def straight_through_by_detach(b):
    def forward(s, x):
        h = s.a(x)
        return s.b(h + (h.round() - h).detach())

    return two(forward, b)


@case("detach")
def no_grad_block(b):
    def forward(s, x):
        with torch.no_grad():
            target = s.a(x) + s.b(x)
        return (s.a(x) - target.tanh()) * x

    return two(forward, b)


@case("detach")
def grad_switched_off_and_on(b):
    def forward(s, x):
        with torch.set_grad_enabled(False):
            scale = s.a.weight.norm() + s.b(x).abs().mean(1, keepdim=True)
            with torch.enable_grad():
                h = s.b(x)
        return s.a(x) / scale + h

    return two(forward, b)


@case("detach")
def no_grad_as_a_decorator_inside_a_layer(b):
    @torch.no_grad()
    def statistics(h):
        return h.mean(1, keepdim=True), h.std(1, keepdim=True) + 1

    def forward(s, x):
        h = s.a(x)
        mean, std = statistics(h)
        return s.b((h - mean) / std)

    return two(forward, b)


@case("detach", "may_refuse")
def inference_mode_block(b):
    def forward(s, x):
        with torch.inference_mode():
            scale = x.abs().mean(1, keepdim=True)
        return s.a(x) * scale.clone() + s.b(x)

    return two(forward, b)


@case("detach", "may_refuse")
def inference_mode_around_parameters(b):
    def forward(s, x):
        with torch.inference_mode():
            target = s.a(x)
        return s.b(torch.tanh(s.a(x) - target.clone().mean(1, keepdim=True)))

    return two(forward, b)


@case("custom_backward")
def fake_quantised(b):
    """Weights and activations, by numbers and by tensors, as a whole and by channel."""

    def forward(s, x):
        h = torch.fake_quantize_per_tensor_affine(s.a(x), 0.1, 3, -4, 7)
        w = torch.fake_quantize_per_channel_affine(s.b.weight, s.scale, s.zero, 0, -8, 7)
        h = torch.fake_quantize_per_tensor_affine(F.linear(h.tanh(), w), s.scale[0], s.zero[1], -16, 15)
        return s.b(torch.fake_quantize_per_channel_affine(h.tanh(), s.scale, s.offset, 1, 0, 15))

    scale, zero = torch.tensor([0.1, 0.2, 0.05, 0.15]).float(), torch.tensor([1, -2, 0, 3]).int()
    return two(forward, b, scale=nn.Buffer(scale), zero=nn.Buffer(zero), offset=nn.Buffer(scale * 30))


# --- backwards of one's own -----------------------------------------------------------------------


class SignStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


class DoubledLinear(torch.autograd.Function):
    """x @ w.T whose gradient in w is twice the true one: a backward no trace of the forward can guess."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, 2 * g.T @ x


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return -ctx.scale * g, None


@case("custom_backward", "may_refuse")
def straight_through_function(b):
    return two(lambda s, x: s.b(SignStraightThrough.apply(s.a(x))), b)


@case("custom_backward", "may_refuse")
def function_with_a_parameter(b):
    return two(lambda s, x: s.b(torch.tanh(DoubledLinear.apply(s.a(x), s.w))), b, w=param(4, 4))


class Swish(torch.autograd.Function):
    """Which switches gradients off, where they are off already."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x * x.sigmoid(), x, g)[0]


@case("custom_backward", "may_refuse")
def function_that_switches_gradients_off(b):
    return two(lambda s, x: s.b(Swish.apply(s.a(x))), b)


@case("custom_backward", "may_refuse")
def function_that_switches_gradients_off_before_they_are_off(b):
    def forward(s, x):
        h = s.b(Swish.apply(s.a(x)))
        with torch.no_grad():
            half = h * 0.5
        return h + half

    return two(forward, b)


class ClampedLinear(DoubledLinear):
    """The same clamped: not linear in what arrives, so that no sum of examples goes through it."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, (g.T @ x).clamp(-0.01, 0.01)


@case("custom_backward", "may_refuse")
def function_that_clamps_the_gradient_of_a_parameter(b):
    return two(lambda s, x: s.b(torch.tanh(ClampedLinear.apply(s.a(x), s.w))), b, w=param(4, 4))


@case("custom_backward", "prelude", "may_refuse")
def gradient_reversal_on_a_weight(b):
    return two(lambda s, x: s.b(torch.tanh(F.linear(x, ReverseGradient.apply(s.a.weight, 2.0)))), b)


@case("custom_backward", "may_refuse")
def gradient_reversal_function(b):
    return two(lambda s, x: s.b(ReverseGradient.apply(s.a(x), 0.5)), b)


@case("custom_backward", "prelude", "may_refuse")
def straight_through_on_a_weight(b):
    """A binarised layer: the function sits before the site."""
    return two(lambda s, x: s.b(torch.tanh(F.linear(x, SignStraightThrough.apply(s.a.weight), s.a.bias))), b)


# --- hooks ----------------------------------------------------------------------------------------


@case("hook", "may_refuse")
def gradient_reversal_by_hook(b):
    def forward(s, x):
        h = s.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: -g)
        return s.b(h)

    return two(forward, b)


@case("hook", "may_refuse")
def gradient_clamped_by_hook(b):
    def forward(s, x):
        h = torch.tanh(s.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return s.b(h)

    return two(forward, b)


@case("hook", "may_refuse", "loop_may_refuse")
def gradient_masked_by_hook_on_the_parameter(b):
    model, x, y, loss = two(lambda s, x: s.b(torch.tanh(s.a(x))), b)
    model.a.weight.register_hook(lambda g: g * torch.eye(4))
    return model, x, y, loss


@case("hook", "may_refuse")
def full_backward_hook(b):
    model, x, y, loss = two(lambda s, x: s.b(torch.tanh(s.a(x))), b)
    model.b.register_full_backward_hook(
        lambda module, gi, go: tuple(g and 3 * g if g is None else 3 * g for g in gi)
    )
    return model, x, y, loss


@case("hook", "may_refuse", warns=("ignore:Full backward hook is firing",))  # before torch 2.11
def full_backward_pre_hook(b):
    model, x, y, loss = two(lambda s, x: s.b(torch.tanh(s.a(x))), b)
    model.a.register_full_backward_pre_hook(lambda module, go: tuple(-g for g in go))
    return model, x, y, loss


@case("hook", "may_refuse")
def full_backward_hook_that_only_looks(b):
    model, x, y, loss = two(lambda s, x: s.b(torch.tanh(s.a(x))), b)
    model.seen = []
    model.b.register_full_backward_hook(lambda module, gi, go: model.seen.append(len(go)))
    return model, x, y, loss


@case("hook")
def forward_hooks(b):
    model, x, y, loss = two(lambda s, x: s.b(torch.tanh(s.a(x))), b)
    model.a.register_forward_hook(lambda module, inputs, out: out * 2)
    model.b.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return model, x, y, loss


# --- checkpoints ----------------------------------------------------------------------------------


@case("checkpoint")
def checkpointed_block(b):
    def forward(s, x):
        return s.b(checkpoint(lambda h: torch.tanh(s.a(h)), x, use_reentrant=False))

    return two(forward, b)


# --- sizes and control flow -----------------------------------------------------------------------


@case("control")
def branch_on_the_shape(b):
    def forward(s, x):
        h = s.a(x) if x.shape[-1] > 3 else x
        if x.dim() == 2 and x.is_floating_point() and s.training:
            h = torch.tanh(h)
        for _ in range(x.shape[1] // 2):
            h = s.b(h)
        return h

    return two(forward, b)


@case("control", "retraces")
def branch_on_the_batch_size(b):
    """Another way to the same numbers for large batches."""

    def forward(s, x):
        if x.shape[0] > 4:
            return s.b(torch.tanh(x @ s.a.weight.T + s.a.bias))
        return s.b(torch.tanh(s.a(x)))

    return two(forward, b)


@case("control", "may_refuse", "retraces")
def branch_on_the_batch_size_that_matters(b):
    def forward(s, x):
        h = s.a(x)
        return s.b(2 * h if x.shape[0] > 1 else h.tanh())

    return two(forward, b)


@case("control", "may_refuse")
def scaled_by_the_batch_size(b):
    return two(lambda s, x: s.b(torch.tanh(s.a(x) / x.shape[0])), b)


@case("control", "retraces")
def len_of_the_batch(b):
    def forward(s, x):
        h = s.a(x).view(len(x), -1)
        return s.b(h + torch.zeros(len(x), 4))

    return two(forward, b)


@case("control", "may_refuse")
def batch_size_as_a_number(b):
    def forward(s, x):
        n = int(x.shape[0])
        return s.b(s.a(x).reshape(n, 2, 2).transpose(1, 2).reshape(n, 4))

    return two(forward, b)


@case("control")
def sizes_of_many_kinds(b):
    def forward(s, x):
        n = x.size(0)
        h = s.a(x).view(n, -1).reshape(-1, 2, 2).flatten(1)
        rows, last = torch.arange(n), x.argmax(1)
        picked = h[rows, last][:, None] + h.gather(1, last[:, None])
        blank = torch.full((n, 1), 0.5) + torch.ones(x.shape[0], 1) + h.new_empty(h.size(0), 1).fill_(1.0)
        return s.b(h * picked / math.sqrt(h.shape[-1]) + blank)

    return two(forward, b)


@case("control")
def pieces_along_time(b):
    def forward(s, x):
        first, *rest = x.split(2, 1)
        parts = [s.lin(first), *(s.lin(r).tanh() for r in rest), *s.lin(x).chunk(2, 1)]
        return torch.cat(parts, 1)[:, ::2].unbind(1)[0] + x.unfold(1, 2, 2).sum((1, 3))

    return Net(forward, lin=nn.Linear(3, 3)), torch.randn(b, 5, 3), None, wave


@case("control")
def einops_inside_forward(b):
    def forward(s, x):
        h = rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=2, q=2)
        h = s.lin(h) + repeat(s.token, "c -> b n c", b=x.shape[0], n=h.shape[1])
        return s.layers(reduce(h, "b n c -> b c", "mean")) + reduce(h, "b n (k c) -> b k", "max", c=2)

    layers = nn.Sequential(
        Rearrange("b (g c) -> b g c", g=2), nn.Linear(2, 2), Rearrange("b g c -> b (c g)"), nn.Linear(4, 2)
    )
    return (
        Net(forward, lin=nn.Linear(8, 4), token=param(4), layers=layers),
        torch.randn(b, 4, 2, 2),
        None,
        wave,
    )


@case("control", "may_refuse")
def gradient_inside_forward(b):
    """A force: the derivative of an energy in the input."""

    def forward(s, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = s.b(torch.tanh(s.a(x))).sin().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    return two(forward, b)


# --- state that a forward leaves behind -----------------------------------------------------------


@case("state")
def feature_kept_on_the_module(b):
    def forward(s, x):
        s.feature = s.a(x)
        return s.b(torch.tanh(s.feature))

    return two(forward, b)


@case("state")
def table_made_on_the_first_call(b):
    def forward(s, x):
        if s.angles is None:
            s.angles = torch.arange(4).to(x.dtype).cos()
        return s.b(s.a(x) * s.angles)

    return two(forward, b, angles=None)


@case("state", "buffers", "may_refuse")
def buffers_written_in_forward(b):
    def forward(s, x):
        s.steps += 1
        s.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return s.b(torch.tanh(s.a(x)))

    model, x, y, loss = two(forward, b)
    model.register_buffer("steps", torch.tensor(0))
    model.register_buffer("average", torch.zeros(4))
    return model, x, y, loss


@case("state")
def constants_in_forward(b):
    def forward(s, x):
        mask = torch.tensor([1.0, 0.0, 1.0, 0.5])
        return s.b(s.a(x) * mask + torch.eye(4)[2] + torch.linspace(0, 1, 4).to(x))

    return two(forward, b)


signs = SignStraightThrough.apply


@case("code")
def straight_through_bound_before(b):
    """The function's `apply` has a name of its own since before the trace, as torch's documentation has it."""
    net = Net(lambda s, x: s.out(signs(s.lin(x))), lin=nn.Linear(4, 6), out=nn.Linear(6, 3))
    return net, torch.randn(b, 4), None, wave


@case("code")
def a_hook_after_the_last_use(b):
    def forward(s, x):
        h = s.lin(x)
        out = h.tanh()
        h.register_hook(lambda g: g.clamp(max=0.1))
        return out

    return Net(forward, lin=nn.Linear(4, 6)), torch.randn(b, 4), None, wave


@case("code")
def two_hooks_of_one_value(b):
    def forward(s, x):
        h = s.lin(x)
        h.register_hook(lambda g: g.clamp(max=0.1))
        h = h * 1.5
        h.register_hook(lambda g: g.clamp(max=0.2))
        h.register_hook(lambda g: 3 * g)
        return h.tanh()

    return Net(forward, lin=nn.Linear(4, 6)), torch.randn(b, 4), None, wave
