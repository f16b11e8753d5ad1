"""What goes in and what comes out: structures, dtypes, masks, wrapped modules."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from cases.case import Net, case, ids, labels, wave


@case("input")
def two_inputs(b):
    net = Net(lambda s, x, z: s.lin(torch.cat([x, z], 1)), lin=nn.Linear(5, 5))
    return net, (torch.randn(b, 2), torch.randn(b, 3)), labels(b), F.cross_entropy


@case("input", "output")
def keyword_inputs_and_dict_output(b):
    net = Net(lambda s, *, x, t: {"logits": s.a(x) + s.b(t[:, None])}, a=nn.Linear(4, 5), b=nn.Linear(1, 5))
    return (
        net,
        {"x": torch.randn(b, 4), "t": torch.randn(b)},
        labels(b),
        lambda o, y: F.cross_entropy(o["logits"], y),
    )


@case("input")
def keyword_inputs_in_any_order_and_left_out(b):
    net = Net(lambda s, x, scale=2.0, z=None: s.lin(x * scale if z is None else x + z), lin=nn.Linear(4, 5))
    return net, {"z": torch.randn(b, 4), "x": torch.randn(b, 4)}, labels(b), F.cross_entropy


@case("input")
def nested_inputs(b):
    def forward(s, batch, pair):
        return s.lin(batch["a"]["b"] + batch["c"][0] * batch["c"][1] + pair[0])

    x = (
        {"a": {"b": torch.randn(b, 4)}, "c": [torch.randn(b, 4), torch.randn(b, 1)]},
        (torch.randn(b, 4), None),
    )
    return Net(forward, lin=nn.Linear(4, 5)), x, labels(b), F.cross_entropy


@case("input")
def none_and_plain_values_among_inputs(b):
    def forward(s, x, mask, power, how, flag):
        h = s.lin(x) ** power if mask is None else x
        return getattr(h, how)(1) if flag else h

    return Net(forward, lin=nn.Linear(4, 5)), (torch.randn(b, 3, 4), None, 2, "mean", True), None, wave


@case("input")
def bytes_booleans_and_integers(b):
    def forward(s, image, mask, index):
        h = s.lin(image.to(s.lin.weight.dtype) / 255) * mask
        return h.gather(1, index)

    image = torch.arange(b * 4, dtype=torch.uint8).view(b, 4) * 7
    return Net(forward, lin=nn.Linear(4, 5)), (image, ids(b, 5, 2).bool(), ids(b, 3, 5)), None, wave


@case("input", "retraces")
def inputs_that_are_views(b):
    """A transposed, an expanded and a strided tensor."""
    net = Net(lambda s, x, z, w: s.lin(x + z + w), lin=nn.Linear(4, 5))
    return (
        net,
        (torch.randn(4, b).t(), torch.randn(b, 1).expand(b, 4), torch.randn(2 * b, 8)[::2, ::2]),
        labels(b),
        F.cross_entropy,
    )


@case("input")
def input_of_one_number_an_example(b):
    net = Net(lambda s, x: s.lin(x[:, None]).tanh().sum(1), lin=nn.Linear(1, 4))
    return net, torch.randn(b), torch.randn(b), F.mse_loss


@case("input")
def same_tensor_given_twice(b):
    x = torch.randn(b, 4)
    return Net(lambda s, x, z: s.lin(x * z), lin=nn.Linear(4, 5)), (x, x), labels(b), F.cross_entropy


@case("input")
def input_that_requires_a_gradient(b):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh()), torch.randn(b, 4).requires_grad_(), None, wave


@case("input")
def padded_sequences_with_lengths(b):
    """The last real token of every example, as classifiers on top of language models take it."""

    def forward(s, x, lengths):
        h = torch.tanh(s.lin(x))
        return s.out(h[torch.arange(h.shape[0]), lengths - 1])

    return (
        Net(forward, lin=nn.Linear(3, 4), out=nn.Linear(4, 5)),
        (torch.randn(b, 5, 3), labels(b, 4) + 1),
        labels(b),
        F.cross_entropy,
    )


Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    steps: int = 1


class Record(OrderedDict):
    """A mapping whose entries are attributes as well."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def structured(output, b):
    def forward(s, x):
        h = torch.tanh(s.a(x))
        return output(s.b(h), h)

    return Net(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 5)), torch.randn(b, 4), labels(b)


@case("output")
def tuple_output(b):
    return *structured(
        lambda logits, h: (logits, None, [h]), b
    ), lambda o, y: F.cross_entropy(o[0], y) + o[2][0].square().sum()


@case("output")
def named_tuple_output(b):
    return *structured(Pair, b), lambda o, y: F.cross_entropy(o.logits, y) + o.hidden.square().sum()


@case("output")
def dict_output_with_losses_by_example(b):
    def loss(o, y):
        return F.cross_entropy(o["logits"], y, reduction="none") + wave(o["aux"]["hidden"])

    return *structured(lambda logits, h: {"logits": logits, "aux": {"hidden": h, "none": None}}, b), loss


