"""Examples that mix are refused by name: the operation, the module, the line, and what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, labels, wave
from oracle import assert_rows_equal, rows_of

import pexgrad
from pexgrad.stages import few_examples

pytestmark = pytest.mark.usefixtures("double")


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def refusal(model, x, y, loss=torch.nn.functional.cross_entropy):
    with pytest.raises(pexgrad.PexgradError) as info:
        pexgrad.per_example_grad(model, loss)(dict(model.named_parameters()), x, y)
    return str(info.value)


def test_the_module_and_the_operation_that_mixed_are_named():
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), Centre()), nn.Linear(6, 5))
    message = refusal(model, torch.randn(3, 4), labels(3))
    assert "1.1" in message and "mean" in message


def test_the_line_that_mixed_is_named():
    model = nn.Sequential(nn.Linear(4, 6), Centre(), nn.Linear(6, 5))
    assert "test_probe.py:" in refusal(model, torch.randn(3, 4), labels(3))


def test_the_batch_norm_in_train_is_named_with_its_remedy():
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), nn.Flatten(), nn.Linear(27, 5)
    )
    message = refusal(model, torch.randn(3, 2, 5, 5), labels(3))
    assert "1.1" in message and "GroupNorm" in message and "eval" in message


@pytest.mark.parametrize("b", [1, 2])
def test_mixing_is_found_at_every_batch_size(b):
    """One example mixes with none, yet the same function would be called on more."""
    model = nn.Sequential(nn.Linear(4, 6), Centre(), nn.Linear(6, 5))
    refusal(model, torch.randn(b, 4), labels(b))


def test_mixing_of_what_does_not_reach_the_output_is_no_harm():
    def forward(s, x):
        s.statistics = x.mean(0)
        return s.lin(x)

    model = Net(forward, lin=nn.Linear(4, 5))
    x, y = torch.randn(3, 4), labels(3)
    rows = pexgrad.per_example_grad(model, wave)(dict(model.named_parameters()), x, y)
    assert_rows_equal(rows, rows_of(model, wave, x, y))


def test_mixing_through_integers():
    """The order of the batch decides which example gets which row of the table."""
    model = Net(lambda s, x: s.table[x.sum(1).argsort()], table=nn.Parameter(torch.randn(5, 4)))
    refusal(model, torch.randn(3, 4), None, wave)


def test_mixing_in_one_element_of_the_output_only():
    def forward(s, x):
        h = s.lin(x)
        return torch.cat([h, h[:, :1].mean(0, keepdim=True).expand(h.shape[0], 1)], 1)

    refusal(Net(forward, lin=nn.Linear(4, 5)), torch.randn(3, 4), None, wave)


def test_mixing_under_dropout():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), Centre(), nn.Linear(6, 5))
    refusal(model, torch.randn(3, 4), labels(3))


def test_mixing_that_a_shift_of_all_numbers_would_not_show():
    """Inputs of one size, as of signs: numbers are drawn for the noise although the model's own stand still meanwhile."""

    def forward(s, x):
        centred = x - x.mean(1, keepdim=True)
        return s.lin(centred + centred.flip(0))

    model = Net(forward, lin=nn.Linear(4, 5))
    x = torch.randn(4, 4).sign()
    with pytest.raises(pexgrad.MixedExamplesError, match="they mix first in flip"):
        pexgrad.per_example_grad(model, verify=False)(dict(model.named_parameters()), x, labels(4))


def test_shuffling_is_mixing():
    model = Net(lambda s, x: 0.5 * (h := s.lin(x)) + 0.5 * h[torch.randperm(x.shape[0])], lin=nn.Linear(4, 5))
    refusal(model, torch.randn(3, 4), labels(3))


def test_tokens_of_all_examples_sorted_by_expert_are_refused_with_a_remedy():
    """No example depends on another, but whose a token is depends on the data."""

    def forward(s, x):
        tokens = x.flatten(0, 1)
        expert = s.gate(tokens).argmax(1)
        order = expert.argsort(stable=True)
        chosen = F.one_hot(expert[order], 3).to(x.dtype)
        out = torch.einsum("ne,nc,ecd->nd", chosen, tokens[order], s.experts)
        return torch.zeros_like(out).index_copy(0, order, out).view(len(x), 4, 5).mean(1)

    model, x = Net(forward, gate=nn.Linear(6, 3)), torch.randn(5, 4, 6)
    model.experts = nn.Parameter(torch.randn(3, 6, 5))
    message = refusal(model, x, labels(5))
    assert "only change places" in message and 'strategy="naive"' in message
    naive = pexgrad.per_example_grad(model, strategy="naive")
    rows = naive(dict(model.named_parameters()), x, labels(5))
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, labels(5)))


