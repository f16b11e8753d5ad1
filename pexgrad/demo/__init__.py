"""Private training on real handwritten digits, in four short files: options, digits, dpsgd, run."""
