"""The paper's experiments, the library's strategies and every peer, side by side: `python -m benchmarks --help`."""
