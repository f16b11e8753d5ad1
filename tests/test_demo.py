"""The demo: its command line, the pieces of DP-SGD, and that it learns."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from pexgrad import demo
from pexgrad.__main__ import DEMO_EXTRA, main
from pexgrad.demo.options import Options

for library in sorted(DEMO_EXTRA):
    pytest.importorskip(library)

from pexgrad.demo import dpsgd, run  # noqa: E402 - they need the extra
from pexgrad.demo.digits import small_cnn, train_and_test  # noqa: E402


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def norm(tensors):
    return torch.cat([t.flatten() for t in tensors.values()]).norm()


def start(model):
    return {name: value.detach() for name, value in model.named_parameters()}


# --- the whole run -----------------------------------------------------------------------------------


def test_defaults_are_accurate_and_private():
    private, plain = run.main(Options(seed=0))
    assert private.epsilon < 3
    assert private.accuracy > 0.85
    assert plain.accuracy > 0.95


def test_command_line_prints_the_table(capsys):
    assert main(["demo", "--epochs", "0.5", "--seed", "1"]) == 0
    table = capsys.readouterr().out.splitlines()[1:]
    assert [row[:18].strip() for row in table] == [
        "", "test accuracy", "epsilon", "delta", "noise multiplier", "max norm", "steps", "seconds",
    ]  # fmt: skip
    assert table[6].split() == ["steps", "3", "3"]  # 0.5 epochs at a rate of 256/1437


def test_seed_repeats_a_run():
    options = Options(epochs=0.5, seed=3)
    first, second = run.main(options)[0], run.main(options)[0]
    assert (first.accuracy, first.epsilon) == (second.accuracy, second.epsilon)


def test_without_seed_runs_differ():
    assert run.seeded(None).initial_seed() != run.seeded(None).initial_seed()


def test_runs_through_empty_batches():
    private, _ = run.main(Options(epochs=0.01, batch_size=1, seed=0))
    assert private.steps == 14  # at an expected size of 1, a third of them are empty


# --- the pieces --------------------------------------------------------------------------------------


def test_poisson_batches_vary_in_size(generator):
    sizes = torch.tensor(
        [len(b) for b in dpsgd.poisson_batches(1000, 0.05, 400, generator)], dtype=torch.double
    )
    assert abs(sizes.mean() - 50) < 2
    assert abs(sizes.var() - 1000 * 0.05 * 0.95) < 10


def test_poisson_batches_can_be_empty_and_never_repeat_an_example(generator):
    batches = list(dpsgd.poisson_batches(10, 0.1, 100, generator))
    assert any(len(batch) == 0 for batch in batches)
    assert all(len(batch.unique()) == len(batch) for batch in batches)


def test_empty_batch_is_a_step_of_noise(generator):
    model, (train, _) = small_cnn(), train_and_test()
    gradient = dpsgd.private_gradient(model, 0.5, 3.0, 100, generator)
    grads = gradient(start(model), train.x[:0], train.y[:0])
    noise = torch.cat([g.flatten() for g in grads.values()])
    assert noise.std() == pytest.approx(0.5 * 3.0 / 100, rel=0.05)


def test_one_example_moves_the_mean_by_at_most_its_share(generator):
    model, (train, _) = small_cnn(), train_and_test()
    gradient, params = dpsgd.private_gradient(model, 0.1, 0.0, 256, generator), start(model)
    with_it, without = (gradient(params, train.x[b:20], train.y[b:20]) for b in (0, 1))
    moved = norm({name: with_it[name] - without[name] for name in params})
    assert moved == pytest.approx(0.1 / 256, rel=1e-3)  # all are clipped here


def test_private_gradient_without_clipping_and_noise_is_the_plain_one(generator):
    model, (train, _) = small_cnn(), train_and_test()
    params, x, y = start(model), train.x[:20], train.y[:20]
    private = dpsgd.private_gradient(model, 1e3, 0.0, 256, generator)(params, x, y)
    torch.testing.assert_close(private, dpsgd.plain_gradient(model, 256)(params, x, y), rtol=1e-3, atol=1e-6)


def test_training_leaves_the_model_as_it_was(generator):
    options, model, (train, _) = Options(), small_cnn(), train_and_test()
    before = {name: value.clone() for name, value in start(model).items()}
    batches = list(dpsgd.poisson_batches(len(train.y), 0.1, 2, generator))
    trained = run.descend(
        model, dpsgd.private_gradient(model, 1.0, 1.0, 144, generator), train, batches, options
    )
    torch.testing.assert_close(start(model), before, rtol=0, atol=0)
    assert all((trained[name] != before[name]).any() for name in before)


def test_sgd_is_torchs():
    weight, grads = torch.tensor([1.0, -2.0]), [torch.tensor([0.5, 1.0]), torch.tensor([-1.0, 2.0])]
    theirs = weight.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    ours, velocity = {"w": weight}, {"w": torch.zeros(2)}
    for grad in grads:
        theirs.grad = grad.clone()
        optimizer.step()
        ours, velocity = dpsgd.sgd(ours, velocity, {"w": grad}, 0.1, 0.9)
    torch.testing.assert_close(ours["w"], theirs.detach())


def test_epsilon_of_one_full_batch_is_that_of_the_gaussian_mechanism():
    def phi(z):
        return 0.5 * math.erfc(-z / math.sqrt(2))

    sigma, delta = 2.0, 1e-5
    epsilon = dpsgd.epsilon(1.0, sigma, 1, delta)
    # Balle and Wang 2018, theorem 5, for sensitivity 1
    exact = phi(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * phi(-0.5 / sigma - epsilon * sigma)
    assert exact == pytest.approx(delta, rel=1e-2)


def test_epsilon_grows_with_steps_and_rate_and_shrinks_with_noise():
    base = dpsgd.epsilon(0.1, 2.0, 50, 1e-5)
    assert dpsgd.epsilon(0.1, 2.0, 100, 1e-5) > base
    assert dpsgd.epsilon(0.2, 2.0, 50, 1e-5) > base
    assert dpsgd.epsilon(0.1, 3.0, 50, 1e-5) < base


def test_digits_are_split_once_and_scaled_by_a_constant():
    train, test = train_and_test()
    assert train.x.shape == (1437, 1, 8, 8)
    assert test.x.shape == (360, 1, 8, 8)
    assert train.x.min() == 0
    assert train.x.max() == 1
    torch.testing.assert_close(train_and_test()[0].y, train.y, rtol=0, atol=0)
    assert sum(p.numel() for p in small_cnn().parameters()) == 3818


# --- the command line --------------------------------------------------------------------------------


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])
    text = capsys.readouterr().out
    for name in Options.__dataclass_fields__:
        assert f"--{name.replace('_', '-')} N  " in text


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--epochs", "0", "0 is not a positive, finite number"),
        ("--batch-size", "-3", "-3 is not a positive, finite number"),
        ("--batch-size", "2.5", "invalid int value: '2.5'"),
        ("--max-norm", "inf", "inf is not a positive, finite number"),
        ("--noise-multiplier", "nan", "nan is not a positive, finite number"),
        ("--delta", "1", "--delta is 1.0, and has to be below 1"),
        ("--momentum", "1", "--momentum is 1.0, and has to lie in [0, 1)"),
    ],
)
def test_bad_options_are_refused(option, value, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", option, value])
    assert says in capsys.readouterr().err


def test_batches_larger_than_the_data_are_refused():
    with pytest.raises(SystemExit, match="--batch-size is 2000, but there are only 1437 training examples"):
        main(["demo", "--batch-size", "2000"])


def test_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "pexgrad.demo.run")
    monkeypatch.delattr(demo, "run")
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    assert main(["demo"]) == 1
    assert 'The demo needs tqdm: pip install "pexgrad[demo]"' in capsys.readouterr().err
