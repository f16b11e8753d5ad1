"""The Jacobian of the losses, unevaluated, and what is computed from it without rows."""
