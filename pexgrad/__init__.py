"""Per-example gradients in PyTorch: exact, fast, and without touching the module."""

from . import rows as rows
from . import rules as rules
from .api import clipped_grad as clipped_grad
from .api import per_example_grad as per_example_grad
from .api import per_example_grad_norm as per_example_grad_norm
from .api import per_example_jacobian as per_example_jacobian
from .api import per_example_value_and_grad as per_example_value_and_grad
from .batching import chunked as chunked
from .batching import ensemble as ensemble
from .batching import over_loader as over_loader
from .batching import stack_params as stack_params
from .calls.results import Clipped as Clipped
from .errors import InputError as InputError
from .errors import LossError as LossError
from .errors import MixedExamplesError as MixedExamplesError
from .errors import PexgradError as PexgradError
from .errors import TraceError as TraceError
from .errors import VerificationError as VerificationError
from .inputs.arguments import Options as Options
from .measures import NoiseScale as NoiseScale
from .measures import dataset_moments as dataset_moments
from .measures import fisher_diagonal as fisher_diagonal
from .measures import grand_scores as grand_scores
from .measures import noise_scale as noise_scale
from .measures import tracin as tracin
from .noise import add_noise as add_noise
from .operator.jacobian import Jacobian as Jacobian
from .operator.jacobian import Moments as Moments
from .projection import project as project
from .sampling import ImportanceSample as ImportanceSample
from .sampling import importance_sample as importance_sample

__version__ = "0.1.0"
