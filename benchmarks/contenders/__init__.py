"""Every way to per-example gradients that is measured. A contender is a function of a problem and a kind of work that
returns a call with no arguments: what the call does is timed, what comes before is not.
"""

from benchmarks.contenders import jax as jax
from benchmarks.contenders import ours as ours
from benchmarks.contenders import peers as peers
from benchmarks.contenders.registry import CONTENDERS as CONTENDERS
from benchmarks.contenders.registry import Refused as Refused
from benchmarks.contenders.registry import reason as reason
