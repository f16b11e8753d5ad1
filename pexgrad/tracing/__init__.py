"""From a model's code to a graph of ATen operations in which only the batch size is open."""