def test_examples_mixed_by_the_loss():
    def loss(out, y):
        return (out - out.mean(0)).square().sum(1)

    assert "alone" in refusal(nn.Linear(4, 5), torch.randn(3, 4), None, loss)


def test_a_loss_divided_by_something_of_the_whole_batch():
    """What its form would tell, with `verify`, the first targets that differ tell without it."""

    def loss(out, y):
        return torch.nn.functional.cross_entropy(out, y, reduction="none") / (1 + y.max())

    model = nn.Linear(4, 5)
    fn = pexgrad.per_example_grad(model, loss, verify=False)
    params, x = dict(model.named_parameters()), torch.randn(4, 4)
    fn(params, x, torch.tensor([2, 2, 2, 2]))  # which tells nothing
    with pytest.raises(pexgrad.MixedExamplesError, match="alone"):
        fn(params, x, torch.tensor([2, 2, 3, 2]))


OF_THE_BATCH = {  # numbers of the whole batch, from a mask (B, T) or lengths (B,)
    "sum": lambda m: m.sum(),
    "largest": lambda m: m.reshape(m.shape[0], -1).sum(1).max(),
    "smallest": lambda m: m.reshape(m.shape[0], -1).sum(1).min(),
    "any": lambda m: m.bool().any(0).sum(),
    "all": lambda m: m.bool().all(0).sum(),
    "first": lambda m: m[0].sum(),
    "before": lambda m: m.reshape(m.shape[0], -1).sum(1).cumsum(0)[:, None],
}
MASKS = {
    "mask": (torch.ones(5, 4, dtype=torch.bool), torch.arange(4) < torch.tensor([4, 4, 4, 2, 3])[:, None]),
    "ones and zeros": (torch.ones(5, 4).long(), (torch.arange(4) < torch.tensor([4, 4, 2, 4, 4])[:, None]).long()),
    "lengths": (torch.full((5,), 7), torch.tensor([7, 7, 7, 3, 5])),
}  # fmt: skip


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("how", "kind"),
    [(h, k) for h in OF_THE_BATCH for k in MASKS if h not in ("any", "all") or k != "lengths"],
)
def test_mixing_through_inputs_that_noise_cannot_change(how, kind, verify):
    """Also where the first batch has nothing that would tell: all its masks are full."""
    alike, varied = MASKS[kind]
    number = OF_THE_BATCH[how]
    model = Net(lambda s, x, mask: s.lin(x) * (1 + number(mask)), lin=nn.Linear(4, 5))
    params, x, y = dict(model.named_parameters()), torch.randn(5, 4), labels(5)
    with pytest.raises(pexgrad.PexgradError):
        pexgrad.per_example_grad(model, verify=verify)(params, (x, varied), y)
    fn = pexgrad.per_example_grad(model, verify=verify)
    try:
        rows = fn(params, (x, alike), y)
    except pexgrad.PexgradError:
        return
    if verify:
        assert_rows_equal(rows, rows_of(model, torch.nn.functional.cross_entropy, (x, alike), y))
    with pytest.raises(pexgrad.PexgradError):
        fn(params, (x, varied), y)


def test_full_masks_and_then_padded_ones_are_right_in_a_sound_model():
    """Of which the graph tells that they do not mix, so that there is nothing to probe anew."""
    model = Net(
        lambda s, x, m: (s.lin(x) * m[..., None]).sum(1) / m.sum(1, keepdim=True), lin=nn.Linear(4, 5)
    )
    params, x, y = dict(model.named_parameters()), torch.randn(3, 6, 4), labels(3)
    fn = pexgrad.per_example_grad(model)
    full = torch.ones(3, 6, dtype=torch.bool)
    padded = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    for mask in (full, padded, full, padded, full[:, :1].expand(3, 6)):
        want = rows_of(model, torch.nn.functional.cross_entropy, (x, mask.contiguous()), y)
        assert_rows_equal(fn(params, (x, mask.contiguous()), y), want)
        assert fn.trace_count == 1