@case("output")
def dataclass_output(b):
    return *structured(Output, b), lambda o, y: F.cross_entropy(o.logits, y) + o.hidden.square().sum()


@case("output")
def dataclass_output_with_losses_by_example(b):
    return *structured(Output, b), lambda o, y: F.cross_entropy(o.logits, y, reduction="none") * o.steps


@case("output")
def record_output(b):
    return *structured(lambda logits, h: Record(logits=logits, hidden=h), b), lambda o, y: F.cross_entropy(
        o.logits, y
    )


@case("output")
def output_with_an_unused_branch(b):
    def forward(s, x):
        return s.a(x), s.b(x).argmax(1), s.b(x)

    return (
        Net(forward, a=nn.Linear(4, 5), b=nn.Linear(4, 3)),
        torch.randn(b, 4),
        labels(b),
        lambda o, y: F.cross_entropy(o[0], y),
    )


@case("output")
def output_used_twice(b):
    def forward(s, x):
        h = s.a(x)
        return h, h.tanh(), h

    return (
        Net(forward, a=nn.Linear(4, 5)),
        torch.randn(b, 4),
        None,
        lambda o, y: wave(o[0]) * wave(o[1]) + wave(o[2]),
    )


@case("output")
def model_that_returns_its_input(b):
    net = Net(lambda s, x: (x, s.lin(x)), lin=nn.Linear(4, 4))
    return net, torch.randn(b, 4), None, lambda o, y: wave(o[0] * o[1])


@case("output")
def model_that_returns_its_losses(b):
    net = Net(lambda s, x, y: F.cross_entropy(s.lin(x), y, reduction="none"), lin=nn.Linear(4, 5))
    return net, (torch.randn(b, 4), labels(b)), None, lambda out, y: out


@case("loss")
def targets_in_a_structure(b):
    def loss(out, y):
        return (
            F.cross_entropy(out[:, :5], y["class"], reduction="none") + (out[:, 5:] - y["box"]).abs().sum(1)
        ) * y["weight"]

    y = {"class": labels(b), "box": torch.randn(b, 2), "weight": torch.rand(b), "note": None}
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 7)), torch.randn(b, 4), y, loss


@case("loss")
def scalar_loss_of_a_structure(b):
    def loss(out, y):
        return F.cross_entropy(out[:, :5], y[0]) + F.l1_loss(out[:, 5:], y[1], reduction="sum")

    return nn.Linear(4, 7), torch.randn(b, 4), (labels(b), torch.randn(b, 2)), loss


@case("loss")
def losses_over_tokens(b):
    """(B, T) losses: summed over T for each example."""

    def loss(out, y):
        return F.cross_entropy(out.transpose(1, 2), y, reduction="none", ignore_index=1)

    return nn.Linear(3, 5), torch.randn(b, 6, 3), ids(b, 6, 5), loss


@case("loss")
def weighted_cross_entropy_with_ignored_labels(b):
    def loss(out, y):
        return F.cross_entropy(out.transpose(1, 2), y, weight=torch.arange(1.0, 6.0), ignore_index=2)

    return nn.Linear(3, 5), torch.randn(b, 6, 3), ids(b, 6, 5), loss


@case("wrapped", "may_refuse", "loop_may_refuse")
def data_parallel(b):
    return nn.DataParallel(nn.Sequential(nn.Linear(4, 5), nn.Tanh())), torch.randn(b, 4), None, wave


@case("half", tol=0.05)
def parameters_in_half_precision(b):
    net = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5)
    ).bfloat16()
    return net, torch.randn(b, 2, 5).bfloat16(), labels(b), F.cross_entropy


@case("half", tol=1e-4)
def parameters_in_single_precision(b):
    net = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 5)
    ).float()
    return net, torch.randn(b, 2, 4, 4).float(), labels(b), F.cross_entropy


@case("half", tol=0.05)
def autocast_inside_forward(b):
    def forward(s, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.tanh(s.a(x))
        return s.b(h.float())

    return (
        Net(forward, a=nn.Linear(4, 6).float(), b=nn.Linear(6, 5).float()),
        torch.randn(b, 4).float(),
        labels(b),
        F.cross_entropy,
    )


@case("input")
def ids_in_a_table_of_floats(b):
    """Which no noise may be added to."""
    net = Net(
        lambda s, x: s.out(torch.cat([s.ids(x[:, 0].long()), x[:, 1:]], 1)),
        ids=nn.Embedding(100, 3),
        out=nn.Linear(6, 5),
    )
    numbers = torch.randn(b, 3)
    return net, torch.cat([ids(b, 1, 100).to(numbers), numbers], 1), labels(b), F.cross_entropy


@case("input")
def probabilities(b):
    def forward(s, x):
        h = s.out(x)
        return h + F.binary_cross_entropy(x, torch.full_like(x, 0.5), reduction="none")[:, :1]

    return Net(forward, out=nn.Linear(4, 5)), torch.rand(b, 4), labels(b), F.cross_entropy
