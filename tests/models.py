"""The one table of models: adding a case to `cases/` adds it to every test that runs over the table."""

from __future__ import annotations

import pytest
from cases import (  # noqa: F401 - importing a family adds its cases
    attention,
    code,
    conv,
    dense,
    derived,
    embedding,
    inner,
    inputs,
    norm,
    parameters,
    placement,
    products,
    random,
    readings,
    recurrent,
    refused,
)
from cases.case import TABLE, Case

# Names or tags of cases that the library does not answer yet. Delete an entry when it lands.
NOT_YET: dict[str, str] = {}


def select(*tags, without=("refused", "random")):
    """The cases that have every one of `tags` and none of `without`."""
    return [c for c in TABLE.values() if set(tags) <= c.tags and not c.tags & set(without)]


def pick(names):
    """The cases of these names, written with spaces between them."""
    return [TABLE[name] for name in names.split()]


def each(cases):
    """Parametrise a test over cases; tests of one module that share a case run one after the other."""
    params = [pytest.param(c, id=c.name, marks=marks(c)) for c in cases]
    return pytest.mark.parametrize("case", params, scope="module")


def marks(case: Case):
    found = [pytest.mark.filterwarnings(w) for w in case.warns]
    return found + [
        pytest.mark.skip(reason=NOT_YET[k]) for k in sorted({case.name, *case.tags} & set(NOT_YET))
    ]
