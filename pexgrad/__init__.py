"""Per-example gradients in PyTorch: exact, fast, and without touching the module."""

from . import rules as rules
from .errors import InputError as InputError
from .errors import LossError as LossError
from .errors import MixedExamplesError as MixedExamplesError
from .errors import PexgradError as PexgradError
from .errors import TraceError as TraceError
from .errors import VerificationError as VerificationError
from .transforms import clipped_grad as clipped_grad
from .transforms import per_example_grad as per_example_grad
from .transforms import per_example_value_and_grad as per_example_value_and_grad

__version__ = "0.1.0"