def test_a_special_value_in_the_batch_does_not_hide_mixing():
    """All examples alike: nothing changes when they are exchanged."""
    model = nn.Sequential(nn.Linear(4, 6), Centre(), nn.Linear(6, 5))
    refusal(model, torch.zeros(3, 4), labels(3))
    refusal(model, torch.ones(3, 4), torch.zeros(3, dtype=torch.long))


def test_special_values_do_not_make_a_sound_model_suspect():
    """Padding, zeros, infinities in a mask and labels that are ignored."""
    model = Net(
        lambda s, x, mask: s.lin(torch.softmax(x.masked_fill(mask, -torch.inf), -1).nan_to_num()),
        lin=nn.Linear(4, 5),
    )
    x, mask = torch.zeros(3, 4), torch.tensor([[False] * 4, [True] * 4, [True, False, True, True]])
    rows = pexgrad.per_example_grad(model, wave)(dict(model.named_parameters()), (x, mask), None)
    assert_rows_equal(rows, rows_of(model, wave, (x, mask), None))


def test_a_users_operation_named_like_a_random_one_is_run_as_it_is():
    @torch.library.custom_op("pexgrad_tests::normal", mutates_args=())
    def normal(v: torch.Tensor) -> torch.Tensor:
        return v - v.mean(0)

    normal.register_fake(lambda v: torch.empty_like(v))
    normal.register_autograd(lambda ctx, g: g - g.mean(0))
    model = torch.nn.Linear(4, 3)
    mixing = lambda p, x: normal(x @ p["weight"].T)  # noqa: E731
    with pytest.raises(pexgrad.MixedExamplesError):
        pexgrad.per_example_grad(mixing)(
            dict(model.named_parameters()), torch.randn(4, 4), torch.arange(4) % 3
        )


def test_no_noise_where_ids_may_be_among_the_numbers(monkeypatch):
    """As on a GPU, where an index out of range is the end of the process."""
    monkeypatch.setattr(few_examples, "_takes_noise", lambda t: not few_examples.may_be_ids(t))
    table = nn.Embedding(100, 3)
    net = Net(lambda s, x: s.out(torch.cat([table(x[:, 0].long()), x], 1)), table=table, out=nn.Linear(5, 4))
    params = dict(net.named_parameters())
    for first in (1, 2, 5):
        fn = pexgrad.per_example_grad(net)
        for b in (first, 5):
            x, y = torch.cat([torch.randint(2, 100, (b, 1)).double(), torch.randn(b, 1)], 1), labels(b, 4)
            assert_rows_equal(fn(params, x, y), rows_of(net, F.cross_entropy, x, y))
    mixing = Net(lambda s, x: s.out(x - x.mean(0)), out=nn.Linear(3, 4))
    with pytest.raises(pexgrad.MixedExamplesError):
        pexgrad.per_example_grad(mixing)(
            dict(mixing.named_parameters()), torch.randint(2, 100, (5, 3)).double(), labels(5, 4)
        )
    assert [few_examples.may_be_ids(torch.tensor(v)) for v in ([0.0, 1.0], [0.5, 3.0], [1, 7])] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("verify", [True, False])
def test_parameters_whose_domain_a_change_of_a_tenth_leaves(verify):
    """A covariance that is nearly singular, probabilities near one."""

    def model(p, x):
        likely = F.binary_cross_entropy(p["q"], torch.tensor([0.0, 1.0, 0.0, 1.0]).to(x), reduction="none")
        return x @ torch.linalg.cholesky(p["covariance"]) * likely

    u = torch.randn(4, 2)
    params = {"covariance": u @ u.T + 1e-3 * torch.eye(4), "q": torch.tensor([0.01, 0.99, 0.02, 0.999])}
    loss, x = lambda out, y: out.square().sum(1), torch.randn(3, 4)
    got, want = (
        pexgrad.per_example_grad(model, loss, strategy=s, verify=verify)(params, x) for s in ("crb", "naive")
    )
    assert_rows_equal(got, want)
