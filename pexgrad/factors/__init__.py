"""Factors: the per-example gradient of one use of one parameter, unevaluated. All the algebra lives here."""

from ._base import BLOCK_BYTES as BLOCK_BYTES
from ._base import PIECE_BYTES as PIECE_BYTES
from ._base import Factor as Factor
from ._base import slices as slices
from .balance import cancels as cancels
from .broadcast import Broadcast as Broadcast
from .broadcast import repeats_as_positions as repeats_as_positions
from .broadcast import summed_to as summed_to
from .conv import Conv as Conv
from .convolving import Geometry as Geometry
from .dense import Replay as Replay
from .dense import Rows as Rows
from .dense import WideRows as WideRows
from .lines import Lines as Lines
from .multiple import Multiple as Multiple
from .multiple import scaled as scaled
from .outer import Outer as Outer
from .permuted import Permuted as Permuted
from .scatter import Scatter as Scatter
