"""Property tests for models and rules: strategies that draw them, and checks that compare them with the definition.

>>> @given(models(), st.data())
... def test_any_model(model, data):
...     x, y = data.draw(batches(model))
...     check_per_example_grad(model, x, y)

What the strategies draw prints as code, so that a failing test ends with a small model to paste. The strategies need
hypothesis, which `pip install "pexgrad[test]"` brings; the checks do not.
"""

from ..extend import check_rule as check_rule
from .checks import check_per_example_grad as check_per_example_grad
from .configs import LayerConfig as LayerConfig
from .configs import ModelConfig as ModelConfig
from .drawing import batches as batches
from .drawing import conv_configs as conv_configs
from .drawing import linear_configs as linear_configs
from .drawing import models as models
from .drawing import parameters as parameters

__all__ = [
    "LayerConfig", "ModelConfig", "batches", "check_per_example_grad", "check_rule", "conv_configs", "linear_configs", "models",
    "parameters",
]  # fmt: skip
