"""The examples run on real data and show what they say they show."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).parent.parent / "examples"
SHARED = "training"


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the `main` of an example, which is found as it is when run as a script."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def main(name):
        result = importlib.import_module(name).main()
        assert capsys.readouterr().out
        return result

    return main


def test_every_example_is_run_here():
    here = Path(__file__).read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {SHARED}
    assert names and all(f'run("{name}")' in here for name in names)


def test_the_noise_scale_grows_in_training(run):
    first, *_, last = run("noise_scale")[1:]
    assert last > first > 1


def test_importance_sampling_takes_a_smaller_error(run):
    errors = run("importance_sampling")
    assert 2 * errors[0.1] < errors[1.0]


def test_examples_with_small_scores_teach_less(run):
    accuracy = run("pruning")
    assert accuracy["largest scores"] > accuracy["smallest scores"] + 0.05


def test_mislabelled_examples_have_low_influence(run):
    assert run("influence") > 3 * 100 / 1437  # the part that chance would find


def test_the_fisher_diagonal_predicts_how_sensitive_a_layer_is(run):
    for predicted, _, measured in run("fisher").values():
        assert 0.5 < predicted / measured < 2


def test_projections_keep_inner_products_and_find_the_class(run):
    error, agreement = run("projection")
    assert error < 1.5 * 512**-0.5
    assert agreement > 0.9


def test_one_step_from_a_learned_start_teaches_more(run):
    before, after = run("meta_learning")
    assert after > before + 0.05
