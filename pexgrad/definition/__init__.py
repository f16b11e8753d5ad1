"""The gradient of each example's own loss by ordinary autograd, and the checks of everything else against it."""
