"""Which models of torchvision, timm and transformers the library takes, and whether its rows are right.

`python -m benchmarks.zoo` runs what has not been run yet and writes docs/zoo.md.
"""
