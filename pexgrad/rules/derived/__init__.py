"""Pullbacks: from the factor of a value that is computed from parameters to the factors of what it is computed from.

    w = u v        G_u = G v^H,  G_v = u^H G        a sum over t of g[t] (x) x[t] stays one:
                   G_u = sum over t of g[t] (x) (x[t] v^H),  G_v = sum over t of (u^H g[t]) (x) x[t]

    w = m u        G_u = m G, elementwise
    n = |u[o]|     G_u[o] = g u[o] / |u[o]|, the same line for every example but for a number

A low-rank update that is merged into its weight, w + u v, has no row of w's size this way.
"""

from . import lookups as lookups
from . import multiples as multiples
from . import products as products
from . import reductions as reductions
from . import shapes as shapes
