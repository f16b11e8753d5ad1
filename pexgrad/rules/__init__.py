"""The rules, one file for each family of operations."""

from . import conv as conv
from . import derived as derived
from . import distance as distance
from . import elementwise as elementwise
from . import embedding as embedding
from . import linear as linear
from . import norm as norm
from . import product as product
